"""Pictures of importance sampling: effective sample size against length, bias against variance. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import plotly.graph_objects as go

from fp8lab.ui.plots import LINES, TEXT, finish


def ess_by_length(lengths: Sequence[int], shares: Mapping[str, Sequence[float]]) -> go.Figure:
    """Share of samples that is effectively left, a line per aggregate, over the answer's length."""
    figure = go.Figure()
    for (name, share), (color, dash) in zip(shares.items(), LINES, strict=False):
        line = {"color": color, "width": 5 if name == "token r" else 2, "dash": dash}  # another line may lie on it
        hover = name + "<br>%{x} tokens: %{y:.1%} left<extra></extra>"
        figure.add_scatter(
            x=list(lengths), y=list(share), name=name, mode="lines+markers", line=line, hovertemplate=hover
        )
    figure.update_xaxes(type="log", dtick=1, title_text="tokens per answer")
    figure.update_yaxes(title_text="effective sample size, share", tickformat=".0%", range=[0, 1.05])
    return finish(figure, "A product of ratios forgets its samples as answers grow", "computed here", height=340)


def bias_and_variance(rows: Sequence[Mapping[str, float]]) -> go.Figure:
    """|bias|, spread and their root of squares over the bound C."""
    figure = go.Figure()
    for name, (color, dash) in (("|bias|", LINES[0]), ("spread", LINES[1]), ("error", (TEXT, "solid"))):
        figure.add_scatter(
            x=[row["C"] for row in rows],
            y=[row[name] for row in rows],
            name={"error": "both together"}.get(name, name),
            mode="lines+markers",
            line={"color": color, "dash": dash, "width": 2},
        )
    figure.update_xaxes(type="log", tickvals=[row["C"] for row in rows], title_text="ratios are clamped at C")
    figure.update_yaxes(title_text="error of the estimate", rangemode="tozero")
    return finish(figure, "Truncation trades variance for bias", "computed here", height=340)
