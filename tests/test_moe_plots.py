"""Figures of mixture-of-experts layers: what they draw is what they were given."""

import torch

from fp8lab.ui import moe_plots


def test_flips_are_counted_within_their_margin():
    margin = torch.tensor([0.005, 0.005, 0.015, 0.3, 0.2])
    flips = {"BF16": torch.tensor([True, False, False, False, False]), "E4M3": margin < 0.1}
    figure = moe_plots.flips_by_margin(margin, flips)
    bf16, e4m3 = figure.data
    assert list(bf16.y) == [0.5, 0.0, 0.0] and list(e4m3.y) == [1.0, 1.0, 0.0]
    assert bf16.x == e4m3.x == ("0 to 0.01<br>2 choices", "0.01 to 0.02<br>1 choices", "from 0.2<br>2 choices")
    assert "20.00% of all" in bf16.name and "60.00%" in e4m3.name and bf16.marker.color != e4m3.marker.color


def test_gap_by_route_has_a_bar_per_group_and_side():
    figure = moe_plots.gap_by_route({"changed": (0.05, 0.03), "same": (0.02, 0.02)}, ("as it is", "replayed"))
    assert [(trace.name, list(trace.y)) for trace in figure.data] == [
        ("as it is", [0.05, 0.02]),
        ("replayed", [0.03, 0.02]),
    ]
    assert list(figure.data[0].x) == ["changed", "same"]
