"""Figures show what the tables say; the panel measures what is clicked, and shows what goes wrong."""

import numpy as np
import pandas as pd
import pytest
import torch

from fp8lab.diagnostics import mismatch
from fp8lab.models import load_model
from fp8lab.precision import PrecisionPlan
from fp8lab.ui import attribution_plots as figures
from fp8lab.ui.fallback_panel import FallbackPanel, flops_kept

KINDS = ("self_attn.q_proj", "mlp.down_proj")


@pytest.fixture
def table():
    names = [f"model.layers.{layer}.{kind}" for layer in range(3) for kind in KINDS]
    k3 = np.array([6.0, 5.0, 4.0, 1.0, 2.0, 3.0]) * 1e-5
    rows = {"name": names, "layer": [0, 0, 1, 1, 2, 2], "tensor": "weight+activation", "in_k3": k3}
    rows |= {"in_k3_low": 0.8 * k3, "in_k3_high": 1.5 * k3, "first_order_k3": 0.9 * k3}
    return pd.DataFrame(rows)


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("model.layers.3.mlp.down_proj", "3 down"),
        ("model.layers.12.self_attn.o_proj", "12 o"),
        ("model.layers.7", "7"),
    ],
)
def test_short_names(name, short):
    assert figures.short_name(name) == short


def test_the_map_has_a_cell_a_module(table):
    heat = figures.attribution_map(table.sample(frac=1, random_state=0)).data[0]
    assert list(heat.y) == ["layer 0", "layer 1", "layer 2"] and set(heat.x) == {"q", "down"}
    column = list(heat.x).index("down")
    assert [row[column] for row in heat.z] == pytest.approx([5e-5, 1e-5, 3e-5])


def test_bars_are_sorted_and_have_their_intervals(table):
    bars = figures.leave_one_in(table, top=4).data[0]
    assert list(bars.y) == ["0 q", "0 down", "1 q", "2 down"]
    assert list(bars.error_x.array) == pytest.approx([0.5 * x for x in bars.x])
    assert list(bars.error_x.arrayminus) == pytest.approx([0.2 * x for x in bars.x])


def test_estimate_beside_exact(table):
    figure = figures.estimate_against_exact(table, (0.9, 0.7, 1.0))
    points = figure.data[1]
    assert list(points.x) == pytest.approx(list(table["first_order_k3"]))
    assert "0.90 [0.70, 1.00]" in figure.layout.title.text
    assert [text for text in points.text if text] == ["0 q", "0 down", "1 q", "2 q", "2 down"]


def test_the_frontier_starts_at_the_plan():
    rows = [("plan", 0.0, 0, 4e-4, 0.0), ("recommended", 0.1, 2, 2e-4, 0.5), ("last", 0.1, 1, 3e-4, 0.25)]
    found = pd.DataFrame(rows, columns=["order", "flops_kept", "units", "k3", "removed"])
    found["k3_low"], found["k3_high"] = found["k3"] - 1e-5, found["k3"] + 2e-5
    figure = figures.frontier_figure(found)
    assert [line.name for line in figure.data] == ["most gap per FLOP", "from the last layer back"]
    assert all(line.x[0] == 0 and line.y[0] == 4e-4 for line in figure.data)
    assert figure.data[0].y[1] == 2e-4 and figure.data[0].error_y.array[1] == pytest.approx(2e-5)


def test_fallback_sets_show_intervals_and_accuracy_where_there_is_one():
    sets = [
        {"set": "nothing", "fp8_share_of_flops": 1.0, "k3": 2e-4, "k3_low": 1e-4, "k3_high": 4e-4},
        {"set": "first layer", "fp8_share_of_flops": 0.75, "k3": 1e-4, "k3_low": 9e-5, "k3_high": 2e-4},
    ]
    sets[1]["accuracy"] = {"mean": 0.7, "low": 0.6, "high": 0.9, "n": 3}
    figure = figures.fallback_sets({"backend": "emulated", "sets": sets})
    left, right = figure.data
    assert list(left.y) == ["nothing (100%)", "first layer (75%)"] and list(left.x) == [2e-4, 1e-4]
    assert list(right.y) == ["first layer (75%)"] and list(right.x) == [0.7]
    assert list(left.error_x.array) == pytest.approx([2e-4, 1e-4])
    assert (right.error_x.array[0], right.error_x.arrayminus[0]) == pytest.approx((0.2, 0.1))
    assert figure.layout.xaxis2.title.text.endswith("3 seeds")
    del sets[1]["accuracy"]
    assert not figures.fallback_sets({"backend": "emulated", "sets": sets}).data[1].x.size


def test_direction_finds_a_temperature_and_no_noise():
    generator = np.random.default_rng(0)
    g = -generator.exponential(1.0, 8000)
    cases = {"noise": (g, 0.02 * generator.standard_normal(8000)), "bug": (g, -0.1 * (g + 1))}
    noise, bug = figures.direction(cases, bins=8).data
    assert max(abs(y) for y in noise.y) < 0.005 and list(bug.x) == sorted(bug.x)
    assert list(bug.y) == sorted(bug.y, reverse=True) and bug.y[0] > 0.1
    assert all(width < 0.002 for width in noise.error_y.array)


def test_positions_and_faults():
    places = {"position": [0, 1], "tokens": [4, 2], "mean_abs_difference": [0.01, 0.02]}
    line = figures.by_position({"FP8": places}).data[0]
    assert list(line.x) == [0, 1] and list(line.y) == [0.01, 0.02]
    dots = figures.planted_faults({"healthy": 1.02, "bug": 1.5})
    assert list(dots.data[0].x) == pytest.approx([0.02, 0.5]) and len(dots.layout.shapes) == 2


# ---- the panel ------------------------------------------------------------------------------------


@pytest.fixture
def panel():
    model = load_model("tiny-llama")

    def measure(plan):  # a gap in proportion to the FP8 layers of the rollout side
        fp8 = sum(plan.decide(name, "rollout", 4).precision.is_fp8 for name in shown.map.names)
        d = torch.full((1, 4), 0.001 * fp8)
        return mismatch(torch.zeros(1, 4), d, torch.ones(1, 4, dtype=torch.bool))

    shown = FallbackPanel(model, PrecisionPlan.preset("fp8-rollout"), measure)
    return shown


def test_the_button_measures_what_is_clicked(panel):
    panel.button.click()
    panel.map.grid.rollout = [".layers.0." not in name for name in panel.map.names]
    panel.button.click()
    first, second = panel.tries
    assert panel.error is None and first["fp8_rollout"] == 28 and second["fp8_rollout"] == 21
    assert second["k3"] < first["k3"] and first["flops_kept"] == 0 and second["flops_kept"] == pytest.approx(0.25)
    assert "25.0%" in panel.table.value and "2 plans" in panel.status.value
    assert panel.map.side.value == "rollout" and first["fp8_trainer"] == 0


def test_no_fp8_at_all_is_measured_too(panel):
    panel.map.grid.rollout = [False] * 28
    row = panel.measure()
    assert row["k3"] == 0 and row["flops_kept"] == 1 and row["token_mult_prob_error"] == 1


def test_an_exception_is_shown(panel):
    def broken(plan):
        raise RuntimeError("no such <kernel>")

    panel._measure = broken
    panel.button.click()
    assert isinstance(panel.error, RuntimeError) and "no such &lt;kernel&gt;" in panel.status.value


def test_flops_kept_counts_linear_layers_of_one_side():
    model, plan = load_model("tiny-llama"), PrecisionPlan.preset("fp8-e2e").with_bf16(last=2, side="trainer")
    assert flops_kept(plan, model) == 0 and flops_kept(plan, model, "trainer") == pytest.approx(0.5)
