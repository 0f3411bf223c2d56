"""Starting vLLM: what is said where it is missing, of another version, or not alone in its process."""

import importlib.util
import json

import pytest

from fp8lab.models import load_model, named_weights
from fp8lab.rollout import SamplingParams, VLLMEngine, vllm, vllm_process


@pytest.fixture
def no_vllm(monkeypatch):
    """This environment without vLLM, also where it is installed."""
    find = importlib.util.find_spec
    monkeypatch.setattr(vllm_process.importlib.util, "find_spec", lambda name: None if name == "vllm" else find(name))


def test_without_vllm_the_error_says_what_to_run(no_vllm):
    with pytest.raises(ModuleNotFoundError, match="make vllm.*engine 'native'"):
        VLLMEngine("tiny-llama", None)


def test_dropped_weights_must_come_back_before_anything_reads_them(monkeypatch):
    """sleep(2) with a stand-in for vLLM's LLM: waking brings no weights back, setting scales neither, a refit does."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as start_vllm leaves it
    engine, calls = object.__new__(VLLMEngine), []
    names = ("sleep", "wake_up", "collective_rpc", "reset_prefix_cache")
    engine.llm = type("LLM", (), {n: lambda self, *a, n=n, **k: calls.append(n) or True for n in names})()
    engine._skeleton, engine._whole, engine.plan, engine.device = vllm.skeleton("tiny-llama"), True, None, "cpu"
    engine.refits = 0
    with pytest.raises(ValueError, match=r"sleep level is 3; allowed: 1 .*, 2"):
        engine.sleep(3)
    engine.sleep()
    engine.wake()
    assert engine.calibrate(None) == {}
    engine.sleep(2)
    engine.wake()
    engine._push({})
    for call in (
        lambda: engine.generate(["1+1="], SamplingParams(), seed=0),
        lambda: engine.calibrate(None),
        lambda: engine.check_same_bytes(engine),
    ):
        with pytest.raises(RuntimeError, match=r"not whole: .* sleep\(2\) dropped them; refit"):
            call()
    engine.refit(named_weights(load_model("tiny-llama")))
    assert engine.calibrate(None) == {} and calls.count("sleep") == 2


def test_an_experiment_with_the_vllm_engine_says_so_too(no_vllm):
    from fp8lab.experiment import ExperimentConfig, Loop

    config = ExperimentConfig(engine="vllm", steps=1)
    assert ExperimentConfig.from_dict(config.to_dict()) == config
    with pytest.raises(ModuleNotFoundError, match="make vllm"):
        Loop(config)
    with pytest.raises(ValueError, match="native, vllm"):
        ExperimentConfig(engine="sglang")


def test_settings_of_vllm_travel_in_the_config(monkeypatch):
    """To the engine, under vLLM's own names; without vLLM as the engine they would be lost."""
    from fp8lab import experiment

    settings = {"tensor_parallel_size": 2, "data_parallel_size": 2}
    config = experiment.ExperimentConfig(engine="vllm", vllm=settings, steps=1)
    assert experiment.ExperimentConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    given = {}
    monkeypatch.setattr(experiment, "VLLMEngine", lambda model, plan, **more: given.update(more))
    experiment.Loop(config)
    assert {name: given[name] for name in settings} == settings
    with pytest.raises(ValueError, match="engine is 'native'"):
        experiment.ExperimentConfig(vllm=settings)
    with pytest.raises(ValueError, match="it must be dict"):
        experiment.ExperimentConfig(engine="vllm", vllm="tensor_parallel_size=2")


@pytest.mark.parametrize("version", ["0.31.2", "0.34.0", "1.0.0"])
def test_another_version_is_refused_by_name(version):
    with pytest.raises(RuntimeError, match=rf"vLLM {version} found.*0\.32 \(run on a CPU\)"):
        vllm_process.require_tested(version)


def test_known_versions_pass():
    for version in ("0.32.0", "0.32.1+cpu", "0.33.0"):
        vllm_process.require_tested(version)


def test_settings_of_the_user_are_not_overwritten(monkeypatch):
    monkeypatch.setattr(vllm_process.importlib.util, "find_spec", lambda name: object())
    environment = {"OMP_NUM_THREADS": "3", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    monkeypatch.setattr(vllm_process.os, "environ", environment)
    with pytest.raises(RuntimeError, match="must be 0"):
        vllm_process.start_vllm()
    assert environment == {**vllm_process.ENVIRONMENT, "OMP_NUM_THREADS": "3", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
