"""Figures are pure and complete; the panel, driven as plain Python, runs, stops, fails in the open, and remembers."""

import asyncio
import dataclasses
import importlib.util
import json
import threading
import time

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import pytest

from fp8lab.experiment import ExperimentConfig
from fp8lab.precision import PrecisionPlan
from fp8lab.runlog import RunLog, find_runs
from fp8lab.tasks import data_dir
from fp8lab.ui import lessons, plots
from fp8lab.ui.panels import RunPanel, arm_name, static_reason

TINY = ExperimentConfig(steps=2, prompts_per_step=4, eval_prompts=8, eval_samples=1, rollout_kernels="other")


def rows(steps, gap=0.02):
    first = {"step": 0, "validation_accuracy": 0.3, "validation_samples": 100}
    later = [{"step": s, "reward": 0.3 + s / 100, "token_mult_prob_error": 1 + gap} for s in range(1, steps + 1)]
    later[-1] |= {"validation_accuracy": 0.5, "validation_samples": 400}
    return [first, *later]


STUDY = json.loads((data_dir() / "evidence" / "three-arms.json").read_text())
RUNS = {"bf16": rows(4, 0.0), "fp8-rollout": rows(4), "fp8-e2e, last 1 in BF16": rows(3, 1e-4)}


@pytest.fixture(autouse=True)
def _home(tmp_path, monkeypatch):
    monkeypatch.setenv("FP8LAB_HOME", str(tmp_path / "runs"))
    for name in ("FP8LAB_STATIC", "VSCODE_PID", "VSCODE_CWD"):
        monkeypatch.delenv(name, raising=False)


def wait_until(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)


# ---- figures --------------------------------------------------------------------------------------------------------


def test_live_figure_draws_three_curves_an_arm_and_updates_in_place():
    before = json.dumps(RUNS)
    figure = plots.live_figure({"bf16": rows(2)}, 10)
    assert [t.meta for t in figure.data] == ["bf16/reward", "bf16/validation", "bf16/mismatch"]
    plots.add_arms(figure, RUNS)
    plots.update_live(figure, RUNS, 10)
    assert len(figure.data) == 9 and json.dumps(RUNS) == before
    found = {trace.meta: trace for trace in figure.data}
    assert found["fp8-rollout/mismatch"].y == pytest.approx([0.02] * 4)
    assert found["bf16/mismatch"].y == (plots.FLOOR,) * 4, "a log axis cannot show zero"
    assert found["bf16/validation"].x == (0, 4)
    assert [t.showlegend for t in figure.data] == [False, True, False] * 3
    plots.update_live(figure, {}, 10)
    assert all(len(trace.x) == 0 for trace in figure.data)


def test_live_figure_shows_every_reward():
    low = [{"step": 0}, {"step": 1, "reward": 0.05}]
    assert plots.live_figure({"bf16": low}, 2).layout.yaxis.range[0] < 0.05
    assert plots.live_figure({"bf16": rows(2)}, 2).layout.yaxis.range[0] == pytest.approx(0.2)


def test_figures_outlive_a_change_of_theme():
    assert plots.CONFIG["responsive"] is False, "plotly's responsive figures are 0 pixels high after JupyterLab's theme"


def test_a_table_of_words_is_aligned_to_the_left():
    page = lessons.left(pd.DataFrame({"why": ["because"]}).style.format(str.upper)).to_html()
    assert page.count("text-align: left") == 2 and "BECAUSE" in page


def figures():
    maps = PrecisionPlan.preset("fp8-rollout")
    decisions = [
        maps.decide(f"model.layers.{i}.mlp.up_proj", side, 2) for i in (0, 1) for side in ("rollout", "trainer")
    ]
    spread = {"bf16": np.zeros(9), "fp8-rollout": np.linspace(-1, 1, 50)}
    return {
        "live": plots.live_figure(RUNS, 4),
        "histogram": plots.ratio_histogram(spread),
        "published": plots.published_beside_ours(STUDY),
        "map": plots.precision_map(decisions),
    }


@pytest.mark.parametrize("name", ["live", "histogram", "published", "map"])
def test_every_figure_names_axes_and_backend_and_fits_both_themes(name):
    figure = figures()[name]
    assert isinstance(figure, go.Figure) and len(figure.data) > 0
    assert "emulated" in figure.layout.title.subtitle.text
    assert figure.layout.paper_bgcolor == figure.layout.plot_bgcolor == plots.CLEAR
    titles = [axis.title.text for axis in [*figure.select_xaxes(), *figure.select_yaxes()]]
    assert any(titles)
    assert "white" not in figure.to_json() and "https://" not in figure.to_json()


def test_an_arm_keeps_its_colour_and_a_variant_is_dotted():
    base, variant = plots.arm_style("fp8-e2e"), plots.arm_style("fp8-e2e, last 1 in BF16")
    assert variant.color == base.color and (base.dash, variant.dash) == ("solid", "dot")
    assert variant.label == "FP8 end to end, last 1 in BF16"
    assert plots.arm_style("mine").label == "mine"
    assert len({arm.color for arm in plots.ARMS.values()}) == len({arm.symbol for arm in plots.ARMS.values()}) == 3


def test_histogram_counts_all_tokens_and_clips_the_tails():
    figure = plots.ratio_histogram({"bf16": np.array([0.0, 5.0, -5.0, 0.0])})
    assert np.nansum(figure.data[0].y) == pytest.approx(1.0)


def test_summary_and_comparison():
    table = plots.summary({"bf16": rows(4, 0.0), "fp8-e2e": rows(4), "empty": []})
    assert list(table.index) == ["bf16", "fp8-e2e"]
    assert table.loc["fp8-e2e", "mean token_mult_prob_error"] == pytest.approx(1.02)
    assert table.loc["bf16", "± sampling"] == pytest.approx(1.96 * (0.25 / 400) ** 0.5)
    assert plots.summary({}).empty and plots.frame({}).empty


def test_the_study_is_shown_as_it_is():
    table = plots.study_table(STUDY)
    accuracy = STUDY["arms"]["fp8-e2e"]["accuracy_last"]
    assert table.loc["fp8-e2e", "accuracy after training"].startswith(f"{accuracy['mean']:.3f} [{accuracy['low']:.3f}")
    assert table.loc["bf16", "minus BF16, same seed"] == ""
    drawn = {trace.y[0].strip(): trace.x[0] for trace in plots.published_beside_ours(STUDY).data}
    ours = 100 * STUDY["paired_differences"]["fp8-rollout - bf16"]["accuracy_last"]["mean"]
    assert drawn["FP8 rollout only · ours"] == pytest.approx(ours)
    assert drawn["FP8 rollout only · published"] == pytest.approx(-3.0)


# ---- the panel ------------------------------------------------------------------------------------------------------


def test_run_to_the_end_then_rebuild_from_disk(tmp_path):
    panel = RunPanel(TINY)
    assert isinstance(panel.figure, go.FigureWidget) and panel.view
    for arm in ("bf16", "fp8-rollout"):
        panel.toggles[arm].value = False
    panel.run_button.click()
    assert panel.run_button.disabled and not panel.stop_button.disabled
    table = panel.wait(60)
    assert list(table.arm.unique()) == ["fp8-e2e"] and list(table.step) == [0, 1, 2]
    assert not panel.run_button.disabled and panel.stop_button.disabled
    assert panel.status.value.count("Done after") == 1 and panel.progress.value == panel.progress.max == 2
    drawn = {trace.meta: trace.y for trace in panel.figure.data}
    assert len(drawn["fp8-e2e/reward"]) == 2 and len(drawn["fp8-e2e/mismatch"]) == 2

    again = RunPanel.from_runs(tmp_path / "runs")
    assert again.runs == panel.runs and again.base.name == "fp8-e2e"
    folder = panel.runner.folders["fp8-e2e"]
    assert RunPanel(TINY).attach(folder).runs == panel.runs
    assert {trace.meta: trace.y for trace in again.figure.data} == drawn


def test_a_new_page_gets_the_curves_of_now():
    panel = RunPanel(TINY)
    panel.start()
    panel.wait()
    panel._ipython_display_()
    assert [len(trace["y"]) for trace in panel.figure._widget_data if trace["meta"].endswith("/mismatch")] == [2, 2, 2]


def test_awaiting_leaves_the_event_loop_free():
    panel = RunPanel(dataclasses.replace(TINY, steps=100), arms=["bf16"])

    async def click_stop():
        while len(panel.runs["bf16"]) < 2:
            await asyncio.sleep(0.01)
        panel.stop_button.click()

    async def cell():
        panel.start()
        click = asyncio.create_task(click_stop())
        rows = await panel.finished()
        await click
        return rows

    assert 2 <= len(asyncio.run(cell())) < 100 and panel.runner.stopping


def test_cancelling_the_waiting_cell_means_stop():
    panel = RunPanel(dataclasses.replace(TINY, steps=100), arms=["bf16"])

    async def cell():
        panel.start()
        waiting = asyncio.create_task(panel.finished())
        await asyncio.sleep(0.2)
        waiting.cancel()
        return await waiting

    assert len(asyncio.run(cell())) < 100 and not panel.running


def test_stop_midway_ends_the_thread_and_keeps_the_rows():
    panel = RunPanel(dataclasses.replace(TINY, steps=100))
    panel.run_button.click()
    wait_until(lambda: len(panel.runs["bf16"]) > 1)
    panel.run_button.click()  # a second click on the way must not start a second thread
    assert isinstance(panel.error, RuntimeError) and "in progress" in panel.status.value
    panel.error = None
    panel.stop_button.click()
    table = panel.wait(60)
    assert not panel.running
    wait_until(lambda: not any(thread.name == "fp8lab-run" for thread in threading.enumerate()))
    assert table.arm.unique() == ["bf16"] and 2 <= len(table) < 100
    assert "Stopped after" in panel.status.value
    assert (panel.runner.folders["bf16"] / "checkpoints").is_dir(), "a stopped run can be resumed"


def test_interrupt_while_waiting_means_stop(monkeypatch):
    panel = RunPanel(dataclasses.replace(TINY, steps=100), arms=["bf16"])
    panel.start()
    wait_until(lambda: len(panel.runs["bf16"]) > 1)
    wait, calls = panel.runner._ended.wait, []

    def interrupted(timeout):
        calls.append(timeout)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return wait(timeout)

    monkeypatch.setattr(panel.runner._ended, "wait", interrupted)
    assert len(panel.wait(60)) < 100 and panel.runner.stopping and "Stopped after" in panel.status.value


def test_an_exception_in_the_thread_is_shown_and_raised():
    panel = RunPanel(dataclasses.replace(TINY, model="no-such-model"), arms=["bf16"])
    panel.run_button.click()
    with pytest.raises(FileNotFoundError, match="no-such-model"):
        panel.wait(60)
    assert isinstance(panel.error, FileNotFoundError) and "no-such-model" in panel.status.value
    assert not panel.run_button.disabled, "one can change something and try again"


def test_an_exception_in_a_callback_is_shown_and_raised():
    panel = RunPanel(TINY)
    for toggle in panel.toggles.values():
        toggle.value = False
    panel.run_button.click()
    assert "no precision is chosen" in panel.status.value and not panel.running
    with pytest.raises(ValueError, match="no precision is chosen"):
        panel.wait()


def test_an_exception_while_drawing_is_shown_and_raised(monkeypatch):
    panel = RunPanel(TINY, arms=["bf16"])
    monkeypatch.setattr(plots, "update_live", lambda *_: 1 / 0)
    panel.start()
    with pytest.raises(ZeroDivisionError):
        panel.wait(60)
    assert "ZeroDivisionError" in panel.status.value and not panel.run_button.disabled


def test_every_control_over_its_range():
    panel = RunPanel(TINY)
    panel.toggles["custom"].value = True
    for control in (panel.steps, panel.seed, panel.rate, panel.last):
        low, high = (10**e for e in (control.min, control.max)) if control is panel.rate else (control.min, control.max)
        for value in (low, type(low)((low + high) / 2), high):
            control.value = value
            for config in panel.configs().values():
                assert ExperimentConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
                assert (config.steps, config.seed) == (panel.steps.value, panel.seed.value)
                assert config.grpo.learning_rate == panel.rate.value
    for value in (True, False):
        panel.other.value = value
        assert {c.rollout_kernels for c in panel.configs().values()} == {"other" if value else "default"}
    presets = ["bf16", "fp8-rollout, last 4 in BF16", "fp8-e2e, last 4 in BF16"]
    assert list(panel.configs()) == [*presets, "custom"]
    panel.last.value, panel.toggles["custom"].value = 0, False
    assert {name: c.plan.name for name, c in panel.configs().items()} == {arm: arm for arm in plots.ARMS}
    assert arm_name("bf16", 2) == "bf16"


PLAN = PrecisionPlan.preset("fp8-e2e-kv", rule="nemo_rl").with_bf16(layers=[1], modules=["*.o_proj"], side="trainer")
SLOW = dataclasses.replace(TINY.grpo, learning_rate=1e-6)
FAST = dataclasses.replace(TINY.grpo, learning_rate=1, importance_sampling="tis", importance_sampling_max=float("inf"))


@pytest.mark.parametrize(
    "changes",
    [
        {"grpo": SLOW, "seed": 2_000_000, "steps": 12_345, "rollout_kernels": "batch_invariant"},
        {"grpo": FAST, "seed": -7, "plan": PLAN.with_bf16(first=3), "rollout_kernels": "default"},
        {"grpo": dataclasses.replace(SLOW, learning_rate=1e-5), "plan": PrecisionPlan.preset("mxfp8-rollout")},
        {"grpo": dataclasses.replace(SLOW, learning_rate=1e-9, importance_sampling="geometric")},
    ],
)
def test_nothing_changes_that_nobody_touched(changes):
    base = dataclasses.replace(TINY, **changes)
    panel = RunPanel(base)
    plans = {arm: PrecisionPlan.preset(arm) for arm in plots.ARMS}
    if "plan" in changes:  # no preset's button makes it, so it is an arm of its own, and chosen
        plans["custom"] = dataclasses.replace(base.plan, name="custom")
    assert panel.configs() == {arm: dataclasses.replace(base, name=arm, plan=plan) for arm, plan in plans.items()}
    if base.rollout_kernels == "batch_invariant":
        for kernels in ("other", "batch_invariant"):
            panel.other.value = not panel.other.value
            assert {config.rollout_kernels for config in panel.configs().values()} == {kernels}


def write_runs(home, number, configs):
    """Run folders as a panel leaves them, without rows."""
    for i, config in enumerate(configs):
        with RunLog(home / f"{number}{i}") as log:
            log.start(config.to_dict())


def chosen(panel, *arms, **values):
    """The panel with these arms chosen, and these values in its controls."""
    for arm, toggle in panel.toggles.items():
        toggle.value = arm in arms
    for name, value in values.items():
        getattr(panel, name).value = value
    return panel


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize(
    ("arms", "values"),
    [
        (["fp8-rollout"], {"last": 2, "steps": 7}),
        (["bf16", "fp8-e2e"], {"seed": 5, "other": False}),
        (["custom"], {"rate": 3e-4}),
        (["bf16", "custom"], {"last": 1}),
    ],
)
def test_the_controls_come_back_from_the_run_folders(tmp_path, arms, values, order):
    base = dataclasses.replace(TINY, grpo=SLOW, plan=PLAN, temperature=0.7)
    write_runs(tmp_path, 0, RunPanel(TINY).configs().values())  # older ones, with other settings
    panel = chosen(RunPanel(base), *arms, **values)
    panel.editor.sides["trainer"].gradient.value = "e5m2"
    panel.editor.mode.value, panel.editor.low.value, panel.editor.high.value = "icepop", 0.5, 5.0
    configs = panel.configs()
    write_runs(tmp_path, 1, list(configs.values())[::order])

    again = RunPanel.from_runs(tmp_path)
    assert again.configs() == configs and again.last.value == panel.last.value
    assert {arm for arm, toggle in again.toggles.items() if toggle.value} == set(arms)
    attached = RunPanel(dataclasses.replace(TINY, temperature=0.7)).attach(tmp_path)
    assert attached.configs() == configs

    again.toggles["custom"].value = again.toggles["fp8-rollout"].value = True
    mixed = again.configs()
    if "custom" in arms:
        assert mixed["custom"] == configs["custom"]
    if arms != ["custom"]:  # the presets keep the correction they had
        assert {c.grpo.importance_sampling for name, c in mixed.items() if name != "custom"} == {"is"}


def test_a_config_of_another_version_is_no_hindrance(tmp_path):
    write_runs(tmp_path, 0, [TINY])
    config = json.loads((tmp_path / "00" / "config.json").read_text())
    (tmp_path / "00" / "config.json").write_text(json.dumps(config | {"gone": 1}))
    assert RunPanel(TINY).attach(tmp_path).configs() == RunPanel(TINY).configs()
    with pytest.raises(ValueError, match="gone"):
        RunPanel.from_runs(tmp_path)
    panel = chosen(RunPanel(TINY), "fp8-e2e", last=3)
    write_runs(tmp_path, 1, panel.configs().values())
    assert RunPanel.from_runs(tmp_path).configs() == panel.configs()


def test_an_arm_that_cannot_run_is_refused_in_words():
    panel = chosen(RunPanel(TINY), "bf16", "custom")
    panel.editor.sides["rollout"].weight.value = "e4m3"
    panel.editor.mode.value = "none"
    panel.run_button.click()
    assert not panel.running and panel.runs == {}
    for text in (panel.status.value, panel.editor.line.value):
        assert "cannot run" in text and "allow_uncorrected_fp8_rollout" in text and "raceback" not in text
    assert not panel.run_button.disabled and not panel.editor.mode.disabled
    panel.toggles["custom"].value = False
    panel.run_button.click()
    assert list(panel.wait(60).arm.unique()) == ["bf16"]


def test_the_own_arm_runs_as_it_was_set():
    panel = chosen(RunPanel(TINY), "custom", last=2)
    rollout, trainer = panel.editor.sides["rollout"], panel.editor.sides["trainer"]
    assert rollout.rule.disabled and panel.editor.low.disabled
    rollout.weight.value = rollout.activation.value = trainer.weight.value = "e4m3"
    rollout.rule.value, panel.editor.mode.value = "pow2", "tis"
    expected = panel.configs()
    panel.run_button.click()
    assert all(control.disabled for control in panel.editor.controls())
    rows = panel.wait(60)
    assert list(rows.arm.unique()) == ["custom"] and rows.token_mult_prob_error.iloc[-1] > 1
    assert not any(control.disabled for control in panel.editor.controls())
    logged = json.loads((panel.runner.folders["custom"] / "config.json").read_text())
    assert {"custom": ExperimentConfig.from_dict(logged)} == expected
    assert logged["plan"]["rollout"]["fallback"]["last"] == 0, "the slider above is the presets'"
    assert "custom/mismatch" in {trace.meta for trace in panel.figure.data}


def test_static_mode_has_no_live_widget(monkeypatch):
    monkeypatch.setenv("FP8LAB_STATIC", "1")
    shown = []
    monkeypatch.setattr(plots, "show", shown.append)
    panel = RunPanel(dataclasses.replace(TINY, steps=1), arms=["bf16"])
    assert type(panel.figure) is go.Figure and panel.view
    panel.start()
    panel.wait(60)
    assert shown == [panel.figure] and len(panel.figure.data[0].y) == 1
    monkeypatch.setenv("FP8LAB_STATIC", "0")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "anywidget" in static_reason()


def test_a_folder_without_runs_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="holds no run"):
        find_runs([tmp_path])


# ---- lessons --------------------------------------------------------------------------------------------------------


def test_prediction_is_compared():
    prediction = lessons.Prediction("a < b?", ["yes", "no"])
    assert "(nothing yet)" in prediction.compare("yes") and prediction.choice.value is None
    prediction.choice.value = "no"
    assert "Noted" in prediction.note.value and prediction.compare("yes").splitlines()[0].endswith("no")


@pytest.mark.parametrize(
    ("changes", "left", "hint"),
    [
        ({}, 1.0, "with_bf16"),
        ({"last": 1}, 0.9, "One layer is not enough"),
        ({"last": 2}, 0.8, "Which end"),
        ({"last": 3}, 0.4, "at most 2"),
    ],
)
def test_quickstart_hints(changes, left, hint):
    verdict = lessons.check_fallback(PrecisionPlan.preset("fp8-rollout").with_bf16(**changes), left, 1.0)
    assert not verdict.ok and hint in verdict.message and hint in verdict._repr_html_()


def test_quickstart_checker_and_solution(root):
    spec = importlib.util.spec_from_file_location("solution", root / "notebooks/solutions/00_quickstart.py")
    solution = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(solution)
    assert lessons.check_fallback(solution.plan, 0.5, 1.0).ok
    assert "start from" in lessons.check_fallback("fp8", 0.5, 1.0).message
    assert "rollout side only" in lessons.check_fallback(PrecisionPlan.preset("fp8-e2e"), 0.5, 1.0).message
    assert isinstance(plots.frame(RUNS), pd.DataFrame)
