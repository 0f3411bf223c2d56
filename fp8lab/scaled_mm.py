"""The three GEMMs of a linear layer on Hopper's FP8 tensor cores: `torch.nn.functional.scaled_mm`.

    output      = x_q  (M, K)  times  w_q    (N, K)      1x128 with 128x128 scales
    grad_input  = g_q  (M, N)  times  w_q^T  (K, N)      1x128 with 128x128 scales
    grad_weight = g_q^T (N, M) times  x_q^T  (K, M)      1x128 with 1x128 scales, along tokens

Hopper multiplies rows with rows: both operands are stored with the summed dimension last, and `scaled_mm` takes the
second one as a transposed view. So w is kept twice, as it is and transposed; its square blocks only move. What the
kernels want of the scales of an operand (rows, L), for L the summed dimension (torch's checks in ScaledBlas.cpp and
_meta_registrations.py, cuBLAS's "1D and 128x128 2D block scaling"):

    1x128      shape (rows, L / 128), strides (1, rows): the rows of one block of L side by side
    128x128    shape (P, rows / 128), strides (1, P), P = L / 128 rounded up to a multiple of 4

Token counts are filled up to a multiple of 128 with zero rows, which change nothing and are cut off again. A layer that
the plan keeps in BF16 multiplies in BF16 on tensor cores here, so that BF16 and FP8 arms are both real.

**Written, never run**: no GPU was at hand. Tests on a CPU hold every operand against torch's own shape and stride
checks, and the products, read as documented above, against the emulated layer. It needs torch >= 2.10, CUDA >= 12.9 and
compute capability 9.0. Quantizing takes plain torch operations here, so no speed is claimed.

Left out: E5M2 operands, FP8 with one BF16 operand, and blocks other than 128 (no such kernel in torch; the emulated
backend has them), fused quantization kernels.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from fp8lab.formats import get_format, round_bf16
from fp8lab.linear import Float8Linear
from fp8lab.operands import LinearPrecision
from fp8lab.quantizers import BlockQuantizer, QuantizedTensor

BLOCK = 128


class Operand(NamedTuple):
    """One side of a GEMM as `scaled_mm` takes it."""

    codes: torch.Tensor
    """(rows, L), row-major: float8, or bfloat16 without scales."""
    scale: torch.Tensor | None
    """float32, laid out as the module's text says."""
    recipe: Any
    """torch's ScalingType of the scale."""


def token_operand(x: torch.Tensor, fmt: str, precision: LinearPrecision) -> Operand:
    """An activation or gradient (rows, L) in 1x128 blocks along L, which must be a multiple of 128; or in BF16."""
    if fmt == "bf16":
        return Operand(x.to(torch.bfloat16).contiguous(), None, None)
    packed = BlockQuantizer((1, BLOCK), fmt, precision.rule).quantize(x)
    outer_major = packed.scale.t().contiguous().t()
    return Operand(_float8(packed), outer_major, F.ScalingType.BlockWise1x128)


def weight_operand(packed: QuantizedTensor) -> Operand:
    """A weight (rows, L) quantized in 128x128 blocks, for a GEMM that sums over L."""
    padded = F.pad(packed.scale, (0, -packed.scale.shape[1] % 4), value=1.0)
    return Operand(_float8(packed), padded.contiguous().t(), F.ScalingType.BlockWise128x128)


def product(a: Operand, b: Operand, output: str) -> torch.Tensor:
    """a (M, L) times b (N, L)^T -> (M, N) float32, rounded to `output` (bf16 or float32) on its way out."""
    dtype = torch.bfloat16 if output == "bf16" else torch.float32
    if a.scale is None:
        out = torch.mm(a.codes, b.codes.t(), out_dtype=dtype)
    else:
        out = F.scaled_mm(a.codes, b.codes.t(), a.scale, a.recipe, b.scale, b.recipe, output_dtype=dtype)
    return out.float()


class ScaledWeight(NamedTuple):
    """The quantized copy of a weight, and the two operands made of it."""

    values: torch.Tensor
    packed: QuantizedTensor | None
    straight: Operand
    """(N, K): for `output`."""
    turned: Operand
    """(K, N): for `grad_input`."""


class ScaledMMLinear(Float8Linear):
    """A Float8Linear whose GEMMs run on FP8 (or BF16) tensor cores; see the module's text."""

    backend = "scaled_mm"

    def quantize(self) -> ScaledWeight:
        weight = super().quantize()
        if weight.packed is None:
            bf16 = weight.values.to(torch.bfloat16)
            return ScaledWeight(*weight, Operand(bf16, None, None), Operand(bf16.t().contiguous(), None, None))
        return ScaledWeight(*weight, weight_operand(weight.packed), weight_operand(weight.packed.transpose()))

    def output(self, x: torch.Tensor, weight: ScaledWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
        operand = token_operand(whole_blocks(x), self.precision.activation, self.precision)
        if bias is None:
            return product(operand, weight.straight, self.precision.output)[: len(x)]
        y = product(operand, weight.straight, "float32")[: len(x)] + bias
        return round_bf16(y) if self.precision.output == "bf16" else y

    def grad_input(self, grad: torch.Tensor, weight: ScaledWeight) -> torch.Tensor:
        operand = token_operand(whole_blocks(grad), self.precision.gradient, self.precision)
        return product(operand, weight.turned, self.precision.output)[: len(grad)]

    def grad_weight(self, grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        left = token_operand(whole_blocks(grad).t(), self.precision.gradient, self.precision)
        right = token_operand(whole_blocks(x).t(), self.precision.activation, self.precision)
        return product(left, right, "float32")


def refusal(precision: LinearPrecision, out_features: int, in_features: int) -> str | None:
    """Why `scaled_mm` cannot run a layer of this precision and shape; None if it can."""
    formats = {precision.weight, precision.activation, precision.gradient}
    if formats == {"bf16"}:
        return None
    if formats != {"e4m3"}:
        return f"operands are {', '.join(sorted(formats))}; allowed: all e4m3, or all bf16"
    if (precision.weight_block, precision.group) != ((BLOCK, BLOCK), BLOCK):
        blocks = f"{precision.weight_block[0]}x{precision.weight_block[1]} and 1x{precision.group}"
        return f"blocks are {blocks}; allowed: weights 128x128, activations and gradients 1x128"
    if in_features % BLOCK or out_features % BLOCK:
        return f"its weight is {out_features} x {in_features}; both must be multiples of 128"
    return None


def whole_blocks(x: torch.Tensor) -> torch.Tensor:
    """x (tokens, width) with zero rows appended up to a multiple of 128, and at least 128."""
    return F.pad(x, (0, 0, 0, -len(x) % BLOCK or (0 if len(x) else BLOCK)))


def _float8(packed: QuantizedTensor) -> torch.Tensor:
    return packed.codes.contiguous().view(get_format(packed.format).dtype)
