"""Recipes to NeMo RL and back against NeMo RL's own files, and to verl and TRL; nothing is lost without a note.

`nemo_rl_configs.yaml` holds what NeMo RL's files say, collected without fp8lab's code.
"""

import dataclasses
import json
from pathlib import Path

import pytest
import yaml

from fp8lab.cli import main
from fp8lab.experiment import ExperimentConfig
from fp8lab.grpo import GRPOConfig
from fp8lab.interop import export, from_nemo_rl, to_nemo_rl, to_trl, to_verl
from fp8lab.precision import AttentionPrecision, LinearPrecision, PrecisionPlan, SidePlan
from fp8lab.recipes import experiment_of, load_recipe, recipe_names
from fp8lab.translator import NoEquivalent

FILE = yaml.safe_load((Path(__file__).parent / "nemo_rl_configs.yaml").read_text())
BASE, FILES = FILE["base"], FILE["recipes"]
BLOCKWISE = "policy.megatron_cfg.env_vars.NVTE_FP8_BLOCK_SCALING_FP32_SCALES"
VLLM = "policy.generation.vllm_cfg."


def flat(tree, prefix=""):
    """Leaf paths, without fp8lab."""
    out = {}
    for key, value in tree.items():
        out.update(flat(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {f"{prefix}{key}": value})
    return out


def tree(values):
    out = {}
    for path, value in values.items():
        place = out
        *parents, last = path.split(".")
        for part in parents:
            place = place.setdefault(part, {})
        place[last] = value
    return out


def meaning(values):
    """Values over the base, with ${references} followed as OmegaConf does (${mul:...} stays)."""
    merged = {**BASE, **values}

    def follow(value):
        while isinstance(value, str) and value.startswith("${") and ":" not in value:
            value = merged.get(value[2:-1])
        return value

    return {key: follow(value) for key, value in merged.items()}


# ---- NeMo RL ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FILES)
def test_shipped_recipes_say_what_nemo_rls_files_say(name):
    settings = flat(to_nemo_rl(name).settings)
    assert settings.pop("defaults") == "../../grpo_math_1B.yaml"
    assert meaning(settings) == meaning(FILES[name]["values"])


@pytest.mark.parametrize("name", FILES)
def test_reading_and_writing_a_file_loses_nothing(name):
    values = FILES[name]["values"]
    recipe, notes = from_nemo_rl({"defaults": "../../grpo_math_1B.yaml", **tree(values)})
    assert not [note for note in notes if note.startswith(("unknown key", "contradiction", "not expressible"))]
    settings = flat(to_nemo_rl(recipe).settings)
    del settings["defaults"]
    assert meaning(settings) == meaning(values)
    shipped = load_recipe(name)
    model = shipped.model  # DeepSeek-V3's file has a sentence where the model stands
    assert dataclasses.replace(experiment_of(recipe, name), model=model) == shipped


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_survives_the_way_there_and_back(name):
    first = to_nemo_rl(name)
    recipe, _ = from_nemo_rl(yaml.safe_load(first.yaml()))
    second = to_nemo_rl(recipe)
    assert flat(second.settings) == flat(first.settings)
    mine, back = load_recipe(name), experiment_of(recipe, name)
    for field in ("steps", "prompts_per_step", "max_completion_length", "seed", "grpo"):
        assert getattr(back, field) == getattr(mine, field)
    assert back.plan.trainer == mine.plan.trainer and back.plan.rollout.linear == mine.plan.rollout.linear


def test_a_file_on_disk_with_its_defaults(tmp_path):
    values = FILES["qwen3.5-9b-fp8-e2e"]["values"]
    keys = list(values)
    parent, child = ({k: values[k] for k in part} for part in (keys[::2], keys[1::2]))
    (tmp_path / "perf").mkdir()
    (tmp_path / "parent.yaml").write_text(yaml.safe_dump({"defaults": "../../grpo_math_1B.yaml", **tree(parent)}))
    (tmp_path / "perf" / "child.yaml").write_text(yaml.safe_dump({"defaults": ["../parent.yaml"], **tree(child)}))
    recipe, _ = from_nemo_rl(tmp_path / "perf" / "child.yaml")
    assert experiment_of(recipe, "qwen3.5-9b-fp8-e2e") == load_recipe("qwen3.5-9b-fp8-e2e")
    (tmp_path / "perf" / "child.yaml").write_text(yaml.safe_dump({"defaults": "gone.yaml"}))
    with pytest.raises(ValueError, match="defaults names 'gone.yaml'"):
        from_nemo_rl(tmp_path / "perf" / "child.yaml")


def test_a_carried_key_that_wins_over_the_experiment_is_named():
    recipe, _ = from_nemo_rl(with_values({VLLM + "kv_cache_dtype": "fp8_e4m3"}))
    recipe["experiment"]["plan"] = "fp8-rollout"  # no KV cache any more
    assert any(
        "kv_cache_dtype is carried as 'fp8_e4m3'" in note and "'auto'" in note for note in to_nemo_rl(recipe).notes
    )
    assert not any("kv_cache_dtype" in note for note in to_nemo_rl("qwen3-8b-base-fp8-kv").notes)


def test_a_section_marked_override_replaces_its_parent(tmp_path):
    megatron = {"policy": {"megatron_cfg": {"enabled": True}}}
    parent = {"data": {"train": {"dataset_name": "a"}, "shuffle": False}, **megatron}
    (tmp_path / "parent.yaml").write_text(yaml.safe_dump(parent))
    child = {"defaults": "parent.yaml", "data": {"_override_": True, "train": {"dataset_name": "b"}}}
    (tmp_path / "child.yaml").write_text(yaml.safe_dump(child))
    recipe, _ = from_nemo_rl(tmp_path / "child.yaml")
    assert recipe["carried"]["nemo_rl"]["data"] == {"train": {"dataset_name": "b"}}


def test_numbers_that_yaml_reads_as_text():
    recipe, _ = from_nemo_rl(with_values({"policy.megatron_cfg.optimizer.lr": "3e-7"}))
    assert experiment_of(recipe).grpo.learning_rate == 3e-7


def test_expressions():
    product = "${mul:${grpo.num_prompts_per_step}, ${grpo.num_generations_per_prompt}}"
    recipe, _ = from_nemo_rl(
        with_values({"policy.train_global_batch_size": product, "grpo.seed": "${grpo.val_period}"})
    )
    config = experiment_of(recipe)
    assert (config.grpo.steps_per_generation, config.seed, config.prompts_per_step) == (1, 10, 64)
    with pytest.raises(ValueError, match=r"grpo.seed is '\$\{oc.env:SEED\}'"):
        from_nemo_rl(with_values({"grpo.seed": "${oc.env:SEED}"}))


def test_validation_on_all_prompts_is_carried():
    recipe, notes = from_nemo_rl({**with_values({}), "grpo": {"max_val_samples": None}})
    assert (
        recipe["carried"]["nemo_rl"]["grpo"] == {"max_val_samples": None} and "eval_prompts" not in recipe["experiment"]
    )
    assert any("max_val_samples is null" in note for note in notes)


def with_values(changes, name="llama3.1-8b-fp8-e2e"):
    """A published file with some values changed; None takes a key away."""
    values = {k: v for k, v in {**FILES[name]["values"], **changes}.items() if v is not None}
    return tree(values)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"grpo.num_promts_per_step": 3}, "unknown key: grpo.num_promts.*did you mean 'num_prompts_per_step'"),
        ({"policy.megatron_cfg.fp8_config.enabled": True}, "unknown key: .*did you mean 'fp8_cfg'"),
        ({"polcy.x": 1}, "unknown key: polcy.x .*did you mean 'policy'"),
        ({BLOCKWISE: None}, "contradiction: NVTE_FP8_BLOCK_SCALING_FP32_SCALES is not '1'"),
        ({VLLM + "pow2_weight_scaling_factors": True, VLLM + "pow2_activation_scaling_factors": True},
         "contradiction: NVTE.* is '1' with pow2"),
        ({VLLM + "pow2_weight_scaling_factors": True}, "contradiction: .*one rule for both"),
        ({VLLM + "kv_cache_dtype": "fp8"}, "contradiction: kv_cache_dtype fp8 with pipeline_model_parallel_size"),
        ({VLLM + "kv_cache_dtype": "fp8", VLLM + "precision": "bfloat16"}, "contradiction: .*precision other than fp8"),
        ({VLLM + "kv_cache_dtype": "fp8", "grpo.async_grpo.enabled": True}, "contradiction: .*with async_grpo"),
        ({VLLM + "is_mx": True, VLLM + "precision": "bfloat16"}, "contradiction: is_mx with precision"),
        ({"policy.megatron_cfg.first_last_layers_bf16": True}, "no NeMo RL code reads .*first_last_layers_bf16"),
        ({"policy.megatron_cfg.fp8_cfg.fp8_param": True}, "fp8_param .*1164"),
        ({"loss_fn.use_cispo": True}, "carried, not run: loss_fn.use_cispo"),
        ({"policy.generation.top_p": 0.9}, "carried, not run: policy.generation.top_p = 0.9"),
        ({"policy.train_global_batch_size": 500}, "500 does not divide 2048"),
        ({"policy.megatron_cfg.scheduler.lr_decay_style": "cosine"}, "'cosine' is carried"),
        ({"grpo.val_period": -1}, "val_period is off"),
    ],
)  # fmt: skip
def test_what_reading_points_out(changes, words):
    import re

    recipe, notes = from_nemo_rl(with_values(changes))
    assert any(re.search(words, note) for note in notes), notes
    settings = flat(to_nemo_rl(recipe).settings)  # and it is still written back
    for key, value in changes.items():
        assert settings.get(key, meaning({}).get(key)) == value
    _, clean = from_nemo_rl(with_values({}))
    assert not any(re.search(words, note) for note in clean)


def test_uncorrected_fp8_rollouts_are_a_contradiction():
    with pytest.warns(UserWarning, match="biased"):
        recipe, notes = from_nemo_rl(with_values({"loss_fn.use_importance_sampling_correction": False}))
    assert any("contradiction: precision fp8 without" in note for note in notes)
    with pytest.warns(UserWarning), pytest.raises(ValueError, match="NeMo RL refuses FP8 rollouts"):
        to_nemo_rl(recipe)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"policy.megatron_cfg.enabled": False}, "enabled is false"),
        ({"policy.megatron_cfg.fp8_cfg.fp8_recipe": "tensorwise"}, "fp8_recipe 'tensorwise'"),
        ({"loss_fn.truncated_importance_sampling_type": "tis"}, "needs truncated_importance_sampling_ratio"),
        ({"loss_fn.force_on_policy_ratio": True}, "force_on_policy_ratio with 4 updates"),
        ({"loss_fn.ratio_clip_c": 0.5}, "dual clip must lie above"),
    ],
)
def test_what_reading_refuses(changes, words):
    with pytest.raises(ValueError, match=words):
        from_nemo_rl(with_values(changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"loss_fn.ratio_clip_max": 0.28, "loss_fn.ratio_clip_c": 10, "loss_fn.reference_policy_kl_penalty": 0},
        {"loss_fn.token_level_loss": False, "grpo.normalize_rewards": False, "grpo.use_leave_one_out_baseline": False},
        {"loss_fn.truncated_importance_sampling_type": "icepop", "loss_fn.truncated_importance_sampling_ratio": 5,
         "loss_fn.truncated_importance_sampling_ratio_min": 0.5},
        {"grpo.seq_logprob_error_threshold": 1.5, "grpo.overlong_filtering": True},
        {"policy.megatron_cfg.scheduler.lr_decay_style": "linear"},
        {"policy.megatron_cfg.fp8_cfg.fp8": "hybrid", VLLM + "num_first_layers_in_bf16": 2,
         VLLM + "num_last_layers_in_bf16": 1},
        {VLLM + "quantization_ignored_layer_kws": ["layers.3.", ".mlp.down_proj", "o_proj", "mlp.up."]},
        {VLLM + "kv_cache_dtype": "fp8_e4m3"},
    ],
)  # fmt: skip
def test_other_values_survive_too(changes):
    values = flat(with_values(changes))
    recipe, _ = from_nemo_rl(tree(values))
    settings = flat(to_nemo_rl(recipe).settings)
    del settings["defaults"]
    assert meaning(settings) == meaning(values)


def test_the_fields_reading_sets():
    recipe, _ = from_nemo_rl(
        with_values(
            {
                "loss_fn.ratio_clip_max": 0.28,
                "loss_fn.ratio_clip_c": 10,
                "loss_fn.token_level_loss": False,
                "grpo.normalize_rewards": False,
                "grpo.overlong_filtering": True,
                "policy.max_grad_norm": 0.5,
                VLLM + "quantization_ignored_layer_kws": ["layers.3.", ".mlp.down_proj", "o_proj"],
                VLLM + "num_last_layers_in_bf16": 1,
                "policy.megatron_cfg.fp8_cfg.fp8": "hybrid",
            }
        )
    )
    config = experiment_of(recipe)
    grpo, rollout = config.grpo, config.plan.rollout
    assert (grpo.epsilon, grpo.epsilon_high, grpo.delta, grpo.loss_type) == (0.2, 0.28, 10, "grpo")
    assert (grpo.scale_rewards, grpo.mask_truncated_completions, grpo.max_grad_norm) == ("none", True, 0.5)
    assert (grpo.steps_per_generation, config.prompts_per_step) == (4, 64)
    assert (rollout.fallback.layers, rollout.fallback.last) == ((3,), 1)
    assert rollout.fallback.modules == ("mlp.down_proj*", "*o_proj*")
    assert config.plan.trainer.linear.gradient == "e5m2"


def fp8(**changes):
    return ExperimentConfig(plan=PrecisionPlan.preset("fp8-e2e"), **changes)


def planned(rollout=None, trainer=None):
    base = PrecisionPlan.preset("fp8-e2e")
    return ExperimentConfig(plan=PrecisionPlan(rollout=rollout or base.rollout, trainer=trainer or base.trainer))


KV = AttentionPrecision(kv_cache="e4m3")


@pytest.mark.parametrize(
    "config, words",
    [
        (ExperimentConfig(plan=PrecisionPlan.preset("fp8-e2e").with_bf16(last=1)), "trainer-side BF16 layers"),
        (
            planned(SidePlan(linear=LinearPrecision(), attention=KV), SidePlan(linear=LinearPrecision(), attention=KV)),
            "attention or KV cache in the trainer",
        ),
        (planned(rollout=SidePlan(linear=LinearPrecision(), attention=KV)), "rollout attention query, probabilities"),
        (planned(rollout=SidePlan(linear=LinearPrecision(activation="bf16"))), "rollout weight e4m3 with activation"),
        (planned(trainer=SidePlan(linear=LinearPrecision(gradient="bf16"))), "BF16 gradients"),
        (planned(rollout=SidePlan(linear=LinearPrecision(rule="vllm"))), "rollout scale rule 'vllm'"),
        (planned(trainer=SidePlan(linear=LinearPrecision(group=64))), "trainer blocks"),
        (planned(trainer=SidePlan(linear=LinearPrecision(weight_source="fp32"))), "trainer weight_source fp32"),
        (
            ExperimentConfig(plan=PrecisionPlan.preset("fp8-rollout").with_bf16(modules=["re:.*up_proj"])),
            "'re:.*up_proj'",
        ),
        (fp8(grpo=GRPOConfig(loss_type="dr_grpo")), "'dr_grpo'"),
        (fp8(grpo=GRPOConfig(scale_rewards="batch")), "scale_rewards 'batch'"),
        (fp8(grpo=GRPOConfig(num_iterations=2)), "num_iterations 2"),
        (fp8(grpo=GRPOConfig(steps_per_generation=3)), "3 unequal updates"),
    ],
)
def test_what_nemo_rl_cannot_say_is_a_note(config, words):
    assert [note for note in to_nemo_rl(config).notes if note.startswith("not expressible") and words in note]
    assert not [note for note in to_nemo_rl(fp8()).notes if note.startswith("not expressible")]


def test_patterns_become_substrings():
    plan = PrecisionPlan.preset("mxfp8-rollout").with_bf16(layers=[3], modules=["mlp.gate"], side="rollout")
    result = to_nemo_rl(ExperimentConfig(plan=plan))
    words = result.settings["policy"]["generation"]["vllm_cfg"]["quantization_ignored_layer_kws"]
    assert words == ["layers.3.", ".q_proj", ".k_proj", ".v_proj", ".o_proj", ".mlp.gate"]
    assert any("'.mlp.gate' also takes names that continue it" in note for note in result.notes)


def test_no_geometric_weight_in_nemo_rl():
    with pytest.raises(NoEquivalent, match="geometric mean"):
        to_nemo_rl(fp8(grpo=GRPOConfig(importance_sampling="geometric")))


# ---- verl and TRL -----------------------------------------------------------------------------------

# Keys as verl's docs/low_precision/fp8.md and trainer/config/*.yaml have them at 1dda039b9.
VERL_KEYS = """
data.train_batch_size data.max_response_length actor_rollout_ref.model.path
actor_rollout_ref.rollout.{name,n,temperature,calculate_log_probs,quantization}
actor_rollout_ref.rollout.val_kwargs.{n,temperature,do_sample}
actor_rollout_ref.actor.{strategy,ppo_mini_batch_size,ppo_epochs,clip_ratio_low,clip_ratio_high,clip_ratio_c}
actor_rollout_ref.actor.{loss_agg_mode,use_kl_loss,kl_loss_coef,kl_loss_type}
actor_rollout_ref.actor.optim.{lr,lr_warmup_steps,weight_decay,betas,clip_grad,lr_decay_style,lr_decay_steps,min_lr}
actor_rollout_ref.actor.optim.override_optimizer_config.fp8_recipe
actor_rollout_ref.actor.megatron.override_transformer_config.{fp8,fp8_recipe}
algorithm.{adv_estimator,norm_adv_by_std_in_grpo,use_kl_in_reward}
algorithm.rollout_correction.{rollout_is,rollout_is_threshold,rollout_is_batch_normalize,rollout_rs}
algorithm.rollout_correction.{rollout_rs_threshold,bypass_mode,loss_type}
trainer.{total_training_steps,test_freq,save_freq}
"""
# Fields of TRL's GRPOConfig at f2cd57710, those of TrainingArguments included.
TRL_KEYS = """
num_generations learning_rate warmup_steps weight_decay adam_beta1 adam_beta2 max_grad_norm beta epsilon epsilon_high
delta loss_type scale_rewards mask_truncated_completions num_iterations lr_scheduler_type generation_batch_size
max_completion_length temperature max_steps save_steps seed use_vllm vllm_importance_sampling_correction
vllm_importance_sampling_mode vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min
"""


def expanded(words):
    for word in words.split():
        prefix, _, names = word.rstrip("}").partition("{")
        yield from (prefix + name for name in names.split(","))


def test_verl_gets_its_own_keys():
    settings = flat(to_verl("fp8-e2e").settings)
    assert set(settings) == set(expanded(VERL_KEYS))
    assert settings["actor_rollout_ref.rollout.quantization"] == "fp8"
    assert settings["actor_rollout_ref.actor.megatron.override_transformer_config.fp8"] == "e4m3"
    assert settings["actor_rollout_ref.actor.ppo_mini_batch_size"] == settings["data.train_batch_size"] == 96
    assert settings["actor_rollout_ref.actor.clip_ratio_c"] > 1e8  # verl's dual clip is never off: 3.0 by default
    bf16 = flat(to_verl("bf16").settings)
    assert bf16["actor_rollout_ref.actor.strategy"] == "fsdp" and "actor_rollout_ref.rollout.quantization" not in bf16


def test_verl_of_a_published_recipe():
    result = to_verl("qwen3.5-9b-fp8-e2e")
    correction = result.settings["algorithm"]["rollout_correction"]
    assert (correction["rollout_is"], correction["rollout_is_threshold"]) == ("token", 2.0)
    assert result.settings["actor_rollout_ref"]["model"]["path"] == "Qwen/Qwen3.5-9B-Base"
    for words in ("SGLANG_FP8_IGNORED_LAYERS", "leave-one-out baseline", "carried NeMo RL keys", "NVTE_FP8"):
        assert any(words in note for note in result.notes)
    assert to_verl(fp8(grpo=GRPOConfig(leave_one_out=True, scale_rewards="none"))).settings["algorithm"][
        "adv_estimator"
    ] == ("rloo")


@pytest.mark.parametrize(
    "config, verl_words, trl_words",
    [
        (ExperimentConfig(plan=PrecisionPlan.preset("fp8-rollout-kv")), "KV cache", "FP8 rollouts"),
        (ExperimentConfig(plan=PrecisionPlan.preset("fp8-pow2")), "power-of-two", "FP8 training"),
        (ExperimentConfig(plan=PrecisionPlan.preset("mxfp8-rollout")), "other blocks", "FP8 rollouts"),
        (ExperimentConfig(plan=PrecisionPlan.preset("fp8-e2e").with_bf16(last=1)), "trainer-side", "FP8 training"),
        (fp8(grpo=GRPOConfig(seq_logprob_error_threshold=2.0)), "seq_logprob_error", "seq_logprob_error"),
        (fp8(grpo=GRPOConfig(force_on_policy_ratio=True)), "force_on_policy_ratio", "force_on_policy_ratio"),
        (fp8(grpo=GRPOConfig(leave_one_out=True)), "leave-one-out", "RLOOTrainer"),
        (fp8(grpo=GRPOConfig(drop_rejected=True)), "drop_rejected", "drop_rejected"),
    ],
)
def test_what_verl_and_trl_cannot_say_is_a_note(config, verl_words, trl_words):
    for write, words in ((to_verl, verl_words), (to_trl, trl_words)):
        assert any("not expressible" in note and words in note for note in write(config).notes)
    plain = ExperimentConfig(grpo=GRPOConfig(importance_sampling="tis"))
    assert not [note for write in (to_verl, to_trl) for note in write(plain).notes if "not expressible" in note]


def test_where_rejected_tokens_go():
    """verl's rollout_rs takes them out of the denominator, its IcePop thresholds and NeMo RL do not."""
    masks = dict(importance_sampling="sequence-mask", importance_sampling_min=0.5, importance_sampling_max=3.0)
    config = fp8(grpo=GRPOConfig(**masks, drop_rejected=True))
    verl = to_verl(config)
    dropped = verl.settings["algorithm"]["rollout_correction"].get("rollout_rs") is not None
    assert dropped != any("drop_rejected" in note and "not expressible" in note for note in verl.notes)
    assert any("not expressible: drop_rejected" in note for note in to_nemo_rl(config).notes)


def test_trl_gets_its_own_fields():
    settings = to_trl("bf16").settings
    assert set(settings) == set(TRL_KEYS.split())
    assert (settings["generation_batch_size"], settings["max_steps"], settings["num_generations"]) == (768, 100, 8)
    with pytest.raises(NoEquivalent, match="no geometric mean"):
        to_trl(fp8(grpo=GRPOConfig(importance_sampling="geometric")))


def test_an_unknown_framework():
    with pytest.raises(ValueError, match="allowed: nemo_rl, verl, trl"):
        export("bf16", "slime")


# ---- the command line -------------------------------------------------------------------------------


def test_export_on_the_command_line(tmp_path, capsys):
    assert main(["export", "llama3.1-8b-fp8-e2e", "--to", "nemo_rl"]) == 0
    text = capsys.readouterr().out
    assert yaml.safe_load(text) == to_nemo_rl("llama3.1-8b-fp8-e2e").settings and text.startswith("# NeMo RL")
    out = tmp_path / "trl.yaml"
    assert main(["export", "fp8-e2e", "--to", "trl", "--out", str(out)]) == 0
    assert "note: not expressible: FP8 training" in capsys.readouterr().err
    assert yaml.safe_load(out.read_text()) == to_trl("fp8-e2e").settings
    assert main(["export", "fp8-e2e", "--to", "trl", "--out", str(out)]) == 1  # never overwrites
    capsys.readouterr()
    assert main(["export", "bf16", "--to", "verl", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["settings"] == to_verl("bf16").settings
