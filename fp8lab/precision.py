"""PrecisionPlan: which linear layers run in FP8, on which side, and why.

RL has two **sides**: the `rollout` engine that samples and the `trainer` that learns. A plan holds one `SidePlan` for
each: the formats of the three operands (weight, activation, gradient), the scale rule, and the layers that fall back to
BF16. For every module it answers "FP8 or BF16, and by which rule?" (`decide`, `coverage`), so nothing is quantized
silently.

What is planned: the `nn.Linear` modules of the decoder layers, i.e. the q/k/v/o and gate/up/down projections, MLA's
low-rank ones included, and the fused expert tensors of MoE models, each expert a matrix of its own. Attention itself
(QK^T, softmax, PV), norms, activations and embeddings stay high precision; lm_head rounds its operands to BF16 and
returns float32 logits; a MoE router is never FP8. This is the NeMo RL / DeepSeek-V3 recipe.

Presets: see `PRESETS`. Names and module patterns: see `names.py`. What a plan means for a model in bytes and FLOPs is
`report` (coverage.py), where it would break is `check` (preflight.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, get_args

from torch import nn

from fp8lab.checks import require_choice, require_types
from fp8lab.names import (
    check_pattern,
    in_other_tower,
    is_router,
    layer_index,
    matches,
    module_names,
    no_linears,
    num_decoder_layers,
    planned_names,
)
from fp8lab.operands import BF16_HEAD, BF16_LINEAR, FP8_ATTENTION, AttentionPrecision, LinearPrecision

if TYPE_CHECKING:
    import pandas

    from fp8lab.preflight import Problem

Side = Literal["rollout", "trainer"]
SIDES: tuple[Side, ...] = get_args(Side)


@dataclass(frozen=True, kw_only=True)
class Fallback:
    """Layers of one side that stay in BF16; the fields add up."""

    first: int = 0
    """The first N decoder layers."""
    last: int = 0
    """The last N decoder layers."""
    layers: tuple[int, ...] = ()
    """Decoder layers by number, from 0."""
    modules: tuple[str, ...] = ()
    """Module patterns; see names.py."""

    def __post_init__(self) -> None:
        for name in ("first", "last"):
            if type(getattr(self, name)) is not int or getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be an integer >= 0")
        for name in ("layers", "modules"):
            value = getattr(self, name)
            if isinstance(value, (str, Mapping)) or not isinstance(value, Iterable):
                raise ValueError(f"{name} is {value!r}; give a list")
            object.__setattr__(self, name, tuple(value))
        if any(type(i) is not int or i < 0 for i in self.layers):
            raise ValueError(f"layers is {self.layers!r}; it must hold layer numbers >= 0")
        for pattern in self.modules:
            check_pattern(pattern)

    def reason(self, name: str, layer: int, num_layers: int) -> str | None:
        """Why this module stays in BF16, or None."""
        if layer < self.first:
            return f"one of the first {self.first} layers"
        if layer >= num_layers - self.last:
            return f"one of the last {self.last} layers"
        if layer in self.layers:
            return f"layer {layer} is listed"
        return next((f"matches {pattern!r}" for pattern in self.modules if matches(pattern, name)), None)


@dataclass(frozen=True, kw_only=True)
class SidePlan:
    """One side: the precision of its planned linears, of its attention, and what falls back to BF16."""

    linear: LinearPrecision = BF16_LINEAR
    attention: AttentionPrecision = field(default_factory=AttentionPrecision)
    fallback: Fallback = field(default_factory=Fallback)

    def __post_init__(self) -> None:
        require_types(self)

    def __str__(self) -> str:
        kept = [f"{k}={v}" for k, v in dataclasses.asdict(self.fallback).items() if v]
        attention = f" + {self.attention}" if self.attention.is_fp8 else ""
        return f"{self.linear}{attention}" + (f" but bf16 for {', '.join(kept)}" if kept and self.linear.is_fp8 else "")


@dataclass(frozen=True)
class Decision:
    """What a plan says of one module, or one fused expert tensor, on one side."""

    name: str
    side: Side
    precision: LinearPrecision
    reason: str


@dataclass(frozen=True, kw_only=True)
class PrecisionPlan:
    """The precision of both sides; frozen, comparable, and one line when printed."""

    name: str = "custom"
    rollout: SidePlan = field(default_factory=SidePlan)
    trainer: SidePlan = field(default_factory=SidePlan)

    def __post_init__(self) -> None:
        require_types(self)

    @classmethod
    def preset(cls, name: str, *, rule: str | None = None) -> PrecisionPlan:
        """The plan called `name` in `PRESETS`, with another scale rule if given; ValueError for any other name."""
        if not isinstance(name, str) or name not in PRESETS:
            raise ValueError(f"precision plan is {name!r}; allowed: {', '.join(PRESETS)}")

        def side(plan: SidePlan) -> SidePlan:
            if rule is None or not plan.linear.is_fp8:
                return plan
            return dataclasses.replace(plan, linear=dataclasses.replace(plan.linear, rule=rule))

        rollout, trainer, _ = PRESETS[name]
        return cls(name=name, rollout=side(rollout), trainer=side(trainer))

    def side(self, side: Side) -> SidePlan:
        """The SidePlan of `rollout` or `trainer`."""
        require_choice("side", side, SIDES)
        return getattr(self, side)

    def with_bf16(
        self,
        *,
        first: int = 0,
        last: int = 0,
        layers: Iterable[int] = (),
        modules: Iterable[str] = (),
        side: str = "both",
    ) -> PrecisionPlan:
        """A new plan in which these layers also stay in BF16, on `both` sides, the `rollout` or the `trainer`."""
        require_choice("side", side, ("both", *SIDES))
        more = Fallback(first=first, last=last, layers=layers, modules=modules)
        changes = {}
        for s in SIDES if side == "both" else (side,):
            old = self.side(s).fallback
            merged = Fallback(
                first=max(old.first, more.first),
                last=max(old.last, more.last),
                layers=tuple(sorted({*old.layers, *more.layers})),
                modules=tuple(dict.fromkeys((*old.modules, *more.modules))),
            )
            changes[s] = dataclasses.replace(self.side(s), fallback=merged)
        return dataclasses.replace(self, **changes)

    def decide(self, name: str, side: Side, num_layers: int) -> Decision:
        """The precision of the linear (or fused expert tensor) called `name` in a model of num_layers decoder layers,
        and the reason."""
        plan = self.side(side)
        layer = layer_index(name)
        if in_other_tower(name):
            return Decision(name, side, BF16_HEAD, "another tower than the language model's, for example vision")
        if layer is None:
            return Decision(name, side, BF16_HEAD, "outside the decoder layers: BF16 operands, float32 output")
        if is_router(name):
            return Decision(name, side, BF16_HEAD, "a router: small, and its choices are discrete")
        if not plan.linear.is_fp8:
            return Decision(name, side, plan.linear, "this side is BF16")
        kept = plan.fallback.reason(name, layer, num_layers)
        if kept:
            return Decision(name, side, BF16_LINEAR, f"kept in BF16: {kept}")
        return Decision(name, side, plan.linear, f"plan {self.name}")

    def coverage(self, model: nn.Module) -> list[Decision]:
        """The decision for every linear and fused expert tensor of a transformers model, on both sides; works on the
        meta device. ValueError if a fallback does not fit the model, or its decoder layers hold nothing to plan."""
        layers, names = num_decoder_layers(model), planned_names(model)
        if all(layer_index(name) is None for name in names):
            raise ValueError(no_linears(model))
        self.require_fit(module_names(model), layers)
        return [self.decide(name, side, layers) for side in SIDES for name in names]

    def report(self, model: Any) -> pandas.DataFrame:
        """One row per parameter and side: see coverage.report."""
        from fp8lab.coverage import report

        return report(self, model)

    def check(self, model: Any = None, **setting: Any) -> list[Problem]:
        """What would break, before a weight is loaded: see preflight.check."""
        from fp8lab.preflight import check

        return check(self, model, **setting)

    def require_fit(self, names: list[str], num_layers: int) -> None:
        """ValueError if a fallback names layers or modules that a model with these names does not have."""
        for side in SIDES:
            fallback = self.side(side).fallback
            for what, most in (
                ("first", fallback.first),
                ("last", fallback.last),
                ("layers", max(fallback.layers, default=-1) + 1),
            ):
                if most > num_layers:
                    raise ValueError(
                        f"{side} fallback {what}={getattr(fallback, what)!r} asks for more than the model's "
                        f"{num_layers} decoder layers (numbered 0 to {num_layers - 1})"
                    )
            unused = [p for p in fallback.modules if not any(matches(p, name) for name in names)]
            if unused:
                raise ValueError(
                    f"{side} fallback pattern {unused[0]!r} matches no module of the model; a pattern must match whole "
                    f"name parts, for example of {next(iter(names), None)!r}"
                )

    def same_on_both_sides(self) -> bool:
        """True if both sides round the same forward operands of the same layers in the same way."""
        a, b = (dataclasses.replace(side.linear, gradient="bf16") for side in (self.rollout, self.trainer))
        attention = self.rollout.attention == self.trainer.attention
        return a == b and attention and (self.rollout.fallback == self.trainer.fallback or not a.is_fp8)

    def diff(self, other: PrecisionPlan) -> list[str]:
        """What differs, one line each: `rollout.linear.rule: default -> pow2`; empty for equal plans."""
        mine, theirs = _flat(self.to_dict()), _flat(other.to_dict())
        return [f"{key}: {mine[key]} -> {theirs[key]}" for key in mine if mine[key] != theirs[key]]

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists and scalars, for JSON and YAML."""

        def plain(items: list[tuple[str, Any]]) -> dict[str, Any]:
            return {key: list(value) if isinstance(value, tuple) else value for key, value in items}

        return dataclasses.asdict(self, dict_factory=plain)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> PrecisionPlan:
        """The plan `to_dict` wrote; missing keys take their defaults. ValueError names unknown keys and wrong types."""
        nested = {"linear": LinearPrecision, "attention": AttentionPrecision, "fallback": Fallback}

        def build(kind: type, where: str, values: Any, parts: Mapping[str, Any]) -> Any:
            known = sorted(f.name for f in dataclasses.fields(kind))
            if not isinstance(values, Mapping):
                raise ValueError(f"{where} is {values!r}; it must be a mapping with keys among {known}")
            if unknown := sorted(map(str, set(values) - set(known))):
                raise ValueError(f"unknown keys {unknown} for {kind.__name__} ({where}); allowed: {known}")
            return kind(**{k: parts[k](v) if k in parts else _hashable(v) for k, v in values.items()})

        def side(where: str, values: Any) -> SidePlan:
            parts = {k: partial(build, kind, f"{where}.{k}", parts={}) for k, kind in nested.items()}
            return build(SidePlan, where, values, parts)

        return build(cls, "plan", data, {s: partial(side, s) for s in SIDES})

    def to_yaml(self) -> str:
        """The plan as YAML."""
        import yaml

        return yaml.safe_dump(self.to_dict(), sort_keys=False)

    @classmethod
    def from_yaml(cls, text: str) -> PrecisionPlan:
        """The plan `to_yaml` wrote; ValueError as from_dict."""
        import yaml

        try:
            return cls.from_dict(yaml.safe_load(text))
        except yaml.YAMLError as error:
            raise ValueError(f"the plan is no YAML: {error}") from error

    def __repr__(self) -> str:
        return f"PrecisionPlan({self.name}: rollout {self.rollout}; trainer {self.trainer})"


def _flat(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in data.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return flat


def _hashable(value: Any) -> Any:
    return tuple(_hashable(v) for v in value) if isinstance(value, list) else value


def _presets() -> dict[str, tuple[SidePlan, SidePlan, str]]:
    bf16, fp8 = SidePlan(), SidePlan(linear=LinearPrecision())
    kv = dataclasses.replace(fp8, attention=FP8_ATTENTION)
    pow2 = SidePlan(linear=LinearPrecision(rule="pow2"))
    mx = SidePlan(
        linear=LinearPrecision(rule="pow2", weight_block=(1, 32), group=32),
        fallback=Fallback(modules=("*.[qkvo]_proj",)),
    )
    return {
        "bf16": (bf16, bf16, "no FP8"),
        "fp8-rollout": (fp8, bf16, "FP8 sampling, BF16 training"),
        "fp8-e2e": (fp8, fp8, "FP8 linears on both sides: NeMo RL's end-to-end recipe"),
        "fp8-rollout-kv": (kv, bf16, "FP8 linears, KV cache and attention in the rollout: NeMo RL's only KV recipe"),
        "fp8-e2e-kv": (kv, fp8, "FP8 linears on both sides; in the rollout k, v, q and P in FP8; nobody ships this"),
        "fp8-pow2": (pow2, pow2, "as fp8-e2e with power-of-two scales, Transformer Engine's and DeepGEMM's default"),
        "mxfp8-rollout": (mx, bf16, "1x32 blocks with power-of-two scales in the rollout's MLPs (Blackwell)"),
    }


PRESETS = _presets()
"""Preset name -> (rollout side, trainer side, a sentence)."""
