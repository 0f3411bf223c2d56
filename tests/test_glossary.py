"""The glossary and the course guide name what exists, and all of it."""

import dataclasses
import re
from pathlib import Path

from fp8lab import corrections, diagnostics
from fp8lab.experiment import ExperimentConfig
from fp8lab.grpo import GRPOConfig

NOTEBOOKS = Path(__file__).resolve().parents[1] / "notebooks"
GLOSSARY = (NOTEBOOKS / "GLOSSARY.md").read_text(encoding="utf-8")
GUIDE = (NOTEBOOKS / "README.md").read_text(encoding="utf-8")


def section(title):
    return re.search(rf"## {title}.*?\n(.*?)(?=\n## |\Z)", GLOSSARY, flags=re.DOTALL)[1]


def names(text):
    return [
        name
        for row in re.findall(r"^\| (.*?) \|", text, flags=re.MULTILINE)
        for name in re.findall(r"`(\w[\w-]*)`", row)
    ]


def test_every_correction_and_no_other():
    assert names(section("Corrections")) == list(corrections.MODES)


def test_mismatch_metrics_are_logged_under_these_names():
    known = {f.name for f in dataclasses.fields(diagnostics.MismatchReport)} | {"is_oob_ratio", "approx_entropy"}
    assert set(names(section("Mismatch"))) <= known
    for name in ("token_mult_prob_error", "gen_kl_error", "policy_kl_error", "js_divergence_error"):
        assert name in names(section("Mismatch"))


def test_knobs_are_fields():
    fields = {f.name for kind in (ExperimentConfig, GRPOConfig) for f in dataclasses.fields(kind)} | {"weight_source"}
    wanted = [name for name in names(section("Knobs")) if not name.startswith("_")]
    assert wanted and set(wanted) <= fields


def test_the_guide_lists_every_notebook():
    shipped = {path.name for path in NOTEBOOKS.glob("*.ipynb")}
    listed = set(re.findall(r"\]\((\w+\.ipynb)\)", GUIDE))
    assert listed == shipped


def test_linked_files_exist():
    for text in (GLOSSARY, GUIDE):
        for target in re.findall(r"\]\((?!http)([^)#]+)\)", text):
            assert (NOTEBOOKS / target).exists(), target
        for module in re.findall(r"`(\w+\.py)`", text):
            assert (NOTEBOOKS.parent / "fp8lab" / module).is_file(), module
