"""Scales of q, k and v, one per decoder layer, and the meter that says what they should be and whether they held.

    x ~ code * scale          an element above 448 * scale is clamped ("saturates")

Linear layers take their activations' scales from the values at hand. A KV cache cannot: what was written under one
scale is read for a whole generation, so vLLM and NeMo RL fix one scale per layer beforehand. If training makes the keys
grow, a scale that is not renewed clamps more of them with every step. `AttentionScales` is such a set, and it refuses
what must never pass silently: zero, negative, NaN, a layer too few. `AttentionMeter` counts what was clamped and
remembers the largest magnitudes, from which `calibration.py` makes the next set.

Left out: one scale per head (an open pull request in NeMo RL), scales for P (a constant, see attention.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from fp8lab.formats import E4M3

OPERANDS = ("query", "key", "value")
SATURATED, UNUSED = 1e-3, 0.1
"""Thresholds of `AttentionMeter.alarms`: a fresh scale clamps nothing and has 1 / margin of its range in use."""


@dataclass(frozen=True, kw_only=True)
class AttentionScales:
    """One dequantization multiplier per decoder layer for each operand: finite, > 0, rounded to float32."""

    query: tuple[float, ...]
    key: tuple[float, ...]
    value: tuple[float, ...]

    def __post_init__(self) -> None:
        for operand in OPERANDS:
            scales = tuple(torch.tensor(getattr(self, operand), dtype=torch.float32).tolist())
            object.__setattr__(self, operand, scales)
            for layer, scale in enumerate(scales):
                if not 0 < scale < math.inf:
                    raise ValueError(
                        f"the {operand} scale of layer {layer} is {scale}; a scale is finite and > 0: calibrate anew"
                    )
        if not self.key or len({len(getattr(self, operand)) for operand in OPERANDS}) > 1:
            found = ", ".join(f"{len(getattr(self, operand))} {operand}" for operand in OPERANDS)
            raise ValueError(f"found {found} scales; each operand needs one per decoder layer")

    @property
    def layers(self) -> int:
        """How many decoder layers they are for."""
        return len(self.key)

    @classmethod
    def ones(cls, layers: int) -> AttentionScales:
        """Scale 1.0 everywhere, what engines use when nobody gives them scales: an ablation."""
        return cls(query=(1.0,) * layers, key=(1.0,) * layers, value=(1.0,) * layers)

    def to_named(self) -> dict[str, float]:
        """Under the names NeMo RL sends to vLLM behind the weights: `model.layers.0.self_attn.attn.q_scale`, ..."""
        return {name: getattr(self, operand)[layer] for name, operand, layer in _names(self.layers)}

    @classmethod
    def from_named(cls, named: Mapping[str, float], layers: int, *, missing: str = "error") -> AttentionScales:
        """Read what `to_named` wrote; ValueError for a missing or unknown name.

        missing: `error`, or `one`, the silent 1.0 of NeMo RL and vLLM (an ablation).
        """
        if missing not in ("error", "one"):
            raise ValueError(f"missing is {missing!r}; allowed: error, one")
        wanted = list(_names(layers))
        if unknown := sorted(set(named) - {name for name, _, _ in wanted}):
            raise ValueError(f"unknown scale {unknown[0]!r}; a model of {layers} layers has {wanted[0][0]!r} and so on")
        absent = [name for name, _, _ in wanted if name not in named]
        if absent and missing == "error":
            raise ValueError(f"{len(absent)} scales are missing, {absent[0]!r} first: calibrate, or pass missing='one'")
        values = {operand: [1.0] * layers for operand in OPERANDS}
        for name, operand, layer in wanted:
            values[operand][layer] = float(named.get(name, 1.0))
        return cls(**{operand: tuple(scales) for operand, scales in values.items()})

    def to_dict(self) -> dict[str, list[float]]:
        """Lists for JSON, from which AttentionScales(**lists) is the same again, bit for bit."""
        return {operand: list(getattr(self, operand)) for operand in OPERANDS}


def _names(layers: int) -> Iterator[tuple[str, str, int]]:
    for layer in range(layers):
        for operand, suffix in zip(OPERANDS, ("attn.q_scale", "k_scale", "v_scale"), strict=True):
            yield f"model.layers.{layer}.self_attn.{suffix}", operand, layer


class AttentionMeter:
    """What passed through a model's attention: per operand (rows, as in OPERANDS) and layer (columns), the largest
    magnitude, and how many of how many elements were clamped."""

    amax: torch.Tensor
    clamped: torch.Tensor
    elements: torch.Tensor

    def __init__(self, layers: int) -> None:
        self.layers = layers
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.amax = torch.zeros(len(OPERANDS), self.layers)
        self.clamped, self.elements = (torch.zeros(len(OPERANDS), self.layers, dtype=torch.long) for _ in range(2))

    def record(
        self, layer: int, operand: str, x: torch.Tensor, real: torch.Tensor | None = None, scale: float | None = None
    ) -> None:
        """Take in x (B, H, T, D). real: (B or 1, T) bool, the tokens that count; scale: what x is divided by."""
        x = x.detach()
        if real is not None and not bool(real.all()):
            x = x.transpose(1, 2)[real.expand(x.shape[0], -1)]
        if x.numel() == 0:
            return
        row = OPERANDS.index(operand)
        low, high = torch.aminmax(x)
        amax = torch.maximum(-low, high).float().cpu()  # NaN stays NaN
        self.amax[row, layer] = torch.maximum(self.amax[row, layer], amax)
        self.elements[row, layer] += x.numel()
        if scale is not None and amax > E4M3.max * scale:
            self.clamped[row, layer] += (x.abs() > E4M3.max * scale).sum().cpu()

    def saturation(self) -> dict[str, list[float]]:
        """Share of clamped elements per operand and layer; 0 where nothing passed."""
        share = self.clamped / self.elements.clamp(min=1)
        return {operand: share[row].tolist() for row, operand in enumerate(OPERANDS)}

    def alarms(self, scales: AttentionScales) -> list[str]:
        """What speaks against these scales, a sentence per operand and layer: more than SATURATED of the elements were
        clamped, or the largest used less than UNUSED of the range. Both say: stale, of another layer, or never
        calibrated."""
        found = []
        for row, operand in enumerate(OPERANDS):
            for layer, scale in enumerate(getattr(scales, operand)):
                amax, seen = self.amax[row, layer].item(), self.elements[row, layer].item()
                share = self.clamped[row, layer].item() / max(1, seen)
                where = f"the {operand} scale of layer {layer}, {scale:.3g},"
                if share > SATURATED:
                    found.append(f"{where} clamped {share:.2%} of the values (largest {amax:.3g}): calibrate anew")
                elif 0 < amax < UNUSED * E4M3.max * scale:
                    spare = E4M3.max * scale / amax
                    found.append(f"{where} is {spare:.0f} times what the values need: calibrate, or is 1.0 meant?")
        return found
