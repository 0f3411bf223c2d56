"""Importance sampling between the two engines: weights for tokens that the *other* policy sampled.

The rollout engine draws tokens with log-probability g; the trainer, at the same weights, gives them t. An expectation
under the trainer's policy is one under the rollout's, reweighted by r = exp(t - g). The correction multiplies each
token's policy loss. R is the aggregate over a sequence's tokens: the product of r, or its geometric mean.

    mode          level     R          weight of a token              reference bounds
    none          token     -          1                              an ablation: biased towards the rollout engine
    is            token     -          r                              unbiased per token, unbounded (NeMo RL)
    tis           token     -          clamp(r, low, high)            0 .. 2 (Yao et al., 2025; NeMo RL)
    icepop        token     -          r in the band, else 0          0.5 .. 5 (Ring-1T, 2025; NeMo RL)
    seq-mask-tis  sequence  geometric  r if R in the band, else 0     0.999 .. 1.002 (NeMo RL; r is not truncated)
    sequence-tis  sequence  product    clamp(R, low, high)            0 .. 2 to 10 (verl's rollout_is "sequence")
    sequence-mask sequence  product    R in the band, else 0          0 .. 3 (TRL's vLLM default)
    geometric     sequence  geometric  R in the band, else 0          0 .. 5 (AReaL, action mask, aggregation mean)

The band is low <= . <= high, ends included. The product is the exact ratio of a whole sequence and its spread grows
with length; the geometric mean does not grow, and is biased. These names are not portable between frameworks: level,
aggregate and bounds differ. A rejected token has weight 0 and stays in the loss's denominator (as in NeMo RL, TRL and
AReaL): the update shrinks. verl and SkyRL drop it from the count, too: `mask` says which tokens are left, and
GRPOConfig.drop_rejected counts only these. Batch normalization of weights and one-token vetoes are left out.

Weights are always detached. The mask is applied before any exp; every exponent (d of a token, log R of a sequence) is
clamped to +-20 and counted; a token with a non-finite log-prob on either side gets weight 0, is left out of R, and is
counted.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fp8lab.checks import require_alike

TOKEN_MODES = ("none", "is", "tis", "icepop")
SEQUENCE_MODES = ("seq-mask-tis", "sequence-tis", "sequence-mask", "geometric")
MODES = (*TOKEN_MODES, *SEQUENCE_MODES)
WITHOUT_BOUNDS = ("none", "is")
"""Modes that ignore the bounds."""
NEED_A_MINIMUM = {"icepop": "0.5 .. 5", "seq-mask-tis": "0.999 .. 1.002"}
"""Modes whose lower bound must be above 0, as in NeMo RL, with its reference bounds."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Correction:
    """Weights (B, T) float32, detached, 0 outside the mask; and what they did."""

    weights: torch.Tensor
    statistics: dict[str, float]
    """Counts: `nonfinite_tokens`; `clamped_exponents`; outside [low, high], `oob_tokens` (tis, icepop) or
    `oob_sequences` of `sequences` with a usable token (modes of level sequence)."""

    @property
    def mask(self) -> torch.Tensor:
        """Tokens that still count (B, T) bool: in the mask that was given, finite, and not rejected."""
        return self.weights > 0


def check_bounds(mode: str, low: float, high: float) -> None:
    """ValueError for an unknown mode, for bounds that are not 0 <= low <= high with high > 0, and for a mode that needs
    a minimum and has none."""
    if mode not in MODES:
        raise ValueError(f"correction mode is {mode!r}; allowed: {', '.join(MODES)}")
    if not (0 <= low <= high and high > 0):
        raise ValueError(f"bounds are low={low}, high={high}; they must satisfy 0 <= low <= high and high > 0")
    if mode in NEED_A_MINIMUM and low == 0:
        raise ValueError(
            f"correction mode {mode!r} needs a lower bound above 0 (importance_sampling_min); "
            f"NeMo RL's reference bounds are {NEED_A_MINIMUM[mode]}"
        )


def weights(
    rollout_logprobs: torch.Tensor,
    trainer_logprobs: torch.Tensor,
    mask: torch.Tensor,
    *,
    mode: str = "tis",
    low: float = 0.0,
    high: float = 2.0,
) -> Correction:
    """Importance weights for tokens sampled by the rollout engine; all arguments (B, T), mask bool, a row a sequence.

    `none` and `is` ignore the bounds. ValueError as in `check_bounds`, and if the shapes differ.
    """
    check_bounds(mode, low, high)
    mask = require_alike(rollout_logprobs, trainer_logprobs, mask)
    rollout, trainer = rollout_logprobs.detach().float(), trainer_logprobs.detach().float()
    finite = rollout.isfinite() & trainer.isfinite()
    usable = mask & finite
    difference = torch.where(usable, trainer - rollout, 0.0)
    ratio = difference.clamp(-20, 20).exp()
    statistics = {"nonfinite_tokens": float((mask & ~finite).sum())}
    clamped = usable & (difference.abs() > 20)
    if mode in TOKEN_MODES:
        outside = (ratio < low) | (ratio > high)
        result = {
            "none": torch.ones_like(ratio),
            "is": ratio,
            "tis": ratio.clamp(low, high),
            "icepop": torch.where(outside, 0.0, ratio),
        }[mode]
        statistics["clamped_exponents"] = float(clamped.sum())
        if mode in ("tis", "icepop"):
            statistics["oob_tokens"] = float((usable & outside).sum())
        return Correction(weights=torch.where(usable, result, 0.0), statistics=statistics)
    log_ratio, counted = _log_sequence_ratio(
        rollout, trainer, usable, product=mode in ("sequence-tis", "sequence-mask")
    )
    sequence_ratio = log_ratio.clamp(-20, 20).exp()
    outside = (sequence_ratio < low) | (sequence_ratio > high)
    result = {
        "seq-mask-tis": torch.where(outside, 0.0, ratio),
        "sequence-tis": sequence_ratio.clamp(low, high),
        "sequence-mask": torch.where(outside, 0.0, sequence_ratio),
        "geometric": torch.where(outside, 0.0, sequence_ratio),
    }[mode]
    # Only seq-mask-tis exponentiates single tokens.
    tokens_clamped = clamped.sum() if mode == "seq-mask-tis" else 0
    statistics["clamped_exponents"] = float((log_ratio.abs() > 20).sum() + tokens_clamped)
    statistics["oob_sequences"] = float((counted & outside).sum())
    statistics["sequences"] = float(counted.sum())
    return Correction(weights=torch.where(usable, result.float(), 0.0), statistics=statistics)


def _log_sequence_ratio(rollout, trainer, usable, *, product: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum or mean of t - g over each row's usable tokens, (B, 1) float64 and 0 for none; rows with any, (B, 1) bool."""
    difference = torch.where(usable, trainer.double() - rollout.double(), 0.0)  # float32 could overflow to inf - inf
    total, count = difference.sum(1, keepdim=True), usable.sum(1, keepdim=True)
    return (total if product else total / count.clamp(min=1)), count > 0
