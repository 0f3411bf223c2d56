"""Linear layers that Transformer Engine computes, under its Float8BlockScaling recipe: trainer side only.

TE quantizes by itself: x and the gradient in 1x128 blocks, the weight in 128x128, grad_weight along tokens, as
linear.py does. What it must be told is where a plan and TE's defaults can differ, and each is settled, or refused,
before a weight is touched:

    scales        powers of two unless NVTE_FP8_BLOCK_SCALING_FP32_SCALES=1, read when TE's recipes are imported
    gradients     E4M3 (Format.E4M3) or E5M2 (Format.HYBRID)
    backward      NVTE_BACKWARD_OVERRIDE would leave out the quantization of the backward GEMMs
    the source    TE quantizes the tensor it is given: here the master weight, rounded to BF16 if the plan says so

Scales that are no powers of two follow TE's formula (rule `transformer_engine`), which finds another last bit than
`default` in about 40 % of blocks, and another code in less than 0.1 %; powers of two agree bit for bit.

The layer shares the master weight and keeps the state dict's keys; the TE module itself is part of the cache. Tokens
are filled up to a multiple of 128 with zero rows.

**Written, never run**: no GPU was at hand. Tests build TE's recipe class on a CPU; te.pytorch.Linear is known from TE
2.20.2's source only. Left out: packing of real tokens (TE's blocks along tokens hold the padding in between, so pack
sequences), fused attention, sequence and tensor parallelism; TE returns grad_weight in BF16.
"""

from __future__ import annotations

import os
import sys
from typing import Any, NamedTuple

import torch

from fp8lab.formats import round_bf16
from fp8lab.linear import Float8Linear
from fp8lab.operands import LinearPrecision
from fp8lab.quantizers import QuantizedTensor
from fp8lab.scaled_mm import BLOCK, whole_blocks
from fp8lab.scales import SCALE_RULES

FP32_SCALES = "NVTE_FP8_BLOCK_SCALING_FP32_SCALES"
BACKWARD_OVERRIDE = "NVTE_BACKWARD_OVERRIDE"
RULES = ("default", "pow2", "transformer_engine", "transformer_engine+pow2")
INSTALL = (
    "pip install torch==2.14.0 setuptools wheel ninja pybind11 && "
    'pip install --no-build-isolation "transformer-engine[pytorch,core_cu13]==2.20.2"'
)


class EngineWeight(NamedTuple):
    """The cached copy of a weight, for comparing bytes, and the TE module that quantizes the weight by itself."""

    values: torch.Tensor
    packed: QuantizedTensor | None
    module: Any


class TransformerEngineLinear(Float8Linear):
    """A Float8Linear computed by te.pytorch.Linear; see the module's text."""

    backend = "transformer_engine"

    def quantize(self) -> EngineWeight:
        import transformer_engine.pytorch as te

        module = te.Linear(
            self.in_features,
            self.out_features,
            bias=self.bias is not None,
            params_dtype=self.weight.dtype,
            device="meta",
        )
        module.weight = self.weight
        if self.bias is not None:
            module.bias = self.bias
        return EngineWeight(*super().quantize(), module)

    def multiply(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        import transformer_engine.pytorch as te

        source = round_bf16(self.weight) if self.precision.weight_source == "bf16" else self.weight
        bf16 = torch.autocast(x.device.type, dtype=torch.bfloat16)
        with bf16, te.autocast(enabled=True, recipe=block_scaling(self.precision)):
            y = torch.func.functional_call(self.quantized.module, {"weight": source}, (whole_blocks(x),))
        return y[: len(x)].float()


def block_scaling(precision: LinearPrecision) -> Any:
    """TE's Float8BlockScaling for what `precision` says; ValueError if its scales would be of another kind."""
    from transformer_engine.common.recipe import Float8BlockScaling, Format

    recipe = Float8BlockScaling(fp8_format=Format.HYBRID if precision.gradient == "e5m2" else Format.E4M3)
    found, wanted = recipe.fp8_quant_fwd_weight.power_2_scale, SCALE_RULES[precision.rule].pow2 is not None
    if found != wanted:
        raise ValueError(
            f"Transformer Engine was imported for {_kind(found)} scales and the plan's rule {precision.rule!r} means "
            f"{_kind(wanted)}; start a new process with {FP32_SCALES}={int(not wanted)}"
        )
    return recipe


def settle_environment(rule: str) -> None:
    """Make TE's environment variables agree with a plan's scale rule, before TE is imported.

    Raises ValueError if they are set and contradict it, or if TE's recipes were imported under another setting.
    """
    pow2 = SCALE_RULES[rule].pow2 is not None
    wanted = "0" if pow2 else "1"
    found = os.environ.get(FP32_SCALES)
    if found is not None and (found == "1") == pow2:
        raise ValueError(
            f"{FP32_SCALES}={found} gives {_kind(not pow2)} scales and the plan's rule {rule!r} means {_kind(pow2)}; "
            f"unset it or set it to {wanted}, or choose the plan's rule among {', '.join(RULES)}"
        )
    if os.environ.get(BACKWARD_OVERRIDE):
        raise ValueError(
            f"{BACKWARD_OVERRIDE}={os.environ[BACKWARD_OVERRIDE]} takes the quantization out of the backward GEMMs, "
            "which the plan asks for; unset it, or plan gradient='bf16' (backend='emulated')"
        )
    os.environ[FP32_SCALES] = wanted
    recipes = sys.modules.get("transformer_engine.common.recipe")
    if recipes is not None:
        block_scaling(LinearPrecision(rule=rule))


def refusal(precision: LinearPrecision, out_features: int, in_features: int) -> str | None:
    """Why Transformer Engine's block scaling cannot run an FP8 layer of this precision and shape; None if it can."""
    if (precision.weight, precision.activation) != ("e4m3", "e4m3") or precision.gradient == "bf16":
        formats = f"weight {precision.weight}, activation {precision.activation}, gradient {precision.gradient}"
        return f"operands are {formats}; allowed: e4m3, e4m3, and e4m3 or e5m2"
    if precision.rule not in RULES:
        return f"scale rule is {precision.rule!r}; allowed: {', '.join(RULES)}"
    if (precision.weight_block, precision.group) != ((BLOCK, BLOCK), BLOCK):
        blocks = f"{precision.weight_block[0]}x{precision.weight_block[1]} and 1x{precision.group}"
        return f"blocks are {blocks}; allowed: weights 128x128, activations and gradients 1x128"
    if in_features % BLOCK or out_features % BLOCK:
        return f"its weight is {out_features} x {in_features}; both must be multiples of 128"
    return None


def _kind(pow2: bool) -> str:
    return "power-of-two" if pow2 else "float32"
