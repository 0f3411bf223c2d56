"""Figures of runs and of mismatch: pure functions from rows to plotly figures.

One look everywhere: BF16 is blue, FP8 is orange, and purple is the arm that is both (FP8 rollout, BF16 trainer). The
three differ in lightness and dash as well, so they survive colour blindness and grey print. Backgrounds are transparent
and text is a grey that reads on white and on black, so a figure fits JupyterLab's light and dark theme. Every figure
names its backend.

A *run* here is a list of metric rows as `experiment.run` logs them; functions take `{arm: rows}`. An arm's name is a
plan's name, with what stays in BF16 behind it: "fp8-rollout", "fp8-rollout, last 1 in BF16".

Left out: images (`figure.write_image` needs a browser) and any file writing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from fp8lab.compare import value_text

Runs = Mapping[str, Sequence[Mapping[str, Any]]]

TEXT, GRID, CLEAR = "#7a7a7a", "rgba(128,128,128,0.22)", "rgba(0,0,0,0)"
FLOOR = 1e-7
"""Where a log axis puts a mismatch of exactly zero."""
ALARM = 0.05
"""NeMo RL's docs/guides/grpo.md: a token_mult_prob_error above 1.05 needs a look."""
CONFIG = {
    "displaylogo": False,
    "responsive": False,  # JupyterLab resizes figures itself; True makes them collapse when its theme is changed
    "displayModeBar": "hover",
    "modeBarButtonsToRemove": ["sendChartToCloud", "select2d", "lasso2d", "autoScale2d"],
}
"""plotly's settings for every figure: no logo, and no button that sends data anywhere."""


@dataclass(frozen=True)
class Arm:
    """How a precision looks."""

    label: str
    color: str
    dash: str
    symbol: str


ARMS = {
    "bf16": Arm("BF16", "#2f7fd0", "solid", "circle"),
    "fp8-rollout": Arm("FP8 rollout only", "#b84fa0", "dash", "square"),
    "fp8-e2e": Arm("FP8 end to end", "#d55e00", "solid", "diamond"),
}
OTHER = Arm("", "#0a8f6a", "solid", "cross")
LINES = (("#0a8f6a", "solid"), ("#8a6fd1", "dash"), ("#a87b00", "dot"))
"""Colour and dash of lines that stand for no format."""

PUBLISHED = pd.DataFrame(
    [
        ("bf16", 0.616, "quoted in news of NVIDIA's blog post; we have not seen the runs"),
        ("fp8-rollout", 0.586, "the same; whether importance sampling was on in this arm is unclear there"),
        ("fp8-e2e", 0.613, "the same"),
    ],
    columns=["arm", "accuracy", "provenance"],
)
"""Llama 3.1 8B Instruct, GRPO on math, validation accuracy (NVIDIA's NeMo RL FP8 recipe, April 2026)."""


def arm_style(arm: str) -> Arm:
    """The look of an arm; a variant ("fp8-e2e, last 1 in BF16") keeps its family's colour and is dotted."""
    family, _, rest = arm.partition(", ")
    base = ARMS.get(family, OTHER)
    if not rest:
        return base if base.label else Arm(arm, base.color, base.dash, base.symbol)
    return Arm(f"{base.label or family}, {rest}", base.color, "dot", f"{base.symbol}-open")


def frame(runs: Runs) -> pd.DataFrame:
    """One row a step and arm: all runs in one table, `arm` first."""
    rows = [{"arm": arm, **row} for arm, run in runs.items() for row in run]
    return pd.DataFrame(rows) if rows else pd.DataFrame(columns=["arm", "step"])


def finish(figure: go.Figure, title: str, backend: str, *, height: int = 360) -> go.Figure:
    """Give a figure the common look, a title and its backend; returns it."""
    kind = {"emulated": "emulated: operands rounded, GEMMs in float32; says nothing about speed"}.get(backend, backend)
    figure.update_layout(
        title={"text": title, "subtitle": {"text": f"backend: {kind}", "font": {"size": 11, "color": TEXT}}, "x": 0.01},
        template="none",
        font={"color": TEXT, "size": 13},
        paper_bgcolor=CLEAR,
        plot_bgcolor=CLEAR,
        height=height,
        autosize=True,
        margin={"l": 70, "r": 20, "t": 84, "b": 50},
        legend={"orientation": "h", "yanchor": "bottom", "y": 1.0, "xanchor": "right", "x": 1, "bgcolor": CLEAR},
        hoverlabel={"font": {"size": 12}},
    )
    axis = {
        "title_font_size": 13,
        "gridcolor": GRID,
        "zeroline": False,
        "linecolor": TEXT,
        "tickcolor": TEXT,
        "ticks": "outside",
    }
    figure.update_xaxes(**axis)
    figure.update_yaxes(**axis, automargin=True, title_standoff=12)
    return figure


def show(figure: go.Figure) -> None:
    """Display a figure with `CONFIG`: no logo, no link out."""
    figure.show(config=CONFIG)


def live_figure(runs: Runs, steps: int, *, backend: str = "emulated") -> go.Figure:
    """Two rows over the training step: accuracy above, mismatch between the engines below. Feed it with
    `update_live`."""
    figure = make_subplots(rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.08)
    figure.update_yaxes(title_text="sampled accuracy", row=1, col=1)
    mismatch_axis = {"type": "log", "dtick": 1, "exponentformat": "power"}
    figure.update_yaxes(title_text="token_mult_prob_error − 1", row=2, col=1, **mismatch_axis)
    figure.update_xaxes(title_text="training step", row=2, col=1)
    line = {"color": TEXT, "width": 1, "dash": "dot"}
    figure.add_shape(type="line", xref="x2 domain", x0=0, x1=1, yref="y2", y0=ALARM, y1=ALARM, line=line)
    alarm = {"text": "NeMo RL: look closer above this line", "xref": "x2 domain", "yref": "y2", "x": 0.01}
    figure.add_annotation(**alarm, y=float(np.log10(ALARM)), yanchor="bottom", showarrow=False, font_size=11)
    key = {"text": "markers: validation prompts · thin lines: training prompts", "xref": "x domain", "yref": "y domain"}
    figure.add_annotation(**key, x=0.99, y=0.02, xanchor="right", yanchor="bottom", showarrow=False, font_size=11)
    finish(figure, "Accuracy and engine mismatch while training", backend, height=540)
    add_arms(figure, runs)
    update_live(figure, runs, steps)
    return figure


def renew(figure: go.FigureWidget) -> None:
    """Bring up to date what the next page to load will show: inside a box, plotly would give it the first state."""
    figure._repr_mimebundle_()


def add_arms(figure: go.Figure, runs: Runs) -> None:
    """Add the curves of every arm that a `live_figure` does not have yet, without points."""
    drawn = {trace.meta for trace in figure.data}
    for arm in runs:
        if f"{arm}/mismatch" not in drawn:
            figure.add_traces(_live_traces(arm))


def update_live(figure: go.Figure, runs: Runs, steps: int) -> None:
    """Put the runs' rows into the curves of a `live_figure`, in place (call `add_arms` first; safe within
    `batch_update`)."""
    least, highest, lowest = 0.22, 0.5, 2e-5
    for trace in figure.data:
        arm, _, kind = trace.meta.rpartition("/")
        points = [(row["step"], row[_COLUMN[kind]]) for row in runs.get(arm, ()) if _COLUMN[kind] in row]
        trace.x = [x for x, _ in points]
        trace.y = [max(y - 1, FLOOR) if kind == "mismatch" else y for _, y in points]
        if kind == "mismatch":
            lowest = min([lowest, *(max(y - 1, FLOOR) for _, y in points)])
        else:
            least, highest = min([least, *(y for _, y in points)]), max([highest, *(y for _, y in points)])
    figure.layout.xaxis.range = figure.layout.xaxis2.range = [-0.02 * steps, 1.02 * steps]
    figure.layout.yaxis.range = [least - 0.02, highest + 0.1]
    figure.layout.yaxis2.range = [float(np.floor(np.log10(lowest))), -0.9]


_COLUMN = {"reward": "reward", "validation": "validation_accuracy", "mismatch": "token_mult_prob_error"}


def _live_traces(arm: str) -> list[go.Scatter]:
    """An arm's three curves: thin line of training reward, markers of validation accuracy, line of mismatch."""
    style = arm_style(arm)
    line = {"color": style.color, "dash": style.dash}
    hover = style.label + "<br>step %{x}: VALUE<extra></extra>"
    common = {"name": style.label, "legendgroup": arm, "showlegend": False}
    top, bottom = {"xaxis": "x", "yaxis": "y"} | common, {"xaxis": "x2", "yaxis": "y2"} | common
    marker = {"color": style.color, "symbol": style.symbol, "size": 9}
    accuracy, gap = hover.replace("VALUE", "%{y:.3f}"), hover.replace("VALUE", "1 + %{y:.2g}")
    thin, thick = line | {"width": 1}, line | {"width": 2}
    return [
        go.Scatter(meta=f"{arm}/reward", mode="lines", line=thin, opacity=0.6, hovertemplate=accuracy, **top),
        go.Scatter(
            meta=f"{arm}/validation", mode="lines+markers", line=thick, marker=marker, hovertemplate=accuracy, **top
        ).update(showlegend=True),
        go.Scatter(meta=f"{arm}/mismatch", mode="lines", line=thick, hovertemplate=gap, **bottom),
    ]


def ratio_histogram(differences: Mapping[str, Any], *, backend: str = "emulated") -> go.Figure:
    """How the ratio r = exp(t - g) of sampled tokens is spread, by arm.

    differences: arm -> d = t - g of the sampled tokens (any 1-D array of nats). Counts are shares of the arm's tokens;
    the outermost bins take everything beyond them.
    """
    edges = np.exp(np.linspace(-0.2, 0.2, 82))
    middles = np.sqrt(edges[1:] * edges[:-1])
    figure = go.Figure()
    for arm, d in differences.items():
        style = arm_style(arm)
        ratio = np.exp(np.clip(np.asarray(d, dtype=float), -20, 20)).clip(edges[0], edges[-1])
        share = np.histogram(ratio, edges)[0] / max(1, len(ratio))
        line = {"color": style.color, "width": 2, "shape": "hvh"}
        hover = f"{style.label}<br>r near %{{x:.3f}}: %{{y:.2%}} of tokens<extra></extra>"
        figure.add_scatter(
            x=middles, y=np.where(share > 0, share, np.nan), name=style.label, line=line, hovertemplate=hover
        )
    meaning = "r = exp(t − g), trainer's over rollout's probability of the sampled token (ends: all beyond)"
    figure.update_xaxes(title_text=meaning)
    figure.update_yaxes(title_text="share of tokens", type="log", tickformat="~%", dtick=1)
    return finish(figure, "Only FP8 on one side spreads the ratio", backend)


def summary(runs: Runs) -> pd.DataFrame:
    """A line an arm: first and last validation accuracy, its 95 % sampling half-width, mean token_mult_prob_error,
    steps.

    The half-width is the binomial one of the last evaluation's samples. It knows nothing of other seeds.
    """
    table = []
    for arm, rows in runs.items():
        checks = [row for row in rows if "validation_accuracy" in row]
        gaps = [row["token_mult_prob_error"] for row in rows if "token_mult_prob_error" in row]
        if not checks:
            continue
        last, samples = checks[-1]["validation_accuracy"], checks[-1]["validation_samples"]
        table.append(
            {
                "arm": arm,
                "accuracy first": checks[0]["validation_accuracy"],
                "accuracy last": last,
                "± sampling": 1.96 * (last * (1 - last) / samples) ** 0.5,
                "mean token_mult_prob_error": float(np.mean(gaps)) if gaps else float("nan"),
                "steps": rows[-1]["step"],
            }
        )
    columns = ["arm", "accuracy first", "accuracy last", "± sampling", "mean token_mult_prob_error", "steps"]
    return pd.DataFrame(table, columns=columns).set_index("arm")


def study_table(study: Mapping[str, Any]) -> pd.DataFrame:
    """A shipped study (data/evidence/*.json) as a table: means over seeds with 95 % intervals, a line an arm."""

    table = {}
    for arm, values in study["arms"].items():
        difference = study["paired_differences"].get(f"{arm} - bf16")
        table[arm] = {
            "accuracy after training": value_text(values["accuracy_last"], 3),
            "minus BF16, same seed": value_text((difference or {}).get("accuracy_last"), 4),
            "token_mult_prob_error, steps 1-30": value_text(values["token_mult_prob_error_first_30"], 4),
            "last 10 steps": value_text(values["token_mult_prob_error_last_10"], 4),
        }
    return pd.DataFrame.from_dict(table, orient="index")


def published_beside_ours(study: Mapping[str, Any]) -> go.Figure:
    """Accuracy relative to BF16, in percentage points: published (open) and a shipped study's (filled).

    study: data/evidence/three-arms.json as a dict. The bars are the 95 % intervals of paired differences over its
    seeds, the grey band is its equivalence margin; the published numbers come without any interval.
    """
    figure = go.Figure()
    theirs = PUBLISHED.set_index("arm").accuracy
    for arm in ("fp8-e2e", "fp8-rollout"):
        style = arm_style(arm)
        ours = study["paired_differences"][f"{arm} - bf16"]["accuracy_last"]
        half = 100 * (ours["high"] - ours["low"]) / 2
        published = 100 * (theirs[arm] - theirs["bf16"])
        rows = [
            ("published", published, None, f"{style.symbol}-open"),
            ("ours", 100 * ours["mean"], half, style.symbol),
        ]
        for who, x, error, symbol in rows:
            figure.add_scatter(
                x=[x],
                y=[f"{style.label} · {who} "],
                error_x={"array": [error], "thickness": 1.5, "color": style.color} if error else None,
                text=[f"{x:+.1f}" + (f" ± {error:.1f}" if error else "")],
                textposition="top center",
                mode="markers+text",
                showlegend=False,
                marker={"color": style.color, "size": 13, "symbol": symbol, "line": {"width": 2, "color": style.color}},
            )
    figure.add_vline(x=0, line={"color": ARMS["bf16"].color, "width": 2})
    margin = 100 * study["margin"]
    figure.add_vrect(x0=-margin, x1=margin, fillcolor="grey", opacity=0.12, line_width=0, layer="below")
    figure.update_xaxes(title_text="accuracy minus BF16's, percentage points (grey: counts as equivalent)")
    figure.update_yaxes(automargin=True, range=[-0.5, len(figure.data) - 0.3])
    title = f"Published: Llama 3.1 8B on math · ours: 0.7 M parameters on sums, {len(study['seeds'])} seeds"
    return finish(figure, title, study["backend"])


def precision_map(decisions: Iterable[Any], *, backend: str = "emulated") -> go.Figure:
    """Which linear layers are FP8, by side: a cell a layer, from `plan.coverage(model)`; the reason is in the hover
    text."""
    decisions = [d for d in decisions]
    names = list(dict.fromkeys(d.name for d in decisions))
    sides = list(dict.fromkeys(d.side for d in decisions))
    found = {(d.side, d.name): d for d in decisions}
    z = [[int(found[side, name].precision.is_fp8) for side in sides] for name in names]
    text = [
        [f"{name}<br>{side}: {found[side, name].precision}<br>{found[side, name].reason}" for side in sides]
        for name in names
    ]
    scale = [[0, ARMS["bf16"].color], [1, ARMS["fp8-e2e"].color]]
    heat = go.Heatmap(
        x=sides, y=names, z=z, zmin=0, zmax=1, text=text, hoverinfo="text", colorscale=scale, xgap=3, ygap=2
    )
    figure = go.Figure(heat.update(showscale=False))
    figure.update_yaxes(autorange="reversed", automargin=True, title_text="linear layer", tickfont_size=11)
    figure.update_xaxes(title_text="side of the plan")
    return finish(figure, "FP8 (orange) and BF16 (blue)", backend, height=150 + 15 * len(names))
