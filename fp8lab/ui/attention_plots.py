"""Pictures of FP8 attention and of routers: scales, saturation, softmax weights, cache memory, routes.

Pure functions from scales, meters, tensors and byte counts to plotly figures, in the look of `plots.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import plotly.graph_objects as go
import torch
from plotly.colors import sample_colorscale

from fp8lab.attention import P_SCALE
from fp8lab.attention_scales import OPERANDS, AttentionScales
from fp8lab.formats import E4M3
from fp8lab.routing import RouterAgreement
from fp8lab.ui.plots import ARMS, LINES, OTHER, TEXT, finish

BF16, FP8 = ARMS["bf16"].color, ARMS["fp8-e2e"].color
SHADES = [color for color, _ in LINES]
COLORS = dict(zip(OPERANDS, SHADES, strict=True))
DASHES = ("solid", "dash", "dot", "dashdot")
LOWEST = -24
"""Softmax weights below 2^LOWEST share the last bar."""


def scales_over_steps(history: Sequence[AttentionScales], operand: str = "key") -> go.Figure:
    """The scale of one operand after each step, a line per layer; ValueError for an unknown operand."""
    if operand not in OPERANDS:
        raise ValueError(f"operand is {operand!r}; allowed: {', '.join(OPERANDS)}")
    figure, layers = go.Figure(), history[0].layers if history else 0
    shades = sample_colorscale(SHADES, [layer / max(1, layers - 1) for layer in range(layers)])  # on white and on black
    for layer in range(layers):
        figure.add_scatter(
            x=list(range(len(history))),
            y=[getattr(scales, operand)[layer] for scales in history],
            name=f"layer {layer}",
            mode="lines",
            line={"color": shades[layer], "dash": DASHES[layer % len(DASHES)], "width": 2},
            hovertemplate=f"layer {layer}<br>step %{{x}}: %{{y:.3g}}<extra></extra>",
        )
    figure.update_xaxes(title_text="step")
    figure.update_yaxes(title_text=f"{operand} scale")
    return finish(figure, f"The {operand} scale of each layer, taken anew after every step", "emulated", height=340)


def saturation(shares: Mapping[str, Sequence[float]]) -> go.Figure:
    """Share of clamped elements per layer, a bar per operand; shares: what `AttentionMeter.saturation` returns."""
    figure = go.Figure()
    for operand, share in shares.items():
        hover = f"{operand}, %{{x}}: %{{y:.2%}} clamped<extra></extra>"
        layers = [f"layer {i}" for i in range(len(share))]
        figure.add_bar(x=layers, y=list(share), name=operand, marker_color=COLORS[operand], hovertemplate=hover)
    figure.update_yaxes(title_text="elements clamped", tickformat=".1%", rangemode="tozero")
    return finish(figure, "What does not fit under the scale is clamped", "computed here", height=320)


def softmax_weights(weights: torch.Tensor) -> go.Figure:
    """Softmax weights in (0, 1] by power of two: all, and what E4M3 keeps with and without the factor 256."""
    p = weights.detach().float().flatten()
    p = p[p > 0]
    exponent = p.log2().floor().clamp(min=LOWEST).long()
    kept = {"all": torch.ones_like(p, dtype=torch.bool)}
    kept |= {"kept times 256": E4M3.round(p * P_SCALE) > 0, "kept as they are": E4M3.round(p) > 0}
    figure = go.Figure()
    for (name, which), color in zip(kept.items(), (TEXT, OTHER.color, FP8), strict=True):
        counts = torch.bincount(exponent[which] - LOWEST, minlength=1 - LOWEST)
        x, label = list(range(LOWEST, 1)), f"{name}: {which.float().mean().item():.0%}"
        hover = f"{name}<br>from 2^%{{x}}: %{{y}}<extra></extra>"
        figure.add_bar(x=x, y=counts.tolist(), name=label, marker_color=color, hovertemplate=hover)
    figure.update_xaxes(title_text=f"softmax weight, power of two (2^{LOWEST} and below in one bar)")
    figure.update_yaxes(title_text="weights")
    return finish(figure, "Without the factor 256, E4M3 rounds small weights to zero", "computed here", height=340)


def error_by_scale(factors: Sequence[float], sqnr_db: Mapping[str, Sequence[float]]) -> go.Figure:
    """SQNR over scales from too small to too large, a line a format; factors: of the scale that just fits, 1."""
    figure = go.Figure()
    for (name, y), color in zip(sqnr_db.items(), (FP8, OTHER.color), strict=False):
        hover = f"{name}<br>%{{x:.3g}} times the scale that fits: %{{y:.1f}} dB<extra></extra>"
        line = {"color": color, "width": 2}
        figure.add_scatter(x=list(factors), y=list(y), name=name, mode="lines+markers", line=line, hovertemplate=hover)
    figure.add_vline(x=1, line={"color": TEXT, "dash": "dot", "width": 1.5})
    figure.update_xaxes(type="log", title_text="scale, times the one that just fits (left: clamped)", dtick=1)
    figure.update_yaxes(title_text="SQNR in dB", rangemode="tozero")
    return finish(figure, "Floating point forgives a scale that is too large, not one that is too small", "emulated")


def cache_memory(sizes: Mapping[str, int]) -> go.Figure:
    """Bytes of the KV cache, a bar per precision; names that start with BF16 have BF16's colour."""
    names, size = list(sizes), list(sizes.values())
    colors = [BF16 if name.upper().startswith("BF16") else FP8 for name in names]
    figure = go.Figure()
    hover = "%{y}: %{x:,} bytes<extra></extra>"
    figure.add_bar(x=size, y=names, orientation="h", marker_color=colors, hovertemplate=hover, showlegend=False)
    figure.update_traces(text=[f"{s / max(size):.0%}" for s in size], textposition="auto")
    figure.update_xaxes(title_text="bytes of the KV cache", rangemode="tozero")
    figure.update_yaxes(automargin=True, autorange="reversed")
    return finish(figure, "One byte an element instead of two", "measured here", height=240)


def mismatch(excess: Mapping[str, float], title: str = "One rollout each") -> go.Figure:
    """token_mult_prob_error - 1, a bar a plan or variant of it: presets have their arm's colour, with an FP8 cache
    hatched, anything else is FP8 end to end with some of its attention in FP8."""
    names, values = list(excess), list(excess.values())
    arms = [ARMS.get(name.removesuffix("-kv"), ARMS["fp8-e2e"]) for name in names]
    hatched = ["" if name in ARMS else "/" for name in names]
    figure = go.Figure()
    figure.add_bar(
        x=values,
        y=names,
        orientation="h",
        text=[f"{value:.2%}" for value in values],
        textposition="outside",
        cliponaxis=False,
        marker={"color": [arm.color for arm in arms], "pattern": {"shape": hatched, "fillmode": "replace"}},
        hovertemplate="%{y}: %{x:.3%}<extra></extra>",
        showlegend=False,
    )
    figure.update_xaxes(title_text="token_mult_prob_error − 1", tickformat=".1%", range=[0, 1.15 * max(values)])
    figure.update_yaxes(automargin=True, autorange="reversed")
    return finish(figure, f"{title} (hatched: with an FP8 KV cache)", "emulated", height=150 + 36 * len(names))


def router_disagreement(arms: Mapping[str, RouterAgreement]) -> go.Figure:
    """Share of tokens whose set of experts differs between the sides, per layer, a bar per arm."""
    figure = go.Figure()
    for arm, found in arms.items():
        look = ARMS.get(arm, OTHER)
        figure.add_bar(
            x=[f"layer {i}" for i in range(len(found.changed))],
            y=list(found.changed),
            name=f"{look.label or arm}: {found.anywhere:.1%} in some layer",
            marker_color=look.color,
            hovertemplate=f"{look.label or arm}, %{{x}}: %{{y:.2%}}<extra></extra>",
        )
    figure.update_yaxes(title_text="tokens with other experts", tickformat=".1%", rangemode="tozero")
    finish(figure, "Tokens that the two sides send to different experts", "emulated", height=360)
    return figure.update_layout(legend={"yanchor": "top", "y": -0.12})
