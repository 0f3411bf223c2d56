"""Figures of formats, blocks and importance sampling: what is drawn is what torch's own types say."""

import numpy as np
import pytest
import torch

from fp8lab.ui import correction_plots, number_plots, plots
from fp8lab.ui.bits import describe

TYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def magnitudes_of(dtype):
    """The finite magnitudes of torch's type, sorted."""
    values = torch.arange(128, dtype=torch.uint8).view(dtype).float()
    return values[values.isfinite()].sort().values


@pytest.mark.parametrize(("low", "high"), [(0.0, 4.0), (0.0, 2**-5), (256.0, 448.0)])
def test_number_line_shows_every_code_inside_the_axis(low, high):
    figure = number_plots.number_line(low=low, high=high)
    for trace, dtype in zip(figure.data, TYPES.values(), strict=True):
        theirs = magnitudes_of(dtype)
        theirs = theirs[(theirs >= low) & (theirs <= high)]
        assert np.asarray(trace.x).tolist() == theirs.tolist()
        assert figure.layout.xaxis.range[0] < min(trace.x) and max(trace.x) < figure.layout.xaxis.range[1]


def test_rounding_error_has_plateaus_sixteen_apart():
    curves = {trace.name: np.asarray(trace.y) for trace in number_plots.rounding_error().data}
    x = np.asarray(number_plots.rounding_error().data[0].x)
    normal = (x > 2.0**-5) & (x < 200)
    plateau = {name: y[normal].max() for name, y in curves.items()}
    assert plateau["E4M3"] == pytest.approx(1 / 17, rel=0.03) and plateau["E5M2"] == pytest.approx(1 / 9, rel=0.03)
    assert plateau["E4M3"] / plateau["BF16"] == pytest.approx(16, rel=0.08), "four fraction bits more"
    octaves = curves["E4M3"][normal][: 4 * 8].reshape(-1, 4)
    np.testing.assert_allclose(octaves, octaves[:1].repeat(len(octaves), 0), rtol=1e-3, err_msg="every octave alike")
    assert curves["E4M3"][0] == 1 and curves["E4M3"][-1] > 0.99, "two cliffs"


def test_bars_take_a_name_for_a_name():
    values = {"1e-07": 0.02, "1e-06": 0.14, "5e-04": 28.0, "nothing": 0.0}
    figure = number_plots.bars(values, title="t", axis="% of codes", digits=2)
    assert figure.layout.yaxis.type == "category", "or plotly draws hair-thin bars on a number axis"
    assert list(figure.data[0].y) == list(values) and figure.layout.xaxis.range[1] > 28.0
    assert figure.data[0].textposition == "outside", "a bar of zero is too short to hold its number"
    assert number_plots.bars({"none": 0.0}, title="t", axis="a").layout.xaxis.range[1] > 0


def test_lines_of_tensors_have_no_colour_of_a_format():
    tensors = {name: torch.randn(64, 64) for name in ("weight", "activation", "gradient")}
    figures = [number_plots.magnitudes(tensors)]
    figures.append(correction_plots.ess_by_length([1, 10], {"token r": [1, 1], "product": [1, 0.5]}))
    rows = [{"C": c, "|bias|": 1 / c, "spread": c, "error": c + 1 / c} for c in (0.5, 2, 100)]
    figures.append(correction_plots.bias_and_variance(rows))
    formats = {arm.color for arm in plots.ARMS.values()} | set(number_plots.COLORS.values())
    for figure in figures:
        lines = [trace.line for trace in figure.data]
        assert not formats & {line.color for line in lines}
        assert len({(line.color, line.dash) for line in lines}) == len(lines)
        assert figure.layout.xaxis.title.text and figure.layout.yaxis.title.text
    assert sum(np.nansum(np.asarray(trace.y)) for trace in figures[0].data) == pytest.approx(3, abs=1e-9)


@pytest.mark.parametrize("name", TYPES)
def test_the_explorer_names_the_gap_above_a_code(name):
    from fp8lab.formats import get_format

    values = magnitudes_of(TYPES[name]).tolist()
    for code, (here, above) in enumerate(zip(values, values[1:], strict=False)):
        assert f"the next larger magnitude is {above - here:.10g} away" in describe(code, get_format(name))
    assert "nothing larger" in describe(len(values) - 1, get_format(name))
