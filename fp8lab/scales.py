"""ScaleRule: how a block's scale follows from its largest magnitude, here and in seven other systems.

All of them mean "amax becomes 448". They differ in what is computed first, and so in the last bit, and in what
happens to blocks that are empty, tiny or not finite:

    form      s = amax / 448              or    E = 448 / amax, s = 1 / E       (E: the encode scale)
    apply     x / s                       or    x * (1 / s)                     or    x * E
    floors    none                        or    amax >= 1e-4, 1e-10, 1e-12      or    s >= 4.4e-6
    pow2      s rounded up to a power of two, by exponent bits (exact) or by a float32 log2 (off by one next to a power)

A trainer and a rollout engine that follow different rules hold different bytes for the same weight. `differences`
shows where. Sources: the systems' code, as listed with commits in the presets' notes. vLLM quantizes *weights* by
DeepGEMM's rule and activations by `vllm`'s. What is not imitated: kernels that turn NaN into -448 (C fmin/fmax);
shapes that a system refuses.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch

from fp8lab.formats import Float8Format, power_of_two


def default_scale(amax: torch.Tensor, fmt: Float8Format) -> torch.Tensor:
    """The rule `default`: the largest magnitude lands on the format's largest number; an empty block has scale 1."""
    scale = divided(amax.float(), fmt.max)
    return torch.where(scale == 0, 1.0, scale)


def divided(x: torch.Tensor, number: float) -> torch.Tensor:
    """x / number, correctly rounded: given a Python number, torch on a GPU multiplies by its reciprocal instead."""
    return x / torch.full_like(x, number)


FORMS = ("amax/max", "max/amax", "max/amax in fp64", "max*(1/amax)")
APPLY = ("divide", "reciprocal", "encode")
POW2 = (None, "bits", "log2", "encode bits")
NONFINITE = ("ignore", "propagate", "unit")
EDGES = ("real", "last element")


@dataclass(frozen=True, kw_only=True)
class ScaleRule:
    """One system's rule. `scale` is always the dequantization multiplier: x ~ code * scale."""

    name: str = "default"
    form: str = "amax/max"
    """`amax/max`: s = amax / max. `max/amax`: E = max / amax, s = 1 / E, in float32 or with E rounded from float64;
    `max*(1/amax)`: what torch makes of the Python expression `448 / amax`, which rounds twice."""
    apply: str = "divide"
    """What is rounded to a code: x / s (`divide`), x * (1 / s) (`reciprocal`), or x * E (`encode`)."""
    amax_floor: float = 0.0
    """amax is raised to this first."""
    scale_floor: float = 0.0
    """The finished scale is raised to this."""
    zero_scale: float | None = 1.0
    """Scale of a block whose scale comes out as 0 (or whose E overflows); None: the input dtype's epsilon."""
    pow2: str | None = None
    """How the scale is rounded up to a power of two: not, by its `bits`, by float32 `log2`, or E down by its bits."""
    pow2_floor: float = 0.0
    """The scale is raised to this before it is rounded to a power of two."""
    nonfinite: str = "ignore"
    """NaN and infinity are left out of amax, `propagate`d into it (the block is lost), or make the scale 1 (`unit`)."""
    edge: str = "real"
    """A ragged block holds its `real` elements, or is filled up with copies of the matrix's `last element`."""
    in_input_dtype: bool = False
    """Scale and x / s are computed in the input's dtype (BF16 scales and quotients for BF16 inputs)."""
    note: str = ""
    """Where the rule comes from."""

    def __post_init__(self) -> None:
        for field, allowed in (
            ("form", FORMS),
            ("apply", APPLY),
            ("pow2", POW2),
            ("nonfinite", NONFINITE),
            ("edge", EDGES),
        ):
            if getattr(self, field) not in allowed:
                raise ValueError(f"{field} is {getattr(self, field)!r}; allowed: {', '.join(map(str, allowed))}")

    @classmethod
    def preset(cls, name: str) -> ScaleRule:
        """The rule called `name` (see SCALE_RULES); ValueError otherwise."""
        if name not in SCALE_RULES:
            raise ValueError(f"scale rule is {name!r}; allowed: {', '.join(SCALE_RULES)}")
        return SCALE_RULES[name]

    @functools.cached_property
    def fused(self) -> bool:
        """True for the two rules that the one-pass kernel computes itself: `default` and `pow2`."""
        return replace(self, name="default", pow2=None, note="") == ScaleRule() and self.pow2 in (None, "bits")

    def scale(
        self, amax: torch.Tensor, fmt: Float8Format, dtype: torch.dtype = torch.float32
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(scale, multiplier) of blocks with these amax (>= 0, any shape), float32; x * multiplier becomes a code.

        For `divide` the multiplier is the scale itself, and x is divided by it. dtype: the input's.
        """
        if self.fused and self.pow2 is None:
            scale = default_scale(amax, fmt)
            return scale, scale
        amax = amax.to(dtype if self.in_input_dtype else torch.float32).clamp(min=self.amax_floor)
        if self.form == "amax/max":
            scale = divided(amax, fmt.max)
            empty = scale.clamp(min=self.scale_floor) == 0
            encode = 1 / scale
        else:
            wide = amax.double() if self.form.endswith("fp64") else amax
            encode = (
                fmt.max * wide.reciprocal() if self.form == "max*(1/amax)" else torch.full_like(wide, fmt.max) / wide
            ).float()
            empty = amax == 0
            encode = encode.clamp(max=torch.finfo(dtype).max)  # E overflows for the tiniest blocks
            scale = 1 / encode
        if self.pow2 is not None:
            scale = self._round_up(scale, encode, amax, fmt)
            encode = 1 / scale
        scale = scale.clamp(min=self.scale_floor)
        encode = 1 / scale if self.scale_floor or self.form == "amax/max" else encode
        unit = empty | (~amax.isfinite() if self.nonfinite == "unit" else False)
        value = torch.finfo(dtype).eps if self.zero_scale is None else self.zero_scale
        scale, encode = torch.where(unit, value, scale.float()), torch.where(unit, 1 / value, encode.float())
        return scale, scale if self.apply == "divide" else encode

    def _round_up(self, scale, encode, amax, fmt: Float8Format) -> torch.Tensor:
        if self.pow2 == "log2":
            return torch.exp2(torch.ceil(torch.log2(scale.clamp(min=self.pow2_floor))).clamp(-127, 127))
        if self.pow2 == "encode bits":  # E rounded down is s rounded up
            mantissa, exponent = torch.frexp(encode)
            return 1 / power_of_two(exponent - 1).float()
        # max = 1.75 * 2^e for E4M3 and E5M2, so amax = m * 2^k (1 <= m < 2) needs 2^(k - e), or the next power if m >
        # 1.75
        mantissa, exponent = torch.frexp(amax.double())
        power = exponent - 1 - (torch.frexp(torch.tensor(fmt.max)).exponent - 1) + (mantissa > 0.875)
        power = torch.where(amax.isfinite(), power, 127).clamp(-127, 127)
        return torch.where(amax.isnan(), amax, power_of_two(power).float())

    def __str__(self) -> str:
        return self.name


def _presets() -> dict[str, ScaleRule]:
    vllm = ScaleRule(
        name="vllm",
        amax_floor=1e-10,
        nonfinite="propagate",
        note="activations: csrc/quantization/w8a8/fp8/per_token_group_quant.cu",
    )
    native = ScaleRule(
        name="vllm_native",
        scale_floor=1 / (448 * 512),
        nonfinite="propagate",
        note="activations on the CPU: QuantFP8.forward_native",
    )
    deepgemm = ScaleRule(
        name="deepgemm",
        apply="reciprocal",
        amax_floor=1e-4,
        nonfinite="propagate",
        note="deep_gemm/utils/math.py; also vLLM's weights (per_block_cast_to_fp8)",
    )
    te = ScaleRule(
        name="transformer_engine",
        form="max/amax",
        apply="encode",
        nonfinite="unit",
        note="Float8BlockScaling with NVTE_FP8_BLOCK_SCALING_FP32_SCALES=1; its default is transformer_engine+pow2",
    )
    torchao = ScaleRule(
        name="torchao",
        form="max/amax in fp64",
        apply="encode",
        amax_floor=1e-12,
        nonfinite="propagate",
        note="torchao/prototype/blockwise_fp8_training",
    )
    compressed = ScaleRule(
        name="compressed_tensors",
        zero_scale=None,
        nonfinite="propagate",
        in_input_dtype=True,
        note="FP8_BLOCK: quantization/utils, calculate_qparams",
    )
    nemo = ScaleRule(
        name="nemo_rl",
        form="max*(1/amax)",
        apply="encode",
        nonfinite="unit",
        edge="last element",
        note="weights: nemo_rl/models/generation/vllm/quantization/fp8.py, cast_tensor_to_fp8_blockwise",
    )
    rules = [ScaleRule(), ScaleRule(name="pow2", pow2="bits"), vllm, native, deepgemm, te, torchao, compressed, nemo]
    rules += [
        replace(vllm, name="vllm+pow2", pow2="log2", pow2_floor=1e-10),
        replace(native, name="vllm_native+pow2", pow2="log2"),
        replace(deepgemm, name="deepgemm+pow2", pow2="bits"),
        replace(te, name="transformer_engine+pow2", pow2="encode bits"),
        replace(nemo, name="nemo_rl+pow2", form="amax/max", pow2="log2"),
    ]
    return {rule.name: rule for rule in rules}


SCALE_RULES = _presets()
"""Rules by name; `+pow2` is the same system with power-of-two scales."""
