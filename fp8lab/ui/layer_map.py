"""LayerMap: a model's linear layers as a grid; click or drag to say which are FP8, on which side.

    grid = LayerMap(model, PrecisionPlan.preset("fp8-e2e"))
    grid                    shows it
    grid.plan               the plan as it is clicked now

A cell is a module; its left half is the rollout side, its right half the trainer. The buttons above choose which side a
click changes. Headers toggle a row or a column. With the keyboard: Tab reaches one cell, arrows move, space toggles.
With `show_errors` a bar in each cell shows a number per module, for example the mismatch that it causes.

The grid is an anywidget (layer_map.js) of a few kilobytes. Its state is plain lists, so tests can set them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anywidget
import ipywidgets as widgets
import traitlets

from fp8lab.names import layer_index
from fp8lab.precision import SIDES, Fallback, PrecisionPlan

HERE = Path(__file__).parent
CSS = """
.fp8lab-map { display: grid; gap: 3px; max-width: 900px; user-select: none; touch-action: none; }
.fp8lab-map button { font: 12px/1.2 sans-serif; border: 0; padding: 0; min-height: 24px; }
.fp8lab-map .head { background: none; color: #7a7a7a; cursor: pointer; padding: 0 6px; }
.fp8lab-map .head:hover { text-decoration: underline; }
.fp8lab-map .none { visibility: hidden; }
.fp8lab-map .cell { position: relative; display: flex; border-radius: 4px; overflow: hidden; cursor: pointer; }
.fp8lab-map .cell span { flex: 1; min-height: 24px; }
.fp8lab-map .cell span + span { border-left: 2px solid var(--jp-layout-color0, #fff); }
.fp8lab-map .fp8 { background: #d55e00; }
.fp8lab-map .bf16 { background: #2f7fd0; }
.fp8lab-map .cell i { position: absolute; left: 3px; bottom: 3px; height: 5px; max-width: calc(100% - 6px); }
.fp8lab-map .cell i { background: #fff; outline: 1px solid #000; }
.fp8lab-map button:focus-visible { outline: 3px solid #0a8f6a; outline-offset: 1px; }
"""


class LayerGrid(anywidget.AnyWidget):
    """The grid itself; `LayerMap` fills it."""

    _esm = HERE / "layer_map.js"
    _css = CSS
    names = traitlets.List(traitlets.Unicode()).tag(sync=True)
    columns = traitlets.List(traitlets.Unicode()).tag(sync=True)
    grid = traitlets.List(traitlets.List(traitlets.Int())).tag(sync=True)
    rollout = traitlets.List(traitlets.Bool()).tag(sync=True)
    trainer = traitlets.List(traitlets.Bool()).tag(sync=True)
    errors = traitlets.List(traitlets.Float(allow_none=True)).tag(sync=True)
    error_label = traitlets.Unicode("error").tag(sync=True)
    side = traitlets.Enum(("both", *SIDES), default_value="both").tag(sync=True)


class LayerMap:
    """The map of `model` (a transformers model, also on the meta device) under `plan`, whose fallbacks it edits."""

    def __init__(self, model: Any, plan: PrecisionPlan) -> None:
        self.base = PrecisionPlan(
            name=plan.name, **{s: dataclasses.replace(plan.side(s), fallback=Fallback()) for s in SIDES}
        )
        decisions = PrecisionPlan.preset("fp8-e2e").coverage(model)
        self.names = [d.name for d in decisions if d.side == "rollout" and d.precision.is_fp8]
        kinds = [name.split(f".{layer_index(name)}.", 1)[1] for name in self.names]
        columns = list(dict.fromkeys(kinds))
        layers = 1 + max(layer_index(name) or 0 for name in self.names)
        grid = [[-1] * len(columns) for _ in range(layers)]
        for i, (name, kind) in enumerate(zip(self.names, kinds, strict=True)):
            grid[layer_index(name)][columns.index(kind)] = i
        states = {s: [plan.decide(name, s, layers).precision.is_fp8 for name in self.names] for s in SIDES}
        short = [kind.rsplit(".", 1)[-1].removesuffix("_proj") for kind in columns]
        self.grid = LayerGrid(names=self.names, columns=short, grid=grid, errors=[None] * len(self.names), **states)
        self.side = widgets.ToggleButtons(
            options=["both", *SIDES], description="change", style={"button_width": "80px"}
        )
        self.note = widgets.HTML()
        widgets.link((self.side, "value"), (self.grid, "side"))
        self.grid.observe(lambda change: self._describe(), names=list(SIDES))
        self._describe()
        legend = widgets.HTML(
            "<span style='color:#d55e00'>&#9632;</span> FP8 &nbsp;<span style='color:#2f7fd0'>&#9632;</span> BF16 "
            "&nbsp; left half: rollout, right half: trainer"
        )
        self.view = widgets.VBox([widgets.HBox([self.side, legend]), self.grid, self.note])

    @property
    def plan(self) -> PrecisionPlan:
        """The plan as shown: the given one with the clicked modules in BF16; a side without FP8 stays without."""
        sides = {}
        for s in SIDES:
            kept = tuple(n for n, fp8 in zip(self.names, getattr(self.grid, s), strict=True) if not fp8)
            side = self.base.side(s)
            if not side.linear.is_fp8 and len(kept) < len(self.names):
                fp8 = self.base.side("rollout" if s == "trainer" else "trainer").linear
                side = dataclasses.replace(
                    side, linear=fp8 if fp8.is_fp8 else PrecisionPlan.preset("fp8-e2e").side(s).linear
                )
            if side.linear.is_fp8 and len(kept) == len(self.names):
                side, kept = dataclasses.replace(side, linear=PrecisionPlan().side(s).linear), ()
            sides[s] = dataclasses.replace(side, fallback=Fallback(modules=kept if side.linear.is_fp8 else ()))
        return PrecisionPlan(name="map", **sides)

    def show_errors(self, errors: Mapping[str, float], label: str = "error") -> None:
        """Draw a bar per module, as long as its number is large. errors: module name -> number >= 0."""
        unknown = sorted(set(errors) - set(self.names))
        if unknown:
            raise ValueError(
                f"no module {unknown[0]!r} on the map; it shows {self.names[0]!r} and {len(self.names) - 1} more"
            )
        self.grid.error_label = label
        self.grid.errors = [errors.get(name) for name in self.names]

    def _describe(self) -> None:
        parts = [f"{s}: {sum(getattr(self.grid, s))} of {len(self.names)} in FP8" for s in SIDES]
        same = "both sides alike" if self.grid.rollout == self.grid.trainer else "the sides differ"
        self.note.value = f"<small>{' &nbsp;·&nbsp; '.join([*parts, same])}</small>"

    def _ipython_display_(self) -> None:
        from IPython.display import display

        display(self.view)
