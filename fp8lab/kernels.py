"""CPU kernels: block quantization in one pass over memory, compiled by numba.

`quantize_blocks` reads a row of blocks once to find each block's amax, and again, from cache, to round it. Plain torch
needs about ten passes (abs, amax, divide, clamp, cast, ...). The arithmetic is the one of `formats.Float8Format.round`
and `quantizers.ScaleRule.scale`, which stay as the readable reference; tests hold the two together bit for bit.

Rounding to p significant bits without an FP8 instruction is Dekker's splitting: with t = y * (2^(24-p) + 1),
t - (t - y) is y rounded to nearest even with p bits. Below the smallest normal number the spacing is constant, and
adding and subtracting 1.5 * 2^23 * spacing rounds to it.

Threads: the compiled loop is serial and releases the GIL; large tensors are split by rows over a small Python thread
pool. That avoids numba's own threading layers, one of which aborts the process when two threads call it (a training
thread beside a notebook's plots, say). Compiled code is cached on disk, so only the first call ever pays (about 2 s).
"""

from __future__ import annotations

import math
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from numba import njit

from fp8lab.formats import Float8Format
from fp8lab.scales import ScaleRule

_SPLIT_ABOVE = 1 << 18  # elements; below this a second thread costs more than it saves
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


@njit(nogil=True, cache=True)
def _quantize(
    x, bits, first, last, block, max_value, max_exponent, mantissa_bits, mode, values, codes, scales, factors, bad
):
    """Quantize block rows first..last of the matrix x, whose bit patterns are `bits` (int32); see quantize_blocks.

    `values` is written as int32 bit patterns, so that the sign is copied without a branch; bad: non-finite elements per
    block row. The largest magnitude is found by comparing bit patterns as integers, which vectorizes and exposes NaN
    and infinity, whose patterns are the largest of all.
    mode: 0 computes scales by the rule `default`, 1 by `pow2`; 2 divides by given factors, 3 multiplies with them.
    """
    split = np.float32(2.0 ** (23 - mantissa_bits) + 1)  # Dekker's factor for mantissa_bits + 1 significant bits
    bias = 15 if mantissa_bits == 2 else 7
    min_normal = np.float32(2.0 ** (1 - bias))
    magic = np.float32(min_normal * 2.0**-mantissa_bits * 1.5 * 2.0**23)
    per_unit = np.float32(2.0**mantissa_bits / min_normal)  # subnormal value -> mantissa field
    sign = np.int32(-(2**31))
    magnitude = np.int32(0x7FFFFFFF)
    infinity = np.int32(0x7F800000)
    shift = 23 - mantissa_bits
    offset = (127 - bias) << mantissa_bits
    rows, cols = x.shape
    num_blocks = scales.shape[1]
    largest = np.empty(num_blocks, np.int32)
    rounded = np.empty(min(block[1], cols), np.float32)
    for block_row in range(
        first, last
    ):  # rows of a block row are read in storage order, twice: the second time from cache
        top = block_row * block[0]
        bottom = min(top + block[0], rows)
        largest[:] = 0
        for r in range(top, bottom):
            for b in range(num_blocks):
                row = bits[r, b * block[1] : min(b * block[1] + block[1], cols)]
                most = largest[b]
                for j in range(row.size):
                    pattern = np.int32(row[j] & magnitude)
                    most = pattern if pattern > most else most
                largest[b] = most
        bad[block_row] = 0
        for b in range(num_blocks):
            if mode < 2:
                amax = largest[b]
                if amax >= infinity:
                    amax = _finite_amax(bits[top:bottom, b * block[1] : min(b * block[1] + block[1], cols)])
                scales[block_row, b] = _scale_of(np.int32(amax).view(np.float32), max_value, max_exponent, mode == 1)
                factors[block_row, b] = scales[block_row, b]
        for r in range(top, bottom):
            for b in range(num_blocks):
                left, right = b * block[1], min(b * block[1] + block[1], cols)
                scale, factor = scales[block_row, b], factors[block_row, b]
                row, out = x[r, left:right], rounded[: right - left]
                multiplier = factor if mode == 3 else np.float32(1)  # times or over 1 changes nothing,
                divisor = np.float32(1) if mode == 3 else factor  # and spares the loop a branch
                for j in range(row.size):
                    y = abs(row[j]) * multiplier / divisor
                    y = max_value if y > max_value else y
                    t = y * split
                    normal = t - (t - y)
                    subnormal = (y + magic) - magic
                    out[j] = subnormal if y < min_normal else normal
                signs, value = bits[r, left:right], values[r, left:right]
                for j in range(row.size):
                    value[j] = np.int32(np.float32(out[j] * scale).view(np.int32) | np.int32(signs[j] & sign))
                if codes.shape[0] > 0:
                    code = codes[r, left:right]
                    for j in range(row.size):
                        q = out[j]
                        normal_code = (np.float32(q).view(np.int32) >> shift) - offset
                        subnormal_code = np.int32(q * per_unit)
                        field = subnormal_code if q < min_normal else normal_code
                        code[j] = np.uint8(field | ((signs[j] >> 24) & 128))
                if largest[b] >= infinity:  # rare
                    for j in range(row.size):
                        if np.int32(signs[j] & magnitude) >= infinity:
                            bad[block_row] += 1
                            value[j] = 0x7FC00000  # NaN
                            if codes.shape[0] > 0:
                                codes[r, left + j] = 127


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
    codes = torch.empty(x.shape, dtype=torch.uint8) if want_codes else torch.empty((0, 0), dtype=torch.uint8)
    counts = np.zeros(grid[0], dtype=np.int64)
    exponent = math.frexp(fmt.max)[1] - 1
    if given is None:
        mode, scale, factor = int(rule.pow2 is not None), torch.empty(grid), torch.empty(grid)
    else:
        mode, (scale, factor) = (2 if rule.apply == "divide" else 3), (t.contiguous() for t in given)
    settings = (block, np.float32(fmt.max), exponent, fmt.mantissa_bits, mode)
    arrays = (values.numpy().view(np.int32), codes.numpy(), scale.numpy(), factor.numpy(), counts)
    source = (x.detach().numpy(), x.detach().numpy().view(np.int32))
    threads = min(torch.get_num_threads(), grid[0])
    if x.numel() < _SPLIT_ABOVE or threads == 1:
        _quantize(*source, 0, grid[0], *settings, *arrays)
    else:
        bounds = np.linspace(0, grid[0], threads + 1).astype(int)
        jobs = [
            _threads().submit(_quantize, *source, int(bounds[i]), int(bounds[i + 1]), *settings, *arrays)
            for i in range(threads)
        ]
        for job in jobs:
            job.result()
    return values, codes if want_codes else None, scale, int(counts.sum())


def _threads() -> ThreadPoolExecutor:
    global _pool
    if _pool is None:
        _pool = ThreadPoolExecutor(max_workers=max(1, os.cpu_count() or 1), thread_name_prefix="fp8lab-quantize")
    return _pool
