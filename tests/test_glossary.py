"""The glossary and the course guide name what exists, and all of it."""

import dataclasses
import re
from pathlib import Path

import pytest
import torch

from fp8lab import corrections, diagnostics
from fp8lab.experiment import ExperimentConfig, Loop
from fp8lab.grpo import GRPOConfig
from fp8lab.precision import PRESETS, PrecisionPlan
from fp8lab.rollout.sampling import SamplingParams
from fp8lab.sequence_metrics import BANDS, SequenceReport
from fp8lab.tasks import load_task

NOTEBOOKS = Path(__file__).resolve().parents[1] / "notebooks"
GLOSSARY = (NOTEBOOKS / "GLOSSARY.md").read_text(encoding="utf-8")
GUIDE = (NOTEBOOKS / "README.md").read_text(encoding="utf-8")
README = (NOTEBOOKS.parent / "README.md").read_text(encoding="utf-8")


def section(title):
    return re.search(rf"## {re.escape(title)}.*?\n(.*?)(?=\n## |\Z)", GLOSSARY, flags=re.DOTALL)[1]


def rows(title):
    """First cell and the others of each row of the section's table."""
    lines = [line for line in section(title).splitlines() if line.startswith("| `")]
    return [re.split(r"(?<!\\)\|", line.strip("|"), maxsplit=1) for line in lines]


def names(title):
    return [name for first, _ in rows(title) for name in re.findall(r"`(\w[\w-]*)`", first)]


def fields(kind):
    return {field.name for field in dataclasses.fields(kind)}


def test_every_correction_and_no_other():
    assert names("Corrections") == list(corrections.MODES)


@pytest.mark.parametrize(
    ("title", "kind"),
    [
        ("Mismatch", diagnostics.MismatchReport),
        ("Sequences", SequenceReport),
        ("Knobs of the loss", GRPOConfig),
        ("Knobs of a run", ExperimentConfig),
        ("Knobs of sampling", SamplingParams),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_every_field_and_no_other(title, kind):
    found = names(title)
    assert len(found) == len(set(found)), "each name once"
    assert set(found) == fields(kind), f"GLOSSARY.md, {title}: {sorted(set(found) ^ fields(kind))}"


def logged():
    """Names of everything that a run's metrics may hold, from steps under configs that log different things."""
    task, found = load_task("arithmetic"), {}
    small = {"prompts_per_step": 2, "eval_prompts": 2, "eval_samples": 1}
    for mode, extra in (("tis", {"seq_logprob_error_threshold": 2.0}), ("sequence-mask", {"drop_rejected": True})):
        grpo = GRPOConfig(num_generations=2, importance_sampling=mode, importance_sampling_max=3.0, **extra)
        loop = Loop(ExperimentConfig(plan=PrecisionPlan.preset("fp8-e2e-kv"), grpo=grpo, **small), task)
        found |= loop.step(1)[0] | loop.evaluate(1)
    loop = Loop(ExperimentConfig(), task)  # a run on vLLM logs these, too
    rollout = loop.engine.generate(task.train[:1]["prompt"], SamplingParams(max_tokens=2), seed=0)
    return set(found) | set(diagnostics.gap_parts(loop.trainer, rollout))


def test_every_logged_metric_and_no_other():
    torch.set_num_threads(1)
    found, mismatch = names("Logged every step"), fields(diagnostics.MismatchReport)
    assert len(found) == len(set(found)) and not mismatch & set(found)
    assert set(found) == logged() - mismatch, "GLOSSARY.md, Logged every step"


def test_every_row_says_something():
    for title in re.findall(r"## (.*?)(?: \(|\n)", GLOSSARY):
        for first, rest in rows(title):
            assert re.search(r"[A-Za-zΣΠ√\d]", rest), f"GLOSSARY.md, {title}: {first} has no meaning"


def test_the_guide_lists_every_notebook():
    shipped = {path.name for path in NOTEBOOKS.glob("*.ipynb")}
    listed = set(re.findall(r"\]\((\w+\.ipynb)\)", GUIDE))
    assert listed == shipped


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_minutes_are_the_same_everywhere(path):
    stated = re.findall(r"About (\d+) minutes; runs in (?:about|under) (\d+) seconds", path.read_text(encoding="utf-8"))
    assert len(stated) == 1, "the first cell says: About N minutes; runs in about M seconds"
    (minutes, seconds) = stated[0]
    for text in (README, GUIDE):
        assert re.findall(rf"{path.name}\) \| (\d+) \|", text) == [minutes], "the tables say the same minutes"
        (most,) = re.findall(r"at most (\d+) seconds", text)
        assert int(seconds) <= int(most), "and the same limit"


def test_linked_files_exist():
    for text in (GLOSSARY, GUIDE):
        for target in re.findall(r"\]\((?!http)([^)#]+)\)", text):
            assert (NOTEBOOKS / target).exists(), target
        for module in re.findall(r"`(\w+\.py)`", text):
            assert (NOTEBOOKS.parent / "fp8lab" / module).is_file(), module


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_says_what_it_rounds(name):
    rollout, _, about = PRESETS[name]
    assert ("attention" in about or "q and P" in about) == (rollout.attention.probabilities != "bf16")


def test_the_mismatch_lesson_counts_limits_and_projects():
    """BANDS holds one limit under two names, gen_kl_error and k3_kl."""
    lesson = (NOTEBOOKS / "06_mismatch.ipynb").read_text(encoding="utf-8")
    limits = {(name.replace("k3_kl", "gen_kl_error"), source, limit) for name, _, source, limit in BANDS}
    projects = {re.split(r"[ ,]", source)[0] for _, source, _ in limits}
    words = "zero one two three four five six seven eight nine ten".split()
    assert f"{words[len(limits)]} of them, from {words[len(projects)]} projects" in lesson
    assert f"Ask {words[len(projects)]} projects" in lesson
