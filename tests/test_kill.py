"""kill -9 at 20 moments, and of sweeps and their workers: what is resumed ends in the bytes of the uninterrupted run.

The file is also a program, `test_kill.py FOLDER`: a process that has imported everything forks one child for each run
that is to die, which saves 20 starts. It has run no kernel itself, as OpenMP's threads do not survive a fork.
"""

import dataclasses
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import safetensors.torch

from fp8lab.experiment import ExperimentConfig, resume, run
from fp8lab.grpo import GRPOConfig
from fp8lab.models import load_model, load_tokenizer
from fp8lab.precision import PrecisionPlan
from fp8lab.runlog import RunLog
from fp8lab.sweep import is_finished, run_folder
from fp8lab.tasks import load_task

CONFIG = ExperimentConfig(
    plan=PrecisionPlan.preset("fp8-e2e-kv"),
    steps=4,
    prompts_per_step=4,
    eval_every=2,
    eval_prompts=8,
    eval_samples=1,
    checkpoint_every=1,
    grpo=GRPOConfig(num_generations=2, warmup_steps=1),
)
FILES = ("metrics.jsonl", "calibration.jsonl", "samples.jsonl", "config.json")
PLANTED = ("before os.replace", "after os.replace", "in os.fsync", "in save_file", "in shutil.rmtree", "in a log line")
TIMED = 8
pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork, which Windows does not have")


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def plant(place, when):
    """Patch this process so that the call number `when` (from 1) at `place` kills it; returns the count of calls."""
    calls = {"n": 0}

    def patch(owner, name, before=None, after=None):
        original = getattr(owner, name)

        def wrapper(*arguments, **options):
            calls["n"] += 1
            if calls["n"] == when and before is not None:
                before(*arguments, **options)
                die()
            result = original(*arguments, **options)
            if calls["n"] == when and after is not None:
                die()
            return result

        setattr(owner, name, wrapper)

    def half_a_file(tensors, path, **_):
        Path(path).write_bytes(b"\x08\x00\x00\x00\x00\x00\x00\x00{}")

    def half_a_folder(folder, **_):
        for file in list(Path(folder).glob("*"))[:1]:
            file.unlink()

    def half_a_line(log, name, row):
        with open(log.folder / f"{name}.jsonl", "a") as file:
            file.write(json.dumps(row)[:9])

    {
        "before os.replace": lambda: patch(os, "replace", before=lambda *a: None),
        "after os.replace": lambda: patch(os, "replace", after=die),
        "in os.fsync": lambda: patch(os, "fsync", before=lambda *a: None),
        "in save_file": lambda: patch(safetensors.torch, "save_file", before=half_a_file),
        "in shutil.rmtree": lambda: patch(shutil, "rmtree", before=half_a_folder),
        "in a log line": lambda: patch(RunLog, "append", before=half_a_line),
    }[place]()
    return calls


def child(function):
    """Fork; the child runs function() and ends. Returns its process id."""
    pid = os.fork()
    if pid == 0:
        try:
            function()
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            os._exit(1)
        os._exit(0)
    return pid


def status(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def go_on(folder):
    if (folder / "config.json").is_file():
        resume(folder)
    else:  # it died before it had begun
        run(CONFIG, folder)


def main(folder):
    """Die at every moment, resume, and write what was found to folder/found.json."""
    load_model(CONFIG.model), load_tokenizer(CONFIG.model), load_task(CONFIG.task)  # imported once, for all children
    folder, chance, found = Path(folder), random.Random(0), []
    whole = folder / "whole"

    def counting():
        counts = {place: plant(place, -1) for place in PLANTED}
        run(CONFIG, whole)
        (folder / "counts.json").write_text(json.dumps({place: c["n"] for place, c in counts.items()}))

    assert status(child(counting)) == 0
    counts = json.loads((folder / "counts.json").read_text())
    moments = [(place, n) for place in PLANTED for n in chance.sample(range(1, counts[place] + 1), 2)]
    moments += [("after rows", number % CONFIG.steps) for number in range(TIMED)]
    for number, (place, when) in enumerate(moments):
        killed = folder / str(number)

        def dying(place=place, when=when, killed=killed):
            if place in PLANTED:
                plant(place, when)
            run(CONFIG, killed)

        pid = child(dying)
        if place == "after rows":
            wait_for_rows([killed], when)
            time.sleep(chance.uniform(0, 0.4))  # a step takes about that long; the last has an evaluation of 1 s
            os.kill(pid, signal.SIGKILL)
        ended = status(pid)
        rows = len(RunLog(killed).rows()) if killed.exists() else 0
        went_on = status(child(lambda killed=killed: go_on(killed)))
        same = [(killed / name).read_bytes() == (whole / name).read_bytes() for name in FILES]
        hidden = [str(path) for path in killed.glob("**/.*.tmp-*")]
        row = {"place": place, "when": when, "ended": ended, "rows": rows, "went_on": went_on}
        found.append(row | {"same": all(same), "left_behind": hidden})
    (folder / "found.json").write_text(json.dumps(found))


def start(*arguments, **options):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
    return subprocess.Popen([sys.executable, *map(str, arguments)], env=environment, **options)


@pytest.mark.slow
def test_kill_9_at_20_moments_resumes_to_the_same_bytes(tmp_path):
    assert start(__file__, tmp_path).wait(timeout=400) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    assert len(found) == 20
    assert [row for row in found if row["ended"] != -signal.SIGKILL] == []
    assert {row["rows"] for row in found} == {0, 1, 2, 3, 4, 5}  # they died in all steps
    assert [row for row in found if row["went_on"] != 0 or not row["same"] or row["left_behind"]] == []


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Two configs, and the metrics of each run by itself."""
    configs = [dataclasses.replace(CONFIG, steps=8, seed=seed) for seed in (1, 2)]
    folder = tmp_path_factory.mktemp("alone")
    (folder / "run.py").write_text(
        "import sys\nfrom fp8lab.experiment import *\nfrom fp8lab.runlog import RunLog\nfor folder in sys.argv[1:]:\n"
        "    run(ExperimentConfig.from_dict(RunLog(folder + '-asked').config), folder)\n"
    )
    for config in configs:
        asked = Path(f"{run_folder(folder, config)}-asked")
        with RunLog(asked) as log:
            log.start(config.to_dict())
    assert start(folder / "run.py", *(run_folder(folder, c) for c in configs)).wait(timeout=300) == 0
    return configs, [(run_folder(folder, c) / "metrics.jsonl").read_bytes() for c in configs]


def wait_for_rows(folders, count):
    deadline = time.monotonic() + 120
    while not all(len(RunLog(folder).rows()) >= count for folder in folders):
        assert time.monotonic() < deadline
        time.sleep(0.05)


SWEEP = """
import json, sys
from fp8lab.experiment import ExperimentConfig
from fp8lab.sweep import sweep
if __name__ == "__main__":
    configs = [ExperimentConfig.from_dict(data) for data in json.loads(open(sys.argv[1]).read())]
    failed = sweep(configs, sys.argv[2], workers=2, **json.loads(sys.argv[3]))
    assert failed == {}, failed
"""
needs_proc = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc, which only Linux has")


def start_sweep(folder, configs, **options):
    """A process that sweeps the configs into folder/out, in a session of its own."""
    folder.mkdir(exist_ok=True)
    (folder / "sweep.py").write_text(SWEEP)
    (folder / "configs.json").write_text(json.dumps([c.to_dict() for c in configs]))
    arguments = (folder / "sweep.py", folder / "configs.json", folder / "out", json.dumps(options))
    return start(*arguments, start_new_session=True)


@needs_proc
@pytest.mark.slow
@pytest.mark.parametrize("victim", ["all of it", "its parent", "a worker"])
def test_a_killed_sweep_ends_in_the_same_bytes(alone, tmp_path, victim):
    """Of a sweep that is killed, a second call does the rest; with one worker killed, the sweep itself does."""
    configs, expected = alone
    folders = [run_folder(tmp_path / "out", c) for c in configs]
    process = start_sweep(tmp_path, configs)
    wait_for_rows(folders, 2)
    if victim == "a worker":
        os.kill(writer_of(folders[1]), signal.SIGKILL)
    else:
        kill = os.killpg if victim == "all of it" else os.kill
        kill(process.pid, signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL and not all(map(is_finished, folders))
        wait_until_nobody_writes(folders)  # no worker goes on without its parent
        assert not all(map(is_finished, folders))
        process = start_sweep(tmp_path, configs)
    assert process.wait(timeout=300) == 0
    assert [(folder / "metrics.jsonl").read_bytes() for folder in folders] == expected


@needs_proc
@pytest.mark.slow
def test_ray_leaves_no_writer_behind_a_killed_sweep(tmp_path, monkeypatch):
    """Ray's processes are not the sweep's children: they must end, too, and free the run for the next sweep.

    They end some seconds later, so the run has more steps than any delay lasts; what is resumed is compared, row by
    row, with a sweep of the same run that nobody killed before.
    """
    pytest.importorskip("ray", reason="needs Ray: pip install 'fp8lab[ray]'")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # else Ray writes a token file into the home folder
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    config, (killed, whole) = dataclasses.replace(CONFIG, steps=10_000), (tmp_path / "killed", tmp_path / "whole")
    folders = [run_folder(place / "out", config) for place in (killed, whole)]
    process = start_sweep(killed, [config], ray="local")
    wait_for_rows(folders[:1], 2)
    assert writer_of(folders[0]) != process.pid
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    wait_until_nobody_writes(folders[:1])
    rows = len(RunLog(folders[0]).rows()) + 2
    processes = [start_sweep(place, [config]) for place in (killed, whole)]
    wait_for_rows(folders, rows)
    for process in processes:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    resumed, expected = ((folder / "metrics.jsonl").read_bytes().splitlines()[:rows] for folder in folders)
    assert len(resumed) == rows and resumed == expected


@pytest.mark.slow
def test_the_commands_resume_what_was_killed(alone, tmp_path):
    """`run`, kill -9, `resume`, as a user does it."""
    config, expected = alone[0][0], alone[1][0]
    recipe, folder = tmp_path / "small.yaml", tmp_path / "run"
    recipe.write_text(json.dumps({"about": "test", "experiment": config.to_dict()}))
    process = start("-m", "fp8lab", "run", recipe, "--out", folder)
    wait_for_rows([folder], 3)
    process.kill()
    assert process.wait() == -signal.SIGKILL and not is_finished(folder)
    resumed = start("-m", "fp8lab", "resume", folder, "--json", stdout=subprocess.PIPE)
    summary = json.loads(resumed.communicate(timeout=300)[0])
    assert resumed.returncode == 0 and summary["step"] == config.steps
    assert (folder / "metrics.jsonl").read_bytes() == expected


def wait_until_nobody_writes(folders):
    deadline = time.monotonic() + 60
    while any(writer_of(folder) for folder in folders):
        assert time.monotonic() < deadline
        time.sleep(0.2)


def writer_of(folder):
    """The process that has the lock of this run directory open, or None."""
    lock = str((folder / ".lock").resolve())
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if os.readlink(descriptor) == lock:
                return int(descriptor.parts[2])
        except OSError:
            continue
    return None


if __name__ == "__main__":
    main(*sys.argv[1:])
