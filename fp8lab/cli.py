"""`python -m fp8lab …`: look at the machine, run recipes, go on with a killed run, list runs.

The commands are thin: each calls a library function and prints what it returned, as text or with --json.
(`lab`, `test` and other set-up commands live in bootstrap.py, since they must run before anything is installed.)
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fp8lab import cli_sweep


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status: 0, 1 for a problem (one line on stderr), 2 for wrong usage, 130
    interrupted."""
    arguments = _parser().parse_args(argv)
    try:
        return arguments.command(arguments)
    except (ValueError, OSError, RuntimeError, FloatingPointError, ImportError) as error:
        print(f"fp8lab: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m fp8lab",
        description="FP8 reinforcement learning of language models, on a laptop.",
        epilog="Set-up commands (also in a bare checkout): lab, test, evidence, vllm, test-vllm, lint, clean.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, function, text: str, group=commands) -> argparse.ArgumentParser:
        command = group.add_parser(name, help=text, description=text)
        command.set_defaults(command=function)
        command.add_argument("--json", action="store_true", help="print JSON instead of text")
        return command

    add("doctor", _doctor, "Versions, devices, and which FP8 backends work here and why not.")
    command = add("recipes", _recipes, "List the recipes, and which of them run on this machine.")
    command = add("check", _check, "Can a GPU run this recipe, and why not? Said from the config, before weights load.")
    command.add_argument("recipe", help="a name that `recipes` lists, or a path to a .yaml file")
    command.add_argument("--hardware", help="GPU, for example H100 (default: the recipe's)")
    command.add_argument("--gpus", type=cli_sweep.count, help="how many (default: the recipe's)")
    command.add_argument("--rollout", choices=["native", "vllm"], help="rollout engine (default: the recipe's)")
    show = commands.add_parser("recipe", help="Look at one recipe.", description="Look at one recipe.")
    command = add(
        "show",
        _recipe_show,
        "One recipe: what it says, its plan, its model in formats, bytes and FLOPs.",
        show.add_subparsers(required=True, metavar="COMMAND"),
    )
    command.add_argument("recipe", help="a name that `recipes` lists, or a path to a .yaml file")
    command = add("run", _run, "Run a recipe.")
    command.add_argument("recipe", help="a name that `recipes` lists, or a path to a .yaml file")
    command.add_argument("--steps", type=cli_sweep.count, help="training steps (default: the recipe's)")
    command.add_argument("--seed", type=int, help="random seed (default: the recipe's)")
    command.add_argument("--out", type=Path, help="run directory, must be new (default: runs/RECIPE-sSEED-TIME)")
    command.add_argument("--threads", type=cli_sweep.count, help="CPU threads (default: torch's choice)")
    command.add_argument("--tracker", help="tensorboard, trackio or wandb shows the metrics, too (default: none)")
    command = add("resume", _resume, "Go on with a run that was stopped or killed, from its last checkpoint.")
    command.add_argument("folder", type=Path, help="run directory")
    command.add_argument("--threads", type=cli_sweep.count, help="CPU threads (default: torch's choice)")
    command = add("runs", _runs, "Table of the runs in a folder.")
    command.add_argument(
        "folder", type=Path, nargs="?", default=Path("runs"), help="folder of run directories (default: runs)"
    )
    command = add("export", _export, "Write a recipe as settings of NeMo RL, verl or TRL.")
    command.add_argument("recipe", help="a name that `recipes` lists, or a path to a .yaml file")
    command.add_argument("--to", choices=["nemo_rl", "verl", "trl"], required=True, help="the framework")
    command.add_argument("--out", type=Path, help="file to write, must be new (default: standard output)")
    command = add("diagnose", _diagnose, "Is the gap between the engines a bug or just FP8, and which layers make it?")
    command.add_argument("model", help="smollm2-135m, a .gguf file, a folder, a model of data/, or a hub name")
    command.add_argument("--plan", default="fp8-rollout", help="a plan preset (default: fp8-rollout)")
    command.add_argument("--text", type=Path, help="score this text (default: sampled answers to sums)")
    command.add_argument("--out", type=Path, required=True, help="folder for report.json, layers.csv and report.md")
    command.add_argument(
        "--tokens", type=cli_sweep.count, default=2048, help="tokens to look at (default 2048; a real model needs 4096)"
    )
    command.add_argument("--threads", type=cli_sweep.count, help="CPU threads (default: torch's choice)")
    cli_sweep.register(add)
    command = add("gpu-check", _gpu_check, "Are the FP8 kernels of this GPU right, and how fast? Under 6 minutes.")
    command.add_argument("--out", type=Path, required=True, help="folder for gpu-check.json and gpu-check.md")
    command.add_argument("--dry", action="store_true", help="prove the script on a CPU: small shapes, emulated")
    command = add("bench", _bench, "Time quantizers, a linear layer, rollouts or steps against their peers.")
    command.add_argument("what", choices=["quantize", "linear", "rollout", "step", "all"])
    command.add_argument("--rounds", type=cli_sweep.count, help="timed rounds (default: 9; of rollouts 25, of steps 5)")
    command.add_argument("--threads", type=cli_sweep.count, help="CPU threads (default: torch's choice)")
    command.add_argument("--readme", type=Path, help="with all: put the goals between this Markdown file's bench marks")
    return parser


def _diagnose(arguments: argparse.Namespace) -> int:
    start = time.perf_counter()
    import torch
    from tqdm import tqdm

    from fp8lab.diagnosis import PARTS, diagnose_model
    from fp8lab.precision import PrecisionPlan

    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    plan = PrecisionPlan.preset(arguments.plan)
    text = None if arguments.text is None else arguments.text.read_text(encoding="utf-8")
    with tqdm(total=PARTS, unit="part", file=sys.stderr) as bar:

        def on_progress(what: str) -> None:
            bar.set_description(what)
            bar.update()

        found = diagnose_model(arguments.model, plan, text, tokens=arguments.tokens, on_progress=on_progress)
    paths = found.write(arguments.out)
    print(json.dumps(found.as_dict(), indent=1) if arguments.json else found.as_markdown())
    print("\n".join(map(str, paths)), file=sys.stderr)
    took = f"{time.perf_counter() - start:.0f} s, {time.process_time():.0f} s of CPU time"
    print(f"{took}, {torch.get_num_threads()} threads", file=sys.stderr)
    return 0


def _bench(arguments: argparse.Namespace) -> int:
    import torch

    from fp8lab.bench import as_text, benches, goals_table, require_marks
    from fp8lab.runlog import write_marked

    if arguments.rounds is not None and arguments.rounds < 2:
        raise ValueError(f"--rounds is {arguments.rounds}; quartiles need at least 2")
    if arguments.readme:
        if arguments.what != "all":
            raise ValueError(f"--readme writes the table of all benchmarks, found {arguments.what!r}: use `bench all`")
        require_marks(arguments.readme)
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    known = benches()
    results = []
    for name in list(known) if arguments.what == "all" else [arguments.what]:
        asked = {} if arguments.rounds is None else {"rounds": arguments.rounds}
        results.append(_bench_alone(name, arguments) if arguments.what == "all" else known[name](**asked))
        if not arguments.json:
            print(as_text(results[-1]) + "\n", flush=True)
    if arguments.json:
        print(json.dumps(results, indent=1))
    if arguments.readme:
        write_marked(arguments.readme, "bench", goals_table(results))
    return 0


def _bench_alone(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """One benchmark in a new process: what ran before decides which memory malloc keeps, and so a tenth of a time."""
    command = [sys.executable, "-m", "fp8lab", "bench", name, "--json"]
    for option in ("rounds", "threads"):
        if (value := getattr(arguments, option)) is not None:
            command += [f"--{option}", str(value)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, encoding="utf-8")
    if done.returncode:
        raise RuntimeError(f"`{' '.join(command[1:])}` ended with {done.returncode}; its message is above")
    return json.loads(done.stdout)[0]


def _gpu_check(arguments: argparse.Namespace) -> int:
    from fp8lab.gpucheck import as_markdown, gpu_check

    report = gpu_check(arguments.out, dry=arguments.dry)
    print(json.dumps(report, indent=1) if arguments.json else as_markdown(report))
    return int(not report["ok"])


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
    from fp8lab.recipes import recipe_data, recipe_names, runs_here

    found = {name: recipe_data(name) for name in recipe_names()}
    rows = [{"name": name, "runs": runs_here(data), "about": data["about"]} for name, data in found.items()]
    if arguments.json:
        print(json.dumps({row["name"]: row for row in rows}, indent=1))
    else:
        print(_table(sorted(rows, key=lambda row: row["runs"] != "runs here")))
    return 0


def _export(arguments: argparse.Namespace) -> int:
    from fp8lab.interop import export

    result = export(arguments.recipe, arguments.to)
    as_json = json.dumps({"settings": result.settings, "notes": result.notes}, indent=1)
    text = as_json + "\n" if arguments.json else result.yaml()
    if arguments.out is None:
        print(text, end="")
        return 0
    with arguments.out.open("x", encoding="utf-8") as file:
        file.write(text)
    for note in result.notes:
        print(f"note: {note}", file=sys.stderr)
    return 0


def _check(arguments: argparse.Namespace) -> int:
    from fp8lab.preflight import as_text, check_recipe
    from fp8lab.recipes import recipe_data

    asked = {key: getattr(arguments, key) for key in ("hardware", "gpus", "rollout")}
    changes = {key: value for key, value in asked.items() if value is not None}
    problems = check_recipe(recipe_data(arguments.recipe), environment=dict(os.environ), **changes)
    print(json.dumps([dataclasses.asdict(p) for p in problems], indent=1) if arguments.json else as_text(problems))
    return int(any(problem.severity == "error" for problem in problems))


def _recipe_show(arguments: argparse.Namespace) -> int:
    import yaml

    from fp8lab.coverage import as_text, rows
    from fp8lab.preflight import recipe_model
    from fp8lab.recipes import experiment_of, recipe_data

    data = recipe_data(arguments.recipe)
    plan, model = experiment_of(data).plan, recipe_model(data)
    if arguments.json:
        tensors = [] if model is None else [dataclasses.asdict(row) for row in rows(plan, model)]
        print(json.dumps({**data, "plan": plan.to_dict(), "tensors": tensors}, indent=1))
        return 0
    carried = data.pop("carried", None)
    print(yaml.safe_dump(data, sort_keys=False, width=120))
    if carried:
        print(yaml.safe_dump({"carried, not run": carried}, sort_keys=False, width=120))
    print(repr(plan) if model is None else as_text(plan, model))
    return 0


def _run(arguments: argparse.Namespace) -> int:
    from fp8lab import experiment
    from fp8lab.recipes import load_recipe

    config = load_recipe(arguments.recipe)
    asked = {"steps": arguments.steps, "seed": arguments.seed}
    config = dataclasses.replace(config, **{k: v for k, v in asked.items() if v is not None})
    out = arguments.out or Path("runs") / f"{config.name}-s{config.seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    start = functools.partial(experiment.run, config, out, tracker=arguments.tracker)
    return _with_progress(arguments, config, lambda on_step: start(on_step=on_step))


def _resume(arguments: argparse.Namespace) -> int:
    from fp8lab import experiment
    from fp8lab.runlog import RunLog

    config = experiment.ExperimentConfig.from_dict(RunLog(arguments.folder).config)
    return _with_progress(arguments, config, lambda on_step: experiment.resume(arguments.folder, on_step=on_step))


def _with_progress(arguments: argparse.Namespace, config, start) -> int:
    import torch
    from tqdm import tqdm

    from fp8lab import distributed
    from fp8lab.alarms import alarms

    distributed.join()
    first = distributed.rank() == 0
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    if first:
        print(f"{config.plan}, backend emulated, seed {config.seed}", file=sys.stderr)
    with tqdm(total=config.steps, unit="step", desc=config.name, file=sys.stderr, disable=not first) as bar:

        def on_step(row: dict[str, Any]) -> None:
            shown = {"reward": "reward", "validation_accuracy": "accuracy", "token_mult_prob_error": "mult_prob_error"}
            known.update({label: f"{row[key]:.3f}" for key, label in shown.items() if key in row})
            bar.set_postfix(known, refresh=False)
            bar.update(row["step"] - bar.n)

        known: dict[str, str] = {}
        log = start(on_step)
    distributed.leave()
    if not first:
        return 0
    for alarm in alarms(log):
        print(alarm, file=sys.stderr)
    summary = _summary(log)
    print(json.dumps(summary) if arguments.json else _table([summary]))
    return 0


def _runs(arguments: argparse.Namespace) -> int:
    from fp8lab.runlog import RunLog

    if not arguments.folder.is_dir():
        raise FileNotFoundError(f"no folder {arguments.folder}; `run` writes into runs/ unless --out says otherwise")
    found = sorted(arguments.folder.glob("**/config.json"))
    summaries = []
    for folder in (path.parent for path in found if (path.parent / "environment.json").is_file()):
        try:
            summaries.append(_summary(RunLog(folder)))
        except ValueError as error:
            summaries.append({"run": str(folder), "damaged": str(error)})
    if not summaries and not arguments.json:
        print(f"no runs in {arguments.folder}")
        return 0
    if arguments.json:
        print(json.dumps(summaries, indent=1))
        return 0
    for row in summaries:
        if why := row.pop("damaged", None):
            row["name"] = "damaged"
            print(f"fp8lab: {why}", file=sys.stderr)
    print(_table(summaries))
    return 0


def _summary(log) -> dict[str, Any]:
    """One row about a run: what it was, how far it got, where accuracy and mismatch stand.

    ValueError if its config, metrics or times are damaged.
    """
    config, rows, timing = log.config, log.rows(strict=True), log.rows("timing", strict=True)
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
    """Rows as aligned text; `-` where a row has no value."""

    def text(value: Any) -> str:
        return "-" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)

    columns = list(dict.fromkeys(key for row in rows for key in row))
    cells = [columns, *([text(row.get(key)) for key in columns] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in cells)


if __name__ == "__main__":
    sys.exit(main())
