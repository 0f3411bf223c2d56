"""The shipped studies: each summary follows from its runs, the README's table from the summary."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
STUDY = ROOT / "data" / "evidence" / "three-arms"
STUDIES = sorted(p.parent for p in (ROOT / "data" / "evidence").glob("*/*-s1") if p.is_dir())
STUDIES = [folder for folder in dict.fromkeys(STUDIES) if folder.with_suffix(".json").is_file()]


@pytest.fixture(scope="module")
def evidence():
    spec = importlib.util.spec_from_file_location("evidence", ROOT / "data" / "evidence.py")
    module = sys.modules["evidence"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def summary():
    return json.loads(STUDY.with_suffix(".json").read_text())


@pytest.mark.parametrize("folder", STUDIES, ids=lambda folder: folder.name)
def test_the_summary_follows_from_the_shipped_runs(evidence, folder):
    summary = json.loads(folder.with_suffix(".json").read_text())
    study = evidence.STUDIES[folder.name]
    again = json.loads(json.dumps({"about": study.about, **evidence.compare([folder], base=study.base)}))
    assert summary["seeds"] == list(range(1, 1 + study.seeds)) and not summary["unfinished"]
    assert set(summary["arms"]) == {name for name, _, _ in study.arms}

    def compare(a, b):
        assert type(a) is type(b)
        if isinstance(a, dict):
            assert a.keys() == b.keys()
            for key in a:
                compare(a[key], b[key])
        elif isinstance(a, float):
            assert a == pytest.approx(b, rel=1e-9)
        else:
            assert a == b

    compare(again, summary)


def test_the_readme_shows_the_summary(evidence, summary):
    assert evidence.table(summary) in (ROOT / "README.md").read_text(encoding="utf-8")


def test_what_the_study_found(summary):
    """Issue 2's claims, over at least five seeds; a new study with other results must change the words, too."""
    assert len(summary["seeds"]) >= 5 and summary["margin"] == 0.03
    arms, differences = summary["arms"], summary["paired_differences"]
    assert 0.25 < arms["bf16"]["accuracy_first"]["mean"] < 0.35
    assert arms["bf16"]["accuracy_last"]["low"] >= 0.8
    assert differences["fp8-e2e - bf16"]["equivalent_within_margin"]
    assert arms["fp8-e2e"]["token_mult_prob_error"]["high"] < 1.005
    assert arms["fp8-rollout"]["token_mult_prob_error_first_30"]["low"] >= 1.02
    assert differences["fp8-rollout - bf16"]["token_mult_prob_error"]["low"] > 0.01


def test_the_readme_says_what_the_kv_study_found():
    """Issue 5: accuracy and mismatch of fp8-e2e-kv against fp8-e2e over five seeds."""
    from fp8lab.compare import value_text

    summary = json.loads((STUDY.parent / "kv.json").read_text())
    assert len(summary["seeds"]) >= 5 and summary["base"] == "fp8-e2e"
    difference = value_text(summary["paired_differences"]["fp8-e2e-kv - fp8-e2e"]["accuracy_last"], 4, "+")
    error = value_text(summary["arms"]["fp8-e2e-kv"]["token_mult_prob_error"], 4)
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert difference in text and error in text
