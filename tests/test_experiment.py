"""The whole loop: the arms differ as they should, faults are seen, and a run repeats and resumes bit for bit."""

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import contextmanager

import pytest
import torch

from fp8lab import cli, experiment
from fp8lab.diagnostics import differing_layers
from fp8lab.experiment import ExperimentConfig, Loop, resume, run
from fp8lab.grpo import GRPOConfig
from fp8lab.linear import float8_layers
from fp8lab.precision import PrecisionPlan
from fp8lab.recipes import load_recipe, recipe_data, recipe_names
from fp8lab.runlog import LOGS, RunLog

SMALL = ExperimentConfig(
    steps=6,
    prompts_per_step=8,
    eval_every=3,
    eval_prompts=16,
    eval_samples=1,
    checkpoint_every=2,
    grpo=GRPOConfig(num_generations=4, warmup_steps=2, learning_rate=5e-4),
)


def small(plan="fp8-e2e", **changes):
    return dataclasses.replace(SMALL, name=plan, plan=PrecisionPlan.preset(plan), **changes)


def mismatch_of(config, steps=3, change=lambda loop: None):
    """Mean token_mult_prob_error over a few steps; `change(loop)` is called before each."""
    loop = Loop(config)
    errors = []
    for number in range(1, steps + 1):
        change(loop)
        errors.append(loop.step(number)[0]["token_mult_prob_error"])
    return sum(errors) / len(errors), loop


def test_the_three_arms():
    wide = dict(prompts_per_step=32)
    bf16, _ = mismatch_of(small("bf16", **wide))
    e2e, loop = mismatch_of(small("fp8-e2e", **wide))
    rollout_only, _ = mismatch_of(small("fp8-rollout", **wide))
    assert bf16 < 1.001
    assert e2e < 1.005
    assert rollout_only >= 1.02
    assert differing_layers(loop.trainer.model, loop.engine.model) == {}


def test_a_skipped_refit_is_seen(monkeypatch):
    """End to end the engines hold the same bytes after every step; without the refit they do not, and it shows."""
    config = small("fp8-e2e", prompts_per_step=32, grpo=dataclasses.replace(SMALL.grpo, learning_rate=2e-3))
    honest, loop = mismatch_of(config, steps=4)
    assert honest < 1.005 and differing_layers(loop.trainer.model, loop.engine.model) == {}
    monkeypatch.setattr("fp8lab.rollout.native.NativeEngine.refit", lambda self, source: None)
    stale, loop = mismatch_of(config, steps=4)
    assert stale > 1.005 and len(differing_layers(loop.trainer.model, loop.engine.model)) > 10


def test_a_power_of_two_scale_on_one_side_is_seen():
    pow2 = PrecisionPlan.preset("fp8-e2e", rule="pow2")
    plan = dataclasses.replace(PrecisionPlan.preset("fp8-e2e"), rollout=pow2.rollout)
    error, loop = mismatch_of(dataclasses.replace(small(prompts_per_step=32), plan=plan))
    assert error > 1.005 and not plan.same_on_both_sides()
    assert "scale rules differ" in differing_layers(loop.trainer.model, loop.engine.model)["model.layers.0.mlp.up_proj"]
    both, _ = mismatch_of(dataclasses.replace(small(prompts_per_step=32), plan=pow2))
    assert both < 1.005


def flip_one_byte(layer):
    codes = layer.quantized.packed.codes.clone()
    codes[3, 5] ^= 0x40
    packed = dataclasses.replace(layer.quantized.packed, codes=codes)
    layer._cache = layer.quantized._replace(packed=packed, values=packed.dequantize())


def invert_scales(layer):
    packed = dataclasses.replace(layer.quantized.packed, scale=1 / layer.quantized.packed.scale)
    layer._cache = layer.quantized._replace(packed=packed, values=packed.dequantize())


@pytest.mark.parametrize("fault", [flip_one_byte, invert_scales])
def test_planted_faults_in_the_rollouts_weights_are_seen(fault):
    loop = Loop(small())
    assert differing_layers(loop.trainer.model, loop.engine.model) == {}
    fault(dict(float8_layers(loop.engine.model))["model.layers.2.self_attn.o_proj"])
    assert list(differing_layers(loop.trainer.model, loop.engine.model)) == ["model.layers.2.self_attn.o_proj"]
    if fault is invert_scales:
        assert loop.step(1)[0]["token_mult_prob_error"] > 1.5


def test_other_kernels_show_an_engine_gap_in_bf16():
    same, _ = mismatch_of(small("bf16", prompts_per_step=32))
    other, _ = mismatch_of(small("bf16", prompts_per_step=32, rollout_kernels="other"))
    assert 1 <= same < other < 1.005


def test_the_moe_model_runs_with_its_experts_in_fp8():
    loop = Loop(small(model="tiny-qwen3-moe"))
    row, _ = loop.step(1)
    assert torch.tensor(row["loss"]).isfinite() and row["token_mult_prob_error"] < 1.01
    assert all(name.endswith("mlp.gate.weight") for name in loop.trainer.conversion.untouched), "routers alone"
    assert len(loop.trainer.conversion.fp8) == 24  # q, k, v, o and two tensors of fused experts, of four layers


@pytest.mark.slow
def test_bf16_learns():
    config = dataclasses.replace(load_recipe("bf16"), steps=25, eval_every=25)
    loop = Loop(config)
    first = loop.evaluate(0)["validation_accuracy"]
    for number in range(1, 26):
        loop.step(number)
    last = loop.evaluate(25)["validation_accuracy"]
    assert 0.25 < first < 0.36 and last > first + 0.15


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    return run(small(), tmp_path_factory.mktemp("runs") / "reference")


def test_a_run_directory_is_complete(reference):
    rows = reference.rows()
    assert [row["step"] for row in rows] == list(range(7))
    assert ["validation_accuracy" in row for row in rows] == [True, False, False, True, False, False, True]
    assert rows[-1]["validation_samples"] == 2 * 1000  # the last evaluation takes every validation prompt, twice
    assert [row["step"] for row in reference.rows("timing")] == list(range(7))
    sample = reference.rows("samples")[0]
    assert set(sample) == {"step", "prompt", "completion", "reward"}
    assert reference.latest_checkpoint()[0] == 6
    assert len(list((reference.folder / "checkpoints").iterdir())) == 2
    environment = json.loads((reference.folder / "environment.json").read_text())
    assert environment["packages"]["torch"] == torch.__version__
    assert ExperimentConfig.from_dict(reference.config) == small()


def test_the_same_seed_gives_the_same_bytes(reference, tmp_path):
    again = run(small(), tmp_path / "again")
    assert (again.folder / "metrics.jsonl").read_bytes() == (reference.folder / "metrics.jsonl").read_bytes()
    other = run(small(seed=1, steps=1), tmp_path / "other")
    assert other.rows()[1] != reference.rows()[1]


@pytest.mark.parametrize("stop_after", [0, 1, 4])
def test_a_stopped_run_resumes_to_the_same_bytes(reference, tmp_path, stop_after):
    seen = []
    log = run(small(), tmp_path / "run", on_step=seen.append, should_stop=lambda: len(seen) > stop_after)
    assert log.rows()[-1]["step"] == stop_after
    resume(log.folder)
    assert (log.folder / "metrics.jsonl").read_bytes() == (reference.folder / "metrics.jsonl").read_bytes()


@pytest.mark.parametrize("place", ["after metrics", "in a checkpoint", "torn line", "in evaluation"])
def test_a_crash_anywhere_resumes_to_the_same_bytes(reference, tmp_path, monkeypatch, place):
    class Crash(BaseException):
        pass

    counter = {"n": 0}

    def crash_at(n, original):
        def wrapper(*args, **kwargs):
            counter["n"] += 1
            if counter["n"] == n:
                raise Crash
            return original(*args, **kwargs)

        return wrapper

    folder = tmp_path / "run"
    with monkeypatch.context() as patch:
        if place == "in a checkpoint":
            patch.setattr("fp8lab.trainer.save_file", None, raising=False)
            patch.setattr("safetensors.torch.save_file", crash_at(2, __import__("safetensors.torch").torch.save_file))
        elif place == "in evaluation":
            patch.setattr(Loop, "evaluate", crash_at(2, Loop.evaluate))
        else:
            patch.setattr(experiment.Trainer, "save", crash_at(2, experiment.Trainer.save))
        with pytest.raises(Crash):
            run(small(), folder)
    if place == "torn line":
        with open(folder / "metrics.jsonl", "a") as file:
            file.write('{"step": 5, "rew')
    resume(folder)
    assert (folder / "metrics.jsonl").read_bytes() == (reference.folder / "metrics.jsonl").read_bytes()
    assert not list(folder.glob("checkpoints/.*"))


def copied(reference, folder):
    shutil.copytree(reference.folder, folder)
    return RunLog(folder)


def contents(folder):
    """Every file but the lock, and its bytes."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}


@pytest.fixture(scope="module")
def logged(tmp_path_factory):
    """A run with all five logs that stopped after step 3 of 4."""
    seen = []
    config = small("fp8-e2e-kv", steps=4, prompts_per_step=4, eval_every=1)
    out = tmp_path_factory.mktemp("logged") / "run"
    return run(config, out, on_step=seen.append, should_stop=lambda: len(seen) > 3)


DAMAGED_LINES = [
    b'{"step": 1, "rew\n',
    b"\n",
    b"[1, 2]\n",
    b"7\n",
    b"{}\n",
    b'{"step": "1"}\n',
    b'{"step": true}\n',
    b"\xff\0\n",
]


@pytest.mark.parametrize("name", LOGS)
@pytest.mark.parametrize("damage", DAMAGED_LINES)
def test_a_damaged_line_is_refused_and_everything_left_alone(logged, tmp_path, name, damage):
    log = copied(logged, tmp_path / "run")
    path = log.folder / f"{name}.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([lines[0], damage, *lines[2:]]))
    before = contents(log.folder)
    message = re.escape(f"{path} is damaged: line 2 of {len(lines)} is no JSON object with an integer step")
    with pytest.raises(ValueError, match=message):
        resume(log.folder)
    with log, pytest.raises(ValueError, match=message):
        log.rewind(3)
    assert contents(log.folder) == before
    assert log.rows(name) == [json.loads(lines[0])]  # reading alone is tolerant


@pytest.mark.parametrize("name", LOGS)
def test_a_torn_last_line_of_any_log_is_dropped(logged, tmp_path, name):
    whole, log = copied(logged, tmp_path / "whole"), copied(logged, tmp_path / "torn")
    path = log.folder / f"{name}.jsonl"
    with open(path, "ab") as file:
        file.write(path.read_bytes().splitlines()[-1][:9])
    rows = whole.rows(name)
    assert log.rows(name) == log.rows(name, strict=True) == rows
    resume(whole.folder), resume(log.folder)
    for kept in ("metrics", "samples", "calibration"):
        assert (log.folder / f"{kept}.jsonl").read_bytes() == (whole.folder / f"{kept}.jsonl").read_bytes()
    assert log.rows(name)[: len(rows)] == rows and [row["step"] for row in log.rows("timing")] == list(range(5))


def test_a_damaged_line_of_a_finished_run_is_refused(reference, tmp_path):
    log = copied(reference, tmp_path / "run")
    path = log.folder / "samples.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([lines[0], lines[1][:9] + b"\n", *lines[2:]]))
    before = contents(log.folder)
    with pytest.raises(ValueError, match="samples.jsonl is damaged: line 2"):
        resume(log.folder)
    assert contents(log.folder) == before


def test_a_missing_step_is_refused(reference, tmp_path):
    log = copied(reference, tmp_path / "run")
    path = log.folder / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([lines[0], *lines[2:]]))
    before = contents(log.folder)
    with pytest.raises(ValueError, match="step 1 of 0 to 6 cannot be read"):
        resume(log.folder)
    assert contents(log.folder) == before


def without(text, key):
    return json.dumps({k: v for k, v in json.loads(text).items() if k != key})


@pytest.mark.parametrize(
    ("damage", "found"),
    [
        (lambda text: text[: len(text) // 2], r"\(.*line \d+"),
        (lambda text: "", r"\(Expecting value"),
        (lambda text: "[" * 100_000, r"\(.*recursion"),
        (lambda text: "[]", r"\(it holds a list, not an object"),
        (lambda text: without(text, "steps"), r"\(it has no steps; it must be int"),
        (lambda text: text.replace('"seed": 0', '"seed": "0"'), r"\(seed is '0'; it must be int"),
    ],
)
def test_a_damaged_config_names_its_file_and_what_to_do(reference, tmp_path, damage, found):
    log = copied(reference, tmp_path / "run")
    path = log.folder / "config.json"
    path.write_text(damage(path.read_text()))
    message = rf"{re.escape(str(path))} is damaged {found}.*\); restore it, or start a new run in another folder"
    with pytest.raises(ValueError, match=message):
        resume(log.folder)
    with pytest.raises(ValueError, match=message):
        _ = log.is_finished


def test_a_damaged_environment_names_its_file_and_what_to_do(logged, tmp_path):
    log = copied(logged, tmp_path / "run")
    path = log.folder / "environment.json"
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(ValueError, match=rf"{re.escape(str(path))} is damaged \(.*\); restore it, or put {{}} in it"):
        resume(log.folder)
    path.write_text("{}")
    resume(log.folder)
    assert log.is_finished


def test_runs_goes_on_past_damaged_ones(reference, tmp_path, capsys):
    copied(reference, tmp_path / "whole")
    config, metrics = tmp_path / "a" / "config.json", tmp_path / "b" / "metrics.jsonl"
    for path in (config, metrics):
        copied(reference, path.parent)
    config.write_bytes(config.read_bytes()[:40])
    metrics.write_bytes(b"[1, 2]\n" + metrics.read_bytes())
    assert cli.main(["runs", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    rows = {line.split()[0]: line.split()[1:] for line in out.splitlines()[1:]}
    assert {run: row[0] for run, row in rows.items()} == {
        str(config.parent): "damaged",
        str(metrics.parent): "damaged",
        str(tmp_path / "whole"): "fp8-e2e",
    }
    assert f"fp8lab: {config} is damaged (" in err and f"fp8lab: {metrics} is damaged: line 1 of 8" in err
    assert cli.main(["runs", str(tmp_path), "--json"]) == 0
    first, second, whole = json.loads(capsys.readouterr().out)
    assert first["run"] == str(config.parent) and first["damaged"].startswith(f"{config} is damaged")
    assert second["damaged"].startswith(f"{metrics} is damaged") and whole["step"] == 6 and "damaged" not in whole


needs_dev_full = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full, which only Linux has")


@needs_dev_full
@pytest.mark.parametrize("name", ["metrics", "samples", "timing"])
def test_a_full_disk_under_a_log_is_said_and_the_run_resumes(reference, tmp_path, name):
    """The log is a link to /dev/full, on which every write fails with the real ENOSPC."""
    log = RunLog(tmp_path / "run")
    log.folder.mkdir()
    (log.folder / f"{name}.jsonl").symlink_to("/dev/full")
    with pytest.raises(OSError, match=f"cannot write .*{name}.jsonl: No space left on device; make room .* resume"):
        run(small(), log.folder)
    (log.folder / f"{name}.jsonl").unlink()
    resume(log.folder)
    assert (log.folder / "metrics.jsonl").read_bytes() == (reference.folder / "metrics.jsonl").read_bytes()


@pytest.mark.skipif(sys.platform == "win32", reason="needs RLIMIT_FSIZE, which Windows does not have")
def test_a_checkpoint_that_does_not_fit_is_said_and_the_run_resumes(reference, tmp_path):
    """Files may not grow beyond 200 KB, as if the disk were full there: save_file stops in the middle."""
    import resource

    log = copied(reference, tmp_path / "run")
    shutil.rmtree(log.checkpoint_folder(6))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))
    try:
        with pytest.raises(OSError, match="cannot write the checkpoint .*step-000006.*before it are untouched"):
            resume(log.folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert log.latest_checkpoint()[0] == 4 and not list(log.folder.glob("checkpoints/.*"))
    resume(log.folder)
    assert (log.folder / "metrics.jsonl").read_bytes() == (reference.folder / "metrics.jsonl").read_bytes()
    assert log.latest_checkpoint()[0] == 6


@contextmanager
def bound_by_permissions():
    """Permissions do not bind root, who is `nobody` meanwhile."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_read_only_folder_is_said(reference, tmp_path, monkeypatch):
    log = copied(reference, tmp_path / "run")
    before = contents(log.folder)
    for path in (log.folder, *log.folder.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    tmp_path.chmod(0o755)
    monkeypatch.chdir(tmp_path)  # by a relative path: pytest's own folders above it are closed to others
    message = "cannot write the run directory run: Permission denied; choose another --out"
    with bound_by_permissions(), pytest.raises(OSError, match=message):
        resume("run")
    assert contents(log.folder) == before


def test_a_folder_where_none_may_be_made_is_said(tmp_path, monkeypatch):
    tmp_path.chmod(0o555)
    monkeypatch.chdir(tmp_path)
    message = "cannot write the run directory new: Permission denied; choose another --out"
    with bound_by_permissions(), pytest.raises(OSError, match=message), RunLog("new"):
        pass
    tmp_path.chmod(0o755)
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A run of 5 steps that stopped after 4, and left checkpoints 3 and 4."""
    seen = []
    out = tmp_path_factory.mktemp("stopped") / "run"
    config = small(steps=5, checkpoint_every=1)
    return run(config, out, on_step=seen.append, should_stop=lambda: len(seen) > 4)


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors", "trainer.json"])
@pytest.mark.parametrize("damage", ["truncated", "garbage", "missing"])
def test_a_corrupted_checkpoint_is_said_and_nothing_is_cut(stopped, tmp_path, file, damage):
    log = copied(stopped, tmp_path / "run")
    path = log.checkpoint_folder(4) / file
    data = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(data[: len(data) // 2] if damage == "truncated" else b"\xff" * len(data))
    before = {path: path.read_bytes() for path in log.folder.rglob("*") if path.is_file()}
    message = f"step-000004 is no trainer checkpoint: {file} missing" if damage == "missing" else "delete it to go on"
    with pytest.raises((ValueError, OSError), match=message):
        resume(log.folder)
    assert {path: path.read_bytes() for path in before} == before


def test_the_checkpoint_before_a_corrupted_one_serves(stopped, tmp_path):
    broken, whole = copied(stopped, tmp_path / "broken"), copied(stopped, tmp_path / "whole")
    resume(whole.folder)
    shutil.rmtree(broken.checkpoint_folder(4))
    resume(broken.folder)
    assert (broken.folder / "metrics.jsonl").read_bytes() == (whole.folder / "metrics.jsonl").read_bytes()
    assert broken.rows()[-1]["step"] == 5


def test_a_moe_run_resumes_to_the_same_bytes(tmp_path):
    """Fused experts are stored one by one."""
    config = small(model="tiny-qwen3-moe", steps=3, checkpoint_every=1, prompts_per_step=4)
    whole = run(config, tmp_path / "whole")
    cut = copied(whole, tmp_path / "cut")
    shutil.rmtree(cut.checkpoint_folder(3))
    resume(cut.folder)
    assert (cut.folder / "metrics.jsonl").read_bytes() == (whole.folder / "metrics.jsonl").read_bytes()


def test_a_second_writer_is_refused_while_a_run_goes_on(tmp_path):
    """From another process, and with nothing written by it."""
    folder = tmp_path / "run"
    code = f"from fp8lab.runlog import RunLog\nwith RunLog({str(folder)!r}) as log: log.append('metrics', {{}})"
    with RunLog(folder):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "is being written by another process; wait for it" in done.stderr
    assert not (folder / "metrics.jsonl").exists()
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0  # the lock ended with its owner


def test_resuming_with_other_threads_warns(tmp_path):
    log = run(small(steps=1), tmp_path / "run")
    path = log.folder / "environment.json"
    environment = json.loads(path.read_text())
    path.write_text(json.dumps(environment | {"torch_threads": environment["torch_threads"] + 1}))
    with pytest.warns(UserWarning, match="torch_threads"):
        resume(log.folder)


def test_run_directories_are_protected(reference, tmp_path):
    with pytest.raises(FileExistsError, match="already holds a run"):
        run(small(), reference.folder)
    with pytest.raises(FileNotFoundError, match="no run directory"):
        resume(tmp_path)
    with RunLog(tmp_path / "busy"), pytest.raises(RuntimeError, match="another process"), RunLog(tmp_path / "busy"):
        pass
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="cannot write the run directory"), RunLog(tmp_path / "file"):
        pass


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "steps is 0"),
        ({"temperature": 0.0}, "temperature"),
        ({"plan": PrecisionPlan.preset("fp8-rollout"), "grpo": GRPOConfig(importance_sampling="none")}, "ablation"),
    ],
)
def test_bad_configs(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SMALL, **changes)


def test_fp8_rollout_without_correction_warns_when_asked_for():
    with pytest.warns(UserWarning, match="biased"):
        small("fp8-rollout", grpo=GRPOConfig(importance_sampling="none"), allow_uncorrected_fp8_rollout=True)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"stepz": 3}, "stepz"),
        ({"grpo": {"lr": 1}}, "lr"),
        ({"plan": "fp9"}, "fp9.*allowed: bf16, fp8-rollout, fp8-e2e"),
        ({"plan": {"rollout": {"linear": {"wight": "e4m3"}}}}, "wight"),
    ],
)
def test_unknown_keys_are_named(data, message):
    with pytest.raises(ValueError, match=message):
        ExperimentConfig.from_dict(data)


def test_recipes_load_and_differ_in_the_plan_alone():
    assert {"bf16", "fp8-rollout", "fp8-e2e"} <= set(recipe_names())
    base = load_recipe("bf16")
    for name in ("fp8-rollout", "fp8-e2e"):
        config = load_recipe(name)
        assert config.plan == PrecisionPlan.preset(name) and config.name == name
        assert dataclasses.replace(config, name="bf16", plan=base.plan) == base
    assert recipe_data("fp8-e2e")["sources"]
    with pytest.raises(ValueError, match="no recipe 'nope'; allowed: .*fp8-e2e"):
        load_recipe("nope")


def test_an_unknown_recipe_key_is_named(tmp_path):
    (tmp_path / "a.yaml").write_text("experimint: {}\n")
    with pytest.raises(ValueError, match="experimint"):
        load_recipe(tmp_path / "a.yaml")
    (tmp_path / "b.yaml").write_text("- 1\n")
    with pytest.raises(ValueError, match="a list"):
        load_recipe(tmp_path / "b.yaml")
