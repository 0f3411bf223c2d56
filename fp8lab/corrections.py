"""Importance sampling between the two engines: weights for tokens that the *other* policy sampled.

The rollout engine draws tokens with log-probability g; the trainer, at the same weights, gives them t. An expectation
under the trainer's policy is one under the rollout's, reweighted by r = exp(t - g). The correction multiplies each
token's policy loss:

    none      1                      biased towards what the rollout engine prefers; an ablation for FP8 rollout
    is        r                      unbiased per token, unbounded (NeMo RL's use_importance_sampling_correction)
    tis       clamp(r, low, high)    truncated: a little bias for bounded variance (Yao et al., 2025); NeMo RL's `tis`
    icepop    r if low <= r <= high else 0      a token outside the band is left out (IcePop, Ring-1T, 2025)

All four work on tokens. Weights are always detached. The mask is applied before any exp; the exponent is clamped to
+-20 and counted; a token with a non-finite log-prob on either side gets weight 0 and is counted. Left out:
sequence-level and geometric variants.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

MODES = ("none", "is", "tis", "icepop")


@dataclass(frozen=True, kw_only=True, eq=False)
class Correction:
    """Weights (B, T) float32, detached, 0 outside the mask; and what they did."""

    weights: torch.Tensor
    statistics: dict[str, float]
    """Tokens counted: `oob_tokens` outside [low, high] (tis and icepop only), `nonfinite_tokens`,
    `clamped_exponents`."""


def weights(
    rollout_logprobs: torch.Tensor,
    trainer_logprobs: torch.Tensor,
    mask: torch.Tensor,
    *,
    mode: str = "tis",
    low: float = 0.0,
    high: float = 2.0,
) -> Correction:
    """Importance weights for tokens sampled by the rollout engine; all arguments (B, T), mask bool.

    ValueError for an unknown mode or bounds that are not 0 <= low <= high.
    """
    if mode not in MODES:
        raise ValueError(f"correction mode is {mode!r}; allowed: {', '.join(MODES)}")
    if not 0 <= low <= high:
        raise ValueError(f"bounds are low={low}, high={high}; they must satisfy 0 <= low <= high")
    rollout, trainer = rollout_logprobs.detach().float(), trainer_logprobs.detach().float()
    finite = rollout.isfinite() & trainer.isfinite()
    usable = mask & finite
    difference = torch.where(usable, trainer - rollout, 0.0)
    ratio = difference.clamp(-20, 20).exp()
    outside = (ratio < low) | (ratio > high)
    result = {
        "none": torch.ones_like(ratio),
        "is": ratio,
        "tis": ratio.clamp(low, high),
        "icepop": torch.where(outside, 0.0, ratio),
    }[mode]
    statistics = {
        "nonfinite_tokens": float((mask & ~finite).sum()),
        "clamped_exponents": float((usable & (difference.abs() > 20)).sum()),
    }
    if mode in ("tis", "icepop"):
        statistics["oob_tokens"] = float((usable & outside).sum())
    return Correction(weights=torch.where(usable, result, 0.0), statistics=statistics)
