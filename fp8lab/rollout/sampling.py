"""From logits to a token: temperature, top-k, top-p, and the log-probability of what was drawn.

The names are vLLM's. The log-probability returned is that of the *processed* distribution, the one really sampled from:
after temperature and truncation. The trainer must score under the same distribution; with top-p or top-k it cannot see
which tokens were cut, and its ratio to the rollout is biased by the kept mass, so RL samples with temperature alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

LOWEST_TEMPERATURE = 0.01


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How completions are drawn."""

    n: int = 1
    """Completions per prompt."""
    temperature: float = 1.0
    """Logits are divided by it, 0.01 or more; 0 takes the most likely token (log-probabilities are then those at
    temperature 1)."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probability reaches top_p; 1 keeps all."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    max_tokens: int = 16
    """Longest completion, end-of-sequence token included."""
    raw_logprobs: bool = False
    """Report log-probabilities of the unprocessed logits instead."""

    def __post_init__(self) -> None:
        for name, low in (("n", 1), ("max_tokens", 1), ("top_k", 0)):
            value = getattr(self, name)
            if type(value) is not int or value < low:
                raise ValueError(f"{name} is {value!r}; it must be an integer >= {low}")
        if not (self.temperature == 0 or LOWEST_TEMPERATURE <= self.temperature < float("inf")):
            raise ValueError(
                f"temperature is {self.temperature}; it must be 0 (greedy), or finite and >= {LOWEST_TEMPERATURE}, "
                "which is what vLLM raises a smaller one to"
            )
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; it must be in (0, 1]")

    @property
    def truncates(self) -> bool:
        """True if top-k or top-p removes tokens from the distribution."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0)

    @property
    def mixed(self) -> str:
        """Why these log-probs cannot be held against a trainer's, which divides logits by the temperature and cuts no
        token; empty if they can."""
        if self.raw_logprobs and self.temperature not in (0, 1):
            return (
                f"raw_logprobs=True at temperature {self.temperature}: the rollout reports temperature 1, the trainer "
                "scores the one sampled at; set raw_logprobs=False"
            )
        if self.truncates and not self.raw_logprobs:
            return (
                f"top_p={self.top_p}, top_k={self.top_k}: the rollout's log-probs are of the tokens left, the "
                "trainer's of all, so each ratio is the mass that was kept; sample with temperature alone"
            )
        return ""


def processed_logprobs(logits: torch.Tensor, sampling: SamplingParams) -> torch.Tensor:
    """Log-probabilities (B, V) float32 of the distribution that is sampled from; -inf for removed tokens.

    logits: (B, V). The most likely token is always kept; of equal logits at the top-k border all are.
    """
    logits = logits.float()
    if sampling.temperature not in (0, 1):
        logits = logits / sampling.temperature
    if not sampling.truncates:
        return logits.log_softmax(dim=-1)
    if 0 < sampling.top_k < logits.shape[-1]:
        border = logits.topk(sampling.top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < border, float("-inf"))
    if sampling.top_p < 1:
        ordered, index = logits.sort(dim=-1, descending=True)
        probability = ordered.softmax(dim=-1)
        before = probability.cumsum(dim=-1) - probability  # mass of the more likely tokens
        cut = torch.zeros_like(logits, dtype=torch.bool).scatter(1, index, before >= sampling.top_p)
        logits = logits.masked_fill(cut, float("-inf"))
    return logits.log_softmax(dim=-1)


def draw(
    logits: torch.Tensor, uniform: torch.Tensor, sampling: SamplingParams, rows: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token per sequence by inverting the cumulative distribution at `uniform`.

    logits: (R, V); rows: (B,), the row of logits that each sequence draws from (default: each its own); uniform: (B,)
    float64 in [0, 1), one random number per sequence, so that a sequence's tokens do not depend on which others share
    its batch. Returns tokens (B,) int64 and their log-probabilities (B,) float32. ValueError for logits that are no
    distribution: a NaN, plus infinity, or minus infinity alone.
    """
    rows = torch.arange(len(logits)) if rows is None else rows
    logprobs = processed_logprobs(logits, sampling)
    if math.isnan(logprobs[:, 0].sum().item()):  # log_softmax makes all of such a row NaN
        bad = logprobs[:, 0].isnan().nonzero().flatten().tolist()
        raise ValueError(
            f"{len(bad)} of {len(logits)} rows of logits are no distribution (first: row {bad[0]}): they hold NaN or "
            "plus infinity, or nothing finite. Weights or FP8 scales made them: look at the last update"
        )
    if sampling.temperature == 0:
        tokens = logprobs.argmax(dim=-1)[rows]
    else:
        cumulative = logprobs.exp().cumsum(dim=-1, dtype=torch.float64).index_select(0, rows)
        target = uniform[:, None] * cumulative[:, -1:]
        tokens = torch.searchsorted(cumulative, target, right=True).squeeze(1)
    if sampling.raw_logprobs:
        logprobs = logits.float().log_softmax(dim=-1)
    return tokens, logprobs[rows, tokens]
