"""Checkers of notebook 10's exercises: depth, batch, and what to keep in BF16; see exercises.py for their rules."""

from __future__ import annotations

from typing import Any

from fp8lab.ui.lessons import Verdict, number, shown


def check_depth(layers: Any, share: float, anywhere: float) -> Verdict:
    """10: the layers after which `anywhere` of the tokens changed experts, if `share` do in each, independently."""
    if type(layers) is not int or not 1 <= layers <= 10**6:
        return Verdict(False, f"{shown(layers)} is no number of layers")
    reached = 1 - (1 - share) ** layers
    if reached < anywhere:
        hint = "a token keeps its experts with probability (1 - share)^layers"
        return Verdict(False, f"after {layers} layers it is {reached:.1%}; {hint}")
    if layers > 1 and 1 - (1 - share) ** (layers - 1) >= anywhere:
        return Verdict(False, f"after {layers} layers it is {reached:.1%}; fewer do")
    more = "a deeper model that shows no more than that has changes that fall on the same tokens"
    return Verdict(True, f"{reached:.1%} after {layers} layers; {more}.")


def check_batch(batch: Any, experts: int, per_token: int, share: float) -> Verdict:
    """10: the smallest batch whose tokens, `per_token` random experts each, read `share` of all experts on average."""
    if type(batch) is not int or not 1 <= batch <= 10**6:
        return Verdict(False, f"{shown(batch)} is no batch size")

    def read(tokens: int) -> float:
        return 1 - (1 - per_token / experts) ** tokens

    if read(batch) < share:
        hint = f"one token leaves an expert alone with probability 1 - {per_token}/{experts}"
        return Verdict(False, f"{batch} tokens read {read(batch):.0%} of the experts; {hint}")
    if read(batch - 1) >= share:
        return Verdict(False, f"{batch} tokens read {read(batch):.0%} of the experts; a smaller batch is enough")
    return Verdict(True, f"{batch} tokens read {read(batch):.0%} of the experts, to use {per_token} of them each.")


def check_routes(report: Any, left: float, whole: float, *, budget: float, most: float) -> Verdict:
    """10: a plan with at most `budget` of the rollout's FLOPs in BF16 and at most `most` of the changed tokens left.

    report: of `plan.report`; left, whole: `RouterAgreement.anywhere` under the plan, and under plain fp8-rollout.
    """
    if any(report[report["side"] == "trainer"]["fp8"] > 0):
        return Verdict(False, "the trainer is to stay in BF16; start from PrecisionPlan.preset('fp8-rollout')")
    if number(left) is None:
        return Verdict(False, f"{shown(left)} is no share of tokens; measure it again with this plan")
    rows = report[report["side"] == "rollout"]
    kept, remain = 1 - float((rows["share"] * rows["fp8"]).sum()), left / whole
    if kept > budget:
        return Verdict(False, f"{kept:.0%} of the FLOPs are in BF16; {budget:.0%} are allowed")
    if remain > most:
        hint = "a router flips because of what comes before it: where does the error enter that every router sees?"
        return Verdict(False, f"{remain:.0%} of the changed tokens are left for {kept:.0%} of the FLOPs; {hint}")
    return Verdict(True, f"{remain:.0%} of the changed tokens are left for {kept:.0%} of the FLOPs in BF16.")
