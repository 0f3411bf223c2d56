"""What a rollout is, and what an engine must do.

A `Rollout` lays every sequence out as prompt + completion + padding, from the left, which is what the trainer scores:

    tokens    [ p p p c c E . . ]     p prompt, c completion, E end of sequence, . padding
    mask      [ 0 0 0 1 1 1 0 0 ]     the tokens the policy chose, and the only ones that are learned from
    logprobs  [ 0 0 0 g g g 0 0 ]     g: log-probability the engine gave the token when it drew it
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from fp8lab.rollout.sampling import SamplingParams


@dataclass(frozen=True, kw_only=True, eq=False)
class Rollout:
    """B = prompts x n sampled sequences of at most T tokens; the n completions of one prompt are neighbours."""

    tokens: torch.Tensor
    """(B, T) int64, padded on the right."""
    logprobs: torch.Tensor
    """(B, T) float32, 0 outside the mask; of the distribution that was sampled from unless sampling says
    `raw_logprobs`."""
    mask: torch.Tensor
    """(B, T) bool: True on completion tokens, end-of-sequence token included."""
    prompt_lengths: torch.Tensor
    """(B,) int64."""
    lengths: torch.Tensor
    """(B,) int64: tokens of prompt and completion together."""
    finished: torch.Tensor
    """(B,) bool: the completion ended by itself; False means it was cut at max_tokens or at the context limit."""
    completions: tuple[str, ...]
    """Decoded completions without special tokens."""
    sampling: SamplingParams

    def __post_init__(self) -> None:
        if self.tokens.shape != self.logprobs.shape or self.tokens.shape != self.mask.shape:
            raise ValueError(
                f"tokens {tuple(self.tokens.shape)}, logprobs {tuple(self.logprobs.shape)} and mask "
                f"{tuple(self.mask.shape)} must have one shape (B, T)"
            )


class RolloutEngine(Protocol):
    """What the loop asks of an engine."""

    def generate(
        self, prompts: Sequence[str] | Sequence[Sequence[int]], sampling: SamplingParams, *, seed: int
    ) -> Rollout:
        """Sample `sampling.n` completions for each prompt; the same seed and weights give the same rollout."""

    def refit(self, weights: Mapping[str, torch.Tensor] | Any) -> None:
        """Take new weights (a trainer, or named float32 tensors), requantize them, and drop everything cached."""
