"""Pictures of the gap between the engines: where in an answer, in which layer, what a fallback buys; and of bugs.

Pure functions from the tables of `attribution.py`, `frontier.py` and `sequence_metrics.py` to plotly figures, with the
look of `plots.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from fp8lab.ui.plots import ARMS, OTHER, TEXT, finish

FP8, ROLLOUT, HIGH = ARMS["fp8-e2e"].color, ARMS["fp8-rollout"].color, ARMS["bf16"].color
LOOKS = ((ROLLOUT, "solid", "square"), (FP8, "dash", "diamond"), (OTHER.color, "dot", "cross"), (TEXT, "dashdot", "x"))
"""Of the first, second, ... case in a figure; the healthy one comes first."""
ORDERS = {
    "recommended": ("most gap per FLOP", OTHER.color, "solid", "circle"),
    "first": ("from the first layer on", ROLLOUT, "dash", "square"),
    "last": ("from the last layer back", TEXT, "dot", "diamond"),
}
PROBABILITIES = [0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1]
NAMES = {
    "in_k3": "Which module makes the gap: k3 with it alone in FP8",
    "first_order_k3": "Which module makes the gap: k3 to first order",
    "in_mean_abs": "mean |d| in nats with this module alone in FP8",
}
"""Columns of an attribution table, in words."""


def short_name(name: str) -> str:
    """`model.layers.3.mlp.down_proj` as `3 down`."""
    layer, _, rest = name.split(".layers.", 1)[-1].partition(".")
    return f"{layer} {rest.rsplit('.', 1)[-1].removesuffix('_proj')}".strip()


def by_position(cases: Mapping[str, Mapping[str, Sequence[float]]], *, backend: str = "emulated") -> go.Figure:
    """Mean |d| at each place of the completion; cases: name -> what `sequence_metrics.by_position` returned."""
    figure = go.Figure()
    for (name, found), (color, dash, symbol) in zip(cases.items(), LOOKS, strict=False):
        figure.add_scatter(
            x=found["position"],
            y=found["mean_abs_difference"],
            customdata=found["tokens"],
            name=name,
            mode="lines+markers",
            line={"color": color, "dash": dash, "width": 2},
            marker={"symbol": symbol, "size": 9},
            hovertemplate=name + "<br>token %{x}: %{y:.4f} nats, %{customdata} tokens<extra></extra>",
        )
    figure.update_xaxes(title_text="place in the answer (0: first token after the prompt)", dtick=1)
    figure.update_yaxes(title_text="mean |t − g|, nats", rangemode="tozero")
    return finish(figure, "The gap, token by token", backend, height=340)


def planted_faults(errors: Mapping[str, float], *, backend: str = "emulated") -> go.Figure:
    """token_mult_prob_error of several cases beside two published limits; errors: case -> value, the healthy first."""
    figure = go.Figure()
    names = list(errors)
    colors = [ROLLOUT, *[FP8] * (len(names) - 1)]
    symbols = ["square", *["diamond"] * (len(names) - 1)]
    figure.add_scatter(
        x=[errors[name] - 1 for name in names],
        y=names,
        mode="markers+text",
        text=[f" {errors[name] - 1:.3f}" for name in names],
        textposition="middle right",
        marker={"color": colors, "symbol": symbols, "size": 13},
        showlegend=False,
        hovertemplate="%{y}: 1 + %{x:.4f}<extra></extra>",
    )
    for limit, text in ((0.02, "1.02"), (0.05, "1.05")):
        figure.add_vline(x=limit, line={"color": TEXT, "width": 1, "dash": "dot"})
        label = {"text": text, "x": float(np.log10(limit)), "y": 1, "yref": "paper", "yanchor": "bottom"}
        figure.add_annotation(**label, showarrow=False, font_size=11)
    top = max(value - 1 for value in errors.values())
    meaning = "token_mult_prob_error − 1 (dotted: NeMo RL's two limits)"
    ticks = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5]
    figure.update_xaxes(title_text=meaning, type="log", tickvals=ticks, range=[-2.2, float(np.log10(top)) + 0.4])
    figure.update_yaxes(autorange="reversed", automargin=True)
    return finish(figure, "How large is the gap?", backend, height=150 + 40 * len(names))


def direction(cases: Mapping[str, tuple[Any, Any]], *, bins: int = 8, backend: str = "emulated") -> go.Figure:
    """Mean of d over how likely the token was, in `bins` equally full bins, with 95 % intervals: noise has no
    direction. cases: name -> (g, d) of the sampled tokens, 1-D."""
    figure = go.Figure()
    for (name, (g, d)), (color, dash, symbol) in zip(cases.items(), LOOKS, strict=False):
        g, d = np.asarray(g, dtype=float), np.asarray(d, dtype=float)
        parts = np.array_split(np.argsort(g, kind="stable"), bins)
        figure.add_scatter(
            x=[float(np.exp(g[part].mean())) for part in parts],
            y=[d[part].mean() for part in parts],
            error_y={"array": [1.96 * d[part].std() / max(1, len(part)) ** 0.5 for part in parts], "thickness": 1.5},
            name=name,
            mode="lines+markers",
            line={"color": color, "dash": dash, "width": 2},
            marker={"symbol": symbol, "size": 9},
            hovertemplate=name + "<br>probability %{x:.2g}: d = %{y:+.4f}<extra></extra>",
        )
    figure.add_hline(y=0, line={"color": TEXT, "width": 1})
    figure.update_xaxes(
        title_text="probability of the sampled token in the rollout", type="log", tickvals=PROBABILITIES
    )
    figure.update_yaxes(title_text="mean of t − g, nats")
    return finish(figure, "Noise has no direction, a bug has one", backend, height=360)


def attribution_map(table: pd.DataFrame, column: str = "in_k3", *, backend: str = "emulated") -> go.Figure:
    """Heat map, decoder layer by kind of module, of a column of `attribute`'s table (by module)."""
    rows = table[table["tensor"] == table["tensor"].iloc[0]]
    kinds = rows["name"].str.rsplit(".", n=1).str[-1].str.removesuffix("_proj")
    grid = rows.assign(kind=kinds).pivot(index="layer", columns="kind", values=column)[list(dict.fromkeys(kinds))]
    figure = go.Figure(
        go.Heatmap(
            x=list(grid.columns),
            y=[f"layer {layer}" for layer in grid.index],
            z=grid.to_numpy(),
            zmin=0,
            colorscale=[[0, "#fdf1e6"], [0.5, "#e58a3c"], [1, "#6b2400"]],
            colorbar={"title": {"text": "k3" if column.endswith("k3") else "nats"}, "exponentformat": "power"},
            xgap=2,
            ygap=2,
            hovertemplate="%{y}, %{x}: %{z:.2e}<extra></extra>",
        )
    )
    figure.update_xaxes(title_text="module")
    figure.update_yaxes(autorange="reversed", automargin=True, showgrid=False)
    return finish(figure, NAMES.get(column, column), backend, height=190 + max(24 * 4, 15 * len(grid)))


def leave_one_in(table: pd.DataFrame, *, top: int = 14, backend: str = "emulated") -> go.Figure:
    """The `top` units that make most of the gap alone: k3 with its 95 % interval."""
    rows = table.sort_values("in_k3", ascending=False).head(top)
    error = {"array": rows["in_k3_high"] - rows["in_k3"], "arrayminus": rows["in_k3"] - rows["in_k3_low"]}
    figure = go.Figure(
        go.Scatter(
            x=rows["in_k3"],
            y=[short_name(name) for name in rows["name"]],
            mode="markers",
            error_x=error | {"color": FP8, "thickness": 1.5},
            marker={"color": FP8, "size": 9, "symbol": "diamond"},
            customdata=rows["name"],
            hovertemplate="%{customdata}: %{x:.2e}<extra></extra>",
        )
    )
    figure.update_xaxes(
        title_text="k3 against the model all in BF16, with 95 % interval", exponentformat="power", rangemode="tozero"
    )
    figure.update_yaxes(autorange="reversed", automargin=True, title_text="layer and module", type="category")
    return finish(figure, "Only this module in FP8", backend, height=150 + 21 * len(rows))


def estimate_against_exact(
    table: pd.DataFrame, agreement: tuple[float, float, float], *, backend: str = "emulated"
) -> go.Figure:
    """First order against the exact sweep, a point a unit, log axes; agreement: what `rank_agreement` returned."""
    low = min(table["in_k3"].min(), table["first_order_k3"].min()) / 1.5
    high = max(table["in_k3"].max(), table["first_order_k3"].max()) * 1.5
    figure = go.Figure()
    line = {"color": TEXT, "width": 1, "dash": "dot"}
    figure.add_scatter(x=[low, high], y=[low, high], mode="lines", line=line, showlegend=False, hoverinfo="skip")
    figure.add_scatter(
        x=table["first_order_k3"],
        y=table["in_k3"],
        error_y={
            "array": table["in_k3_high"] - table["in_k3"],
            "arrayminus": table["in_k3"] - table["in_k3_low"],
            "thickness": 1,
        },
        mode="markers+text",
        text=[short_name(name) if rank < 5 else "" for name, rank in _ranks(table)],
        textposition="top left",
        marker={"color": FP8, "size": 9, "symbol": "diamond"},
        customdata=table["name"],
        showlegend=False,
        hovertemplate="%{customdata}<br>first order %{x:.2e}, exact %{y:.2e}<extra></extra>",
    )
    power = {"type": "log", "exponentformat": "power", "dtick": 1}
    figure.update_xaxes(title_text="k3 to first order: one backward pass for all", **power)
    figure.update_yaxes(title_text="k3, exact: a forward each", **power)
    value, lowest, highest = agreement
    title = f"Same order: Spearman {value:.2f} [{lowest:.2f}, {highest:.2f}]"
    return finish(figure, title, backend, height=400)


def frontier_figure(found: pd.DataFrame, *, backend: str = "emulated") -> go.Figure:
    """What is left of the gap over the FLOPs kept in BF16, a line an order; found: what `frontier` returned."""
    figure = go.Figure()
    start = found[found["order"] == "plan"]
    for order in [order for order in ORDERS if order in set(found["order"])]:
        label, color, dash, symbol = ORDERS[order]
        rows = pd.concat([start, found[found["order"] == order]])
        figure.add_scatter(
            x=rows["flops_kept"],
            y=rows["k3"],
            error_y={
                "array": rows["k3_high"] - rows["k3"],
                "arrayminus": rows["k3"] - rows["k3_low"],
                "thickness": 1,
            },
            name=label,
            mode="lines+markers",
            line={"color": color, "dash": dash, "width": 2},
            marker={"symbol": symbol, "size": 9},
            customdata=np.stack([rows["units"], rows["removed"]], axis=1),
            hovertemplate=label + "<br>%{x:.0%} of the FLOPs, %{customdata[0]} units: "
            "k3 %{y:.2e}, %{customdata[1]:.0%} gone<extra></extra>",
        )
    figure.update_xaxes(title_text="share of the linear layers' FLOPs kept in BF16", tickformat=".0%")
    figure.update_yaxes(title_text="k3 that is left, with 95 % interval", rangemode="tozero", exponentformat="power")
    return finish(figure, "What BF16 layers buy", backend, height=400)


def fallback_sets(found: Mapping[str, Any]) -> go.Figure:
    """Sets of layers in BF16, a row each: k3 left and, where it was trained, accuracy, with 95 % intervals; in brackets
    the FLOPs that stay in FP8. found: data/evidence/fallback-sets.json."""
    figure = make_subplots(rows=1, cols=2, shared_yaxes=True, horizontal_spacing=0.04, column_widths=[0.62, 0.38])
    sets = sorted(found["sets"], key=lambda row: -row["k3"])
    names = {row["set"]: f"{row['set']} ({row['fp8_share_of_flops']:.0%})" for row in sets}
    trained = [row for row in sets if "accuracy" in row]
    for column, rows, of, color, symbol in (
        (1, sets, lambda row: (row["k3"], row["k3_low"], row["k3_high"]), ROLLOUT, "square"),
        (2, trained, lambda row: [row["accuracy"][key] for key in ("mean", "low", "high")], OTHER.color, "circle"),
    ):
        middle, low, high = np.array([of(row) for row in rows]).reshape(-1, 3).T
        error = {"array": high - middle, "arrayminus": middle - low, "thickness": 1}
        y = [names[row["set"]] for row in rows]
        marker = {"symbol": symbol, "size": 8, "color": color}
        figure.add_scatter(
            x=middle, y=y, error_x=error, mode="markers", marker=marker, showlegend=False, row=1, col=column
        )
    figure.update_xaxes(title_text="k3 before training", rangemode="tozero", exponentformat="power", row=1, col=1)
    seeds = f", {trained[0]['accuracy']['n']} seeds" if trained else ""
    figure.update_xaxes(title_text=f"accuracy after training{seeds}", row=1, col=2)
    figure.update_yaxes(automargin=True)
    return finish(figure, "Kept in BF16 (share of FLOPs left in FP8)", found["backend"], height=560)


def _ranks(table: pd.DataFrame) -> list[tuple[str, int]]:
    """(name, rank by exact k3), largest first is 0, in the table's order."""
    ranks = table["in_k3"].rank(ascending=False, method="first").astype(int) - 1
    return list(zip(table["name"], ranks, strict=True))
