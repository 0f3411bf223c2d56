"""The command line, called as a function: output, JSON, exit status, and errors that say what to do."""

import argparse
import json

import pytest
import yaml

from fp8lab.cli import _parser, main
from fp8lab.cli_sweep import count

TINY = {
    "about": "a test",
    "extends": "fp8-e2e",
    "experiment": {
        "steps": 2,
        "prompts_per_step": 4,
        "eval_prompts": 8,
        "eval_samples": 1,
        "grpo": {"num_generations": 2, "warmup_steps": 1},
    },
}


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(TINY))
    return str(path)


def test_doctor(capsys):
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["backends"]["emulated"]["available"] is True
    assert all(backend["reason"] for backend in report["backends"].values())
    assert {"torch", "transformers", "numba"} <= set(report["packages"])
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "emulated: yes" in text and "scaled_mm: no" in text


def test_recipes(capsys):
    assert main(["recipes", "--json"]) == 0
    assert {"bf16", "fp8-rollout", "fp8-e2e"} <= set(json.loads(capsys.readouterr().out))
    assert main(["recipes"]) == 0
    assert "fp8-rollout" in capsys.readouterr().out


def test_run_resume_and_runs(recipe, tmp_path, capsys):
    out = tmp_path / "runs" / "one"
    assert main(["run", recipe, "--seed", "3", "--steps", "1", "--out", str(out), "--json"]) == 0
    captured = capsys.readouterr()
    summary = json.loads(captured.out)
    assert summary["step"] == summary["steps"] == 1 and summary["seed"] == 3 and summary["name"] == "tiny"
    assert "1/1" in captured.err and "emulated" in captured.err  # the progress bar, and the backend
    assert main(["resume", str(out)]) == 0  # finished: nothing to do
    assert "tiny" in capsys.readouterr().out
    assert main(["runs", str(tmp_path / "runs")]) == 0
    header, row = capsys.readouterr().out.strip().splitlines()
    assert header.split()[:5] == ["run", "name", "seed", "step", "steps"] and "tiny" in row
    assert main(["runs", str(tmp_path / "runs"), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "nope"], "no recipe 'nope'; allowed: bf16, "),
        (["resume", "nowhere"], "no run directory"),
        (["runs", "nowhere"], "no folder nowhere"),
    ],
)
def test_problems_are_one_line_and_status_1(arguments, message, capsys):
    assert main(arguments) == 1
    error = capsys.readouterr().err
    assert message in error and error.startswith("fp8lab: ") and "Traceback" not in error


def test_a_run_never_overwrites_another(recipe, tmp_path, capsys):
    out = tmp_path / "run"
    assert main(["run", recipe, "--steps", "1", "--out", str(out)]) == 0
    before = (out / "metrics.jsonl").read_bytes()
    capsys.readouterr()
    assert main(["run", recipe, "--steps", "1", "--out", str(out)]) == 1
    assert "already holds a run" in capsys.readouterr().err and (out / "metrics.jsonl").read_bytes() == before


def test_an_empty_folder_has_no_runs(tmp_path, capsys):
    assert main(["runs", str(tmp_path)]) == 0
    assert "no runs" in capsys.readouterr().out
    assert main(["runs", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []


@pytest.mark.parametrize("command", ["doctor", "recipes", "run", "resume", "runs", "export"])
def test_every_command_has_help(command, capsys):
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    assert stop.value.code == 0 and "--json" in capsys.readouterr().out


@pytest.mark.parametrize("value", ["0", "-5", "1.5", "nan", "two", ""])
@pytest.mark.parametrize(
    "command",
    [
        "run bf16 --steps",
        "run bf16 --threads",
        "resume here --threads",
        "check fp8-e2e --gpus",
        "diagnose tiny-llama --out here --tokens",
        "diagnose tiny-llama --out here --threads",
        "bench linear --rounds",
        "bench linear --threads",
        "sweep bf16 --out here --steps",
        "sweep bf16 --out here --workers",
        "sweep bf16 --out here --threads",
    ],
)
def test_counts_are_integers_from_1(command, value, capsys):
    words = command.split()
    with pytest.raises(SystemExit) as stop:
        main([*words, value])
    assert stop.value.code == 2 and f"argument {words[-1]}: {value!r} is not an integer >= 1" in capsys.readouterr().err


def test_no_option_takes_any_integer_for_a_count():
    """A new option is a count, or the seed."""

    def options(parser):
        for action in parser._actions:
            for below in action.choices.values() if isinstance(action, argparse._SubParsersAction) else ():
                yield from options(below)
            yield action

    plain = {name for action in options(_parser()) if action.type is int for name in action.option_strings}
    counts = {name for action in options(_parser()) if action.type is count for name in action.option_strings}
    assert plain == {"--seed"}
    assert counts == {"--steps", "--threads", "--gpus", "--tokens", "--rounds", "--workers"}


def test_wrong_usage_is_status_2(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["no-such-command"])
    assert stop.value.code == 2
