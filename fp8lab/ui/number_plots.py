"""Pictures of number formats and of block quantization: the number line, the error of rounding, blocks as a heat map.

Pure functions from tensors to plotly figures, in the look of `plots.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go
import torch

from fp8lab.formats import Float8Format, get_format, round_bf16
from fp8lab.ui.plots import CLEAR, GRID, LINES, TEXT, finish

COLORS = {"e4m3": "#d55e00", "e5m2": "#b84fa0", "bf16": "#2f7fd0"}
"""E4M3 has FP8's colour of `plots.ARMS`, BF16 its own."""
WORST = [[0, "#b2182b"], [0.5, "#f7c9a0"], [1, "#2f7fd0"]]
"""Red for a bad block, blue for a good one; differs in lightness too."""


def number_line(formats: Sequence[str] = ("e4m3", "e5m2"), low: float = 0.0, high: float = 4.0) -> go.Figure:
    """Every number of the 8-bit formats within [low, high], one tick each, a row a format."""
    figure = go.Figure()
    for name in formats:
        values = _finite(get_format(name))
        inside = values[(values >= low) & (values <= high)]
        figure.add_scatter(
            x=inside,
            y=[name.upper()] * len(inside),
            mode="markers",
            marker={"symbol": "line-ns", "size": 26, "line": {"width": 1.5, "color": COLORS[name]}},
            hovertemplate=f"{name.upper()} %{{x:.6g}}<extra></extra>",
            showlegend=False,
        )
    figure.update_xaxes(title_text="value", range=[low - 0.01 * (high - low), high + 0.01 * (high - low)])
    count = ", ".join(
        f"{n.upper()} {int(((_finite(get_format(n)) >= low) & (_finite(get_format(n)) <= high)).sum())}"
        for n in formats
    )
    return finish(figure, f"The numbers between {low:g} and {high:g}: {count}", "exact", height=230)


def rounding_error(formats: Sequence[str] = ("e4m3", "e5m2", "bf16")) -> go.Figure:
    """Largest relative rounding error near each magnitude, from below the smallest number to above the largest."""
    x = 2.0 ** (torch.arange(-17 * 160, 17 * 160, dtype=torch.float64) / 160)
    x = x.float().view(-1, 40)  # a row a quarter of an octave, so every octave is cut alike
    figure = go.Figure()
    for name in formats:
        rounded = round_bf16(x) if name == "bf16" else get_format(name).round(x)
        error = ((rounded - x) / x).abs().amax(dim=1).clamp(min=1e-4)
        figure.add_scatter(
            x=x[:, 20],
            y=error,
            name=name.upper(),
            line={"color": COLORS[name], "width": 2},
            hovertemplate=f"{name.upper()}<br>near %{{x:.3g}}: off by up to %{{y:.1%}}<extra></extra>",
        )
    figure.update_xaxes(type="log", exponentformat="power", title_text="magnitude of x")
    figure.update_yaxes(type="log", tickformat=".1%", title_text="largest relative error", range=[-3, 0.1])
    return finish(figure, "Rounding has a plateau and two cliffs", "exact")


def block_map(values: torch.Tensor, *, title: str, unit: str, text: Mapping[str, Any] | None = None) -> go.Figure:
    """A number per block as a heat map: `values` (rows of blocks, columns of blocks); red is low, blue is high."""
    shown = values.double().cpu().numpy()
    heat = go.Heatmap(
        z=np.where(np.isfinite(shown), shown, np.nan),
        colorscale=WORST,
        colorbar={"title": {"text": unit}, "thickness": 12},
        hovertemplate=f"block row %{{y}}, column %{{x}}: %{{z:.4g}} {unit}<extra></extra>",
        xgap=1,
        ygap=1 if len(shown) < 64 else 0,
    )
    figure = go.Figure(heat)
    figure.update_xaxes(title_text="block along the row")
    figure.update_yaxes(title_text="block of rows", autorange="reversed")
    return finish(figure, title, "emulated", height=360)


def bars(values: Mapping[str, float], *, title: str, axis: str, digits: int = 1) -> go.Figure:
    """One bar a name, with its value written on it."""
    names = list(values)
    figure = go.Figure(
        go.Bar(
            x=list(values.values()),
            y=names,
            orientation="h",
            marker={"color": [COLORS.get(n.split(" ")[0].lower(), "#0a8f6a") for n in names]},
            text=[f"{v:.{digits}f}" for v in values.values()],
            textposition="outside",
            hovertemplate="%{y}: %{x:.4g}<extra></extra>",
        )
    )
    longest = max(values.values()) or 1
    figure.update_xaxes(title_text=axis, range=[0, 1.1 * longest])  # room for its number
    figure.update_yaxes(autorange="reversed", type="category")  # a name like "1e-06" is no number
    return finish(figure, title, "emulated", height=130 + 36 * len(names))


def curves(
    x: Sequence[float], lines: Mapping[str, Sequence[float]], *, x_title: str, y_title: str, title: str
) -> go.Figure:
    """Lines over a logarithmic x, labelled at their ends; y in per cent."""
    figure = go.Figure()
    for (name, y), color in zip(lines.items(), (COLORS["e4m3"], TEXT, COLORS["bf16"], COLORS["e5m2"]), strict=False):
        figure.add_scatter(x=list(x), y=list(y), name=name, mode="lines+markers", line={"color": color, "width": 2})
    figure.update_xaxes(type="log", dtick=1, title_text=x_title, exponentformat="power")
    figure.update_yaxes(title_text=y_title, tickformat=".0%", rangemode="tozero")
    return finish(figure, title, "emulated")


def magnitudes(tensors: Mapping[str, torch.Tensor], fmt: str = "e4m3") -> go.Figure:
    """How the magnitudes of tensors' elements are spread over powers of two, against what a format can hold.

    Zeros are left out. The grey band is the range from the format's smallest to its largest number.
    """
    form = get_format(fmt)
    edges = np.arange(-40, 20)
    figure = go.Figure()
    figure.add_vrect(x0=np.log2(form.min_subnormal), x1=np.log2(form.max), fillcolor=GRID, line_width=0, layer="below")
    for (name, tensor), (color, dash) in zip(tensors.items(), LINES, strict=False):
        x = tensor.detach().abs().flatten().double()
        share = np.histogram(torch.log2(x[x > 0]).numpy(), edges)[0] / max(1, int((x > 0).sum()))
        figure.add_scatter(
            x=edges[:-1] + 0.5,
            y=np.where(share > 0, share, np.nan),
            name=name,
            line={"width": 2, "shape": "hvh", "color": color, "dash": dash},
            hovertemplate=name + "<br>near 2^%{x:.0f}: %{y:.2%}<extra></extra>",
        )
    figure.update_xaxes(title_text=f"log2 of the magnitude (grey: what {fmt.upper()} can hold)")
    figure.update_yaxes(title_text="share of elements", tickformat=".0%")
    return finish(figure, "What fits into 8 bits", "emulated")


def mark(figure: go.Figure, x: float, label: str) -> go.Figure:
    """Add a labelled vertical line at x to a figure; returns it."""
    figure.add_vline(x=x, line={"color": TEXT, "dash": "dot", "width": 1.5})
    at = float(np.log10(x)) if figure.layout.xaxis.type == "log" else x
    figure.add_annotation(x=at, y=1, yref="paper", yanchor="bottom", text=label, showarrow=False, bgcolor=CLEAR)
    return figure


def _finite(fmt: Float8Format) -> np.ndarray:
    values = fmt.values().double().numpy()
    return np.unique(values[np.isfinite(values)])
