"""Recipes to NeMo RL, verl and TRL, and NeMo RL's YAML files back into recipes.

    export = to_nemo_rl("fp8-e2e");  print(export.yaml())        an override of NeMo RL's grpo_math_1B.yaml
    recipe, notes = from_nemo_rl("grpo-llama3.1-8b-instruct-2n8g-megatron-fp8-e2e.yaml")

Nothing is dropped in silence. What a framework cannot say (BF16 layers of NeMo RL's trainer, FP8 in TRL's) is in
`Export.notes`; what fp8lab does not run (parallelism, memory, data sets) is in the recipe's `carried.nemo_rl`, and
`to_nemo_rl` writes it back, so that a file that was read and written again resolves to the same configuration. Reading
also names keys that NeMo RL does not know and combinations that it refuses.

Keys were read at NeMo RL 7ea279abf, verl 1dda039b9 and TRL f2cd57710 (August 2026). Left out: NeMo RL's DTensor
backend (it trains in BF16 only) and reading of verl's and TRL's files; `translator.py` reads their corrections.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8lab import corrections, nemo_rl, translator
from fp8lab.experiment import ExperimentConfig
from fp8lab.nemo_rl import BASE_FILE, MEGATRON, flatten, nest, resolved, with_defaults
from fp8lab.precision import Fallback, PrecisionPlan
from fp8lab.recipes import experiment_of, overlaid, plan_spec, recipe_data, recipe_title

Recipe = str | Path | dict | ExperimentConfig


@dataclass(frozen=True, kw_only=True)
class Export:
    """Settings of another framework, and what they do not say."""

    framework: str
    settings: dict[str, Any]
    notes: tuple[str, ...]

    def yaml(self) -> str:
        """The settings as YAML, the notes as comments above them."""
        import yaml

        comments = "".join(f"# {line}\n" for line in (f"{self.framework}, written by fp8lab", *self.notes))
        return comments + yaml.safe_dump(self.settings, sort_keys=False, width=120)


def export(recipe: Recipe, to: str) -> Export:
    """The recipe for `nemo_rl`, `verl` or `trl`; ValueError for any other name."""
    writers = {"nemo_rl": to_nemo_rl, "verl": to_verl, "trl": to_trl}
    if to not in writers:
        raise ValueError(f"cannot export to {to!r}; allowed: {', '.join(writers)}")
    return writers[to](recipe)


def _parts(recipe: Recipe) -> tuple[ExperimentConfig, dict[str, Any]]:
    """The experiment and what is carried beside it."""
    if isinstance(recipe, ExperimentConfig):
        return recipe, {}
    data = recipe if isinstance(recipe, dict) else recipe_data(recipe)
    name = "custom" if isinstance(recipe, dict) else recipe_title(recipe)
    return experiment_of(data, name), data.get("carried", {})


# ---- NeMo RL ----------------------------------------------------------------------------------------


def to_nemo_rl(recipe: Recipe) -> Export:
    """A NeMo RL override to be saved in examples/configs/recipes/llm/ of a checkout.

    Keys whose value is the default of grpo_math_1B.yaml are left out. ValueError for an FP8 rollout without correction,
    which NeMo RL refuses, and NoEquivalent for a correction it does not have.
    """
    config, carried = _parts(recipe)
    if config.plan.rollout.linear.is_fp8 and config.grpo.importance_sampling == "none":
        raise ValueError("NeMo RL refuses FP8 rollouts with importance_sampling 'none'; choose 'is' or 'tis'")
    keys, notes = _nemo_rl_keys(config)
    kept = flatten(carried.get("nemo_rl", {}))
    values = {**nemo_rl.DEFAULTS, **kept}
    changed = {k: v for k, v in keys.items() if k not in kept and v != resolved(values, k)}
    notes += [
        f"{key} is carried as {value!r} and written so; the experiment alone would say {keys[key]!r}"
        for key, value in kept.items()
        if key in keys and resolved(values, key) != keys[key]
    ]
    if not kept:
        notes.append(
            f"to be set: the data set (data.train; here the task is {config.task!r}), the cluster, parallelism, and "
            f"policy.max_total_sequence_length for a prompt and {config.max_completion_length} tokens"
        )
    if config.rollout_kernels != "default":
        notes.append(f"rollout_kernels {config.rollout_kernels!r} is left out: NeMo RL's engines differ by themselves")
    notes += _model_note(config)
    return Export(
        framework="NeMo RL",
        settings={"defaults": f"../../{BASE_FILE}", **overlaid(nest(changed), nest(kept))},
        notes=tuple(notes),
    )


def _nemo_rl_keys(config: ExperimentConfig) -> tuple[dict[str, Any], list[str]]:
    """Every NeMo RL key that an experiment sets, flat, and notes."""
    grpo, notes = config.grpo, []
    fields = {**vars(config), **{f"grpo.{name}": value for name, value in vars(grpo).items()}}
    keys = {key: fields[field] for key, field in nemo_rl.DIRECT.items()}
    completions = config.prompts_per_step * grpo.num_generations
    keys |= {
        "loss_fn.ratio_clip_max": grpo.epsilon if grpo.epsilon_high is None else grpo.epsilon_high,
        "loss_fn.token_level_loss": grpo.loss_type != "grpo",
        "grpo.normalize_rewards": grpo.scale_rewards != "none",
        "policy.train_global_batch_size": completions // grpo.steps_per_generation,
        "policy.dtensor_cfg.enabled": False,
        MEGATRON + "enabled": True,
        MEGATRON + "scheduler.lr_decay_style": "constant",
        MEGATRON + "scheduler.lr_warmup_init": 0.0,
    }
    if grpo.lr_scheduler_type == "linear":
        keys[MEGATRON + "scheduler.lr_decay_style"] = "linear"
        keys[MEGATRON + "scheduler.lr_decay_iters"] = config.steps * grpo.updates_per_rollout
        keys[MEGATRON + "optimizer.min_lr"] = grpo.learning_rate / 10
    correction, correction_notes = translator.write("nemo_rl", _correction(config))
    plan, plan_notes = nemo_rl.plan_keys(config.plan)
    keys |= {f"loss_fn.{key}": value for key, value in correction.items()} | plan
    limits = (
        (grpo.loss_type == "dr_grpo", "loss_type 'dr_grpo' (written as token_level_loss: true)"),
        (grpo.scale_rewards == "batch", "scale_rewards 'batch' (written as normalize_rewards: true)"),
        (grpo.num_iterations > 1, f"num_iterations {grpo.num_iterations}; NeMo RL passes over a rollout once"),
        (grpo.drop_rejected, "drop_rejected; in NeMo RL rejected tokens stay in the loss's denominator"),
        (completions % grpo.steps_per_generation, f"{grpo.steps_per_generation} unequal updates of {completions}"),
    )
    notes += [f"not expressible: {text}" for found, text in limits if found]
    if grpo.leave_one_out and grpo.scale_rewards == "group":
        notes.append("with leave-one-out, NeMo RL divides by the deviation of the others, fp8lab by the whole group's")
    return keys, [*notes, *plan_notes, *correction_notes]


def _model_note(config: ExperimentConfig) -> list[str]:
    shipped = "/" not in config.model
    return [f"model {config.model!r} ships with fp8lab: give the path of its folder"] if shipped else []


def _correction(config: ExperimentConfig) -> translator.Setting:
    grpo = config.grpo
    if grpo.importance_sampling in corrections.WITHOUT_BOUNDS:
        return translator.Setting(mode=grpo.importance_sampling)
    low, high = grpo.importance_sampling_min, grpo.importance_sampling_max
    return translator.Setting(mode=grpo.importance_sampling, low=low, high=high)


def from_nemo_rl(source: str | Path | dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """(recipe data, notes) of a NeMo RL file, whose `defaults` are followed, or of an override of grpo_math_1B.yaml.

    Notes name unknown keys, contradictions, keys that fp8lab carries although they change the algorithm, and
    differences of meaning. ValueError for a file without Megatron, for settings NeMo RL refuses outright, or `defaults`
    that are not there; NoEquivalent for a correction without a counterpart.
    """
    flat = flatten(with_defaults(source))
    all_values = {**nemo_rl.DEFAULTS, **flat}
    values = {path: resolved(all_values, path) for path in all_values}
    if not values[MEGATRON + "enabled"]:
        raise ValueError(
            f"{MEGATRON}enabled is false: fp8lab reads Megatron configurations (FP8 training needs Megatron)"
        )
    experiment, notes = _experiment(values)
    config = experiment_of({"experiment": experiment})
    keys, more = _nemo_rl_keys(config)
    carried = {k: v for k, v in flat.items() if k not in keys or keys[k] != values[k]}
    missing = {k: nemo_rl.DEFAULTS.get(k) for k in keys if k not in flat and keys[k] != values[k]}
    notes += nemo_rl.unknown_keys(flat) + nemo_rl.contradictions(values) + _changes_of_meaning(values, carried)
    origin = "a mapping" if isinstance(source, dict) else str(source)
    recipe: dict[str, Any] = {"about": f"Read from NeMo RL keys in {origin}.", "experiment": experiment}
    if carried | missing:
        recipe["carried"] = {"nemo_rl": nest(carried | missing)}
    return recipe, [*notes, *more]


def _experiment(values: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """ExperimentConfig's fields from resolved keys, and notes."""
    experiment: dict[str, Any] = {"task": "gsm8k"}
    grpo: dict[str, Any] = {}
    for key, field in nemo_rl.DIRECT.items():
        target, name = (grpo, field[5:]) if field.startswith("grpo.") else (experiment, field)
        if isinstance(values[key], str) and "${" in values[key]:
            raise ValueError(f"{key} is {values[key]!r}; fp8lab works out ${{path}} and ${{mul:a, b}}: write the value")
        target[name] = values[key]
    notes = ["data: NeMo RL's data set is carried, not run; the experiment's task is gsm8k"]
    if values["grpo.val_period"] < 1:
        del experiment["eval_every"]
        notes.append("grpo.val_period is off, which fp8lab cannot do: it is carried")
    if values["grpo.max_val_samples"] is None:
        del experiment["eval_prompts"]
        notes.append("grpo.max_val_samples is null, all of them: it is carried")
    if values["loss_fn.ratio_clip_max"] != values["loss_fn.ratio_clip_min"]:
        grpo["epsilon_high"] = values["loss_fn.ratio_clip_max"]
    grpo["loss_type"] = "dapo" if values["loss_fn.token_level_loss"] else "grpo"
    grpo["scale_rewards"] = "group" if values["grpo.normalize_rewards"] else "none"
    completions, batch = (
        experiment["prompts_per_step"] * grpo["num_generations"],
        values["policy.train_global_batch_size"],
    )
    if isinstance(batch, int) and completions % batch == 0:
        grpo["steps_per_generation"] = completions // batch
    else:
        notes.append(f"train_global_batch_size {batch} does not divide {completions} completions: it is carried")
    style = values[MEGATRON + "scheduler.lr_decay_style"]
    grpo["lr_scheduler_type"] = "linear" if style == "linear" else "constant_with_warmup"
    if style == "constant":
        notes.append("lr_decay_style is constant: min_lr is never reached, the learning rate stays after the warm-up")
    elif style != "linear":
        notes.append(f"lr_decay_style {style!r} is carried; here the learning rate stays constant")
    loss_fn = {key: values[f"loss_fn.{key}"] for key in translator.NEMO_KEYS}
    grpo |= translator.read("nemo_rl", loss_fn).grpo()
    plan = nemo_rl.plan_of(values)
    if plan.rollout.linear.is_fp8 and grpo["importance_sampling"] == "none":
        experiment["allow_uncorrected_fp8_rollout"] = True
    return {**experiment, "plan": plan_spec(plan), "grpo": grpo}, notes


def _changes_of_meaning(values: dict[str, Any], carried: dict[str, Any]) -> list[str]:
    """Notes on carried keys that make NeMo RL compute something else, or nothing."""
    notes = [
        f"carried, not run: {key} = {values[key]!r} changes the algorithm"
        for key, default in nemo_rl.ALGORITHM.items()
        if key in carried and values[key] != default
    ]
    dead = [key for key in carried if key.rpartition(".")[2] in nemo_rl.DEAD]
    notes += [f"no NeMo RL code reads {key}: it keeps no layer in BF16" for key in dead]
    if values.get(MEGATRON + "fp8_cfg.fp8_param"):
        notes.append("carried, not run: fp8_param keeps FP8 parameters; NeMo RL warns of NaN (#1164)")
    return notes


# ---- verl and TRL -----------------------------------------------------------------------------------

VERL_LOSSES = {"dapo": "token-mean", "grpo": "seq-mean-token-mean", "dr_grpo": "seq-mean-token-sum-norm"}


def to_verl(recipe: Recipe) -> Export:
    """Hydra settings of verl (verl.trainer.main_ppo); NoEquivalent for a correction verl does not have."""
    config, carried = _parts(recipe)
    grpo, plan, notes = config.grpo, config.plan, _limits(config, carried, "verl")
    correction, more = translator.write("verl", _correction(config))
    if grpo.drop_rejected and correction.get("rollout_rs") is None:
        notes.append("not expressible: drop_rejected; only verl's rollout_rs takes tokens out of the denominator")
    trains_fp8 = plan.trainer.linear.is_fp8
    optim: dict[str, Any] = {
        "lr": grpo.learning_rate,
        "lr_warmup_steps": grpo.warmup_steps,
        "weight_decay": grpo.weight_decay,
        "betas": [grpo.adam_beta1, grpo.adam_beta2],
        "clip_grad": grpo.max_grad_norm,
    }
    actor: dict[str, Any] = {
        "strategy": "megatron" if trains_fp8 else "fsdp",
        "ppo_mini_batch_size": config.prompts_per_step // grpo.steps_per_generation,
        "ppo_epochs": grpo.num_iterations,
        "clip_ratio_low": grpo.epsilon,
        "clip_ratio_high": grpo.epsilon if grpo.epsilon_high is None else grpo.epsilon_high,
        "clip_ratio_c": grpo.delta or translator.UNBOUNDED,
        "loss_agg_mode": VERL_LOSSES[grpo.loss_type],
        "use_kl_loss": grpo.beta > 0,
        "kl_loss_coef": grpo.beta,
        "kl_loss_type": "low_var_kl",
        "optim": optim,
    }
    if trains_fp8:
        form = "hybrid" if plan.trainer.linear.gradient == "e5m2" else "e4m3"
        actor["megatron"] = {"override_transformer_config": {"fp8": form, "fp8_recipe": "blockwise"}}
        optim["override_optimizer_config"] = {"fp8_recipe": "blockwise"}
        value = "1" if plan.trainer.linear.rule != "pow2" else "unset"
        notes.append(f"environment: NVTE_FP8_BLOCK_SCALING_FP32_SCALES must be {value}")
    if grpo.lr_scheduler_type == "linear" and trains_fp8:
        total = config.steps * grpo.updates_per_rollout
        optim |= {"lr_decay_style": "linear", "lr_decay_steps": total, "min_lr": grpo.learning_rate / 10}
    elif grpo.lr_scheduler_type == "linear":
        notes.append("not expressible: a linear schedule with FSDP (constant or cosine)")
    if grpo.leave_one_out and grpo.scale_rewards != "none":
        notes.append(
            "not expressible: a leave-one-out baseline with scaled rewards (written as grpo; rloo scales none)"
        )
    rloo = grpo.leave_one_out and grpo.scale_rewards == "none"
    rollout = {
        "name": "vllm",
        "n": grpo.num_generations,
        "temperature": config.temperature,
        "calculate_log_probs": True,
    }
    rollout["val_kwargs"] = {"n": config.eval_samples, "temperature": config.temperature, "do_sample": True}
    if plan.rollout.linear.is_fp8:
        rollout["quantization"] = "fp8"
    settings = {
        "data": {"train_batch_size": config.prompts_per_step, "max_response_length": config.max_completion_length},
        "actor_rollout_ref": {"model": {"path": config.model}, "rollout": rollout, "actor": actor},
        "algorithm": {
            "adv_estimator": "rloo" if rloo else "grpo",
            "norm_adv_by_std_in_grpo": grpo.scale_rewards != "none",
            "use_kl_in_reward": False,
            "rollout_correction": correction,
        },
        "trainer": {
            "total_training_steps": config.steps,
            "test_freq": config.eval_every,
            "save_freq": config.checkpoint_every,
        },
    }
    return Export(framework="verl", settings=settings, notes=(*notes, *more))


def to_trl(recipe: Recipe) -> Export:
    """Keyword arguments of TRL's GRPOConfig; NoEquivalent for a correction TRL does not have."""
    config, carried = _parts(recipe)
    grpo, notes = config.grpo, _limits(config, carried, "TRL")
    correction, more = translator.write("trl", _correction(config))
    same = (
        "num_generations learning_rate warmup_steps weight_decay adam_beta1 adam_beta2 max_grad_norm beta epsilon "
        "epsilon_high delta loss_type scale_rewards mask_truncated_completions num_iterations lr_scheduler_type"
    )
    settings = {name: getattr(grpo, name) for name in same.split()}
    settings |= {
        "generation_batch_size": config.prompts_per_step * grpo.num_generations,
        "max_completion_length": config.max_completion_length,
        "temperature": config.temperature,
        "max_steps": config.steps * grpo.updates_per_rollout,
        "save_steps": config.checkpoint_every * grpo.updates_per_rollout,
        "seed": config.seed,
        "use_vllm": True,
        **correction,
    }
    batch = config.prompts_per_step * grpo.num_generations // grpo.steps_per_generation
    notes.append(
        f"per_device_train_batch_size x processes x gradient_accumulation_steps must be {batch}, the model is "
        f"GRPOTrainer's argument: {config.model!r}"
    )
    if grpo.lr_scheduler_type == "linear":
        notes.append("not expressible: a linear schedule to a tenth; TRL's goes to 0")
    if grpo.leave_one_out:
        notes.append("not expressible: a leave-one-out baseline; TRL has it in RLOOTrainer")
    return Export(framework="TRL", settings=settings, notes=(*notes, *more))


def _limits(config: ExperimentConfig, carried: dict[str, Any], name: str) -> list[str]:
    """Notes on what of an experiment neither verl nor TRL, or one of them, can say."""
    grpo, plan = config.grpo, config.plan
    rollout, trainer, trl = plan.rollout, plan.trainer, name == "TRL"
    plain = PrecisionPlan.preset("fp8-e2e").rollout.linear
    fp8_kinds = {
        side: dataclasses.replace(linear, gradient="e4m3", rule="default")
        for side, linear in (("rollout", rollout.linear), ("trainer", trainer.linear))
        if linear.is_fp8
    }
    limits = [
        (trl and rollout.linear.is_fp8, "FP8 rollouts: TRL passes vLLM no quantization (PR #3428 closed)"),
        (trl and grpo.drop_rejected, "drop_rejected; in TRL rejected tokens stay in the loss's denominator"),
        (trl and trainer.linear.is_fp8, "FP8 training: TRL's trainer is BF16 (PR #3399 open)"),
        (rollout.attention.is_fp8, "an FP8 KV cache (verl: PR #4435 open)"),
        (trainer.attention.is_fp8, "FP8 attention in the trainer"),
        (not trl and rollout.linear.is_fp8 and rollout.fallback != Fallback(),
         "rollout BF16 layers: verl's vLLM path has no key (SGLang: env SGLANG_FP8_IGNORED_LAYERS)"),
        (not trl and trainer.linear.is_fp8 and trainer.fallback != Fallback(), "trainer-side BF16 layers"),
        (not trl and any(kind != plain for kind in fp8_kinds.values()), "other blocks or formats than 128x128 E4M3"),
        (not trl and rollout.linear.is_fp8 and rollout.linear.rule == "pow2", "power-of-two scales in the rollout"),
        (grpo.seq_logprob_error_threshold is not None, "seq_logprob_error_threshold"),
        (grpo.force_on_policy_ratio, "force_on_policy_ratio (the same holds with one update per rollout)"),
        (not trl and grpo.mask_truncated_completions, "mask_truncated_completions"),
        (not trl and grpo.scale_rewards == "batch", "scale_rewards 'batch'"),
    ]  # fmt: skip
    notes = [f"not expressible: {text}" for found, text in limits if found]
    if "nemo_rl" in carried:
        notes.append("the recipe's carried NeMo RL keys (cluster, parallelism, memory, data) are not translated")
    notes.append(f"task {config.task!r} is not exported; give {name} its data set and reward function")
    return notes + _model_note(config)
