"""A comparison of runs as one HTML file that needs no network: table, curves with intervals, what each run was."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import plotly.graph_objects as go

from fp8lab.compare import curves, mean_curve, table_rows
from fp8lab.runlog import RunLog, find_runs, write_atomically
from fp8lab.ui.plots import CONFIG, arm_style, finish

CURVES = {
    "validation_accuracy": ("sampled accuracy on validation prompts", "Accuracy"),
    "token_mult_prob_error": ("token_mult_prob_error", "Mismatch between rollout and trainer"),
    "approx_entropy": ("entropy of the policy, nats", "Entropy"),
}
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 1100px; padding: 0 1em; color: #222; }
table { border-collapse: collapse; }
th, td { text-align: left; padding: 4px 12px 4px 0; border-bottom: 1px solid #ccc; }
@media (prefers-color-scheme: dark) { body { background: #111; color: #ddd; } }
details { margin-top: 1em; } pre { overflow-x: auto; font-size: 12px; }
"""


def interval_curves(found: dict[str, dict[int, list[tuple[int, float]]]], axis: str, title: str) -> go.Figure:
    """A line an arm, mean over seeds, with its 95 % interval as a band."""
    figure = go.Figure()
    for arm, seeds in found.items():
        style, rows = arm_style(arm), mean_curve({s: p for s, p in seeds.items() if p})
        if not rows:
            continue
        steps, mean, low, high = zip(*rows, strict=True)
        if low != high:
            figure.add_scatter(
                x=[*steps, *reversed(steps)],
                y=[*high, *reversed(low)],
                fill="toself",
                fillcolor=style.color,
                opacity=0.18,
                line={"width": 0},
                hoverinfo="skip",
                showlegend=False,
            )
        label = f"{style.label} ({len(seeds)} seed{'s' if len(seeds) > 1 else ''})"
        line = {"color": style.color, "dash": style.dash, "width": 2}
        figure.add_scatter(x=steps, y=mean, name=label, mode="lines", line=line)
    figure.update_xaxes(title_text="training step")
    figure.update_yaxes(title_text=axis)
    return finish(figure, title, "emulated", height=380)


def write_report(path: str | Path, comparison: dict[str, Any], folders: Iterable[str | Path]) -> None:
    """Write the report of `compare.compare(folders)` to `path`, under a temporary name first."""
    damaged = comparison.get("damaged", {})
    folders = [run for run in find_runs(folders) if str(run) not in damaged]
    parts = [f"<h1>{len(comparison['arms'])} arms, seeds {', '.join(map(str, comparison['seeds']))}</h1>"]
    rows = table_rows(comparison)
    header = "".join(f"<th>{html.escape(key)}</th>" for key in rows[0])
    body = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row.values())}</tr>" for row in rows)
    parts.append(f"<table><tr>{header}</tr>{body}</table>")
    parts.append(
        "<p>Mean over seeds [95 % t-interval]; differences are taken within a seed. Emulated FP8: operands are rounded "
        "and multiplied in float32, so nothing here says anything about speed.</p>"
    )
    parts += [f"<p>Left out: {html.escape(why)}</p>" for why in damaged.values()]
    script: bool | str = True  # plotly's script goes in once, with the first figure
    for metric, (axis, title) in CURVES.items():
        found = curves(folders, metric)
        if any(points for seeds in found.values() for points in seeds.values()):
            figure = interval_curves(found, axis, title)
            parts.append(figure.to_html(full_html=False, include_plotlyjs=script, config=CONFIG | {"responsive": True}))
            script = False
    for run in folders:
        config = json.dumps(RunLog(run).config, indent=1)
        parts.append(f"<details><summary>{html.escape(str(run))}</summary><pre>{html.escape(config)}</pre></details>")
    head = f"<meta charset='utf-8'><title>fp8lab comparison</title><style>{STYLE}</style>"
    write_atomically(Path(path), f"<!doctype html><html><head>{head}</head><body>{''.join(parts)}</body></html>")
