"""Formats against ml_dtypes and gfloat, exactly."""

import gfloat
import ml_dtypes
import numpy as np
import pytest
import torch
from gfloat.formats import format_info_ocp_e4m3, format_info_ocp_e5m2
from hypothesis import example, given
from hypothesis import strategies as st

from fp8lab.formats import E4M3, E5M2, FORMATS, decode_e8m0, encode_e8m0, get_format, round_bf16

from . import references

GFLOAT = {"e4m3": format_info_ocp_e4m3, "e5m2": format_info_ocp_e5m2}
CODES = np.arange(256, dtype=np.uint8)
BOTH = pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda f: f.name)


pytestmark = pytest.mark.usefixtures("one_thread")


def finite_values(fmt):
    """The finite values of a format in increasing order, by ml_dtypes, with one zero."""
    values = references.decode(CODES, fmt.name).astype(np.float64)
    return np.unique(values[np.isfinite(values)] + 0.0)


def check_cast(fmt, x):
    """encode, round and decode of float32 inputs x against ml_dtypes, bit for bit, the sign of zero included."""
    want = references.encode(x, fmt.name)
    codes = fmt.encode(torch.from_numpy(x)).numpy()
    assert codes.dtype == np.uint8 and np.array_equal(codes, want), x[codes != want][:5]
    rounded = fmt.round(torch.from_numpy(x)).numpy()
    values = references.decode(want, fmt.name)
    assert np.array_equal(rounded, values, equal_nan=True)
    assert np.array_equal(np.signbit(rounded)[np.isfinite(x)], np.signbit(values)[np.isfinite(x)])


@BOTH
def test_all_codes_decode_as_in_ml_dtypes_and_gfloat(fmt):
    ours = fmt.decode(torch.from_numpy(CODES)).numpy()
    assert np.array_equal(ours, references.decode(CODES, fmt.name), equal_nan=True)
    theirs = gfloat.decode_ndarray(GFLOAT[fmt.name], CODES.astype(np.int64))
    assert np.array_equal(ours, theirs, equal_nan=True)
    real = ~np.isnan(ours)
    assert np.array_equal(np.signbit(ours)[real], np.signbit(theirs)[real])
    assert torch.equal(fmt.values()[real], torch.from_numpy(CODES).view(fmt.dtype).float()[real])  # torch agrees


@BOTH
def test_finite_codes_survive_decode_and_encode(fmt):
    finite = torch.from_numpy(CODES)[fmt.values().isfinite()]
    assert torch.equal(fmt.encode(fmt.decode(finite)), finite)
    assert len(finite) == {"e4m3": 254, "e5m2": 248}[fmt.name]


@BOTH
def test_constants(fmt):
    limits = ml_dtypes.finfo(references.CAST[fmt.name])
    assert fmt.max == float(limits.max) == float(references.MAX[fmt.name])
    assert fmt.min_normal == float(limits.smallest_normal) and fmt.min_subnormal == float(limits.smallest_subnormal)
    assert fmt.exponent_bits + fmt.mantissa_bits == 7 and fmt.bias == {"e4m3": 7, "e5m2": 15}[fmt.name]
    assert torch.finfo(fmt.dtype).max == fmt.max


@BOTH
def test_every_bf16_input(fmt):
    x = np.arange(65536, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)
    check_cast(fmt, x)
    finite = x[np.isfinite(x)]
    theirs = gfloat.round_ndarray(GFLOAT[fmt.name], finite.astype(np.float64), sat=True)
    assert np.array_equal(fmt.round(torch.from_numpy(finite)).numpy(), theirs)
    bfloat = torch.from_numpy(finite).bfloat16()
    assert torch.equal(fmt.encode(bfloat), fmt.encode(bfloat.float()))


@BOTH
def test_every_tie_and_its_two_neighbours(fmt):
    values = finite_values(fmt)
    ties = ((values[:-1] + values[1:]) / 2).astype(np.float32)
    assert np.array_equal(ties.astype(np.float64) * 2, values[:-1] + values[1:])  # the ties are exact in float32
    down, up = np.nextafter(ties, np.float32(-np.inf)), np.nextafter(ties, np.float32(np.inf))
    check_cast(fmt, np.concatenate([down, ties, up]))
    for x, want in ((down, values[:-1]), (up, values[1:])):
        assert np.array_equal(fmt.round(torch.from_numpy(x)).numpy(), want.astype(np.float32))
    mantissa = fmt.encode(torch.from_numpy(ties)).numpy() & 1
    assert not mantissa.any()  # ties go to even codes


@BOTH
def test_random_float32_patterns(fmt):
    bits = np.random.default_rng(0).integers(0, 2**32, 200_000, dtype=np.uint32)
    x = bits.view(np.float32)
    near = (np.random.default_rng(1).standard_normal(200_000) * fmt.max / 3).astype(np.float32)
    check_cast(fmt, np.concatenate([x, near, near * np.float32(fmt.min_normal / fmt.max)]))


@BOTH
@given(bits=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=16))
@example(bits=[0x80000000, 0, 1, 0x80000001, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFFFFFFF])
def test_any_float32_pattern(fmt, bits):
    check_cast(fmt, np.array(bits, np.uint32).view(np.float32))


@BOTH
def test_special_values(fmt):
    x = torch.tensor([float("nan"), float("inf"), -float("inf"), 1e30, -1e30, -0.0, fmt.min_subnormal / 2])
    assert fmt.encode(x)[:3].tolist() == [0x7F] * 3 and fmt.round(x)[:3].isnan().all()
    assert fmt.round(x)[3:5].tolist() == [fmt.max, -fmt.max]
    assert fmt.encode(x)[5:].tolist() == [0x80, 0]
    empty = torch.empty(0, 3)
    assert fmt.encode(empty).shape == fmt.round(empty).shape == fmt.decode(fmt.encode(empty)).shape == (0, 3)


@BOTH
def test_spacing_is_the_gap_to_the_next_code(fmt):
    values = finite_values(fmt)
    positive = values[values >= 0]
    gaps = np.append(np.diff(positive), positive[-1] - positive[-2])
    for sign in (1, -1):
        assert np.array_equal(fmt.spacing(torch.from_numpy(sign * positive)).numpy(), gaps.astype(np.float32))
    inside = positive[:-1] + np.diff(positive) / 3
    assert np.array_equal(fmt.spacing(torch.from_numpy(inside)).numpy(), gaps[:-1].astype(np.float32))
    assert fmt.spacing(torch.tensor(1e30)) == gaps[-1]


@BOTH
def test_neighbours(fmt):
    values = finite_values(fmt)
    for x in [*values[::7], *(values[:-1] + np.diff(values) * 0.4)[::7], fmt.max, -fmt.max, -0.0]:
        want = values[values <= x][-1], values[values >= x][0]
        assert fmt.neighbours(float(x)) == want
        assert all(str(n) != "-0.0" for n in fmt.neighbours(float(x)))
    for bad in (fmt.max * 1.01, -fmt.max * 1.01, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=fmt.name):
            fmt.neighbours(bad)


def test_bad_input():
    with pytest.raises(ValueError, match="'fp4'.*e4m3, e5m2"):
        get_format("fp4")
    assert get_format("e4m3") is E4M3 and FORMATS["e5m2"] is E5M2
    for dtype in (torch.int32, torch.float8_e4m3fn, torch.int8):
        with pytest.raises(TypeError, match="uint8"):
            E4M3.decode(torch.zeros(2).to(dtype))


def test_bf16_rounds_as_in_ml_dtypes():
    x = np.random.default_rng(2).integers(0, 2**32, 100_000, dtype=np.uint32).view(np.float32)
    assert np.array_equal(round_bf16(torch.from_numpy(x)).numpy(), references.bf16(x), equal_nan=True)


def test_e8m0_against_ml_dtypes_and_gfloat():
    ours = decode_e8m0(torch.from_numpy(CODES)).numpy()
    assert np.array_equal(ours, CODES.view(ml_dtypes.float8_e8m0fnu).astype(np.float32), equal_nan=True)
    theirs = gfloat.decode_ndarray(gfloat.formats.format_info_ocp_e8m0, CODES.astype(np.int64))
    assert np.array_equal(ours, theirs, equal_nan=True)
    assert torch.equal(encode_e8m0(torch.from_numpy(ours[:255])), torch.from_numpy(CODES[:255]))


@pytest.mark.parametrize("bad", [0.0, -1.0, 3.0, 1.0000001, float("nan"), float("inf"), -0.0, 2.0**-128, 2.0**128])
def test_e8m0_refuses_what_it_cannot_hold(bad):
    with pytest.raises(ValueError, match="powers of two"):
        encode_e8m0(torch.tensor([1.0, bad], dtype=torch.float64))
