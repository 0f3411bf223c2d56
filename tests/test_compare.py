"""Comparing runs: against scipy and by hand, on the shipped evidence and on small runs made here."""

import json
import re
import shutil
from pathlib import Path

import pytest
from scipy import stats

from fp8lab import cli, compare
from fp8lab.experiment import ExperimentConfig
from fp8lab.runlog import RunLog, find_runs
from fp8lab.tasks import data_dir

EVIDENCE = data_dir() / "evidence" / "three-arms"


@pytest.fixture(scope="module")
def found():
    return compare.compare([EVIDENCE])


def test_agrees_with_the_shipped_summary(found):
    shipped = json.loads((data_dir() / "evidence" / "three-arms.json").read_text())
    assert found["base"] == "bf16" and found["seeds"] == shipped["seeds"] and found["unfinished"] == []
    for arm, values in shipped["arms"].items():
        for key, value in values.items():
            assert found["arms"][arm][key] == pytest.approx(value)
    for name, values in shipped["paired_differences"].items():
        assert found["paired_differences"][name]["accuracy_last"] == pytest.approx(values["accuracy_last"])
        assert found["paired_differences"][name]["equivalent_within_margin"] == values["equivalent_within_margin"]


def test_paired_interval_is_scipys(found):
    last = {}
    for folder in find_runs([EVIDENCE]):
        log = RunLog(folder)
        accuracies = [row["validation_accuracy"] for row in log.rows() if "validation_accuracy" in row]
        last.setdefault(log.config["name"], {})[log.config["seed"]] = accuracies[-1]
    pairs = [last["fp8-e2e"][s] - last["bf16"][s] for s in found["seeds"]]
    theirs = stats.ttest_1samp(pairs, 0).confidence_interval(0.95)
    ours = found["paired_differences"]["fp8-e2e - bf16"]["accuracy_last"]
    assert (ours["low"], ours["high"]) == pytest.approx((theirs.low, theirs.high))


def test_another_base_and_margin(found):
    other = compare.compare([EVIDENCE], base="fp8-e2e", margin=0.0001)
    ours = found["paired_differences"]["fp8-e2e - bf16"]["accuracy_last"]["mean"]
    assert other["paired_differences"]["bf16 - fp8-e2e"]["accuracy_last"]["mean"] == pytest.approx(-ours)
    assert other["paired_differences"]["bf16 - fp8-e2e"]["equivalent_within_margin"] is False
    with pytest.raises(ValueError, match="base is 'nothing'; the finished runs are"):
        compare.compare([EVIDENCE], base="nothing")


def test_one_seed_has_no_interval(tmp_path):
    for arm in ("bf16", "fp8-e2e"):
        shutil.copytree(EVIDENCE / f"{arm}-s1", tmp_path / f"{arm}-s1")
    found = compare.compare([tmp_path])
    assert found["arms"]["bf16"]["accuracy_last"]["low"] is None
    assert found["paired_differences"]["fp8-e2e - bf16"]["equivalent_within_margin"] is None
    assert "(one seed)" in compare.as_text(found)


def test_what_cannot_be_compared_is_said(tmp_path):
    with pytest.raises(FileNotFoundError, match="holds no run"):
        compare.compare([tmp_path])
    shutil.copytree(EVIDENCE / "bf16-s1", tmp_path / "a")
    shutil.copytree(EVIDENCE / "bf16-s1", tmp_path / "b")
    with pytest.raises(ValueError, match="second run of 'bf16' with seed 1"):
        compare.compare([tmp_path])
    for name in ("a", "b"):
        metrics = tmp_path / name / "metrics.jsonl"
        metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:50]))
    with pytest.raises(ValueError, match="none of 2 runs is finished"):
        compare.compare([tmp_path])
    shutil.copytree(EVIDENCE / "fp8-e2e-s1", tmp_path / "c")
    assert len(compare.compare([tmp_path])["unfinished"]) == 2


def edited(source, folder, change):
    """A copy of a shipped run with another config."""
    shutil.copytree(EVIDENCE / source, folder)
    config = RunLog(folder).config
    change(config)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("change", "differing"),
    [
        (lambda c: c["grpo"].update(learning_rate=0.01), "grpo.learning_rate 0.0005 vs 0.01"),
        (lambda c: c.update(temperature=0.5, task="other"), "task 'arithmetic' vs 'other', temperature 1.0 vs 0.5"),
        (lambda c: c["plan"]["rollout"]["fallback"].update(last=1), "plan.rollout.fallback.last 0 vs 1"),
        (lambda c: c.update(recalibrate="never"), "recalibrate 'every-step' vs 'never'"),  # the shipped one lacks it
    ],
)
def test_runs_of_one_name_that_differ_beyond_the_seed_are_refused(tmp_path, change, differing):
    shutil.copytree(EVIDENCE / "bf16-s1", tmp_path / "a")
    edited("bf16-s2", tmp_path / "b", change)
    message = f"{tmp_path / 'a'} and {tmp_path / 'b'} are both runs of 'bf16', but differ in {differing}; runs of one"
    for function in (compare.compare, compare.differing_settings):
        with pytest.raises(ValueError, match=re.escape(message)):
            function([tmp_path])


def test_a_default_that_an_older_version_did_not_write_is_no_difference(tmp_path):
    shutil.copytree(EVIDENCE / "bf16-s1", tmp_path / "a")
    assert "recalibrate" not in RunLog(tmp_path / "a").config
    edited("bf16-s2", tmp_path / "b", lambda c: c.update(ExperimentConfig.from_dict(c).to_dict()))
    assert "recalibrate" in RunLog(tmp_path / "b").config
    assert compare.compare([tmp_path])["arms"]["bf16"]["accuracy_last"]["n"] == 2


def test_what_makes_an_arm_another_than_the_base(found, tmp_path):
    stressed = compare.differing_settings(data_dir() / "evidence" / "stressed")
    assert stressed["fp8-rollout, tis"] == ["plan", "grpo.importance_sampling"]
    assert stressed["fp8-rollout, no correction"] == ["plan"] and "bf16" not in stressed
    differing = compare.differing_settings([EVIDENCE])
    assert differing == {"fp8-e2e": ["plan"], "fp8-rollout": ["plan"]}
    assert "fp8-e2e differs from bf16 in: plan" in compare.as_text(found, differing).splitlines()
    shutil.copytree(EVIDENCE / "bf16-s1", tmp_path / "a")
    edited("bf16-s1", tmp_path / "b", lambda c: c.update(name="again", steps=100))
    edited("bf16-s1", tmp_path / "c", lambda c: c.update(name="hot", temperature=2.0))
    assert compare.differing_settings(tmp_path) == {"again": [], "hot": ["temperature"]}
    assert compare.differing_settings(tmp_path, base="hot") == {"bf16": ["temperature"], "again": ["temperature"]}


def test_damaged_runs_are_left_out_and_named(tmp_path, capsys):
    for seed in (1, 2, 3):
        for arm in ("bf16", "fp8-e2e"):
            shutil.copytree(EVIDENCE / f"{arm}-s{seed}", tmp_path / f"{arm}-s{seed}")
    config, metrics = tmp_path / "bf16-s3" / "config.json", tmp_path / "fp8-e2e-s3" / "metrics.jsonl"
    config.write_bytes(config.read_bytes()[:100])
    metrics.write_bytes(metrics.read_bytes().replace(b'{"step": 7,', b'{"stop": 7,'))
    found = compare.compare([tmp_path])
    assert found["seeds"] == [1, 2] and found["unfinished"] == []
    assert set(found["damaged"]) == {str(config.parent), str(metrics.parent)}
    assert cli.main(["compare", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    report = tmp_path / "report.html"
    assert cli.main(["compare", str(tmp_path), "--html", str(report)]) == 0
    assert f"Left out: {config} is damaged" in report.read_text()
    assert f"left out: {config} is damaged (" in out and f"left out: {metrics} is damaged: line 8 of 101" in out
    with pytest.raises(ValueError, match=re.escape(f"none of 1 runs is finished; {config} is damaged")):
        compare.compare([config.parent])


def test_results_is_one_row_a_finished_run(found, tmp_path):
    table = compare.results(EVIDENCE)
    assert list(table.columns[:3]) == ["run", "arm", "seed"] and len(table) == 30
    assert table.set_index("run").loc[str(EVIDENCE / "fp8-e2e-s7"), ["arm", "seed"]].tolist() == ["fp8-e2e", 7]
    means = table.groupby("arm").mean(numeric_only=True)
    for arm, values in found["arms"].items():
        for key, value in values.items():
            assert means.loc[arm, key] == pytest.approx(value["mean"])
    for name in ("bf16-s1", "bf16-s2", "bf16-s3"):
        shutil.copytree(EVIDENCE / name, tmp_path / name)
    (tmp_path / "bf16-s2" / "config.json").write_text("{")
    metrics = tmp_path / "bf16-s3" / "metrics.jsonl"
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:50]))
    with pytest.warns(UserWarning, match="left out: .*bf16-s2.*config.json is damaged"):
        table = compare.results([tmp_path])
    assert table["seed"].tolist() == [1]


def test_mean_curve_against_scipy(found):
    seeds = compare.curves([EVIDENCE], "token_mult_prob_error")["fp8-rollout"]
    step, mean, low, high = compare.mean_curve(seeds)[10]
    values = [dict(points)[step] for points in seeds.values()]
    theirs = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    assert (low, high) == pytest.approx((theirs.low, theirs.high)) and low < mean < high


def test_cli_and_report(tmp_path, capsys):
    report = tmp_path / "report.html"
    assert cli.main(["compare", str(EVIDENCE), "--html", str(report)]) == 0
    out = capsys.readouterr().out
    assert re.search(r"fp8-e2e +10 +0\.\d+ \[", out) and "minus bf16" in out
    text = report.read_text()
    assert text.count("<table>") == 1 and "fp8-rollout" in text and "plotly" in text
    assert not re.search(r"<(script|link|img)[^>]+(src|href)=.?https?:", text), "the report needs no network"
    assert "fp8-e2e differs from bf16 in: plan\n" in out
    assert cli.main(["compare", str(EVIDENCE), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["base"] == "bf16" and printed["differing_settings"]["fp8-rollout"] == ["plan"]
    assert cli.main(["compare", str(tmp_path / "none")]) == 1


def test_seeds_are_read_or_refused():
    from fp8lab.cli_sweep import seeds

    assert seeds("0,2,5") == [0, 2, 5] and seeds("3-5") == [3, 4, 5] and seeds("7") == [7]
    for bad in ("", "a", "1,1", "5-3", "-1", "1.5"):
        with pytest.raises(ValueError, match="--seeds is"):
            seeds(bad)


def test_the_quick_sweep_is_three_arms_and_three_seeds(capsys):
    """The one command of the help makes nine configs that are accepted, each far smaller than its recipe's."""
    from fp8lab.cli_sweep import configs_of
    from fp8lab.recipes import load_recipe

    with pytest.raises(SystemExit):
        cli.main(["sweep", "--help"])
    command = (
        re.search(r"Three arms: python -m fp8lab (sweep .*)", " ".join(capsys.readouterr().out.split()))
        .group(1)
        .split()
    )
    configs = configs_of(cli._parser().parse_args(command))
    assert [(c.name, c.seed) for c in configs] == [
        (arm, seed) for arm in ("bf16", "fp8-rollout", "fp8-e2e") for seed in (0, 1, 2)
    ]
    for config in configs:
        recipe = load_recipe(config.name)
        assert config.plan == recipe.plan and config.grpo == recipe.grpo
        assert 6 * config.steps * config.prompts_per_step < recipe.steps * recipe.prompts_per_step


def test_sweep_command_compares_at_its_end(tmp_path, capsys):
    out = tmp_path / "sweep"
    command = ["sweep", "bf16", "fp8-e2e", "--out", str(out), "--seeds", "0,1", "--quick", "--steps", "1"]
    assert cli.main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["failed"] == {} and set(found["arms"]) == {"bf16", "fp8-e2e"} and found["seeds"] == [0, 1]
    assert sorted(p.name for p in Path(out).iterdir()) == ["bf16-s0", "bf16-s1", "fp8-e2e-s0", "fp8-e2e-s1"]
