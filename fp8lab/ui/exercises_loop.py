"""Checkers of the exercises of notebooks 08 and 11; what a checker is, `exercises` says."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

import torch

from fp8lab import preflight, speed
from fp8lab.grpo import GRPOConfig, policy_loss
from fp8lab.precision import PrecisionPlan
from fp8lab.ui.lessons import Verdict, number, shown


def check_dual_clip(changes: Any, *, pushed: float, stopped: float) -> Verdict:
    """08: fields of GRPOConfig under which a token of advantage -1 has its full gradient at ratio `pushed`, none at
    `stopped`."""
    logprobs = torch.tensor([[pushed, stopped]]).log().requires_grad_()
    try:
        loss, _ = policy_loss(logprobs, torch.zeros(1, 2), torch.tensor([-1.0]), GRPOConfig(**changes))
    except (TypeError, ValueError, OverflowError) as error:
        return Verdict(False, str(error))
    force = torch.autograd.grad(loss.sum(), logprobs)[0][0].tolist()
    if force[0] < 0.99 * pushed:
        return Verdict(
            False, f"at ratio {pushed:g} the push is {force[0]:.2g} already, {pushed:g} asked for: too tight"
        )
    if force[1] > 0:
        return Verdict(False, f"at ratio {stopped:g} the push is still {force[1]:.2g}; which field bounds punishments?")
    return Verdict(True, f"pushed by {force[0]:.2g} at ratio {pushed:g}, by {force[1]:.2g} at {stopped:g}.")


def check_seeds(differences: Sequence[float], seeds: Any) -> Verdict:
    """08: how many seeds, to a factor of 1.3, until the 95 % interval of these paired differences leaves out 0, if
    mean and spread stay."""
    from scipy import stats

    mean, spread = abs(statistics.fmean(differences)), statistics.stdev(differences)
    half = lambda n: float(stats.t.ppf(0.975, n - 1)) * spread / math.sqrt(n)  # noqa: E731
    if type(seeds) is not int or not 2 <= seeds <= 10**9:
        return Verdict(False, f"{shown(seeds)} is no number of seeds; an interval needs at least 2")
    found = next(n for n in range(2, 100_000) if half(n) < mean)
    if found / 1.3 <= seeds <= found * 1.3:
        return Verdict(True, f"{found} seeds: ±{half(found):.4f} around {mean:.4f}.")
    hint = "the half-width is about 2 x the spread / sqrt(n)"
    return Verdict(False, f"with {seeds} it is {mean:.4f} ± {half(seeds):.4f}, wanted is just past 0; {hint}")


def check_unprofitable(shape: speed.ModelShape, work: Any) -> Verdict:
    """11: a workload of at least 256 answers on 8 H100 that FP8 end to end makes slower, by the model."""
    if not isinstance(work, speed.Workload):
        return Verdict(False, f"{type(work).__name__} is no speed.Workload")
    if work.prompts * work.generations < 256 or work.gpus != 8:
        return Verdict(False, f"{work.prompts * work.generations} answers on {work.gpus} GPUs; 256 or more on 8")
    gpu, plans = speed.GPUS["H100"], ("bf16", "fp8-e2e")
    times = {name: speed.step(shape, PrecisionPlan.preset(name), gpu, work) for name in plans}
    gain = speed.gains(times)["fp8-e2e"]["step"]
    if gain >= 0:
        largest = max(times["bf16"], key=times["bf16"].get)
        hint = f"most of the step is {largest}; which phase does FP8 make longer, whatever the answers?"
        return Verdict(False, f"FP8 still brings {gain:+.1%}: {hint}")
    refit = times["fp8-e2e"]["refit"] / sum(times["fp8-e2e"].values())
    return Verdict(True, f"{gain:+.1%}: the quantizing refit alone is {refit:.0%} of the FP8 step.")


def check_throughput(less_time: float, more: Any) -> Verdict:
    """11: how much more throughput is `less_time` (a share) less step time?"""
    if number(more) is None:
        return Verdict(False, f"{shown(more)} is no share; give a number such as 0.2")
    wanted = 1 / (1 - less_time) - 1
    if abs(more - wanted) < 0.005:
        return Verdict(True, f"{less_time:.0%} less time is {wanted:.0%} more throughput: the words differ by a third.")
    if abs(more - 100 * wanted) < 0.5:
        return Verdict(False, "right as a percentage; give a share such as 0.2")
    hint = f"a step takes {1 - less_time:g} of the time it took, so how many steps fit into the time of one?"
    return Verdict(False, f"{more:g} is not it: {hint}")


def check_blackwell(model: str, plan: Any, **setting: Any) -> Verdict:
    """11: a plan with FP8 in the rollout and in the trainer that preflight lets run on B200."""
    if not isinstance(plan, PrecisionPlan):
        return Verdict(False, f"{type(plan).__name__} is no PrecisionPlan")
    if not (plan.rollout.linear.is_fp8 and plan.trainer.linear.is_fp8):
        return Verdict(False, "that gives FP8 up on one side; the plan is to stay FP8 end to end")
    errors = [p for p in preflight.check(plan, model, hardware="B200", **setting) if p.severity == "error"]
    if errors:
        return Verdict(False, f"{errors[0].where}: found {errors[0].found}; allowed: {errors[0].allowed}")
    return Verdict(True, f"{plan.name} has nothing against B200.")
