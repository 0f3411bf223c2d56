"""What vLLM on a GPU is told, without one: configs, scale rule, the bytes of a refit."""

import dataclasses

import pytest
import torch

from fp8lab.attention_scales import AttentionScales
from fp8lab.linear import float8_layers
from fp8lab.operands import BF16_LINEAR, LinearPrecision
from fp8lab.precision import PrecisionPlan, SidePlan
from fp8lab.rollout.vllm import checkpoint_tensors, skeleton
from fp8lab.rollout.vllm_gpu import checkpoint_items, deep_gemm, engine_options, fp8_config, ignored_layers
from fp8lab.trainer import Trainer


def decisions(plan, model="tiny-llama"):
    return plan.coverage(skeleton(model))


def test_ignored_layers_are_the_plans_bf16_layers():
    plan = PrecisionPlan.preset("fp8-e2e").with_bf16(last=1, modules=["layers.0.mlp.down_proj"], side="rollout")
    ignored = ignored_layers(decisions(plan))
    last = [f"model.layers.3.self_attn.{p}_proj" for p in "qkvo"] + [
        f"model.layers.3.mlp.{p}_proj" for p in ("gate", "up", "down")
    ]
    assert set(ignored) == {"lm_head", "model.layers.0.mlp.down_proj", *last}
    config = fp8_config(decisions(plan))
    assert config["quant_method"] == "fp8" and config["weight_block_size"] == [128, 128]
    assert config["activation_scheme"] == "dynamic" and config["ignored_layers"] == ignored


def test_experts_are_ignored_together_under_their_modules_name():
    plan = PrecisionPlan.preset("fp8-e2e").with_bf16(layers=[1])
    ignored = ignored_layers(decisions(plan, "tiny-qwen3-moe"))
    assert "model.layers.1.mlp.experts" in ignored
    assert not any("layers.0" in name or "gate_up" in name for name in ignored)


@pytest.mark.parametrize(
    "model, module", [("tiny-llama", "k_proj"), ("tiny-llama", "up_proj"), ("tiny-qwen3-moe", "experts.down_proj")]
)
def test_a_fused_layer_cannot_be_of_two_precisions(model, module):
    plan = PrecisionPlan.preset("fp8-e2e").with_bf16(modules=[module])
    with pytest.raises(ValueError, match=rf"{module}.*one layer in vLLM"):
        fp8_config(decisions(plan, model))


def test_a_bf16_plan_needs_no_config_and_the_side_counts():
    assert fp8_config(decisions(PrecisionPlan.preset("bf16"))) is None
    assert fp8_config(decisions(PrecisionPlan(trainer=SidePlan(linear=LinearPrecision())))) is None
    assert fp8_config(decisions(PrecisionPlan.preset("fp8-rollout"))) is not None


def test_blocks_that_vllm_does_not_have_are_refused():
    with pytest.raises(ValueError, match=r"\(1, 32\).*allows.*\(128, 128\)"):
        fp8_config(decisions(PrecisionPlan.preset("mxfp8-rollout")))


@pytest.mark.parametrize("rule, wanted", [("default", "0"), ("vllm", "0"), ("pow2", "1"), ("vllm+pow2", "1")])
def test_deep_gemm_follows_the_plans_scale_rule(rule, wanted):
    precision = LinearPrecision(rule=rule)
    assert deep_gemm(precision, {}) == {"VLLM_USE_DEEP_GEMM_E8M0": wanted}
    assert deep_gemm(precision, {"VLLM_USE_DEEP_GEMM_E8M0": wanted}) == {"VLLM_USE_DEEP_GEMM_E8M0": wanted}
    other = "1" if wanted == "0" else "0"
    with pytest.raises(ValueError, match=f"E8M0={other}"):
        deep_gemm(precision, {"VLLM_USE_DEEP_GEMM_E8M0": other})


def test_deep_gemm_switched_off_rounds_no_scales_up():
    off = {"VLLM_USE_DEEP_GEMM": "0"}
    assert deep_gemm(LinearPrecision(), off) == {"VLLM_USE_DEEP_GEMM_E8M0": "0"}
    with pytest.raises(ValueError, match="power-of-two"):
        deep_gemm(LinearPrecision(rule="pow2"), off)
    assert deep_gemm(BF16_LINEAR, {"VLLM_USE_DEEP_GEMM_E8M0": "1"}) == {}


def test_the_kv_cache_follows_the_plan():
    plan = PrecisionPlan.preset("fp8-e2e-kv")
    assert engine_options(plan, decisions(plan))["kv_cache_dtype"] == "fp8_e4m3"
    attention = dataclasses.replace(plan.rollout.attention, scales="per-token-head", probabilities="bf16")
    dynamic = dataclasses.replace(plan, rollout=dataclasses.replace(plan.rollout, attention=attention))
    assert engine_options(dynamic, decisions(dynamic))["kv_cache_dtype"] == "fp8_per_token_head"
    plain = PrecisionPlan.preset("bf16")
    assert engine_options(plain, decisions(plain)) == {
        "dtype": "bfloat16",
        "load_format": "dummy",
        "hf_overrides": {"head_dtype": "float32"},
    }


def test_a_refit_sends_the_trainers_own_codes_and_scales():
    plan = PrecisionPlan.preset("fp8-e2e").with_bf16(last=1)
    trainer = Trainer("tiny-llama", plan)
    weights = checkpoint_tensors(skeleton("tiny-llama"), trainer.model.state_dict())
    precisions = {d.name: d.precision for d in decisions(plan) if d.side == "rollout"}
    scales = AttentionScales.ones(4)
    items = list(checkpoint_items(weights, precisions, scales))
    sent = dict(items)
    for name, layer in float8_layers(trainer.model):
        weight = sent[f"{name}.weight"]
        if layer.quantized.packed is None:
            assert weight.dtype == torch.bfloat16 and f"{name}.weight_scale_inv" not in sent
            assert torch.equal(weight.float(), layer.quantized.values)
        else:
            assert torch.equal(weight.view(torch.uint8), layer.quantized.packed.codes)
            assert torch.equal(sent[f"{name}.weight_scale_inv"], layer.quantized.packed.scale)
    assert sent["model.norm.weight"].dtype == torch.bfloat16
    assert [name for name, _ in items[-12:]] == list(scales.to_named())


def test_experts_are_sent_one_by_one_with_the_trainers_bytes():
    plan = PrecisionPlan.preset("fp8-e2e")
    trainer = Trainer("tiny-qwen3-moe", plan)
    empty = skeleton("tiny-qwen3-moe")
    weights = checkpoint_tensors(empty, trainer.model.state_dict())
    precisions = {d.name: d.precision for d in plan.coverage(empty) if d.side == "rollout"}
    sent = dict(checkpoint_items(weights, precisions))
    stem = "model.layers.2.mlp.experts"
    fused = dict(float8_layers(trainer.model))[f"{stem}.gate_up_proj"].quantized.packed
    for half, name in enumerate(("gate_proj", "up_proj")):
        codes = sent[f"{stem}.5.{name}.weight"].view(torch.uint8)
        assert torch.equal(codes, fused.codes[5, half])
        assert torch.equal(sent[f"{stem}.5.{name}.weight_scale_inv"], fused.scale[5, half])
    assert sent["model.layers.2.mlp.gate.weight"].dtype == torch.bfloat16


def test_tied_weights_are_sent_once():
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=40, tie_word_embeddings=True))
    names = checkpoint_tensors(skeleton(model), model.state_dict()).keys()
    assert "lm_head.weight" in model.state_dict() and "lm_head.weight" not in names
    assert "model.embed_tokens.weight" in names
