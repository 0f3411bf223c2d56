"""Recipes: published numbers against NeMo RL's files, plans with changes, what is carried, and errors."""

import json
import math
import re

import pytest
import yaml

from fp8lab.cli import main
from fp8lab.experiment import ExperimentConfig
from fp8lab.precision import PRESETS, PrecisionPlan
from fp8lab.recipes import experiment_of, load_recipe, overlaid, plan_spec, recipe_data, recipe_names, runs_here

TINY = [name for name in recipe_names() if runs_here(recipe_data(name)) == "runs here"]
PUBLISHED = [name for name in recipe_names() if name not in TINY]
# Typed from the files and test scripts named in each recipe's sources (NeMo RL 7ea279abf): GPUs, prompts, generations,
# longest sequence, learning rate, weight decay, warm-up, steps, KL, correction, steps of the test and its first check.
TMPE, KL = 'median(data["train/token_mult_prob_error"]) < ', 'mean(data["train/gen_kl_error"]) < '
ROWS = {
    "llama3.1-8b-fp8-rollout": (8, 32, 32, 4096, 5e-7, 0.0, 2, 500, 0.01, "is", 100, TMPE + "1.1"),
    "llama3.1-8b-fp8-e2e": (16, 64, 32, 4096, 5e-7, 0.0, 2, 500, 0.01, "is", 100, TMPE + "1.1"),
    "moonlight-16b-a3b-fp8-e2e": (32, 32, 16, 8192, 1e-6, 0.01, 50, 1000000, 0.04, "is", 30, TMPE + "1.1"),
    "qwen3-8b-base-fp8-kv": (8, 32, 16, 8192, 1e-6, 0.1, 10, 1000000, 0.01, "is", 60, TMPE + "2.0"),
    "qwen3.5-9b-fp8-e2e": (8, 32, 16, 4096, 5e-6, 0.01, 13, 1000000, 0.01, "tis", 20, KL + "0.003"),
    "qwen3.5-35b-a3b-fp8-e2e": (16, 32, 16, 4096, 5e-6, 0.01, 13, 1000000, 0.01, "tis", 20, KL + "0.004"),
    "llama3.1-8b-fp8-async": (16, 64, 32, 4096, 5e-7, 0.0, 2, 500, 0.01, "is", 10, TMPE + "1.1"),
    "deepseek-v3-fp8-async": (512, 32, 16, 1536, 5e-7, 0.0, 2, 500, 0.01, "is", 10, TMPE + "1.1"),
    "qwen3-30b-a3b-mxfp8-rollout": (16, 64, 32, 4096, 3e-7, 0.01, 50, 1000000, 0.01, "is", 10, TMPE + "1.1"),
    "grpo-math-8b-fp8-e2e": (8, 64, 32, 4096, 3e-7, 0.01, 13, 1000000, 0.01, "is", None, None),
    "grpo-math-70b-fp8-e2e": (64, 64, 32, 4096, 3e-7, 0.01, 13, 1000000, 0.01, "is", None, None),
}
KEPT = {
    "moonlight-16b-a3b-fp8-e2e": ("*a_proj*", "*b_proj*"),
    "deepseek-v3-fp8-async": ("*a_proj*", "*b_proj*"),
    "qwen3-235b-a22b-mxfp8-rollout": ("*q_proj*", "*k_proj*", "*v_proj*", "*o_proj*"),
    "llama3.1-8b-fp8-e2e": (),
}


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_is_a_valid_experiment(name):
    data = recipe_data(name)
    config = load_recipe(name)
    assert config.name == name and data["about"].endswith(".") and len(data["about"]) < 160
    assert data["sources"] and ExperimentConfig.from_dict(config.to_dict()) == config
    assert config.plan.rollout.linear.is_fp8 == (config.plan.name != "bf16")


def test_every_plan_preset_has_a_tiny_recipe():
    assert {load_recipe(name).plan.name for name in TINY} == set(PRESETS)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_recipes_say_where_they_are_from_and_what_they_need(name):
    data, carried = recipe_data(name), recipe_data(name)["carried"]
    assert any(re.search(r"NVIDIA-NeMo/RL@7ea279abf: examples/configs/\S+\.yaml\s\(Apache", s) for s in data["sources"])
    assert "/" in data["experiment"]["model"] and " " not in data["experiment"]["model"]
    nodes, per_node = (carried["nemo_rl"]["cluster"].get(key, 1) for key in ("num_nodes", "gpus_per_node"))
    assert carried["hardware"] == {"gpu": "H100" if per_node == 8 else "GB200", "gpus": nodes * per_node}
    megatron = carried["nemo_rl"]["policy"]["megatron_cfg"]
    split = [megatron.get(f"{kind}_parallel_size", 1) for kind in ("tensor_model", "pipeline_model", "context")]
    assert carried["hardware"]["gpus"] % math.prod(split) == 0
    assert runs_here(data) == f"needs the hub and {nodes * per_node} x {carried['hardware']['gpu']}"


@pytest.mark.parametrize("name", ROWS)
def test_published_numbers(name):
    config, data = load_recipe(name), recipe_data(name)
    grpo, carried = config.grpo, data["carried"]
    checks = carried.get("checks", {"steps": None, "conditions": [None]})
    assert ROWS[name] == (
        carried["hardware"]["gpus"],
        config.prompts_per_step,
        grpo.num_generations,
        carried["nemo_rl"]["policy"]["max_total_sequence_length"],
        grpo.learning_rate,
        grpo.weight_decay,
        grpo.warmup_steps,
        config.steps,
        grpo.beta,
        grpo.importance_sampling,
        checks["steps"],
        checks["conditions"][0],
    )
    assert grpo.leave_one_out and grpo.adam_beta2 == 0.999 and config.seed == 42
    assert grpo.force_on_policy_ratio == (name in ("llama3.1-8b-fp8-async", "deepseek-v3-fp8-async"))


@pytest.mark.parametrize("name, modules", KEPT.items())
def test_published_fallbacks_are_on_the_rollout_side_only(name, modules):
    plan = load_recipe(name).plan
    assert plan.rollout.fallback.modules == modules and plan.trainer.fallback.modules == ()


def test_published_corrections_and_kv_scales():
    config = load_recipe("qwen3.5-9b-fp8-e2e").grpo
    assert (config.importance_sampling_min, config.importance_sampling_max) == (0, 2)
    attention = load_recipe("qwen3-8b-base-fp8-kv").plan.rollout.attention
    assert attention.is_fp8 and (attention.calibration, attention.margin) == ("nemo_rl", 1.05)


def test_a_variant_carries_what_it_adds_over_its_base():
    base, variant = (recipe_data(f"llama3.1-8b-fp8-e2e{end}") for end in ("", "-tq-mooncake"))
    assert variant["carried"]["nemo_rl"].pop("data_plane") == {"enabled": True, "backend": "mooncake_cpu"}
    assert variant["carried"] == base["carried"] and variant["experiment"] == base["experiment"]


# ---- plans in recipes -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PRESETS)
def test_a_plan_is_written_as_the_nearest_preset(name):
    plan = PrecisionPlan.preset(name)
    assert plan_spec(plan) == name
    changed = plan.with_bf16(last=2, modules=["mlp.down_proj"], side="rollout")
    spec = plan_spec(changed)
    assert spec["preset"] == name and set(spec) == {"preset", "rollout"}
    assert experiment_of({"experiment": {"plan": spec, "grpo": {"importance_sampling": "is"}}}).plan == changed


def test_a_plan_of_its_own_keeps_its_name():
    import dataclasses

    plan = dataclasses.replace(PrecisionPlan.preset("fp8-e2e").with_bf16(first=1), name="mine")
    spec = plan_spec(plan)
    assert spec["name"] == "mine" and experiment_of({"experiment": {"plan": spec}}).plan == plan


@pytest.mark.parametrize(
    "plan, words",
    [
        ("fp9", "allowed: bf16"),
        ({"preset": "fp9"}, "allowed: bf16"),
        ({"preset": "fp8-e2e", "rolout": {}}, "unknown keys .*rolout"),
        ({"preset": "fp8-e2e", "rollout": {"linear": {"rule": "pow3"}}}, "rule is 'pow3'"),
    ],
)
def test_bad_plans_are_named(plan, words):
    with pytest.raises(ValueError, match=words):
        experiment_of({"experiment": {"plan": plan}})


def test_a_file_of_yours(tmp_path):
    path = tmp_path / "mine.yaml"
    own = {"about": "Mine.", "extends": "fp8-e2e", "carried": {"note": 1}, "experiment": {"steps": 3}}
    path.write_text(yaml.safe_dump(own))
    config, data = load_recipe(path), recipe_data(path)
    assert (config.name, config.steps, config.plan.name) == ("mine", 3, "fp8-e2e") and data["carried"] == {"note": 1}
    for text, words in (
        ("- 1", "holds a list"),
        ("abot: x", "unknown keys"),
        ("about: x\nextends: nope", "no recipe 'nope'"),
        ("about: x\ncarried: 3", "carried 3; it must be a mapping"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=words):
            load_recipe(path)


def test_overlaid_changes_nothing_in_place():
    base, changes = {"a": {"b": 1, "c": [1]}, "d": {"e": 2}}, {"a": {"b": 2}, "d": 3}
    assert overlaid(base, changes) == {"a": {"b": 2, "c": [1]}, "d": 3}
    assert base == {"a": {"b": 1, "c": [1]}, "d": {"e": 2}} and changes == {"a": {"b": 2}, "d": 3}


# ---- the command line -------------------------------------------------------------------------------


def test_the_list_says_what_runs_here(capsys):
    assert main(["recipes", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert list(rows) == recipe_names() and rows["fp8-e2e"]["runs"] == "runs here"
    assert rows["deepseek-v3-fp8-async"]["runs"] == "needs the hub and 512 x H100"
    assert main(["recipes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + len(rows) and lines[0].split() == ["name", "runs", "about"]
    assert [line.split()[0] for line in lines[1 : 1 + len(TINY)]] == TINY  # what runs here comes first


def test_show_says_what_is_carried_and_not_run(capsys):
    assert main(["recipe", "show", "qwen3-8b-base-fp8-kv"]) == 0
    text = capsys.readouterr().out
    before, after = text.split("\ncarried, not run:\n")
    assert "calibration: nemo_rl" in before and "dataset_name: DAPOMath17K" in after
    assert main(["recipe", "show", "fp8-pow2"]) == 0
    assert "not run" not in capsys.readouterr().out
