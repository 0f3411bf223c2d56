"""What keeping some layers of the rollout in BF16 buys: many sets by paired mismatch, a few by accuracy.

    python data/fallback.py            ranks sets without training (a minute) into data/evidence/fallback-sets.json
    python data/evidence.py fallback   trains the three sets of a quarter of the FLOPs, in the regime of `stressed`

Every set is scored on the same answers, sampled under the plan with nothing kept: what a set changes is the rollout
side's log-probs, so differences between sets are paired. The recommended sets are chosen on another sample. Where
data/evidence/fallback.json has the accuracy of a set after training, it stands beside it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from fp8lab.attribution import attribute, interval_columns
from fp8lab.diagnostics import k3, mismatch
from fp8lab.frontier import recommend
from fp8lab.models import load_model, load_tokenizer
from fp8lab.precision import PrecisionPlan
from fp8lab.rollout import NativeEngine, SamplingParams
from fp8lab.runlog import write_atomically
from fp8lab.scoring import score_side
from fp8lab.tasks import load_task

EVIDENCE = Path(__file__).resolve().parent / "evidence"
PLAN = PrecisionPlan.preset("fp8-rollout", rule="pow2")
KINDS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "self_attn.*", "mlp.*")
BUDGETS = {"a tenth": 0.1, "a quarter": 0.25, "half": 0.5}


def main() -> int:
    """Rank the sets and write them down."""
    torch.set_num_threads(1)
    model, tokenizer, task = load_model("tiny-llama"), load_tokenizer("tiny-llama"), load_task("arithmetic")
    engine = NativeEngine(model, PLAN, tokenizer=tokenizer)

    def sample(seed: int):
        prompts = task.train[200 * seed : 200 * seed + 96]["prompt"]
        return engine.generate(prompts, SamplingParams(n=8, max_tokens=6), seed=seed)

    table, rollout = attribute(model, PLAN, sample(1), sweeps=("in",)), sample(2)
    trainer = score_side(model, PLAN, "trainer", rollout.tokens, 1.0)
    rows = []
    for name, kept in candidates(table, model.config.num_hidden_layers).items():
        plan = PLAN.with_bf16(**kept, side="rollout")
        scores = score_side(model, plan, "rollout", rollout.tokens, 1.0)
        share = sum(f for n, f in zip(table["name"], table["flops_share"], strict=True) if is_fp8(plan, n, model))
        row = {"set": name, "kept": kept, "fp8_share_of_flops": round(share, 4)}
        row["token_mult_prob_error"] = mismatch(scores, trainer, rollout.mask).token_mult_prob_error
        rows.append(row | interval_columns("k3", k3(trainer - scores), rollout.mask))
    rows.sort(key=lambda row: row["k3"])
    add_accuracy(rows)
    found = {"plan": f"{PLAN.name}, pow2", "sample": "96 prompts x 8 answers", "backend": "emulated", "sets": rows}
    write_atomically(EVIDENCE / "fallback-sets.json", json.dumps(found, indent=1) + "\n")
    print(as_table(rows))
    return 0


def candidates(table: Any, layers: int) -> dict[str, dict[str, Any]]:
    """Name -> arguments of with_bf16: first and last N, each layer, kinds of modules, and recommended sets."""
    sets: dict[str, dict[str, Any]] = {"nothing": {}}
    for number in range(1, layers):
        plural = "layer" if number == 1 else f"{number} layers"
        sets |= {f"first {plural}": {"first": number}, f"last {plural}": {"last": number}}
    sets |= {f"layer {number}": {"layers": [number]} for number in range(1, layers - 1)}
    sets |= {f"all {kind}": {"modules": [kind]} for kind in KINDS}
    return sets | {f"recommended, {name}": {"modules": recommend(table, part)} for name, part in BUDGETS.items()}


def is_fp8(plan: PrecisionPlan, name: str, model: torch.nn.Module) -> bool:
    """True if the rollout runs this linear in FP8."""
    return plan.decide(name, "rollout", model.config.num_hidden_layers).precision.is_fp8


def add_accuracy(rows: list[dict[str, Any]]) -> None:
    """Put what training gave beside the sets that were trained."""
    path = EVIDENCE / "fallback.json"
    if not path.is_file():
        return
    summary = json.loads(path.read_text(encoding="utf-8"))
    for row in rows:
        arm = "fp8-rollout, no correction" if row["set"] == "nothing" else row["set"]
        if arm in summary["arms"]:
            row["accuracy"] = summary["arms"][arm]["accuracy_last"]
            row["minus_bf16"] = summary["paired_differences"][f"{arm} - bf16"]["accuracy_last"]


def as_table(rows: list[dict[str, Any]]) -> str:
    """Markdown, the smallest gap first."""
    from fp8lab.compare import value_text

    lines = [
        "| kept in BF16 | FP8 share of FLOPs | k3, before training | accuracy | minus BF16 |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        gap = f"{1e4 * row['k3']:.2f}e-4 [{1e4 * row['k3_low']:.2f}, {1e4 * row['k3_high']:.2f}]"
        trained = [value_text(row.get("accuracy"), 3), value_text(row.get("minus_bf16"), 3, "+")]
        lines.append(f"| {row['set']} | {row['fp8_share_of_flops']:.0%} | {gap} | {' | '.join(trained)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
