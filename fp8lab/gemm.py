"""What an FP8 tensor core does between two codes and a float32: a reference GEMM for lessons and tests.

The rest of fp8lab multiplies dequantized operands in float32. Hardware does not quite: a Hopper tensor core adds up in
a narrow accumulator, and FP8 kernels work around it. `reference_gemm` computes the same product four ways:

    fp32        one float32 matmul of dequantize(a) and dequantize(b): what `Float8Linear` does
    promote128  for every 128 of K:  acc += (s_a * s_b) * dot(codes of a, codes of b),  acc in float32
    hopper      the same, but dot() runs on the modelled tensor core (`tensor_core_chain`): what Hopper's kernels do
    fast        one tensor core chain over all of K, scaled once at the end: "fast accumulation", no promotion

The modelled core adds 32 products p at a time to its accumulator c (`total` below):

    E   = largest exponent among the products and c            (a product's exponent: the sum of its factors')
    sum = trunc(c / q) + trunc(p_1 / q) + ... + trunc(p_32 / q),   q = 2^(E - 13)
    c'  = sum * q, its significand cut to 13 fraction bits

Everything is cut towards zero, so sums of one sign come out too small, and the longer the chain, the more. That is why
DeepSeek-V3 *promotes*: it takes the partial sum out of the tensor core every 128 of K and adds it up in float32
(arXiv:2412.19437, section 3.3.2: "14 bits", 13 and the leading one). Block scales need that stop anyway.

Sources: the core, F. A. Khattak and M. Mikaitis, "Accurate Models of NVIDIA Tensor Cores" (arXiv:2512.07004), as
fitted to an H100 PCIe with cuBLASLt 12.8 by the package mmaemu 0.1.0, which tests hold `hopper` and `fast` against
bit for bit. The promotion, DeepGEMM's sm90_fp8_gemm_1d2d.cuh: the two scales are multiplied first, then a
multiply-add that the compiler fuses. Other Hopper GPUs are assumed to be the same; Blackwell is not covered.

Left out: split-K, output rounding, speed (about 20 ns a multiply-add: use tiles). The core's model is written for
reading: exact float64 arithmetic on whole tiles, one Python step per 32 of K.
"""

from __future__ import annotations

import torch

from fp8lab.formats import Float8Format, get_format, power_of_two
from fp8lab.quantizers import WHOLE, QuantizedTensor, expand_blocks

ACCUMULATE = ("fp32", "promote128", "hopper", "fast")
PROMOTE_EVERY = 128
"""Elements of K between two promotions to float32."""
CHUNK = 32
"""Products that a Hopper tensor core adds in one step: the K of one FP8 WGMMA instruction."""
FRACTION_BITS = 13
"""Bits kept below the leading one of the largest term."""
_EXPONENT_OF_ZERO = -200  # below that of any product or partial sum, so a zero never sets E


def reference_gemm(a: QuantizedTensor, b: QuantizedTensor, *, accumulate: str = "fp32") -> torch.Tensor:
    """a (M, K) @ b (N, K)^T -> (M, N) float32, accumulated as the module's text says.

    a, b: matrices in any blocks for `fp32`; for `promote128` and `hopper` in blocks whose length along K is 32, 64, a
    multiple of 128 or WHOLE (with 32 or 64 it promotes that often: a scale can only be applied outside the core); for
    `fast` with one scale per row, i.e. equal along K. NaN and infinity codes give what IEEE arithmetic gives: any
    NaN, 0 * inf or inf - inf makes that output NaN.

    Raises ValueError for an unknown accumulate, operands that are not matrices of one K, E5M2 on both sides (no such
    tensor core instruction), and blocks that do not fit the mode.
    """
    if accumulate not in ACCUMULATE:
        raise ValueError(f"accumulate is {accumulate!r}; allowed: {', '.join(ACCUMULATE)}")
    _check_operands(a, b)
    if accumulate == "fp32":
        return a.dequantize() @ b.dequantize().t()
    if accumulate == "fast":
        scale_a, scale_b = _row_scale(a, "a"), _row_scale(b, "b")
        return tensor_core_chain(a.codes, b.codes, a.format, b.format) * (scale_a * scale_b.t())
    dot = tensor_core_chain if accumulate == "hopper" else exact_dot
    return _promoted(a, b, dot)


def _promoted(a: QuantizedTensor, b: QuantizedTensor, dot) -> torch.Tensor:
    """Sum over blocks of K of (scale of a * scale of b) * dot(codes), added in float32 from the first block on."""
    every = min(PROMOTE_EVERY, _block_along_k(a, "a"), _block_along_k(b, "b"))
    scale_a, scale_b = (expand_blocks(t.scale, t.block, t.shape, t.offset) for t in (a, b))
    total = torch.zeros(a.shape[0], b.shape[0], device=a.codes.device)
    for start in range(0, a.shape[1], every):
        here = slice(start, start + every)
        partial = dot(a.codes[:, here], b.codes[:, here], a.format, b.format)
        scale = scale_a[:, start, None] * scale_b[None, :, start]
        # float32 * float32 is exact in float64, so this rounds once, as the GPU's fused multiply-add does
        total = (total.double() + scale.double() * partial.double()).float()
    return total


def exact_dot(a: torch.Tensor, b: torch.Tensor, format_a: str, format_b: str) -> torch.Tensor:
    """Codes a (M, L), b (N, L) -> (M, N) float32: the sum of products in float64, rounded once.

    For E4M3 the float64 sum is exact, so this is the best any tensor core could return.
    """
    left, right = get_format(format_a).decode(a).double(), get_format(format_b).decode(b).double()
    return (left @ right.t()).float()


def tensor_core_chain(a: torch.Tensor, b: torch.Tensor, format_a: str, format_b: str) -> torch.Tensor:
    """Codes a (M, L), b (N, L) -> (M, N) float32: the chain of `tensor_core_step` over L, from zero.

    A last chunk of fewer than 32 acts as if filled up with zeros, which change nothing.
    """
    left, right = get_format(format_a).decode(a).double(), get_format(format_b).decode(b).double()
    exponents_a, exponents_b = exponent(left, get_format(format_a)), exponent(right, get_format(format_b))
    total = torch.zeros(a.shape[0], b.shape[0], dtype=torch.float64, device=a.device)
    for start in range(0, a.shape[1], CHUNK):
        here = slice(start, start + CHUNK)
        products = left[:, None, here] * right[None, :, here]
        exponents = exponents_a[:, None, here] + exponents_b[None, :, here]
        total = tensor_core_step(products, exponents, total)
    return total.float()  # 14 significant bits: nothing is rounded here


def tensor_core_step(products: torch.Tensor, exponents: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """One step of the core: products (..., 32) with their exponents, added to total (...); all values float64.

    A result of zero is +0, whatever its terms' signs.
    """
    largest = torch.maximum(exponents.amax(-1), exponent(total))
    quantum = power_of_two(largest - FRACTION_BITS)
    added = torch.trunc(products / quantum[..., None]).sum(-1) + torch.trunc(total / quantum)
    added = added * quantum
    # the sum can be larger than every term: cut it to 13 fraction bits below its own leading bit
    quantum = power_of_two(exponent(added) - FRACTION_BITS)
    return torch.trunc(added / quantum) * quantum + 0.0


def exponent(x: torch.Tensor, fmt: Float8Format | None = None) -> torch.Tensor:
    """floor(log2 |x|), int32, same shape; for values of an FP8 format at least the exponent of its smallest normal
    number, because the hardware does not normalize subnormals. Zero (and a non-finite x) has one below all others."""
    found = torch.frexp(x).exponent - 1  # |x| = 1.f * 2^found
    if fmt is not None:
        found = found.clamp(min=1 - fmt.bias)
    return torch.where(x.isfinite() & (x != 0), found, _EXPONENT_OF_ZERO)


def _check_operands(a: QuantizedTensor, b: QuantizedTensor) -> None:
    for name, operand in (("a", a), ("b", b)):
        if operand.codes.ndim != 2:
            raise ValueError(f"{name} has shape {tuple(operand.shape)}; a GEMM takes matrices (M, K) and (N, K)")
    if a.shape[1] != b.shape[1]:
        raise ValueError(
            f"a has K = {a.shape[1]} and b has K = {b.shape[1]}; both are summed along their last dimension: a (M, K), "
            "b (N, K)"
        )
    get_format(a.format), get_format(b.format)
    if a.format == b.format == "e5m2":
        raise ValueError("a and b are both e5m2; FP8 tensor cores take e4m3 x e4m3, e4m3 x e5m2 or e5m2 x e4m3")


def _block_along_k(operand: QuantizedTensor, name: str) -> int:
    """The length of a block along K, at most PROMOTE_EVERY; ValueError if it does not fit the kernels' steps."""
    length = PROMOTE_EVERY if operand.block[1] == WHOLE else operand.block[1]
    fits = length % PROMOTE_EVERY == 0 or (PROMOTE_EVERY % length == 0 and length % CHUNK == 0)
    if not fits or operand.offset[1] != 0:
        cut = f", cut at column {operand.offset[1]} of a block," if operand.offset[1] else ""
        raise ValueError(
            f"{name} has blocks of {operand.block[1]} along K{cut} which do not line up with promotion every "
            f"{PROMOTE_EVERY} and steps of {CHUNK}; use blocks of 32, 64, a multiple of 128, or accumulate='fp32'"
        )
    return min(length, PROMOTE_EVERY)


def _row_scale(operand: QuantizedTensor, name: str) -> torch.Tensor:
    """The scale of each row (rows, 1); ValueError if it changes along K."""
    scale = operand.scale
    if not bool((scale == scale[:, :1]).all()):
        raise ValueError(
            f"{name} has scales that change along K (blocks of {operand.block[1]}), which fast accumulation cannot "
            f"apply; quantize it with block (1, {WHOLE}) or ({WHOLE}, {WHOLE})"
        )
    return expand_blocks(scale[:, :1], (operand.block[0], WHOLE), torch.Size((operand.shape[0], 1)), operand.offset)
