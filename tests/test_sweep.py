"""Sweeps finish what is missing, survive a failing run, and intervals equal scipy's."""

import dataclasses
import json
import shutil
import statistics

import pytest
from scipy import stats

from fp8lab.experiment import ExperimentConfig, resume, run
from fp8lab.grpo import GRPOConfig
from fp8lab.runlog import RunLog
from fp8lab.sweep import _finish, final_metrics, interval, is_finished, paired_difference, run_folder, sweep

SMALL = ExperimentConfig(
    steps=2, prompts_per_step=4, eval_prompts=8, eval_samples=1, grpo=GRPOConfig(num_generations=2, warmup_steps=1)
)


def test_interval_equals_scipys():
    values = [0.1, 0.4, 0.2, 0.35]
    expected = stats.t.interval(0.95, 3, loc=statistics.fmean(values), scale=stats.sem(values))
    found = interval(values)
    assert (found.low, found.high) == pytest.approx(expected)
    assert found.mean == pytest.approx(0.2625) and found.n == 4
    with pytest.raises(ValueError, match="at least 2"):
        interval([0.5])


def test_paired_difference_uses_the_common_seeds():
    found = paired_difference({1: 0.5, 2: 0.7, 3: 0.9, 9: 0.0}, {1: 0.4, 2: 0.5, 3: 0.6, 8: 1.0})
    expected = stats.ttest_rel([0.5, 0.7, 0.9], [0.4, 0.5, 0.6]).confidence_interval()
    assert found.mean == pytest.approx(0.2) and found.n == 3
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high))


@pytest.mark.parametrize(
    ("values", "equivalent"), [([0.01, -0.01, 0.0, 0.005], True), ([0.05, -0.05, 0.0, 0.1], False)]
)
def test_only_the_whole_interval_counts_as_equivalence(values, equivalent):
    found = interval(values)
    assert abs(found.mean) < 0.03  # the means alone would call both equivalent
    assert found.within(0.03) is equivalent


@pytest.mark.slow
def test_a_sweep_finishes_what_is_missing_and_survives_a_failure(tmp_path):
    good = [dataclasses.replace(SMALL, seed=s) for s in (1, 2)]
    bad = dataclasses.replace(SMALL, name="bad", model="no-such-model")
    done = run(good[0], run_folder(tmp_path, good[0])).folder / "metrics.jsonl"
    before = done.stat().st_mtime_ns
    seen = []
    failed = sweep([*good, bad], tmp_path, workers=1, on_done=lambda folder, error: seen.append((folder, error)))
    assert (
        list(failed) == [str(run_folder(tmp_path, bad))] and "no-such-model" in failed[str(run_folder(tmp_path, bad))]
    )
    assert len(seen) == 3 and done.stat().st_mtime_ns == before
    assert all(is_finished(run_folder(tmp_path, c)) for c in good) and not is_finished(run_folder(tmp_path, bad))
    rows = final_metrics([run_folder(tmp_path, c) for c in good])
    assert [r["seed"] for r in rows] == [1, 2]
    log = RunLog(run_folder(tmp_path, good[1])).rows()
    assert rows[1]["accuracy_last"] == log[-1]["validation_accuracy"]
    expected = (log[1]["token_mult_prob_error"] + log[2]["token_mult_prob_error"]) / 2
    assert rows[1]["token_mult_prob_error"] == pytest.approx(expected)


@pytest.mark.slow
def test_a_sweep_on_ray_gives_the_runs_of_local_processes(tmp_path, monkeypatch):
    """On a real local Ray: a run that fails does not stop the rest, a second call has nothing to do."""
    pytest.importorskip("ray", reason="needs Ray: pip install 'fp8lab[ray]'")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # else Ray writes a token file into the home folder
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    config, bad = dataclasses.replace(SMALL, seed=3), dataclasses.replace(SMALL, name="bad", model="no-such-model")
    seen = []
    failed = sweep([config, bad], tmp_path, ray="local", on_done=lambda folder, error: seen.append((folder, error)))
    assert list(failed) == [str(run_folder(tmp_path, bad))]
    assert failed[str(run_folder(tmp_path, bad))].startswith("FileNotFoundError: no checkpoint 'no-such-model'")
    assert len(seen) == 2 and is_finished(run_folder(tmp_path, config))
    assert sweep([config], tmp_path / "local", workers=1) == {}
    ours, theirs = (run_folder(out, config) / "metrics.jsonl" for out in (tmp_path / "local", tmp_path))
    assert theirs.read_bytes() == ours.read_bytes()
    assert not (tmp_path / "home").exists()


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return run(SMALL, tmp_path_factory.mktemp("finished") / "run").folder


@pytest.mark.parametrize("damage", ["torn last line", "a line missing", "a line twice", "a line too many", "no text"])
def test_a_run_with_a_damaged_log_is_not_finished(damage, finished, tmp_path):
    """... and resuming it loses nothing: it is repaired from its last checkpoint, or refused as it is."""
    shutil.copytree(finished, tmp_path / "run")
    path = tmp_path / "run" / "metrics.jsonl"
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    damaged = {
        "torn last line": [*lines[:2], lines[2][:30]],
        "a line missing": [lines[0], lines[2]],
        "a line twice": [*lines, lines[2]],
        "a line too many": [*lines, b'{"step": 3}\n'],
        "no text": [lines[0], b"\xff\xfe\n", lines[2]],
    }[damage]
    path.write_bytes(b"".join(damaged))
    assert is_finished(finished) and not is_finished(path.parent)
    if damage == "a line too many":
        assert resume(path.parent).folder == path.parent and path.read_bytes() == whole
    else:
        with pytest.raises(ValueError, match="is damaged"):
            resume(path.parent)
        assert path.read_bytes() == b"".join(damaged)


def test_resuming_without_checkpoints_deletes_nothing(finished, tmp_path):
    """A finished run, as shipped in data/, is left alone; one that is not cannot go on, and says so."""
    shutil.copytree(finished, tmp_path / "run", ignore=shutil.ignore_patterns("checkpoints"))
    path = tmp_path / "run" / "metrics.jsonl"
    whole = path.read_bytes()
    resume(path.parent)
    assert path.read_bytes() == whole
    config = json.loads((path.parent / "config.json").read_text())
    (path.parent / "config.json").write_text(json.dumps(config | {"steps": 9, "checkpoint_every": 1}))
    with pytest.raises(ValueError, match="logged step 2 of 9, but its checkpoints are gone"):
        resume(path.parent)
    assert path.read_bytes() == whole


def test_a_finished_log_without_its_last_checkpoint_is_gone_on_with(tmp_path):
    """Killed between the last line and the last checkpoint: the sweep's next call writes it, and no other metrics."""
    config = dataclasses.replace(SMALL, checkpoint_every=1)
    folder = run(config, run_folder(tmp_path, config)).folder
    before = (folder / "metrics.jsonl").read_bytes()
    shutil.rmtree(folder / "checkpoints" / "step-000002")
    assert is_finished(folder)
    _finish(config, folder, 1, None)
    assert (folder / "metrics.jsonl").read_bytes() == before
    assert RunLog(folder).latest_checkpoint()[0] == 2


def test_sweeps_refuse_what_would_mix_runs(tmp_path):
    with pytest.raises(ValueError, match="share a name and a seed"):
        sweep([SMALL, SMALL], tmp_path)
    folder = run_folder(tmp_path, SMALL)
    with RunLog(folder) as log:
        log.start(dataclasses.replace(SMALL, steps=7).to_dict())
    with pytest.raises(ValueError, match="run of another config"):
        sweep([SMALL], tmp_path)
    assert not is_finished(folder) and not is_finished(tmp_path / "nothing")
