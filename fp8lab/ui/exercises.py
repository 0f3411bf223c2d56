"""Checkers of the notebooks' exercises, one function each, with hints.

A checker never raises on a wrong answer, because a notebook must run to its end before its reader has solved anything:
it returns a `lessons.Verdict` that says what is wrong and, without giving the answer away, where to look. A checker
computes what it judges; it does not compare with a stored answer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from fp8lab.formats import E4M3, get_format
from fp8lab.quantizers import BlockQuantizer, quantization_error
from fp8lab.ui.lessons import Verdict


def check_code(code: Any, value: float, fmt: str) -> Verdict:
    """01: `code` is the integer whose bits mean `value`."""
    form = get_format(fmt)
    if type(code) is not int or not 0 <= code <= 255:
        return Verdict(False, f"{code!r} is no code; give an integer from 0 to 255 such as 0x38")
    found = float(form.values()[code])
    if found == value:
        return Verdict(True, f"0x{code:02x} is {value} in {fmt.upper()}.")
    if found == -value:
        return Verdict(False, f"0x{code:02x} is {found}: the size is right, look at the sign bit")
    exponent = math.frexp(value)[1] - 1
    if math.isfinite(found) and found > 0 and math.frexp(found)[1] - 1 == exponent:
        return Verdict(False, f"0x{code:02x} is {found:g}: the exponent is right; {value} = 2^{exponent} x (1 + ?/8)")
    return Verdict(False, f"0x{code:02x} is {found:g}; start with the power of two just below {value}")


def check_bad_number(x: Any) -> Verdict:
    """01: rounding x to E4M3 is off by more than 30 % without reaching zero."""
    if not isinstance(x, int | float) or not math.isfinite(x) or x == 0:
        return Verdict(False, f"{x!r} is not a finite number other than zero")
    rounded = float(E4M3.round(torch.tensor([float(x)]))[0])
    error = abs(rounded - x) / abs(x)
    if rounded == 0:
        return Verdict(False, f"{x:g} becomes zero; go a little up again")
    if error > 0.3:
        where = "beyond 448, where everything is clamped" if abs(x) > E4M3.max else "among the subnormal numbers"
        return Verdict(True, f"{x:g} becomes {rounded:g}, off by {error:.0%}: {where}.")
    return Verdict(False, f"{x:g} becomes {rounded:g}, off by {error:.1%}; look at the two cliffs of the error curve")


def check_multiplier(x: torch.Tensor, multiplier: Any) -> Verdict:
    """01: round(x * multiplier) / multiplier in E4M3 loses no element to zero and clamps none."""
    if not isinstance(multiplier, int | float) or not 0 < multiplier < math.inf:
        return Verdict(False, f"{multiplier!r} is no positive number")
    scaled = x * multiplier
    zeros = int((E4M3.round(scaled) == 0).sum())
    clamped = int((scaled.abs() > E4M3.max).sum())
    if clamped:
        return Verdict(False, f"{clamped} of {len(x)} elements are clamped; the largest becomes {scaled.max():g}")
    if zeros:
        room = E4M3.max / float(scaled.max())
        return Verdict(False, f"{zeros} of {len(x)} elements become zero, and there is room for {room:.3g} times more")
    back = E4M3.round(scaled) / multiplier
    worst = ((back - x) / x).abs().max()
    return Verdict(True, f"nothing is lost; the worst element is off by {worst:.1%}.")


def check_block(x: torch.Tensor, block: Any, least_db: float, most_bytes: int) -> Verdict:
    """02: a block shape that reaches `least_db` within `most_bytes` bytes of codes and scales."""
    try:
        quantized = BlockQuantizer(block=block).quantize(x)
    except ValueError as error:
        return Verdict(False, str(error))
    found = quantization_error(x, quantized)["sqnr_db"]
    if quantized.nbytes > most_bytes:
        return Verdict(
            False, f"{quantized.nbytes} bytes, {most_bytes} allowed: too many scales, so make the blocks larger"
        )
    if found < least_db:
        hint = "the outliers sit in a few columns; a block that spans few columns keeps them to themselves"
        return Verdict(False, f"{found:.2f} dB, {least_db} asked for; {hint}")
    return Verdict(True, f"{found:.2f} dB in {quantized.nbytes} bytes.")


def check_columns(x: torch.Tensor, channels: torch.Tensor, block: Any, most_error: float) -> Verdict:
    """02: a block of at most 128 elements under which ordinary channels (channels == 1) are off by at most
    `most_error` on average."""
    try:
        values = BlockQuantizer(block=block).quantize(x).dequantize()
    except ValueError as error:
        return Verdict(False, str(error))
    rows, cols = (size if b == -1 else b for b, size in zip(block, x.shape, strict=True))
    if rows * cols > 128:
        return Verdict(False, f"a block of {rows} x {cols} has {rows * cols} elements; at most 128 are allowed")
    quiet = channels == 1
    found = float(((values - x) / x).abs()[:, quiet].mean())
    if found > most_error:
        hint = (
            "each row block still mixes ordinary and outlier columns" if cols > 1 else "share a scale among more rows"
        )
        return Verdict(False, f"ordinary channels are off by {found:.2%}, {most_error:.2%} allowed: {hint}")
    return Verdict(
        True, f"ordinary channels are off by {found:.2%}: a column block never sees another column's outlier."
    )


def check_double_quantization(x: torch.Tensor, g: torch.Tensor, cost_db: Any) -> Verdict:
    """03: dB that grad_weight loses if x was quantized along K first and along tokens after that."""
    row = BlockQuantizer((1, 128))
    exact = g.t() @ x
    g_t = row.fake_quantize(g.t().contiguous())
    once = g_t @ row.fake_quantize(x.t().contiguous()).t()
    twice = g_t @ row.fake_quantize(row.fake_quantize(x).t().contiguous()).t()
    db = [quantization_error(exact, value)["sqnr_db"] for value in (once, twice)]
    lost = db[0] - db[1]
    if not isinstance(cost_db, int | float):
        return Verdict(False, f"{cost_db!r} is no number of decibels")
    if abs(cost_db - lost) <= 0.1:
        return Verdict(True, f"{db[0]:.1f} dB become {db[1]:.1f} dB: {lost:.1f} dB for one kernel saved.")
    if abs(cost_db + lost) <= 0.1:
        return Verdict(False, "the size is right; a cost is positive")
    return Verdict(False, f"{cost_db:g} dB is not it; compare SQNR of both grad_weights with the exact g.t() @ x")


def check_operands(linear: torch.nn.Linear, x: torch.Tensor, precision: Any, least_db: float) -> Verdict:
    """03: a LinearPrecision whose forward reaches `least_db` with at most one operand in BF16."""
    from fp8lab.linear import Float8Linear
    from fp8lab.precision import LinearPrecision

    if not isinstance(precision, LinearPrecision):
        return Verdict(False, f"{type(precision).__name__} is no LinearPrecision")
    with torch.no_grad():
        found = quantization_error(x @ linear.weight.t(), Float8Linear.from_linear(linear, precision)(x))["sqnr_db"]
    high = [name for name in ("weight", "activation") if getattr(precision, name) == "bf16"]
    if found < least_db:
        hint = "both operands add their error; take the larger one away" if not high else "the other operand is worse"
        return Verdict(False, f"{found:.1f} dB, {least_db} asked for: {hint}")
    if len(high) == 2:
        return Verdict(False, f"{found:.1f} dB, but with nothing in FP8; one operand in BF16 is enough")
    return Verdict(True, f"{found:.1f} dB with the {high[0]} in BF16.")


def check_band(aggregate: Any, low: Any, high: Any) -> Verdict:
    """07: a band for answers of 500 tokens with 3 % scatter that keeps 95 % and rejects a drift of 10 % per token."""
    if aggregate not in ("product", "geometric"):
        return Verdict(False, f"the aggregate is {aggregate!r}; choose 'product' or 'geometric'")
    if not all(isinstance(v, int | float) for v in (low, high)) or not 0 < low < high:
        return Verdict(False, f"the band is {low!r} to {high!r}; it needs 0 < low < high")
    d = 0.03 * torch.randn(4000, 500, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    total = d.sum(1) if aggregate == "product" else d.mean(1)
    kept = float(((total.exp() >= low) & (total.exp() <= high)).double().mean())
    drift = math.log(1.1) * (500 if aggregate == "product" else 1)
    caught = all(not math.log(low) <= sign * drift <= math.log(high) for sign in (1, -1))
    if kept < 0.95:
        spread = float(total.std())
        return Verdict(
            False, f"{kept:.0%} of healthy answers are kept; their log ratio scatters by {spread:.2g}, be wider"
        )
    if not caught:
        return Verdict(
            False, f"an answer that drifts by 10 % per token has log ratio {drift:.2g} and passes; be narrower"
        )
    return Verdict(True, f"{kept:.0%} of healthy answers are kept, the drifting one is caught.")


def check_translation(framework: str, settings: Any, *, mode: str, low: float, high: float) -> Verdict:
    """07: settings of a framework whose weights are those of our mode and bounds."""
    from fp8lab import translator

    try:
        found = translator.read(framework, settings)
    except (ValueError, TypeError, AttributeError) as error:
        return Verdict(False, str(error))
    if (found.mode, found.low, found.high) == (mode, low, high):
        return Verdict(True, f"{framework} with {settings} weighs tokens as {mode} with {low} and {high} does.")
    hint = "a pair of bounds, written 'low_high', means reject" if found.mode == "tis" else "look at the bounds"
    return Verdict(False, f"that is {found.mode} with {found.low:g} and {found.high:g}: {hint}")


def check_one_token(x: Any) -> Verdict:
    """07: the ratio x of one token among 1,000 ones at which ESS falls below a half."""
    if not isinstance(x, int | float) or x <= 0:
        return Verdict(False, f"{x!r} is no positive ratio")
    share = (1000 + x) ** 2 / (1000 + x**2) / 1001
    low = (1000 + 0.9 * x) ** 2 / (1000 + (0.9 * x) ** 2) / 1001
    if share < 0.5 <= low:
        return Verdict(True, f"at {x:g} one token of 1,001 leaves an effective share of {share:.0%}.")
    if share >= 0.5:
        return Verdict(False, f"at {x:g} the share is still {share:.0%}; ESS is (sum w)^2 / (sum w^2)")
    return Verdict(False, f"at {x:g} the share is {share:.0%} already, and at nine tenths of it below a half too")


def check_temperature(logits: torch.Tensor, temperature: Any, *, low: float, high: float) -> Verdict:
    """04: a temperature at which the most likely token's probability lies in [low, high]."""
    if not isinstance(temperature, int | float) or not temperature > 0:
        return Verdict(False, f"{temperature!r} is no temperature; it must be a number above 0")
    top = float((logits / temperature).softmax(-1).max())
    if low <= top <= high:
        return Verdict(True, f"at temperature {temperature:g} the top token has {top:.3f}.")
    return Verdict(False, f"the top token has {top:.3f}: {'cool down' if top < low else 'warm up'} the distribution")


def check_rate(changed: Mapping[str, float], rate: Any, share: float) -> Verdict:
    """04: the learning rate, to an order of magnitude, at which one update changes `share` per cent of the codes.

    changed: learning rate as text -> per cent, as measured in the notebook; in between it is interpolated.
    """
    if not isinstance(rate, int | float) or not rate > 0:
        return Verdict(False, f"{rate!r} is no learning rate; it must be a number above 0")
    points = [(math.log10(float(r)), math.log10(max(c, 1e-6))) for r, c in changed.items()]
    found = points[-1][0]
    for (x0, y0), (x1, y1) in zip(points, points[1:], strict=False):
        if y0 <= math.log10(share) <= y1:
            found = x0 + (math.log10(share) - y0) / max(1e-9, y1 - y0) * (x1 - x0)
    if abs(math.log10(rate) - found) <= 0.5:
        return Verdict(True, f"about {10**found:.1e} changes {share:g} % of the codes.")
    return Verdict(False, f"{rate:.1e} changes {'more' if math.log10(rate) > found else 'fewer'} codes than that")
