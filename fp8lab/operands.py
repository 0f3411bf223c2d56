"""What is rounded, and how: the operands of one linear layer, and those of attention and the KV cache.

A linear has three operands, weight, activation and gradient, and three GEMMs that take two of them each (linear.py).
The recipe: E4M3 for all three, weights in 128x128 blocks, activations and gradients in 1x128, float32 scales. Attention
has its own: keys and values as they are stored, queries as they enter QK^T, softmax weights as they enter PV.

Which layers a precision applies to, and on which side, is a plan's business: precision.py.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from fp8lab.checks import require_choice
from fp8lab.quantizers import BlockQuantizer
from fp8lab.scales import SCALE_RULES

FP8 = ("e4m3", "e5m2")


@dataclass(frozen=True, kw_only=True)
class LinearPrecision:
    """Formats of one linear layer's operands: `e4m3`, `e5m2` or `bf16` each."""

    weight: str = "e4m3"
    activation: str = "e4m3"
    gradient: str = "e4m3"
    """Format of grad_output in the two backward GEMMs."""
    rule: str = "default"
    """Scale rule of all three (see scales.SCALE_RULES)."""
    weight_block: tuple[int, int] = (128, 128)
    group: int = 128
    """Activations and gradients are quantized in 1 x group blocks."""
    weight_source: str = "bf16"
    """`bf16`: the float32 master weight is rounded to BF16 before it is quantized, as NeMo RL does; `fp32`: it is
    not."""
    output: str = "bf16"
    """Rounding of the result and of grad_input: `bf16`, or `float32` for lm_head's logits."""

    def __post_init__(self) -> None:
        for name in ("weight", "activation", "gradient"):
            require_choice(name, getattr(self, name), (*FP8, "bf16"))
        require_choice("rule", self.rule, tuple(SCALE_RULES))
        require_choice("weight_source", self.weight_source, ("bf16", "fp32"))
        require_choice("output", self.output, ("bf16", "float32"))
        for block in (self.weight_block, (1, self.group)):
            BlockQuantizer(block)  # ValueError for bad sizes

    @property
    def is_fp8(self) -> bool:
        """True if any operand is FP8."""
        return any(operand in FP8 for operand in (self.weight, self.activation, self.gradient))

    def __str__(self) -> str:
        if not self.is_fp8:
            return "bf16"
        rule = "" if self.rule == "default" else f" {self.rule}"
        rule += "" if self.gradient == "e4m3" else f" grad {self.gradient}"
        return f"{self.weight}[{self.weight_block[0]}x{self.weight_block[1]}] x {self.activation}[1x{self.group}]{rule}"


BF16_LINEAR = LinearPrecision(weight="bf16", activation="bf16", gradient="bf16")
BF16_HEAD = dataclasses.replace(BF16_LINEAR, output="float32")


@dataclass(frozen=True, kw_only=True)
class AttentionPrecision:
    """Formats of attention and of the KV cache on one side: `e4m3` or `bf16` each. In BF16 they are not rounded at all:
    float32, as norms and softmax are."""

    kv_cache: str = "bf16"
    """Storage of keys and values, after RoPE and q/k-norm."""
    query: str = "bf16"
    """Queries, as they enter QK^T."""
    probabilities: str = "bf16"
    """Softmax weights as they enter PV; scaled by 256 before they are rounded."""
    scales: str = "per-layer"
    """`per-layer`: one calibrated scale each for q, k and v (NeMo RL); `per-token-head`: dynamic, no calibration
    (vLLM)."""
    calibration: str = "max"
    """How per-layer scales are taken from real tokens: `max`, or `nemo_rl`, P99.9 of the maxima of micro-batches."""
    margin: float = 1.05
    """Factor on the calibrated amax."""

    def __post_init__(self) -> None:
        for name in ("kv_cache", "query", "probabilities"):
            require_choice(name, getattr(self, name), ("e4m3", "bf16"))
        require_choice("scales", self.scales, ("per-layer", "per-token-head"))
        require_choice("calibration", self.calibration, ("max", "nemo_rl"))
        if type(self.margin) not in (int, float) or not 1 <= self.margin < float("inf"):
            raise ValueError(f"margin is {self.margin!r}; it must be a finite number >= 1")
        if self.scales == "per-token-head" and self.probabilities == "e4m3":
            raise ValueError(
                "probabilities is e4m3 with per-token-head scales of v, which multiply P; use probabilities='bf16', as "
                "vLLM does there"
            )
        if self.kv_cache == "bf16" and (self.query, self.probabilities) != ("bf16", "bf16"):
            raise ValueError(
                f"query is {self.query} and probabilities are {self.probabilities} over a bf16 KV cache; FP8 attention "
                "needs kv_cache='e4m3'"
            )

    @property
    def is_fp8(self) -> bool:
        """True if keys and values are stored in FP8."""
        return self.kv_cache in FP8

    def __str__(self) -> str:
        if not self.is_fp8:
            return "bf16 KV"
        fp8 = [name for name, fmt in (("q", self.query), ("P", self.probabilities)) if fmt in FP8]
        return f"e4m3 KV{''.join('+' + name for name in fp8)} {self.scales}"


FP8_ATTENTION = AttentionPrecision(kv_cache="e4m3", query="e4m3", probabilities="e4m3")
