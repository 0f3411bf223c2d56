"""Block quantization: a tensor becomes FP8 codes and one float32 scale per block.

    scale = amax(block) / 448            (448: the largest E4M3 number)
    code  = round_to_nearest_even(clamp(x / scale, -448, 448))
    x     ~ code * scale

`scale` is always the *dequantization multiplier*, which checkpoints call `weight_scale_inv`. The recipe uses 128x128
blocks for weights (a square block is the same block after a transpose, so one quantized weight serves the forward and
the grad_input GEMM) and 1x128 blocks for activations and gradients (one outlier spoils 128 values, not a whole tensor).
With `ScaleRule(pow2=True)` the scale is the smallest power of two that still fits the block: rounded *up*, so nothing
overflows, and up to one bit of range is lost. Source: DeepSeek-V3 technical report (arXiv:2412.19437) section 3.3, and
NVIDIA NeMo RL's FP8 recipe (its docs/fp8.md).

Rules at the edges: the scale is taken from finite elements only; a block whose amax / 448 is zero (underflow included)
has scale 1; NaN and infinity become the NaN code and are counted; a ragged edge block uses only its real elements. CPU
float32 work runs in `kernels.py`; `BlockQuantizer.reference` is the same in plain torch, for reading, for other devices
and for tests.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from fp8lab.formats import Float8Format, get_format

WHOLE = -1
"""As a block dimension: the whole dimension."""


@dataclass(frozen=True, kw_only=True)
class ScaleRule:
    """How a block's scale follows from its amax."""

    name: str = "default"
    pow2: bool = False
    """Round the scale up to a power of two (never below 2^-127, E8M0's smallest), as UE8M0 recipes do."""

    @classmethod
    def preset(cls, name: str) -> ScaleRule:
        """The rule called `name`: `default` (float32 scales) or `pow2`; ValueError otherwise."""
        if name not in SCALE_RULES:
            raise ValueError(f"scale rule is {name!r}; allowed: {', '.join(SCALE_RULES)}")
        return SCALE_RULES[name]

    def scale(self, amax: torch.Tensor, fmt: Float8Format) -> torch.Tensor:
        """Scales (same shape as amax, float32) for blocks whose largest finite magnitude is amax (>= 0)."""
        scale = amax.float() / fmt.max
        if self.pow2:
            # Exact, from the exponent bits: max = 1.75 * 2^e, so amax = m * 2^k needs 2^(k - e), or the next if
            # m > 1.75.
            mantissa, exponent = torch.frexp(amax.double())
            power = exponent - 1 - (torch.frexp(torch.tensor(fmt.max)).exponent - 1) + (mantissa > 0.875)
            power_of_two = torch.ldexp(torch.ones_like(mantissa), power.clamp(min=-127)).float()
            return torch.where(scale == 0, 1.0, power_of_two)
        return torch.where(scale == 0, 1.0, scale)


SCALE_RULES = {"default": ScaleRule(), "pow2": ScaleRule(name="pow2", pow2=True)}


@dataclass(frozen=True, kw_only=True, eq=False)
class QuantizedTensor:
    """FP8 codes with their block scales; x ~ decode(codes) * scale, block by block."""

    codes: torch.Tensor
    """uint8, the original shape."""
    scale: torch.Tensor
    """float32, shape (..., ceil(N / block[0]), ceil(K / block[1])): the dequantization multipliers."""
    block: tuple[int, int]
    format: str
    rule: str
    nonfinite: int = 0
    """How many input elements were NaN or infinite (they carry the NaN code)."""

    @property
    def shape(self) -> torch.Size:
        """Shape of the original tensor."""
        return self.codes.shape

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales together."""
        return self.codes.numel() + self.scale.numel() * self.scale.element_size()

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """decode(codes) * scale in float32, then cast to `dtype`; the original shape."""
        values = get_format(self.format).decode(self.codes)
        return (values * expand_blocks(self.scale, self.block, values.shape)).to(dtype)

    def same_bytes(self, other: QuantizedTensor) -> bool:
        """True if codes and scales are equal bit for bit (NaN codes included)."""
        same = self.codes.shape == other.codes.shape and torch.equal(self.codes, other.codes)
        return same and torch.equal(self.scale.view(torch.int32), other.scale.view(torch.int32))

    def __repr__(self) -> str:
        shape = "x".join(map(str, self.shape))
        return f"QuantizedTensor({shape} {self.format}, block={self.block}, rule={self.rule}, {self.nbytes} bytes)"


def expand_blocks(scale: torch.Tensor, block: tuple[int, int], shape: torch.Size) -> torch.Tensor:
    """Repeat block values (..., N', K') over their elements to `shape` (..., N, K); a 1-D shape counts as one row."""
    rows, cols = (1, 1, *shape)[-2:]
    scale = scale.reshape(1, -1) if scale.ndim < 2 else scale
    row = torch.arange(rows, device=scale.device) // (max(rows, 1) if block[0] == WHOLE else block[0])
    col = torch.arange(cols, device=scale.device) // (max(cols, 1) if block[1] == WHOLE else block[1])
    return scale[..., row[:, None], col[None, :]].reshape(shape)


@dataclass(frozen=True)
class BlockQuantizer:
    """Quantizes the last two dimensions of any tensor in blocks; see the module's text for the rules.

    `block` = (rows, cols), each a positive integer or `WHOLE` (-1): (1, 128) activations, (128, 128) weights, (1, -1)
    per row, (-1, -1) per matrix. ValueError for anything else.
    """

    block: tuple[int, int] = (1, 128)
    format: str = "e4m3"
    rule: str | ScaleRule = "default"
    _fmt: Float8Format = field(init=False, repr=False, compare=False)
    _rule: ScaleRule = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        ok = isinstance(self.block, tuple) and len(self.block) == 2
        if not ok or any(type(b) is not int or (b < 1 and b != WHOLE) for b in self.block):
            raise ValueError(
                f"block is {self.block!r}; it must be (rows, cols) of positive integers, or -1 for a whole dim"
            )
        object.__setattr__(self, "_fmt", get_format(self.format))
        rule = self.rule if isinstance(self.rule, ScaleRule) else ScaleRule.preset(self.rule)
        object.__setattr__(self, "_rule", rule)

    def quantize(self, x: torch.Tensor) -> QuantizedTensor:
        """Codes and scales of x (any floating shape and dtype; read as float32)."""
        _, codes, scale, bad = self._run(x, want_codes=True)
        return self._pack(codes, scale, bad)

    def fake_quantize(self, x: torch.Tensor) -> torch.Tensor:
        """x rounded to FP8 and back, float32, same shape: equals quantize(x).dequantize(), in one pass."""
        return self._run(x, want_codes=False)[0]

    def quantize_both(self, x: torch.Tensor) -> tuple[QuantizedTensor, torch.Tensor]:
        """(quantize(x), its dequantized float32 values) from one pass; what a linear layer keeps of its weight."""
        values, codes, scale, bad = self._run(x, want_codes=True)
        return self._pack(codes, scale, bad), values

    def reference(self, x: torch.Tensor) -> tuple[QuantizedTensor, torch.Tensor]:
        """The same as `quantize_both` in plain torch operations, on any device."""
        x3 = _as_matrices(x)
        rows, cols = self._sizes(x3)
        padded = torch.nn.functional.pad(x3.float(), (0, -x3.shape[2] % cols, 0, -x3.shape[1] % rows))
        tiles = padded.unflatten(2, (-1, cols)).unflatten(1, (-1, rows))  # (B, N', rows, K', cols)
        finite = torch.where(tiles.isfinite(), tiles.abs(), 0.0)  # padding is 0 and never raises an amax
        scale = self._rule.scale(finite.amax(dim=(2, 4)), self._fmt)
        ratio = (tiles / scale[:, :, None, :, None]).flatten(3, 4).flatten(1, 2)[:, : x3.shape[1], : x3.shape[2]]
        ratio = torch.where(x3.isfinite(), ratio, float("nan"))
        values = self._fmt.round(ratio.clamp(-self._fmt.max, self._fmt.max))
        codes = self._fmt.encode(values)
        dequantized = values * expand_blocks(scale, (rows, cols), values.shape)
        bad = int((~x3.isfinite()).sum())
        return self._pack(codes.view(x.shape), self._shape_scale(scale, x), bad), dequantized.view(x.shape)

    def _run(self, x: torch.Tensor, *, want_codes: bool):
        if not x.is_floating_point():
            raise TypeError(f"x has dtype {x.dtype}; a quantizer takes floating-point tensors")
        if x.device.type != "cpu" or x.numel() == 0:
            packed, values = self.reference(x)
            return values, packed.codes, packed.scale, packed.nonfinite
        from fp8lab.kernels import quantize_blocks

        x3 = _as_matrices(x.detach().float())
        rows, cols = self._sizes(x3)
        if rows == 1:
            x3 = x3.reshape(1, -1, x3.shape[2])  # blocks of one row never cross matrices
        parts = [quantize_blocks(m.contiguous(), (rows, cols), self._fmt, self._rule.pow2, want_codes) for m in x3]
        values, codes, scale, bad = zip(*parts, strict=True)
        joined = [t[0] if len(t) == 1 else torch.stack(t) for t in (values, codes if want_codes else values, scale)]
        codes_out = joined[1].view(x.shape) if want_codes else None
        return joined[0].view(x.shape), codes_out, self._shape_scale(joined[2], x), sum(bad)

    def _sizes(self, x3: torch.Tensor) -> tuple[int, int]:
        rows, cols = (max(dim, 1) if b == WHOLE else b for b, dim in zip(self.block, x3.shape[1:], strict=True))
        return rows, cols

    def _shape_scale(self, scale: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        if x.ndim < 2:
            return scale.reshape(1, -1) if self.block[0] != 1 else scale.reshape(-1)
        rows = x.shape[-2] if self.block[0] == WHOLE else self.block[0]
        return scale.reshape(*x.shape[:-2], -(-x.shape[-2] // max(rows, 1)), scale.shape[-1])

    def _pack(self, codes: torch.Tensor, scale: torch.Tensor, bad: int) -> QuantizedTensor:
        return QuantizedTensor(
            codes=codes, scale=scale, block=self.block, format=self.format, rule=self._rule.name, nonfinite=bad
        )


def _as_matrices(x: torch.Tensor) -> torch.Tensor:
    """View x as (batch, N, K): leading dimensions merged, a vector as one row."""
    return x.reshape(math.prod(x.shape[:-2]), *(1, 1, *x.shape)[-2:])


def quantization_error(x: torch.Tensor, quantized: QuantizedTensor | torch.Tensor) -> dict[str, float]:
    """How far quantized is from x, over finite elements.

    Returns `sqnr_db` = 10 log10(sum x^2 / sum (x - q)^2) (infinite if equal), `relative` = root of the inverse ratio,
    `max_abs`, `flushed` (share of non-zero elements that became 0) and `saturated` (share at the format's largest
    code; only for a QuantizedTensor, else NaN).
    """
    values = quantized.dequantize() if isinstance(quantized, QuantizedTensor) else quantized
    keep = x.isfinite() & values.isfinite()
    exact, rounded = x[keep].double(), values[keep].double()
    signal, noise = exact.square().sum().item(), (exact - rounded).square().sum().item()
    ratio = noise / signal if signal > 0 else 0.0
    saturated = float("nan")
    if isinstance(quantized, QuantizedTensor):
        top = get_format(quantized.format)
        saturated = (top.decode(quantized.codes).abs() == top.max).float().mean().item()
    return {
        "sqnr_db": float("inf") if ratio == 0 else -10 * torch.tensor(ratio, dtype=torch.float64).log10().item(),
        "relative": ratio**0.5,
        "max_abs": (exact - rounded).abs().max().item() if exact.numel() else 0.0,
        "flushed": ((rounded == 0) & (exact != 0)).sum().item() / max(1, (exact != 0).sum().item()),
        "saturated": saturated,
    }
