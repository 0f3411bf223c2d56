"""Figures for notebook 08: GRPO's loss, its gradient, and what seeds do to a comparison.

Pure functions from numbers to plotly figures, in the look of `plots`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import plotly.graph_objects as go

from fp8lab.sweep import Interval
from fp8lab.ui.plots import LINES, TEXT, arm_style, finish


def objective(ratios: Sequence[float], curves: Mapping[str, Sequence[float]], *, epsilon: float) -> go.Figure:
    """The clipped objective over the policy ratio, a line an advantage; the unclipped range is shaded."""
    figure = go.Figure()
    figure.add_vrect(x0=1 - epsilon, x1=1 + epsilon, fillcolor="grey", opacity=0.15, line_width=0, layer="below")
    for (name, values), (color, dash) in zip(curves.items(), LINES, strict=False):
        figure.add_scatter(x=list(ratios), y=list(values), name=name, mode="lines", line={"color": color, "dash": dash})
    figure.update_xaxes(title_text="policy ratio, new over old probability of the token")
    figure.update_yaxes(title_text="objective (where it is flat, no gradient)")
    return finish(figure, "Clipping stops rewards early and punishments late", "arithmetic", height=340)


def silent_groups(sizes: Sequence[int], shares: Mapping[str, Sequence[float]]) -> go.Figure:
    """The share of groups without a gradient over the group's size, a line a way to get it."""
    figure = go.Figure()
    for (name, values), (color, dash) in zip(shares.items(), LINES, strict=False):
        figure.add_scatter(x=list(sizes), y=list(values), name=name, line={"color": color, "dash": dash})
    figure.update_xaxes(title_text="completions per prompt, n", type="log", tickvals=list(sizes))
    figure.update_yaxes(title_text="groups all right or all wrong", tickformat=".0%", rangemode="tozero")
    return finish(figure, "Equal rewards teach nothing", "emulated", height=340)


def alignment(cosines: Mapping[str, float]) -> go.Figure:
    """How well pairs of gradients agree: a bar a pair, cosine 1 is the same direction."""
    figure = go.Figure()
    bars = {"x": list(cosines.values()), "y": list(cosines), "text": [f"{value:.3f}" for value in cosines.values()]}
    figure.add_bar(**bars, orientation="h", textposition="outside", marker_color=LINES[0][0])
    lowest = min(cosines.values())
    left = lowest - 0.12 if lowest < 0 else 0  # room for a negative bar's number
    figure.update_xaxes(title_text="cosine between two gradients", range=[left, 1.1])
    figure.update_yaxes(autorange="reversed", automargin=True)
    return finish(figure, "What turns a gradient", "emulated", height=320)


def seed_differences(
    differences: Mapping[str, Mapping[int, float]], intervals: Mapping[str, Interval], *, margin: float
) -> go.Figure:
    """Differences of arms to BF16 within each seed (open), their mean with its 95 % interval (filled), and the margin.

    differences: arm -> seed -> difference in accuracy; shown in percentage points.
    """
    figure = go.Figure()
    figure.add_vrect(x0=-100 * margin, x1=100 * margin, fillcolor="grey", opacity=0.12, line_width=0, layer="below")
    figure.add_vline(x=0, line={"color": TEXT, "width": 1})
    for arm, seeds in differences.items():
        style, found = arm_style(arm), intervals[arm]
        hover = [f"seed {seed}: {100 * value:+.2f}" for seed, value in seeds.items()]
        marker = {"color": style.color, "size": 8, "symbol": f"{style.symbol}-open"}
        single = {"x": [100 * v for v in seeds.values()], "y": [f"{style.label} · seeds "] * len(seeds)}
        figure.add_scatter(**single, mode="markers", marker=marker, text=hover, hoverinfo="text", showlegend=False)
        figure.add_scatter(
            x=[100 * found.mean],
            y=[f"{style.label} · mean "],
            error_x={"array": [50 * (found.high - found.low)], "thickness": 1.5, "color": style.color},
            mode="markers",
            marker={"color": style.color, "size": 12, "symbol": style.symbol},
            showlegend=False,
        )
    figure.update_xaxes(title_text="accuracy minus BF16's of the same seed, percentage points (grey: equivalent)")
    figure.update_yaxes(automargin=True)
    return finish(figure, "Single seeds point both ways", "emulated", height=340)
