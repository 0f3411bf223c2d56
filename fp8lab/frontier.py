"""Which layers to keep in BF16 for a budget of FLOPs, and what that buys: the frontier.

An FP8 GEMM is about twice as fast as a BF16 one, so every FLOP kept in BF16 costs speed, and some layers make much more
of the rollout/trainer gap for their FLOPs than others. `attribute` (attribution.py) measures each unit's own gap;

    recommend(table, budget)    the units with most gap per FLOP that fit a budget
    frontier(model, plan, ...)  that set's gap, measured, for several budgets, beside "the last layers" and "the first"

Nothing is trained: sets are ranked by paired mismatch. What a set does to accuracy is a question for `sweep`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from fp8lab.attribution import TENSORS, Progress, interval_columns, other_side, sample_tokens
from fp8lab.diagnostics import k3
from fp8lab.linear import float8_layers
from fp8lab.operands import BF16_LINEAR
from fp8lab.precision import SIDES, PrecisionPlan, Side
from fp8lab.rollout.engine import Rollout
from fp8lab.scoring import changed, put_side, score_side, shared_copy, token_logprobs

if TYPE_CHECKING:
    import pandas


def recommend(table: pandas.DataFrame, budget: float, *, column: str | None = None) -> list[str]:
    """Names of the units to keep in BF16 with at most `budget` (0 to 1) of the FP8-planned FLOPs: most gap for them.

    Greedy by `column` / flops_share; column defaults to `in_k3`, or `first_order_k3` without that sweep. k3 because it
    is nearly additive over units (d adds up like independent noise), mean |d| is not. ValueError for another budget.
    """
    if not 0 <= budget <= 1:
        raise ValueError(f"budget is {budget}; it is a share of FLOPs, 0 to 1")
    rows = table[table["tensor"] == TENSORS[0]]
    if rows.empty:
        raise ValueError(f"the table has no rows of tensor {TENSORS[0]!r}; attribute with that tensor")
    column = column or ("in_k3" if "in_k3" in rows else "first_order_k3")
    worth = (rows[column] / rows["flops_share"]).sort_values(ascending=False, kind="stable")
    return _fill(rows, worth.index, budget)


def frontier(
    model: nn.Module,
    plan: PrecisionPlan,
    sample: Rollout | torch.Tensor,
    table: pandas.DataFrame,
    *,
    mask: torch.Tensor | None = None,
    side: Side = "rollout",
    budgets: Sequence[float] = (0.05, 0.1, 0.2, 0.3, 0.5),
    orders: Sequence[str] = ("recommended", "last", "first"),
    known: Mapping[Side, torch.Tensor] | None = None,
    on_progress: Progress | None = None,
) -> pandas.DataFrame:
    """Gap removed against FLOPs kept in BF16, measured: for each budget the units of `recommend`, and for comparison
    (`orders`) those from the `last` layer backwards and from the `first` onwards.

    Take another sample than the table's, or the best-looking units flatter themselves. known: the sample's log-probs
    (B, T) under both sides of `plan`, if they have been scored already. Columns: `order`, `budget`,
    `flops_kept`, `units` kept, `mean_abs` and `k3` of the gap to the other side with `_low` and `_high`, and
    `removed`, the share of k3 that is gone, likewise (paired: the same rows drawn of both).
    """
    import pandas

    tokens, mask, temperature = sample_tokens(sample, mask)
    work = shared_copy(model)
    rows = table[table["tensor"] == TENSORS[0]]
    forward = rows.sort_values("layer", kind="stable").index
    picks = {
        "recommended": lambda budget: recommend(table, budget),
        "last": lambda budget: _fill(rows, forward[::-1], budget),
        "first": lambda budget: _fill(rows, forward, budget),
    }
    if known is None:
        known = {one: score_side(work, plan, one, tokens, temperature) for one in SIDES}
    put_side(work, plan, side, tokens)
    layers = dict(float8_layers(work))
    cases = [("plan", 0.0, [])] + [(o, b, picks[o](b)) for o in orders for b in budgets]
    found = []
    for done, (order, budget, kept) in enumerate(cases):
        with changed(layers, dict.fromkeys(kept, BF16_LINEAR)):
            scores = token_logprobs(work, tokens, temperature) if kept else known[side]
        d = known[other_side(side)] - scores
        share = float(rows["flops_share"][rows["name"].isin(kept)].sum())
        row = {"order": order, "budget": budget, "flops_kept": share, "units": len(kept)}
        row |= interval_columns("mean_abs", d.abs(), mask) | interval_columns("k3", k3(d), mask)
        found.append(row | _removed(known[other_side(side)] - known[side], d, mask))
        if on_progress is not None:
            on_progress(done + 1, len(cases))
    return pandas.DataFrame(found)


def _removed(before: torch.Tensor, after: torch.Tensor, mask: torch.Tensor) -> dict[str, float]:
    """The share of the k3 of d `before` that is gone `after`, with its 95 % percentile bootstrap over rows; 0 if there
    was none."""
    whole, left = (torch.where(mask, k3(d), 0.0).sum(1) for d in (before, after))
    drawn = torch.randint(len(whole), (1000, len(whole)), generator=torch.Generator().manual_seed(0))
    drawn = torch.cat([torch.arange(len(whole))[None], drawn])
    shares = (1 - left[drawn].sum(1) / whole[drawn].sum(1)).nan_to_num(0.0, posinf=0.0, neginf=0.0)
    low, high = shares[1:].quantile(torch.tensor([0.025, 0.975], dtype=shares.dtype)).tolist()
    return {"removed": shares[0].item(), "removed_low": low, "removed_high": high}


def _fill(rows: pandas.DataFrame, order, budget: float) -> list[str]:
    """Names in that order, each taken if it still fits."""
    kept, spent = [], 0.0
    for index in order:
        share = float(rows["flops_share"][index])
        if spent + share <= budget + 1e-9:
            kept.append(str(rows["name"][index]))
            spent += share
    return kept
