"""Block quantization: a tensor becomes FP8 codes and one float32 scale per block.

    scale = amax(block) / 448            (448: the largest E4M3 number)
    code  = round_to_nearest_even(clamp(x / scale, -448, 448))
    x     ~ code * scale

`scale` is always the *dequantization multiplier*, which checkpoints call `weight_scale_inv`. The recipe uses 128x128
blocks for weights (a square block is the same block after a transpose, so one quantized weight serves the forward and
the grad_input GEMM) and 1x128 blocks for activations and gradients (one outlier spoils 128 values, not a whole tensor).
With the rule `pow2` the scale is the smallest power of two that still fits the block: rounded *up*, so nothing
overflows, and up to one bit of range is lost. Source: DeepSeek-V3 technical report (arXiv:2412.19437) section 3.3, and
NVIDIA NeMo RL's FP8 recipe (its docs/fp8.md).

Rules at the edges: the scale is taken from finite elements only; a block whose amax / 448 is zero (underflow included)
has scale 1; NaN and infinity become the NaN code and are counted; a ragged edge block uses only its real elements. CPU
float32 work runs in `kernels.py`; `BlockQuantizer.reference` is the same in plain torch, for reading, for other devices
and for tests. Other systems' rules (`scales.py`) take their scales from plain torch and round in the kernel.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fp8lab.formats import Float8Format, get_format
from fp8lab.scales import SCALE_RULES, ScaleRule

__all__ = ["SCALE_RULES", "WHOLE", "BlockQuantizer", "QuantizedTensor", "ScaleRule", "quantization_error"]
WHOLE = -1
"""As a block dimension: the whole dimension."""


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
    offset: tuple[int, int] = (0, 0)
    """Row and column of the first element within its block: not (0, 0) after a slice that cuts a block."""

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
        return (values * expand_blocks(self.scale, self.block, values.shape, self.offset)).to(dtype)

    def slice(self, rows: slice, cols: slice) -> QuantizedTensor:
        """A part of a matrix (step 1), also when an edge falls inside a block; no value changes.

        Slicing and dequantizing can be swapped. ValueError for a step, an empty part, or a tensor that is no matrix.
        """
        if self.codes.ndim != 2:
            raise ValueError(f"slice takes a matrix; this tensor has shape {tuple(self.shape)}")
        codes, scale, offset = self.codes, self.scale, []
        for dim, part in enumerate((rows, cols)):
            start, stop, step = part.indices(self.shape[dim])
            if step != 1 or stop <= start:
                raise ValueError(f"slice {part} of {self.shape[dim]} must have step 1 and hold something")
            size = self.shape[dim] if self.block[dim] == WHOLE else self.block[dim]
            first, last = start + self.offset[dim], stop - 1 + self.offset[dim]
            codes = codes.narrow(dim, start, stop - start)
            scale = scale.narrow(dim, first // size, last // size - first // size + 1)
            offset.append(0 if self.block[dim] == WHOLE else first % size)
        return dataclasses.replace(self, codes=codes, scale=scale, offset=(offset[0], offset[1]))

    def transpose(self) -> QuantizedTensor:
        """The transposed matrix, its codes and scales moved, nothing requantized."""
        if self.codes.ndim != 2:
            raise ValueError(f"transpose takes a matrix; this tensor has shape {tuple(self.shape)}")
        swapped = {"block": self.block[::-1], "offset": self.offset[::-1]}
        return dataclasses.replace(self, codes=self.codes.t(), scale=self.scale.t(), **swapped)

    def save(self, path: str | Path) -> None:
        """Write codes, scales and description to a safetensors file, under a temporary name first."""
        from safetensors.torch import save_file

        path = Path(path)
        about = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in ("codes", "scale")}
        temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
        tensors = {"codes": self.codes.contiguous(), "scale": self.scale.contiguous()}
        save_file(tensors, temporary, metadata={"fp8lab": json.dumps(about)})
        os.replace(temporary, path)

    @classmethod
    def load(cls, path: str | Path) -> QuantizedTensor:
        """What `save` wrote; ValueError if the file is another kind of safetensors file."""
        from safetensors import safe_open

        with safe_open(path, framework="pt") as file:
            about = (file.metadata() or {}).get("fp8lab")
            if about is None:
                raise ValueError(f"{path} was not written by QuantizedTensor.save")
            fields = {k: tuple(v) if isinstance(v, list) else v for k, v in json.loads(about).items()}
            return cls(codes=file.get_tensor("codes"), scale=file.get_tensor("scale"), **fields)

    def same_bytes(self, other: QuantizedTensor) -> bool:
        """True if codes and scales are equal bit for bit (NaN codes included)."""
        same = self.codes.shape == other.codes.shape and torch.equal(self.codes, other.codes)
        return same and torch.equal(self.scale.view(torch.int32), other.scale.view(torch.int32))

    def __repr__(self) -> str:
        shape = "x".join(map(str, self.shape))
        return f"QuantizedTensor({shape} {self.format}, block={self.block}, rule={self.rule}, {self.nbytes} bytes)"


def expand_blocks(
    scale: torch.Tensor, block: tuple[int, int], shape: torch.Size, offset: tuple[int, int] = (0, 0)
) -> torch.Tensor:
    """Repeat block values (..., N', K') over their elements to `shape` (..., N, K); a 1-D shape counts as one row.

    offset: position of the first element within its block.
    """
    rows, cols = (1, 1, *shape)[-2:]
    scale = scale.reshape(1, -1) if scale.ndim < 2 else scale
    row = (torch.arange(rows, device=scale.device) + offset[0]) // (max(rows, 1) if block[0] == WHOLE else block[0])
    col = (torch.arange(cols, device=scale.device) + offset[1]) // (max(cols, 1) if block[1] == WHOLE else block[1])
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

    def quantize(self, x: torch.Tensor, *, generator: torch.Generator | None = None) -> QuantizedTensor:
        """Codes and scales of x (any floating shape and dtype; read as float32).

        generator: round stochastically with its random numbers, up or down with the probability that makes the mean
        right.
        """
        if generator is not None:
            return self.reference(x, generator=generator)[0]
        _, codes, scale, bad = self._run(x, want_codes=True)
        return self._pack(codes, scale, bad)

    def fake_quantize(self, x: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """x rounded to FP8 and back, float32, same shape: equals quantize(x).dequantize(), in one pass.

        out: a contiguous float32 tensor of x's shape to write to; it saves the page faults of a large new one.
        """
        return self._run(x, want_codes=False, out=out)[0]

    def quantize_both(self, x: torch.Tensor) -> tuple[QuantizedTensor, torch.Tensor]:
        """(quantize(x), its dequantized float32 values) from one pass; what a linear layer keeps of its weight."""
        values, codes, scale, bad = self._run(x, want_codes=True)
        return self._pack(codes, scale, bad), values

    def reference(
        self, x: torch.Tensor, *, generator: torch.Generator | None = None
    ) -> tuple[QuantizedTensor, torch.Tensor]:
        """The same as `quantize_both` in plain torch operations, on any device; generator: see `quantize`."""
        x3 = _as_matrices(x).float()
        rows, cols = self._sizes(x3)
        scale, multiplier = self._rule.scale(self._amax(x3, rows, cols), self._fmt, x.dtype)
        multiplier = expand_blocks(multiplier, (rows, cols), x3.shape)
        ratio = x3 / multiplier if self._rule.apply == "divide" else x3 * multiplier
        if self._rule.in_input_dtype:
            ratio = ratio.to(x.dtype).float()
        ratio = torch.where(x3.isfinite() & ~ratio.isnan(), ratio.clamp(-self._fmt.max, self._fmt.max), float("nan"))
        values = self._fmt.round(ratio) if generator is None else self._fmt.round_stochastic(ratio, generator)
        codes = self._fmt.encode(values)
        dequantized = values * expand_blocks(scale, (rows, cols), values.shape)
        bad = int((~x3.isfinite()).sum())
        return self._pack(codes.view(x.shape), self._shape_scale(scale, x), bad), dequantized.view(x.shape)

    def _amax(self, x3: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
        """Largest magnitude per block of (B, N, K) -> (B, N', K'), non-finite values as the rule says."""
        ragged = (0, -x3.shape[2] % cols, 0, -x3.shape[1] % rows)
        magnitude = x3.abs()
        if self._rule.nonfinite == "ignore":
            magnitude = torch.where(x3.isfinite(), magnitude, 0.0)
        if self._rule.edge == "last element" and x3.numel():
            parts = [torch.nn.functional.pad(m, ragged, value=float(m[-1, -1])) for m in magnitude]
            padded = torch.stack(parts)
        else:
            padded = torch.nn.functional.pad(magnitude, ragged)  # 0 never raises an amax
        return padded.unflatten(2, (-1, cols)).unflatten(1, (-1, rows)).amax(dim=(2, 4))

    def _run(self, x: torch.Tensor, *, want_codes: bool, out: torch.Tensor | None = None):
        if not x.is_floating_point():
            raise TypeError(f"x has dtype {x.dtype}; a quantizer takes floating-point tensors")
        if x.device.type != "cpu" or x.numel() == 0 or (self._rule.in_input_dtype and x.dtype != torch.float32):
            packed, values = self.reference(x)
            values = values if out is None else out.copy_(values)
            return values, packed.codes, packed.scale, packed.nonfinite
        from fp8lab.kernels import quantize_blocks

        x3 = _as_matrices(x.detach().float())
        rows, cols = self._sizes(x3)
        if rows == 1 and self._rule.edge == "real":
            x3 = x3.reshape(1, -1, x3.shape[2])  # blocks of one row never cross matrices
        given: list = [None] * len(x3)
        if not self._rule.fused:
            scale, multiplier = self._rule.scale(self._amax(x3, rows, cols), self._fmt, x.dtype)
            if not bool(scale.isfinite().all()):  # a lost block: rare, and the reference spells it out
                packed, values = self.reference(x)
                values = values if out is None else out.copy_(values)
                return values, packed.codes, packed.scale, packed.nonfinite
            given = list(zip(scale, multiplier, strict=True))
        outs = [None] * len(x3) if out is None else out.view(x3.shape)
        parts = [
            quantize_blocks(x3[i].contiguous(), (rows, cols), self._fmt, self._rule, want_codes, given[i], outs[i])
            for i in range(len(x3))
        ]
        values, codes, scale, bad = parts[0] if len(parts) == 1 else map(_stack, zip(*parts, strict=True))
        values = out if out is not None else values.view(x.shape)
        return values, codes.view(x.shape) if want_codes else None, self._shape_scale(scale, x), bad

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


def _stack(parts: tuple) -> Any:
    """The results of several matrices as one: tensors stacked, counts added up, None stays None."""
    if isinstance(parts[0], torch.Tensor):
        return torch.stack(parts)
    return None if parts[0] is None else sum(parts)


def _as_matrices(x: torch.Tensor) -> torch.Tensor:
    """View x as (batch, N, K): leading dimensions merged, a vector as one row."""
    return x.reshape(math.prod(x.shape[:-2]), *(1, 1, *x.shape)[-2:])


def quantization_error(x: torch.Tensor, quantized: QuantizedTensor | torch.Tensor) -> dict[str, float]:
    """How far quantized is from x, over finite elements.

    Returns `sqnr_db` = 10 log10(sum x^2 / sum (x - q)^2) (infinite if equal), `relative` = root of the inverse ratio,
    `mean_relative_error` and `max_relative_error` (of non-zero elements), `max_abs`, `flushed` (share of non-zero
    elements that became 0) and `saturated` (share at the format's largest code; only for a QuantizedTensor, else NaN)
    and `codes_used` (different codes, likewise).
    """
    values = quantized.dequantize() if isinstance(quantized, QuantizedTensor) else quantized
    keep = x.isfinite() & values.isfinite()
    if not bool(keep.all()):
        x, values = x[keep], values[keep]
    error, nonzero = (x - values).float().abs(), x != 0
    signal, noise = (torch.linalg.vector_norm(t, dtype=torch.float64).item() for t in (x.float(), error))
    relative, count = noise / signal if signal > 0 else 0.0, max(1, int(nonzero.sum()))
    off = torch.where(nonzero, error / x.float().abs(), 0.0)
    saturated, codes_used = float("nan"), float("nan")
    if isinstance(quantized, QuantizedTensor):
        top, uses = get_format(quantized.format), torch.bincount(quantized.codes.flatten(), minlength=256)
        codes_used = int(uses.count_nonzero())
        saturated = (uses[top.values().abs() == top.max].sum() / uses.sum()).item()
    return {
        "sqnr_db": float("inf") if relative == 0 else -20 * math.log10(relative),
        "relative": relative,
        "mean_relative_error": off.sum(dtype=torch.float64).item() / count,
        "max_relative_error": off.max().item() if off.numel() else 0.0,
        "max_abs": error.max().item() if error.numel() else 0.0,
        "flushed": int(((values == 0) & nonzero).sum()) / count,
        "saturated": saturated,
        "codes_used": codes_used,
    }


def block_sqnr(x: torch.Tensor, quantized: QuantizedTensor) -> torch.Tensor:
    """SQNR in dB of each block of a matrix, the shape of quantized.scale; infinite where exact. For a heat map."""
    noise = (x.double() - quantized.dequantize().double()).square()
    signal = x.double().square()

    def total(values: torch.Tensor) -> torch.Tensor:
        index = expand_blocks(
            torch.arange(quantized.scale.numel()).view_as(quantized.scale), quantized.block, x.shape, quantized.offset
        )
        sums = torch.zeros(quantized.scale.numel(), dtype=torch.float64)
        return sums.index_add(0, index.flatten(), values.flatten()).view_as(quantized.scale)

    return 10 * (total(signal) / total(noise)).log10()


def rule_differences(block: tuple[int, int] = (1, 128), seed: int = 0) -> list[dict[str, object]]:
    """How the scale rules differ, one row a rule.

    Columns: the scales of an empty, a tiny, a NaN and an infinite block, and the share of scales and codes of ordinary
    BF16 data that are not those of `default`.
    """
    generator = torch.Generator().manual_seed(seed)
    ordinary = torch.randn((256, 1024), generator=generator).bfloat16()
    probes = {"empty": torch.zeros(block), "tiny (1e-11)": torch.full(block, 1e-11)}
    for name, value in (("NaN", float("nan")), ("infinity", float("inf"))):
        probes[name] = torch.ones(block)
        probes[name][0, 0] = value
    base = BlockQuantizer(block).quantize(ordinary)
    rows = []
    for name, rule in SCALE_RULES.items():
        quantizer = BlockQuantizer(block, rule=rule)
        row: dict[str, object] = {"rule": name}
        row |= {probe: quantizer.quantize(x).scale.flatten()[0].item() for probe, x in probes.items()}
        found = quantizer.quantize(ordinary)
        row["other scales"] = (found.scale != base.scale).float().mean().item()
        row["other codes"] = (found.codes != base.codes).float().mean().item()
        rows.append(row | {"source": rule.note})
    return rows
