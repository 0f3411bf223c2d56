"""FallbackPanel: click which modules stay in BF16, press Measure, compare with earlier tries.

    panel = FallbackPanel(model, PrecisionPlan.preset("fp8-rollout"), measure)
    panel                       shows it
    panel.map.plan              the plan as it is clicked now
    panel.measure()             what the button does

`measure` maps a plan to a MismatchReport. It runs in the callback, so it should take a second or two; training belongs
into a RunPanel. An exception is shown in the panel and kept in `panel.error`.
"""

from __future__ import annotations

import html
from collections.abc import Callable
from typing import Any

import ipywidgets as widgets

from fp8lab import coverage
from fp8lab.diagnostics import MismatchReport
from fp8lab.precision import SIDES, PrecisionPlan
from fp8lab.ui.layer_map import LayerMap
from fp8lab.ui.plots import ARMS

CELL = "style='padding: 2px 14px 2px 0; text-align: left'"


def flops_kept(plan: PrecisionPlan, model: Any, side: str = "rollout") -> float:
    """Share of the FLOPs of a model's linear layers that a side of the plan leaves in BF16."""
    rows = [row for row in coverage.rows(plan, model) if row.side == side and row.tensor == "linear"]
    return 1 - sum(row.flops * row.fp8 for row in rows) / sum(row.flops for row in rows)


class FallbackPanel:
    """A LayerMap of `model` under `plan`, a button that measures what is clicked, and a table of the tries."""

    def __init__(self, model: Any, plan: PrecisionPlan, measure: Callable[[PrecisionPlan], MismatchReport]) -> None:
        self.model, self._measure = model, measure
        self.tries: list[dict[str, float]] = []
        self.error: BaseException | None = None
        self.map = LayerMap(model, plan)
        self.map.side.value = "rollout"
        self.button = widgets.Button(description="Measure", button_style="primary", icon="play")
        self.button.on_click(self._on_click)
        self.table = widgets.HTML()
        self.status = widgets.HTML("Click modules (or a row's name), then press Measure.")
        self.view = widgets.VBox([self.map.view, widgets.HBox([self.button, self.status]), self.table])

    def measure(self) -> dict[str, float]:
        """Measure the plan as it is clicked; the try's row, which the table shows, too."""
        plan = self.map.plan
        report = self._measure(plan)
        row = {f"fp8_{side}": sum(getattr(self.map.grid, side)) for side in SIDES}
        row |= {"flops_kept": flops_kept(plan, self.model), "k3": report.gen_kl_error}
        row |= {"token_mult_prob_error": report.token_mult_prob_error}
        self.tries.append(row)
        self.table.value = self._table()
        self.status.value = f"Measured {len(self.tries)} plan{'s' * (len(self.tries) > 1)} on the same tokens."
        return row

    def _on_click(self, _button: Any) -> None:
        try:
            self.measure()
        except Exception as error:  # Jupyter drops exceptions of callbacks
            self.error = error
            text = html.escape(f"{type(error).__name__}: {error}")
            self.status.value = f"<b style='color: #d5453e'>{text}</b>"

    def _table(self) -> str:
        top = max(row["k3"] for row in self.tries) or 1.0
        heads = ("try", "FP8 in rollout", "in trainer", "FLOPs in BF16", "token_mult_prob_error", "k3", "")
        lines = ["".join(f"<th {CELL}>{head}</th>" for head in heads)]
        for number, row in enumerate(self.tries, 1):
            width = max(1, round(160 * row["k3"] / top)) if row["k3"] else 0
            color = ARMS["fp8-rollout"].color
            bar = f"<div style='height: 12px; width: {width}px; background: {color}'></div>"
            cells = [number, row["fp8_rollout"], row["fp8_trainer"], f"{row['flops_kept']:.1%}"]
            cells += [f"{row['token_mult_prob_error']:.4f}", f"{row['k3']:.2e}", bar]
            lines.append("".join(f"<td {CELL}>{cell}</td>" for cell in cells))
        return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"

    def _ipython_display_(self) -> None:
        from IPython.display import display

        display(self.view)
