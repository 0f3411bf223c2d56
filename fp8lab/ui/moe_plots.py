"""Pictures of mixture-of-experts layers: whose choice flips, and what a changed route does to log-probs.

Pure functions from tensors and numbers to plotly figures, in the look of `plots.py`. Routers by layer and arm:
`attention_plots.router_disagreement`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import plotly.graph_objects as go
import torch

from fp8lab.ui.plots import ARMS, OTHER, finish

BF16, FP8 = ARMS["bf16"].color, ARMS["fp8-e2e"].color


def flips_by_margin(
    margin: torch.Tensor, changed: Mapping[str, torch.Tensor], edges: Sequence[float] = (0, 0.01, 0.02, 0.05, 0.1, 0.2)
) -> go.Figure:
    """Share of choices that became another set of experts, by their margin (N,): the k-th logit less the next.

    changed: precision -> (N,) bool, a bar each. The last group takes every margin from the last edge on; a group
    without choices is left out. A name that starts with BF16 has BF16's colour.
    """
    upper = torch.bucketize(margin, torch.tensor(edges[1:]), right=True)
    names = [f"{low:g} to {high:g}" for low, high in zip(edges, edges[1:], strict=False)] + [f"from {edges[-1]:g}"]
    groups = [i for i in range(len(names)) if bool((upper == i).any())]
    figure = go.Figure()
    for name, flipped in changed.items():
        figure.add_bar(
            x=[f"{names[i]}<br>{int((upper == i).sum())} choices" for i in groups],
            y=[flipped[upper == i].float().mean().item() for i in groups],
            name=f"{name}: {flipped.float().mean().item():.2%} of all",
            marker_color=BF16 if name.upper().startswith("BF16") else FP8,
            hovertemplate=f"{name}, margin %{{x}}: %{{y:.1%}} flip<extra></extra>",
        )
    figure.update_xaxes(title_text="margin: last chosen expert's logit less the next one's", automargin=True)
    figure.update_yaxes(title_text="choices that flipped", tickformat=".0%", rangemode="tozero")
    return finish(figure, "A small error flips the choices that were close", "emulated", height=360)


def gap_by_route(groups: Mapping[str, Sequence[float]], sides: Sequence[str]) -> go.Figure:
    """Mean |t - g| of groups of tokens, a group of bars each: one bar for every name in `sides`."""
    figure = go.Figure()
    for i, (side, color) in enumerate(zip(sides, (ARMS["fp8-rollout"].color, OTHER.color), strict=True)):
        values = [group[i] for group in groups.values()]
        figure.add_bar(x=list(groups), y=values, name=side, marker_color=color, text=[f"{v:.3f}" for v in values])
        figure.data[-1].hovertemplate = f"{side}<br>%{{x}}: %{{y:.4f}} nats<extra></extra>"
    figure.update_yaxes(title_text="mean |t − g| in nats", rangemode="tozero")
    return finish(figure, "Tokens that took other experts disagree most", "emulated", height=360)
