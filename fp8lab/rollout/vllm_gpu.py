"""What vLLM on a GPU must be told so that it holds the trainer's bytes. **Written, never run on a GPU.**

vLLM has FP8 GEMMs of its own there (W8A8: weights in 128x128 blocks, activations 1x128). Given a plan, three things
have to agree, and each function here is one of them:

    fp8_config        which layers are FP8: `quant_method: fp8` with the plan's BF16 layers as `ignored_layers`
    deep_gemm         the scale rule: DeepGEMM rounds scales up to powers of two by default (VLLM_USE_DEEP_GEMM_E8M0)
    checkpoint_items  the bytes: codes and scales quantized by us, under the names of an FP8 checkpoint

KV scales go the same way, at the end of the weights: since July 2026 vLLM takes none itself. A scale that does not
arrive is silently 1.0 there, so AttentionScales refuses a layer too few before anything is sent.
Sources: vLLM 0.32's fp8.py, quant_utils.is_layer_skipped and envs.py; NeMo RL's refit (fp8.load_weights).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from fp8lab.attention_scales import AttentionScales
from fp8lab.formats import round_bf16
from fp8lab.linear import quantize_weight
from fp8lab.operands import LinearPrecision
from fp8lab.precision import Decision, PrecisionPlan
from fp8lab.scales import ScaleRule

FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("experts.gate_up_proj", "experts.down_proj"))
"""Matrices that vLLM runs as one layer, and therefore in one precision."""
SUPPORTED = {"weight": "e4m3", "activation": "e4m3", "weight_block": (128, 128), "group": 128}


def ignored_layers(decisions: Iterable[Decision]) -> list[str]:
    """Names of the linears that stay in BF16, for vLLM's `ignored_layers`; experts under their module's name.

    ValueError if matrices that vLLM fuses disagree.
    """
    fp8 = {d.name: d.precision.is_fp8 for d in decisions if d.side == "rollout"}
    for name in fp8:
        for group in FUSED:
            stem = name.removesuffix(group[0])
            others = [stem + part for part in group if stem + part in fp8]
            if stem != name and len({fp8[other] for other in others}) > 1:
                raise ValueError(
                    f"{', '.join(others)} are one layer in vLLM but not of one precision in the plan; keep all of them "
                    f"in BF16, or none (with_bf16(modules=[...]))"
                )
    return sorted(
        {name.rpartition(".experts.")[0] + ".experts" if ".experts." in name else name for name in fp8 if not fp8[name]}
    )


def fp8_config(decisions: Iterable[Decision]) -> dict[str, Any] | None:
    """The `quantization_config` of a block-FP8 checkpoint for these decisions; None if all are BF16.

    ValueError for formats or blocks that vLLM's FP8 linears do not have.
    """
    decisions = [d for d in decisions if d.side == "rollout"]
    for decision in (d for d in decisions if d.precision.is_fp8):
        found = {key: getattr(decision.precision, key) for key in SUPPORTED}
        if found != SUPPORTED:
            raise ValueError(f"{decision.name} has {found}; vLLM's block FP8 on a GPU allows {SUPPORTED}")
    if not any(d.precision.is_fp8 for d in decisions):
        return None
    return {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "ignored_layers": ignored_layers(decisions),
    }


def deep_gemm(precision: LinearPrecision, environment: Mapping[str, str]) -> dict[str, str]:
    """What to add to `environment` before vLLM starts, so that its scales follow the plan's rule; {} for BF16.

    ValueError if the environment already says the opposite.
    """
    if not precision.is_fp8:
        return {}
    wanted = "1" if ScaleRule.preset(precision.rule).pow2 else "0"
    found = environment.get("VLLM_USE_DEEP_GEMM_E8M0", wanted)
    if found != wanted or (wanted == "1" and environment.get("VLLM_USE_DEEP_GEMM", "1") == "0"):
        kind = "power-of-two" if wanted == "1" else "float32"
        raise ValueError(
            f"the plan's scale rule {precision.rule!r} has {kind} scales, but VLLM_USE_DEEP_GEMM_E8M0={found} and "
            f"VLLM_USE_DEEP_GEMM={environment.get('VLLM_USE_DEEP_GEMM', '1')}; unset both, or choose the other rule"
        )
    return {"VLLM_USE_DEEP_GEMM_E8M0": wanted}


def engine_options(plan: PrecisionPlan, decisions: Iterable[Decision]) -> dict[str, Any]:
    """Arguments for vllm.LLM that follow from the plan's rollout side; `dummy`: a refit brings all weights."""
    overrides: dict[str, Any] = {"head_dtype": "float32"}
    options: dict[str, Any] = {"dtype": "bfloat16", "load_format": "dummy", "hf_overrides": overrides}
    if config := fp8_config(decisions):
        overrides["quantization_config"] = config
    if plan.rollout.attention.is_fp8:
        per_layer = plan.rollout.attention.scales == "per-layer"
        options["kv_cache_dtype"] = "fp8_e4m3" if per_layer else "fp8_per_token_head"
    return options


def checkpoint_items(
    weights: Mapping[str, torch.Tensor],
    precisions: Mapping[str, LinearPrecision],
    scales: AttentionScales | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) as an FP8 checkpoint has them: codes and `weight_scale_inv` of FP8 linears, quantized here from
    the float32 masters, everything else in BF16, KV scales last.

    weights: under a checkpoint's names, each expert by itself; precisions: of linears, and of fused expert tensors
    under the module's `experts.gate_up_proj` and `experts.down_proj`.
    """
    for name, tensor in weights.items():
        precision = precisions.get(_planned_name(name))
        if precision is None or not precision.is_fp8:
            yield name, round_bf16(tensor).bfloat16()
        else:
            packed = quantize_weight(tensor, precision).packed
            yield name, packed.codes.view(torch.float8_e4m3fn)
            yield f"{name}_scale_inv", packed.scale
    for name, scale in (scales.to_named() if scales else {}).items():
        yield name, torch.tensor([scale])


def _planned_name(name: str) -> str:
    """The plan's name for a checkpoint's: `mlp.experts.3.up_proj.weight` -> `mlp.experts.gate_up_proj`."""
    name = name.removesuffix(".weight")
    stem, experts, last = name.rpartition(".experts.")
    if not experts:
        return name
    return f"{stem}.experts.{'down_proj' if last.endswith('down_proj') else 'gate_up_proj'}"
