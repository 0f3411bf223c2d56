"""Is my gap a bug or just FP8? One report about a model, a plan and a text (`python -m fp8lab diagnose`).

The same tokens are scored three times with the same weights: all in BF16, by the plan's rollout side, by its trainer
side. From that come the gap between the sides, which training would see; how far each side is from BF16, which an
end-to-end plan hides (both sides round alike: no gap by construction, yet both moved); perplexities; a verdict against
published bands; each module's share to first order; and what a few layers kept in BF16 would buy, measured. Fused
experts, the KV cache and attention are not attributed: the report says what they are, and how much of the gap is left
with everything else in BF16.

A text was not sampled from the rollout side, so k3 and the ratios are descriptions of these tokens, not estimates of a
KL. Without a text the tokens are drawn from the rollout side instead, as in RL.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fp8lab.attribution import attribute, interval_columns, other_side
from fp8lab.checks import require_count
from fp8lab.coverage import planned_flops
from fp8lab.diagnostics import clamped_exp, k3, mismatch
from fp8lab.frontier import frontier
from fp8lab.precision import SIDES, PrecisionPlan, Side
from fp8lab.real_model import load_any, token_windows
from fp8lab.rollout import NativeEngine, SamplingParams
from fp8lab.runlog import write_atomically
from fp8lab.scoring import score_side, shared_copy
from fp8lab.sequence_metrics import Verdict, interval_over_sequences, verdict
from fp8lab.tasks import load_task

if TYPE_CHECKING:
    import pandas

WINDOW, ATTRIBUTED_TOKENS, PROBES = 64, 1024, 4
PARTS = 8
"""Calls of on_progress."""
BUDGETS, BUDGET_ORDERS = (0.1, 0.2), ("recommended",)
REAL_MODEL, REAL_TOKENS = 10_000_000, 4000
"""A model with that many parameters is reported on with a warning if there are fewer tokens."""
Progress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What `diagnose` found."""

    summary: dict[str, Any]
    """Model, plan, tokens, perplexities, gaps: plain values, as in report.json."""
    verdicts: list[Verdict]
    """The gap between the sides against published bands."""
    layers: pandas.DataFrame
    """`attribute` without sweeps, most gap first."""
    fallbacks: pandas.DataFrame
    """`frontier` for BUDGETS."""

    def write(self, folder: str | Path) -> list[Path]:
        """Write report.json, layers.csv and report.md; returns their paths."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        texts = {
            "report.json": json.dumps(self.as_dict(), indent=1),
            "layers.csv": self.layers.to_csv(index=False),
            "report.md": self.as_markdown(),
        }
        for name, text in texts.items():
            write_atomically(folder / name, text)
        return [folder / name for name in texts]

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain values: what report.json holds."""
        return self.summary | {
            "verdicts": [v._asdict() for v in self.verdicts],
            "fallbacks": self.fallbacks.to_dict("records"),
            "layers": self.layers.to_dict("records"),
        }

    def as_markdown(self) -> str:
        """The report in plain words."""
        s = self.summary
        lines = [f"# {s['model']} under `{s['plan']['name']}`", ""]
        lines += [f"{s['tokens']} tokens ({s['source']}), emulated FP8{', ' + s['label'] if s['label'] else ''}.", ""]
        lines += [conclusion(self), "", *([f"**{s['warning']}**", ""] if s["warning"] else []), "## The gap", ""]
        rows = [
            {"compared": name}
            | {key: _interval(gap, key) for key in ("mean_abs", "token_mult_prob_error", "gen_kl_error")}
            | {"max |d|": gap["max_abs_difference"]}
            for name, gap in s["gaps"].items()
        ]
        lines += [_markdown(rows), "", "## Against published bands (they disagree with each other)", ""]
        lines += [_markdown([v._asdict() for v in self.verdicts]), "", "## Perplexity of these tokens", ""]
        lines += [_markdown([{"under": name, **values} for name, values in s["perplexity"].items()]), ""]
        lines += ["## Layers kept in BF16: what it would buy, measured", ""]
        rows = [
            {key: row[key] for key in ("order", "budget", "flops_kept", "units")}
            | {key: _interval(row, key) for key in ("mean_abs", "k3", "removed")}
            for row in self.fallbacks.to_dict("records")
        ]
        lines += [_markdown(rows), ""]
        which = "attributed modules" if s["not_attributed"] else "modules"
        lines += [f"## The ten {which} that make most of the gap (first order; all in layers.csv)", ""]
        rows = [
            {"name": row["name"]}
            | {key: _interval(row, key) for key in ("first_order_mean_abs", "first_order_k3")}
            | {key: row[key] for key in ("weight_sqnr_db", "activation_sqnr_db", "outlier_channels")}
            for row in self.layers.head(10).to_dict("records")
        ]
        lines += [_markdown(rows), "", "In brackets: 95 % intervals, bootstrapped over rows of tokens.", ""]
        return "\n".join(lines)


def diagnose(
    model: nn.Module,
    plan: PrecisionPlan,
    tokens: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    name: str = "model",
    label: str = "",
    source: str = "text",
    on_progress: Progress | None = None,
) -> Diagnosis:
    """Score tokens (B, T) under BF16 and both sides of `plan`, attribute the gap; see the module's text.

    mask: the tokens that count, default all but the first column. Attribution takes the first rows, ATTRIBUTED_TOKENS
    at most, and the sets it recommends are measured on the others. on_progress(what) is called before each part.
    ValueError if no linear of either side is FP8.
    """
    say = on_progress or (lambda what: None)
    mask = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask.clone()
    mask[:, 0] = False
    work, scores, scored = shared_copy(model), {}, {}
    for what, used, side in (("bf16", PrecisionPlan.preset("bf16"), "rollout"), *((s, plan, s) for s in SIDES)):
        say(f"scoring, {what}")
        if used.side(side) not in scored:  # sides that round alike run the same kernels here: one forward serves both
            scored[used.side(side)] = score_side(work, used, side, tokens, 1.0)
        scores[what] = scored[used.side(side)]
    side: Side = "rollout" if plan.rollout.linear.is_fp8 else "trainer"
    rows = max(1, min(ATTRIBUTED_TOKENS // tokens.shape[1], len(tokens) // 2))
    say(f"attributing, {side}")
    layers = attribute(model, plan, tokens[:rows], mask=mask[:rows], side=side, sweeps=(), probes=PROBES)
    layers = layers.sort_values("first_order_k3", ascending=False, ignore_index=True)
    say("measuring BF16 sets")
    rest = slice(rows if len(tokens) > rows else 0, None)
    missing = _not_attributed(model, plan, side, layers)
    alone = bool(missing) and not plan.side(other_side(side)).linear.is_fp8  # one side moves: what is left is theirs
    options = {"side": side, "budgets": (*BUDGETS, 1.0) if alone else BUDGETS, "orders": BUDGET_ORDERS}
    options["known"] = {one: scores[one][rest] for one in SIDES}
    fallbacks = frontier(model, plan, tokens[rest], layers, mask=mask[rest], **options)
    if alone:
        everything = fallbacks.iloc[-1]
        fallbacks, ends = fallbacks.iloc[:-1], {"": "", "_low": "_high", "_high": "_low"}
        missing |= {f"k3_left{end}": 1 - float(everything[f"removed{other}"]) for end, other in ends.items()}
    pairs = {"rollout and trainer": ("rollout", "trainer"), **{f"{s} and BF16": (s, "bf16") for s in SIDES}}
    gaps = {text: gap(scores[a], scores[b], mask) for text, (a, b) in pairs.items()}
    summary = {"model": name, "label": label, "source": source, "plan": plan.to_dict(), "tokens": int(mask.sum())}
    summary |= {"backend": "emulated", "attributed_side": side, "gaps": gaps, "not_attributed": missing}
    few = summary["tokens"] < REAL_TOKENS and sum(p.numel() for p in model.parameters()) >= REAL_MODEL
    warning = f"{summary['tokens']} tokens are fewer than the {REAL_TOKENS:,} that a figure of a real model needs: the "
    summary["warning"] = warning + "intervals are wide." if few else ""
    summary["perplexity"] = {what: perplexity(score, scores["bf16"], mask) for what, score in scores.items()}
    say("done")
    verdicts = verdict(mismatch(scores["rollout"], scores["trainer"], mask))
    return Diagnosis(summary=summary, verdicts=verdicts, layers=layers, fallbacks=fallbacks)


def _not_attributed(model: nn.Module, plan: PrecisionPlan, side: Side, layers: pandas.DataFrame) -> dict[str, Any]:
    """What of the side's FP8 has no row in `layers`; empty if nothing."""
    flops = planned_flops(plan, model, side)
    experts, attention = flops.keys() - set(layers["name"]), plan.side(side).attention.is_fp8
    if not experts and not attention:
        return {}
    share = sum(flops[name] for name in experts) / sum(flops.values())
    return {"expert_tensors": len(experts), "flops_share": share, "attention": attention}


def gap(rollout_logprobs: torch.Tensor, trainer_logprobs: torch.Tensor, mask: torch.Tensor) -> dict[str, float]:
    """`diagnostics.mismatch` as a dict, and `mean_abs`, `token_mult_prob_error` and `gen_kl_error` with `_low` and
    `_high`: 95 % bootstrap intervals over rows. All (B, T)."""
    found, d = mismatch(rollout_logprobs, trainer_logprobs, mask).as_dict(), trainer_logprobs - rollout_logprobs
    found |= interval_columns("mean_abs", d.abs(), mask)
    found |= interval_columns("token_mult_prob_error", clamped_exp(d.abs()), mask)
    return found | interval_columns("gen_kl_error", k3(d), mask)


def perplexity(logprobs: torch.Tensor, reference: torch.Tensor, mask: torch.Tensor) -> dict[str, float]:
    """exp(-mean log-prob) of the tokens, and its `ratio` to the reference's with a 95 % bootstrap interval over rows.

    All (B, T). Paired: the interval is that of the mean difference of log-probs.
    """
    value = math.exp(-logprobs[mask].mean().item())
    mean, low, high = (math.exp(x) for x in interval_over_sequences(reference - logprobs, mask))
    return {"perplexity": value, "ratio": mean, "ratio_low": low, "ratio_high": high}


def diagnose_model(
    name: str,
    plan: PrecisionPlan,
    text: str | None = None,
    *,
    task: str = "arithmetic",
    tokens: int = 2048,
    on_progress: Progress | None = None,
) -> Diagnosis:
    """`diagnose` for a model by name (see real_model.load_any), on a text, or on what the rollout side samples for a
    task's prompts (8 tokens each, temperature 1) if text is None; about `tokens` tokens. ValueError if `tokens` is no
    integer from 1 (with a text: WINDOW) on."""
    require_count("tokens", tokens, least=1 if text is None else WINDOW)
    say = on_progress or (lambda what: None)
    say("loading")
    model, tokenizer, label = load_any(name)
    say("reading the text" if text is not None else "sampling")
    if text is not None:
        windows = token_windows(tokenizer, text, tokens=tokens, window=WINDOW)
        return diagnose(model, plan, windows, name=name, label=label, on_progress=on_progress)
    prompts = load_task(task).train[: max(1, tokens // 4)]["prompt"]
    engine = NativeEngine(model, plan, tokenizer=tokenizer)
    engine.calibrate(prompts)
    rollout = engine.generate(prompts, SamplingParams(n=1, temperature=1.0, max_tokens=8), seed=0)
    about = {"name": name, "label": label, "source": f"sampled by the rollout side for prompts of {task}"}
    return diagnose(model, plan, rollout.tokens, mask=rollout.mask, **about, on_progress=on_progress)


def conclusion(found: Diagnosis) -> str:
    """The verdict in a paragraph: is there a gap, what do the bands say, where does it come from."""
    gaps, plan = found.summary["gaps"], found.summary["plan"]["name"]
    gap = gaps["rollout and trainer"]
    failed = [v for v in found.verdicts if not v.ok]
    moved = gaps[f"{found.summary['attributed_side']} and BF16"]["mean_abs_difference"]
    if gap["mean_abs_difference"] == 0:
        return (
            f"**No gap.** Under `{plan}` both sides round alike and have the same kernels here, so they agree exactly "
            f"*by construction*; both are {moved:.3f} nats a token from BF16. Real engines differ in kernels, too."
            f"{_missing_text(found)}"
        )
    best = found.fallbacks[found.fallbacks["order"] == "recommended"].iloc[-1]
    share = f"{best['removed']:.0%} [{best['removed_low']:.0%}, {best['removed_high']:.0%}]"
    if best["removed_low"] > 0:
        buys = f"removes {share} of it (k3)"
    else:
        buys = f"shows no gain on these tokens: {share} of k3 is gone, an interval with 0 in it; take more tokens"
    bands = "within every band" if not failed else f"outside {len(failed)} of {len(found.verdicts)} bands"
    return (
        f"**The two sides disagree by {gap['mean_abs_difference']:.3f} nats a token** [{gap['mean_abs_low']:.3f}, "
        f"{gap['mean_abs_high']:.3f}], `token_mult_prob_error` {gap['token_mult_prob_error']:.3f}: {bands} below. Only "
        "the plan differs between the two scores: this is what its FP8 alone does to these tokens. A training run with "
        "a gap like this has quantization; one with a clearly larger gap has a bug, too. Keeping "
        f"{int(best['units'])} modules in BF16, {best['flops_kept']:.0%} of the FP8-planned FLOPs, {buys}."
        f"{_missing_text(found)}"
    )


def _missing_text(found: Diagnosis) -> str:
    """What was not attributed, in a sentence, and how much of the gap is left without what was."""
    missing = found.summary["not_attributed"]
    if not missing:
        return ""
    count, share = missing["expert_tensors"], f"{missing['flops_share']:.0%} of the FP8-planned FLOPs"
    parts = [f"fused experts ({count} tensors, {share})"] * bool(count)
    parts += ["the FP8 KV cache and attention"] * missing["attention"]
    text = f" **Not attributed:** {' and '.join(parts)}; "
    if "k3_left" not in missing:
        return text + "how much of a gap they make is not known, as the other side is FP8, too."
    left, low, high = (f"{missing[f'k3_left{end}']:.0%}" for end in ("", "_low", "_high"))
    return text + f"with all attributed modules in BF16, {left} [{low}, {high}] of the gap (k3) is left."


def _interval(values: dict[str, float], key: str) -> str:
    return f"{values[key]:.4g} [{values[f'{key}_low']:.4g}, {values[f'{key}_high']:.4g}]"


def _markdown(rows: list[dict[str, Any]]) -> str:
    if not rows:
        return "(none)"

    def text(value: Any) -> str:
        return f"{value:.4g}" if isinstance(value, float) else str(value).replace("|", "\\|")

    lines = [list(map(text, rows[0])), ["---"] * len(rows[0]), *([text(v) for v in row.values()] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
