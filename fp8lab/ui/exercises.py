"""Checkers of the notebooks' exercises, one function each, with hints.

A checker never raises on a wrong answer, because a notebook must run to its end before its reader has solved anything:
it returns a `lessons.Verdict` that says what is wrong and, without giving the answer away, where to look. A checker
computes what it judges; it does not compare with a stored answer. A reader's answer may be of any type and size.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from typing import Any

import torch

from fp8lab import diagnostics
from fp8lab.attention import P_SCALE, Float8Attention
from fp8lab.calibration import scales_from_amax
from fp8lab.formats import E4M3, get_format
from fp8lab.linear import float8_layers
from fp8lab.operands import AttentionPrecision
from fp8lab.precision import PrecisionPlan
from fp8lab.quantizers import BlockQuantizer, QuantizedTensor, quantization_error
from fp8lab.rollout.float8_cache import Float8KVCache
from fp8lab.ui.lessons import Verdict, number, shown


def check_code(code: Any, value: float, fmt: str) -> Verdict:
    """01: `code` is the integer whose bits mean `value`."""
    form = get_format(fmt)
    if type(code) is not int or not 0 <= code <= 255:
        return Verdict(False, f"{shown(code)} is no code; give an integer from 0 to 255 such as 0x38")
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
    value = number(x)
    if not value:
        return Verdict(False, f"{shown(x)} is not a finite float other than zero")
    x, most = value, torch.finfo(torch.float32).max
    rounded = float(E4M3.round(torch.tensor([max(-most, min(x, most))]))[0])  # beyond float32 it is clamped as well
    error = abs(rounded - x) / abs(x)
    if rounded == 0:
        return Verdict(False, f"{x:g} becomes zero; go a little up again")
    if error > 0.3:
        where = "beyond 448, where everything is clamped" if abs(x) > E4M3.max else "among the subnormal numbers"
        return Verdict(True, f"{x:g} becomes {rounded:g}, off by {error:.0%}: {where}.")
    return Verdict(False, f"{x:g} becomes {rounded:g}, off by {error:.1%}; look at the two cliffs of the error curve")


def check_multiplier(x: torch.Tensor, multiplier: Any) -> Verdict:
    """01: round(x * multiplier) / multiplier in E4M3 loses no element to zero and clamps none."""
    factor = number(multiplier)
    if factor is None or factor <= 0:
        return Verdict(False, f"{shown(multiplier)} is no positive number")
    multiplier = factor
    scaled = x * multiplier
    zeros = int((E4M3.round(scaled) == 0).sum())
    clamped = int((scaled.abs() > E4M3.max).sum())
    if clamped:
        return Verdict(False, f"{clamped} of {len(x)} elements are clamped; the largest becomes {scaled.max():g}")
    if zeros:
        room = E4M3.max / float(x.max()) / multiplier
        return Verdict(False, f"{zeros} of {len(x)} elements become zero, and there is room for {room:.3g} times more")
    back = E4M3.round(scaled) / multiplier
    worst = ((back - x) / x).abs().max()
    return Verdict(True, f"nothing is lost; the worst element is off by {worst:.1%}.")


def check_block(x: torch.Tensor, block: Any, least_db: float, most_bytes: int) -> Verdict:
    """02: a block shape that reaches `least_db` within `most_bytes` bytes of codes and scales."""
    quantized = _quantized(x, block, most_bytes)
    if isinstance(quantized, Verdict):
        return quantized
    found = quantization_error(x, quantized)["sqnr_db"]
    if found < least_db:
        hint = "the outliers sit in a few columns; a block that spans few columns keeps them to themselves"
        return Verdict(False, f"{found:.2f} dB, {least_db} asked for; {hint}")
    return Verdict(True, f"{found:.2f} dB in {quantized.nbytes} bytes.")


def check_columns(x: torch.Tensor, channels: torch.Tensor, block: Any, most_error: float, most_bytes: int) -> Verdict:
    """02: a block of at most 128 elements, within `most_bytes` of codes and scales, under which ordinary channels
    (channels == 1) are off by at most `most_error` on average."""
    quantized = _quantized(x, block, most_bytes)
    if isinstance(quantized, Verdict):
        return quantized
    rows, cols = (size if b == -1 else b for b, size in zip(block, x.shape, strict=True))
    if rows * cols > 128:
        return Verdict(False, f"a block of {rows} x {cols} has {rows * cols} elements; at most 128 are allowed")
    values = quantized.dequantize()
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


def _quantized(x: torch.Tensor, block: Any, most_bytes: int) -> QuantizedTensor | Verdict:
    try:
        quantized = BlockQuantizer(block=block).quantize(x)
    except (ValueError, OverflowError) as error:
        return Verdict(False, str(error))
    if quantized.nbytes <= most_bytes:
        return quantized
    return Verdict(False, f"{quantized.nbytes} bytes, {most_bytes} allowed: too many scales, so make the blocks larger")


def check_double_quantization(x: torch.Tensor, g: torch.Tensor, cost_db: Any) -> Verdict:
    """03: dB that grad_weight loses if x was quantized along K first and along tokens after that."""
    row = BlockQuantizer((1, 128))
    exact = g.t() @ x
    g_t = row.fake_quantize(g.t().contiguous())
    once = g_t @ row.fake_quantize(x.t().contiguous()).t()
    twice = g_t @ row.fake_quantize(row.fake_quantize(x).t().contiguous()).t()
    db = [quantization_error(exact, value)["sqnr_db"] for value in (once, twice)]
    lost = db[0] - db[1]
    if number(cost_db) is None:
        return Verdict(False, f"{shown(cost_db)} is no number of decibels")
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
    if not isinstance(aggregate, str) or aggregate not in ("product", "geometric"):
        return Verdict(False, f"the aggregate is {shown(aggregate)}; choose 'product' or 'geometric'")
    if None in (number(low), number(high)) or not 0 < low < high:
        return Verdict(False, f"the band is {shown(low)} to {shown(high)}; it needs finite numbers 0 < low < high")
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
    """07: the ratio x, to 10 %, of one token among 1,000 ones at which ESS falls below a half."""
    value = number(x)
    if value is None or value <= 0:
        return Verdict(False, f"{shown(x)} is no positive ratio")
    ones, n = 1000, 1001
    # (ones + x)^2 / (n (ones + x^2)) = 1/2 is (n - 2) x^2 - 4 ones x - ones (2 ones - n) = 0
    root = (2 * ones + math.sqrt(4 * ones**2 + (n - 2) * ones * (2 * ones - n))) / (n - 2)
    share = (ones + value) / (ones + value * value) * (ones + value) / n
    if abs(value / root - 1) <= 0.1:
        return Verdict(True, f"at {root:.1f} one token of {n:,} leaves half of the samples; at {value:g} {share:.0%}.")
    if value < root:
        return Verdict(False, f"at {value:g} the share is still {share:.0%}; ESS is (sum w)^2 / (n sum w^2)")
    return Verdict(False, f"at {value:g} the share is {share:.0%} already, and at nine tenths of it below a half too")


def check_temperature(logits: torch.Tensor, temperature: Any, *, low: float, high: float) -> Verdict:
    """04: a temperature at which the most likely token's probability lies in [low, high]."""
    value = number(temperature)
    if value is None or value <= 0:
        return Verdict(False, f"{shown(temperature)} is no temperature; it must be a finite number above 0")
    top = float(((logits - logits.max()).double() / value).softmax(-1).max())
    if low <= top <= high:
        return Verdict(True, f"at temperature {temperature:g} the top token has {top:.3f}.")
    return Verdict(False, f"the top token has {top:.3f}: {'cool down' if top < low else 'warm up'} the distribution")


def check_rate(changed: Mapping[str, float], rate: Any, share: float) -> Verdict:
    """04: the learning rate, to an order of magnitude, at which one update changes `share` per cent of the codes.

    changed: learning rate as text -> per cent, as measured in the notebook; in between it is interpolated.
    """
    if number(rate) is None or rate <= 0:
        return Verdict(False, f"{shown(rate)} is no learning rate; it must be a finite number above 0")
    points = [(math.log10(float(r)), math.log10(max(c, 1e-6))) for r, c in changed.items()]
    found = points[-1][0]
    for (x0, y0), (x1, y1) in zip(points, points[1:], strict=False):
        if y0 <= math.log10(share) <= y1:
            found = x0 + (math.log10(share) - y0) / max(1e-9, y1 - y0) * (x1 - x0)
    if abs(math.log10(rate) - found) <= 0.5:
        return Verdict(True, f"about {10**found:.1e} changes {share:g} % of the codes.")
    return Verdict(False, f"{rate:.1e} changes {'more' if math.log10(rate) > found else 'fewer'} codes than that")


def check_hidden_gap(differences: Any) -> Verdict:
    """06: differences d of tokens whose k1 vanishes though the engines disagree by more than 20 %."""
    try:
        d = torch.as_tensor(differences, dtype=torch.float64).reshape(1, -1)
        report = diagnostics.mismatch(torch.zeros_like(d), d, torch.ones_like(d, dtype=torch.bool))
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return Verdict(False, f"{shown(differences)} is no list of numbers")
    if not report.tokens or report.nonfinite_tokens:
        return Verdict(False, f"{shown(differences)} needs at least one token, and all of them finite")
    k1 = -d.mean().item()
    if abs(k1) > 0.005:
        return Verdict(False, f"k1 is {k1:+.3f}: it is the mean of -d, so what must the differences add up to?")
    if report.token_mult_prob_error <= 1.2:
        return Verdict(
            False, f"k1 is {k1:+.3f}, but the engines disagree by {report.token_mult_prob_error - 1:.1%}; be bolder"
        )
    return Verdict(True, f"k1 {k1:+.3f}, token_mult_prob_error {report.token_mult_prob_error:.2f}: errors cancelled.")


def check_scatter(sigma: Any) -> Verdict:
    """06: the standard deviation of a Gaussian d at which token_mult_prob_error, E exp(|d|), is 1.05."""
    if number(sigma) is None or not 0 < sigma < 5:
        return Verdict(False, f"{shown(sigma)} is no standard deviation in nats")

    def error(s: float) -> float:
        return math.exp(s * s / 2) * (1 + math.erf(s / math.sqrt(2)))

    if error(sigma / 1.05) <= 1.05 <= error(sigma * 1.05):
        return Verdict(True, f"and k3 is then about {sigma**2 / 2:.1e}: above 1e-3, where the other limit stands.")
    hint = "for small d, exp(|d|) is about 1 + |d|, and a Gaussian's mean |d| is 0.8 sigma"
    return Verdict(False, f"at {sigma:g} token_mult_prob_error is {error(sigma):.3f}; {hint}")


def hide_fault(engine: Any, seed: int) -> Any:
    """06: the engine, with the scales of one module of its model off by 2 %."""
    layers = {name: layer for name, layer in float8_layers(engine.model) if layer.precision.is_fp8}
    name = random.Random(seed).choice(sorted(layers))
    with torch.no_grad():
        layers[name].weight.mul_(1.02)
    layers[name].refresh()
    return engine


def check_culprit(trainer_model: torch.nn.Module, rollout_model: torch.nn.Module, name: Any) -> Verdict:
    """06: the module whose bytes are not those that the trainer's weights give."""
    names = [name for name, layer in float8_layers(rollout_model) if layer.precision.is_fp8]
    if not isinstance(name, str) or name not in names:
        return Verdict(False, f"the engine has no FP8 layer {shown(name)}; one of them is {names[0]!r}")
    found = diagnostics.stale_layers(trainer_model, rollout_model)
    if name in found:
        return Verdict(True, f"{name}: {found[name]}.")
    return Verdict(False, f"{name} holds the trainer's bytes; no need to guess, a function compares all of them")


def check_set(table: Any, plan: Any, left: float, whole: float, *, budget: float, least: float) -> Verdict:
    """09: a plan that keeps at most `budget` of the FLOPs in BF16 in the rollout and removes at least `least` of k3.

    table: of `attribute`, by module; left, whole: k3 under the plan, and with everything in FP8.
    """
    if not isinstance(plan, PrecisionPlan) or not plan.rollout.linear.is_fp8 or plan.trainer.linear.is_fp8:
        return Verdict(False, "that is no plan with FP8 in the rollout only; start from the preset 'fp8-rollout'")
    layers = 1 + int(table["layer"].max())
    kept = [not plan.decide(name, "rollout", layers).precision.is_fp8 for name in table["name"]]
    if number(left) is None:
        return Verdict(False, f"k3 is {shown(left)} under this plan; measure it again")
    share, removed = float(table["flops_share"][kept].sum()), 1 - left / whole
    if share > budget + 1e-9:
        return Verdict(False, f"{share:.0%} of the FLOPs are in BF16, {budget:.0%} allowed; attention is cheap here")
    if removed < least:
        hint = "which modules have most k3 for their FLOPs? The table has both columns"
        return Verdict(
            False, f"{removed:.0%} of k3 is gone for {share:.0%} of the FLOPs, {least:.0%} asked for: {hint}"
        )
    return Verdict(True, f"{removed:.0%} of k3 is gone for {share:.0%} of the FLOPs.")


def check_forecast(table: Any, kind: str, share: Any, removed: float) -> Verdict:
    """09: the share of k3 that modules of one kind make if k3 adds up; removed: what was measured."""
    expected = float(table["in_k3"][table["name"].str.endswith(kind)].sum() / table["in_k3"].sum())
    if number(share) is None:
        return Verdict(False, f"{shown(share)} is no share; give a number from 0 to 1")
    if abs(share - expected) <= 0.02:
        return Verdict(True, f"the table forecasts {expected:.0%}; measured: {removed:.0%} of k3 is gone.")
    if abs(share - 100 * expected) <= 2:
        return Verdict(False, "the number is right as a percentage; give a share from 0 to 1")
    return Verdict(False, f"{share:g} is not it: add `in_k3` over the rows of that kind, divide by the sum of all rows")


def check_even(plan: Any, gap: float) -> Verdict:
    """09: FP8 end to end with all of layer 0 in BF16, and no gap between the sides; gap: mean |d|."""
    if not isinstance(plan, PrecisionPlan):
        return Verdict(False, f"the plan is a {type(plan).__name__}; start from PrecisionPlan.preset('fp8-e2e')")
    for side in ("rollout", "trainer"):
        fp8 = [[plan.decide(name, side, 4).precision.is_fp8 for name in _linears_of(i)] for i in range(4)]
        if any(fp8[0]):
            return Verdict(False, f"layer 0 is not all in BF16 on the {side} side; with_bf16 takes side='both', too")
        if not all(all(layer) for layer in fp8[1:]):
            return Verdict(False, f"later layers have left FP8 on the {side} side; only layer 0 was asked for")
    if gap:
        return Verdict(False, f"the sides disagree by {gap:.1e} nats: some module is rounded on one side only")
    return Verdict(True, "both sides round alike, so protecting a layer costs no mismatch.")


def _linears_of(layer: int) -> list[str]:
    attention, mlp = (f"model.layers.{layer}.{part}" for part in ("self_attn", "mlp"))
    return [f"{attention}.{n}_proj" for n in "qkvo"] + [f"{mlp}.{n}_proj" for n in ("gate", "up", "down")]


def check_smallest_weight(weight: Any) -> Verdict:
    """05: the softmax weight, to 1 %, at and below which e4m3(256 P) is zero."""
    if number(weight) is None or not 0 < weight < 1:
        return Verdict(False, f"{shown(weight)} is no softmax weight; it must lie between 0 and 1")
    above, below = (E4M3.round(torch.tensor(P_SCALE * weight * f)).item() for f in (1.01, 0.99))
    if above > 0 and below == 0:
        return Verdict(True, f"log2 is {math.log2(weight):.2f}: the factor 256 bought 8 powers of two.")
    if below > 0:
        return Verdict(False, f"too large: {weight:.3g} times 256 still rounds to {below:.3g}; what rounds to zero?")
    return Verdict(False, f"too small: more than {weight:.3g} is lost; E4M3's smallest number is {E4M3.min_subnormal}")


def check_margin(margin: Any, keys: torch.Tensor, *, growth: float, updates: int) -> Verdict:
    """05: the margin under which keys that grow with every update are not clamped before the next calibration."""
    if number(margin) is None or not 1 <= margin <= 1000:
        return Verdict(False, f"{shown(margin)} is no margin; it is a factor of at least 1, and at most 1000")
    found = {"query": keys, "key": keys, "value": keys}
    amax = torch.stack([x.abs().max()[None] for x in found.values()])[None]
    scale = scales_from_amax(amax, AttentionPrecision(kv_cache="e4m3", margin=margin)).key[0]
    clamped = [(keys.abs() * growth**update > E4M3.max * scale).any().item() for update in range(updates + 1)]
    if clamped[-1]:
        return Verdict(False, f"too little: update {clamped.index(True)} of {updates} clamps; growth multiplies up")
    if margin > 1.02 * growth**updates:
        return Verdict(False, f"nothing is clamped, but {margin / growth**updates - 1:.0%} of the range stay unused")
    return Verdict(True, f"{updates} updates fit; with 1.05 it would be {int(math.log(1.05) / math.log(growth))}.")


def check_cache_bytes(answer: Any, *, layers: int, heads: int, head_dim: int) -> Verdict:
    """05: bytes of FP8 cache for a token, with a float32 scale per token and head; heads: of keys and values."""
    if type(answer) is not int or answer < 1:
        return Verdict(False, f"{shown(answer)} is no number of bytes")
    state = Float8Attention(AttentionPrecision(kv_cache="e4m3", scales="per-token-head"), layers, "sdpa")
    expected = Float8KVCache(state, layers, 1, heads, 1, head_dim, torch.device("cpu")).nbytes
    codes = 2 * layers * heads * head_dim
    if answer == expected:
        return Verdict(True, f"{answer:,} bytes against {2 * codes:,} in BF16.")
    for wrong, hint in (
        (codes, "those are the codes; where are the scales?"),
        (expected // 2, "that is k or v; the cache holds both"),
        (codes // 2, "that is k or v without scales; the cache holds both"),
        (2 * codes, "that is BF16, two bytes an element"),
    ):
        if answer == wrong:
            return Verdict(False, hint)
    return Verdict(False, f"{shown(answer)} is not it: layers x (k and v) x heads that are cached x bytes of one head")
