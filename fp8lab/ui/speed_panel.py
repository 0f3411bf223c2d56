"""SpeedPanel: sliders over the step-time model: where does an RL step's time go, and when does FP8 pay?

Everything shown is computed by `fp8lab.speed` as the sliders move. It is a model of GPUs; nothing is measured here.
Without live figures (see `panels.static_reason`) call `figure_now()` after moving a slider.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import ipywidgets as widgets
import pandas as pd
import plotly.graph_objects as go

from fp8lab import speed
from fp8lab.precision import PrecisionPlan
from fp8lab.ui.panels import static_reason
from fp8lab.ui.plots import CONFIG, TEXT, finish, renew

PHASES = {"rollout": "#0a8f6a", "score": "#7cc7ab", "train": "#8a6fd1", "refit": "#8a8a8a", "calibrate": "#a87b00"}
PLANS = ("bf16", "fp8-rollout", "fp8-e2e", "fp8-rollout-kv", "fp8-e2e-kv")
CAUSES = {"fixed": "#8a8a8a", "weights": "#8a6fd1", "kv": "#0a8f6a", "quantize": "#a87b00"}
CALIBRATED = "a model of GPUs, calibrated on two published figures; seconds are too few; not measured by us"

PUBLISHED = pd.DataFrame(
    [
        ("GEMM, peak", "2 x", "NVIDIA's data sheets"),
        (
            "FP8 linear layers",
            "15-25 %",
            "throughput in NVIDIA's article, as quoted in news; step time in NeMo RL's docs",
        ),
        (
            "FP8 linear, KV cache, attention",
            "about 48 %",
            "training speed in the article; a rollout in NeMo RL PR 1212",
        ),
        ("FP8 KV cache over FP8 linear", "about 30 %", "rollout of Qwen3-8B-Base, NeMo RL PR 1212"),
        (
            "recalibrating scales",
            "2-3 % of a step",
            "the article; no run behind it was seen by us. Our model misses it: 10 %",
        ),
        ("FP8 rollout, 30B MoE", "30-50 %", "rollout; summaries of FP8-RL (arXiv:2601.18150)"),
        ("FP8 end to end, 30B MoE, 8 x H200", "slower", "verl issue 7232: the training part"),
    ],
    columns=["what", "published", "of what, and who says so"],
)
"""Claims about FP8's speed in RL and their provenance."""


def step_time_bars(times: Mapping[str, Mapping[str, float]], *, title: str = "Where a step's time goes") -> go.Figure:
    """Stacked bars of a step's phases, one bar a plan; the first plan is the base of the gains written behind."""
    figure = go.Figure()
    base = sum(next(iter(times.values()), {}).values())
    for phase, color in PHASES.items():
        figure.add_bar(
            y=list(times),
            x=[phases[phase] for phases in times.values()],
            name=phase,
            orientation="h",
            marker={"color": color},
            hovertemplate=f"%{{y}}<br>{phase}: %{{x:.1f}} s<extra></extra>",
        )
    for name, phases in times.items():
        whole = sum(phases.values())
        text = f" {whole:.1f} s" + (f", {base / whole - 1:+.0%} throughput" if whole != base else "")
        figure.add_annotation(y=name, x=whole, text=text, showarrow=False, xanchor="left", font={"color": TEXT})
    longest = max((sum(phases.values()) for phases in times.values()), default=1.0)
    figure.update_xaxes(title_text="seconds per RL step", range=[0, 1.35 * longest])
    figure.update_yaxes(autorange="reversed", automargin=True)
    finish(figure, title, CALIBRATED, height=340).update_layout(barmode="stack", legend_traceorder="normal")
    return figure.update_xaxes(showgrid=False).update_yaxes(showgrid=False)


def decode_bars(steps: Mapping[tuple[str, int], Mapping[str, float]]) -> go.Figure:
    """What a decode step waits for: a stacked bar for each (plan, sequences) of `speed.decode_step`."""
    figure = go.Figure()
    places = [[str(sequences) for _, sequences in steps], [plan for plan, _ in steps]]
    for cause, color in CAUSES.items():
        milliseconds = [1000 * parts[cause] for parts in steps.values()]
        hover = f"%{{x}}<br>{cause}: %{{y:.1f}} ms<extra></extra>"
        figure.add_bar(x=places, y=milliseconds, name=cause, marker={"color": color}, hovertemplate=hover)
    figure.update_xaxes(title_text="sequences that one engine decodes together")
    figure.update_yaxes(title_text="ms per decode step")
    finish(figure, "What decoding waits for", CALIBRATED, height=400)
    return figure.update_layout(barmode="stack", legend_traceorder="normal", margin_b=90)


class SpeedPanel:
    """Show it by ending a cell with it. shapes: name -> `speed.ModelShape`, the models to choose from."""

    def __init__(self, shapes: Mapping[str, speed.ModelShape], *, plans: Sequence[str] = PLANS) -> None:
        self.shapes, self.plans = dict(shapes), tuple(plans)
        start = speed.Workload()
        wide = {"layout": {"width": "430px"}, "style": {"description_width": "150px"}}
        self.model = widgets.Dropdown(options=list(self.shapes), description="model", **wide)
        self.gpu = widgets.Dropdown(options=list(speed.GPUS), value="H100", description="GPU", **wide)
        self.gpus = widgets.SelectionSlider(
            options=[1, 2, 4, 8, 16, 32, 64], value=start.gpus, description="GPUs", **wide
        )
        self.prompts = widgets.SelectionSlider(
            options=[1, 2, 4, 8, 16, 32, 64, 128, 256], value=start.prompts, description="prompts a step", **wide
        )
        self.response = widgets.SelectionSlider(
            options=[50, 100, 200, 500, 1000, 2000, 4000, 8000, 16000],
            value=start.response_tokens,
            description="answer, tokens",
            **wide,
        )
        self.last = widgets.IntSlider(value=0, min=0, max=8, description="last layers BF16", **wide)
        self.price = widgets.BoundedFloatText(
            value=speed.DEFAULTS["price"].value, max=1000, step=0.5, description="price of a GPU-hour", **wide
        )
        self.controls = (self.model, self.gpu, self.gpus, self.prompts, self.response, self.last, self.price)
        self.note = widgets.HTML()
        self.times: dict[str, dict[str, float]] = {}
        self._compute()
        self.figure = self.figure_now()
        if static_reason() is None:
            self.figure = go.FigureWidget(self.figure)
            self.figure._config = CONFIG
        for control in self.controls:
            control.observe(lambda change: self._show(), names="value")
        live = [self.figure] if isinstance(self.figure, widgets.Widget) else []
        columns = [widgets.VBox(self.controls[:4]), widgets.VBox(self.controls[4:])]
        self.view = widgets.VBox([widgets.HBox(columns, layout={"flex_flow": "row wrap"}), self.note, *live])

    @property
    def work(self) -> speed.Workload:
        """The workload of the sliders; experts are spread over all GPUs up to 8."""
        gpus = self.gpus.value
        sizes = {"prompts": self.prompts.value, "response_tokens": self.response.value}
        return speed.Workload(**sizes, gpus=gpus, expert_parallel=min(8, gpus))

    def table(self) -> pd.DataFrame:
        """What is shown: seconds by phase, throughput against the first plan, cost of 1,000 steps."""
        if not self.times:
            return pd.DataFrame()
        base = sum(next(iter(self.times.values())).values())
        rows = {}
        for name, phases in self.times.items():
            whole = sum(phases.values())
            cost = speed.cost(whole, 1000, speed.GPUS[self.gpu.value], self.gpus.value, price=self.price.value)
            rows[name] = {**phases, "step": whole, "throughput": base / whole - 1, **cost}
        return pd.DataFrame.from_dict(rows, orient="index")

    def _plan(self, name: str) -> PrecisionPlan:
        plan = PrecisionPlan.preset(name)
        kept = min(self.last.value, self.shapes[self.model.value].layers)
        return plan.with_bf16(last=kept) if kept and name != "bf16" else plan

    def figure_now(self) -> go.Figure:
        """A new figure of what the sliders say."""
        return step_time_bars(self.times)

    def _show(self) -> None:
        self._compute()
        new = self.figure_now()
        with self.figure.batch_update():
            for trace, fresh in zip(self.figure.data, new.data, strict=True):
                trace.x, trace.y = fresh.x, fresh.y
            self.figure.layout.annotations = new.layout.annotations
            self.figure.layout.xaxis.range = new.layout.xaxis.range

    def _compute(self) -> None:
        shape, gpu = self.shapes[self.model.value], speed.GPUS[self.gpu.value]
        self.times, lines = {}, []
        for name in self.plans:
            try:
                self.times[name] = speed.step(shape, self._plan(name), gpu, self.work)
            except ValueError as error:
                lines.append(f"<b>{name}</b>: {error}")
        cells = [("1,000 steps", "GPU-hours", "kWh", "at your price")]
        for name, row in self.table().iterrows():
            cells.append((name, *(f"{row[key]:,.0f}" for key in ("gpu_hours", "kwh", "price"))))
        pad = '<td style="padding: 0 16px 0 0; text-align: right">'
        text = "".join(f"<tr>{''.join(f'{pad}{cell}</td>' for cell in row)}</tr>" for row in cells)
        self.note.value = f'<div style="line-height: 1.4">{"<br>".join(lines)}<table>{text}</table></div>'

    def _ipython_display_(self) -> None:
        from IPython.display import display

        if isinstance(self.figure, widgets.Widget):
            renew(self.figure)
        display(self.view)
