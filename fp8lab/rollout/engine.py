"""What a rollout is, and what an engine must do.

A `Rollout` lays every sequence out as prompt + completion + padding, from the left, which is what the trainer scores:

    tokens    [ p p p c c E . . ]     p prompt, c completion, E end of sequence, . padding
    mask      [ 0 0 0 1 1 1 0 0 ]     the tokens the policy chose, and the only ones that are learned from
    logprobs  [ 0 0 0 g g g 0 0 ]     g: log-probability the engine gave the token when it drew it
"""

from __future__ import annotations

import dataclasses
import hashlib
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

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
    routes: torch.Tensor | None = None
    """(B, T, layers, k) int16: the experts each token took, -1 where not recorded (see routing.py); the trainer replays
    them. `with_routes` puts them here."""
    route_checksums: torch.Tensor | None = None
    """(B,) int64: `row_checksums` of tokens and routes, without which the routes are not replayed."""

    def __post_init__(self) -> None:
        if self.tokens.shape != self.logprobs.shape or self.tokens.shape != self.mask.shape:
            raise ValueError(
                f"tokens {tuple(self.tokens.shape)}, logprobs {tuple(self.logprobs.shape)} and mask "
                f"{tuple(self.mask.shape)} must have one shape (B, T)"
            )

    def with_routes(self, routes: torch.Tensor, tokens: torch.Tensor) -> Rollout:
        """This rollout with routes (B, T, layers, k) that were recorded for tokens (B, T), padded on the right.

        ValueError if these are not the rollout's own tokens, or the routes have another B or T.
        """
        if routes.ndim != 4 or routes.shape[:2] != self.tokens.shape or tokens.shape != self.tokens.shape:
            raise ValueError(
                f"routes have shape {tuple(routes.shape)}, and their tokens {tuple(tokens.shape)}, for a rollout of "
                f"{tuple(self.tokens.shape)}; they must be (B, T, layers, k) and (B, T) with its B and T"
            )
        real = torch.arange(tokens.shape[1]) < self.lengths[:, None]
        if different := int((tokens != self.tokens)[real].sum()):
            raise ValueError(
                f"the routes were recorded for other tokens: {different} of {int(real.sum())} differ from this "
                "rollout's; record this rollout itself"
            )
        routes = routes.to(torch.int16)
        checksums = row_checksums(self.tokens, routes, self.lengths)
        return dataclasses.replace(self, routes=routes, route_checksums=checksums)


def row_checksums(tokens: torch.Tensor, routes: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """A checksum (B,) int64 of each row's tokens (B, T) and routes (B, T, layers, k) int16, whatever its padding."""
    sums = []
    for row, of_row, length in zip(tokens, routes, lengths.tolist(), strict=True):
        data = row[:length].contiguous().numpy().tobytes() + of_row[:length].contiguous().numpy().tobytes()
        sums.append(int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little", signed=True))
    return torch.tensor(sums, dtype=torch.long)


class GenerationStopped(RuntimeError):
    """`should_stop` said so: no rollout was made, and the engine is as it was before."""


class RolloutEngine(Protocol):
    """What the loop asks of an engine. After any of these raised, the engine can still be used."""

    def generate(
        self,
        prompts: Sequence[str] | Sequence[Sequence[int]],
        sampling: SamplingParams,
        *,
        seed: int,
        on_batch: Callable[[int, int], None] | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> Rollout:
        """Sample `sampling.n` completions for each prompt (strings, or lists of token ids).

        The same seed and weights give the same rollout. on_batch(done, total) is called after each batch of sequences.
        should_stop() is asked while decoding; once it says True, GenerationStopped is raised. Raises ValueError for no
        prompts, an empty prompt, one that leaves no room in the context, or token ids that the model does not have.
        """

    def refit(self, source: Mapping[str, torch.Tensor] | Any) -> None:
        """Take new weights (a trainer, or float32 tensors by parameter name), requantize them, drop everything cached.

        ValueError before anything is written if a weight is missing, unknown, of another shape or not finite.
        """

    def calibrate(self, batch: Rollout | Sequence[str] | Sequence[Sequence[int]] | None) -> dict[str, float]:
        """Take new KV and attention scales from real tokens at the current weights: a rollout, or prompts before the
        first refit; None: from what the last generate saw. Returns what was measured (`seconds`, `tokens`, ...); an
        engine that needs no scales returns {}."""

    def stats(self) -> dict[str, Any]:
        """What the engine is and has done: `engine`, `backend`, `forward`, `refits`, `tokens`, `seconds`, ..."""

    def check_same_bytes(self, trainer: Any) -> dict[str, str]:
        """Layers whose weight the engine does not hold as the trainer's bytes -> why; empty means proven equal."""

    def close(self) -> None:
        """Free the model and its caches; any later call but close() raises RuntimeError."""


def encode_prompts(
    prompts: Sequence[str] | Sequence[Sequence[int]], tokenizer: Any, limit: int, vocabulary: int
) -> list[list[int]]:
    """Token ids of each prompt; ValueError for no prompts, an empty one, one that leaves no room in a context of
    `limit` tokens, and ids that are not integers from 0 to vocabulary - 1."""
    if isinstance(prompts, str) or len(prompts) == 0:
        raise ValueError(f"prompts is {prompts!r}; give a non-empty list of strings or of token id lists")
    texts = [p for p in prompts if isinstance(p, str)]
    encoded = iter(
        tokenizer(texts, return_attention_mask=False, return_token_type_ids=False).input_ids if texts else []
    )
    ids = [next(encoded) if isinstance(p, str) else _token_ids(i, p) for i, p in enumerate(prompts)]
    for number, (prompt, tokens) in enumerate(zip(prompts, ids, strict=True)):
        if not tokens:
            raise ValueError(f"prompt {prompt!r} has no tokens; a prompt needs at least one")
        require_vocabulary(f"prompt {number} ({str(prompt)[:40]!r})", tokens, vocabulary)
        if len(tokens) >= limit:
            raise ValueError(
                f"a prompt has {len(tokens)} tokens ({str(prompt)[:40]!r}...); the context is {limit} and needs "
                "room for at least one new token: shorten the prompt"
            )
    return ids


def _token_ids(number: int, prompt: Sequence[int]) -> list[int]:
    try:
        return [operator.index(token) for token in prompt]
    except TypeError as error:
        found = f"prompt {number} is {str(prompt)[:40]!r}"
        raise ValueError(f"{found}; a prompt must be a string, or a list of integers (token ids): {error}") from error


def require_vocabulary(what: str, tokens: Sequence[int], vocabulary: int) -> None:
    """ValueError, naming `what`, unless all of the tokens (at least one) are among the model's `vocabulary`."""
    if min(tokens) < 0 or max(tokens) >= vocabulary:
        bad = next(token for token in tokens if not 0 <= token < vocabulary)
        raise ValueError(
            f"{what} has token id {bad}; this model's vocabulary of {vocabulary} tokens has ids 0 to {vocabulary - 1}: "
            "use the model's own tokenizer"
        )


def vocabulary_size(model: nn.Module) -> int:
    """How many token ids the model can read."""
    return model.get_input_embeddings().weight.shape[0]


def right_pad(ids: Sequence[Sequence[int]]) -> torch.Tensor:
    """Token ids of each prompt as one (R, T) int64, zeros after its end."""
    width = max(map(len, ids))
    return torch.tensor([[*tokens, *[0] * (width - len(tokens))] for tokens in ids])


def eos_tokens(generation_config: Any, tokenizer: Any) -> torch.Tensor:
    """The token ids (int64) that end a completion: the model's, or else the tokenizer's."""
    eos = generation_config.eos_token_id
    eos = tokenizer.eos_token_id if eos is None else eos
    return torch.tensor([eos] if isinstance(eos, int) else list(eos or []), dtype=torch.long)


def require_weights(new: Mapping[str, torch.Tensor], own: Mapping[str, torch.Tensor]) -> None:
    """ValueError, naming up to five problems, unless `new` holds finite tensors under the names and shapes of `own`."""
    problems = [f"missing {name}" for name in own.keys() - new.keys()]
    problems += [f"unknown {name}" for name in new.keys() - own.keys()]
    for name in own.keys() & new.keys():
        if new[name].shape != own[name].shape:
            problems.append(f"{name} has shape {tuple(new[name].shape)}, expected {tuple(own[name].shape)}")
        elif bad := int((~new[name].isfinite()).sum()):
            problems.append(f"{name} has {bad} values that are NaN or infinite")
    if problems:
        raise ValueError(f"refit refused, no weight was changed: {'; '.join(sorted(problems)[:5])}")


def require_finite(weights: Mapping[str, torch.Tensor]) -> None:
    """ValueError, naming up to five, if weights of a model that an engine is to be made of are NaN or infinite."""
    bad = {name: int((~tensor.isfinite()).sum()) for name, tensor in weights.items()}
    if problems := [f"{name} has {count} values that are NaN or infinite" for name, count in bad.items() if count]:
        raise ValueError(f"no engine was made of this model: {'; '.join(problems[:5])}; take an earlier checkpoint")


def pack_rollout(
    ids: list[list[int]],
    completions: torch.Tensor,
    logprobs: torch.Tensor,
    counts: torch.Tensor,
    sampling: SamplingParams,
    *,
    tokenizer: Any,
    eos: torch.Tensor,
) -> Rollout:
    """Lay prompts and completions out as a Rollout.

    ids: one list per prompt; completions and logprobs: (prompts * n, max_tokens), the first counts (prompts * n,) of
    each row are real, at least one.
    """
    starts = torch.tensor([len(p) for p in ids]).repeat_interleave(sampling.n)
    lengths = starts + counts
    tokens = torch.full((len(counts), int(lengths.max())), tokenizer.pad_token_id or 0)
    prompts = right_pad(ids)
    place = torch.arange(tokens.shape[1])
    in_prompt = place < starts[:, None]
    mask = (place < lengths[:, None]) & ~in_prompt
    own = torch.arange(completions.shape[1]) < counts[:, None]
    known = torch.arange(prompts.shape[1]) < starts[:, None]
    tokens[in_prompt] = prompts.repeat_interleave(sampling.n, dim=0)[known]
    tokens[mask] = completions[own]
    placed = torch.zeros(tokens.shape)
    placed[mask] = logprobs[own]
    last = completions.gather(1, counts[:, None] - 1)
    answers = [tuple(row[:count]) for row, count in zip(completions.tolist(), counts.tolist(), strict=True)]
    different = list(dict.fromkeys(answers))  # decoding takes 10 us, and the samples of a group are often alike
    text = dict(zip(different, tokenizer.decode(different, skip_special_tokens=True), strict=True))
    return Rollout(
        tokens=tokens,
        logprobs=placed,
        mask=mask,
        prompt_lengths=starts,
        lengths=lengths,
        finished=(last == eos).any(dim=1),
        completions=tuple(text[answer] for answer in answers),
        sampling=sampling,
    )
