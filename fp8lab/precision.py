"""PrecisionPlan: which linear layers run in FP8, on which side, and why.

RL has two **sides**: the `rollout` engine that samples and the `trainer` that learns. A plan holds one `SidePlan` for
each: the formats of the three operands (weight, activation, gradient), the scale rule, and the layers that fall back to
BF16. For every module it answers "FP8 or BF16, and by which rule?" (`decide`, `coverage`), so nothing is quantized
silently.

What is planned: the `nn.Linear` modules of the decoder layers, i.e. the q/k/v/o and gate/up/down projections. Attention
itself (QK^T, softmax, PV), norms, activations and embeddings stay high precision; lm_head rounds its operands to BF16
and returns float32 logits; a MoE router is never FP8. This is the NeMo RL / DeepSeek-V3 recipe.

Presets: see `PRESETS`. A module pattern is a sequence of name parts that must match whole parts: "mlp.gate" matches
`layers.0.mlp.gate`, never `layers.0.mlp.gate_proj`; each part may use shell wildcards ("*_proj"); "re:..." is a regular
expression for the whole name.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal

from torch import nn

from fp8lab.quantizers import BlockQuantizer
from fp8lab.scales import SCALE_RULES

Side = Literal["rollout", "trainer"]
SIDES: tuple[Side, ...] = ("rollout", "trainer")
FP8 = ("e4m3", "e5m2")
LAYER_LISTS = ("layers", "layer", "h", "blocks")
ROUTERS = ("gate", "router", "shared_expert_gate")


def _choice(name: str, value: Any, allowed: tuple) -> None:
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}; allowed: {', '.join(map(str, allowed))}")


@dataclass(frozen=True, kw_only=True)
class LinearPrecision:
    """Formats of one linear layer's operands: `e4m3`, `e5m2` or `bf16` each."""

    weight: str = "e4m3"
    activation: str = "e4m3"
    gradient: str = "e4m3"
    """Format of grad_output in the two backward GEMMs."""
    rule: str = "default"
    """Scale rule of all three (see scales.SCALE_RULES)."""
    weight_block: tuple[int, int] = (128, 128)
    group: int = 128
    """Activations and gradients are quantized in 1 x group blocks."""
    weight_source: str = "bf16"
    """`bf16`: the float32 master weight is rounded to BF16 before it is quantized, as NeMo RL does; `fp32`: it is
    not."""
    output: str = "bf16"
    """Rounding of the result and of grad_input: `bf16`, or `float32` for lm_head's logits."""

    def __post_init__(self) -> None:
        for name in ("weight", "activation", "gradient"):
            _choice(name, getattr(self, name), (*FP8, "bf16"))
        _choice("rule", self.rule, tuple(SCALE_RULES))
        _choice("weight_source", self.weight_source, ("bf16", "fp32"))
        _choice("output", self.output, ("bf16", "float32"))
        for block in (self.weight_block, (1, self.group)):
            BlockQuantizer(block)  # ValueError for bad sizes

    @property
    def is_fp8(self) -> bool:
        """True if the weight or the activation is FP8."""
        return self.weight in FP8 or self.activation in FP8

    def __str__(self) -> str:
        if not self.is_fp8:
            return "bf16"
        rule = "" if self.rule == "default" else f" {self.rule}"
        return f"{self.weight}[{self.weight_block[0]}x{self.weight_block[1]}] x {self.activation}[1x{self.group}]{rule}"


BF16_LINEAR = LinearPrecision(weight="bf16", activation="bf16", gradient="bf16")
BF16_HEAD = dataclasses.replace(BF16_LINEAR, output="float32")


@dataclass(frozen=True, kw_only=True)
class AttentionPrecision:
    """Formats of attention and of the KV cache on one side: `e4m3` or `bf16` each. In BF16 they are not rounded at all:
    float32, as norms and softmax are (see the module's text)."""

    kv_cache: str = "bf16"
    """Storage of keys and values, after RoPE and q/k-norm."""
    query: str = "bf16"
    """Queries, as they enter QK^T."""
    probabilities: str = "bf16"
    """Softmax weights as they enter PV; scaled by 256 before they are rounded."""
    scales: str = "per-layer"
    """`per-layer`: one calibrated scale each for q, k and v (NeMo RL); `per-token-head`: dynamic, no calibration
    (vLLM)."""
    calibration: str = "max"
    """How per-layer scales are taken from real tokens: `max`, or `nemo_rl`, P99.9 of the maxima of micro-batches."""
    margin: float = 1.05
    """Factor on the calibrated amax."""

    def __post_init__(self) -> None:
        for name in ("kv_cache", "query", "probabilities"):
            _choice(name, getattr(self, name), ("e4m3", "bf16"))
        _choice("scales", self.scales, ("per-layer", "per-token-head"))
        _choice("calibration", self.calibration, ("max", "nemo_rl"))
        if type(self.margin) not in (int, float) or not 1 <= self.margin < float("inf"):
            raise ValueError(f"margin is {self.margin!r}; it must be a finite number >= 1")
        if self.kv_cache == "bf16" and (self.query, self.probabilities) != ("bf16", "bf16"):
            raise ValueError(
                f"query is {self.query} and probabilities are {self.probabilities} over a bf16 KV cache; FP8 attention "
                "needs kv_cache='e4m3'"
            )

    @property
    def is_fp8(self) -> bool:
        """True if keys and values are stored in FP8."""
        return self.kv_cache in FP8

    def __str__(self) -> str:
        if not self.is_fp8:
            return "bf16 KV"
        fp8 = [name for name, fmt in (("q", self.query), ("P", self.probabilities)) if fmt in FP8]
        return f"e4m3 KV{''.join('+' + name for name in fp8)} {self.scales}"


FP8_ATTENTION = AttentionPrecision(kv_cache="e4m3", query="e4m3", probabilities="e4m3")


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
    """Module patterns; see the module's text."""

    def __post_init__(self) -> None:
        for name in ("first", "last"):
            if type(getattr(self, name)) is not int or getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be an integer >= 0")
        object.__setattr__(self, "layers", tuple(self.layers))
        if isinstance(self.modules, str):
            raise ValueError(f"modules is the string {self.modules!r}; give a list of patterns")
        object.__setattr__(self, "modules", tuple(self.modules))
        if any(type(i) is not int or i < 0 for i in self.layers):
            raise ValueError(f"layers is {self.layers!r}; it must hold layer numbers >= 0")

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

    def __str__(self) -> str:
        kept = [f"{k}={v}" for k, v in dataclasses.asdict(self.fallback).items() if v]
        attention = f" + {self.attention}" if self.attention.is_fp8 else ""
        return f"{self.linear}{attention}" + (f" but bf16 for {', '.join(kept)}" if kept and self.linear.is_fp8 else "")


@dataclass(frozen=True)
class Decision:
    """What a plan says of one module on one side."""

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

    @classmethod
    def preset(cls, name: str, *, rule: str | None = None) -> PrecisionPlan:
        """The plan called `name` in `PRESETS`, with another scale rule if given; ValueError for any other name."""
        if name not in PRESETS:
            raise ValueError(f"precision plan is {name!r}; allowed: {', '.join(PRESETS)}")

        def side(plan: SidePlan) -> SidePlan:
            if rule is None or not plan.linear.is_fp8:
                return plan
            return dataclasses.replace(plan, linear=dataclasses.replace(plan.linear, rule=rule))

        rollout, trainer, _ = PRESETS[name]
        return cls(name=name, rollout=side(rollout), trainer=side(trainer))

    def side(self, side: Side) -> SidePlan:
        """The SidePlan of `rollout` or `trainer`."""
        _choice("side", side, SIDES)
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
        _choice("side", side, ("both", *SIDES))
        more = Fallback(first=first, last=last, layers=tuple(layers), modules=modules)
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
        """The precision of the linear module called `name` in a model of num_layers decoder layers, and the reason."""
        plan = self.side(side)
        layer = layer_index(name)
        if layer is None:
            return Decision(
                name, side, BF16_HEAD, "outside the decoder layers (lm_head): BF16 operands, float32 output"
            )
        if name.rsplit(".", 1)[-1] in ROUTERS:
            return Decision(name, side, BF16_HEAD, "a router: small, and its choices are discrete")
        if not plan.linear.is_fp8:
            return Decision(name, side, plan.linear, "this side is BF16")
        kept = plan.fallback.reason(name, layer, num_layers)
        if kept:
            return Decision(name, side, BF16_LINEAR, f"kept in BF16: {kept}")
        return Decision(name, side, plan.linear, f"plan {self.name}")

    def coverage(self, model: nn.Module) -> list[Decision]:
        """The decision for every linear module of a transformers model, on both sides; works on the meta device."""
        layers = num_decoder_layers(model)
        self.require_fit([name for name, _ in linear_modules(model)], layers)
        return [self.decide(name, side, layers) for side in SIDES for name, _ in linear_modules(model)]

    def require_fit(self, names: list[str], num_layers: int) -> None:
        """ValueError if a fallback names layers or modules that a model with these linears does not have."""
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
                    f"{side} fallback pattern {unused[0]!r} matches no linear of the model; a pattern must match whole "
                    f"name parts, for example of {names[0]!r}"
                )

    def same_on_both_sides(self) -> bool:
        """True if both sides round the same forward operands of the same layers in the same way."""
        a, b = (dataclasses.replace(side.linear, gradient="bf16") for side in (self.rollout, self.trainer))
        attention = self.rollout.attention == self.trainer.attention
        return a == b and attention and (self.rollout.fallback == self.trainer.fallback or not a.is_fp8)

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists and scalars, for JSON and YAML."""

        def plain(items: list[tuple[str, Any]]) -> dict[str, Any]:
            return {key: list(value) if isinstance(value, tuple) else value for key, value in items}

        return dataclasses.asdict(self, dict_factory=plain)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> PrecisionPlan:
        """The plan `to_dict` wrote; ValueError names unknown keys."""

        def build(kind: type, values: dict[str, Any]) -> Any:
            known = {f.name for f in dataclasses.fields(kind)}
            if unknown := sorted(set(values) - known):
                raise ValueError(f"unknown keys {unknown} for {kind.__name__}; allowed: {sorted(known)}")
            return kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})

        def side(values: dict[str, Any]) -> SidePlan:
            nested = {"linear": LinearPrecision, "attention": AttentionPrecision, "fallback": Fallback}
            return build(SidePlan, {k: build(nested[k], v) if k in nested else v for k, v in values.items()})

        return build(cls, {k: side(v) if k in SIDES else v for k, v in data.items()})

    def __repr__(self) -> str:
        return f"PrecisionPlan({self.name}: rollout {self.rollout}; trainer {self.trainer})"


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
        "fp8-e2e-kv": (kv, fp8, "FP8 linears on both sides, FP8 KV cache in the rollout; nobody ships this recipe"),
        "fp8-pow2": (pow2, pow2, "as fp8-e2e with power-of-two scales, Transformer Engine's and DeepGEMM's default"),
        "mxfp8-rollout": (mx, bf16, "1x32 blocks with power-of-two scales in the rollout's MLPs (Blackwell)"),
    }


PRESETS = _presets()
"""Preset name -> (rollout side, trainer side, a sentence)."""


def matches(pattern: str, name: str) -> bool:
    """True if `pattern` (see the module's text) matches the dotted module name."""
    if pattern.startswith("re:"):
        return re.fullmatch(pattern[3:], name) is not None
    parts, wanted = name.split("."), pattern.removeprefix("*.").split(".")
    windows = (parts[i : i + len(wanted)] for i in range(len(parts) - len(wanted) + 1))
    return any(all(fnmatchcase(p, w) for p, w in zip(window, wanted, strict=True)) for window in windows)


def layer_index(name: str) -> int | None:
    """The decoder layer number in a module name, or None: `model.layers.3.mlp.up_proj` -> 3."""
    parts = name.split(".")
    pairs = zip(parts, parts[1:], strict=False)
    return next((int(number) for key, number in pairs if key in LAYER_LISTS and number.isdigit()), None)


def linear_modules(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """(name, module) of every nn.Linear."""
    return ((name, m) for name, m in model.named_modules() if isinstance(m, nn.Linear))


def num_decoder_layers(model: nn.Module) -> int:
    """One more than the largest layer number in the model's module names; ValueError if there is none."""
    found = [layer_index(name) for name, _ in model.named_modules()]
    numbers = [i for i in found if i is not None]
    if not numbers:
        raise ValueError(f"{type(model).__name__} has no numbered decoder layers (looked for {', '.join(LAYER_LISTS)})")
    return max(numbers) + 1
