"""The small things lessons are made of: a first cell, a prediction to commit to, a source listing, checkers with hints.

A checker never raises on a wrong answer: a notebook must run to its end before its reader has solved anything. It
returns a `Verdict`, which a cell displays. What a reader typed in may be anything: `number` and `shown` take it safely.
"""

from __future__ import annotations

import inspect
import math
import os
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import ipywidgets as widgets
from IPython.display import Code

from fp8lab.names import LAYER_LISTS
from fp8lab.precision import PrecisionPlan


def fast() -> bool:
    """True with FP8LAB_FAST=1: tiny sizes, for tests. It changes sizes only, never what is computed."""
    return os.environ.get("FP8LAB_FAST", "0") not in ("", "0")


def start(*, threads: int = 1) -> str:
    """For a notebook's first cell: keeps loading bars out of the cells, sets torch's threads, and says what runs here.

    One thread is as fast as two for a model this small, and leaves the other core to Jupyter and the browser: two
    threads that wait for each other on a busy machine were measured 10 times slower.
    """
    import torch
    import transformers

    import fp8lab

    torch.set_num_threads(threads)
    transformers.utils.logging.disable_progress_bar()
    sizes = "tiny sizes (FP8LAB_FAST=1), for tests only" if fast() else "full size"
    versions = f"fp8lab {fp8lab.__version__} · torch {torch.__version__} · transformers {transformers.__version__}"
    return f"{versions} · {torch.get_num_threads()} thread · backend: emulated · {sizes}"


def source(thing: Any) -> Code:
    """The definition of a function, class or module as it stands in the package."""
    return Code(textwrap.dedent(inspect.getsource(thing)), language="python")


def left(table: Any) -> Any:
    """A styled table (pandas Styler) of words: cells and headers aligned to the left. Returns it."""
    align = "text-align: left"
    return table.set_table_styles([{"selector": place, "props": align} for place in ("td", "th")], overwrite=False)


class Prediction:
    """A question with options; the reader picks one before looking. Show it by ending a cell with it; then
    `compare`."""

    def __init__(self, question: str, options: Sequence[str]) -> None:
        self.question = question
        self.choice = widgets.RadioButtons(options=list(options), value=None, layout={"width": "max-content"})
        self.note = widgets.HTML("<i>Pick one before you run on; there is no penalty.</i>")
        self.choice.observe(self._chosen, names="value")
        self.view = widgets.VBox([widgets.HTML(f"<b>{escape(question)}</b>"), self.choice, self.note])

    def _chosen(self, change: dict[str, Any]) -> None:
        self.note.value = f"Noted: <i>{escape(str(change['new']))}</i>. Run on and compare."

    def compare(self, measured: str) -> str:
        """The prediction beside what was measured, as text."""
        return f"you predicted: {self.choice.value or '(nothing yet)'}\nmeasured:      {measured}"

    def _ipython_display_(self) -> None:
        from IPython.display import display

        display(self.view)


@dataclass(frozen=True)
class Verdict:
    """What a checker says; displays as a coloured line in a notebook."""

    ok: bool
    message: str

    def __repr__(self) -> str:
        return f"{'solved' if self.ok else 'not yet'}: {self.message}"

    def _repr_html_(self) -> str:
        color = "#0a8f6a" if self.ok else "#c46a00"
        return f'<div style="border-left: 4px solid {color}; padding-left: 8px">{escape(repr(self))}</div>'


def number(x: Any) -> float | None:
    """What a reader typed in as a finite float; None for all else: text, truth values, NaN, infinities, integers that
    no float holds."""
    if isinstance(x, bool) or not isinstance(x, int | float):
        return None
    try:
        value = float(x)
    except OverflowError:
        return None
    return value if math.isfinite(value) else None


def shown(x: Any) -> str:
    """repr(x) for a hint, cut at 60 characters; the type's name if it has none (Python prints no huge integers)."""
    try:
        text = repr(x)
    except Exception:  # a reader's own object may do anything
        return f"this {type(x).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}..."


def check_fallback(plan: Any, excess: Any, reference: float, *, layers: int = 4, budget: int = 2) -> Verdict:
    """Quickstart: BF16 in at most `budget` of `layers` decoder layers, and at most 0.55 of the mismatch.

    A layer counts as soon as one of its linears is in BF16. excess: token_mult_prob_error - 1 under `plan`; reference:
    the same of plain `fp8-rollout` at the same weights and prompts.
    """
    if not isinstance(plan, PrecisionPlan):
        return Verdict(False, f"the plan is a {type(plan).__name__}; start from PrecisionPlan.preset('fp8-rollout')")
    if not plan.rollout.linear.is_fp8 or plan.trainer.linear.is_fp8:
        return Verdict(False, "the exercise is about FP8 on the rollout side only; start from the preset 'fp8-rollout'")
    if number(excess) is None:
        return Verdict(False, f"the mismatch is {shown(excess)}; measure it again with this plan")
    kept = [_touched(plan, layer, layers) for layer in range(layers)]
    share = excess / reference
    if sum(kept) > budget:
        return Verdict(False, f"{sum(kept)} of {layers} layers have linears in BF16; at most {budget} may")
    if share > 0.55:
        hints = ["Keep some layers in BF16 with plan.with_bf16(...)", "One layer is not enough; you may keep two"]
        late = "An error made early passes through every later layer, one made late does not. Which end to protect?"
        return Verdict(False, f"{share:.0%} of the mismatch is left. {[*hints, late][min(2, sum(kept))]}")
    return Verdict(
        True,
        f"{share:.0%} of the mismatch is left with {sum(kept)} of {layers} layers in BF16. Early layers cost most.",
    )


def _touched(plan: PrecisionPlan, layer: int, layers: int) -> bool:
    """True if any planned linear of a decoder layer stays in BF16 on the rollout side."""
    names = [f"self_attn.{n}_proj" for n in "qkvo"] + [f"mlp.{n}_proj" for n in ("gate", "up", "down")]
    decisions = (plan.decide(f"model.{LAYER_LISTS[0]}.{layer}.{name}", "rollout", layers) for name in names)
    return not all(decision.precision.is_fp8 for decision in decisions)


def check_order(runs: Any, better: Any, worse: Any, *, arm: str = "fp8-rollout", base: str = "bf16") -> Verdict:
    """Quickstart: a seed under which `arm` ends more accurate than `base`, and one under which it ends less accurate.

    runs: a table of `sweep.final_metrics`, one row a run.
    """
    table = runs.pivot(index="seed", columns="name", values="accuracy_last")
    ahead = dict(zip(table.index.tolist(), (table[arm] - table[base]).tolist(), strict=True))
    for seed, sign, word in ((better, 1, "above"), (worse, -1, "below")):
        if type(seed) is not int or seed not in ahead:
            return Verdict(False, f"{shown(seed)} is none of the seeds {', '.join(map(str, ahead))}")
        if not sign * ahead[seed] > 0:
            hint = "`runs` has a row a run: compare accuracy_last of both arms, seed by seed"
            return Verdict(False, f"under seed {seed} {arm} ends {ahead[seed]:+.4f} from {base}, not {word} it; {hint}")
    count = sum(value > 0 for value in ahead.values())
    return Verdict(
        True,
        f"{ahead[better]:+.4f} and {ahead[worse]:+.4f}. {arm} is ahead in {count} of {len(ahead)} seeds: with one seed "
        "the study could have said either.",
    )
