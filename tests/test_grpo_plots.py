"""Notebook 08's figures show the numbers they are given."""

import pytest

from fp8lab.sweep import paired_difference
from fp8lab.ui import grpo_plots
from fp8lab.ui.plots import arm_style


def test_objective_shades_what_is_not_clipped():
    figure = grpo_plots.objective(
        [0.5, 1.0, 2.0], {"A = +1": [0.5, 1.0, 1.2], "A = -1": [-0.8, -1.0, -2.0]}, epsilon=0.2
    )
    assert [trace.y for trace in figure.data] == [(0.5, 1.0, 1.2), (-0.8, -1.0, -2.0)]
    (shade,) = figure.layout.shapes
    assert (shade.x0, shade.x1) == pytest.approx((0.8, 1.2))


def test_silent_groups_and_alignment():
    figure = grpo_plots.silent_groups([2, 4], {"measured": [0.5, 0.2], "alike": [0.4, 0.1]})
    assert [(trace.name, trace.y) for trace in figure.data] == [("measured", (0.5, 0.2)), ("alike", (0.4, 0.1))]
    (bars,) = grpo_plots.alignment({"a": 0.25, "b": 0.99}).data
    assert bars.x == (0.25, 0.99) and bars.text == ("0.250", "0.990")
    assert grpo_plots.alignment({"a": -0.05, "b": 0.99}).layout.xaxis.range[0] < -0.1, "a negative bar is seen as well"


def test_seed_differences_are_in_percentage_points():
    base, arm = {1: 0.80, 2: 0.82, 3: 0.81}, {1: 0.81, 2: 0.82, 3: 0.79}
    within = {"fp8-e2e": {seed: arm[seed] - base[seed] for seed in base}}
    found = paired_difference(arm, base)
    figure = grpo_plots.seed_differences(within, {"fp8-e2e": found}, margin=0.03)
    seeds, mean = figure.data
    assert seeds.x == pytest.approx([1, 0, -2]) and mean.x == pytest.approx([100 * found.mean])
    assert mean.x[0] - mean.error_x.array[0] == pytest.approx(100 * found.low)
    assert seeds.marker.color == mean.marker.color == arm_style("fp8-e2e").color
    assert figure.layout.shapes[0].x1 == pytest.approx(3)
