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
- Widget state is not memory. Runs are written to disk as they go; `attach` and `from_runs` rebuild curves and controls
  from there.
- A control has room for whatever `base` says, so nothing changes that nobody touched.
- A FigureWidget carries 5 MB of JavaScript, so a panel has one. Without anywidget, in VS Code, or with FP8LAB_STATIC=1
  there is none: `wait()` shows a plain figure at the end.
"""

from __future__ import annotations

import dataclasses
import functools
import html
import importlib.util
import math
import os
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import ipywidgets as widgets
import pandas as pd

from fp8lab.experiment import ExperimentConfig
from fp8lab.precision import PRESETS, PrecisionPlan
from fp8lab.runlog import RunLog, find_runs
from fp8lab.ui import plots
from fp8lab.ui.arm_editor import OWN, ArmEditor, layer_count, with_correction_of
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


def preset_arm(config: ExperimentConfig, presets: Iterable[str]) -> tuple[str, int] | None:
    """(preset, last layers in BF16) of a config that the button of one of these presets made; None for any other."""
    plan, last = config.plan, config.plan.rollout.fallback.last
    known = plan.name in PRESETS and plan.name in presets
    made = known and plan == PrecisionPlan.preset(plan.name).with_bf16(last=last)
    return (plan.name, last) if made else None


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

    base: where the controls start, and everything that has none (model, task, prompts a step, temperature, ...). arms:
    plan presets to offer, all chosen at first. Its own plan is where the arm `custom` starts, which is chosen, too, if
    that plan is no preset of `plots.ARMS`. home: folder for the runs, default `runner.runs_home()`.
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
        own = (base.plan.rollout, base.plan.trainer) not in [PRESETS[arm][:2] for arm in plots.ARMS]
        tips = {arm: str(PrecisionPlan.preset(arm)) for arm in arms} | {OWN: "what is set under Your own arm"}
        for arm, tip in tips.items():
            look, chosen = plots.arm_style(arm), arm != OWN or own
            button = widgets.ToggleButton(chosen, description=look.label, tooltip=tip, layout={"width": "auto"})
            button.layout.border_bottom = f"4px solid {look.color}"
            button.icon = "check" if chosen else ""
            button.observe(self._on_toggle, names="value")
            self.toggles[arm] = button
        self.steps = widgets.IntSlider(1, 1, 100, description="steps", **wide)
        self.seed = widgets.BoundedIntText(0, 0, 10**6, description="seed", **wide)
        rates = {"min": -5, "max": -2.5, "step": 0.05, "readout_format": ".1e"}
        self.rate = widgets.FloatLogSlider(1e-4, description="learning rate", **rates, **wide)
        self.last = widgets.IntSlider(0, 0, layer_count(base.model) or 4, description="last layers BF16", **wide)
        text = "rollout engine adds in another order than the trainer"
        self.other = widgets.Checkbox(False, description=text, indent=False)
        self.other.layout.width = "max-content"
        self._show_common(base)
        self.editor = ArmEditor(self._common)
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
        parts = [toggles, settings, self.editor.view, buttons, self.status]
        return widgets.VBox([*parts, *([] if self.static else [self.figure])])

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
        try:
            self.configs()
        except ValueError as error:  # what is chosen cannot run: nobody's bug
            self._fail(error, details=False)
        else:
            self.start()

    @_guarded
    def _on_stop(self, _button: Any) -> None:
        self.stop()

    def _common(self) -> ExperimentConfig:
        """`base` with what the controls above say of all arms."""
        kernels = self.base.rollout_kernels
        return dataclasses.replace(
            self.base,
            grpo=dataclasses.replace(self.base.grpo, learning_rate=self.rate.value),
            steps=self.steps.value,
            seed=self.seed.value,
            rollout_kernels="other" if self.other.value else "default" if kernels == "other" else kernels,
        )

    def _show_common(self, config: ExperimentConfig) -> None:
        """Put into the controls what `_common` reads from them, with room for it."""
        rate = config.grpo.learning_rate
        if not 10**self.rate.min <= rate <= 10**self.rate.max:
            power, room = math.log10(rate), 1e-9
            self.rate.min = min(self.rate.min, math.floor(power - room))
            self.rate.max = max(self.rate.max, math.ceil(power + room))
        self.rate.value = rate
        for control, value in ((self.steps, config.steps), (self.seed, config.seed)):
            control.min, control.max = min(control.min, value), max(control.max, value)
            control.value = value
        self.other.value = config.rollout_kernels == "other"

    def configs(self) -> dict[str, ExperimentConfig]:
        """What Run would run: arm -> config. ValueError if no precision is chosen, or for an arm that cannot run."""
        chosen = [arm for arm, toggle in self.toggles.items() if toggle.value]
        if not chosen:
            raise ValueError("no precision is chosen; press at least one of the buttons above")
        common, last, configs = self._common(), self.last.value, {}
        for arm in chosen:
            try:
                if arm == OWN:
                    configs[OWN] = self.editor.config()
                else:
                    name, plan = arm_name(arm, last), PrecisionPlan.preset(arm).with_bf16(last=last)
                    configs[name] = dataclasses.replace(common, name=name, plan=plan)
            except ValueError as error:
                label = plots.arm_style(arm).label
                raise ValueError(f"{label} cannot run: {error}. Change that, or do not choose {label}") from error
        return configs

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
        """Show the runs in `folder` (see `Runner.attach`), with the newest one's settings in the controls; returns the
        panel."""
        arms = self.runner.attach(folder)
        self._restore(_read_configs(folder))
        self._draw()
        self._say(f"Showing {arms} runs from {html.escape(str(folder))}.")
        return self

    @classmethod
    def from_runs(cls, folder: str | Path) -> RunPanel:
        """A panel that shows the runs in `folder`, with the newest one's settings to go on from."""
        newest = find_runs([folder])[-1]
        base = ExperimentConfig.from_dict(RunLog(newest).config)
        return cls(_without_own_correction(base, _read_configs(folder)), home=newest.parent).attach(folder)

    def _restore(self, configs: Sequence[ExperimentConfig]) -> None:
        """Put the settings of the last of these configs into the controls, and choose the arms that ran with them."""
        if not configs:
            return
        made = [preset_arm(config, self.toggles) for config in configs]
        own = [config for config, arm in zip(configs, made, strict=True) if arm is None]
        self.base = dataclasses.replace(self.base, rollout_kernels=configs[-1].rollout_kernels)
        self._show_common(configs[-1])
        last = next((arm[1] for arm in reversed(made) if arm is not None), 0)
        self.last.max, self.last.value = max(self.last.max, last), last
        if own:
            self.editor.show(own[-1])
        alike = [_common_of(config) == _common_of(configs[-1]) for config in configs]
        ran = {arm for arm, same in zip(made, alike, strict=True) if same}
        for arm, toggle in self.toggles.items():
            toggle.value = (arm, last) in ran
        self.toggles[OWN].value = bool(own) and _common_of(own[-1]) == _common_of(configs[-1])

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
        self.editor.set_busy(busy)
        for control in self.controls:
            control.disabled = busy
        self.stop_button.disabled = not busy
        if busy:
            self.progress.bar_style = ""

    def _say(self, text: str) -> None:
        self.status.value = f'<span style="line-height: 1.6">{text}</span>'

    def _fail(self, error: BaseException, *, details: bool = True) -> None:
        self.error = error
        self.progress.bar_style = "danger"
        short, more = html.escape(f"{type(error).__name__}: {error}" if details else f"{error}."), ""
        if details:
            lines = html.escape("".join(traceback.format_exception(error)))
            more = f"<details><summary>traceback</summary><pre>{lines}</pre></details>"
        self._say(f'<b style="color: #d5453e">{short}</b>{more}')


def _common_of(config: ExperimentConfig) -> tuple[Any, ...]:
    """What the controls for all arms say, from a config."""
    return config.steps, config.seed, config.grpo.learning_rate, config.rollout_kernels


def _without_own_correction(newest: ExperimentConfig, configs: Sequence[ExperimentConfig]) -> ExperimentConfig:
    """The newest config; or, as the arm `custom` has a correction of its own, the newest of a preset that is otherwise
    like it."""
    for config in reversed(configs):
        rest = with_correction_of(config, newest, name=newest.name, plan=newest.plan)
        if rest == newest and preset_arm(config, plots.ARMS):
            return config
    return newest


def _read_configs(folder: str | Path) -> list[ExperimentConfig]:
    """The configs of the runs in a folder, oldest first; without those of another version, which do not say."""
    configs = []
    for path in find_runs([folder]):
        with suppress(ValueError), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            configs.append(ExperimentConfig.from_dict(RunLog(path).config))
    return configs
