"""The real vLLM on a CPU: its log-probs against transformers, its weights against the trainer's, refits, faults."""

import copy
import random

import numpy as np
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from fp8lab import diagnostics
from fp8lab.linear import float8_layers, refresh
from fp8lab.models import load_model, named_weights
from fp8lab.precision import PrecisionPlan
from fp8lab.rollout import SamplingParams, VLLMEngine
from fp8lab.rollout.engine import GenerationStopped
from fp8lab.rollout.vllm_process import LIVE

from .conftest import PROMPTS, SAMPLING, Pair

pytestmark = pytest.mark.vllm


def reference_logprobs(model, rollout):
    """Log-probs from transformers' full forward, one unpadded sequence at a time, in float64 from the logits on."""
    out = torch.zeros(rollout.tokens.shape)
    for row, length in enumerate(rollout.lengths.tolist()):
        with torch.no_grad():
            logits = model(rollout.tokens[row : row + 1, :length], use_cache=False).logits[0].double()
        logits = logits / (rollout.sampling.temperature or 1.0)
        out[row, 1:length] = logits[:-1].log_softmax(-1).gather(1, rollout.tokens[row, 1:length, None])[:, 0].float()
    return torch.where(rollout.mask, out, 0.0)


def gap(pair, rollout):
    return diagnostics.mismatch(rollout.logprobs, pair.trainer.score(rollout), rollout.mask)


def change(model, factor):
    """Other weights, in place: every second parameter scaled."""
    with torch.no_grad():
        for parameter in list(model.parameters())[::2]:
            parameter.mul_(factor)
    refresh(model)


@pytest.fixture(scope="module")
def plain():
    """vLLM's own float32 kernels, nothing rounded."""
    engine = VLLMEngine("tiny-llama", None)
    yield engine
    engine.close()


def test_float32_logprobs_equal_transformers(plain):
    model = load_model("tiny-llama")
    for sampling in (SAMPLING, SamplingParams(n=8, max_tokens=6, temperature=0.7)):
        rollout = plain.generate(PROMPTS, sampling, seed=1)
        assert rollout.mask.sum() > 300
        torch.testing.assert_close(rollout.logprobs, reference_logprobs(model, rollout), atol=1e-4, rtol=0)
    greedy = plain.generate(PROMPTS[:4], SamplingParams(n=2, max_tokens=6, temperature=0.0), seed=1)
    torch.testing.assert_close(greedy.logprobs, reference_logprobs(model, greedy), atol=1e-4, rtol=0)
    for row in range(8):
        ids = plain.tokenizer(PROMPTS[row // 2], return_tensors="pt").input_ids
        expected = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=6)[0]
        ours = greedy.tokens[row, : greedy.lengths[row]]
        assert ours.tolist() == expected[: len(ours)].tolist()


def test_processed_logprobs_are_of_the_truncated_distribution(plain):
    rollout = plain.generate(PROMPTS, SamplingParams(n=8, max_tokens=6, top_k=1), seed=1)
    assert rollout.logprobs[rollout.mask].abs().max() == 0  # one token is left, with probability 1
    with pytest.raises(ValueError, match="raw_logprobs"):
        plain.generate(PROMPTS, SamplingParams(temperature=0.5, raw_logprobs=True), seed=1)


def test_refits_give_the_new_weights_logprobs_with_the_prefix_cached(plain):
    """Prompts of 150 tokens: one block of 128 is in the prefix cache when the weights change."""
    prompts = [torch.randint(4, 20, (150,), generator=torch.Generator().manual_seed(i)).tolist() for i in range(2)]
    first = load_model("tiny-llama")
    second = copy.deepcopy(first)
    change(second, 1.2)
    sampling = SamplingParams(n=2, max_tokens=8)
    before = plain.generate(prompts, sampling, seed=3)
    again = plain.generate(prompts, sampling, seed=3)  # answered from the cache
    assert torch.equal(before.tokens, again.tokens)
    plain.refit(named_weights(second))
    rollout = plain.generate(prompts, sampling, seed=3)
    torch.testing.assert_close(rollout.logprobs, reference_logprobs(second, rollout), atol=1e-4, rtol=0)
    assert (rollout.logprobs - reference_logprobs(first, rollout)).abs().max() > 1e-2  # the test could have failed
    plain.refit(named_weights(first))
    rollout = plain.generate(prompts, sampling, seed=3)
    assert torch.equal(rollout.tokens, before.tokens)
    torch.testing.assert_close(rollout.logprobs, before.logprobs, atol=1e-6, rtol=0)


@pytest.mark.parametrize("plan, least, most", [("bf16", 1e-9, 1e-3), ("fp8-e2e", 1e-7, 1e-2)])
def test_equal_rounding_leaves_the_engine_gap(pairs, plan, least, most):
    """Last bits differ between engines, and flip roundings: not zero, and far below one-sided FP8."""
    pair = pairs(plan)
    found = gap(pair, pair.sample())
    print(f"{plan}: mean |d| {found.mean_abs_difference:.1e}, max {found.max_abs_difference:.1e}")
    assert least < found.mean_abs_difference < most
    assert pair.engine.check_same_bytes(pair.trainer) == {}


def test_fp8_on_one_side_is_a_gap_of_another_size(pairs):
    pair = pairs("fp8-rollout")
    rollout = pair.sample()
    assert gap(pair, rollout).mean_abs_difference > 5e-3
    parts = diagnostics.gap_parts(pair.trainer, rollout)
    assert parts["precision_gap"] > 10 * parts["engine_gap"] > 0
    differing = pair.engine.check_same_bytes(pair.trainer)
    planned = {
        d.name for d in pair.trainer.plan.coverage(pair.trainer.model) if d.side == "rollout" and d.precision.is_fp8
    }
    assert set(differing) == planned and all("e4m3" in reason for reason in differing.values())


def test_bytes_are_compared_layer_by_layer(pairs):
    pair = pairs("fp8-e2e")
    layers = dict(float8_layers(pair.trainer.model))
    with torch.no_grad():
        layers["model.layers.1.self_attn.k_proj"].weight[0, 0] += 0.5  # fused with q and v in vLLM
        layers["lm_head"].weight[3, 3] += 0.5
        pair.trainer.model.model.norm.weight[5] += 0.5
    refresh(pair.trainer.model)
    differing = pair.engine.check_same_bytes(pair.trainer)
    assert set(differing) == {"model.layers.1.self_attn.k_proj", "lm_head", "model.norm.weight"}
    pair.engine.refit(pair.trainer)
    assert pair.engine.check_same_bytes(pair.trainer) == {}


def test_w1_w2_w1_is_a_fresh_engine_with_w1(pairs):
    pair = pairs("fp8-e2e")
    first = pair.sample(seed=4)
    change(pair.trainer.model, 1.1)
    pair.engine.refit(pair.trainer)
    second = pair.sample(seed=4)
    assert gap(pair, second).mean_abs_difference < 1e-2
    assert second.tokens.shape != first.tokens.shape or not torch.equal(second.tokens, first.tokens)
    pair.engine.refit(pair.first)
    pair.engine.refit(pair.first)  # idempotent
    third = pair.sample(seed=4)
    fresh = VLLMEngine("tiny-llama", pair.trainer.plan)
    fourth = fresh.generate(PROMPTS, SAMPLING, seed=4)
    fresh.close()
    for rollout in (third, fourth):
        assert torch.equal(rollout.tokens, first.tokens)
        torch.testing.assert_close(rollout.logprobs, first.logprobs, atol=1e-6, rtol=0)


@pytest.mark.parametrize("fault", ["missing", "shape", "nan", "infinite", "unknown"])
def test_a_faulty_refit_is_refused_and_changes_nothing(pairs, fault):
    pair = pairs("fp8-e2e")
    before = pair.sample(seed=5)
    name = "model.layers.2.mlp.up_proj.weight"
    weights = {key: tensor * 1.5 for key, tensor in pair.first.items()}
    if fault == "missing":
        del weights[name]
    elif fault == "unknown":
        weights["model.layers.2.mlp.extra.weight"] = torch.zeros(1)
    elif fault == "shape":
        weights[name] = weights[name][:-1]
    else:
        weights[name][0, 0] = float("nan") if fault == "nan" else float("inf")
    with pytest.raises(ValueError, match=r"no weight was changed.*layers\.2\.mlp"):
        pair.engine.refit(weights)
    after = pair.sample(seed=5)
    assert torch.equal(after.tokens, before.tokens) and torch.equal(after.logprobs, before.logprobs)
    assert pair.engine.check_same_bytes(pair.trainer) == {}


def test_tied_embeddings_biases_grouped_heads_and_a_mixed_fused_layer(tokenizer):
    """Qwen2: q, k and v have biases; k is BF16 between FP8 q and v; 100 tokens, which vLLM pads to 128."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "max_position_embeddings": 128}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100, "tie_word_embeddings": True}
    tokens = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    model = Qwen2ForCausalLM(Qwen2Config(**sizes, **heads, **tokens, initializer_range=0.1)).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    pair = Pair(model, PrecisionPlan.preset("fp8-e2e").with_bf16(modules=["k_proj"]), tokenizer)
    for factor in (1.0, 1.1):
        change(pair.trainer.model, factor)
        pair.engine.refit(pair.trainer)
        assert pair.engine.check_same_bytes(pair.trainer) == {}
        assert gap(pair, pair.sample()).mean_abs_difference < 2e-2
    pair.engine.close()
    with pytest.raises(RuntimeError, match="closed"):
        pair.sample()


def test_an_adapter_is_merged_before_it_is_pushed(pairs):
    from peft import LoraConfig, get_peft_model

    pair = pairs("fp8-e2e")
    torch.manual_seed(0)
    config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    adapted = get_peft_model(load_model("tiny-llama"), config)
    trainer = type("Trainer", (), {"model": adapted})()
    pair.engine.refit(trainer)
    merged = copy.deepcopy(adapted).merge_and_unload()
    pair.trainer.model.load_state_dict(named_weights(merged))
    refresh(pair.trainer.model)
    assert pair.engine.check_same_bytes(pair.trainer) == {}
    assert gap(pair, pair.sample()).mean_abs_difference < 2e-2


def test_seeds_decide_and_other_sequences_do_not(pairs):
    pair = pairs("bf16")
    first, again, other = pair.sample(seed=6), pair.sample(seed=6), pair.sample(seed=7)
    assert torch.equal(first.tokens, again.tokens) and torch.equal(first.logprobs, again.logprobs)
    assert first.completions != other.completions
    assert len(set(first.completions[:8])) > 1  # the completions of one prompt have streams of their own
    ids = [pair.engine.tokenizer(prompt).input_ids for prompt in PROMPTS]
    assert torch.equal(pair.engine.generate(ids, SAMPLING, seed=6).tokens, first.tokens)


def test_an_interrupted_generation_leaves_the_engine_usable(pairs):
    pair = pairs("bf16")
    before = pair.sample(seed=8)
    asked, done = [], []
    with pytest.raises(GenerationStopped):
        pair.engine.generate(PROMPTS, SAMPLING, seed=8, should_stop=lambda: len(asked) > 2 or asked.append(1))

    def interrupt(finished, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pair.engine.generate(PROMPTS, SAMPLING, seed=8, on_batch=interrupt)
    after = pair.engine.generate(PROMPTS, SAMPLING, seed=8, on_batch=lambda *counts: done.append(counts))
    assert torch.equal(after.tokens, before.tokens) and torch.equal(after.logprobs, before.logprobs)
    assert done[-1] == (len(PROMPTS) * 8, len(PROMPTS) * 8)


def test_prompts_that_cannot_be_sampled_and_the_context_limit(pairs):
    engine = pairs("bf16").engine
    size = engine._skeleton.config.vocab_size
    outside = rf"prompt 1 .* has token id {size}; this model's vocabulary of {size} tokens"
    for prompts, message in (
        ([], "non-empty"),
        ([[]], "at least one"),
        ([[5] * 256], "shorten the prompt"),
        ([[5], [5, size]], outside),
        ([[-3]], "has token id -3"),
    ):
        with pytest.raises(ValueError, match=message):
            engine.generate(prompts, SAMPLING, seed=1)
    rollout = engine.generate([[5] * 254], SamplingParams(n=4, max_tokens=6), seed=1)
    assert rollout.lengths.max() == 256
    assert not rollout.finished[rollout.lengths == 256].all() or bool(rollout.finished.all())


@pytest.mark.parametrize("plan", [None, PrecisionPlan.preset("fp8-e2e")])
def test_a_model_that_is_not_finite_makes_no_engine(tokenizer, plan, tmp_path):
    model, live = load_model("tiny-llama"), len(LIVE)
    name = "model.layers.1.mlp.down_proj.weight"
    with torch.no_grad():
        model.get_parameter(name)[3, 5] = float("nan")
    with pytest.raises(ValueError, match=f"no engine was made .* {name} has 1 values that are NaN"):
        VLLMEngine(model, plan, tokenizer=tokenizer)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"no engine was made .* {name} has 1 values that are NaN"):
        VLLMEngine(tmp_path, plan)
    assert len(LIVE) == live


def test_vllm_leaves_the_process_as_it_was(pairs):
    pair = pairs("bf16")
    set_num_threads = torch.set_num_threads
    torch.manual_seed(9), random.seed(9), np.random.seed(9)
    expected = torch.rand(1).item(), random.random(), np.random.rand()
    torch.manual_seed(9), random.seed(9), np.random.seed(9)
    pair.sample()
    pair.engine.refit(pair.first)
    assert (torch.rand(1).item(), random.random(), np.random.rand()) == expected
    assert torch.set_num_threads is set_num_threads
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    assert torch.get_num_threads() == threads + 1
    torch.set_num_threads(threads)


def test_what_the_cpu_engine_cannot_do_is_said_before_it_starts(tokenizer, plain, pairs):
    with pytest.raises(ValueError, match="AVX-512.*NativeEngine"):
        VLLMEngine("tiny-llama", PrecisionPlan.preset("fp8-e2e-kv"))
    with pytest.raises(ValueError, match="tensor_parallel_size"):
        VLLMEngine("tiny-llama", PrecisionPlan.preset("bf16"), tensor_parallel_size=2)
    with pytest.raises(ValueError, match="tokenizer"):
        VLLMEngine(load_model("tiny-llama"), PrecisionPlan.preset("bf16"))
    with pytest.raises(ValueError, match="device"):
        VLLMEngine("tiny-llama", None, device="tpu")
    with pytest.raises(ValueError, match=r"plan is 'fp8-e2e'; .* PrecisionPlan.preset\('fp8-e2e'\)"):
        VLLMEngine("tiny-llama", "fp8-e2e")
    with pytest.raises(RuntimeError, match="layouts of theirs"):
        plain.check_same_bytes(pairs("bf16").trainer)
    with pytest.raises(RuntimeError, match="dense model's engine lives"):
        VLLMEngine("tiny-qwen3-moe", PrecisionPlan.preset("fp8-e2e"))
    stats = plain.stats()
    assert stats["engine"].startswith("vllm 0.") and stats["tokens"] > 0 and stats["seconds"] > 0
