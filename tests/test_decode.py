"""The own decode forward against transformers' full forward and `generate`, its cache, and what it leaves to them."""

import itertools

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from fp8lab import linear
from fp8lab.conversion import restore
from fp8lab.models import load_model, load_tokenizer
from fp8lab.precision import PrecisionPlan
from fp8lab.quantizers import BlockQuantizer
from fp8lab.rollout import NativeEngine, SamplingParams
from fp8lab.rollout.decode import FEW_TOKENS, KEPT, SMALLEST_PRODUCT, Decoder, KVCache, attend, unsupported
from fp8lab.trainer import Trainer

SIZES = {
    "vocab_size": 128, "hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
MOE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
KINDS = {
    "llama": {"tie_word_embeddings": True},
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen3": {},
    "mixtral": {**MOE, "sliding_window": None},
    "qwen2_moe": {**MOE, "shared_expert_intermediate_size": 64},
    "qwen3_moe": MOE,
}
PROMPTS = [[5, 9, 17], [30], [7, 7, 7, 7, 7, 7, 8], [99, 3]]


def random_model(kind: str, **changes):
    torch.manual_seed(0)
    config = CONFIG_MAPPING[kind](**{**SIZES, **KINDS.get(kind, {}), **changes})
    model = AutoModelForCausalLM.from_config(config).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name or "bias" in name:
            torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.2)  # ones would hide a missing norm
    model.generation_config.eos_token_id = 2
    return model


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("tiny-llama")


@pytest.mark.parametrize("kind", KINDS)
def test_logprobs_and_greedy_tokens_equal_transformers(kind, tokenizer):
    model = random_model(kind)
    engine = NativeEngine(model, PrecisionPlan.preset("bf16"), tokenizer=tokenizer, forward="own")
    restore(engine.model)  # float32 linears
    rollout = engine.generate(PROMPTS, SamplingParams(n=3, max_tokens=8, temperature=1.3), seed=1)
    compared = 0
    for row, (start, end) in enumerate(zip(rollout.prompt_lengths.tolist(), rollout.lengths.tolist(), strict=True)):
        tokens = rollout.tokens[row, :end]
        with torch.no_grad():
            expected = (model(tokens[None], use_cache=False).logits[0, :-1].double() / 1.3).log_softmax(-1)
        expected = expected.gather(1, tokens[1:, None]).squeeze(1)[start - 1 :].float()
        torch.testing.assert_close(rollout.logprobs[row, start:end], expected, atol=1e-4, rtol=0)
        compared += len(expected)
    assert compared > 60
    greedy = engine.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=8), seed=0)
    for row, prompt in enumerate(PROMPTS):
        ids = torch.tensor([prompt])
        wanted = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=8)[0]
        assert greedy.tokens[row, : greedy.lengths[row]].tolist() == wanted.tolist()


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-qwen3-moe"])
def test_both_forwards_sample_the_same(name):
    own, theirs = (NativeEngine(name, PrecisionPlan.preset("bf16"), forward=f) for f in ("own", "transformers"))
    prompts, sampling = ["47+38=", "5-9=", "12+7="], SamplingParams(n=4, max_tokens=6)
    a, b = own.generate(prompts, sampling, seed=3), theirs.generate(prompts, sampling, seed=3)
    assert torch.equal(a.tokens, b.tokens)
    torch.testing.assert_close(a.logprobs, b.logprobs, atol=0.02, rtol=0)
    assert (own.stats()["forward"], theirs.stats()["forward"]) == ("own", "transformers")


def test_fp8_gap_to_the_trainer(record_property):
    """Last bits differ between decode and training shapes and may flip FP8 codes; mean, maximum and share are kept."""
    plan = PrecisionPlan.preset("fp8-e2e")
    trainer = Trainer("tiny-llama", plan)
    engine = NativeEngine(trainer.model, plan, tokenizer=trainer.tokenizer)
    rollout = engine.generate([f"{i}+{7 * i % 90}=" for i in range(40)], SamplingParams(n=8, max_tokens=6), seed=2)
    gap = (rollout.logprobs - trainer.score(rollout))[rollout.mask].abs()
    record_property("mean", gap.mean().item())
    record_property("max", gap.max().item())
    record_property("share_above_1e-3", (gap > 1e-3).float().mean().item())
    assert len(gap) > 500 and gap.mean() <= 2e-3


def test_how_many_fp8_codes_last_bits_flip(monkeypatch, record_property):
    """Activation codes of every FP8 operand, token by token while sampling, and of the whole sequence at once."""
    plan = PrecisionPlan.preset("fp8-e2e")
    trainer = Trainer("tiny-llama", plan)
    engine = NativeEngine(trainer.model, plan, tokenizer=trainer.tokenizer)
    layers = trainer.model.config.num_hidden_layers
    recorded, round_operand = [], linear.round_operand

    def recording(x, fmt, precision):
        if fmt == "e4m3":
            recorded.append(BlockQuantizer((1, precision.group)).quantize(x).codes)
        return round_operand(x, fmt, precision)

    monkeypatch.setattr(linear, "round_operand", recording)
    flipped = compared = 0
    for seed in range(6):
        recorded.clear()
        rollout = engine.generate([f"{30 + seed}+{7 * seed}="], SamplingParams(n=1, max_tokens=6), seed=seed)
        operands = 4 * layers  # input of q, k, v; of o; of gate, up; of down
        forwards = [recorded[i : i + operands] for i in range(0, len(recorded), operands)]
        decoded = [torch.cat(rows) for rows in zip(*forwards, strict=True)]
        recorded.clear()
        with torch.no_grad():
            trainer.model(rollout.tokens[:, : len(decoded[0])], use_cache=False)
        whole = [codes for i, codes in enumerate(recorded) if i % 7 in (0, 3, 4, 6)]  # of q, o, gate and down
        assert len(whole) == operands and all(a.shape == b.shape for a, b in zip(decoded[:-3], whole, strict=False))
        answer = len(whole[0]) - int(rollout.prompt_lengths) + 1  # in the last layer, o, gate, up and down read no more
        assert [len(a) for a in decoded[-3:]] == [answer] * 3
        whole = [b[-len(a) :] for a, b in zip(decoded, whole, strict=True)]
        flipped += sum(int((a != b).sum()) for a, b in zip(decoded, whole, strict=True))
        compared += sum(a.numel() for a in decoded)
    record_property("share_of_flipped_codes", flipped / compared)
    print(f"{flipped} of {compared} codes")
    assert compared > 50_000 and flipped / compared < 1e-3


def test_models_it_does_not_know_are_named_and_run_through_transformers(tokenizer):
    window = random_model("mistral", sliding_window=8)
    assert "sliding window of 8" in unsupported(window)
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    assert "dynamic" in unsupported(random_model("llama", rope_parameters=rope))
    gemma = random_model("gemma")
    assert "gemma" in unsupported(gemma)
    for model in (window, gemma):
        engine = NativeEngine(model, PrecisionPlan.preset("bf16"), tokenizer=tokenizer)
        stats = engine.stats()
        assert stats["forward"] == "transformers" and stats["forward_reason"] == unsupported(model)
        assert engine.generate(PROMPTS, SamplingParams(n=2, max_tokens=12), seed=0).mask.any()
        with pytest.raises(ValueError, match="forward='own'"):
            NativeEngine(model, PrecisionPlan.preset("bf16"), tokenizer=tokenizer, forward="own")
    with pytest.raises(ValueError, match="allowed: auto, own, transformers"):
        NativeEngine("tiny-llama", PrecisionPlan.preset("bf16"), forward="fast")


def test_a_wrong_position_would_be_seen():
    """A planted fault: tokens one column too far change the logits."""
    decoder = Decoder(load_model("tiny-llama"))
    prompts, lengths = torch.tensor([[5, 9, 17]]), torch.tensor([3])
    results = []
    for shift in (0, 1):
        with torch.no_grad():
            _, cache = decoder.prefill(prompts, lengths, 8)
            results.append(decoder.step(torch.tensor([7]), lengths + shift, cache))
    assert not torch.allclose(*results, atol=1e-3)


def test_attention_equals_torchs_own_in_each_of_its_three_ways():
    ways = set()
    for new, keys, groups in itertools.product((1, 3, 20), (20, 21, 40), (1, 3)):
        torch.manual_seed(0)
        q, (k, v) = torch.randn(5, 2 * groups, new, 8), torch.randn(2, 5, 2, keys, 8)
        mask = torch.arange(keys) <= torch.randint(0, keys, (5, 1, new, 1))
        bias = torch.where(mask, 0.0, float("-inf"))
        found, _ = attend(None, q, k, v, mask, scaling=0.4, bias=bias)
        reference = torch.nn.functional.scaled_dot_product_attention(
            q.double(), k.double(), v.double(), attn_mask=mask, scale=0.4, enable_gqa=True
        )
        torch.testing.assert_close(found.transpose(1, 2).double(), reference, atol=1e-6, rtol=1e-5)
        ways.add("torch" if new > FEW_TOKENS else groups * new * keys * 8 < SMALLEST_PRODUCT)
    assert ways == {"torch", True, False}


def test_the_cache_keeps_what_was_written():
    torch.manual_seed(0)
    cache = KVCache(2, 3, 4, 10, 8, torch.device("cpu"))
    assert cache.nbytes == 2 * 2 * 3 * 4 * 10 * 8 * 4
    for buffer in itertools.chain(*cache.buffers):
        buffer.fill_(float("nan"))  # whatever was in the memory
    k, v = torch.randn(2, 3, 5, 4, 8)
    cache.reach(5)
    cache.append(1, torch.stack((k, v), dim=2), cache.places(torch.arange(5).expand(3, 5)))
    late = torch.tensor([[5], [2], [4]])
    cache.reach(6)
    cache.append(1, torch.stack((k, v), dim=2)[:, :1] + 1, cache.places(late))
    got_k, got_v = cache.read(1, 6)
    for got, new in ((got_k, k), (got_v, v)):
        expected = torch.zeros(3, 6, 4, 8)
        expected[:, :5] = new
        for row, position in enumerate(late.flatten().tolist()):
            expected[row, position] = new[row, 0] + 1
        assert torch.equal(got, expected.transpose(1, 2))
    for rows in ([2, 0, 0, 1, 1], [4, 1, 0], [1], [0]):  # grows, then shrinks in memory that is used again
        got_k, got_v = got_k[rows], got_v[rows]
        cache.select(torch.tensor(rows))
        for got, expected in zip(cache.read(1, 6), (got_k, got_v), strict=True):
            assert torch.equal(got, expected)
    assert cache.free  # of the layer that shrank last
    cache.reach(10)
    assert all((got[:, :, 6:] == 0).all() for got in cache.read(1, 10))


def test_memory_is_kept_for_the_next_batch_and_no_more():
    shape = 4, 3, 2, 10, 8  # layers, rows, heads, columns, width
    free = []
    cache = KVCache(*shape, torch.device("cpu"), free)
    cache.select(torch.tensor([0, 0, 1, 1, 2]))
    assert free == []  # a growing batch holds nothing that it has outgrown
    cache.select(torch.tensor([0, 3]))
    assert len(free) == 1  # each layer took the memory of the one before
    pieces = {b.untyped_storage().data_ptr() for b in itertools.chain(free, *cache.buffers)}
    cache.release()
    assert len(free) == 5 and cache.nbytes == 0
    again = KVCache(*shape, torch.device("cpu"), free)
    assert {b.untyped_storage().data_ptr() for b in itertools.chain(free, *again.buffers)} == pieces
    large = KVCache(4, 3, 2, 10, KEPT // 1000, torch.device("cpu"), free)
    large.release()
    assert sum(b.untyped_storage().nbytes() for b in free) <= KEPT


def test_memory_of_sampling_is_not_given_to_who_may_not_write_to_it():
    """torch refuses writes to inference tensors outside of inference mode."""
    decoder = Decoder(load_model("tiny-llama"))
    prompts = torch.tensor([[5, 9, 17]]), torch.tensor([3])
    with torch.inference_mode():
        expected, cache = decoder.prefill(*prompts, 8)
        cache.release()
    with torch.no_grad():
        found, _ = decoder.prefill(*prompts, 8)
    assert torch.equal(found, expected)
