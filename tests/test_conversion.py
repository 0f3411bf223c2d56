"""convert and restore on tiny transformers models: in place, reversible, and nothing lost on the way."""

import copy
import pickle

import pytest
import torch

from fp8lab.conversion import convert, restore
from fp8lab.linear import Float8Linear, float8_layers, refresh
from fp8lab.precision import PrecisionPlan

from . import references

E2E = PrecisionPlan.preset("fp8-e2e")


pytestmark = pytest.mark.usefixtures("one_thread")


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
    now = {n: m.training for n, m in model.named_modules()}
    assert all(now[n] == training[n if n in training else n.rpartition(".")[0]] for n in now)
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


def deepseek():
    """DeepSeek-V3 in small: MLA with low-rank projections, one dense layer, then experts beside a shared expert."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    torch.manual_seed(0)
    mla = dict(q_lora_rank=24, kv_lora_rank=16, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=12)
    experts = dict(n_routed_experts=8, num_experts_per_tok=2, n_group=2, topk_group=1, moe_intermediate_size=40)
    sizes = {**references.SIZES, "num_key_value_heads": 4}
    config = DeepseekV3Config(**sizes, **mla, **experts, n_shared_experts=1, first_k_dense_replace=1)
    return DeepseekV3ForCausalLM(config).eval()


def moonlight():
    """Moonlight is DeepSeek-V3 without q_lora: one q_proj."""
    from transformers import DeepseekV3ForCausalLM

    torch.manual_seed(0)
    config = copy.deepcopy(deepseek().config)
    config.q_lora_rank = None
    return DeepseekV3ForCausalLM(config).eval()


def mixtral():
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    return MixtralForCausalLM(MixtralConfig(**references.SIZES, num_local_experts=4)).eval()


def qwen2_moe():
    """Qwen2-MoE has a shared expert behind a gate that is an nn.Linear: a router."""
    from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

    torch.manual_seed(0)
    experts = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=48)
    return Qwen2MoeForCausalLM(Qwen2MoeConfig(**references.SIZES, **experts)).eval()


MLP, EXPERTS = {"gate_proj", "up_proj", "down_proj"}, {"experts.gate_up_proj", "experts.down_proj"}
MLA = {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"}
ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
SHARED = {f"shared_experts.{name}" for name in MLP}
MOE = {
    "qwen3_moe": (references.tiny_moe, ATTENTION | EXPERTS, ATTENTION | EXPERTS, {"mlp.gate.weight"}),
    "mixtral": (mixtral, ATTENTION | EXPERTS, ATTENTION | EXPERTS, {"mlp.gate.weight"}),
    "deepseek_v3": (deepseek, MLA | MLP, MLA | EXPERTS | SHARED, {"mlp.gate.weight"}),
    "moonlight": (moonlight, MLA - {"q_a_proj", "q_b_proj"} | {"q_proj"} | MLP, None, {"mlp.gate.weight"}),
    "qwen2_moe": (
        qwen2_moe,
        ATTENTION | EXPERTS | {name.replace("experts", "expert") for name in SHARED},
        None,
        {"mlp.gate.weight"},
    ),
}


@pytest.mark.parametrize("kind", MOE)
def test_moe_and_mla(kind):
    build, first, second, untouched = MOE[kind]
    model = build()
    before, router = logits(model), model.model.layers[1].mlp.gate.weight.detach().clone()
    result = convert(model, E2E, side="trainer")
    names = [{n.split(".", 4)[-1] for n in result.fp8 if n.startswith(f"model.layers.{i}.")} for i in (0, 1)]
    assert names[0] == first and (second is None or names[1] == second)
    assert {n.split(".", 3)[-1] for n in result.untouched} == untouched
    assert not any(n.endswith(("mlp.gate", "shared_expert_gate")) for n in result.fp8)
    ids = references.tokens()
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    fp8 = logits(model)
    assert 10 < references.sqnr(before.numpy(), fp8.numpy()) < 40
    copied = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    assert torch.equal(logits(copied), fp8) and torch.equal(model.model.layers[1].mlp.gate.weight, router)
    restore(copied)
    assert torch.equal(logits(copied), before)


def test_tied_embeddings_of_an_moe_model(tmp_path):
    from transformers import Qwen3MoeForCausalLM

    config = references.tiny_moe().config
    config.tie_word_embeddings = True
    model = Qwen3MoeForCausalLM(config).eval()
    embedding = model.model.embed_tokens.weight
    data = embedding.detach().clone()
    convert(model, E2E, side="trainer")
    logits(model)
    assert model.lm_head.weight is embedding and torch.equal(embedding, data)
    model.save_pretrained(tmp_path)
    loaded = Qwen3MoeForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight and torch.equal(loaded.lm_head.weight, data)


# ---- adapters -----------------------------------------------------------------------------------------


def adapted(build=references.tiny_llama, **changes):
    peft = pytest.importorskip("peft", reason="peft is not installed (extra `dev`)")
    changes = {"r": 4, "target_modules": ["q_proj", "down_proj"], "init_lora_weights": False} | changes
    model = build()
    torch.manual_seed(0)
    return peft.get_peft_model(model, peft.LoraConfig(**changes))


def test_adapters_put_on_before_stay_in_high_precision():
    """Rounding A and B would put noise of FP8 on the only weights that learn, and B starts at 0."""
    model = adapted()
    plain = {n: m for n, m in model.named_modules() if ".lora_" in n and isinstance(m, torch.nn.Linear)}
    result = convert(model, E2E, side="trainer")
    assert len(plain) == 8 and all(model.get_submodule(n) is m and type(m) is torch.nn.Linear for n, m in plain.items())
    assert {f"{n}.weight" for n in plain} == set(result.untouched)
    base = [n for n in result.fp8 if n.endswith("base_layer")]
    assert len(base) == 4 and len(result.fp8) == 14
    layer = model.get_submodule(base[0].removesuffix(".base_layer"))
    x = torch.randn(5, layer.in_features)
    a, b = layer.lora_A.default.weight, layer.lora_B.default.weight
    assert torch.equal(layer(x), layer.base_layer(x) + (x @ a.t() @ b.t()) * layer.scaling["default"])
    ids = references.tokens()
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    assert all(p.grad.any() for n, p in model.named_parameters() if ".lora_" in n)
    restore(model)
    assert not list(float8_layers(model)) and all(model.get_submodule(n) is m for n, m in plain.items())


def test_the_order_of_adapting_and_converting_does_not_matter():
    before = adapted()
    after = references.tiny_llama()
    convert(after, E2E, side="trainer")
    after = adapted(lambda: after)
    convert(before, E2E, side="trainer")
    assert torch.equal(logits(before), logits(after))
    convert(after, E2E, side="trainer")
    assert torch.equal(logits(before), logits(after))


def test_adapters_of_fused_experts_are_refused_when_they_run():
    """peft adds A @ B to the fused tensor in each forward; a quantized copy of the plain tensor would ignore it."""
    model = adapted(references.tiny_moe, target_modules=["q_proj"], target_parameters=["mlp.experts.down_proj"])
    convert(model, E2E, side="trainer")
    with pytest.raises(ValueError, match="an adapter computes the fused expert tensors anew.*restore"):
        logits(model)
    restore(model)
    assert logits(model).isfinite().all()


# ---- attention ----------------------------------------------------------------------------------------


def test_attention_of_the_plan_is_applied_or_refused_never_ignored():
    model = references.tiny_llama()
    before = logits(model)
    convert(model, PrecisionPlan.preset("fp8-e2e-kv"), side="rollout")
    with pytest.raises(RuntimeError, match="no scales for q, k and v"):
        logits(model)
    convert(model, PrecisionPlan.preset("fp8-e2e-kv"), side="trainer")  # whose attention is BF16
    fp8 = logits(model)
    convert(model, E2E, side="trainer")
    assert torch.equal(logits(model), fp8)
    convert(model, PrecisionPlan.preset("fp8-e2e-kv"), side="rollout")
    restore(model)
    assert torch.equal(logits(model), before)
    mla = deepseek()
    with pytest.raises(ValueError, match="DeepseekV3ForCausalLM has MLA"):
        convert(mla, PrecisionPlan.preset("fp8-e2e-kv"), side="rollout")
    assert not list(float8_layers(mla))


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
