"""Which layers to keep in BF16 for a budget of FLOPs, and what that buys: the frontier.

An FP8 GEMM is about twice as fast as a BF16 one, so every FLOP kept in BF16 costs speed, and some layers make much more
of the rollout/trainer gap for their FLOPs than others. `attribute` (attribution.py) measures each unit's own gap;

    recommend(table, budget)    the units with most gap per FLOP that fit a budget
    frontier(model, plan, ...)  that set's gap, measured, for several budgets, beside "the last layers" and "the first"

Nothing is trained: sets are ranked by paired mismatch. What a set does to accuracy is a question for `sweep`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from fp8lab.attribution import (
    TENSORS,
    Progress,
    interval_columns,
    other_side,
    sample_tokens,
    score_side,
    shared_copy,
)
from fp8lab.diagnostics import k3
from fp8lab.precision import PrecisionPlan, Side
from fp8lab.rollout.engine import Rollout

if TYPE_CHECKING:
    import pandas


def recommend(table: pandas.DataFrame, budget: float, *, column: str | None = None) -> list[str]:
    """Names of the units to keep in BF16 with at most `budget` (0 to 1) of the table's FLOPs: most gap for the FLOPs.

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
    on_progress: Progress | None = None,
) -> pandas.DataFrame:
    """Gap removed against FLOPs kept in BF16, measured: for each budget the units of `recommend`, and for comparison
    (`orders`) those from the `last` layer backwards and from the `first` onwards.

    Take another sample than the table's, or the best-looking units flatter themselves. Columns: `order`, `budget`,
    `flops_kept`, `units` kept, `mean_abs` and `k3` of the gap to the other side with `_low` and `_high`, and
    `removed`, the share of k3 that is gone.
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
    other = score_side(work, plan, other_side(side), tokens, temperature)
    cases = [("plan", 0.0, [])] + [(o, b, picks[o](b)) for o in orders for b in budgets]
    found = []
    for done, (order, budget, kept) in enumerate(cases):
        changed_plan = plan.with_bf16(modules=kept, side=side) if kept else plan
        d = other - score_side(work, changed_plan, side, tokens, temperature)
        share = float(rows["flops_share"][rows["name"].isin(kept)].sum())
        row = {"order": order, "budget": budget, "flops_kept": share, "units": len(kept)}
        found.append(row | interval_columns("mean_abs", d.abs(), mask) | interval_columns("k3", k3(d), mask))
        if on_progress is not None:
            on_progress(done + 1, len(cases))
    for row in found:
        row["removed"] = 1 - row["k3"] / found[0]["k3"] if found[0]["k3"] else 0.0
    return pandas.DataFrame(found)


def _fill(rows: pandas.DataFrame, order, budget: float) -> list[str]:
    """Names in that order, each taken if it still fits."""
    kept, spent = [], 0.0
    for index in order:
        share = float(rows["flops_share"][index])
        if spent + share <= budget + 1e-9:
            kept.append(str(rows["name"][index]))
            spent += share
    return kept
