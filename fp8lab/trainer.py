"""The trainer side: score a rollout, take one FP8 GRPO step, save and load.

    score   t = log-probs of the sampled tokens under the trainer's own engine and precision
    step    advantages -> correction weights from (g, t) -> clipped loss -> backward -> clip -> AdamW -> requantize

The model keeps float32 master weights; the plan's trainer side decides what the GEMMs see. After every optimizer update
the FP8 copies are quantized again from the masters, which is the "recalibration" of weight scales.

If there is one update per rollout, its forward pass is also the scoring pass (the weights have not moved yet), and a
prompt is read once for all completions of its group, so nothing is computed twice. Log-probs are taken at the
temperature the rollout was sampled with.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import shutil
import time
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fp8lab import corrections, diagnostics, distributed, invariant, sequence_metrics
from fp8lab.completions import completion_logprobs
from fp8lab.conversion import convert
from fp8lab.grpo import (
    GRPOConfig,
    group_advantages,
    policy_loss,
    reference_kl,
    token_weights,
    within_logprob_error,
)
from fp8lab.linear import refresh
from fp8lab.models import load_model, load_tokenizer, named_weights, quiet
from fp8lab.precision import PrecisionPlan
from fp8lab.rollout.engine import Rollout
from fp8lab.runlog import discard


@contextmanager
def timed(seconds: dict[str, float], part: str) -> Iterator[None]:
    """Add the seconds that the block takes to seconds[part]."""
    start = time.perf_counter()
    yield
    seconds[part] = seconds.get(part, 0.0) + time.perf_counter() - start


class NonFiniteLossError(FloatingPointError):
    """The loss or a gradient is NaN or infinite; no weight was changed."""


class Trainer:
    """Learns from rollouts under the trainer side of a plan.

    model: a folder or hub name (loaded in float32), or a float32 model, which is converted in place. `kernels`: see
    `linear.Float8Linear.from_linear`. max_updates: the length of the `linear` learning rate schedule, which needs it.
    """

    def __init__(
        self,
        model: str | Path | nn.Module,
        plan: PrecisionPlan,
        config: GRPOConfig | None = None,
        *,
        tokenizer: Any = None,
        kernels: str = "default",
        max_updates: int | None = None,
    ) -> None:
        self.plan, self.config = plan, config or GRPOConfig()
        is_module = isinstance(model, nn.Module)
        self.model = model if is_module else load_model(model)
        self.tokenizer = tokenizer if is_module else tokenizer or load_tokenizer(model)
        self.conversion = convert(self.model, plan, side="trainer", kernels=kernels)
        if kernels == invariant.NAME:
            invariant.prepare(self.model)
        self.reference = copy.deepcopy(self.model).requires_grad_(False) if self.config.beta else None
        self.optimizer = self._new_optimizer()
        self.updates, self.max_updates = 0, max_updates
        self.seconds: dict[str, float] = {}
        """Time spent in parts of `step`: `score` (a forward of its own), `quantize`; whoever reads it may clear it."""
        if self.config.lr_scheduler_type == "linear" and max_updates is None:
            raise ValueError("lr_scheduler_type 'linear' needs max_updates, the number of updates planned")

    def _new_optimizer(self) -> torch.optim.Optimizer:
        betas = (self.config.adam_beta1, self.config.adam_beta2)
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        return torch.optim.AdamW(parameters, betas=betas, weight_decay=self.config.weight_decay)

    def shard(self) -> None:
        """Spread parameters, gradients and optimizer over the processes of torchrun (distributed.py), before the first
        update.

        From then on every process calls `score`, `step`, `save` and `load` with the same arguments, and they divide the
        work.
        """
        distributed.shard(self.model)
        self.optimizer = self._new_optimizer()
        refresh(self.model)

    @torch.no_grad()
    def score(self, rollout: Rollout) -> torch.Tensor:
        """Log-probs (B, T) float32 of the rollout's completion tokens at the current weights; 0 elsewhere."""
        return self._score(self.model, rollout)

    def step(self, rollout: Rollout, rewards: Sequence[float] | torch.Tensor) -> dict[str, float]:
        """Learn from a rollout of whole groups and its rewards (B,); returns metrics, mostly under NeMo RL's names.

        Raises NonFiniteLossError before any weight changes; ValueError for rewards that do not fit. If no token is left
        to learn from, no update is made and `skipped_updates` says so. Warns if the rollout's log-probs are of another
        distribution than those the trainer scores (SamplingParams.mixed).
        """
        config = self.config
        rewards = torch.as_tensor(rewards, dtype=torch.float32)
        if len(rewards) != len(rollout.tokens):
            raise ValueError(f"{len(rewards)} rewards for {len(rollout.tokens)} completions; there must be one each")
        advantages = group_advantages(
            rewards, config.num_generations, scale_rewards=config.scale_rewards, leave_one_out=config.leave_one_out
        )
        if rollout.sampling.mixed:
            warnings.warn(f"importance ratios are biased: {rollout.sampling.mixed}", stacklevel=2)
        mask = rollout.mask
        if config.mask_truncated_completions:
            mask = mask & rollout.finished[:, None]
        threshold = config.seq_logprob_error_threshold
        old = None
        if config.updates_per_rollout > 1 or threshold is not None or config.drop_rejected:
            with timed(self.seconds, "score"):
                old = self.score(rollout)
        totals: dict[str, float] = defaultdict(float)
        if threshold is not None:
            agree = within_logprob_error(rollout.logprobs, old, mask, threshold)
            totals["num_masked_seqs"] = float((~agree).sum())
            mask = mask & agree[:, None]
        counted = mask & self._correction(rollout.logprobs, old, mask).mask if config.drop_rejected else mask
        reference = None
        if self.reference is not None:
            with torch.no_grad():
                reference = self._score(self.reference, dataclasses.replace(rollout, routes=None))
        trainer_logprobs = torch.zeros_like(rollout.logprobs) if old is None else old
        for rows in self._minibatches(len(rewards)):
            self._update(rollout, rows, mask, counted, advantages, old, reference, trainer_logprobs, totals)
        if old is None:
            trainer_logprobs = distributed.add_up(trainer_logprobs)
        return self._metrics(rollout, rewards, mask, trainer_logprobs, totals)

    def _minibatches(self, size: int) -> Iterator[torch.Tensor]:
        groups = torch.arange(size).view(-1, self.config.num_generations)
        for _ in range(self.config.num_iterations):
            for part in groups.tensor_split(self.config.steps_per_generation):
                if len(part):
                    yield part.flatten()

    def _update(self, rollout, rows, mask, counted, advantages, old, reference, trainer_logprobs, totals) -> None:
        """One optimizer update on `rows`; adds its sums to totals, and fills trainer_logprobs if nothing was scored.

        mask: tokens of the loss; counted: those of them in its denominator. Both (B, T) bool.
        """
        config = self.config
        weights = token_weights(counted[rows], config.loss_type, rollout.sampling.max_tokens)
        self.optimizer.zero_grad(set_to_none=True)
        sums: dict[str, float] = defaultdict(float)
        for part in self._micro_batches(len(rows), rollout):
            chosen = rows[part]
            use, g = mask[chosen], rollout.logprobs[chosen]
            logprobs = completion_logprobs(self.model, rollout, chosen)
            current = logprobs.detach()
            self._require_finite("sum of log-probs", distributed.add_up(current[use].sum()))
            if old is None:
                trainer_logprobs[chosen] = current
            t = current if old is None or config.force_on_policy_ratio else old[chosen]
            correction = self._correction(g, t, use)
            per_token, was_clipped = policy_loss(logprobs, t, advantages[chosen], config)
            per_token = per_token * correction.weights
            if reference is not None:
                per_token = per_token + config.beta * reference_kl(logprobs, reference[chosen])
            loss = torch.where(use, per_token * weights[part], 0.0).sum()
            self._require_finite("loss", distributed.add_up(loss.detach()))
            if loss.requires_grad:
                loss.backward()
            sums["loss"] += loss.item()
            sums["clipped"] += float((was_clipped & use).sum())
            usable, learns = use & g.isfinite(), weights[part] > 0
            ratio = torch.where(usable, current - g, 0.0).clamp(-20, 20).exp()
            sums["entropy"] -= float((ratio * current)[usable].sum())
            sums["entropy_tokens"] += float(usable.sum())
            sums["learns"] += float((learns if reference is not None else learns & correction.mask).sum())
            for name, value in correction.statistics.items():
                sums[name] += value
        values = distributed.add_up(torch.tensor(list(sums.values()), dtype=torch.float64)).tolist()
        added = dict(zip(sums, values, strict=True))
        for name, value in added.items():
            totals[name] += value
        totals["trained"] += float(mask[rows].sum())
        totals["updates"] += 1
        if not added["learns"]:
            totals["skipped_updates"] += 1
            return
        norm = distributed.whole(nn.utils.clip_grad_norm_(self.model.parameters(), config.max_grad_norm))
        self._require_finite("gradient norm", norm)
        totals["grad_norm"] += norm.item()
        self._optimizer_step()

    def _micro_batches(self, size: int, rollout: Rollout) -> Sequence[torch.Tensor]:
        """Places, of `size` completions in whole groups, that this process works on, a forward's at a time."""
        group = rollout.sampling.n
        own = distributed.share(torch.arange(size).view(-1, group)).flatten()
        return own.split(max(group, self.config.micro_batch_size // group * group))

    def _correction(self, rollout_logprobs, trainer_logprobs, mask) -> corrections.Correction:
        config = self.config
        bounds = {"low": config.importance_sampling_min, "high": config.importance_sampling_max}
        return corrections.weights(rollout_logprobs, trainer_logprobs, mask, mode=config.importance_sampling, **bounds)

    def _optimizer_step(self) -> None:
        self.updates += 1
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        with timed(self.seconds, "quantize"):
            refresh(self.model)

    @property
    def learning_rate(self) -> float:
        """The learning rate of the latest update: a linear rise over warmup_steps, then as lr_scheduler_type says."""
        warmup, done = max(1, self.config.warmup_steps), self.updates
        factor = min(1.0, done / warmup)
        if self.config.lr_scheduler_type == "linear" and done > warmup:
            left = max(0, self.max_updates - done) / max(1, self.max_updates - warmup)
            factor = 0.1 + 0.9 * left
        return self.config.learning_rate * factor

    def _require_finite(self, what: str, value: torch.Tensor) -> None:
        if not bool(value.isfinite()):
            self.optimizer.zero_grad(set_to_none=True)
            raise NonFiniteLossError(
                f"the {what} is {value.item()} at update {self.updates + 1}; no weight was changed. Look at the "
                "rewards, a smaller learning_rate, and the mismatch metrics of the steps before"
            )

    def _score(self, model: nn.Module, rollout: Rollout) -> torch.Tensor:
        logprobs = torch.zeros_like(rollout.logprobs)
        for rows in self._micro_batches(len(rollout.tokens), rollout):
            logprobs[rows] = completion_logprobs(model, rollout, rows)
        return distributed.add_up(logprobs)

    def _metrics(self, rollout, rewards, mask, trainer_logprobs, totals) -> dict[str, float]:
        report = diagnostics.mismatch(rollout.logprobs, trainer_logprobs, rollout.mask)
        updates, trained = totals["updates"], max(1.0, totals["trained"])
        groups = rewards.view(-1, self.config.num_generations)
        used = mask & trainer_logprobs.isfinite() & rollout.logprobs.isfinite()
        correction = self._correction(rollout.logprobs, trainer_logprobs, mask).weights
        after = correction[used]
        metrics = {
            "reward": rewards.mean().item(),
            "loss": totals["loss"] / updates,
            "grad_norm": totals["grad_norm"] / max(1.0, updates - totals["skipped_updates"]),
            "learning_rate": self.learning_rate,
            **report.as_dict(),
            "sampling_importance_ratio_corrected": after.mean().item() if len(after) else 1.0,
            "effective_sample_size": sequence_metrics.effective_sample_size(after),
            "one_token_sequences": sequence_metrics.one_token_sequences(rollout.logprobs, trainer_logprobs, mask),
            "approx_entropy": totals["entropy"] / max(1.0, totals["entropy_tokens"]),
            "clip_ratio": totals["clipped"] / trained,
            "clamped_exponents": totals["clamped_exponents"],
            "skipped_updates": totals["skipped_updates"],
            "equal_reward_groups": (groups.amax(1) == groups.amin(1)).float().mean().item(),
            "completion_length": (rollout.lengths - rollout.prompt_lengths).float().mean().item(),
            "truncated": 1.0 - rollout.finished.float().mean().item(),
        }
        if self.config.seq_logprob_error_threshold is not None:
            metrics["num_masked_seqs"] = totals["num_masked_seqs"]
        if self.config.importance_sampling in corrections.SEQUENCE_MODES:
            lengths = sequence_metrics.rejection_length_correlation(correction, used)
            metrics["rejection_length_correlation"] = lengths
        if "oob_tokens" in totals:
            metrics["is_oob_ratio"] = totals["oob_tokens"] / trained
        elif "oob_sequences" in totals:
            metrics["is_oob_ratio"] = totals["oob_sequences"] / max(1.0, totals["sequences"])
        return metrics

    def save(self, folder: str | Path) -> None:
        """Write model (Hugging Face format, float32), tokenizer and optimizer into `folder`, under a temporary name
        first; OSError if that fails. Of several processes the first writes what all of them gather."""
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        weights, tensors = named_weights(self.model), {}
        names = {id(p): name for name, p in self.model.named_parameters()}
        for parameter, state in self.optimizer.state.items():
            for key, value in state.items():
                tensors[f"{names[id(parameter)]}:{key}"] = distributed.whole(value.detach()).contiguous()
        if distributed.rank() > 0:
            return
        folder = Path(folder)
        temporary = folder.with_name(f".{folder.name}.tmp-{os.getpid()}")
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            temporary.mkdir(parents=True)
            with quiet():
                self.model.save_pretrained(temporary, state_dict=weights)
            if self.tokenizer is not None:
                self.tokenizer.save_pretrained(temporary)
            save_file(tensors, temporary / "optimizer.safetensors")
            (temporary / "trainer.json").write_text(json.dumps({"updates": self.updates}))
            discard(folder)
            os.replace(temporary, folder)
        except (OSError, SafetensorError) as error:
            raise OSError(f"cannot write the checkpoint {folder}: {error}; the ones before it are untouched") from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    def load(self, folder: str | Path) -> None:
        """Continue from what `save` wrote, bit for bit; FileNotFoundError if something is missing, ValueError if it
        cannot be read, with the trainer as it was."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        folder = Path(folder)
        files = [folder / name for name in ("model.safetensors", "optimizer.safetensors", "trainer.json")]
        if missing := [p.name for p in files if not p.is_file()]:
            raise FileNotFoundError(f"{folder} is no trainer checkpoint: {', '.join(missing)} missing")
        try:
            with quiet():  # through transformers, which stores fused experts one by one
                weights = named_weights(load_model(folder))
            saved, updates = load_file(files[1]), json.loads(files[2].read_text())["updates"]
        except (SafetensorError, ValueError, KeyError) as error:
            raise ValueError(
                f"the checkpoint {folder} cannot be read: {error}; delete it to go on from the one before"
            ) from error
        own = self.model.state_dict(keep_vars=True)
        self.model.load_state_dict({name: distributed.spread_like(weights[name], own[name]) for name in own})
        self.updates = updates
        for name, parameter in self.model.named_parameters():
            state = {key.rpartition(":")[2]: saved[key] for key in saved if key.rpartition(":")[0] == name}
            if state:
                self.optimizer.state[parameter] = {
                    key: value if value.ndim == 0 else distributed.spread_like(value, parameter)
                    for key, value in state.items()
                }
        refresh(self.model)
