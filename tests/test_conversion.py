"""convert and restore on tiny transformers models: in place, reversible, and nothing lost on the way."""

import copy

import pytest
import torch

from fp8lab.conversion import convert, restore
from fp8lab.linear import Float8Linear, float8_layers, refresh
from fp8lab.precision import PrecisionPlan

from . import references

E2E = PrecisionPlan.preset("fp8-e2e")


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def logits(model):
    with torch.no_grad():
        return model(input_ids=references.tokens(), use_cache=False).logits


def same_parameters(model, before):
    now = dict(model.named_parameters())
    return now.keys() == before.keys() and all(now[name] is p for name, p in before.items())


@pytest.mark.parametrize("build", [references.tiny_llama, references.tiny_moe], ids=["llama", "moe"])
def test_in_place_and_reversible_bit_for_bit(build):
    model = build()
    model.train()
    model.model.layers[1].eval()
    parameters, before = dict(model.named_parameters()), logits(model)
    values = {n: p.detach().clone() for n, p in parameters.items()}
    kinds = {n: type(m) for n, m in model.named_modules()}
    training = {n: m.training for n, m in model.named_modules()}
    keys, text = list(model.state_dict()), repr(model)
    result = convert(model, E2E, side="trainer")
    assert result.fp8 and {n for n, _ in float8_layers(model)} == {d.name for d in result.decisions}
    assert all(layer._cache is not None for _, layer in float8_layers(model))  # quantized now, not at the first forward
    assert same_parameters(model, parameters) and list(model.state_dict()) == keys
    assert {n: m.training for n, m in model.named_modules()} == training
    assert not torch.equal(logits(model), before)
    restore(model)
    assert {n: type(m) for n, m in model.named_modules()} == kinds and repr(model) == text
    assert {n: m.training for n, m in model.named_modules()} == training
    assert same_parameters(model, parameters) and list(model.state_dict()) == keys
    assert all(torch.equal(p, values[n]) for n, p in parameters.items())
    assert torch.equal(logits(model), before)
    restore(model)  # nothing left to do
    assert torch.equal(logits(model), before)


def test_idempotent_and_the_latest_plan_counts():
    model = references.tiny_llama()
    convert(model, E2E, side="trainer")
    fp8 = logits(model)
    convert(model, E2E, side="trainer")
    assert torch.equal(logits(model), fp8)
    convert(model, PrecisionPlan.preset("bf16"), side="trainer")
    bf16 = logits(model)
    assert not torch.equal(bf16, fp8)
    fresh = references.tiny_llama()
    convert(fresh, PrecisionPlan.preset("fp8-rollout"), side="trainer")  # whose trainer is BF16
    assert torch.equal(logits(fresh), bf16)
    convert(fresh, PrecisionPlan.preset("fp8-rollout"), side="rollout")
    assert torch.equal(logits(fresh), fp8)


def test_converting_again_sees_changed_weights():
    model = references.tiny_llama()
    convert(model, E2E, side="trainer")
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.1)
    changed = copy.deepcopy(model)
    convert(model, E2E, side="trainer")
    refresh(changed)
    assert torch.equal(logits(changed), logits(model))


def test_what_is_reported():
    plan = E2E.with_bf16(last=1, modules=["self_attn.o_proj"], side="rollout")
    model = references.tiny_llama(attention_bias=True)
    result = convert(model, plan, side="rollout")
    assert (result.side, result.backend, result.untouched) == ("rollout", "emulated", ())
    assert len(result.decisions) == 2 * 7 + 1 and len(result.fp8) == 6
    assert all(name.startswith("model.layers.0.") and "o_proj" not in name for name in result.fp8)
    assert repr(result) == "Conversion(rollout, emulated: 6 x e4m3[128x128] x e4m3[1x128]; 9 x bf16)"
    layers = dict(float8_layers(model))
    assert all(layers[d.name].precision == d.precision for d in result.decisions)
    assert layers["lm_head"].precision.output == "float32"


def test_bf16_logits_are_float32_and_not_far_off():
    model = references.tiny_llama(hidden_size=128, intermediate_size=256)
    exact = logits(model)
    convert(model, PrecisionPlan.preset("bf16"), side="trainer")
    bf16 = references.sqnr(exact.numpy(), logits(model).numpy())
    convert(model, E2E, side="trainer")
    fp8 = references.sqnr(exact.numpy(), logits(model).numpy())
    assert 40 < bf16 < 70 and 15 < fp8 < bf16 - 12


def test_an_optimizer_made_before_stays_valid():
    model = references.tiny_llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    convert(model, E2E, side="trainer")
    before, ids = logits(model), references.tokens()
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    optimizer.step()
    stale = logits(model)
    refresh(model)
    assert not torch.equal(logits(model), stale) and not torch.equal(logits(model), before)


def test_tied_embeddings():
    model = references.tiny_llama(tie_word_embeddings=True)
    embedding, before = model.model.embed_tokens.weight, logits(model)
    data = embedding.detach().clone()
    result = convert(model, E2E, side="trainer")
    assert isinstance(model.lm_head, Float8Linear) and "lm_head" not in result.fp8
    assert model.lm_head.weight is model.model.embed_tokens.weight is embedding
    logits(model)
    assert torch.equal(embedding, data)
    model.tie_weights()
    assert model.lm_head.weight is embedding
    copied = copy.deepcopy(model)
    assert copied.lm_head.weight is copied.model.embed_tokens.weight is not embedding
    restore(model)
    assert model.lm_head.weight is embedding and torch.equal(embedding, data) and torch.equal(logits(model), before)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_save_and_load(tmp_path, tied):
    from transformers import AutoModelForCausalLM

    model = references.tiny_llama(tie_word_embeddings=tied)
    plain = logits(model)
    model.save_pretrained(tmp_path / "plain")
    convert(model, E2E, side="trainer")
    fp8 = logits(model)
    model.save_pretrained(tmp_path / "converted")
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("plain", "converted")]
    assert files[0] == files[1]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "converted", dtype=torch.float32).eval()
    assert torch.equal(logits(loaded), plain)
    convert(loaded, E2E, side="trainer")
    assert torch.equal(logits(loaded), fp8)
    other = references.tiny_llama(seed=5, tie_word_embeddings=tied)
    convert(other, E2E, side="trainer")
    assert not torch.equal(logits(other), fp8)
    other.load_state_dict(model.state_dict())
    assert torch.equal(logits(other), fp8)


def test_deepcopy_is_independent():
    model = references.tiny_llama()
    convert(model, E2E, side="trainer")
    before, copied = logits(model), copy.deepcopy(model)
    assert torch.equal(logits(copied), before)
    with torch.no_grad():
        for p in copied.parameters():
            p.zero_()
    refresh(copied)
    assert torch.equal(logits(model), before) and not logits(copied).any()
    restore(copied)
    assert len(list(float8_layers(model))) == 15 and not list(float8_layers(copied))


def test_moe_attention_is_converted_and_experts_are_listed():
    model = references.tiny_moe()
    result = convert(model, E2E, side="rollout")
    assert {n.rsplit(".", 1)[-1] for n in result.fp8} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert len(result.fp8) == 8
    experts = {n for n, p in model.named_parameters() if ".experts." in n}
    routers = {n for n, p in model.named_parameters() if n.endswith("mlp.gate.weight")}
    assert len(experts) == 4 and set(result.untouched) == experts | routers
    assert "6 tensors untouched (float32)" in repr(result)


def test_other_kernels_change_the_last_bits_of_a_model():
    a = references.tiny_llama(hidden_size=128, intermediate_size=256)
    b = copy.deepcopy(a)
    convert(a, E2E, side="trainer")
    convert(b, E2E, side="trainer", kernels="other")
    assert not torch.equal(logits(a), logits(b))
    assert references.sqnr(logits(a).numpy(), logits(b).numpy()) > 25


def test_other_architectures():
    from transformers import Gemma2Config, Gemma2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

    for config, kind in ((Qwen3Config, Qwen3ForCausalLM), (Gemma2Config, Gemma2ForCausalLM)):
        torch.manual_seed(0)
        model = kind(config(**references.SIZES, head_dim=12)).eval()
        before = logits(model)
        assert len(convert(model, E2E, side="trainer").fp8) == 14
        assert logits(model).isfinite().all()
        restore(model)
        assert torch.equal(logits(model), before)


# ---- refused, and the model is left as it was ------------------------------------------------------


def test_gpt2_is_refused():
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=61, n_positions=32, n_embd=32, n_layer=1, n_head=2))
    with pytest.raises(ValueError, match="GPT2LMHeadModel has no nn.Linear.*found Conv1D.*use a Llama"):
        convert(model, E2E, side="trainer")
    assert not list(float8_layers(model))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_dtypes_are_refused(dtype):
    model = references.tiny_llama().to(dtype)
    with pytest.raises(ValueError, match=f"{dtype}.*dtype=torch.float32"):
        convert(model, E2E, side="trainer")
    assert not list(float8_layers(model))


def test_bad_arguments():
    model = references.tiny_llama()
    for options, words in (
        ({"side": "left"}, "side is 'left'; allowed: rollout, trainer"),
        ({"side": "trainer", "backend": "cuda"}, "backend is 'cuda'; allowed: auto"),
        ({"side": "trainer", "kernels": "x"}, "kernels is 'x'; allowed: default, other"),
    ):
        with pytest.raises(ValueError, match=words):
            convert(model, E2E, **options)
        assert not list(float8_layers(model))
    with pytest.raises(ValueError, match="no numbered decoder layers"):
        convert(torch.nn.Sequential(torch.nn.Linear(2, 2)), E2E, side="trainer")
