"""Coverage: what a plan makes of a model, tensor by tensor; in formats, bytes and FLOPs, from its config alone.

    plan.report(model)      a DataFrame: one row per parameter and side, with the reason
    as_text(plan, model)    the same with equal layers folded into one line, shares, memory, what differs by side

A config is enough: the model is built on the meta device, where 671 billion parameters need no memory.

    bytes    FP8: one a code, plus scales (4 bytes a block, 1 where 32-blocks have E8M0 scales); everything else BF16, 2
    flops    per token: 2 for each weight a token meets (a token meets k of E experts); the trainer has three GEMMs
    fp8      how much of that runs on FP8 tensor cores: a GEMM does if both its operands are FP8

FLOPs are those of matrices. Attention's own (QK^T, PV) grow with the context and are BF16 in the recipe; they are left
out here, speed.py has them. What an engine stores is what is counted; the emulation on a CPU holds float32. Memory
leaves out activations, communication buffers and the second, transposed FP8 copy of weights that some trainers keep.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fp8lab.architectures import ARCHITECTURES
from fp8lab.names import expert_tensors, in_other_tower, is_router, layer_index, linear_modules
from fp8lab.operands import FP8, LinearPrecision
from fp8lab.precision import SIDES, PrecisionPlan, Side

if TYPE_CHECKING:
    import pandas

NEVER = {
    "norm": "a norm: few weights, wide range",
    "bias": "a bias: added after the GEMM, which accumulates in float32",
    "embedding": "an embedding: looked up, not multiplied",
    "other": "no linear: no rule for it",
}
GEMMS = (("weight", "activation"), ("weight", "gradient"), ("gradient", "activation"))
"""Operands of output, grad_input and grad_weight."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One parameter on one side."""

    name: str
    side: Side
    tensor: str
    """linear, experts, router, lm_head, embedding, norm, bias, other (convolutions, vision)."""
    shape: tuple[int, ...]
    format: str
    activation: str
    """Format of what it is multiplied with in the forward pass; empty if it is not multiplied."""
    gradient: str
    """Format of its output's gradient; empty on the rollout side."""
    block: str
    rule: str
    reason: str
    bytes: int
    flops: float
    """Per token: forward, and on the trainer side backward."""
    share: float
    """Of the side's FLOPs."""
    fp8: float
    """Share of its own FLOPs that are FP8."""


def meta_model(model: Any) -> nn.Module:
    """A model to look at: a module as it is; or, on the meta device, one of a transformers config, a dict of one
    (`model_type`, sizes), a name in ARCHITECTURES or a folder. ValueError if transformers makes no causal LM of it."""
    if isinstance(model, nn.Module):
        return model
    import transformers

    from fp8lab.models import resolve_model

    try:
        config = ARCHITECTURES.get(model, model) if isinstance(model, str) else model
        if isinstance(config, Mapping):
            config = transformers.AutoConfig.for_model(**config)
        elif isinstance(config, (str, Path)):
            config = transformers.AutoConfig.from_pretrained(resolve_model(config))
        if not isinstance(config, transformers.PretrainedConfig):
            raise ValueError(f"a {type(model).__name__} is neither a model, a config, a dict nor the name of one")
        with torch.device("meta"):
            kind = getattr(transformers, (config.architectures or ["AutoModelForCausalLM"])[0])
            return kind._from_config(config) if hasattr(kind, "_from_config") else kind.from_config(config)
    except Exception as error:
        raise ValueError(f"no causal language model from {str(model)[:80]!r}: {error}") from error


def rows(plan: PrecisionPlan, model: Any) -> list[Row]:
    """One Row per parameter and side, in the model's order; raises as `plan.coverage`."""
    model = meta_model(model)
    decisions = {(d.name, d.side): d for d in plan.coverage(model)}
    linears, experts = dict(linear_modules(model)), {name for name, _, _ in expert_tensors(model)}
    seen: dict[int, str] = {}
    found = []
    for name, parameter in model.named_parameters(remove_duplicate=False):
        tied = seen.setdefault(id(parameter), name)
        module = name.rpartition(".")[0]
        planned = name if name in experts else module if module in linears and name.endswith(".weight") else None
        kind = _kind(model, name, planned, experts)
        for side in SIDES:
            decision = decisions.get((planned, side))
            row = _row(name, side, kind, parameter, decision, _used(model, parameter) if kind == "experts" else 1.0)
            if tied != name:
                row = dataclasses.replace(row, bytes=0, reason=f"{row.reason}; tied to {tied}: one tensor")
            found.append(row)
    totals = {side: sum(row.flops for row in found if row.side == side) for side in SIDES}
    return [dataclasses.replace(row, share=row.flops / totals[row.side]) for row in found]


def report(plan: PrecisionPlan, model: Any) -> pandas.DataFrame:
    """The rows as a DataFrame; its columns are Row's fields."""
    import pandas

    return pandas.DataFrame([dataclasses.asdict(row) for row in rows(plan, model)])


def planned_flops(plan: PrecisionPlan, model: Any, side: Side) -> dict[str, float]:
    """FLOPs per token of the forward GEMMs that the plan makes FP8 on a side: by linear module, or fused expert
    tensor."""
    passes = len(GEMMS) if side == "trainer" else 1
    found = [row for row in rows(plan, model) if row.side == side and row.rule]
    return {row.name.removesuffix(".weight"): row.flops / passes for row in found}


def fp8_share(found: list[Row], side: Side) -> float:
    """Share of a side's FLOPs that are FP8."""
    return sum(row.share * row.fp8 for row in found if row.side == side)


def differences(found: list[Row]) -> list[tuple[Row, Row]]:
    """(rollout, trainer) rows of the parameters whose forward operands are not rounded alike on both sides."""
    keys = ("format", "activation", "block", "rule")
    trainer = {row.name: row for row in found if row.side == "trainer"}
    pairs = ((row, trainer[row.name]) for row in found if row.side == "rollout")
    return [(a, b) for a, b in pairs if any(getattr(a, key) != getattr(b, key) for key in keys)]


def memory(plan: PrecisionPlan, model: Any) -> dict[str, int]:
    """Bytes: the weights that each side's GEMMs read, KV cache a token, and the trainer's state (all unsharded)."""
    model = meta_model(model)
    found, parameters = rows(plan, model), sum(p.numel() for p in model.parameters())
    return {
        "rollout_weights": sum(row.bytes for row in found if row.side == "rollout"),
        "trainer_weights": sum(row.bytes for row in found if row.side == "trainer"),
        "kv_cache_per_token": kv_cache_bytes(plan, model.config),
        "master_weights": 4 * parameters,
        "adam": 8 * parameters,
        "gradients": 4 * parameters,
    }


def kv_cache_bytes(plan: PrecisionPlan, config: Any) -> int:
    """Bytes of one token's keys and values in the rollout engine, over all layers.

    Layers of linear attention keep a state of fixed size and count nothing; MLA (DeepSeek) stores one latent vector and
    the rotary key a layer (what vLLM does; transformers' own cache expands them). A sliding window only bounds how many
    tokens are kept.
    """
    config = config.get_text_config()
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    layers = sum("attention" in kind and "linear" not in kind for kind in kinds)
    attention = plan.rollout.attention
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    if rank := getattr(config, "kv_lora_rank", None):
        elements, scales = rank + config.qk_rope_head_dim, 1
    else:
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        elements, scales = 2 * heads * size, 2 * heads
    dynamic = 4 * scales if attention.is_fp8 and attention.scales == "per-token-head" else 0
    return layers * (elements * (1 if attention.is_fp8 else 2) + dynamic)


def as_text(plan: PrecisionPlan, model: Any) -> str:
    """The report to read: equal parameters of all layers in one line, then shares, memory, and what the sides differ
    in."""
    model = meta_model(model)
    found = rows(plan, model)
    trainer = {row.name: row for row in found if row.side == "trainer"}
    groups: dict[tuple, float] = {}
    counts: Counter[tuple] = Counter()
    for row in found:
        if row.side == "rollout":
            other = trainer[row.name]
            reasons = row.reason if row.reason == other.reason else f"{row.reason}; trainer: {other.reason}"
            key = re.sub(r"\.\d+\.", ".*.", row.name), _operands(row), _operands(other), reasons
            groups[key] = groups.get(key, 0.0) + row.share
            counts[key] += 1
    width = max(len(key[0]) for key in groups)
    lines = [repr(plan), "", f"{'parameter':{width}}   count  rollout      trainer      FLOPs  why"]
    for key, share in groups.items():
        name, rollout, train, reason = key
        lines.append(f"{name:{width}}  {counts[key]:5d}x  {rollout:11s}  {train:11s}{share:7.1%}  {reason}")
    lines.append("")
    lines += [f"{side:8s} {fp8_share(found, side):5.1%} of FLOPs in FP8" for side in SIDES]
    lines += [f"{name.replace('_', ' '):20s}{size_text(value)}" for name, value in memory(plan, model).items()]
    lines.append(f"{len(differences(found))} parameters are not rounded alike on both sides")
    return "\n".join(lines)


def _operands(row: Row) -> str:
    return f"{row.format} x {row.activation}" if row.activation else row.format


def _kind(model: nn.Module, name: str, planned: str | None, experts: set[str]) -> str:
    if planned is not None:
        inside = layer_index(name) is not None
        outside = "other" if in_other_tower(name) else "lm_head"
        return "experts" if name in experts else "router" if is_router(name) else "linear" if inside else outside
    module = model.get_submodule(name.rpartition(".")[0])
    if isinstance(module, nn.Embedding):
        return "embedding"
    if is_router(name) and name.endswith(".weight"):
        return "router"
    if name.endswith("bias"):
        return "bias"
    return "norm" if "norm" in name.lower() else "other"


def _used(model: nn.Module, parameter: nn.Parameter) -> float:
    """Share of the experts that one token meets."""
    config = model.config.get_text_config()
    names = ("num_experts_per_tok", "top_k_experts", "num_experts_per_token", "moe_topk")
    chosen = next((value for name in names if (value := getattr(config, name, None))), None)
    if chosen is None:
        raise ValueError(f"{type(config).__name__} does not say how many experts a token meets (looked for {names})")
    return chosen / len(parameter)


def _row(name: str, side: Side, kind: str, parameter: nn.Parameter, decision, used: float) -> Row:
    multiplied = kind in ("linear", "experts", "router", "lm_head") and not in_other_tower(name)
    precision = decision.precision if decision else None
    operands = {key: getattr(precision, key, "bf16") for key in ("weight", "activation", "gradient")}
    gemms = GEMMS if side == "trainer" else GEMMS[:1]
    is_fp8 = operands["weight"] in FP8
    return Row(
        name=name,
        side=side,
        tensor=kind,
        shape=tuple(parameter.shape),
        format=operands["weight"],
        activation=operands["activation"] if multiplied else "",
        gradient=operands["gradient"] if multiplied and side == "trainer" else "",
        block="x".join(map(str, precision.weight_block)) if is_fp8 else "",
        rule=precision.rule if precision and precision.is_fp8 else "",
        reason=decision.reason if decision else NEVER.get(kind, "a router: small, and its choices are discrete"),
        bytes=_stored(name, parameter, precision) if is_fp8 else 2 * parameter.numel(),
        flops=2.0 * parameter.numel() * used * len(gemms) if multiplied else 0.0,
        share=0.0,
        fp8=sum(all(operands[o] in FP8 for o in pair) for pair in gemms) / len(gemms) if multiplied else 0.0,
    )


def _stored(name: str, parameter: nn.Parameter, precision: LinearPrecision) -> int:
    """Bytes of codes and scales of an FP8 weight; gate and up of fused experts have blocks of their own."""
    *copies, rows_, columns = parameter.shape
    if copies and name.endswith("gate_up_proj"):
        copies, rows_ = [*copies, 2], rows_ // 2
    sizes = zip((rows_, columns), precision.weight_block, strict=True)
    blocks = math.prod(copies) * math.prod(math.ceil(size / (size if block < 0 else block)) for size, block in sizes)
    return parameter.numel() + blocks * (1 if precision.weight_block == (1, 32) else 4)


def size_text(value: float) -> str:
    """Bytes as text: 16.1 GB, 147.5 kB."""
    unit = next((u for u in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")) if value >= u[0]), (1, "B"))
    return f"{value / unit[0]:.1f} {unit[1]}"
