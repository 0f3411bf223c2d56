"""The commands about many runs: `sweep` and `compare`. cli.py registers them."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path


def register(add: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the commands; `add(name, function, text)` makes a parser with --json."""
    command = add("sweep", _sweep, "Run recipes over seeds: what is missing is started, what was killed goes on.")
    command.add_argument("recipes", nargs="+", help="names that `recipes` lists, or paths to .yaml files")
    command.add_argument("--out", type=Path, required=True, help="folder for the runs, one run directory each")
    command.add_argument("--seeds", default="0,1,2", help="as 0,1,2 or 0-4 (default 0,1,2)")
    command.add_argument("--steps", type=int, help="training steps (default: each recipe's)")
    command.add_argument("--quick", action="store_true", help="30 steps of 48 prompts, small evaluations")
    command.add_argument("--workers", type=int, default=2, help="processes at a time (default 2)")
    command.add_argument("--threads", type=int, default=1, help="CPU threads of each (default 1)")
    command.add_argument("--ray", metavar="ADDRESS", help="run on this Ray cluster (`auto`: the one of this machine)")
    command = add("compare", _compare, "Compare finished runs: means, intervals, paired differences.")
    command.add_argument("folders", nargs="+", type=Path, help="run directories, or folders of them")
    command.add_argument("--base", help="the arm to subtract (default: bf16, or the first)")
    command.add_argument("--html", type=Path, help="also write a report with curves to this file")


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


def _sweep(arguments: argparse.Namespace) -> int:
    from tqdm import tqdm

    from fp8lab.compare import as_text, compare
    from fp8lab.recipes import load_recipe
    from fp8lab.sweep import run_folder, sweep

    changes = {"steps": 30, "prompts_per_step": 48, "eval_every": 10, "eval_prompts": 128} if arguments.quick else {}
    if arguments.steps is not None:
        changes["steps"] = arguments.steps
    configs = [
        dataclasses.replace(load_recipe(recipe), seed=seed, **changes)
        for recipe in arguments.recipes
        for seed in seeds(arguments.seeds)
    ]
    with tqdm(total=len(configs), unit="run", file=sys.stderr) as bar:

        def on_done(folder: str, error: str | None) -> None:
            bar.update()
            if error is not None:
                bar.write(f"failed: {folder}: {error}", file=sys.stderr)

        options = {"workers": arguments.workers, "threads": arguments.threads, "ray": arguments.ray}
        failed = sweep(configs, arguments.out, on_done=on_done, **options)
    done = [f for f in dict.fromkeys(run_folder(arguments.out, c) for c in configs) if str(f) not in failed]
    comparison = compare(done) if done else {}
    if arguments.json:
        print(json.dumps({"failed": failed, **comparison}))
    elif comparison:
        print(as_text(comparison))
    return 1 if failed else 0


def _compare(arguments: argparse.Namespace) -> int:
    from fp8lab.compare import as_text, compare

    comparison = compare(arguments.folders, base=arguments.base)
    print(json.dumps(comparison) if arguments.json else as_text(comparison))
    if arguments.html is not None:
        from fp8lab.ui.report import write_report

        write_report(arguments.html, comparison, arguments.folders)
        print(f"report: {arguments.html}", file=sys.stderr)
    return 0
