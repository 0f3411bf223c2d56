"""Which layers make the gap, and what BF16 layers buy: the frontier that is shipped in data/evidence/frontier.json.

    python data/frontier.py [--only tiny-llama | smollm2-135m | smollm2-135m-modules]

For `tiny-llama` each of three seeds samples answers from the FP8 rollout side, measures all 28 modules one by one
(leave-one-in and leave-one-out) and ranks them to first order; a fourth sample, which no ranking saw, measures the
frontier. For SmolLM2-135M (extra `real-model`; weights decoded from Q4_1) a seed is another part of the shipped text,
1,512 tokens: its 30 decoder layers one by one, then its 210 modules. The frontier's sets are chosen among modules by
the estimate from 30 windows and measured on the other 64, 4,032 tokens. About 3, 25 and 75 minutes of one thread.
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
WINDOW, ROWS, PROBES = 64, 24, 4
CHOOSE = 30  # windows that the frontier's sets are chosen from
MODULE_PROBES = 16


def main() -> int:
    """Measure what is asked for and put it into frontier.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=list(MAKERS), help="one study (default: all)")
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
    """30 layers, three parts of the text for the ranks; the frontier of modules, chosen and measured on two parts."""
    model, windows = smollm2_windows()
    parts = windows.split(ROWS)
    options = {"by": "layer", "sweeps": ("in",), "probes": PROBES}
    tables = {}
    for seed in SEEDS:
        tables[seed] = attribute(model, PLAN, parts[seed - 1], seed=seed, **options)
        print(SMOLLM2, "seed", seed, rank_agreement(tables[seed]), flush=True)
    modules = attribute(model, PLAN, windows[:CHOOSE], sweeps=())
    found = frontier(model, PLAN, windows[CHOOSE:], modules, budgets=(0.05, 0.1, 0.2, 0.3))
    about = {"units": "30 decoder layers", "sample": f"{ROWS} windows of {WINDOW} tokens a seed", "label": LABEL}
    about["frontier_sample"] = f"{len(windows) - CHOOSE} windows of {WINDOW} tokens, sets chosen on {CHOOSE} others"
    layers = {str(seed): brief(table) for seed, table in tables.items()}
    return about | plain(tables, modules, found) | {"layers": layers}


def smollm2_modules() -> dict:
    """The 210 modules one by one, on the parts that the layers are measured on."""
    model, windows = smollm2_windows()
    parts = windows.split(ROWS)
    options = {"sweeps": ("in",), "probes": MODULE_PROBES}
    tables = {}
    for seed in SEEDS:
        tables[seed] = attribute(model, PLAN, parts[seed - 1], seed=seed, **options)
        print(SMOLLM2, "modules, seed", seed, rank_agreement(tables[seed]), flush=True)
    about = {
        "units": "210 linear modules",
        "sample": f"{ROWS} windows of {WINDOW} tokens a seed",
        "label": LABEL,
    }
    return about | {"plan": PLAN.name, "backend": "emulated", "rank_agreement": agreements(tables)}


def smollm2_windows() -> tuple[torch.nn.Module, torch.Tensor]:
    """The model, and the shipped text as windows (94, WINDOW) of tokens."""
    model, tokenizer, _ = load_any(SMOLLM2)
    return model, token_windows(tokenizer, shipped_text(), tokens=10**6, window=WINDOW)


def agreements(tables: dict) -> dict:
    """Seed -> Spearman correlation of estimate and sweep with its interval, in k3 and in mean |d|."""

    def agreement(one) -> dict:
        return {
            key: dict(zip(("spearman", "low", "high"), rank_agreement(one, key), strict=True))
            for key in ("k3", "mean_abs")
        }

    return {str(seed): agreement(one) for seed, one in tables.items()}


def brief(table) -> list[dict]:
    """Layer by layer the sweep's k3 and the estimate's, with intervals."""
    columns = [c for c in table.columns if c == "layer" or c.startswith(("in_k3", "first_order_k3"))]
    return table[columns].round(7).to_dict("records")


def plain(tables: dict, table, found) -> dict:
    """Rank agreement per seed, the table the frontier was chosen from, and the frontier, as plain values."""
    columns = [c for c in table.columns if not c.startswith(("weight_flushed", "activation_flushed"))]
    return {
        "plan": PLAN.name,
        "backend": "emulated",
        "rank_agreement": agreements(tables),
        "table": table[columns].round(7).to_dict("records"),
        "frontier": found.round(6).to_dict("records"),
    }


MAKERS = {"tiny-llama": tiny_llama, SMOLLM2: smollm2, f"{SMOLLM2}-modules": smollm2_modules}

if __name__ == "__main__":
    sys.exit(main())
