"""Bad configs, one by one: wrong types, unknown keys, impossible values, contradictions. Each gives its own ValueError,
which names the field, what was found and what is allowed; none passes silently. (What only breaks on some engine, GPU
or model is in test_preflight.py.)"""

import pytest
import yaml

from fp8lab.checks import require_choice, require_types
from fp8lab.cli import main
from fp8lab.experiment import ExperimentConfig
from fp8lab.grpo import GRPOConfig
from fp8lab.precision import AttentionPrecision, Fallback, LinearPrecision, PrecisionPlan, SidePlan
from fp8lab.recipes import load_recipe, recipe_data

E2E = PrecisionPlan.preset("fp8-e2e")
PLANS = [  # data for PrecisionPlan.from_dict, words of the error
    (None, "plan is None; it must be a mapping"),
    ("fp8-e2e", "plan is 'fp8-e2e'; it must be a mapping"),
    ({"rolout": {}}, r"unknown keys \['rolout'\] for PrecisionPlan"),
    ({1: {}}, r"unknown keys \['1'\] for PrecisionPlan"),
    ({"name": 3}, "name is 3, of type int; it must be str"),
    ({"rollout": "fp8"}, "rollout is 'fp8'; it must be a mapping with keys among .*linear"),
    ({"rollout": None}, "rollout is None; it must be a mapping"),
    ({"rollout": {"linear": ["e4m3"]}}, r"rollout.linear is \['e4m3'\]; it must be a mapping"),
    ({"trainer": {"liner": {}}}, r"unknown keys \['liner'\] for SidePlan \(trainer\)"),
    ({"trainer": {"linear": {"wieght": "e4m3"}}}, r"\['wieght'\] for LinearPrecision \(trainer.linear\)"),
    ({"trainer": {"linear": {"weight": "fp8"}}}, "weight is 'fp8'; allowed: e4m3, e5m2, bf16"),
    ({"trainer": {"linear": {"weight": ["e4m3"]}}}, r"weight is \('e4m3',\); allowed"),
    ({"trainer": {"linear": {"weight": True}}}, "weight is True; allowed"),
    ({"trainer": {"linear": {"rule": "ceil"}}}, "rule is 'ceil'; allowed: default, pow2"),
    ({"trainer": {"linear": {"weight_block": [128]}}}, r"\(128,\)"),
    ({"trainer": {"linear": {"weight_block": [128, 0]}}}, r"\(128, 0\)"),
    ({"trainer": {"linear": {"weight_block": "128x128"}}}, "128x128"),
    ({"trainer": {"linear": {"weight_block": {"rows": 128}}}}, "rows"),
    ({"trainer": {"linear": {"group": 128.0}}}, "128.0"),
    ({"trainer": {"linear": {"output": "fp16"}}}, "output is 'fp16'; allowed: bf16, float32"),
    ({"rollout": {"attention": {"kv_cache": "fp8"}}}, "kv_cache is 'fp8'; allowed: e4m3, bf16"),
    ({"rollout": {"attention": {"query": "e4m3"}}}, "FP8 attention needs kv_cache='e4m3'"),
    ({"rollout": {"attention": {"margin": 0.5}}}, "margin is 0.5"),
    ({"rollout": {"attention": {"margin": float("nan")}}}, "margin is nan"),
    ({"rollout": {"attention": {"scales": None}}}, "scales is None; allowed: per-layer, per-token-head"),
    ({"rollout": {"fallback": {"first": -1}}}, "first is -1"),
    ({"rollout": {"fallback": {"last": True}}}, "last is True"),
    ({"rollout": {"fallback": {"layers": 3}}}, "layers is 3; give a list"),
    ({"rollout": {"fallback": {"layers": "0-3"}}}, "layers is '0-3'; give a list"),
    ({"rollout": {"fallback": {"layers": [1.0]}}}, r"layers is \(1.0,\)"),
    ({"rollout": {"fallback": {"modules": "mlp.gate"}}}, "modules is 'mlp.gate'; give a list"),
    ({"rollout": {"fallback": {"modules": [5]}}}, "module pattern is 5; it must be text"),
    ({"rollout": {"fallback": {"modules": [""]}}}, "module pattern is ''"),
    ({"rollout": {"fallback": {"modules": ["re:("]}}}, r"'re:\(' is no regular expression"),
]
EXPERIMENTS = [  # data for ExperimentConfig.from_dict, words of the error
    (None, "ExperimentConfig is None; give a mapping"),
    ([], r"ExperimentConfig is \[\]; give a mapping"),
    ({"stepz": 3}, r"unknown keys \['stepz'\] for ExperimentConfig"),
    ({"grpo": None}, "GRPOConfig is None; give a mapping"),
    ({"grpo": {"lr": 1}}, r"unknown keys \['lr'\] for GRPOConfig"),
    ({"plan": "fp8"}, "precision plan is 'fp8'; allowed: bf16, fp8-rollout"),
    ({"plan": 8}, "plan is 8; it must be a mapping"),
    ({"plan": {"linear": {}}}, r"unknown keys \['linear'\] for PrecisionPlan"),
    ({"name": None}, "name is None, of type NoneType; it must be str"),
    ({"model": 8}, "model is 8, of type int; it must be str"),
    ({"steps": 0}, "steps is 0; it must be an integer >= 1"),
    ({"steps": "100"}, "steps is '100', of type str; it must be int"),
    ({"steps": 1e2}, "steps is 100.0, of type float; it must be int"),
    ({"steps": True}, "steps is True, of type bool; it must be int"),
    ({"seed": "0"}, "seed is '0', of type str"),
    ({"temperature": 0}, "temperature is 0"),
    ({"temperature": float("nan")}, "temperature is NaN"),
    ({"temperature": float("inf")}, "temperature is inf"),
    ({"rollout_kernels": "fast"}, "rollout_kernels is 'fast'; allowed: default, other"),
    ({"allow_uncorrected_fp8_rollout": "no"}, "allow_uncorrected_fp8_rollout is 'no', of type str; it must be bool"),
    ({"plan": "fp8-rollout", "grpo": {"importance_sampling": "none"}}, "FP8 rollout with importance_sampling='none'"),
    (
        {"plan": "fp8-rollout-kv", "grpo": {"importance_sampling": "none"}},
        "FP8 rollout with importance_sampling='none'",
    ),
    ({"grpo": {"learning_rate": "1e-4"}}, "learning_rate is '1e-4', of type str; it must be float"),
    ({"grpo": {"learning_rate": 0}}, "learning_rate is 0; it must be > 0"),
    ({"grpo": {"learning_rate": float("nan")}}, "learning_rate is NaN"),
    ({"grpo": {"num_generations": 8.0}}, "num_generations is 8.0, of type float"),
    ({"grpo": {"warmup_steps": -1}}, "warmup_steps is -1; it must be >= 0"),
    ({"grpo": {"beta": -0.1}}, "beta is -0.1; it must be >= 0"),
    ({"grpo": {"weight_decay": -1}}, "weight_decay is -1; it must be >= 0"),
    ({"grpo": {"leave_one_out": "yes"}}, "leave_one_out is 'yes', of type str; it must be bool"),
    ({"grpo": {"epsilon": 1.5}}, "epsilon is 1.5"),
    ({"grpo": {"epsilon_high": -1}}, "epsilon_high -1"),
    ({"grpo": {"delta": 1.0}}, "dual clip must lie above"),
    ({"grpo": {"loss_type": "ppo"}}, "loss_type is 'ppo'; allowed: dapo"),
    ({"grpo": {"importance_sampling": "TIS"}}, "importance_sampling is 'TIS'; allowed"),
    ({"grpo": {"importance_sampling": None}}, "importance_sampling is None, of type NoneType"),
    ({"grpo": {"importance_sampling": "icepop"}}, "icepop"),
    (
        {"grpo": {"importance_sampling": "tis", "importance_sampling_min": 3.0}},
        "3.0",
    ),
]
RECIPES = [  # a recipe file's text, words of the error
    ("about: [", "is no YAML"),
    ("- about", "holds a list; a recipe is a mapping"),
    ("", "holds a NoneType; a recipe is a mapping"),
    ("about: x\nexperimant: {}", r"unknown keys \['experimant'\]"),
    ("experiment: {}", "about None; it must be a sentence"),
    ("about: x\nextends: nope", "no recipe 'nope'; allowed: bf16"),
    ("about: x\nexperiment: 5", "experiment 5; it must be a mapping"),
    ("about: x\nexperiment: {grpo: 5}", "grpo 5; it must be a mapping"),
    ("about: x\nexperiment: {grpo: {learning_rate: 1e-4}}", "learning_rate is '1e-4', of type str"),
    ("about: x\nexperiment: {plan: {preset: fp8, rollout: {}}}", "precision plan is 'fp8'"),
    ("about: x\nexperiment: {plan: {preset: [fp8-e2e]}}", r"precision plan is \['fp8-e2e'\]"),
    ("about: x\nexperiment: {plan: {preset: fp8-e2e, rollout: 5}}", "rollout is 5; it must be a mapping"),
]
SETTINGS = [  # arguments of plan.check, words of the error
    ({"hardwear": "H100"}, r"unknown settings \['hardwear'\]; allowed: rollout"),
    ({"hardware": "H1000"}, "hardware is 'H1000'; allowed: None, A100"),
    ({"hardware": 100}, "hardware is 100, of type int; it must be str or None"),
    ({"rollout": "sglang"}, "rollout is 'sglang'; allowed: native, vllm"),
    ({"trainer": "fsdp"}, "trainer is 'fsdp'; allowed: native, transformer_engine, megatron, dtensor"),
    ({"gpus": 0}, "gpus is 0; it must be an integer >= 1"),
    ({"gpus": "8"}, "gpus is '8', of type str"),
    ({"tensor_parallel": 2.0}, "tensor_parallel is 2.0, of type float"),
    ({"pipeline_parallel": True}, "pipeline_parallel is True, of type bool"),
    ({"sequence_parallel": 1}, "sequence_parallel is 1, of type int; it must be bool"),
    ({"max_length": -5}, "max_length is -5; it must be an integer >= 1"),
    ({"grpo": {"beta": 0}}, "grpo is .*, of type dict; it must be GRPOConfig or None"),
    ({"environment": {"VLLM_USE_DEEP_GEMM": 1}}, "environment has VLLM_USE_DEEP_GEMM=1; .*text"),
    ({"environment": ["A=1"]}, "environment is .*, of type list; it must be Mapping"),
]


@pytest.mark.parametrize("data, words", PLANS)
def test_plan(data, words):
    with pytest.raises(ValueError, match=words):
        PrecisionPlan.from_dict(data)


@pytest.mark.parametrize("data, words", EXPERIMENTS)
def test_experiment(data, words):
    with pytest.raises(ValueError, match=words):
        ExperimentConfig.from_dict(data)


@pytest.mark.parametrize("text, words", RECIPES)
def test_recipe(text, words, tmp_path, capsys):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=words):
        load_recipe(path)
    for command in ("check", "run"):  # one line, no traceback
        assert main([command, str(path)]) == 1
        error = capsys.readouterr().err
        assert error.startswith("fp8lab: ") and "Traceback" not in error


@pytest.mark.parametrize("setting, words", SETTINGS)
def test_setting(setting, words):
    with pytest.raises(ValueError, match=words):
        E2E.check(**setting)


def test_a_recipe_cannot_extend_itself(tmp_path):
    one, two = tmp_path / "one.yaml", tmp_path / "two.yaml"
    one.write_text(yaml.safe_dump({"about": "1", "extends": str(two)}))
    two.write_text(yaml.safe_dump({"about": "2", "extends": str(one)}))
    with pytest.raises(ValueError, match="a recipe cannot extend itself"):
        recipe_data(one)


@pytest.mark.parametrize(
    "build, words",
    [
        (lambda: SidePlan(linear="e4m3"), "linear is 'e4m3', of type str; it must be LinearPrecision"),
        (lambda: SidePlan(fallback=None), "fallback is None"),
        (lambda: PrecisionPlan(rollout=LinearPrecision()), "rollout is .*; it must be SidePlan"),
        (lambda: PrecisionPlan.preset(None), "precision plan is None; allowed"),
        (lambda: PrecisionPlan.preset("fp8-e2e", rule="round"), "rule is 'round'; allowed"),
        (lambda: E2E.with_bf16(layers=2), "layers is 2; give a list"),
        (lambda: E2E.with_bf16(modules=None), "modules is None; give a list"),
        (lambda: E2E.with_bf16(side="left"), "side is 'left'; allowed"),
        (lambda: Fallback(modules=["re:["]), "no regular expression"),
        (lambda: AttentionPrecision(margin="1.05"), "margin is '1.05'"),
        (lambda: GRPOConfig(beta=None), "beta is None, of type NoneType; it must be float"),
        (lambda: ExperimentConfig(plan="fp8-e2e"), "plan is 'fp8-e2e', of type str; it must be PrecisionPlan"),
        (lambda: PrecisionPlan.from_yaml("[1, 2"), "is no YAML"),
        (lambda: PrecisionPlan.from_yaml("fp8-e2e"), "plan is 'fp8-e2e'; it must be a mapping"),
    ],
)
def test_constructors(build, words):
    with pytest.raises(ValueError, match=words):
        build()


def test_good_neighbours_pass():
    """The checks refuse what is wrong, not what is only unusual."""
    require_choice("x", None, (None, "a"))
    for good in (
        {"temperature": 1},
        {"grpo": {"epsilon_high": None, "delta": 3, "beta": 0}},
        {"plan": {"rollout": {"fallback": {"layers": [], "modules": ["re:.*"]}}}},
        {"plan": {"trainer": {"linear": {"weight_block": [1, -1], "group": -1}}}},
    ):
        require_types(ExperimentConfig.from_dict(good))
    with pytest.raises(ValueError, match="x is 1; allowed: True"):
        require_choice("x", 1, (True,))
