"""Every slider of the speed panel over its range: the figure shows what the model says."""

import pytest

from fp8lab import speed
from fp8lab.precision import PrecisionPlan
from fp8lab.ui.speed_panel import PUBLISHED, SpeedPanel, decode_bars
from tests.test_speed import MODELS


@pytest.fixture(scope="module")
def panel():
    return SpeedPanel({name: speed.ModelShape.of(MODELS[name]) for name in ("llama", "moe")})


def shown(panel):
    return {plan: sum(trace.x[i] for trace in panel.figure.data) for i, plan in enumerate(panel.figure.data[0].y)}


def test_every_control_over_its_range(panel):
    for control in panel.controls:
        options = getattr(control, "options", None) or [0, 2, 8]
        before = control.value
        for value in options:
            control.value = value
            expected = {plan: sum(phases.values()) for plan, phases in panel.times.items()}
            assert shown(panel) == pytest.approx(expected)
            assert len(panel.figure.layout.annotations) == len(panel.times)
        control.value = before


def test_shows_the_models_own_numbers(panel):
    panel.model.value = "llama"
    expected = speed.step(panel.shapes["llama"], PrecisionPlan.preset("fp8-e2e"), speed.GPUS["H100"], panel.work)
    assert panel.times["fp8-e2e"] == expected
    table = panel.table()
    assert table.loc["bf16", "throughput"] == 0 and table.loc["fp8-e2e", "throughput"] > 0.1
    assert "GPU-hours" in panel.note.value


def test_says_why_a_plan_is_missing(panel):
    panel.gpu.value = "A100"
    assert "A100 has no FP8 tensor cores" in panel.note.value and list(panel.times) == ["bf16"]
    panel.model.value = "moe"
    assert panel.times == {} and "raise tensor_parallel" in panel.note.value
    panel.model.value, panel.gpu.value = "llama", "H100"
    assert len(panel.times) == 5


def test_costs_are_the_models(panel):
    row = panel.table().loc["fp8-e2e"]
    assert f"{row.gpu_hours:,.0f}" in panel.note.value and f"{row.kwh:,.0f}" in panel.note.value
    panel.price.value = 6.0
    assert panel.table().loc["fp8-e2e"].price == pytest.approx(2 * row.price)
    panel.price.value = 3.0


def test_decode_bars_show_the_causes(panel):
    plan = PrecisionPlan.preset("fp8-e2e")
    parts = speed.decode_step(panel.shapes["llama"], plan, speed.GPUS["H100"], sequences=64, context=2000)
    figure = decode_bars({("fp8-e2e", 64): parts})
    assert {trace.name: trace.y[0] for trace in figure.data} == pytest.approx({k: 1000 * v for k, v in parts.items()})
    assert [list(level) for level in figure.data[0].x] == [["64"], ["fp8-e2e"]]


def test_starts_from_the_models_defaults():
    panel = SpeedPanel({"llama": speed.ModelShape.of(MODELS["llama"])})
    assert panel.work == speed.Workload(expert_parallel=8) and panel.price.value == speed.DEFAULTS["price"].value


def test_a_price_below_nothing_is_nothing(panel):
    before = panel.price.value
    panel.price.value = -1.0
    assert panel.price.value == 0 and (panel.table().price == 0).all()
    panel.price.value = before


def test_every_claim_says_who_made_it():
    assert (PUBLISHED.map(len) > 0).all(axis=None) and list(PUBLISHED.columns)[-1] == "of what, and who says so"
    (row,) = PUBLISHED[PUBLISHED.what == "recalibrating scales"].to_dict("records")
    assert "misses" in row["of what, and who says so"]
