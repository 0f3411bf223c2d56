"""The gap between the engines seen three more ways: verl's metrics, whole sequences, and published healthy bands.

`diagnostics.py` has NeMo RL's token metrics, which every training step logs. Here, on the same g (rollout), t
(trainer), d = t - g and r = exp(d):

    sequence_report   verl's off-policy set (verl/trainer/ppo/rollout_corr_helper.py, compute_offpolicy_metrics) and
                      NeMo RL's per-sequence errors
    ratio_histogram   how the raw ratios are spread, before any truncation
    by_position       whether the gap grows along the completion
    verdict           values against the bands that projects publish, which do not agree with each other

Sums run in float64 over masked-in tokens with finite log-probs on both sides; the others are counted. A sequence is a
row with at least one usable token. Padding, and anything outside the mask, never matters. exp() is taken with the
exponent clamped to +-20 (verl clamps only chi2_seq), so every number is finite.

The worked example in the docstrings is two sequences: one with probabilities (1/4, 1/2) in the rollout and (1/2, 1/4)
in the trainer, and one with a single token, 1/2 in the rollout and 1/4 in the trainer. So r = 2, 1/2 and 1/2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from fp8lab.checks import require_alike
from fp8lab.diagnostics import MismatchReport, clamped_exp, k3


@dataclass(frozen=True, kw_only=True)
class SequenceReport:
    """verl's metrics and per-sequence errors. Numbers in brackets: the module's worked example."""

    kl: float
    """KL(rollout || trainer) by k1, mean g - t over tokens; may be negative. verl. [log(2)/3 = 0.231]"""
    k3_kl: float
    """The same by k3, mean r - 1 - d >= 0; equals NeMo RL's gen_kl_error. verl. [1/3 * (3 - 3 + log 2) = 0.231]"""
    training_ppl: float
    """Mean over sequences of exp(-mean t). verl. [(8^(1/2) + 4) / 2 = 3.414]"""
    rollout_ppl: float
    """Mean over sequences of exp(-mean g). verl. [(8^(1/2) + 2) / 2 = 2.414]"""
    log_ppl_diff: float
    """Mean over sequences of D = mean g - mean t; positive: the trainer is less sure. verl. [(0 + log 2) / 2]"""
    log_ppl_abs_diff: float
    """Mean over sequences of |D|. verl. [log(2)/2]"""
    log_ppl_diff_max: float
    """Largest D. verl. [log 2]"""
    log_ppl_diff_min: float
    """Smallest D. verl. [0]"""
    ppl_ratio: float
    """Mean over sequences of exp(D), the trainer's perplexity over the rollout's. verl. [(1 + 2) / 2 = 1.5]"""
    chi2_token: float
    """Mean r^2 - 1 over tokens, which estimates chi^2(trainer || rollout). verl. [(4 + 1/4 + 1/4) / 3 - 1 = 0.5]"""
    chi2_seq: float
    """Mean over sequences of R^2 - 1, R the product of r. verl. [(1 + 1/4) / 2 - 1 = -0.375; few samples]"""
    effective_sample_size: float
    """Of the weights given, or of raw r: (sum w)^2 / (n sum w^2), a fraction of the tokens. verl's
    rollout_is_eff_sample_size. [3^2 / (3 * 4.5) = 0.667]"""
    max_seq_mult_prob_error: float
    """Largest, over sequences, of mean exp(|d|). NeMo RL. [2]"""
    mean_seq_mult_prob_error: float
    """Mean over sequences of the same. NeMo RL. [2]"""
    min_seq_mult_prob_error: float
    """Smallest of the same. NeMo RL. [2]"""
    sequences: int
    """Rows with a usable token. [2]"""
    tokens: int
    """Tokens compared. [3]"""
    nonfinite_tokens: int
    """Masked-in tokens left out because a log-prob was not finite. [0]"""
    clamped_exponents: int
    """Tokens with |d| > 20 and sequences with |sum d| > 20. [0]"""

    def as_dict(self) -> dict[str, float]:
        """The fields by name."""
        return dict(self.__dict__)


def sequence_report(
    rollout_logprobs: torch.Tensor,
    trainer_logprobs: torch.Tensor,
    mask: torch.Tensor,
    weights: torch.Tensor | None = None,
) -> SequenceReport:
    """verl's metrics of log-probs of the same tokens under both engines; all (B, T), mask bool.

    weights: those of a `corrections.Correction`, for the effective sample size. With no usable token the values are
    those of equal engines. ValueError if the shapes differ.
    """
    g, t, usable, nonfinite = _aligned(rollout_logprobs, trainer_logprobs, mask)
    d, count = t - g, usable.sum(1)
    rows, tokens = count > 0, int(count.sum())
    per_row = count[rows].double()
    sums = d.sum(1)[rows]
    mean_g, mean_t = g.sum(1)[rows] / per_row, t.sum(1)[rows] / per_row
    gap = -sums / per_row
    error = torch.where(usable, clamped_exp(d.abs()), 0.0).sum(1)[rows] / per_row
    if weights is not None and weights.shape != usable.shape:
        raise ValueError(f"weights have shape {tuple(weights.shape)}, the mask {tuple(usable.shape)}; they must agree")
    d = d[usable]

    def mean(x: torch.Tensor, empty: float = 0.0) -> float:
        return x.mean().item() if len(x) else empty

    return SequenceReport(
        kl=mean(-d),
        k3_kl=mean(k3(d)),
        training_ppl=mean(clamped_exp(-mean_t), 1.0),
        rollout_ppl=mean(clamped_exp(-mean_g), 1.0),
        log_ppl_diff=mean(gap),
        log_ppl_abs_diff=mean(gap.abs()),
        log_ppl_diff_max=gap.max().item() if len(gap) else 0.0,
        log_ppl_diff_min=gap.min().item() if len(gap) else 0.0,
        ppl_ratio=mean(clamped_exp(gap), 1.0),
        chi2_token=mean(clamped_exp(d).square() - 1),
        chi2_seq=mean(clamped_exp(sums).square() - 1),
        effective_sample_size=effective_sample_size(clamped_exp(d) if weights is None else weights[usable]),
        max_seq_mult_prob_error=error.max().item() if len(error) else 1.0,
        mean_seq_mult_prob_error=mean(error, 1.0),
        min_seq_mult_prob_error=error.min().item() if len(error) else 1.0,
        sequences=len(per_row),
        tokens=tokens,
        nonfinite_tokens=nonfinite,
        clamped_exponents=int((d.abs() > 20).sum() + (sums.abs() > 20).sum()),
    )


def effective_sample_size(weights: torch.Tensor) -> float:
    """(sum w)^2 / (n sum w^2) of n weights >= 0 of any shape: the fraction of samples that equal weights would need.

    [1, 1, 2, 0.5] gives 4.5^2 / (4 * 6.25) = 0.81. No weights give 1, only zeros 0. Source: Kish, 1965; verl reports
    it as rollout_is_eff_sample_size. ValueError for a weight that is negative or not finite.
    """
    w = weights.detach().double().flatten()
    if not bool((w.isfinite() & (w >= 0)).all()):
        raise ValueError("weights must be finite and >= 0")
    if not len(w):
        return 1.0
    square = len(w) * w.square().sum().item()
    return w.sum().item() ** 2 / square if square else 0.0


@dataclass(frozen=True, kw_only=True)
class RatioHistogram:
    """Counts of r in the bins [edges[i], edges[i + 1]), the last one closed."""

    edges: tuple[float, ...]
    counts: tuple[int, ...]
    below: int
    """r < edges[0]."""
    above: int
    """r > edges[-1]."""
    nonfinite_tokens: int


def ratio_histogram(
    rollout_logprobs: torch.Tensor,
    trainer_logprobs: torch.Tensor,
    mask: torch.Tensor,
    bins: int | Sequence[float] = 40,
) -> RatioHistogram:
    """Histogram of the raw r = exp(t - g), before any truncation (TRL logs only truncated ones: its issue #5231).

    bins: increasing edges of r, or a number of bins equally wide in log r from 1/4 to 4. The worked example with edges
    (0, 1, 3) has counts (2, 1). ValueError for edges that do not increase, or shapes that differ.
    """
    if isinstance(bins, int):
        if bins < 1:
            raise ValueError(f"bins is {bins}; it must be at least 1")
        edges = [4.0 ** (2 * i / bins - 1) for i in range(bins + 1)]
    else:
        edges = [float(edge) for edge in bins]
    if len(edges) < 2 or not all(a < b for a, b in zip(edges, edges[1:], strict=False)):
        raise ValueError(f"bins are {edges}; they must be at least two increasing edges")
    g, t, usable, nonfinite = _aligned(rollout_logprobs, trainer_logprobs, mask)
    ratio = clamped_exp((t - g)[usable])
    inside = ratio[(ratio >= edges[0]) & (ratio <= edges[-1])]
    places = torch.bucketize(inside, torch.tensor(edges, dtype=torch.float64), right=True) - 1
    counts = torch.bincount(places.clamp(max=len(edges) - 2), minlength=len(edges) - 1)
    return RatioHistogram(
        edges=tuple(edges),
        counts=tuple(counts.tolist()),
        below=int((ratio < edges[0]).sum()),
        above=int((ratio > edges[-1]).sum()),
        nonfinite_tokens=nonfinite,
    )


def by_position(
    rollout_logprobs: torch.Tensor,
    trainer_logprobs: torch.Tensor,
    mask: torch.Tensor,
    prompt_lengths: torch.Tensor,
) -> dict[str, list[float]]:
    """Token metrics at each place of the completion; columns of equal length, one row a place that has a usable token.

    `position` is 0 for the first token after the prompt; prompt_lengths (B,) is the column where a completion starts.
    `tokens`, `nonfinite_tokens`; `token_mult_prob_error`, `k3_kl` and `mean_abs_difference` as in the reports. The
    worked example has tokens [2, 1] and token_mult_prob_error [2, 2]. ValueError for a masked-in prompt token.
    """
    g, t, usable, _ = _aligned(rollout_logprobs, trainer_logprobs, mask)
    position = torch.arange(g.shape[1]) - prompt_lengths.view(-1, 1)
    if bool((mask.bool() & (position < 0)).any()):
        raise ValueError("the mask has tokens inside the prompt; it must hold completion tokens only")
    size, place = g.shape[1], position[usable]
    count = torch.bincount(place, minlength=size)
    bad = torch.bincount(position[mask.bool() & ~usable], minlength=size)
    d, there = (t - g)[usable], count > 0

    def mean(x: torch.Tensor) -> list[float]:
        return (torch.bincount(place, weights=x, minlength=size)[there] / count[there]).tolist()

    return {
        "position": there.nonzero().flatten().tolist(),
        "tokens": count[there].tolist(),
        "nonfinite_tokens": bad[there].tolist(),
        "token_mult_prob_error": mean(clamped_exp(d.abs())),
        "k3_kl": mean(k3(d)),
        "mean_abs_difference": mean(d.abs()),
    }


def one_token_sequences(
    rollout_logprobs: torch.Tensor, trainer_logprobs: torch.Tensor, mask: torch.Tensor, bound: float = 2.0
) -> float:
    """Share of sequences whose product ratio R leaves [1/bound, bound] and that hang on one token: its d^2 is more than
    the d^2 of all others together.

    Of sequences of two or more tokens; 0 if there are none. Squares, because d of many tokens add up like a random
    walk: a thousand tokens that leave the band together hang on none of them. d = (0.1, 0.9, -0.1) counts, R = e^0.9;
    (0.4, 0.4, 0.4) does not, though R = e^1.2.
    """
    g, t, usable, _ = _aligned(rollout_logprobs, trainer_logprobs, mask)
    d = (t - g)[usable.sum(1) > 1]
    if not len(d):
        return 0.0
    squares, limit = d.square(), torch.tensor(bound, dtype=torch.float64).log()
    return ((d.sum(1).abs() > limit) & (2 * squares.amax(1) > squares.sum(1))).double().mean().item()


def rejection_length_correlation(weights: torch.Tensor, mask: torch.Tensor) -> float:
    """Pearson correlation, over sequences, of "all weights are 0" with the number of tokens; 0 if either is constant.

    weights (B, T) of a `corrections.Correction`, mask (B, T). A filter on products of ratios, whose spread grows with
    the square root of the length, rejects long sequences for being long. Lengths (1, 1, 9) with the last one rejected
    give 1.
    """
    count = mask.sum(1)
    rejected = (torch.where(mask, weights, 0.0).abs().sum(1) == 0)[count > 0].double()
    count = count[count > 0].double()
    if len(count) < 2 or rejected.min() == rejected.max() or count.min() == count.max():
        return 0.0
    return torch.corrcoef(torch.stack([rejected, count]))[0, 1].item()


def interval_over_sequences(
    values: torch.Tensor, mask: torch.Tensor, *, resamples: int = 1000, seed: int = 0
) -> tuple[float, float, float]:
    """(mean, low, high): the mean of values (B, T) over masked-in tokens, with its 95 % percentile-bootstrap interval.

    Whole rows are drawn, since tokens of one sequence are not independent. Values that are not finite are left out. The
    values [[1, 3], [2, -]] have mean 2; with no usable token all three are 0, and with one row they are equal.
    """
    usable = mask.bool() & values.isfinite()
    count = usable.sum(1)
    rows = count > 0
    if not bool(rows.any()):
        return 0.0, 0.0, 0.0
    total, count = torch.where(usable, values.double(), 0.0).sum(1)[rows], count[rows].double()
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(len(count), (resamples, len(count)), generator=generator)
    means = (total[drawn].sum(1) / count[drawn].sum(1)).sort().values
    low, high = means[int(0.025 * (resamples - 1))], means[int(0.975 * (resamples - 1))]
    return (total.sum() / count.sum()).item(), low.item(), high.item()


class Verdict(NamedTuple):
    """One published band and what the report says."""

    band: str
    """The metric, and what the band means in words."""
    source: str
    limit: float
    value: float
    ok: bool
    """|value| is not above the limit."""


NEMO_GUIDE, NEMO_TP = "NeMo RL docs/guides/grpo.md", "NeMo RL docs/guides/dtensor-tp-accuracy.md"
PRIME_RL, TINKER, SLIME = "prime-rl PR #3424", "tinker-cookbook, kl_sample_train", "slime PR #1968"
BANDS = (
    ("token_mult_prob_error", "within 2 %; a trend beyond 1-2 % hints at the weight update", NEMO_GUIDE, 1.02),
    ("token_mult_prob_error", "above 1.05 needs investigation", NEMO_TP, 1.05),
    ("gen_kl_error", "acceptable below 1e-3", NEMO_GUIDE, 1e-3),
    ("policy_kl_error", "acceptable below 1e-3", NEMO_GUIDE, 1e-3),
    ("js_divergence_error", "acceptable below 1e-3", NEMO_GUIDE, 1e-3),
    ("gen_kl_error", "k3 below 0.015 on average over 20 steps", PRIME_RL, 0.015),
    ("k3_kl", "k3 below 0.015 on average over 20 steps", PRIME_RL, 0.015),
    ("kl", "healthy below 0.01", TINKER, 0.01),
    ("mean_abs_difference", "continuous integration fails above 0.1", SLIME, 0.1),
)
"""(metric, words, source, limit). They conflict: a gap may be fine for one project and alarming for the next."""


def verdict(report: MismatchReport | SequenceReport) -> list[Verdict]:
    """Hold a report's values against every published band (BANDS) that speaks of one of its metrics.

    Nothing is said (an empty list) about a report without tokens. A token_mult_prob_error of 1.03 fails NeMo RL's 2 %
    and passes its 1.05.
    """
    values = report.as_dict()
    if not values["tokens"]:
        return []
    return [
        Verdict(f"{name}: {words}", source, limit, values[name], abs(values[name]) <= limit)
        for name, words, source, limit in BANDS
        if name in values
    ]


def _aligned(rollout_logprobs, trainer_logprobs, mask) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """g and t (B, T) float64 with 0 where not usable, usable (B, T) bool, and the number of non-finite tokens."""
    mask = require_alike(rollout_logprobs, trainer_logprobs, mask)
    usable = mask & rollout_logprobs.isfinite() & trainer_logprobs.isfinite()
    g, t = (torch.where(usable, x.detach().double(), 0.0) for x in (rollout_logprobs, trainer_logprobs))
    return g, t, usable, int((mask & ~usable).sum())
