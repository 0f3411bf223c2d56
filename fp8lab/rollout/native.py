"""NativeEngine: batched sampling on a transformers model, with a KV cache, in this process.

A prompt is read once (prefill); then its n completions grow by one token per forward (decode), and a finished one
leaves the batch. Completions that have drawn the same tokens so far are one row of the batch until they part: the surer
the policy, the less there is to compute. The engine owns its own copy of the model, converted with the plan's rollout
side: `refit` copies the trainer's weights into it and requantizes them, as an inference engine does after every
training step.

Models that decode.py knows run in its forward, others in transformers' (`TransformersForward`); `stats()` says which.

Kernels decide the order of the sums, and with it the last bits and thereby some FP8 codes:

    default           one matmul: the gap to the trainer is that of prefill and decode shapes, next to nothing *by
                      construction*, as both sides run the same code
    other             adds in another order than the trainer, as two real engines do
    batch_invariant   fixed tiles (invariant.py): with a trainer of these kernels and the same plan on both sides the
                      log-probs are equal bit for bit, whatever the batch

Log-probs are those of the distribution that was sampled from (`processed`), or of the bare logits with
`SamplingParams(raw_logprobs=True)`. The trainer scores logits / temperature: the two agree unless top-k or top-p cut.

Left out: paged KV memory, continuous batching across calls.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from fp8lab import calibration, diagnostics, invariant
from fp8lab.attention import attention_of
from fp8lab.attention_scales import AttentionScales
from fp8lab.conversion import convert
from fp8lab.linear import refresh
from fp8lab.models import forward, left_pad, load_model, load_tokenizer, merged, named_weights
from fp8lab.names import expert_tensors
from fp8lab.precision import PrecisionPlan
from fp8lab.rollout.decode import Decoder, unsupported
from fp8lab.rollout.engine import (
    GenerationStopped,
    Rollout,
    encode_prompts,
    eos_tokens,
    pack_rollout,
    require_finite,
    require_vocabulary,
    require_weights,
    right_pad,
    vocabulary_size,
)
from fp8lab.rollout.float8_cache import float8_cache
from fp8lab.rollout.sampling import SamplingParams, draw


class NativeEngine:
    """Samples from a transformers causal LM under the rollout side of a plan.

    model: a folder or hub name (loaded in float32), or a model, which is copied; ValueError if a weight is not finite.
    tokenizer: needed with a model object.
    kernels: see the module's text. forward: `own`, `transformers`, or `auto`, which is `own` where decode.py knows the
    model. max_batch_size: most sequences decoded together.
    """

    def __init__(
        self,
        model: str | nn.Module,
        plan: PrecisionPlan,
        *,
        tokenizer: Any = None,
        kernels: str = "default",
        forward: str = "auto",
        max_batch_size: int = 1024,
    ) -> None:
        if isinstance(model, nn.Module):
            if tokenizer is None:
                raise ValueError("a model object comes without a tokenizer; pass tokenizer=...")
            self.model = copy.deepcopy(model)
        else:
            self.model, tokenizer = load_model(model), tokenizer or load_tokenizer(model)
        self.tokenizer, self.plan, self.kernels, self.max_batch_size = tokenizer, plan, kernels, max_batch_size
        require_finite(named_weights(self.model))
        self.model.eval().requires_grad_(False)
        self.conversion = convert(self.model, plan, side="rollout", kernels=kernels)
        self.decoder = self._decoder(forward)
        self.forward = "own" if isinstance(self.decoder, Decoder) else "transformers"
        self._vocabulary = vocabulary_size(self.model)
        self._eos = eos_tokens(self.model.generation_config, tokenizer)
        # Completions that have drawn the same tokens stand in one row until they part; not in a MoE, where
        # routing.record_routes tells sequences apart by their rows.
        self._share_prefixes = next(expert_tensors(self.model), None) is None
        self.refits = 0
        self._whole = True
        self._counts = {"sequences": 0, "tokens": 0, "prompt_tokens": 0, "kv_bytes": 0, "seconds": 0.0}

    def _decoder(self, forward: str) -> Decoder | TransformersForward:
        if forward not in ("auto", "own", "transformers"):
            raise ValueError(f"forward is {forward!r}; allowed: auto, own, transformers")
        invariant_kernels = self.kernels == invariant.NAME
        reason = unsupported(self.model)
        if reason is not None and (forward == "own" or invariant_kernels):
            what = f"kernels={invariant.NAME!r} needs" if invariant_kernels else "forward='own' is"
            raise ValueError(f"{what} the own forward, but {reason}; use forward='transformers' and other kernels")
        if forward == "transformers" and invariant_kernels:
            raise ValueError(f"kernels={invariant.NAME!r} needs the own forward; use forward='auto'")
        if invariant_kernels and attention_of(self.model) is not None:
            raise ValueError(f"kernels={invariant.NAME!r} do not cover FP8 attention; use a plan with bf16 attention")
        self.forward_reason = reason or ("asked for" if forward != "auto" else "decode.py knows this model")
        if forward == "transformers" or reason is not None:
            return TransformersForward(self.model)
        if invariant_kernels:
            invariant.prepare(self.model)
            return Decoder(self.model, attention=invariant.attention)
        return Decoder(self.model, **float8_cache(self.model))

    def refit(self, source: Mapping[str, torch.Tensor] | Any) -> None:
        """Copy new weights in and requantize them.

        source: a Trainer (anything with `.model`, peft adapters are merged in float32) or float32 tensors under the
        model's parameter names. Everything is checked before anything is written; ValueError names what is missing,
        unknown, of another shape or not finite.
        """
        self._require_open()
        new = source if isinstance(source, Mapping) else named_weights(merged(source.model))
        own = named_weights(self.model)
        require_weights(new, own)
        self._whole = False
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(new[name])
        refresh(self.model)
        self._whole = True
        self.refits += 1

    def calibrate(self, batch: Rollout | Sequence[str] | Sequence[Sequence[int]] | None) -> dict[str, float]:
        """Take new scales of q, k and v at the current weights (calibration.py); returns seconds and tokens.

        batch None: from what the last generate saw, without a forward; one update old after a refit. {} if the plan's
        rollout side needs none: weight scales are taken at every refit, and activation scales, like those per token and
        head, at every token.
        """
        self._require_whole()
        state = attention_of(self.model)
        if state is None or state.dynamic:
            return {}
        start = time.perf_counter()
        if batch is None:
            state.scales = calibration.scales_from_meter(state.meter, state.precision)
            return {"seconds": time.perf_counter() - start, "tokens": 0}
        if isinstance(batch, Rollout):
            for number, (tokens, length) in enumerate(zip(batch.tokens, batch.lengths.tolist(), strict=True)):
                require_vocabulary(f"sequence {number} of the rollout", tokens[:length].tolist(), self._vocabulary)
        else:
            batch = self._encode(batch)
        found = calibration.calibrate(self.model, batch, state.precision)
        state.scales = found.scales
        return {"seconds": time.perf_counter() - start, "tokens": found.tokens}

    @property
    def attention_scales(self) -> AttentionScales | None:
        """Scales of q, k and v in use; None before the first calibration, and if the plan needs none. Can be set."""
        self._require_open()
        state = attention_of(self.model)
        return None if state is None else state.scales

    @attention_scales.setter
    def attention_scales(self, scales: AttentionScales) -> None:
        self._require_open()
        state = attention_of(self.model)
        if state is None or state.dynamic:
            raise ValueError(f"plan {self.plan.name!r} has no per-layer attention scales on its rollout side")
        state.scales = scales

    def check_same_bytes(self, trainer: Any) -> dict[str, str]:
        """Layers whose weight this engine does not hold as the trainer's bytes -> why; empty means proven equal.

        Adapters of a peft trainer are merged first, as in `refit`.
        """
        self._require_whole()
        return diagnostics.differing_layers(merged(trainer.model), self.model)

    def stats(self) -> dict[str, Any]:
        """What this engine is and what it has done since it was made; kv_bytes: the largest KV cache of one batch.

        With FP8 attention also of the last generate: `saturation`, the share of q, k and v clamped per layer, and
        `attention_alarms`, sentences.
        """
        state = None if self.model is None else attention_of(self.model)
        return {
            "engine": "native",
            "backend": self.conversion.backend,
            "kernels": self.kernels,
            "forward": self.forward,
            "forward_reason": self.forward_reason,
            "refits": self.refits,
            **self._counts,
            **({} if state is None else {"saturation": state.meter.saturation(), "attention_alarms": state.alarms()}),
        }

    def close(self) -> None:
        """Free the model; any later call but close() and stats() raises RuntimeError."""
        self.model = self.decoder = None

    def _require_open(self) -> None:
        if self.model is None:
            raise RuntimeError("this engine is closed; make a new one")

    def _require_whole(self) -> None:
        self._require_open()
        if not self._whole:
            raise RuntimeError("the last refit was interrupted and left mixed weights; refit once more")

    def _encode(self, prompts: Sequence[str] | Sequence[Sequence[int]]) -> list[list[int]]:
        return encode_prompts(prompts, self.tokenizer, self.model.config.max_position_embeddings, self._vocabulary)

    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[str] | Sequence[Sequence[int]],
        sampling: SamplingParams,
        *,
        seed: int,
        on_batch: Callable[[int, int], None] | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> Rollout:
        """Sample `sampling.n` completions for each prompt; see RolloutEngine.generate.

        should_stop() is asked before every token. A sequence's random numbers depend on the seed and its place in
        `prompts` alone, so other batch sizes change no token (but for last bits, if kernels are not batch_invariant).
        """
        self._require_whole()
        start_time = time.perf_counter()
        if (state := attention_of(self.model)) is not None:
            state.meter.reset()
        ids = self._encode(prompts)
        per_batch = max(1, self.max_batch_size // sampling.n)
        order = sorted(range(len(ids)), key=lambda i: len(ids[i]))  # similar lengths share a batch
        generator = torch.Generator().manual_seed(seed)
        uniform = torch.rand((len(ids), sampling.n, sampling.max_tokens), generator=generator, dtype=torch.float64)
        completions = torch.zeros((len(ids), sampling.n, sampling.max_tokens), dtype=torch.long)
        logprobs = torch.zeros(completions.shape)
        lengths = torch.zeros(completions.shape[:2], dtype=torch.long)
        for start in range(0, len(ids), per_batch):
            chosen = order[start : start + per_batch]
            batch = self._sample_batch([ids[i] for i in chosen], uniform[chosen].flatten(0, 1), sampling, should_stop)
            for whole, part in zip((completions, logprobs, lengths), batch, strict=True):
                whole[chosen] = part.view(len(chosen), *whole.shape[1:])
            if on_batch is not None:
                on_batch(min(start + per_batch, len(ids)) * sampling.n, len(ids) * sampling.n)
        flat = completions.flatten(0, 1), logprobs.flatten(0, 1), lengths.flatten()
        rollout = pack_rollout(ids, *flat, sampling, tokenizer=self.tokenizer, eos=self._eos)
        self._counts["sequences"] += len(rollout.tokens)
        self._counts["tokens"] += int(lengths.sum())
        self._counts["prompt_tokens"] += sum(map(len, ids))
        self._counts["seconds"] += time.perf_counter() - start_time
        return rollout

    @torch.inference_mode()  # 5 % faster than no_grad here; what leaves is copied into tensors that may have gradients
    def _sample_batch(self, prompts: list[list[int]], uniform: torch.Tensor, sampling: SamplingParams, should_stop):
        """Completions and log-probs (prompts * n, max_tokens) and lengths of these prompts; uniform: as completions."""
        n, limit = sampling.n, self.model.config.max_position_embeddings
        lengths = torch.tensor([len(p) for p in prompts])
        columns = min(limit, int(lengths.max()) + sampling.max_tokens - 1)
        logits, cache = self.decoder.prefill(right_pad(prompts), lengths, columns)
        completions, logprobs = torch.zeros(uniform.shape, dtype=torch.long), torch.zeros(uniform.shape)
        counts = torch.zeros(len(uniform), dtype=torch.long)
        active = torch.arange(len(uniform))
        position = lengths.repeat_interleave(n)
        rows, vocabulary = active // n, logits.shape[-1]  # rows: where in cache and logits each active sequence stands
        for step in range(sampling.max_tokens):
            if should_stop is not None and should_stop():
                raise GenerationStopped("should_stop() was true while sampling; call generate again for a rollout")
            new, chosen = draw(logits, uniform[active, step], sampling, rows)
            completions[active, step], logprobs[active, step], counts[active] = new, chosen, step + 1
            going = ((new[:, None] != self._eos).all(dim=1) & (position < limit - 1)).nonzero().squeeze(1)
            if step + 1 == sampling.max_tokens or len(going) == 0:
                break
            active, position = active[going], position[going]
            if self._share_prefixes:
                prefixes, rows = (rows[going] * vocabulary + new[going]).unique(return_inverse=True)
            else:
                prefixes, rows = rows[going] * vocabulary + new[going], torch.arange(len(going))
            cache.select(prefixes // vocabulary)
            self._counts["kv_bytes"] = max(self._counts["kv_bytes"], cache.nbytes)
            at = position.new_empty(len(prefixes)).index_copy_(0, rows, position)
            logits = self.decoder.step(prefixes % vocabulary, at, cache)
            position = position + 1
        cache.release()
        return completions, logprobs, counts


class TransformersForward:
    """The same two calls as `decode.Decoder`, through transformers' forward: for models that decode.py does not know.

    Prompts are padded on the left, as transformers' cache appends the newest token of every row in one column.
    """

    class Cache:
        """A DynamicCache and which of its columns are real, (R, columns so far)."""

        def __init__(self, cache: Any, attention: torch.Tensor) -> None:
            self.cache, self.attention = cache, attention

        def select(self, rows: torch.Tensor) -> None:
            """Keep these rows, in this order; a row named several times is copied."""
            self.cache.batch_select_indices(rows)
            self.attention = self.attention[rows]

        def release(self) -> None:
            """End this cache; transformers keeps no memory."""
            self.cache = None

        @property
        def nbytes(self) -> int:
            """Bytes of keys and values."""
            return sum(t.nbytes for layer in self.cache.layers for t in (layer.keys, layer.values))

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def prefill(self, prompts: torch.Tensor, lengths: torch.Tensor, columns: int) -> tuple[torch.Tensor, Cache]:
        """See Decoder.prefill; the cache grows as needed, whatever `columns`."""
        from transformers import DynamicCache

        tokens, attention, positions = left_pad(prompts, lengths)
        cache = DynamicCache(config=self.model.config)
        logits = forward(self.model, tokens, attention, positions, cache, logits_to_keep=1)[:, -1]
        return logits, self.Cache(cache, attention)

    def step(self, tokens: torch.Tensor, positions: torch.Tensor, cache: Cache) -> torch.Tensor:
        """See Decoder.step."""
        cache.attention = torch.cat([cache.attention, cache.attention.new_ones(len(tokens), 1)], dim=1)
        return forward(self.model, tokens[:, None], cache.attention, positions[:, None], cache.cache)[:, -1]
