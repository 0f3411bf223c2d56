"""Which layers make the gap, and what BF16 layers buy: the frontier that is shipped in data/evidence/frontier.json.

    python data/frontier.py [--only tiny-llama | smollm2-135m]

For `tiny-llama` each of three seeds samples answers from the FP8 rollout side, measures all 28 modules one by one
(leave-one-in and leave-one-out) and ranks them to first order; a fourth sample, which no ranking saw, measures the
frontier. For SmolLM2-135M (extra `real-model`; weights decoded from Q4_1) a seed is another part of the shipped text
and a unit is one of 30 decoder layers; the recommended set is chosen among modules. About 3 and 20 minutes here.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch

from fp8lab.attribution import attribute, rank_agreement
from fp8lab.frontier import frontier
from fp8lab.models import load_model, load_tokenizer
from fp8lab.precision import PrecisionPlan
from fp8lab.real_model import LABEL, SMOLLM2, load_any, shipped_text, token_windows
from fp8lab.rollout import NativeEngine, SamplingParams
from fp8lab.runlog import write_atomically
from fp8lab.tasks import load_task

OUT = Path(__file__).resolve().parent / "evidence" / "frontier.json"
PLAN = PrecisionPlan.preset("fp8-rollout")
SEEDS = (1, 2, 3)
WINDOW, ROWS, PROBES = 64, 8, 4


def main() -> int:
    """Measure what is asked for and put it into frontier.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=list(MAKERS), help="one model (default: both)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default 2)")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    for name in [arguments.only] if arguments.only else list(MAKERS):
        found = MAKERS[name]()
        known = json.loads(OUT.read_text(encoding="utf-8")) if OUT.is_file() else {}
        write_atomically(OUT, json.dumps(known | {name: found}, indent=1) + "\n")
        for seed, agreement in found["rank_agreement"].items():
            print(name, "seed", seed, agreement)
    return 0


def tiny_llama() -> dict:
    """28 modules, three samples for the ranks, a fourth for the frontier."""
    model, tokenizer, task = load_model("tiny-llama"), load_tokenizer("tiny-llama"), load_task("arithmetic")
    engine = NativeEngine(model, PLAN, tokenizer=tokenizer)

    def sample(seed: int):
        prompts = task.train[200 * seed : 200 * seed + 96]["prompt"]
        return engine.generate(prompts, SamplingParams(n=8, max_tokens=6), seed=seed)

    tables = {seed: attribute(model, PLAN, sample(seed), seed=seed) for seed in SEEDS}
    found = frontier(model, PLAN, sample(len(SEEDS) + 1), tables[1])
    return {"units": "28 linear modules", "sample": "96 prompts x 8 answers"} | plain(tables, tables[1], found)


def smollm2() -> dict:
    """30 layers, three parts of the text for the ranks, a fourth for the frontier, chosen among modules."""
    model, tokenizer, _ = load_any(SMOLLM2)
    windows = token_windows(tokenizer, shipped_text(), tokens=10**6, window=WINDOW)
    parts = windows.split(ROWS)
    options = {"by": "layer", "sweeps": ("in",), "probes": PROBES}
    tables = {seed: attribute(model, PLAN, parts[seed - 1], seed=seed, **options) for seed in SEEDS}
    modules = attribute(model, PLAN, torch.cat(parts[:3]), sweeps=())
    found = frontier(model, PLAN, parts[3], modules, budgets=(0.05, 0.1, 0.2, 0.3))
    about = {"units": "30 decoder layers", "sample": f"{ROWS} windows of {WINDOW} tokens", "label": LABEL}
    return about | plain(tables, modules, found)


def plain(tables: dict, table, found) -> dict:
    """Rank agreement per seed, the table the frontier was chosen from, and the frontier, as plain values."""

    def agreement(one) -> dict:
        return {
            key: dict(zip(("spearman", "low", "high"), rank_agreement(one, key), strict=True))
            for key in ("k3", "mean_abs")
        }

    columns = [c for c in table.columns if not c.startswith(("weight_flushed", "activation_flushed"))]
    return {
        "plan": PLAN.name,
        "backend": "emulated",
        "rank_agreement": {str(seed): agreement(one) for seed, one in tables.items()},
        "table": table[columns].round(7).to_dict("records"),
        "frontier": found.round(6).to_dict("records"),
    }


MAKERS = {"tiny-llama": tiny_llama, SMOLLM2: smollm2}

if __name__ == "__main__":
    sys.exit(main())
