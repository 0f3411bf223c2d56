"""What is FP8, tensor by tensor, for every architecture; bytes, FLOPs and memory against numbers from elsewhere."""

import dataclasses
import json
import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from fp8lab.architectures import ARCHITECTURES
from fp8lab.coverage import as_text, differences, fp8_share, kv_cache_bytes, memory, meta_model, report, rows
from fp8lab.linear import float8_layers
from fp8lab.names import is_router, layer_index
from fp8lab.precision import LinearPrecision, PrecisionPlan, SidePlan

from . import references

E2E = PrecisionPlan.preset("fp8-e2e")
SIZES = dict(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
)
ATTENTION = [f"self_attn.{p}_proj" for p in "qkvo"]
MLP = [f"mlp.{p}_proj" for p in ("gate", "up", "down")]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
MLA = [f"self_attn.{p}" for p in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")]
MOE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
DEEPSEEK = dict(
    model_type="deepseek_v3",
    kv_lora_rank=32,
    q_lora_rank=48,
    qk_rope_head_dim=8,
    qk_nope_head_dim=8,
    v_head_dim=16,
    moe_intermediate_size=32,
    n_routed_experts=4,
    num_experts_per_tok=2,
    n_shared_experts=1,
    n_group=1,
    topk_group=1,
    first_k_dense_replace=1,
)
SHARED = [f"mlp.shared_experts.{p}_proj" for p in ("gate", "up", "down")]
NEXT_EXPERTS = [*EXPERTS, *(f"mlp.shared_expert.{p}_proj" for p in ("gate", "up", "down"))]
LINEAR_ATTENTION = [f"linear_attn.{p}" for p in ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")]
DENSE = (ATTENTION + MLP, ATTENTION + MLP)
ARCHITECTURE = {
    "llama": (dict(model_type="llama"), DENSE),
    "llama, biases": (dict(model_type="llama", attention_bias=True, mlp_bias=True), DENSE),
    "llama, tied": (dict(model_type="llama", tie_word_embeddings=True), DENSE),
    "qwen2": (dict(model_type="qwen2"), DENSE),
    "qwen3": (dict(model_type="qwen3"), DENSE),
    "mistral": (dict(model_type="mistral"), DENSE),
    "gemma2, tied": (dict(model_type="gemma2"), DENSE),
    "gemma3, tied": (dict(model_type="gemma3_text"), DENSE),
    "qwen3 moe": (dict(model_type="qwen3_moe", **MOE), (ATTENTION + EXPERTS,) * 2),
    "qwen3 moe, one dense layer": (
        dict(model_type="qwen3_moe", **MOE, mlp_only_layers=[0]),
        (ATTENTION + MLP, ATTENTION + EXPERTS),
    ),
    "deepseek v3": (DEEPSEEK, (MLA + MLP, MLA + EXPERTS + SHARED)),
    "moonlight": (
        {**DEEPSEEK, "q_lora_rank": None},
        (["self_attn.q_proj", *MLA[2:], *MLP], ["self_attn.q_proj", *MLA[2:], *EXPERTS, *SHARED]),
    ),
    "qwen3.5": (
        dict(model_type="qwen3_5_text", layer_types=["linear_attention", "full_attention"]),
        (LINEAR_ATTENTION + MLP, ATTENTION + MLP),
    ),
    "qwen3.5 moe": (
        dict(model_type="qwen3_5_moe_text", layer_types=["linear_attention", "full_attention"], **MOE)
        | dict(shared_expert_intermediate_size=32),
        (LINEAR_ATTENTION + NEXT_EXPERTS, ATTENTION + NEXT_EXPERTS),
    ),
}


def fp8_names(plan, model, side):
    return sorted(row.name.removesuffix(".weight") for row in rows(plan, model) if row.side == side and row.fp8)


# ---- which tensors ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ARCHITECTURE)
@pytest.mark.parametrize("side", ["rollout", "trainer"])
def test_exact_list_of_fp8_tensors(name, side):
    changes, layers = ARCHITECTURE[name]
    model = meta_model({**SIZES, **changes})
    wanted = sorted(f"model.layers.{i}.{tensor}" for i, tensors in enumerate(layers) for tensor in tensors)
    assert fp8_names(E2E, model, side) == wanted
    assert fp8_names(PrecisionPlan.preset("bf16"), model, side) == []
    found = {row.name: row for row in rows(E2E, model) if row.side == side}
    assert set(found) == {n for n, _ in model.named_parameters(remove_duplicate=False)}  # none left out
    assert all(row.reason for row in found.values())
    for parameter, row in found.items():
        assert row.format == ("e4m3" if row.fp8 else "bf16"), parameter
    assert found["lm_head.weight"].reason.startswith("outside the decoder layers")
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    assert tied == ("tied" in name)
    assert (found["lm_head.weight"].bytes == 0) == ("tied to" in found["lm_head.weight"].reason) == tied


@pytest.mark.parametrize("name", [n for n in ARCHITECTURE if "moe" in n or "deepseek" in n or "moonlight" in n])
def test_a_router_is_never_fp8_and_never_mistaken(name):
    changes, _ = ARCHITECTURE[name]
    model = meta_model({**SIZES, **changes})
    found = [row for row in rows(E2E, model) if row.tensor == "router"]
    assert {row.name.split("mlp.")[1] for row in found} <= {"gate.weight", "shared_expert_gate.weight"}
    assert found and not any(row.fp8 or row.format != "bf16" for row in found)
    kept = E2E.with_bf16(modules=["mlp.gate"])  # the router alone: nothing that was FP8 changes
    assert fp8_names(kept, model, "trainer") == fp8_names(E2E, model, "trainer")
    down = E2E.with_bf16(modules=["experts.down_proj"])
    lost = set(fp8_names(E2E, model, "trainer")) - set(fp8_names(down, model, "trainer"))
    assert lost and all(n.endswith("experts.down_proj") for n in lost)


@pytest.mark.parametrize(
    "name, router",
    [
        ("model.layers.0.mlp.gate", True),
        ("model.layers.0.mlp.gate.weight", True),
        ("model.layers.0.mlp.router.gate_proj", True),
        ("model.layers.0.mlp.shared_expert_gate", True),
        ("model.layers.0.mlp.gate_proj", False),
        ("model.layers.0.mlp.experts.gate_up_proj", False),
        ("model.layers.0.mlp.shared_expert.gate_proj", False),
    ],
)
def test_router_names(name, router):
    assert is_router(name) is router
    assert E2E.decide(name, "rollout", 1).precision.is_fp8 is not router


def test_the_published_moonlight_recipe_keeps_low_rank_projections_on_the_rollout_side():
    plan = E2E.with_bf16(modules=["*a_proj*", "*b_proj*"], side="rollout")
    found = rows(plan, "moonshotai/Moonlight-16B-A3B-Instruct")
    kept = {row.name.split(".")[-2] for row, _ in differences(found)}
    assert kept == {"kv_a_proj_with_mqa", "kv_b_proj"}
    assert len(differences(found)) == 2 * 27
    assert fp8_share(found, "rollout") < fp8_share(found, "trainer")


def test_the_vision_tower_is_not_the_decoder():
    model = meta_model("Qwen/Qwen3.5-9B-Base")
    vision = [row for row in rows(E2E, model) if ".visual." in row.name]
    assert vision and not any(row.fp8 or row.flops for row in vision)
    assert layer_index("model.visual.blocks.3.mlp.linear_fc1") is None
    assert {row.reason for row in vision if row.name.endswith("linear_fc1.weight")} == {
        "another tower than the language model's, for example vision"
    }


def test_gpt2_and_others_are_refused():
    with pytest.raises(ValueError, match=r"GPT2LMHeadModel has no nn.Linear .*\(found Conv1D\).*Llama-"):
        E2E.report({"model_type": "gpt2", "n_layer": 1})
    with pytest.raises(ValueError, match="no causal language model from.*nope"):
        E2E.report({"model_type": "nope"})
    with pytest.raises(ValueError, match="a int is neither a model, a config, a dict nor the name"):
        E2E.report(3)
    with pytest.raises(ValueError, match=r"fallback pattern 'mlp.up' matches no module.*'model.layers.0"):
        E2E.with_bf16(modules=["mlp.up"]).report({**SIZES, "model_type": "llama"})


# ---- published numbers -------------------------------------------------------------------------------

PUBLISHED = {  # total and per-token parameters in billions: model cards on the hub, DeepSeek-V3 and Moonlight reports
    "meta-llama/Llama-3.1-8B-Instruct": (8.03, None),
    "meta-llama/Llama-3.3-70B-Instruct": (70.6, None),
    "Qwen/Qwen3-8B": (8.2, None),
    "Qwen/Qwen3-32B": (32.8, None),
    "Qwen/Qwen3-30B-A3B": (30.5, 3.3),
    "Qwen/Qwen3-235B-A22B": (235, 22),
    "moonshotai/Moonlight-16B-A3B-Instruct": (16, 3),
    "deepseek-ai/DeepSeek-V3": (671, 37),
    "Qwen/Qwen3.5-35B-A3B-Base": (35, 3),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_the_published_ones(name):
    total, active = PUBLISHED[name]
    model = meta_model(name)
    parameters = sum(p.numel() for p in model.parameters())
    assert float(f"{parameters / 1e9:.{len(str(total).replace('.', ''))}g}") == total
    if active is not None:  # the embedding of one token is looked up; the cards count the whole table
        used = sum(row.flops for row in rows(E2E, model) if row.side == "rollout") / 2
        embedding = model.get_input_embeddings().weight.numel()
        assert used / 1e9 <= active + 0.5 and (used + embedding) / 1e9 >= active - 0.5


def test_every_recipe_model_has_sizes():
    from fp8lab.recipes import recipe_data, recipe_names

    models = {recipe_data(name)["experiment"]["model"] for name in recipe_names()}
    assert {name for name in models if "/" in name} <= set(ARCHITECTURES)
    assert "Qwen/Qwen3-8B-Base" in models


def test_non_embedding_parameters_of_qwen3_8b():
    """Its card: 6.95 billion non-embedding parameters; all of them but norms are the plan's linears."""
    fp8 = [row for row in rows(E2E, "Qwen/Qwen3-8B") if row.side == "rollout" and row.fp8]
    assert round(sum(math.prod(row.shape) for row in fp8) / 1e9, 2) == 6.95


def test_kv_cache_against_published_capacities():
    """NeMo RL pull request 1212, Qwen3-8B-Base: 249,952 tokens in BF16, 299,344 with FP8 weights, 598,672 with KV."""
    bf16, fp8, kv = (
        memory(PrecisionPlan.preset(n), "Qwen/Qwen3-8B-Base") for n in ("bf16", "fp8-rollout", "fp8-rollout-kv")
    )
    assert bf16["kv_cache_per_token"] == 2 * 36 * 8 * 128 * 2 == 147_456
    assert 598_672 / 299_344 == pytest.approx(fp8["kv_cache_per_token"] / kv["kv_cache_per_token"], rel=1e-4)
    saved = (bf16["rollout_weights"] - fp8["rollout_weights"]) / bf16["kv_cache_per_token"]
    assert saved == pytest.approx(299_344 - 249_952, rel=0.06)
    assert bf16["rollout_weights"] == pytest.approx(2 * 8.19e9, rel=1e-3)


@pytest.mark.parametrize(
    "name, bytes_in_bf16",
    [
        ("meta-llama/Llama-3.1-8B-Instruct", 32 * 2 * 8 * 128 * 2),  # 128 KiB a token
        ("deepseek-ai/DeepSeek-V3", 61 * (512 + 64) * 2),  # 70.272 KB a token: arXiv:2505.09343, table 1
        ("Qwen/Qwen3.5-9B-Base", 8 * 2 * 4 * 256 * 2),  # 8 of 32 layers have a cache
    ],
)
def test_kv_cache_formulas(name, bytes_in_bf16):
    config = meta_model(name).config
    assert kv_cache_bytes(PrecisionPlan.preset("bf16"), config) == bytes_in_bf16
    assert kv_cache_bytes(PrecisionPlan.preset("fp8-rollout-kv"), config) == bytes_in_bf16 // 2


def test_per_token_head_scales_cost_memory():
    plan = PrecisionPlan.preset("fp8-rollout-kv")
    attention = dataclasses.replace(plan.rollout.attention, scales="per-token-head", probabilities="bf16")
    dynamic = dataclasses.replace(plan, rollout=dataclasses.replace(plan.rollout, attention=attention))
    config = meta_model("Qwen/Qwen3-8B").config
    assert kv_cache_bytes(dynamic, config) - kv_cache_bytes(plan, config) == 36 * 2 * 8 * 4


# ---- bytes and FLOPs against what really happens -------------------------------------------------------


@pytest.mark.parametrize("build", [references.tiny_llama, references.tiny_moe])
@pytest.mark.parametrize("block", [(128, 128), (32, 16)])
def test_bytes_are_those_that_conversion_stores(build, block):
    from fp8lab import convert

    model = build()
    linear = LinearPrecision(weight_block=block, group=block[1])
    plan = PrecisionPlan(rollout=SidePlan(linear=linear))
    counted = {row.name: row.bytes for row in rows(plan, model) if row.side == "rollout" and row.fp8}
    convert(model, plan, side="rollout")
    fp8 = [(name, layer) for name, layer in float8_layers(model) if layer.precision.is_fp8]
    stored = {n if ".experts." in n else f"{n}.weight": layer.quantized.packed.nbytes for n, layer in fp8}
    assert counted == stored


@pytest.mark.parametrize("build", [references.tiny_llama, references.tiny_moe])
def test_flops_are_those_that_torch_counts(build):
    model = build()
    model.set_attn_implementation("eager")  # its products are bmm, everything counted here is mm
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    tokens = references.tokens(shape=(2, 7))
    counted = {}
    for side in ("rollout", "trainer"):
        with FlopCounterMode(display=False) as counter:
            loss = model(tokens, use_cache=False).logits.sum()
            if side == "trainer":
                loss.backward()
        by_kind = counter.get_flop_counts()["Global"]
        counted[side] = sum(v for kind, v in by_kind.items() if "bmm" not in str(kind)) / tokens.numel()
    found = rows(E2E, model)
    for side, flops in counted.items():
        assert sum(row.flops for row in found if row.side == side) == pytest.approx(flops, rel=1e-9)


def test_fp8_share_of_the_three_gemms():
    def share(**formats):
        linear = LinearPrecision(**formats)
        plan = PrecisionPlan(rollout=SidePlan(linear=linear), trainer=SidePlan(linear=linear))
        (row, other) = [r for r in rows(plan, {**SIZES, "model_type": "llama"}) if "0.mlp.up_proj" in r.name]
        return row.fp8, other.fp8

    assert share() == (1, 1)
    assert share(gradient="bf16") == (1, pytest.approx(1 / 3))
    assert share(activation="bf16") == (0, pytest.approx(1 / 3))  # weight and gradient meet in grad_input
    assert share(weight="bf16", activation="bf16") == (0, 0)


def test_shares_add_up_and_follow_the_plan():
    model = meta_model("meta-llama/Llama-3.1-8B-Instruct")
    found = rows(E2E, model)
    for side in ("rollout", "trainer"):
        assert sum(row.share for row in found if row.side == side) == pytest.approx(1)
    head, planned = 128_256 * 4096, 32 * (2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14_336)
    assert fp8_share(found, "rollout") == pytest.approx(planned / (planned + head))
    half = rows(E2E.with_bf16(first=16, side="trainer"), model)
    assert fp8_share(half, "trainer") == pytest.approx(planned / 2 / (planned + head))
    assert differences(found) == [] and len(differences(half)) == 16 * 7


def test_mx_scales_are_one_byte():
    plan = PrecisionPlan.preset("mxfp8-rollout")
    found = {r.name: r for r in rows(plan, "Qwen/Qwen3-32B") if r.side == "rollout"}
    assert found["model.layers.0.mlp.up_proj.weight"].bytes == 25_600 * 5120 * (1 + 1 / 32)
    assert found["model.layers.0.self_attn.q_proj.weight"].format == "bf16"


# ---- how it is shown ---------------------------------------------------------------------------------


def test_report_is_a_data_frame():
    frame = E2E.report({**SIZES, "model_type": "llama"})
    assert frame.equals(report(E2E, {**SIZES, "model_type": "llama"}))
    wanted = ["name", "side", "tensor", "format", "block", "rule", "reason", "bytes", "flops", "share"]
    assert set(wanted) <= set(frame.columns)
    assert len(frame) == 2 * (3 + 2 * 9)
    up = frame[frame.name.str.endswith("0.mlp.up_proj.weight")]
    assert list(up.side) == ["rollout", "trainer"] and set(up.block) == {"128x128"} and set(up.rule) == {"default"}
    json.dumps(frame.to_dict("records"))


def test_text():
    plan = E2E.with_bf16(last=1, side="trainer")
    text = as_text(plan, {**SIZES, "model_type": "llama"})
    up = [line for line in text.splitlines() if "mlp.up_proj" in line]
    assert len(up) == 2 and "model.layers.*.mlp.up_proj.weight" in up[0]
    assert any("trainer: kept in BF16: one of the last 1 layers" in line for line in up)
    assert "7 parameters are not rounded alike on both sides" in text
    assert "% of FLOPs in FP8" in text and "kv cache per token" in text


def test_a_config_object_a_folder_and_a_module_give_the_same():
    from transformers import AutoConfig

    from fp8lab.models import load_model, resolve_model

    config = AutoConfig.from_pretrained(resolve_model("tiny-llama"))
    found = rows(E2E, "tiny-llama")
    assert found == rows(E2E, config) == rows(E2E, load_model("tiny-llama"))
    with torch.device("meta"):
        assert all(p.is_meta for p in meta_model("tiny-llama").parameters())
