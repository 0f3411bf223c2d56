"""What FP8 does to a real model, in few numbers: data/evidence/smollm2.json, from SmolLM2-135M on the shipped text.

    python data/smollm2.py [--threads 1]

The same 4,536 tokens of `text/alice.txt` are scored three times, in BF16, with FP8 weights alone, and with FP8 weights
and activations as the plan `fp8-rollout` has them. Every number has a 95 % interval, bootstrapped over the 72 windows.
A text was not sampled from the model, so k3 describes these tokens and estimates no KL. The weights are decoded from
Q4_1, hence the label; the extra `real-model` brings them. Layers are estimated to first order, all linears of one
together; frontier.json says how well that ranks them. About 3 minutes of one thread.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path

import torch

from fp8lab.attribution import attribute
from fp8lab.diagnosis import gap, perplexity
from fp8lab.precision import PrecisionPlan
from fp8lab.real_model import SMOLLM2, load_any, shipped_text, token_windows
from fp8lab.runlog import write_atomically
from fp8lab.scoring import score_side, shared_copy

OUT = Path(__file__).resolve().parent / "evidence" / "smollm2.json"
WINDOW, ROWS, PROBES = 64, 72, 2
PLAN = PrecisionPlan.preset("fp8-rollout")


def main() -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default 2)")
    torch.set_num_threads(parser.parse_args().threads)
    report = measure()
    write_atomically(OUT, json.dumps(report, indent=1) + "\n")
    print(json.dumps({key: value for key, value in report.items() if key != "layers"}, indent=1))
    return 0


def measure(rows: int = ROWS) -> dict:
    """The report on the first `rows` windows."""
    model, tokenizer, label = load_any(SMOLLM2)
    tokens = token_windows(tokenizer, shipped_text(), tokens=rows * WINDOW, window=WINDOW)
    mask = torch.ones_like(tokens, dtype=torch.bool)
    mask[:, 0] = False
    weights = dataclasses.replace(PLAN.rollout.linear, activation="bf16")
    plans = {
        "bf16": PrecisionPlan.preset("bf16"),
        "weights": dataclasses.replace(PLAN, rollout=dataclasses.replace(PLAN.rollout, linear=weights)),
        "weights and activations": PLAN,
    }
    work = shared_copy(model)
    scores = {name: score_side(work, plan, "rollout", tokens, 1.0) for name, plan in plans.items()}
    layers = attribute(model, PLAN, tokens, by="layer", sweeps=(), probes=PROBES)
    columns = ["layer", *(c for c in layers.columns if c.startswith("first_order"))]
    return {
        "model": SMOLLM2,
        "label": label,
        "backend": "emulated",
        "plan": PLAN.name,
        "text": "alice.txt",
        "windows": len(tokens),
        "window": WINDOW,
        "tokens": int(mask.sum()),
        "fp8": {name: gap(scores[name], scores["bf16"], mask) for name in plans if name != "bf16"},
        "perplexity": {name: perplexity(score, scores["bf16"], mask) for name, score in scores.items()},
        "layers": layers[columns].round(7).to_dict("records"),
    }


if __name__ == "__main__":
    sys.exit(main())
