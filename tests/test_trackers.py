"""Trackers get every row once, also over a resume; what is missing is said before, what fails later stops nothing.

The real ones are tested where they are installed: pip install tensorboard trackio wandb.
"""

import json
import struct

import pytest

from fp8lab import cli, trackers
from fp8lab.experiment import ExperimentConfig, resume, run
from fp8lab.grpo import GRPOConfig
from fp8lab.runlog import RunLog
from fp8lab.sweep import sweep

CONFIG = ExperimentConfig(
    steps=3, prompts_per_step=2, eval_prompts=4, eval_samples=1, grpo=GRPOConfig(num_generations=2, warmup_steps=1)
)


@pytest.fixture(scope="module")
def untracked(tmp_path_factory):
    return run(CONFIG, tmp_path_factory.mktemp("untracked") / "a")


def stopped_and_resumed(folder, tracker):
    """A run that stops after step 1 and is resumed, both times followed by its tracker."""
    log = run(CONFIG, folder, tracker=tracker, should_stop=lambda: len(RunLog(folder).rows()) > 1)
    assert len(log.rows()) == 2
    return resume(folder)


@pytest.fixture
def recorder(monkeypatch):
    """A tracker that keeps what it is told; `json` stands for a package that is installed."""
    seen = {"runs": [], "rows": [], "ended": 0}

    def record(log, run):
        seen["runs"].append(run)

        def end():
            seen["ended"] += 1

        return lambda step, numbers: seen["rows"].append({"step": step, **numbers}), end

    monkeypatch.setitem(trackers.TRACKERS, "json", record)
    return seen


def test_every_row_is_sent_once(recorder, untracked, tmp_path):
    log = stopped_and_resumed(tmp_path / "a", "json")
    assert recorder["rows"] == log.rows() == untracked.rows()
    assert (log.folder / "metrics.jsonl").read_bytes() == (untracked.folder / "metrics.jsonl").read_bytes()
    first, second = recorder["runs"]
    assert first == second and first.startswith("a-") and recorder["ended"] == 2
    resume(log.folder)  # nothing is left to do
    assert len(recorder["runs"]) == 2
    assert not (untracked.folder / trackers.FILE).exists()


def test_steps_taken_again_are_not_sent_again(recorder, tmp_path):
    """Killed after step 2, with its last checkpoint at step 0: the log is rewound, the tracker is not."""
    log = run(CONFIG, tmp_path / "a", tracker="json", should_stop=lambda: True)
    with log:
        for step in (1, 2):
            log.append("metrics", {"step": step})
    resume(log.folder)
    assert [row["step"] for row in recorder["rows"]] == [0, 3] and len(log.rows()) == 4


@pytest.mark.parametrize("when", ["opening", "sending", "ending"])
def test_a_tracker_that_fails_is_one_warning(when, monkeypatch, untracked, tmp_path):
    def fail(*_):
        raise ConnectionError("no network")

    def broken(log, run):
        return fail() if when == "opening" else (fail if when == "sending" else lambda *_: None, fail)

    monkeypatch.setitem(trackers.TRACKERS, "json", broken)
    with pytest.warns(UserWarning, match="goes on without it: ConnectionError: no network") as caught:
        log = run(CONFIG, tmp_path / "a", tracker="json")
    assert len([w for w in caught if "tracker" in str(w.message)]) == 1
    assert log.rows() == untracked.rows()


def test_what_is_missing_is_said_before_the_run_begins(monkeypatch, tmp_path, capsys):
    with pytest.raises(ValueError, match="tracker is 'mlflow'; allowed: tensorboard, trackio, wandb"):
        run(CONFIG, tmp_path / "a", tracker="mlflow")
    monkeypatch.setitem(trackers.TRACKERS, "no_such_package", None)
    with pytest.raises(ImportError, match="pip install no_such_package"):
        sweep([CONFIG], tmp_path, tracker="no_such_package")
    command = ["run", "bf16", "--out", str(tmp_path / "a"), "--tracker", "no_such_package"]
    assert cli.main(command) == 1 and "pip install no_such_package" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def values_of(tracker, log):
    """{step: accuracy}, and how many there are, as the tracker's own reader finds it."""
    about = json.loads((log.folder / trackers.FILE).read_text())
    if tracker == "tensorboard":
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(log.folder / "tensorboard"))
        events.Reload()
        pairs = [(event.step, event.value) for event in events.Scalars("validation_accuracy")]
        return dict(pairs), len(pairs)
    if tracker == "trackio":
        from trackio.sqlite_storage import SQLiteStorage

        assert SQLiteStorage.get_runs(trackers.PROJECT) == [about["run"]]
        rows = SQLiteStorage.get_logs(trackers.PROJECT, about["run"])
    else:
        rows = wandb_rows(log.folder, about["run"])
    pairs = [(row["step"], row["validation_accuracy"]) for row in rows if "validation_accuracy" in row]
    return dict(pairs), len(pairs)


def wandb_rows(folder, run):
    """The history in wandb's offline files, of which each resume begins another under the same id.

    A file is 7 bytes and LevelDB's log format: blocks of 32 kB, in them pieces of records after their crc (4), length
    (2) and kind (1: whole, 2 to 4: first, middle, last).
    """
    from wandb.proto.wandb_internal_pb2 import Record

    files = sorted((folder / "wandb").glob("offline-run-*/*.wandb"))
    assert {file.stem for file in files} == {f"run-{run}"}
    for data in (file.read_bytes() for file in files):
        at, record = 7, b""
        while at + 7 <= len(data):
            if 32768 - at % 32768 < 7:
                at += 32768 - at % 32768
            _, length, kind = struct.unpack("<IHB", data[at : at + 7])
            record = (b"" if kind in (1, 2) else record) + data[at + 7 : at + 7 + length]
            at += 7 + length
            if kind in (1, 4) and (found := Record.FromString(record)).WhichOneof("record_type") == "history":
                items = {(item.key or item.nested_key[0]): json.loads(item.value_json) for item in found.history.item}
                yield {**items, "step": found.history.step.num}


@pytest.mark.slow
@pytest.mark.parametrize("tracker", trackers.TRACKERS)
def test_the_real_tracker_has_what_was_logged(tracker, untracked, tmp_path, monkeypatch):
    settings = {"TRACKIO_DIR": str(tmp_path / "trackio"), "WANDB_MODE": "offline"}
    settings |= {"WANDB_CACHE_DIR": str(tmp_path / "wandb"), "WANDB_SILENT": "true"}
    for name, value in settings.items():
        monkeypatch.setenv(name, value)  # before trackio is imported
    pytest.importorskip(tracker, reason=f"needs {tracker}: pip install {tracker}")
    log = stopped_and_resumed(tmp_path / "a", tracker)
    expected = {row["step"]: row["validation_accuracy"] for row in untracked.rows() if "validation_accuracy" in row}
    assert values_of(tracker, log) == (pytest.approx(expected), 2)
