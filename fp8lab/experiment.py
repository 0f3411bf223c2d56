"""One run of the whole loop, described by one frozen config, logged as it goes, and resumable bit for bit.

    for step in 1..steps:
        rollout = engine.generate(prompts)          sample under the rollout side's precision
        rewards = task.reward(...)                  a program says what was right
        metrics = trainer.step(rollout, rewards)    learn under the trainer side's precision
        engine.refit(trainer)                       new weights, quantized anew
        engine.calibrate(rollout)                   new scales of q, k and v, if the plan has FP8 attention

Every random number comes from a generator seeded by (seed, purpose, step), so there is no random state to save: a run
that was killed continues as if nothing had happened. Data order, sampling noise and evaluation prompts are the same for
all arms with the same seed, which is what makes their differences paired.
"""

from __future__ import annotations

import dataclasses
import hashlib
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fp8lab import distributed, invariant, trackers
from fp8lab.alarms import refit_check
from fp8lab.attention import attention_of
from fp8lab.attention_scales import OPERANDS, AttentionScales
from fp8lab.checks import require_choice, require_types
from fp8lab.diagnostics import gap_parts
from fp8lab.grpo import GRPOConfig
from fp8lab.linear import KERNELS
from fp8lab.precision import PrecisionPlan
from fp8lab.real_model import load_any
from fp8lab.rollout import NativeEngine, Rollout, SamplingParams
from fp8lab.rollout.vllm import VLLMEngine
from fp8lab.runlog import RunLog
from fp8lab.tasks import Task, load_task, prompt_batch
from fp8lab.trainer import Trainer, timed

Callback = Callable[[dict[str, Any]], None]
PROBED = 16  # prompts of each kind in a check
RECALIBRATE = ("every-step", "rollout", "never", "ones")


@dataclass(frozen=True, kw_only=True)
class ExperimentConfig:
    """Everything one run depends on."""

    name: str = "bf16"
    model: str = "tiny-llama"
    """See real_model.load_any: a model shipped in data/, a folder, a hub name, `smollm2-135m`, or a GGUF file."""
    task: str = "arithmetic"
    """See tasks.load_task."""
    plan: PrecisionPlan = field(default_factory=lambda: PrecisionPlan.preset("bf16"))
    grpo: GRPOConfig = field(default_factory=GRPOConfig)
    steps: int = 100
    prompts_per_step: int = 128
    """Prompts a step; each gets grpo.num_generations completions."""
    max_completion_length: int = 6
    """Longest completion in tokens, end-of-sequence included."""
    temperature: float = 1.0
    rollout_kernels: str = "default"
    """`other`: the rollout engine adds in another order than the trainer, as two real engines do."""
    engine: str = "native"
    """Or `vllm`, where it is installed (rollout/vllm.py): with kernels of its own whatever rollout_kernels says, and
    metrics that include `engine_gap` and `precision_gap`."""
    vllm: dict = field(default_factory=dict)
    """Settings handed on to vLLM under its own names, such as tensor_parallel_size (on GPUs)."""
    recalibrate: str = "every-step"
    """When FP8 attention gets new per-layer scales: `every-step`, from a forward over the step's tokens after the
    refit; `rollout`, from what the rollout's own attention saw: free, and one update old. Ablations: `never` after the
    first, and `ones`, scale 1.0 throughout."""
    seed: int = 0
    eval_every: int = 10
    """Steps between evaluations on validation prompts; there is one before the first step and one after the last."""
    eval_prompts: int = 256
    """Validation prompts per evaluation; the last evaluation takes all of them."""
    eval_samples: int = 2
    """Sampled answers per prompt; accuracy is their mean, at the training temperature."""
    checkpoint_every: int = 10
    """Steps between checkpoints."""
    allow_uncorrected_fp8_rollout: bool = False
    """FP8 rollouts without importance sampling are refused unless this says it is meant (an ablation)."""

    def __post_init__(self) -> None:
        require_types(self)
        require_choice("rollout_kernels", self.rollout_kernels, KERNELS)
        require_choice("engine", self.engine, ("native", "vllm"))
        if self.vllm and self.engine != "vllm":
            raise ValueError(f"vllm is {self.vllm} but engine is {self.engine!r}; set engine='vllm', or leave vllm out")
        counts = ("steps", "prompts_per_step", "max_completion_length", "eval_every", "eval_prompts", "eval_samples")
        for name in (*counts, "checkpoint_every"):
            if type(getattr(self, name)) is not int or getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be an integer >= 1")
        if not 0 < self.temperature < float("inf"):
            raise ValueError(f"temperature is {self.temperature}; RL needs a temperature > 0 (greedy never explores)")
        require_choice("recalibrate", self.recalibrate, RECALIBRATE)
        rollout, trainer = self.plan.rollout.attention, self.plan.trainer.attention
        if trainer.is_fp8 and trainer.scales == "per-layer" and not self.calibrates:
            raise ValueError(
                "the trainer's attention is FP8 with per-layer scales, which are calibrated for the rollout side, but "
                f"that has {rollout}; give both sides the same attention"
            )
        if (self.plan.rollout.linear.is_fp8 or rollout.is_fp8) and self.grpo.importance_sampling == "none":
            if not self.allow_uncorrected_fp8_rollout:
                raise ValueError(
                    "FP8 rollout with importance_sampling='none' learns from samples of another policy as if they were "
                    "its own; use 'is' or 'tis', or set allow_uncorrected_fp8_rollout=True if that ablation is meant"
                )
            warnings.warn("FP8 rollout without importance sampling: the gradient is biased (ablation)", stacklevel=3)

    @property
    def calibrates(self) -> bool:
        """True if the plan's rollout side needs per-layer scales of q, k and v."""
        attention = self.plan.rollout.attention
        return attention.is_fp8 and attention.scales == "per-layer"

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts and scalars, for JSON and YAML."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> ExperimentConfig:
        """The config `to_dict` wrote. `plan` may be a preset name. ValueError names unknown keys, wrong types."""
        for kind, values in ((cls, data), (GRPOConfig, data.get("grpo", {}) if isinstance(data, Mapping) else {})):
            known = {f.name for f in dataclasses.fields(kind)}
            if not isinstance(values, Mapping):
                raise ValueError(f"{kind.__name__} is {values!r}; give a mapping with keys {', '.join(sorted(known))}")
            if unknown := sorted(map(str, set(values) - known)):
                raise ValueError(f"unknown keys {unknown} for {kind.__name__}; allowed: {', '.join(sorted(known))}")
        data = dict(data)
        plan = data.pop("plan", "bf16")
        data["plan"] = PrecisionPlan.preset(plan) if isinstance(plan, str) else PrecisionPlan.from_dict(plan)
        data["grpo"] = GRPOConfig(**data.get("grpo", {}))
        return cls(**data)


class Loop:
    """The live objects of a run: task, trainer, engine. Notebooks use it to take the steps one by one."""

    def __init__(self, config: ExperimentConfig, task: Task | None = None) -> None:
        self.config = config
        distributed.require_shares(config)
        self.task = task or load_task(config.task)
        updates = config.steps * config.grpo.updates_per_rollout
        # batch_invariant is a property of the pair; `default` and `other` are of the rollout engine alone
        kernels = config.rollout_kernels if config.rollout_kernels == invariant.NAME else "default"
        model, tokenizer, _ = load_any(config.model)
        options = {"tokenizer": tokenizer, "kernels": kernels, "max_updates": updates}
        self.trainer = Trainer(model, config.plan, config.grpo, **options)
        self.engine: NativeEngine | VLLMEngine
        if config.engine == "vllm":
            self.engine = VLLMEngine(model, config.plan, tokenizer=tokenizer, **config.vllm)
        else:
            self.engine = NativeEngine(model, config.plan, tokenizer=tokenizer, kernels=config.rollout_kernels)
        if distributed.size() > 1:
            self.trainer.shard()
        self.seconds: dict[str, float] = {}
        if config.calibrates and config.recalibrate == "ones":
            self.set_attention_scales(AttentionScales.ones(self.trainer.model.config.num_hidden_layers))
        elif config.calibrates:  # before the first refit there are only prompts
            self._calibrate(prompt_batch(self.task.train, config.prompts_per_step, config.seed, 1)["prompt"])

    def step(self, number: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Take step `number` (from 1): the metrics row and a few samples."""
        config = self.config
        batch = prompt_batch(self.task.train, config.prompts_per_step, config.seed, number)
        with timed(self.seconds, "rollout"):
            rollout = self._generate(batch["prompt"], self._sampling(), "rollout", number)
        attention = self._attention_metrics(number)
        parts = {}
        if config.engine == "vllm":
            with timed(self.seconds, "gap_parts"):
                scales = self.engine.attention_scales if config.calibrates else None
                parts = gap_parts(self.trainer, rollout, scales)
        with timed(self.seconds, "reward"):
            rewards = self._grade(batch, rollout.completions, config.grpo.num_generations)
        with timed(self.seconds, "train"):
            metrics = self.trainer.step(rollout, rewards)
        self.seconds["train"] -= sum(self.trainer.seconds.values())
        self.seconds |= self.trainer.seconds
        self.trainer.seconds.clear()
        with timed(self.seconds, "refit"):
            self.engine.refit(self.trainer)
        if config.calibrates and config.recalibrate in ("every-step", "rollout"):
            self._calibrate(rollout if config.recalibrate == "every-step" else None)
        chosen = range(0, len(rewards), max(1, len(rewards) // 4))
        prompts = [p for p in batch["prompt"] for _ in range(config.grpo.num_generations)]
        samples = [
            {"step": number, "prompt": prompts[i], "completion": rollout.completions[i], "reward": rewards[i]}
            for i in chosen
        ]
        return {"step": number, **metrics, **parts, **attention}, samples[:4]

    def set_attention_scales(self, scales: AttentionScales) -> None:
        """Give the engine these scales of q, k and v, and the trainer too if its attention is FP8."""
        self.engine.attention_scales = scales
        for model in (self.trainer.model, self.trainer.reference):
            state = None if model is None else attention_of(model)
            if state is not None and not state.dynamic:
                state.scales = scales

    def restore_attention_scales(self, log: RunLog, step: int) -> None:
        """Take the scales that were in use after `step`; ValueError if the log does not have them."""
        if self.config.calibrates:
            row = next((row for row in log.rows("calibration") if row["step"] == step), None)
            if row is None:
                path = log.folder / "calibration.jsonl"
                raise ValueError(f"{path} has no step {step}; restore the file, or start a new run")
            self.set_attention_scales(AttentionScales(**{operand: row[operand] for operand in OPERANDS}))

    def _calibrate(self, batch: Rollout | list[str] | None) -> None:
        with timed(self.seconds, "calibrate"):
            self.engine.calibrate(batch)
        self.set_attention_scales(self.engine.attention_scales)

    def _attention_metrics(self, number: int) -> dict[str, float]:
        """Of the rollout just sampled: the share of q, k and v that was clamped, in the worst layer, the largest scale,
        and how many scales raised an alarm.

        From the second step on the first alarm is a warning, too; in the first step scales come from prompts alone, and
        clamping a little of the completions is to be expected.
        """
        if not self.config.plan.rollout.attention.is_fp8:
            return {}
        stats = self.engine.stats()
        if stats["attention_alarms"] and number > 1:
            warnings.warn(f"FP8 attention: {stats['attention_alarms'][0]}", stacklevel=3)
        saturation = stats["saturation"]
        metrics = {f"{operand}_saturation": max(saturation[operand]) for operand in OPERANDS}
        metrics["attention_alarms"] = len(stats["attention_alarms"])
        if self.config.calibrates:
            scales = self.engine.attention_scales
            metrics |= {f"{operand}_scale": max(getattr(scales, operand)) for operand in OPERANDS}
        everywhere = distributed.gather(metrics)
        return {name: max(found[name] for found in everywhere) for name in metrics}

    def evaluate(self, number: int, *, final: bool = False) -> dict[str, float]:
        """Sampled accuracy on validation prompts with the rollout engine, at the training temperature."""
        config = self.config
        dataset = self.task.validation
        size = len(dataset) if final else min(config.eval_prompts, len(dataset))
        batch = dataset[: size - size % distributed.size()]
        with timed(self.seconds, "evaluate"):
            sampling = dataclasses.replace(self._sampling(), n=config.eval_samples * (2 if final else 1))
            rollout = self._generate(batch["prompt"], sampling, "evaluate", number)
            rewards = self._grade(batch, rollout.completions, sampling.n)
        return {"validation_accuracy": sum(rewards) / len(rewards), "validation_samples": len(rewards)}

    def check(self, number: int) -> dict[str, Any]:
        """What `alarms.refit_check` finds after the refit of step `number`: prompts of that step and of the next."""
        size, seed = self.config.prompts_per_step, self.config.seed
        with timed(self.seconds, "check"):
            prompts = [prompt_batch(self.task.train, size, seed, n)["prompt"][:PROBED] for n in (number, number + 1)]
            sampling = dataclasses.replace(self._sampling(), n=2)
            return refit_check(self.engine, self.trainer, *prompts, sampling, seed=stream(seed, "check", number))

    def _generate(self, prompts: list[str], sampling: SamplingParams, purpose: str, number: int) -> Rollout:
        """The rollout of all prompts, of which this process samples its share."""
        purpose = f"{purpose}-{rank}" if (rank := distributed.rank()) else purpose
        seed = stream(self.config.seed, purpose, number)
        return distributed.gather_rollout(self.engine.generate(distributed.share(prompts), sampling, seed=seed))

    def _sampling(self) -> SamplingParams:
        config = self.config
        return SamplingParams(
            n=config.grpo.num_generations, temperature=config.temperature, max_tokens=config.max_completion_length
        )

    def _grade(self, batch: dict[str, list], completions: tuple[str, ...], n: int) -> list[float]:
        columns = {key: [v for v in values for _ in range(n)] for key, values in batch.items()}
        prompts = columns.pop("prompt")
        return self.task.reward(prompts, list(completions), **columns)


def run(
    config: ExperimentConfig,
    out: str | Path,
    *,
    on_step: Callback | None = None,
    should_stop: Callable[[], bool] | None = None,
    tracker: str | None = None,
) -> RunLog:
    """Run an experiment into the new folder `out`.

    on_step(row) is called after every logged step. should_stop() is asked between steps; a stopped run is checkpointed
    and can be resumed. tracker: `tensorboard`, `trackio` or `wandb` shows its metrics, too (trackers.py). Returns the
    RunLog to read. Raises FileExistsError if `out` holds a run already. Under torchrun (distributed.py) the first
    process alone writes and calls back.
    """
    trackers.require_tracker(tracker)
    log = RunLog(out)
    if distributed.rank() > 0:
        _continue(Loop(config), log, None, on_step, should_stop)
        return log
    with log:
        log.start(config.to_dict())
        trackers.begin(log, tracker)
        with trackers.followed(log, on_step) as on_step:
            _continue(Loop(config), log, None, on_step, should_stop)
    return log


def resume(
    out: str | Path, *, on_step: Callback | None = None, should_stop: Callable[[], bool] | None = None
) -> RunLog:
    """Go on with the run in `out` from its last checkpoint; the logs end up the same as if it had never stopped.

    Bit for bit that holds on the same machine with the same torch and as many threads; it warns if those differ. A
    finished run is left as it is. ValueError if what is left of the run cannot be gone on with.
    """
    log = RunLog(out)
    config = ExperimentConfig.from_dict(log.config)
    writes = distributed.rank() == 0
    with log if writes else nullcontext():
        if writes and (changed := log.changed_environment()):
            warnings.warn(f"this run began with {changed}: its last bits may now differ", stacklevel=2)
        step, folder = distributed.gather(log.resume_from())[0]
        loop = Loop(config) if step is None or step < config.steps else None
        if loop is not None and folder is not None:
            loop.trainer.load(folder)
            loop.engine.refit(loop.trainer)
            loop.restore_attention_scales(log, step)
            loop.seconds.clear()
        with trackers.followed(log, on_step) if writes and loop is not None else nullcontext(on_step) as on_step:
            if writes:
                log.rewind(-1 if step is None else step)
            if loop is not None:
                _continue(loop, log, step, on_step, should_stop)
    return log


def _continue(loop: Loop, log: RunLog, step: int | None, on_step: Callback | None, should_stop) -> None:
    """Take the steps after `step`; None is before the evaluation at step 0."""
    config = loop.config

    def record(row: dict[str, Any], samples: list[dict[str, Any]]) -> None:
        seconds = loop.seconds.copy()
        loop.seconds.clear()
        if distributed.rank() > 0:
            return
        for sample in samples:
            log.append("samples", sample)
        log.append("timing", {"step": row["step"], **seconds})
        if config.calibrates:
            log.append("calibration", {"step": row["step"], **loop.engine.attention_scales.to_dict()})
        log.append("metrics", row)
        if on_step is not None:
            on_step(row)

    def checkpoint() -> None:
        loop.trainer.save(log.checkpoint_folder(step))
        if distributed.rank() == 0:
            log.prune_checkpoints()

    def check(resumed: bool) -> None:
        if distributed.size() == 1:  # a sharded trainer has no whole weights to compare with
            log.append("checks", {"step": step, "resumed": resumed, **loop.check(step)})

    if step is None:
        step = 0
        record({"step": 0, **loop.evaluate(0)}, [])
    else:
        check(resumed=True)
    while step < config.steps:
        if should_stop is not None and distributed.gather(should_stop())[0]:
            checkpoint()
            return
        step += 1
        row, samples = loop.step(step)
        last = step == config.steps
        if last or step % config.eval_every == 0:
            row |= loop.evaluate(step, final=last)
        if step == 1 or "validation_accuracy" in row:
            check(resumed=False)
        record(row, samples)
        if last or step % config.checkpoint_every == 0:
            checkpoint()


def stream(seed: int, purpose: str, step: int) -> int:
    """The 63-bit seed of one random stream at one step."""
    digest = hashlib.blake2b(f"{seed}/{purpose}/{step}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
