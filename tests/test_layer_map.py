"""The map edits a plan; what it shows is what the plan decides. (tests/browser clicks it.)"""

import pytest

from fp8lab.models import load_model
from fp8lab.precision import PrecisionPlan
from fp8lab.ui.layer_map import LayerMap


@pytest.fixture(scope="module")
def model():
    return load_model("tiny-llama")


def decided(plan, side, names):
    return [plan.decide(name, side, 4).precision.is_fp8 for name in names]


def test_shows_what_the_plan_decides(model):
    plan = PrecisionPlan.preset("fp8-e2e").with_bf16(last=1).with_bf16(modules=["mlp.up_proj"], side="trainer")
    shown = LayerMap(model, plan)
    assert len(shown.names) == 28 and shown.grid.columns == ["q", "k", "v", "o", "gate", "up", "down"]
    for side in ("rollout", "trainer"):
        assert getattr(shown.grid, side) == decided(plan, side, shown.names)
    assert "21 of 28" in shown.note.value and "the sides differ" in shown.note.value


@pytest.mark.parametrize("name", ["bf16", "fp8-rollout", "fp8-e2e", "fp8-pow2", "fp8-rollout-kv"])
def test_untouched_it_gives_the_same_decisions(model, name):
    plan = PrecisionPlan.preset(name)
    shown = LayerMap(model, plan)
    for side in ("rollout", "trainer"):
        for module in shown.names:
            assert shown.plan.decide(module, side, 4).precision == plan.decide(module, side, 4).precision
        assert shown.plan.side(side).attention == plan.side(side).attention


def test_every_click_reaches_the_plan(model):
    shown = LayerMap(model, PrecisionPlan.preset("fp8-rollout"))
    for i in (0, 5, 27):
        value = list(shown.grid.rollout)
        value[i] = not value[i]
        shown.grid.rollout = value
        assert decided(shown.plan, "rollout", shown.names) == value
    shown.grid.trainer = [i % 2 == 0 for i in range(28)]
    assert decided(shown.plan, "trainer", shown.names) == shown.grid.trainer, "a BF16 side can be given FP8 modules"
    shown.grid.rollout = [False] * 28
    assert not shown.plan.rollout.linear.is_fp8 and shown.plan.rollout.fallback.modules == ()
    shown.plan.coverage(model)


def test_errors_are_bars(model):
    shown = LayerMap(model, PrecisionPlan.preset("fp8-e2e"))
    shown.show_errors({shown.names[3]: 0.25}, label="mean |d|")
    assert shown.grid.errors[3] == 0.25 and shown.grid.errors[0] is None and shown.grid.error_label == "mean |d|"
    with pytest.raises(ValueError, match="no module 'lm_head'"):
        shown.show_errors({"lm_head": 1.0})


def test_the_script_ships_and_is_small():
    from fp8lab.ui import layer_map

    script = layer_map.HERE / "layer_map.js"
    assert script.is_file() and script.stat().st_size < 8000
    assert "http" not in script.read_text() and "import " not in script.read_text()
