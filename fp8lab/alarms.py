"""Alarms: the faults of FP8 RL that have cost people months, looked for in the numbers of a run.

    alarms(RunLog("runs/a"))                         from a run's own files
    alarms(rows, plan=..., calibration=..., ...)     from metrics rows of any framework, and what else is known

Each check is a pure function of what it is given, and says nothing about what it is not given. A metrics row is a dict
with `step` and the names that `Trainer.step` logs. What metrics cannot show is asked of the live engines: the loop logs
a `refit_check` after the first refit, at every evaluation and after a resume. Thresholds, each with its source:

    GROWTH 0.01     NeMo RL docs/guides/grpo.md: a trend of token_mult_prob_error "beyond 1-2 %" is the weight update
    JUMP_SD 8       ours: in 2,580 places of the 30 shipped healthy runs the median of 5 steps rose over that of the 10
                    before by at most 0.0077, which was 6.6 robust standard deviations (1.4826 MAD, at least 5 %)
    STEPS_TO_MOVE   1e-6, ours: AdamW moves a weight by at most about the learning rate a step; a weight of 0.02 changes
                    its BF16 value after 6e-5, so learning rates that sum to less leave the engines as they were
    STALE 4         ours: standard errors of a difference of means; by chance once in 30,000 probes
    VETO 1e-4       verl docs/algo/rollout_corr.md and slime's mis.py: a token 10,000 times less likely is catastrophic
    ONE_TOKEN 0.05  verl docs/algo/rollout_corr.md (2025): "ideal: less than 5 % vetoed" sequences
    ESS 0.5, 0.3    the same: ideal above 0.5, warning below 0.3; VCPO (arXiv:2602.17616): low ESS foretells collapse
    LENGTH 0.3      Cohen (1988): a correlation of 0.3 is a medium effect; with at least 1 % rejected
    RATIO 0.02      ours: r has mean 1 if both sides score one distribution; the medians of 10 steps of the 84 shipped
                    runs were off by at most 0.0022
    UNCHANGED 10    ours: scales are amax of millions of values times a constant; ten steps of training that change no
                    bit of any are no calibration (vLLM takes a missing scale as 1.0 silently)

Left out: alarms on reward or entropy, which are about learning and not about precision.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fp8lab.diagnostics import stale_layers
from fp8lab.models import merged
from fp8lab.precision import PrecisionPlan
from fp8lab.rollout import NativeEngine
from fp8lab.rollout.engine import RolloutEngine
from fp8lab.rollout.sampling import SamplingParams
from fp8lab.runlog import RunLog

GROWTH, JUMP_SD, STEPS_TO_MOVE, STALE = 0.01, 8.0, 1e-6, 4.0
VETO, ONE_TOKEN, ESS, LENGTH, RATIO, UNCHANGED = 1e-4, 0.05, (0.5, 0.3), 0.3, 0.02, 10
RECENT = 10
"""Rows that a slow alarm looks back over (their median)."""
Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Alarm:
    """One fault, in words that say what to do."""

    severity: str
    """`error`: results are wrong or will be; `warning`: look at it."""
    name: str
    step: int | None
    """Where it shows; None if it is not about a step."""
    found: str
    threshold: str
    meaning: str
    do: str

    def __str__(self) -> str:
        at = "" if self.step is None else f" at step {self.step}"
        return f"{self.severity}: {self.name}{at}: {self.found} (alarm {self.threshold}). {self.meaning} {self.do}"


TEXTS = {
    "kv_scales_unset": (
        "error",
        "Nothing was calibrated or the scales were not sent: q, k or v above 448 is clamped.",
        "Calibrate after every step and check that the engine loads the scales (missing ones are 1.0).",
    ),
    "kv_scales_stuck": (
        "error",
        "The weights moved and the scales did not: they are stale, and will clamp once ranges grow.",
        "Calibrate with the updated weights after every step, and send the scales with the refit.",
    ),
    "scale_rules": (
        "error",
        "The same weights become other FP8 numbers on the two sides: a gap that no refit closes.",
        "Use one rule: NVTE_FP8_BLOCK_SCALING_FP32_SCALES=1 with VLLM_USE_DEEP_GEMM_E8M0=0, or pow2 on both.",
    ),
    "weights_differ": (
        "error",
        "The rollout samples from another policy than the one that is trained.",
        "Refit; if it persists, the refit skips these names or requantizes from something stale.",
    ),
    "growth_without_learning": (
        "error",
        "The weights stand still, so something else drifts: caches, scales, or a refit that accumulates.",
        "Refit twice with the same weights: outputs must be equal bit for bit; drop KV and prefix caches.",
    ),
    "jump_after_resume": (
        "error",
        "The engines were not brought to the same checkpoint: one holds older weights or scales.",
        "Refit (and recalibrate) before the first rollout after loading; compare bytes: stale_layers.",
    ),
    "stale_prefix_cache": (
        "error",
        "Keys and values of old weights are served to prompts that were seen before the refit.",
        "Reset the prefix cache with every refit (vLLM: reset_prefix_cache()).",
    ),
    "one_token_fault": (
        "error",
        "One token decides whether, or how much, a whole sequence counts.",
        "Look at that token (sampling settings, special tokens, a numerical fault); mask such tokens.",
    ),
    "one_token": (
        "warning",
        "One token decides whether, or how much, a whole sequence counts.",
        "Correct by token (tis, icepop) or by geometric mean instead of by product.",
    ),
    "masked_by_length": (
        "warning",
        "A product of ratios spreads with the square root of the length: long answers are dropped for it.",
        "Filter by the geometric mean (seq-mask-tis, geometric), or correct by token.",
    ),
    "mixed_logprobs": (
        "error",
        "The sides score different distributions: top-p or top-k (the mean is then the mass kept), raw log-probs at a "
        "temperature other than 1, or other weights.",
        "Sample with temperature alone and report processed log-probs at that temperature; then check the refit.",
    ),
    "nonfinite_logprobs": (
        "error",
        "These tokens are left out of the loss and of every metric, so the gap looks smaller than it is.",
        "Find the side that is not finite: a scale that is 0 or NaN, or a token that the sampler should have cut.",
    ),
    "nothing_learned": (
        "warning",
        "No token was left to learn from: all were cut off, rejected by the correction, or not finite.",
        "Widen the correction's bounds, allow longer completions, or find why the engines disagree.",
    ),
    "low_ess": (
        "warning",
        "A few tokens carry the whole update: its variance is that of a far smaller batch.",
        "Bound the weights (tis, max 2), and find why the engines disagree.",
    ),
}
"""Name -> (severity, what it means, what to do)."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PrefixProbe:
    """Mean |d| of each sequence, after a refit, for prompts the engine had seen before it and for new ones."""

    seen: torch.Tensor
    fresh: torch.Tensor


def alarms(
    run: RunLog | Rows,
    *,
    plan: PrecisionPlan | None = None,
    calibration: Rows | None = None,
    stale: Mapping[str, str] | None = None,
    resumed: Sequence[int] = (),
    prefix: PrefixProbe | None = None,
) -> list[Alarm]:
    """Every alarm that fires; errors first.

    run: a RunLog (plan, calibration and what the loop checked are then read from it), or metrics rows. calibration: a
    row a step with `q`, `k`, `v`: the scale of each layer. stale: what `diagnostics.stale_layers(trainer.model,
    engine.model)` returned. resumed: the steps after which the run was resumed. prefix: what `prefix_probe` returned.
    """
    found = [*weights_differ(stale or {}), *stale_prefix(prefix)]
    if isinstance(run, RunLog):
        plan = plan or PrecisionPlan.from_dict(run.config["plan"])
        calibration = run.rows("calibration") if calibration is None else calibration
        checks = run.rows("checks")
        resumed = [*resumed, *(row["step"] for row in checks if row["resumed"])]
        found += _first(weights_differ(row["stale"] or {}, row["step"]) for row in checks)
        found += _first(stale_prefix(_probe(row), row["step"]) for row in checks)
        run = run.rows()
    rows = [row for row in run if "token_mult_prob_error" in row]
    found += [*kv_scales(calibration or ()), *scale_rules(plan), *growth_without_learning(rows)]
    found += [*jump_after_resume(rows, resumed), *one_token(rows), *masked_by_length(rows), *low_ess(rows)]
    found += [*mixed_logprobs(rows), *nonfinite_logprobs(rows), *nothing_learned(rows)]
    return sorted(found, key=lambda alarm: alarm.severity != "error")


def kv_scales(rows: Rows) -> list[Alarm]:
    """Scales of q, k and v that are all 1.0, or that no step changed for UNCHANGED steps."""
    if not rows:
        return []
    step, scales = rows[-1]["step"], [_scales(row) for row in rows]
    if set(scales[-1]) == {1.0}:
        return [_alarm("kv_scales_unset", step, f"all {len(scales[-1])} scales are 1.0", "all 1.0")]
    same = next((i for i, old in enumerate(reversed(scales)) if old != scales[-1]), len(scales)) - 1
    if same < UNCHANGED:
        return []
    found = f"no bit of {len(scales[-1])} scales changed in {same} steps"
    return [_alarm("kv_scales_stuck", step, found, f"unchanged for {UNCHANGED} steps")]


def scale_rules(plan: PrecisionPlan | None) -> list[Alarm]:
    """Both sides in FP8, but quantized by different rules, blocks or from different sources."""
    if plan is None or not (plan.rollout.linear.is_fp8 and plan.trainer.linear.is_fp8):
        return []
    names = ("rule", "weight", "activation", "weight_block", "group", "weight_source")
    ours, theirs = (dataclasses.asdict(side.linear) for side in (plan.trainer, plan.rollout))
    differ = [f"{n}: rollout {theirs[n]}, trainer {ours[n]}" for n in names if ours[n] != theirs[n]]
    return [_alarm("scale_rules", None, "; ".join(differ), "any difference")] if differ else []


def weights_differ(stale: Mapping[str, str], step: int | None = None) -> list[Alarm]:
    """Bytes in the rollout that the trainer's own weights do not give; stale: name -> reason."""
    if not stale:
        return []
    name, why = next(iter(stale.items()))
    return [_alarm("weights_differ", step, f"{len(stale)} tensors, first {name}: {why}", "any byte")]


def growth_without_learning(rows: Rows) -> list[Alarm]:
    """Mismatch that rises although the weights cannot have moved (learning rate 0, or next to it)."""
    rows = [row for row in rows if "learning_rate" in row]
    if len(rows) < 8 or sum(row["learning_rate"] for row in rows) > STEPS_TO_MOVE:
        return []
    from scipy import stats

    errors = [row["token_mult_prob_error"] for row in rows]
    part = max(2, len(errors) // 4)
    growth = statistics.median(errors[-part:]) - statistics.median(errors[:part])
    trend = stats.spearmanr(range(len(errors)), errors)
    if not (growth >= GROWTH and trend.statistic > 0 and trend.pvalue < 1e-3):
        return []
    rate = max(row["learning_rate"] for row in rows)
    found = f"token_mult_prob_error rose by {growth:.3f} in {len(rows)} steps with learning rates of at most {rate:.0e}"
    threshold = f"a rise of {GROWTH} with rank correlation p < 0.001"
    return [_alarm("growth_without_learning", rows[-1]["step"], found, threshold)]


def jump_after_resume(rows: Rows, resumed: Iterable[int]) -> list[Alarm]:
    """Mismatch of the 5 steps after a resume far above the 10 before."""
    alarms = []
    for step in sorted(set(resumed)):
        before = [row["token_mult_prob_error"] for row in rows if step - 10 < row["step"] <= step]
        after = [row["token_mult_prob_error"] for row in rows if step < row["step"] <= step + 5]
        if len(before) < 3 or not after:
            continue
        middle, now = statistics.median(before), statistics.median(after)
        spread = 1.4826 * statistics.median(abs(x - middle) for x in before)
        spread = max(spread, 0.05 * (middle - 1))
        if now - middle >= GROWTH and now - middle > JUMP_SD * spread:
            found = f"token_mult_prob_error went from {middle:.4f} to {now:.4f}"
            threshold = f"a jump of {GROWTH} and of {JUMP_SD:g} robust standard deviations"
            alarms.append(_alarm("jump_after_resume", step, found, threshold))
    return alarms


def stale_prefix(probe: PrefixProbe | None, step: int | None = None) -> list[Alarm]:
    """Prompts the engine had seen before the refit disagree more than new ones."""
    if probe is None:
        return []
    seen, fresh = (x[x.isfinite()].double() for x in (probe.seen, probe.fresh))
    if min(len(seen), len(fresh)) < 2:
        return []
    difference = (seen.mean() - fresh.mean()).item()
    error = math.sqrt(seen.var().item() / len(seen) + fresh.var().item() / len(fresh))
    if not (difference >= GROWTH and difference > STALE * error):
        return []
    found = f"mean |d| is {seen.mean():.3f} nats for repeated prompts, {fresh.mean():.3f} for new ones"
    return [_alarm("stale_prefix_cache", step, found, f"a difference of {GROWTH} and of {STALE:g} standard errors")]


def one_token(rows: Rows) -> list[Alarm]:
    """Sequences whose product ratio hangs on a single token; and a token so unlikely that it is a fault by itself."""
    alarms = []
    worst = max(rows, key=lambda row: row.get("max_abs_difference", 0.0), default=None)
    if worst is not None and worst.get("max_abs_difference", 0.0) > -math.log(VETO):
        found = f"a token with |d| = {worst['max_abs_difference']:.1f} nats"
        threshold = f"|d| > {-math.log(VETO):.2f}, a ratio beyond {VETO:g}"
        alarms.append(_alarm("one_token_fault", worst["step"], found, threshold))
    share = _recent(rows, "one_token_sequences")
    if share is not None and share >= ONE_TOKEN:
        found = f"{share:.1%} of the sequences leave [1/2, 2] because of one token"
        alarms.append(_alarm("one_token", rows[-1]["step"], found, f"{ONE_TOKEN:.0%}"))
    return alarms


def masked_by_length(rows: Rows) -> list[Alarm]:
    """Whole sequences rejected for being long."""
    rows = [row for row in rows if "rejection_length_correlation" in row]
    value, rejected = _recent(rows, "rejection_length_correlation"), _recent(rows, "is_oob_ratio")
    if value is None or len(rows) < 5 or value < LENGTH or (rejected or 0.0) < 0.01:
        return []
    found = f"rejection and length correlate by {value:.2f}; {rejected:.1%} of the sequences are out of bounds"
    threshold = f"{LENGTH} with at least 1 % out of bounds"
    return [_alarm("masked_by_length", rows[-1]["step"], found, threshold)]


def low_ess(rows: Rows) -> list[Alarm]:
    """An effective sample size that leaves few samples."""
    value = _recent(rows, "effective_sample_size")
    if value is None or value >= ESS[0]:
        return []
    found, threshold = f"effective sample size {value:.2f} of the tokens", f"below {ESS[0]}; error below {ESS[1]}"
    alarm = _alarm("low_ess", rows[-1]["step"], found, threshold)
    return [dataclasses.replace(alarm, severity="error" if value < ESS[1] else "warning")]


def mixed_logprobs(rows: Rows) -> list[Alarm]:
    """A mean ratio that stays off 1: the log-probs are not of the same distribution."""
    rows = [row for row in rows if "sampling_importance_ratio" in row]
    ratio = _recent(rows, "sampling_importance_ratio")
    if len(rows) < 5 or abs(ratio - 1) < RATIO:
        return []
    found = f"the mean ratio is {ratio:.3f} (median of the last {min(len(rows), RECENT)} steps)"
    return [_alarm("mixed_logprobs", rows[-1]["step"], found, f"{RATIO} off 1")]


def nonfinite_logprobs(rows: Rows) -> list[Alarm]:
    """NaN or infinite log-probs, in the step that had most of them."""
    worst = max(rows, key=lambda row: row.get("nonfinite_tokens", 0), default={})
    if not worst.get("nonfinite_tokens"):
        return []
    found = f"{worst['nonfinite_tokens']:g} log-probs are NaN or infinite"
    return [_alarm("nonfinite_logprobs", worst["step"], found, "any")]


def nothing_learned(rows: Rows) -> list[Alarm]:
    """Updates without a token, among the latest steps."""
    skipped = [row for row in rows[-RECENT:] if row.get("skipped_updates")]
    if not skipped:
        return []
    found = f"{len(skipped)} of the last {min(len(rows), RECENT)} steps skipped an update"
    return [_alarm("nothing_learned", skipped[-1]["step"], found, "any")]


def prefix_probe(
    engine: RolloutEngine,
    trainer: Any,
    seen: Sequence[str],
    fresh: Sequence[str],
    sampling: SamplingParams,
    *,
    seed: int = 0,
) -> PrefixProbe:
    """Roll out prompts that `engine` read before its last refit and prompts it never read, and score both with
    `trainer` (a Trainer with the same weights)."""
    gaps = []
    for prompts in (seen, fresh):
        rollout = engine.generate(list(prompts), sampling, seed=seed)
        d = torch.where(rollout.mask, (trainer.score(rollout) - rollout.logprobs).abs(), 0.0)
        gaps.append(d.sum(1) / rollout.mask.sum(1))
    return PrefixProbe(seen=gaps[0], fresh=gaps[1])


def _alarm(name: str, step: int | None, found: str, threshold: str) -> Alarm:
    severity, meaning, do = TEXTS[name]
    return Alarm(severity=severity, name=name, step=step, found=found, threshold=threshold, meaning=meaning, do=do)


def _probe(check: Mapping[str, Any]) -> PrefixProbe:
    return PrefixProbe(**{key: torch.tensor(check[key]) for key in ("seen", "fresh")})


def _first(found: Iterable[list[Alarm]]) -> list[Alarm]:
    """The first that fired."""
    return next(filter(None, found), [])


def refit_check(
    engine: RolloutEngine,
    trainer: Any,
    seen: Sequence[str],
    fresh: Sequence[str],
    sampling: SamplingParams,
    *,
    seed: int,
) -> dict[str, Any]:
    """What the loop logs after a refit, as plain values: `stale`, tensors that the engine does not hold as the
    trainer's weights give (name -> reason; None for an engine in another process), and `prefix_probe`'s two lists."""
    probe = prefix_probe(engine, trainer, seen, fresh, sampling, seed=seed)
    stale = stale_layers(merged(trainer.model), engine.model) if isinstance(engine, NativeEngine) else None
    lists = {key: [round(value, 5) for value in getattr(probe, key).tolist()] for key in ("seen", "fresh")}
    return {"stale": stale, **lists}


def _scales(row: Mapping[str, Any]) -> list[float]:
    return [scale for operand in ("q", "k", "v") for scale in row.get(operand, ())]


def _recent(rows: Rows, key: str) -> float | None:
    values = [row[key] for row in rows if key in row][-RECENT:]
    return statistics.median(values) if values else None
