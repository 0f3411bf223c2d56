"""The commands about many runs: `sweep` and `compare`. cli.py registers them.

    python -m fp8lab sweep bf16 fp8-rollout fp8-e2e --quick --out sweeps/quick      three arms, three seeds
    python -m fp8lab compare sweeps/quick --html quick.html                         the same table again, and curves

A sweep starts what is missing, goes on with what was killed, and leaves alone what is finished.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fp8lab.experiment import ExperimentConfig


QUICK = {"steps": 30, "prompts_per_step": 48, "eval_every": 10, "eval_prompts": 128}
"""What --quick changes of a recipe: for seeing the whole way, not for its results. Three arms took 52 s of CPU time a
seed here, so three seeds take a minute and a half on two idle cores."""


def register(add: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the commands; `add(name, function, text)` makes a parser with --json."""
    command = add("sweep", _sweep, "Run recipes over seeds: what is missing is started, what was killed goes on.")
    command.epilog = "Three arms: python -m fp8lab sweep bf16 fp8-rollout fp8-e2e --quick --out sweeps/quick"
    command.add_argument("recipes", nargs="+", help="names that `recipes` lists, or paths to .yaml files")
    command.add_argument("--out", type=Path, required=True, help="folder for the runs, one run directory each")
    command.add_argument("--seeds", default="0,1,2", help="as 0,1,2 or 0-4 (default 0,1,2)")
    command.add_argument("--steps", type=count, help="training steps (default: each recipe's)")
    command.add_argument("--quick", action="store_true", help="30 steps of 48 prompts, small evaluations: a look")
    command.add_argument("--workers", type=count, default=2, help="processes at a time (default 2)")
    command.add_argument("--threads", type=count, default=1, help="CPU threads of each (default 1)")
    command.add_argument("--ray", metavar="ADDRESS", help="run on this Ray cluster (`auto`: the one of this machine)")
    command.add_argument("--tracker", help="tensorboard, trackio or wandb shows every run, too (default: none)")
    command = add("compare", _compare, "Compare finished runs: means, intervals, paired differences.")
    command.add_argument("folders", nargs="+", type=Path, help="run directories, or folders of them")
    command.add_argument("--base", help="the arm to subtract (default: bf16, or the first)")
    command.add_argument("--html", type=Path, help="also write a report with curves to this file")


def count(text: str) -> int:
    """The type of options that count something: an integer >= 1, or argparse's usage error."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer >= 1")
    return value


def seeds(text: str) -> list[int]:
    """`0,2,5` or `0-4` as a list; ValueError otherwise."""
    try:
        if "-" in text:
            low, high = map(int, text.split("-"))
            found = list(range(low, high + 1))
        else:
            found = [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 0 or len(set(found)) < len(found):
        raise ValueError(f"--seeds is {text!r}; write different numbers >= 0 as 0,1,2 or 0-4")
    return found


def configs_of(arguments: argparse.Namespace) -> list[ExperimentConfig]:
    """The runs that the arguments of `sweep` ask for."""
    from fp8lab.recipes import load_recipe

    changes = QUICK if arguments.quick else {}
    if arguments.steps is not None:
        changes = {**changes, "steps": arguments.steps}
    return [
        dataclasses.replace(load_recipe(recipe), seed=seed, **changes)
        for recipe in arguments.recipes
        for seed in seeds(arguments.seeds)
    ]


def _sweep(arguments: argparse.Namespace) -> int:
    from tqdm import tqdm

    from fp8lab.compare import as_text, compare
    from fp8lab.sweep import run_folder, sweep

    configs = configs_of(arguments)
    with tqdm(total=len(configs), unit="run", file=sys.stderr) as bar:

        def on_done(folder: str, error: str | None) -> None:
            bar.update()
            if error is not None:
                bar.write(f"failed: {folder}: {error}", file=sys.stderr)

        options = {key: getattr(arguments, key) for key in ("workers", "threads", "ray", "tracker")}
        failed = sweep(configs, arguments.out, on_done=on_done, **options)
    done = [f for f in dict.fromkeys(run_folder(arguments.out, c) for c in configs) if str(f) not in failed]
    comparison = compare(done) if done else {}
    if arguments.json:
        print(json.dumps({"failed": failed, **comparison}))
    elif comparison:
        print(as_text(comparison))
    return 1 if failed else 0


def _compare(arguments: argparse.Namespace) -> int:
    from fp8lab.compare import as_text, compare, differing_settings

    comparison = compare(arguments.folders, base=arguments.base)
    differing = differing_settings(arguments.folders, base=comparison["base"])
    if arguments.json:
        print(json.dumps(comparison | {"differing_settings": differing}))
    else:
        print(as_text(comparison, differing))
    if arguments.html is not None:
        from fp8lab.ui.report import write_report

        write_report(arguments.html, comparison, arguments.folders)
        print(f"report: {arguments.html}", file=sys.stderr)
    return 0
