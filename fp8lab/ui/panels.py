"""RunPanel: choose precisions, press Run, watch the curves, press Stop.

    panel = RunPanel(ExperimentConfig(steps=30))     built in the main thread
    panel                                            shows it
    panel.start()                                    what the Run button does
    rows = await panel.finished()                    a cell that waits for the end; in a script: panel.wait()

Rules, each bought with somebody's bug:

- Training runs in `runner.Runner`'s thread, so the kernel stays free and Stop is seen. Callbacks only start it or set a
  flag; JupyterLab may run them on a thread of its own, next to a cell.
- The worker changes values of widgets that exist, at most three times a second, under one lock.
- Nothing is lost in silence: an exception in the thread or in a callback is shown in the panel, kept in `panel.error`
  and raised by `wait()`.
- Widget state is not memory. Runs are written to disk as they go; `attach` and `from_runs` rebuild the curves from
  there.
- A FigureWidget carries 5 MB of JavaScript, so a panel has one. Without anywidget, in VS Code, or with FP8LAB_STATIC=1
  there is none: `wait()` shows a plain figure at the end.
"""

from __future__ import annotations

import dataclasses
import functools
import html
import importlib.util
import os
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ipywidgets as widgets
import pandas as pd

from fp8lab.experiment import ExperimentConfig
from fp8lab.precision import PrecisionPlan
from fp8lab.runlog import RunLog, find_runs
from fp8lab.ui import plots
from fp8lab.ui.runner import Runner

REFRESH = 0.35
"""Seconds between two redraws."""


def static_reason() -> str | None:
    """Why there are no live figures here, or None."""
    if os.environ.get("FP8LAB_STATIC", "0") not in ("", "0"):
        return "FP8LAB_STATIC is set"
    if importlib.util.find_spec("anywidget") is None:
        return "the package anywidget is not installed"
    if "VSCODE_PID" in os.environ or "VSCODE_CWD" in os.environ:
        return "VS Code does not load plotly's live widget reliably"
    return None


def arm_name(preset: str, last: int) -> str:
    """What a plan preset with its last layers in BF16 is called in curves and run folders."""
    return f"{preset}, last {last} in BF16" if last and preset != "bf16" else preset


def _guarded(callback: Callable[..., None]) -> Callable[..., None]:
    """Jupyter drops exceptions of widget callbacks; this puts them into the panel."""

    @functools.wraps(callback)
    def wrapper(self: RunPanel, *event: Any) -> None:
        try:
            callback(self, *event)
        except Exception as error:
            self._fail(error)

    return wrapper


class RunPanel:
    """A panel that runs `base` under the chosen precisions, one after the other.

    base: everything the controls do not change (model, task, prompts a step, temperature, ...). arms: plan presets to
    offer, all chosen at first. home: folder for the runs, default `runner.runs_home()`.
    """

    def __init__(
        self, base: ExperimentConfig, *, arms: Sequence[str] = tuple(plots.ARMS), home: str | Path | None = None
    ) -> None:
        self.base = base
        self.runner = Runner(home, self._on_change)
        self.error: BaseException | None = None
        self.static = static_reason()
        self._lock, self._drawn = threading.RLock(), 0.0
        self._build_controls(arms)
        self.figure = plots.live_figure(self.runner.runs, base.steps)
        if self.static is None:
            from plotly.graph_objects import FigureWidget

            self.figure = FigureWidget(self.figure)
            self.figure._config = plots.CONFIG
        self._say(f"No live curves: {self.static}." if self.static else "Choose precisions and press Run.")

    def _build_controls(self, arms: Sequence[str]) -> None:
        base, wide = self.base, {"style": {"description_width": "110px"}, "layout": {"width": "400px"}}
        self.toggles = {}
        for arm in arms:
            look, tooltip = plots.arm_style(arm), str(PrecisionPlan.preset(arm))
            button = widgets.ToggleButton(value=True, description=look.label, tooltip=tooltip, layout={"width": "auto"})
            button.layout.border_bottom = f"4px solid {look.color}"
            button.icon = "check"
            button.observe(self._on_toggle, names="value")
            self.toggles[arm] = button
        self.steps = widgets.IntSlider(base.steps, 1, max(100, base.steps), description="steps", **wide)
        self.seed = widgets.BoundedIntText(base.seed, 0, 10**6, description="seed", **wide)
        rates = {"min": -5, "max": -2.5, "step": 0.05, "readout_format": ".1e"}
        self.rate = widgets.FloatLogSlider(base.grpo.learning_rate, description="learning rate", **rates, **wide)
        self.last = widgets.IntSlider(0, 0, 4, description="last layers BF16", **wide)
        text = "rollout engine adds in another order than the trainer"
        self.other = widgets.Checkbox(base.rollout_kernels == "other", description=text, indent=False)
        self.other.layout.width = "max-content"
        self.run_button = widgets.Button(description="Run", button_style="primary", icon="play")
        self.stop_button = widgets.Button(description="Stop", button_style="warning", icon="stop", disabled=True)
        self.progress = widgets.IntProgress(0, 0, 1, layout={"width": "240px"})
        self.status = widgets.HTML()
        self.run_button.on_click(self._on_run)
        self.stop_button.on_click(self._on_stop)
        settings = (self.steps, self.seed, self.rate, self.last, self.other)
        self.controls = [*self.toggles.values(), *settings, self.run_button]

    @functools.cached_property
    def view(self) -> widgets.Widget:
        """The panel as one widget."""
        columns = [[self.steps, self.last, self.other], [self.rate, self.seed]]
        settings = widgets.HBox([widgets.VBox(column) for column in columns], layout={"flex_flow": "row wrap"})
        toggles = widgets.HBox([widgets.Label("precision"), *self.toggles.values()], layout={"flex_flow": "row wrap"})
        buttons = widgets.HBox([self.run_button, self.stop_button, self.progress])
        return widgets.VBox([toggles, settings, buttons, self.status, *([] if self.static else [self.figure])])

    def _ipython_display_(self) -> None:
        from IPython.display import display

        if self.static == "FP8LAB_STATIC is set":
            plots.show(self.figure)
        else:
            if self.static is None:
                plots.renew(self.figure)
            display(self.view)

    # ---- what the buttons do, and a cell may do too ---------------------------------------------------------------

    @_guarded
    def _on_toggle(self, change: Any) -> None:
        change["owner"].icon = "check" if change["new"] else ""

    @_guarded
    def _on_run(self, _button: Any) -> None:
        self.start()

    @_guarded
    def _on_stop(self, _button: Any) -> None:
        self.stop()

    def configs(self) -> dict[str, ExperimentConfig]:
        """What Run would run: arm -> config. ValueError if no precision is chosen."""
        presets = [arm for arm, toggle in self.toggles.items() if toggle.value]
        if not presets:
            raise ValueError("no precision is chosen; press at least one of the buttons above")
        common = {
            "grpo": dataclasses.replace(self.base.grpo, learning_rate=self.rate.value),
            "steps": self.steps.value,
            "seed": self.seed.value,
            "rollout_kernels": "other" if self.other.value else "default",
        }
        last = self.last.value
        plans = {arm_name(preset, last): PrecisionPlan.preset(preset).with_bf16(last=last) for preset in presets}
        return {arm: dataclasses.replace(self.base, name=arm, plan=plan, **common) for arm, plan in plans.items()}

    def start(self) -> None:
        """Start the chosen arms in the worker thread and return at once; RuntimeError if it is at work already."""
        configs = self.configs()
        self.error = None
        self._set_busy(True)
        try:
            self.runner.start(configs)
        except RuntimeError:
            self._set_busy(self.running)
            raise

    def stop(self) -> None:
        """Ask the worker to end after the step it is in; what it has done is kept, with a checkpoint."""
        self.runner.stop()
        if self.running:
            self._say("Stopping after this step…")

    @property
    def running(self) -> bool:
        """True while the worker thread lives."""
        return self.runner.running

    @property
    def runs(self) -> dict[str, list[dict[str, Any]]]:
        """The rows so far, by arm."""
        return self.runner.snapshot()

    def wait(self, timeout: float | None = None) -> pd.DataFrame:
        """Block until done and return all rows (`Runner.wait`). Raises what failed in the thread or in a callback."""
        return self._ending(self.runner.wait(timeout))

    async def finished(self) -> pd.DataFrame:
        """The same for `await` in a cell: the Stop button is heard meanwhile (`Runner.finished`)."""
        return self._ending(await self.runner.finished())

    def _ending(self, rows: pd.DataFrame) -> pd.DataFrame:
        if self.error is not None:
            raise self.error
        if self.static is not None:
            plots.show(self.figure)
        return rows

    def attach(self, folder: str | Path) -> RunPanel:
        """Show the runs in `folder` (see `Runner.attach`); returns the panel."""
        arms = self.runner.attach(folder)
        self._draw()
        self._say(f"Showing {arms} runs from {html.escape(str(folder))}.")
        return self

    @classmethod
    def from_runs(cls, folder: str | Path) -> RunPanel:
        """A panel that shows the runs in `folder`, with the newest one's settings to go on from."""
        newest = find_runs([folder])[-1]
        return cls(ExperimentConfig.from_dict(RunLog(newest).config), home=newest.parent).attach(folder)

    # ---- drawing; called from the worker thread too -----------------------------------------------------------------

    def _on_change(self, runner: Runner, ended: bool) -> None:
        now = time.monotonic()
        try:
            if ended or now - self._drawn >= REFRESH:
                self._draw()
                self._report(runner, ended)
        except Exception as error:
            self._fail(error)
            raise
        finally:
            if ended:
                self._set_busy(False)

    def _report(self, runner: Runner, ended: bool) -> None:
        if runner.error is not None:
            self._fail(runner.error)
        elif ended:
            word, home = "Stopped" if runner.stopping else "Done", html.escape(str(runner.home))
            self._say(f"{word} after {runner.seconds:.0f} s. The runs are in {home}.")
        else:
            left = (runner.total - runner.done) * runner.seconds / runner.done if runner.done else None
            self._say(html.escape(runner.now) + (f" · about {left:.0f} s to go in all" if left else "…"))

    def _draw(self) -> None:
        with self._lock:
            runs, self._drawn = self.runner.snapshot(), time.monotonic()
            steps = max([self.steps.value, *(rows[-1]["step"] for rows in runs.values() if rows)])
            plots.add_arms(self.figure, runs)
            with self.figure.batch_update():
                plots.update_live(self.figure, runs, steps)
            self.progress.max, self.progress.value = self.runner.total, self.runner.done

    def _set_busy(self, busy: bool) -> None:
        for control in self.controls:
            control.disabled = busy
        self.stop_button.disabled = not busy
        if busy:
            self.progress.bar_style = ""

    def _say(self, text: str) -> None:
        self.status.value = f'<span style="line-height: 1.6">{text}</span>'

    def _fail(self, error: BaseException) -> None:
        self.error = error
        self.progress.bar_style = "danger"
        short, lines = html.escape(f"{type(error).__name__}: {error}"), traceback.format_exception(error)
        details = f"<details><summary>traceback</summary><pre>{html.escape(''.join(lines))}</pre></details>"
        self._say(f'<b style="color: #d5453e">{short}</b>{details}')
