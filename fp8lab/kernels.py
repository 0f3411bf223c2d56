"""CPU kernels: block quantization in one pass over memory, compiled by numba.

`quantize_blocks` reads a row of blocks once to find each block's amax, and again, from cache, to round it. Plain torch
needs about ten passes (abs, amax, divide, clamp, cast, ...). The arithmetic is the one of `formats.Float8Format.round`
and `quantizers.ScaleRule.scale`, which stay as the readable reference; tests hold the two together bit for bit.

Rounding to p significant bits without an FP8 instruction is Dekker's splitting: with t = y * (2^(24-p) + 1),
t - (t - y) is y rounded to nearest even with p bits. Below the smallest normal number the spacing is constant, and
adding and subtracting 1.5 * 2^23 * spacing rounds to it.

Threads: the compiled loop is serial and releases the GIL; large tensors are split by rows, which the caller and a small
Python thread pool share. That avoids numba's own threading layers, one of which aborts the process when two threads
call it (a training thread beside a notebook's plots, say). Compiled code is cached on disk, so only the first call ever
pays (2 to 3 s; two environments with different numba versions over one checkout overwrite each other's cache).
"""

from __future__ import annotations

import functools
import math
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from numba import njit

from fp8lab.formats import Float8Format
from fp8lab.scales import ScaleRule

_SPLIT_ABOVE = 1 << 20  # elements; below this a second thread costs more than it saves
_PIECES = 8  # per thread, taken one by one: a thread that starts late or is held up leaves its own to the others
_NO_CODES = np.empty((0, 1), np.uint8)
_pool: ThreadPoolExecutor | None = None


def _forget_pool() -> None:
    global _pool
    _pool = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_pool)  # a forked child has no pool threads


@njit(nogil=True, cache=True, inline="always")
def _scale_of(amax, max_value, max_exponent, pow2):
    """`ScaleRule.scale` for one block: amax / max, or the power of two above it from the exponent bits."""
    scale = np.float32(amax / max_value)
    if scale == np.float32(0):
        return np.float32(1)  # an empty block, or one whose amax / max underflows
    if pow2:
        mantissa, exponent = math.frexp(amax)  # amax = mantissa * 2^exponent, mantissa in [0.5, 1)
        power = exponent - 1 - max_exponent  # max = 1.75 * 2^max_exponent for E4M3 and E5M2
        if mantissa > 0.875:
            power += 1
        return np.float32(math.ldexp(1.0, max(power, -127)))
    return scale


@njit(nogil=True, cache=True)
def _finite_amax(bits):
    """The largest magnitude (bit pattern) among the finite elements of a block."""
    largest = np.int32(0)
    for row in bits:
        for pattern in row:
            magnitude = np.int32(pattern & np.int32(0x7FFFFFFF))
            if magnitude < np.int32(0x7F800000):
                largest = max(largest, magnitude)
    return largest


@njit(nogil=True, cache=True, inline="always")
def _amax_pattern(bits, row, left, right, largest):
    """The largest magnitude of bits[row, left:right], or `largest`; NaN and infinity have the largest patterns."""
    for j in range(left, right):
        pattern = np.int32(bits[row, j] & np.int32(0x7FFFFFFF))
        largest = pattern if pattern > largest else largest
    return largest


@njit(nogil=True, cache=True, inline="always")
def _round_one(x, times, over, constants):
    """The magnitude of x's code value: |x| * times / over, clamped and rounded; one of the two is 1."""
    max_value, min_normal, split, magic, _ = constants
    y = abs(x) * times / over
    y = max_value if y > max_value else y
    t = y * split
    normal = t - (t - y)
    subnormal = (y + magic) - magic
    return subnormal if y < min_normal else normal


@njit(nogil=True, cache=True, inline="always")
def _signed(magnitude, bits):
    """The bit pattern of a magnitude with the sign of the bit pattern `bits`."""
    return np.int32(np.float32(magnitude).view(np.int32) | np.int32(bits & np.int32(-(2**31))))


@njit(nogil=True, cache=True, inline="always")
def _round_span(x, bits, row, left, right, scale, times, over, constants, values):
    """values[row, left:right] = the bit patterns of code value * scale."""
    for j in range(left, right):
        values[row, j] = _signed(_round_one(x[row, j], times, over, constants) * scale, bits[row, j])


@njit(nogil=True, cache=True)
def _encode_span(x, bits, row, left, right, times, over, mantissa_bits, constants, codes):
    """codes[row, left:right]: exponent and mantissa move to the right place, subnormals count their smallest steps."""
    bias = np.int32(15 if mantissa_bits == 2 else 7)
    shift, below = np.int32(23 - mantissa_bits), np.int32((127 - bias) << mantissa_bits)
    min_normal, steps = constants[1], constants[4]
    for j in range(left, right):
        q = np.float32(_round_one(x[row, j], times, over, constants))
        normal = np.int32(np.int32(q.view(np.int32) >> shift) - below)
        field = np.int32(q * steps) if q < min_normal else normal
        codes[row, j] = np.uint8(field | np.int32(np.int32(bits[row, j] >> np.int32(24)) & np.int32(128)))


@njit(nogil=True, cache=True)
def _mark_nonfinite(bits, row, left, right, values, codes):
    """Give NaN and infinity the NaN code and value; returns how many there are."""
    count = 0
    for j in range(left, right):
        if np.int32(bits[row, j] & np.int32(0x7FFFFFFF)) >= np.int32(0x7F800000):
            count += 1
            values[row, j] = 0x7FC00000
            if codes.shape[0] > 0:
                codes[row, j] = 127
    return count


@njit(nogil=True, cache=True)
def _quantize(x, bits, first, last, block, constants, exponent, mantissa_bits, mode, values, codes, scales, factors):
    """Quantize block rows first..last of the matrix x, whose bit patterns are `bits` (int32); see quantize_blocks.

    Returns how many elements are not finite. `values` is written as int32 bit patterns, so that the sign is copied
    without a branch. mode: 0 computes scales by the rule `default`, 1 by `pow2` (then `factors` may be `scales`
    itself); 2 divides by given factors, 3 multiplies.
    A block row is read in storage order, twice: the second time from cache.

    The spans' ends are unsigned: a signed index may be negative (counted from the end, in Python), and the test for
    that keeps the compiler from vectorizing (2.5 instead of 0.3 ns per element).
    """
    rows, cols = x.shape
    num_blocks = scales.shape[1]
    largest = np.empty(num_blocks, np.int32)
    infinity = np.int32(0x7F800000)
    bad = 0
    for block_row in range(first, last):
        top, bottom = block_row * block[0], min(block_row * block[0] + block[0], rows)
        largest[:] = 0
        for r in range(top, bottom):
            row = np.uintp(r)
            for b in range(num_blocks):
                left, right = np.uintp(b * block[1]), np.uintp(min(b * block[1] + block[1], cols))
                largest[b] = _amax_pattern(bits, row, left, right, largest[b])
        for b in range(num_blocks):
            if mode < 2:
                amax = largest[b]
                if amax >= infinity:
                    amax = _finite_amax(bits[top:bottom, b * block[1] : min(b * block[1] + block[1], cols)])
                scales[block_row, b] = _scale_of(np.int32(amax).view(np.float32), constants[0], exponent, mode == 1)
                factors[block_row, b] = scales[block_row, b]
        for r in range(top, bottom):
            row = np.uintp(r)
            for b in range(num_blocks):
                left, right = np.uintp(b * block[1]), np.uintp(min(b * block[1] + block[1], cols))
                scale, factor = scales[block_row, b], factors[block_row, b]
                times = factor if mode == 3 else np.float32(1)
                over = np.float32(1) if mode == 3 else factor
                _round_span(x, bits, row, left, right, scale, times, over, constants, values)
                if codes.shape[0] > 0:
                    _encode_span(x, bits, row, left, right, times, over, mantissa_bits, constants, codes)
                if largest[b] >= infinity:  # rare
                    bad += _mark_nonfinite(bits, row, left, right, values, codes)
    return bad


def quantize_blocks(
    x: torch.Tensor,
    block: tuple[int, int],
    fmt: Float8Format,
    rule: ScaleRule,
    want_codes: bool,
    given: tuple[torch.Tensor, torch.Tensor] | None = None,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, int]:
    """Quantize a CPU matrix in blocks of `block` = (rows, cols).

    x: (N, K) float32, contiguous. given: the rule's finite (scale, multiplier), each (ceil(N / rows), ceil(K /
    cols)), for rules that are not `fused`. Returns values (N, K) float32 = code value * scale, codes (N, K) uint8 or
    None, scale, and the number of non-finite elements.
    """
    rows, cols = x.shape
    grid = (-(-rows // block[0]), -(-cols // block[1]))
    values = torch.empty_like(x) if out is None else out
    codes = torch.empty(x.shape, dtype=torch.uint8) if want_codes else None
    exponent = math.frexp(fmt.max)[1] - 1
    if given is None:
        mode, scale = int(rule.pow2 is not None), torch.empty(grid)
        factor = scale
    else:
        mode, (scale, factor) = (2 if rule.apply == "divide" else 3), (t.contiguous() for t in given)
    settings = (block, _constants(fmt), exponent, fmt.mantissa_bits, mode)
    code_array = _NO_CODES if codes is None else codes.numpy()
    arrays = (values.numpy().view(np.int32), code_array, scale.numpy(), factor.numpy())
    array = x.detach().numpy()
    source = (array, array.view(np.int32))
    threads = 1 if x.numel() < _SPLIT_ABOVE else min(torch.get_num_threads(), grid[0])
    count = 1 if threads == 1 else min(_PIECES * threads, grid[0])
    pieces = iter([(grid[0] * i // count, grid[0] * (i + 1) // count) for i in range(count)])

    def work() -> int:
        return sum(_quantize(*source, *piece, *settings, *arrays) for piece in pieces)

    jobs = [_threads().submit(work) for _ in range(threads - 1)]
    bad = work() + sum(job.result() for job in jobs if not job.cancel())  # cancelled: too late to take any
    return values, codes, scale, bad


@njit(nogil=True, cache=True)
def _decode_e4m3(codes, bits):
    """Float32 bit patterns of E4M3 codes: the exponent moves by 120, subnormals count their steps of 2^-9."""
    for i in range(codes.size):
        code = np.int32(codes[i])
        magnitude = code & np.int32(127)
        normal = np.int32((magnitude << 20) + np.int32(120 << 23))
        subnormal = np.float32(np.float32(magnitude) * np.float32(2.0**-9)).view(np.int32)
        pattern = normal if magnitude > 7 else subnormal
        pattern = np.int32(0x7FC00000) if magnitude == 127 else pattern
        bits[i] = np.int32(pattern | ((code & np.int32(128)) << 24))


def decode_e4m3(codes: torch.Tensor) -> torch.Tensor:
    """Values (float32, same shape, contiguous) of E4M3 codes (uint8) on the CPU: formats.E4M3.decode in one pass."""
    values = torch.empty(codes.shape)
    _decode_e4m3(codes.contiguous().view(-1).numpy(), values.view(-1).numpy().view(np.int32))
    return values


def times_compiled() -> int:
    """How many kernels this process compiled instead of loading them from the cache."""
    return sum(sum(kernel.stats.cache_misses.values()) for kernel in (_quantize, _decode_e4m3))


@functools.cache
def _constants(fmt: Float8Format) -> tuple[np.float32, ...]:
    """max, smallest normal, Dekker's factor for its significant bits, the magic addend, smallest steps per unit."""
    split = 2.0 ** (23 - fmt.mantissa_bits) + 1
    magic = 1.5 * 2.0**23 * fmt.min_subnormal
    return tuple(map(np.float32, (fmt.max, fmt.min_normal, split, magic, 1 / fmt.min_subnormal)))


def _threads() -> ThreadPoolExecutor:
    global _pool
    if _pool is None:
        _pool = ThreadPoolExecutor(max_workers=max(1, os.cpu_count() or 1), thread_name_prefix="fp8lab-quantize")
    return _pool
