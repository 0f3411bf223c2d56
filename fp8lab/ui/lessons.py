"""The small things lessons are made of: a first cell, a prediction to commit to, a source listing, checkers with hints.

A checker never raises on a wrong answer: a notebook must run to its end before its reader has solved anything. It
returns a `Verdict`, which a cell displays.
"""

from __future__ import annotations

import inspect
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


def check_fallback(plan: Any, excess: float, reference: float, *, layers: int = 4, budget: int = 2) -> Verdict:
    """Quickstart: at most `budget` of `layers` decoder layers in BF16, and at most 0.55 of the mismatch.

    excess: token_mult_prob_error - 1 under `plan`; reference: the same of plain `fp8-rollout` at the same weights and
    prompts.
    """
    if not isinstance(plan, PrecisionPlan):
        return Verdict(False, f"the plan is a {type(plan).__name__}; start from PrecisionPlan.preset('fp8-rollout')")
    if not plan.rollout.linear.is_fp8 or plan.trainer.linear.is_fp8:
        return Verdict(False, "the exercise is about FP8 on the rollout side only; start from the preset 'fp8-rollout'")
    kept = [_kept(plan, layer, layers) for layer in range(layers)]
    share = excess / reference
    if sum(kept) > budget:
        return Verdict(False, f"{sum(kept)} of {layers} layers are in BF16; at most {budget} may be")
    if share > 0.55:
        hints = ["Keep some layers in BF16 with plan.with_bf16(...)", "One layer is not enough; you may keep two"]
        late = "An error made early passes through every later layer, one made late does not. Which end to protect?"
        return Verdict(False, f"{share:.0%} of the mismatch is left. {[*hints, late][min(2, sum(kept))]}")
    return Verdict(
        True,
        f"{share:.0%} of the mismatch is left with {sum(kept)} of {layers} layers in BF16. Early layers cost most.",
    )


def _kept(plan: PrecisionPlan, layer: int, layers: int) -> bool:
    """True if a whole decoder layer's linears stay in BF16 on the rollout side."""
    names = [f"self_attn.{n}_proj" for n in "qkvo"] + [f"mlp.{n}_proj" for n in ("gate", "up", "down")]
    decisions = (plan.decide(f"model.{LAYER_LISTS[0]}.{layer}.{name}", "rollout", layers) for name in names)
    return not any(decision.precision.is_fp8 for decision in decisions)
