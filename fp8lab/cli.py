"""`python -m fp8lab …`: look at the machine, run recipes, go on with a killed run, list runs.

The commands are thin: each calls a library function and prints what it returned, as text or with --json.
(`lab`, `test` and other set-up commands live in bootstrap.py, since they must run before anything is installed.)
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status: 0, 1 for a problem (one line on stderr), 2 for wrong usage, 130
    interrupted."""
    arguments = _parser().parse_args(argv)
    try:
        return arguments.command(arguments)
    except (ValueError, OSError, RuntimeError, FloatingPointError) as error:
        print(f"fp8lab: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m fp8lab",
        description="FP8 reinforcement learning of language models, on a laptop.",
        epilog="Set-up commands (also in a bare checkout): lab, test, evidence, vllm, lint, clean.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, function, text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(command=function)
        command.add_argument("--json", action="store_true", help="print JSON instead of text")
        return command

    add("doctor", _doctor, "Versions, devices, and which FP8 backends work here and why not.")
    command = add("recipes", _recipes, "List the recipes.")
    command = add("run", _run, "Run a recipe.")
    command.add_argument("recipe", help="a name that `recipes` lists, or a path to a .yaml file")
    command.add_argument("--steps", type=int, help="training steps (default: the recipe's)")
    command.add_argument("--seed", type=int, help="random seed (default: the recipe's)")
    command.add_argument("--out", type=Path, help="run directory, must be new (default: runs/RECIPE-sSEED-TIME)")
    command.add_argument("--threads", type=int, help="CPU threads (default: torch's choice)")
    command = add("resume", _resume, "Go on with a run that was stopped or killed, from its last checkpoint.")
    command.add_argument("folder", type=Path, help="run directory")
    command.add_argument("--threads", type=int, help="CPU threads (default: torch's choice)")
    command = add("runs", _runs, "Table of the runs in a folder.")
    command.add_argument(
        "folder", type=Path, nargs="?", default=Path("runs"), help="folder of run directories (default: runs)"
    )
    command = add("bench", _bench, "Time quantizers or a linear layer against what one would compare them with.")
    command.add_argument("what", choices=["quantize", "linear", "all"])
    command.add_argument("--rounds", type=int, default=9, help="timed rounds (default 9)")
    command.add_argument("--threads", type=int, help="CPU threads (default: torch's choice)")
    return parser


def _bench(arguments: argparse.Namespace) -> int:
    import torch

    from fp8lab.bench import BENCHES, as_text

    if arguments.rounds < 2:
        raise ValueError(f"--rounds is {arguments.rounds}; quartiles need at least 2")
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    chosen = list(BENCHES) if arguments.what == "all" else [arguments.what]
    results = [BENCHES[name](rounds=arguments.rounds) for name in chosen]
    print(json.dumps(results, indent=1) if arguments.json else "\n\n".join(map(as_text, results)))
    return 0


def _doctor(arguments: argparse.Namespace) -> int:
    from fp8lab.backends import support
    from fp8lab.runlog import environment

    report = {
        **environment(),
        "backends": {name: {"available": ok, "reason": why} for name, (ok, why) in support().items()},
    }
    del report["backend"]
    if arguments.json:
        print(json.dumps(report, indent=1))
        return 0
    print(f"python     {report['python']} on {report['platform']}")
    print(f"cpu        {report['cpus']} cores, torch uses {report['torch_threads']} threads")
    print(f"gpu        {report['cuda'] or 'none'}")
    print("packages   " + ", ".join(f"{name} {version}" for name, version in report["packages"].items()))
    for name, backend in report["backends"].items():
        print(f"backend    {name}: {'yes' if backend['available'] else 'no'}, {backend['reason']}")
    return 0


def _recipes(arguments: argparse.Namespace) -> int:
    from fp8lab.recipes import recipe_data, recipe_names

    abouts = {name: recipe_data(name)["about"] for name in recipe_names()}
    if arguments.json:
        print(json.dumps(abouts, indent=1))
    else:
        for name, about in abouts.items():
            print(f"{name:14s}{about}")
    return 0


def _run(arguments: argparse.Namespace) -> int:
    from fp8lab import experiment
    from fp8lab.recipes import load_recipe

    config = load_recipe(arguments.recipe)
    asked = {"steps": arguments.steps, "seed": arguments.seed}
    config = dataclasses.replace(config, **{k: v for k, v in asked.items() if v is not None})
    out = arguments.out or Path("runs") / f"{config.name}-s{config.seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    return _with_progress(arguments, config, lambda on_step: experiment.run(config, out, on_step=on_step))


def _resume(arguments: argparse.Namespace) -> int:
    from fp8lab import experiment
    from fp8lab.runlog import RunLog

    config = experiment.ExperimentConfig.from_dict(RunLog(arguments.folder).config)
    return _with_progress(arguments, config, lambda on_step: experiment.resume(arguments.folder, on_step=on_step))


def _with_progress(arguments: argparse.Namespace, config, start) -> int:
    import torch
    from tqdm import tqdm

    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    print(f"{config.plan}, backend emulated, seed {config.seed}", file=sys.stderr)
    with tqdm(total=config.steps, unit="step", desc=config.name, file=sys.stderr) as bar:

        def on_step(row: dict[str, Any]) -> None:
            shown = {"reward": "reward", "validation_accuracy": "accuracy", "token_mult_prob_error": "mult_prob_error"}
            known.update({label: f"{row[key]:.3f}" for key, label in shown.items() if key in row})
            bar.set_postfix(known, refresh=False)
            bar.update(row["step"] - bar.n)

        known: dict[str, str] = {}
        log = start(on_step)
    summary = _summary(log)
    print(json.dumps(summary) if arguments.json else _table([summary]))
    return 0


def _runs(arguments: argparse.Namespace) -> int:
    from fp8lab.runlog import RunLog

    if not arguments.folder.is_dir():
        raise FileNotFoundError(f"no folder {arguments.folder}; `run` writes into runs/ unless --out says otherwise")
    found = sorted(arguments.folder.glob("**/config.json"))
    summaries = [_summary(RunLog(path.parent)) for path in found if (path.parent / "environment.json").is_file()]
    if not summaries and not arguments.json:
        print(f"no runs in {arguments.folder}")
        return 0
    print(json.dumps(summaries, indent=1) if arguments.json else _table(summaries))
    return 0


def _summary(log) -> dict[str, Any]:
    """One row about a run: what it was, how far it got, where accuracy and mismatch stand."""
    config, rows, timing = log.config, log.rows(), log.rows("timing")
    accuracies = [row["validation_accuracy"] for row in rows if "validation_accuracy" in row]
    errors = [row["token_mult_prob_error"] for row in rows if "token_mult_prob_error" in row]
    return {
        "run": str(log.folder),
        "name": config["name"],
        "seed": config["seed"],
        "step": rows[-1]["step"] if rows else 0,
        "steps": config["steps"],
        "accuracy_first": accuracies[0] if accuracies else None,
        "accuracy_last": accuracies[-1] if accuracies else None,
        "token_mult_prob_error": sum(errors) / len(errors) if errors else None,
        "seconds": sum(v for row in timing for k, v in row.items() if k != "step"),
    }


def _table(rows: list[dict[str, Any]]) -> str:
    """Rows with the same keys as aligned text."""

    def text(value: Any) -> str:
        return "-" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)

    cells = [list(rows[0]), *([text(v) for v in row.values()] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in cells)


if __name__ == "__main__":
    sys.exit(main())
