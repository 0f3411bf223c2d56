"""The number formats of FP8 training, bit by bit: E4M3, E5M2, E8M0 and BF16.

A floating-point code is sign, exponent field e and mantissa field m. With M mantissa bits and bias b its value is

    e > 0:  (-1)^s * 2^(e - b) * (1 + m / 2^M)        normal
    e = 0:  (-1)^s * 2^(1 - b) * (m / 2^M)            subnormal: evenly spaced down to zero

E4M3 ("fn": finite) spends its top codes on numbers, so its largest value is 448, it has no infinity, and 0x7f / 0xff
are its only NaNs. E5M2 is a small IEEE float: largest 57344, infinities and NaNs. Both are specified in "FP8 Formats
for Deep Learning" (Micikevicius et al., 2022, arXiv:2209.05433) and the OCP 8-bit floating point specification. E8M0
(OCP microscaling) is only an exponent: 2^(e - 127), used for power-of-two scales. BF16 is float32 cut to 7 mantissa
bits.

Rounding is to nearest, ties to even, after a clamp to the largest finite value (a saturating cast). It is done here
with float32 arithmetic instead of torch's cast, whose overflow rule changed between releases: adding and subtracting a
constant c whose spacing ("ulp") equals the target's spacing makes the FPU do the rounding. NaN and infinity become NaN.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Float8Format:
    """An 8-bit floating-point format with `exponent_bits` + `mantissa_bits` = 7."""

    name: str
    exponent_bits: int
    mantissa_bits: int
    max: float
    """Largest finite value."""
    dtype: torch.dtype
    """The torch dtype that stores its codes."""

    @property
    def bias(self) -> int:
        """Exponent bias, 2^(exponent_bits - 1) - 1."""
        return 2 ** (self.exponent_bits - 1) - 1

    @property
    def min_normal(self) -> float:
        """Smallest normal number, 2^(1 - bias)."""
        return 2.0 ** (1 - self.bias)

    @property
    def min_subnormal(self) -> float:
        """Smallest positive number, 2^(1 - bias - mantissa_bits)."""
        return 2.0 ** (1 - self.bias - self.mantissa_bits)

    def spacing(self, x: torch.Tensor) -> torch.Tensor:
        """Distance between the neighbouring codes around each |x| (same shape, float32); x is taken as float32."""
        magnitude = x.float().abs().clamp(self.min_normal, self.max)
        exponent = torch.frexp(magnitude).exponent - 1  # magnitude = 1.f * 2^exponent
        return power_of_two(exponent - self.mantissa_bits).float()

    def round(self, x: torch.Tensor) -> torch.Tensor:
        """x rounded to the format, held in float32, same shape: clamp, then nearest with ties to even; -0 is kept.

        NaN and infinities become NaN.
        """
        x = x.float()
        clamped = x.clamp(-self.max, self.max)
        magic = self.spacing(clamped) * (1.5 * 2**23)  # a float32 of this size has exactly the target's spacing
        rounded = torch.copysign((clamped + magic) - magic, clamped)
        return torch.where(x.isfinite(), rounded, torch.full_like(x, float("nan")))

    def round_stochastic(self, x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """x rounded down or up at random, so that the mean over draws is x (after the clamp); else like `round`."""
        clamped = x.float().clamp(-self.max, self.max).double()
        unit = self.spacing(clamped).double()
        uniform = torch.rand(x.shape, generator=generator, dtype=torch.float64, device=generator.device).to(x.device)
        rounded = torch.copysign((clamped.abs() / unit + uniform).floor() * unit, clamped).float()
        return torch.where(x.isfinite(), rounded.clamp(-self.max, self.max), float("nan"))

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        """Codes (uint8, same shape) of x after `round`; NaN has the code with all exponent and mantissa bits set."""
        value = self.round(x)
        magnitude = value.abs().nan_to_num(0.0)
        normal = magnitude >= self.min_normal
        exponent = torch.where(normal, torch.frexp(magnitude).exponent - 1 + self.bias, 0)
        unit = self.spacing(magnitude)
        field = (magnitude / unit).to(torch.int32)  # 2^M + m if normal, m if subnormal
        code = torch.where(normal, (exponent << self.mantissa_bits) + field - 2**self.mantissa_bits, field)
        code = torch.where(value.isnan(), torch.full_like(code, 0x7F), code)
        sign = torch.signbit(value) & ~value.isnan()
        return (code + 128 * sign.to(torch.int32)).to(torch.uint8)

    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        """Values (float32, same shape) of uint8 codes; E5M2's infinity codes decode to infinities."""
        if codes.dtype != torch.uint8:
            raise TypeError(f"codes have dtype {codes.dtype}; decode takes uint8 (use tensor.view(torch.uint8))")
        return torch.take(self.values(codes.device), codes.long())

    def values(self, device: torch.device | str = "cpu") -> torch.Tensor:
        """The values of codes 0..255 in order, float32, shape (256,)."""
        code = torch.arange(256, device=device)
        exponent = (code & 0x7F) >> self.mantissa_bits
        mantissa = (code & (2**self.mantissa_bits - 1)).float() / 2**self.mantissa_bits
        significand = mantissa + (exponent > 0).float()
        value = significand * power_of_two(exponent.clamp(min=1) - self.bias).float()
        special = value > self.max
        infinite = special & (mantissa == 0) & (self.name == "e5m2")
        value = torch.where(special, torch.where(infinite, float("inf"), float("nan")), value)
        return torch.where(code >= 128, -value, value)

    def neighbours(self, x: float) -> tuple[float, float]:
        """The largest code value <= x and the smallest >= x (equal if x is a code); x must be finite and |x| <= max."""
        if not abs(x) <= self.max:
            raise ValueError(f"x is {x}; {self.name} holds finite values in [-{self.max:g}, {self.max:g}]")
        finite = self.values()[self.values().isfinite()].double()
        return finite[finite <= x].max().item() + 0.0, finite[finite >= x].min().item() + 0.0


E4M3 = Float8Format("e4m3", 4, 3, 448.0, torch.float8_e4m3fn)
E5M2 = Float8Format("e5m2", 5, 2, 57344.0, torch.float8_e5m2)
FORMATS = {"e4m3": E4M3, "e5m2": E5M2}


def get_format(name: str) -> Float8Format:
    """The 8-bit format called `name` (`e4m3` or `e5m2`); ValueError otherwise."""
    if name not in FORMATS:
        raise ValueError(f"format is {name!r}; allowed: {', '.join(FORMATS)} (bf16 needs no scale: see round_bf16)")
    return FORMATS[name]


def power_of_two(n: torch.Tensor) -> torch.Tensor:
    """2^n as float64, same shape, for integers -1022 <= n <= 1023: written into the exponent bits, hence exact.

    torch.ldexp multiplies by pow(2, n), which a GPU may round.
    """
    return ((n.long() + 1023) << 52).view(torch.float64)


def round_bf16(x: torch.Tensor) -> torch.Tensor:
    """x rounded to BF16 (nearest, ties to even), held in float32, same shape."""
    return x.to(torch.bfloat16).float()


def encode_e8m0(scale: torch.Tensor) -> torch.Tensor:
    """E8M0 codes (uint8, same shape) of power-of-two scales 2^-127 .. 2^127; ValueError for any other value."""
    mantissa, exponent = torch.frexp(scale.double())
    exponent = exponent - 1
    if not bool(((mantissa == 0.5) & (exponent >= -127) & (exponent <= 127)).all()):
        raise ValueError("E8M0 holds powers of two from 2^-127 to 2^127 only; use a power-of-two scale rule")
    return (exponent + 127).to(torch.uint8)


def decode_e8m0(codes: torch.Tensor) -> torch.Tensor:
    """Scales 2^(code - 127), float32, same shape; code 255 is NaN."""
    value = torch.ldexp(torch.ones(codes.shape, dtype=torch.float64), codes.long() - 127).float()
    return torch.where(codes == 255, float("nan"), value)
