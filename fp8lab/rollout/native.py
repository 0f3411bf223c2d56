"""NativeEngine: batched sampling on a transformers model, with a KV cache, in this process.

A prompt is read once (prefill) and its keys and values are copied to its n completions; then all sequences grow by one
token per forward (decode), and a finished one leaves the batch. The engine owns its own copy of the model, converted
with the plan's rollout side: `refit` copies the trainer's weights into it and requantizes them, as an inference engine
does after every training step.

`kernels="other"` makes its GEMMs add in another order than the trainer's. Two real engines always differ like this;
with the same kernels on both sides the remaining gap is that of prefill and decode shapes, which is next to nothing *by
construction*.

Left out: paged KV memory, continuous batching across calls, FP8 KV cache.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from fp8lab.conversion import convert
from fp8lab.linear import refresh
from fp8lab.models import forward, left_pad, load_model, load_tokenizer, named_weights
from fp8lab.precision import PrecisionPlan
from fp8lab.rollout.engine import Rollout
from fp8lab.rollout.sampling import SamplingParams, draw


class NativeEngine:
    """Samples from a transformers causal LM under the rollout side of a plan.

    model: a folder or hub name (loaded in float32), or a model, which is copied. tokenizer: needed with a model object.
    max_batch_size: most sequences decoded together.
    """

    def __init__(
        self,
        model: str | nn.Module,
        plan: PrecisionPlan,
        *,
        tokenizer: Any = None,
        kernels: str = "default",
        max_batch_size: int = 1024,
    ) -> None:
        if isinstance(model, nn.Module):
            if tokenizer is None:
                raise ValueError("a model object comes without a tokenizer; pass tokenizer=...")
            self.model = copy.deepcopy(model)
        else:
            self.model, tokenizer = load_model(model), tokenizer or load_tokenizer(model)
        self.tokenizer, self.plan, self.max_batch_size = tokenizer, plan, max_batch_size
        self.model.eval().requires_grad_(False)
        self.conversion = convert(self.model, plan, side="rollout", kernels=kernels)
        eos = self.model.generation_config.eos_token_id
        eos = tokenizer.eos_token_id if eos is None else eos
        self._eos = torch.tensor([eos] if isinstance(eos, int) else list(eos or []), dtype=torch.long)
        self.refits = 0

    def refit(self, source: Mapping[str, torch.Tensor] | Any) -> None:
        """Copy new weights in and requantize them.

        source: a Trainer (anything with `.model`) or float32 tensors under the model's parameter names. All names and
        shapes are checked before anything is written; ValueError names what is missing, unknown or of another shape.
        """
        new = source if isinstance(source, Mapping) else named_weights(source.model)
        own = named_weights(self.model)
        problems = [f"missing {name}" for name in own.keys() - new.keys()]
        problems += [f"unknown {name}" for name in new.keys() - own.keys()]
        problems += [
            f"{name} has shape {tuple(new[name].shape)}, expected {tuple(own[name].shape)}"
            for name in own.keys() & new.keys()
            if new[name].shape != own[name].shape
        ]
        if problems:
            raise ValueError(f"refit refused, no weight was changed: {'; '.join(sorted(problems)[:5])}")
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(new[name])
        refresh(self.model)
        self.refits += 1

    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[str] | Sequence[Sequence[int]],
        sampling: SamplingParams,
        *,
        seed: int,
        on_batch: Callable[[int, int], None] | None = None,
    ) -> Rollout:
        """Sample `sampling.n` completions for each prompt.

        prompts: strings, or lists of token ids. on_batch(done, total) is called after each batch of sequences. Raises
        ValueError for no prompts, an empty prompt, or one that leaves no room in the context.
        """
        ids = self._encode(prompts)
        per_batch = max(1, self.max_batch_size // sampling.n)
        order = sorted(range(len(ids)), key=lambda i: len(ids[i]))  # similar lengths share a batch
        generator = torch.Generator().manual_seed(seed)
        uniform = torch.rand((len(ids), sampling.n, sampling.max_tokens), generator=generator, dtype=torch.float64)
        results: list[tuple[list[int], list[float]]] = [([], [])] * (len(ids) * sampling.n)
        for start in range(0, len(ids), per_batch):
            chosen = order[start : start + per_batch]
            batch = self._decode_batch([ids[i] for i in chosen], uniform[chosen].flatten(0, 1), sampling)
            for k, result in enumerate(batch):
                results[chosen[k // sampling.n] * sampling.n + k % sampling.n] = result
            if on_batch is not None:
                on_batch(min(start + per_batch, len(ids)) * sampling.n, len(ids) * sampling.n)
        return self._pack(ids, results, sampling)

    def _encode(self, prompts: Sequence[str] | Sequence[Sequence[int]]) -> list[list[int]]:
        if isinstance(prompts, str) or len(prompts) == 0:
            raise ValueError(f"prompts is {prompts!r}; give a non-empty list of strings or of token id lists")
        ids = [self.tokenizer(p).input_ids if isinstance(p, str) else list(p) for p in prompts]
        limit = self.model.config.max_position_embeddings
        for prompt, tokens in zip(prompts, ids, strict=True):
            if not tokens:
                raise ValueError(f"prompt {prompt!r} has no tokens; a prompt needs at least one")
            if len(tokens) >= limit:
                raise ValueError(
                    f"a prompt has {len(tokens)} tokens ({str(prompt)[:40]!r}...); the context is {limit} and needs "
                    "room for at least one new token: shorten the prompt"
                )
        return ids

    def _decode_batch(self, prompts: list[list[int]], uniform: torch.Tensor, sampling: SamplingParams):
        """Completions (tokens, logprobs) of prompts x n sequences, in order; uniform: (prompts * n, max_tokens)."""
        from transformers import DynamicCache

        lengths = torch.tensor([len(p) for p in prompts])
        padded = nn.utils.rnn.pad_sequence([torch.tensor(p) for p in prompts], batch_first=True)
        tokens, attention, positions = left_pad(padded, lengths)  # the newest token of every row in the same column
        cache = DynamicCache(config=self.model.config)
        logits = forward(self.model, tokens, attention, positions, cache, logits_to_keep=1)[:, -1]
        n = sampling.n
        cache.batch_repeat_interleave(n)
        logits, attention = logits.repeat_interleave(n, dim=0), attention.repeat_interleave(n, dim=0)
        position = lengths.repeat_interleave(n)
        active = torch.arange(len(prompts) * n)
        room = self.model.config.max_position_embeddings - position
        results: list[tuple[list[int], list[float]]] = [([], []) for _ in active]
        for step in range(sampling.max_tokens):
            new, logprobs = draw(logits, uniform[active, step], sampling)
            for row, token, logprob in zip(active.tolist(), new.tolist(), logprobs.tolist(), strict=True):
                results[row][0].append(token)
                results[row][1].append(logprob)
            going = ~torch.isin(new, self._eos) & (step + 1 < room[active])
            if step + 1 == sampling.max_tokens or not bool(going.any()):
                break
            keep = going.nonzero().squeeze(1)
            if len(keep) < len(active):
                cache.batch_select_indices(keep)
                active, new, attention, position = active[keep], new[keep], attention[keep], position[keep]
            attention = torch.cat([attention, attention.new_ones(len(active), 1)], dim=1)
            logits = forward(self.model, new[:, None], attention, position[:, None], cache)[:, -1]
            position = position + 1
        return results

    def _pack(self, ids: list[list[int]], results, sampling: SamplingParams) -> Rollout:
        prompts = [p for p in ids for _ in range(sampling.n)]
        width = max(len(p) + len(tokens) for p, (tokens, _) in zip(prompts, results, strict=True))
        pad = self.tokenizer.pad_token_id or 0
        tokens = torch.full((len(prompts), width), pad, dtype=torch.long)
        logprobs = torch.zeros((len(prompts), width))
        mask = torch.zeros((len(prompts), width), dtype=torch.bool)
        for row, (prompt, (new, logprob)) in enumerate(zip(prompts, results, strict=True)):
            start, end = len(prompt), len(prompt) + len(new)
            tokens[row, :end] = torch.tensor([*prompt, *new])
            logprobs[row, start:end] = torch.tensor(logprob)
            mask[row, start:end] = True
        eos = set(self._eos.tolist())
        return Rollout(
            tokens=tokens,
            logprobs=logprobs,
            mask=mask,
            prompt_lengths=torch.tensor([len(p) for p in prompts]),
            lengths=torch.tensor([len(p) + len(new) for p, (new, _) in zip(prompts, results, strict=True)]),
            finished=torch.tensor([new[-1] in eos for new, _ in results]),
            completions=tuple(self.tokenizer.batch_decode([new for new, _ in results], skip_special_tokens=True)),
            sampling=sampling,
        )
