"""ArmEditor: an arm of one's own, tensor by tensor and side by side, for a RunPanel.

    editor = ArmEditor(lambda: base)      `base`: everything that has no control here
    editor.view                           the controls, and below them the plan in one line, or why it cannot run
    editor.config()                       base with this plan and this correction, or ValueError

Each side has its own formats, scale rule and layers in BF16; the correction is the loss's. Fields of the plan without a
control (block sizes, single modules, weight_source) stay as they were given. A control that means nothing at the moment
is disabled, and its value is not used: the rule of a side in BF16, the bounds of `none` and `is`.

Left out: rules and formats that differ between layers (LayerMap, for modules).
"""

from __future__ import annotations

import dataclasses
import functools
import html
import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ipywidgets as widgets

from fp8lab.corrections import MODES, WITHOUT_BOUNDS
from fp8lab.experiment import ExperimentConfig
from fp8lab.models import resolve_model
from fp8lab.operands import FP8, FP8_ATTENTION, AttentionPrecision
from fp8lab.precision import SIDES, PrecisionPlan, Side, SidePlan
from fp8lab.scales import SCALE_RULES

OWN = "custom"
"""Name of the arm, of its plan and of its curve."""
CORRECTION = ("importance_sampling", "importance_sampling_min", "importance_sampling_max")
"""GRPOConfig's fields that an ArmEditor sets; allow_uncorrected_fp8_rollout belongs to them."""
FORMATS = [("BF16", "bf16"), ("E4M3", "e4m3"), ("E5M2", "e5m2")]
ATTENTIONS = [
    ("BF16", AttentionPrecision()),
    ("E4M3 cache", AttentionPrecision(kv_cache="e4m3")),
    ("E4M3 cache, q and P", FP8_ATTENTION),
]
LARGEST = 1e6
"""The largest bound a browser is shown; JSON has no infinity."""
WIDE = {"style": {"description_width": "150px"}, "layout": {"width": "330px"}}


def layer_count(model: str) -> int | None:
    """Decoder layers of a checkpoint on this machine; None for another, which only loading tells about."""
    try:
        config = json.loads((Path(resolve_model(model)) / "config.json").read_text())
    except (OSError, ValueError):
        return None
    return config.get("num_hidden_layers") or config.get("text_config", {}).get("num_hidden_layers")


def with_correction_of(config: ExperimentConfig, other: ExperimentConfig, **changes: Any) -> ExperimentConfig:
    """`config` with the other's correction, and with these fields; ValueError as ExperimentConfig."""
    correction = {name: getattr(other.grpo, name) for name in CORRECTION}
    changes["allow_uncorrected_fp8_rollout"] = other.allow_uncorrected_fp8_rollout
    return dataclasses.replace(config, grpo=dataclasses.replace(config.grpo, **correction), **changes)


class SideEditor:
    """The controls of one side of a plan. layers: of the model, if known: the most that can stay in BF16."""

    def __init__(self, side: Side, given: SidePlan, layers: int | None) -> None:
        self.side = side
        self.weight = widgets.Dropdown(options=FORMATS, description="weights", **WIDE)
        self.activation = widgets.Dropdown(options=FORMATS, description="activations", **WIDE)
        self.attention = widgets.Dropdown(options=ATTENTIONS, description="KV cache, attention", **WIDE)
        self.rule = widgets.Dropdown(options=list(SCALE_RULES), description="scale rule", **WIDE)
        self.first = widgets.BoundedIntText(0, 0, layers or 1000, description="first layers in BF16", **WIDE)
        self.last = widgets.BoundedIntText(0, 0, layers or 1000, description="last layers in BF16", **WIDE)
        self.gradient = widgets.Dropdown(options=FORMATS, description="gradients", **WIDE)
        self.controls = [self.weight, self.activation, self.attention, self.rule, self.first, self.last]
        if side == "trainer":
            self.controls.append(self.gradient)
        self.show(given)

    def show(self, given: SidePlan) -> None:
        """Put a side's plan into the controls."""
        self.given, linear = given, given.linear
        self.weight.value, self.activation.value = linear.weight, linear.activation
        self.gradient.value, self.rule.value = linear.gradient, linear.rule
        if given.attention not in [value for _, value in self.attention.options]:
            self.attention.options = [*ATTENTIONS, (str(given.attention), given.attention)]
        self.attention.value = given.attention
        for control, count in ((self.first, given.fallback.first), (self.last, given.fallback.last)):
            control.max, control.value = max(control.max, count), count

    def value(self) -> SidePlan:
        """The side as the controls have it. A rollout has no gradients: their format follows the other two."""
        given, gradient = self.given.linear, self.gradient.value
        if self.side == "rollout":
            in_fp8 = self.weight.value in FP8 or self.activation.value in FP8
            gradient = given.gradient if given.is_fp8 == in_fp8 else "e4m3" if in_fp8 else "bf16"
        linear = dataclasses.replace(
            given, weight=self.weight.value, activation=self.activation.value, gradient=gradient
        )
        if linear.is_fp8:
            linear = dataclasses.replace(linear, rule=self.rule.value)
        fallback = dataclasses.replace(self.given.fallback, first=self.first.value, last=self.last.value)
        return SidePlan(linear=linear, attention=self.attention.value, fallback=fallback)

    def unused(self) -> list[widgets.Widget]:
        """Controls without a meaning while the side's linears are all BF16."""
        return [] if self.value().linear.is_fp8 else [self.rule, self.first, self.last]


class ArmEditor:
    """Controls for one config beside `base()`, which gives the rest: plan and correction; see the module's text."""

    def __init__(self, base: Callable[[], ExperimentConfig]) -> None:
        self._base, self.given, self._busy = base, base(), False
        layers = layer_count(self.given.model)
        self.sides = {side: SideEditor(side, self.given.plan.side(side), layers) for side in SIDES}
        self.mode = widgets.Dropdown(options=MODES, description="correction", **WIDE)
        self.low = widgets.BoundedFloatText(0, min=0, max=LARGEST, step=0.1, description="lower bound", **WIDE)
        self.high = widgets.BoundedFloatText(2, min=0, max=LARGEST, step=0.1, description="upper bound", **WIDE)
        text = "allow_uncorrected_fp8_rollout (an ablation)"
        self.uncorrected = widgets.Checkbox(False, description=text, indent=False)
        self.uncorrected.layout.width = "max-content"
        self.line = widgets.HTML()
        self.show(self.given)
        for control in self.controls():
            control.observe(self._on_change, names="value")

    def controls(self) -> Iterator[widgets.Widget]:
        """All of them."""
        for side in self.sides.values():
            yield from side.controls
        yield from (self.mode, self.low, self.high, self.uncorrected)

    def show(self, config: ExperimentConfig) -> None:
        """Put a config's plan and correction into the controls."""
        self.given, grpo = config, config.grpo
        for side, editor in self.sides.items():
            editor.show(config.plan.side(side))
        self.mode.value = grpo.importance_sampling
        self.low.value, self.high.value = (min(bound, LARGEST) for bound in self._given_bounds())
        self.uncorrected.value = config.allow_uncorrected_fp8_rollout
        self.refresh()

    def plan(self) -> PrecisionPlan:
        """The plan as the controls have it; ValueError if a side cannot be like that."""
        return PrecisionPlan(name=OWN, **{side: editor.value() for side, editor in self.sides.items()})

    def config(self) -> ExperimentConfig:
        """`base()` with the plan and the correction as the controls have them; ValueError for what cannot be."""
        base, bounds = self._base(), list(self._given_bounds())
        if self.mode.value not in WITHOUT_BOUNDS:
            shown = (self.low.value, self.high.value)
            bounds = [old if new == min(old, LARGEST) else new for old, new in zip(bounds, shown, strict=True)]
        correction = dict(zip(CORRECTION, (self.mode.value, *bounds), strict=True))
        grpo = dataclasses.replace(base.grpo, **correction)
        allow = self.uncorrected.value
        return dataclasses.replace(base, name=OWN, plan=self.plan(), grpo=grpo, allow_uncorrected_fp8_rollout=allow)

    def _given_bounds(self) -> tuple[float, float]:
        return self.given.grpo.importance_sampling_min, self.given.grpo.importance_sampling_max

    def _on_change(self, _change: Any) -> None:
        self.refresh()

    def refresh(self) -> None:
        """Say below the controls what they make, or why it cannot run; disable what means nothing now."""
        try:
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                config = self.config()
            text = html.escape(str(config.plan)) + "; correction " + correction_text(config)
            self.line.value = "<br>".join([f"<code>{text}</code>", *(html.escape(str(one.message)) for one in said)])
        except ValueError as error:
            self.line.value = f'<b style="color: #d5453e">This arm cannot run: {html.escape(str(error))}</b>'
        self.set_busy(self._busy)

    def set_busy(self, busy: bool) -> None:
        """Disable every control, or only those that mean nothing now."""
        self._busy = busy
        unused = [control for side in self.sides.values() for control in side.unused()]
        unused += [self.low, self.high] if self.mode.value in WITHOUT_BOUNDS else []
        for control in self.controls():
            control.disabled = busy or control in unused

    @functools.cached_property
    def view(self) -> widgets.Widget:
        """The controls, closed at first."""
        columns = [(side, editor.controls) for side, editor in self.sides.items()]
        columns.append(("loss", [self.mode, self.low, self.high, self.uncorrected]))
        boxes = [widgets.VBox([widgets.HTML(f"<b>{name}</b>"), *controls]) for name, controls in columns]
        note = widgets.HTML(f"All of this is for the arm <b>{OWN}</b> alone, the correction too.")
        grid = widgets.HBox(boxes, layout={"flex_flow": "row wrap"})
        inside = widgets.VBox([note, grid, self.line])
        return widgets.Accordion([inside], titles=("Your own arm",), selected_index=None)


def correction_text(config: ExperimentConfig) -> str:
    """A config's correction in a few words: `tis 0 .. 2`."""
    mode, low, high = (getattr(config.grpo, name) for name in CORRECTION)
    return mode if mode in WITHOUT_BOUNDS else f"{mode} {low:g} .. {high:g}"
