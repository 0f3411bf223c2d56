"""The many-seed studies behind the numbers that the course shows.

    python data/evidence.py [STUDY ...]     (or: make evidence)

runs what is missing under data/evidence/STUDY/ and writes data/evidence/STUDY.json. Regimes (learning rate, schedule,
prompts per step) were chosen with seed 0 alone and then frozen; the seeds here, 1 and up, were not looked at before.
data/evidence/README.md lists every regime that was tried. Stopped or killed, the same command goes on. Checkpoints are
deleted once a run is finished; its config, logs and environment are what is shipped.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fp8lab.compare import compare, value_text
from fp8lab.experiment import ExperimentConfig
from fp8lab.precision import PrecisionPlan
from fp8lab.recipes import load_recipe
from fp8lab.runlog import write_atomically, write_marked
from fp8lab.sweep import is_finished, run_folder, sweep

HERE = Path(__file__).resolve().parent / "evidence"


@dataclass(frozen=True, kw_only=True)
class Study:
    """Arms over seeds 1..seeds; everything not named here is the recipe's."""

    about: str
    arms: Sequence[tuple[str, str, dict[str, Any]]]
    """(name, recipe, changes of grpo) of each arm."""
    seeds: int
    base: str = "bf16"
    """The arm that the others are compared with."""
    rule: str | None = None
    """The scale rule of all FP8 linears (default: the recipe's)."""
    kept: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Arm -> what its rollout keeps in BF16, as arguments of PrecisionPlan.with_bf16."""
    beside: tuple[str, Sequence[str]] | None = None
    """Another study, and arms of it that are part of this one's comparison, with the same seeds."""
    changes: dict[str, Any] = field(default_factory=dict)
    """Changes of the ExperimentConfig, for all arms."""
    grpo: dict[str, Any] = field(default_factory=dict)
    """Changes of the GRPOConfig, for all arms."""

    def configs(self, seeds: Sequence[int]) -> list[ExperimentConfig]:
        """The runs, seed by seed."""
        found = []
        for seed in seeds:
            for name, recipe, changes in self.arms:
                config = load_recipe(recipe)
                plan = PrecisionPlan.preset(config.plan.name, rule=self.rule) if self.rule else config.plan
                if name in self.kept:
                    plan = plan.with_bf16(**self.kept[name], side="rollout")
                own = {"plan": plan, "grpo": dataclasses.replace(config.grpo, **self.grpo | changes)}
                found.append(dataclasses.replace(config, name=name, seed=seed, **own, **self.changes))
        return found


STRESSED = {
    "rule": "pow2",
    "changes": {"steps": 60, "prompts_per_step": 64, "allow_uncorrected_fp8_rollout": True},
    "grpo": {"steps_per_generation": 2, "learning_rate": 5e-4, "lr_scheduler_type": "constant_with_warmup"},
}
"""The regime of `stressed` and `fallback`; how it was chosen is in data/evidence/README.md."""
UNCORRECTED = {"importance_sampling": "none"}
ALLOWED = {"allow_uncorrected_fp8_rollout": True}
MOE = {"model": "tiny-qwen3-moe", "steps": 40, "prompts_per_step": 64}
RECOMMENDED = [
    *(f"model.layers.0.self_attn.{kind}_proj" for kind in "qkvo"),
    *(f"model.layers.{layer}.self_attn.{kind}_proj" for layer in (1, 2) for kind in "vo"),
    "model.layers.0.mlp.down_proj",
]
"""What data/fallback.py recommends for a quarter of the FLOPs."""
KEPT = {"last layer": {"last": 1}, "first layer": {"first": 1}, "recommended, a quarter": {"modules": RECOMMENDED}}
STUDIES = {
    "three-arms": Study(
        about="BF16, FP8 in the rollout only, FP8 end to end, with importance sampling",
        arms=[(arm, arm, {}) for arm in ("bf16", "fp8-rollout", "fp8-e2e")],
        seeds=10,
    ),
    "kv": Study(
        about="FP8 KV cache and attention in the rollout, against FP8 linears alone",
        arms=[(arm, arm, {}) for arm in ("fp8-e2e", "fp8-e2e-kv")],
        seeds=5,
        base="fp8-e2e",
    ),
    "stressed": Study(
        about="two updates per rollout, a constant learning rate, power-of-two scales, no correction unless named",
        arms=[
            ("bf16", "bf16", UNCORRECTED),
            ("fp8-rollout, no correction", "fp8-rollout", UNCORRECTED),
            ("fp8-rollout, tis", "fp8-rollout", {"importance_sampling": "tis"}),
            ("fp8-e2e, no correction", "fp8-e2e", UNCORRECTED),
        ],
        seeds=5,
        **STRESSED,
    ),
    "fallback": Study(
        about="a quarter of the FLOPs of rollout-only FP8 kept in BF16, in the regime of `stressed`, no correction",
        arms=[(name, "fp8-rollout", UNCORRECTED) for name in KEPT],
        seeds=3,
        kept=KEPT,
        beside=("stressed", ("bf16", "fp8-rollout, no correction")),
        **STRESSED,
    ),
    "moe": Study(
        about="the three arms on the tiny MoE model, experts in FP8",
        arms=[(arm, arm, {}) for arm in ("bf16", "fp8-rollout", "fp8-e2e")],
        seeds=5,
        changes=MOE,
    ),
    "uncorrected": Study(
        about="FP8 in the rollout only without importance sampling, in the regime of `three-arms`",
        arms=[("fp8-rollout, no correction", "fp8-rollout", UNCORRECTED)],
        seeds=5,
        beside=("three-arms", ("bf16", "fp8-rollout", "fp8-e2e")),
        changes=ALLOWED,
    ),
    "moe-uncorrected": Study(
        about="FP8 in the rollout only without importance sampling, in the regime of `moe`",
        arms=[("fp8-rollout, no correction", "fp8-rollout", UNCORRECTED)],
        seeds=5,
        beside=("moe", ("bf16", "fp8-rollout", "fp8-e2e")),
        changes=MOE | ALLOWED,
    ),
}


def table(summary: dict) -> str:
    """The study as a Markdown table: means with 95 % intervals, and paired differences to BF16."""

    lines = [
        f"| {len(summary['seeds'])} seeds, mean [95 % interval] | accuracy before | accuracy after | "
        f"after, minus {summary['base'].upper()} (paired) | `token_mult_prob_error`, steps 1-30 | last 10 steps |",
        "|---|---|---|---|---|---|",
    ]
    for arm, values in summary["arms"].items():
        difference = summary["paired_differences"].get(f"{arm} - {summary['base']}")
        cells = [value_text(values["accuracy_first"], 3), value_text(values["accuracy_last"], 3)]
        cells += [value_text(difference["accuracy_last"], 4) if difference else ""]
        cells += [value_text(values[f"token_mult_prob_error_{part}"], 4) for part in ("first_30", "last_10")]
        lines.append(f"| `{arm}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def summarize(name: str, out: Path, seeds: Sequence[int]) -> dict[str, Any]:
    """The comparison of a study's arms, from its runs in `out`, and from those of the study beside it."""
    study = STUDIES[name]
    other, arms = study.beside or ("", ())
    beside = [out.parent / other / f"{arm}-s{seed}" for seed in seeds for arm in arms]
    found = compare([*beside, out], base=study.base)
    return {"about": study.about, **found, "unfinished": [Path(p).name for p in found["unfinished"]]}


def run_study(name: str, seeds: Sequence[int], workers: int, out: Path) -> bool:
    """Bring one study to its end, write its summary and print its table; False if a run failed."""
    from tqdm import tqdm

    configs = STUDIES[name].configs(seeds)
    with tqdm(total=len(configs), unit="run", desc=name) as bar:

        def on_done(folder: str, error: str | None) -> None:
            bar.update()
            bar.write(f"{folder}: {error or 'finished'}")

        failed = sweep(configs, out, workers=workers, on_done=on_done)
    for config in configs:
        folder = run_folder(out, config)
        if is_finished(folder):
            shutil.rmtree(folder / "checkpoints", ignore_errors=True)
            for extra in ("samples.jsonl", ".lock"):
                (folder / extra).unlink(missing_ok=True)
    summary = summarize(name, out, seeds)
    write_atomically(out.with_suffix(".json"), json.dumps(summary, indent=1) + "\n")
    if out == HERE / "three-arms":
        write_marked(HERE.parent.parent / "README.md", "measured", table(summary))
    print(table(summary))
    return not failed


def main() -> int:
    """Run studies; returns 1 if a run failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("studies", nargs="*", help=f"of {', '.join(STUDIES)} (default: all)")
    parser.add_argument("--seeds", type=int, help="seeds 1..N (default: each study's)")
    parser.add_argument("--pilot", action="store_true", help="seed 0 alone, into a folder of its own")
    parser.add_argument("--workers", type=int, default=2, help="processes, one CPU thread each (default 2)")
    parser.add_argument("--out", type=Path, default=HERE, help="folder of the studies")
    arguments = parser.parse_args()
    if unknown := sorted(set(arguments.studies) - set(STUDIES)):
        parser.error(f"no study {unknown[0]!r}; allowed: {', '.join(STUDIES)}")
    fine = True
    for name in arguments.studies or STUDIES:
        seeds = [0] if arguments.pilot else range(1, 1 + (arguments.seeds or STUDIES[name].seeds))
        out = arguments.out / (f"{name}-pilot" if arguments.pilot else name)
        fine = run_study(name, seeds, arguments.workers, out) and fine
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
