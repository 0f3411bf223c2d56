"""Figures of FP8 attention and of routers: what they draw is what they were given."""

import ml_dtypes
import numpy as np
import pytest
import torch

from fp8lab.attention_scales import AttentionMeter, AttentionScales
from fp8lab.routing import RouterAgreement
from fp8lab.ui import attention_plots


def test_scales_have_a_line_per_layer():
    history = [AttentionScales.ones(2), AttentionScales(query=(1.0, 1.0), key=(0.5, 0.25), value=(1.0, 1.0))]
    figure = attention_plots.scales_over_steps(history)
    assert [list(trace.y) for trace in figure.data] == [[1.0, 0.5], [1.0, 0.25]]
    assert not attention_plots.scales_over_steps([]).data
    with pytest.raises(ValueError, match="allowed: query, key, value"):
        attention_plots.scales_over_steps(history, "output")


def test_wrong_scales_have_a_line_per_format():
    figure = attention_plots.error_by_scale([0.5, 1.0], {"E4M3": [14.0, 31.0], "INT8": [15.0, 40.0]})
    assert {trace.name: list(trace.y) for trace in figure.data} == {"E4M3": [14.0, 31.0], "INT8": [15.0, 40.0]}
    assert all(list(trace.x) == [0.5, 1.0] for trace in figure.data) and figure.layout.xaxis.type == "log"


def test_saturation_draws_what_the_meter_counted():
    meter = AttentionMeter(2)
    meter.record(1, "key", torch.tensor([1.0, 2.0, 500.0, -900.0]).view(1, 1, 2, 2), scale=1.0)
    figure = attention_plots.saturation(meter.saturation())
    assert {trace.name: list(trace.y) for trace in figure.data}["key"] == [0.0, 0.5]


def test_softmax_weights_agree_with_ml_dtypes():
    p = torch.logspace(-30, 0, 500, base=2.0)
    figure = attention_plots.softmax_weights(p)
    for trace, factor in zip(figure.data[1:], (256, 1), strict=True):
        kept = (p.numpy() * np.float32(factor)).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) > 0
        assert sum(trace.y) == kept.sum() and f"{kept.mean():.0%}" in trace.name
    assert sum(figure.data[0].y) == len(p) and sum(figure.data[1].y) > sum(figure.data[2].y) > 0


def test_masked_weights_do_not_count():
    figure = attention_plots.softmax_weights(torch.tensor([0.0, 1.0, 0.5]))
    assert sum(figure.data[0].y) == 2


def test_mismatch_keeps_the_colours_of_the_arms():
    excess = {"bf16": 0.0, "fp8-rollout": 0.02, "fp8-rollout-kv": 0.03, "k, v": 0.01}
    (bar,) = attention_plots.mismatch(excess).data
    assert list(bar.x) == list(excess.values()) and list(bar.marker.pattern.shape) == ["", "", "/", "/"]
    arms = [attention_plots.ARMS[name].color for name in ("bf16", "fp8-rollout", "fp8-rollout", "fp8-e2e")]
    assert list(bar.marker.color) == arms


def test_memory_and_routers():
    (bar,) = attention_plots.cache_memory({"BF16": 2000, "FP8": 1000}).data
    assert list(bar.x) == [2000, 1000] and list(bar.text) == ["100%", "50%"]
    assert list(bar.marker.color) == [attention_plots.BF16, attention_plots.FP8]
    same = {"layers": ("a", "b"), "overlap": (1.0, 0.9), "logit_rms": (0.0, 0.1), "margin": (0.2, 0.2), "tokens": 50}
    found = RouterAgreement(changed=(0.0, 0.2), anywhere=0.2, **same)
    (bar,) = attention_plots.router_disagreement({"fp8-rollout": found}).data
    assert list(bar.y) == [0.0, 0.2] and "20.0%" in bar.name
