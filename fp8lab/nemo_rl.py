"""NeMo RL's configuration keys: their defaults, the fields of ours they set, and the precision plan they describe.

Tables and small pure functions for `interop.py`. Everything was read at commit 7ea279abf (2026-08-22): defaults in
examples/configs/grpo_math_1B.yaml, which every FP8 recipe extends, precision in
nemo_rl/models/generation/vllm/quantization/fp8.py and nemo_rl/models/megatron/setup.py.

Configurations are handled flat: {"grpo.seed": 42, …}. NeMo RL keeps layers in BF16 on the rollout side only, by
**substring** of a weight's name without ".weight". A plan's pattern matches whole name parts, so "*a_proj*" is the
substring "a_proj", and "mlp.down_proj" is written ".mlp.down_proj".
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from fp8lab.precision import (
    FP8_ATTENTION,
    AttentionPrecision,
    Fallback,
    LinearPrecision,
    PrecisionPlan,
    SidePlan,
)
from fp8lab.recipes import overlaid

BASE_FILE = "grpo_math_1B.yaml"
"""The file whose values are DEFAULTS."""
VLLM = "policy.generation.vllm_cfg."
MEGATRON = "policy.megatron_cfg."
FP32_SCALES = MEGATRON + "env_vars.NVTE_FP8_BLOCK_SCALING_FP32_SCALES"
KEYWORDS = VLLM + "quantization_ignored_layer_kws"
DIRECT = {
    "policy.model_name": "model",
    "grpo.max_num_steps": "steps",
    "grpo.num_prompts_per_step": "prompts_per_step",
    "policy.generation.max_new_tokens": "max_completion_length",
    "policy.generation.temperature": "temperature",
    "grpo.seed": "seed",
    "grpo.val_period": "eval_every",
    "grpo.max_val_samples": "eval_prompts",
    "grpo.val_num_generations_per_prompt": "eval_samples",
    "checkpointing.save_period": "checkpoint_every",
    "grpo.num_generations_per_prompt": "grpo.num_generations",
    "grpo.use_leave_one_out_baseline": "grpo.leave_one_out",
    "grpo.overlong_filtering": "grpo.mask_truncated_completions",
    "grpo.seq_logprob_error_threshold": "grpo.seq_logprob_error_threshold",
    "loss_fn.reference_policy_kl_penalty": "grpo.beta",
    "loss_fn.ratio_clip_min": "grpo.epsilon",
    "loss_fn.ratio_clip_c": "grpo.delta",
    "loss_fn.force_on_policy_ratio": "grpo.force_on_policy_ratio",
    "policy.max_grad_norm": "grpo.max_grad_norm",
    MEGATRON + "optimizer.lr": "grpo.learning_rate",
    MEGATRON + "optimizer.weight_decay": "grpo.weight_decay",
    MEGATRON + "optimizer.adam_beta1": "grpo.adam_beta1",
    MEGATRON + "optimizer.adam_beta2": "grpo.adam_beta2",
    MEGATRON + "scheduler.lr_warmup_iters": "grpo.warmup_steps",
}
"""NeMo RL's key -> a field of ExperimentConfig with the same meaning."""
DEFAULTS: dict[str, Any] = {
    "policy.model_name": "Qwen/Qwen2.5-1.5B",
    "grpo.max_num_steps": 1000000,
    "grpo.num_prompts_per_step": 32,
    "policy.generation.max_new_tokens": "${policy.max_total_sequence_length}",
    "policy.max_total_sequence_length": 512,
    "policy.generation.temperature": 1.0,
    "grpo.seed": 42,
    "grpo.val_period": 10,
    "grpo.max_val_samples": 256,
    "grpo.val_num_generations_per_prompt": 1,
    "checkpointing.save_period": 10,
    "grpo.num_generations_per_prompt": 16,
    "grpo.use_leave_one_out_baseline": True,
    "grpo.normalize_rewards": True,
    "grpo.overlong_filtering": False,
    "grpo.seq_logprob_error_threshold": None,
    "loss_fn.reference_policy_kl_penalty": 0.01,
    "loss_fn.ratio_clip_min": 0.2,
    "loss_fn.ratio_clip_max": 0.2,
    "loss_fn.ratio_clip_c": None,
    "loss_fn.token_level_loss": True,
    "loss_fn.force_on_policy_ratio": False,
    "loss_fn.use_importance_sampling_correction": False,
    "loss_fn.truncated_importance_sampling_type": None,
    "loss_fn.truncated_importance_sampling_ratio": None,
    "loss_fn.truncated_importance_sampling_ratio_min": None,
    "loss_fn.sequence_level_importance_ratios": False,
    "policy.precision": "bfloat16",
    "policy.train_global_batch_size": 512,
    "policy.max_grad_norm": 1.0,
    "policy.dtensor_cfg.enabled": True,
    MEGATRON + "enabled": False,
    MEGATRON + "tensor_model_parallel_size": 1,
    MEGATRON + "pipeline_model_parallel_size": 1,
    MEGATRON + "expert_model_parallel_size": 1,
    MEGATRON + "context_parallel_size": 1,
    MEGATRON + "optimizer.lr": 5.0e-6,
    MEGATRON + "optimizer.min_lr": 5.0e-7,
    MEGATRON + "optimizer.weight_decay": 0.01,
    MEGATRON + "optimizer.adam_beta1": 0.9,
    MEGATRON + "optimizer.adam_beta2": 0.999,
    MEGATRON + "scheduler.lr_decay_style": "constant",
    MEGATRON + "scheduler.lr_decay_iters": 1000,
    MEGATRON + "scheduler.lr_warmup_iters": 13,
    MEGATRON + "scheduler.lr_warmup_init": 5.0e-7,
    MEGATRON + "fp8_cfg.enabled": False,
    MEGATRON + "fp8_cfg.fp8": "e4m3",
    MEGATRON + "fp8_cfg.fp8_recipe": "blockwise",
    FP32_SCALES: None,
    VLLM + "precision": "${policy.precision}",
    VLLM + "kv_cache_dtype": "auto",
    VLLM + "is_mx": False,
    VLLM + "pow2_weight_scaling_factors": False,
    VLLM + "pow2_activation_scaling_factors": False,
    VLLM + "num_first_layers_in_bf16": 0,
    VLLM + "num_last_layers_in_bf16": 0,
    VLLM + "tensor_parallel_size": 1,
    KEYWORDS: [],
    "policy.generation.colocated.enabled": True,
    "policy.generation.colocated.resources.num_nodes": None,
    "grpo.async_grpo.enabled": False,
    "cluster.gpus_per_node": 1,
    "cluster.num_nodes": 1,
}
"""Values of the keys used here when a file does not set them."""


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} as {"a.b": 1}; lists and empty mappings are values."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        nested = isinstance(value, dict) and value
        flat |= flatten(value, f"{prefix}{key}.") if nested else {f"{prefix}{key}": value}
    return flat


def nest(flat: dict[str, Any]) -> dict[str, Any]:
    """The inverse of `flatten`."""
    tree: dict[str, Any] = {}
    for path, value in flat.items():
        *parents, last = path.split(".")
        place = tree
        for part in parents:
            place = place.setdefault(part, {})
        place[last] = value
    return tree


def resolved(values: dict[str, Any], path: str) -> Any:
    """The value at a path with ${other.path} and ${mul:a, b} worked out, and "1e-6" (text in YAML 1.1) as a number."""
    return _worked_out(values, values.get(path))


def _worked_out(values: dict[str, Any], value: Any) -> Any:
    if not isinstance(value, str):
        return value
    if reference := re.fullmatch(r"\$\{([\w.]+)\}", value):
        return resolved(values, reference[1])
    if product := re.fullmatch(r"\$\{mul:\s*([^,]+),\s*([^,]+)\}", value):
        factors = [_worked_out(values, factor) for factor in product.groups()]
        factors = [int(f) if isinstance(f, str) and f.isdigit() else f for f in factors]
        return value if any(isinstance(f, str) for f in factors) else factors[0] * factors[1]
    return float(value) if re.fullmatch(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+", value) else value


def with_defaults(source: str | Path | dict[str, Any]) -> dict[str, Any]:
    """The file over its `defaults`, up to but without grpo_math_1B.yaml, as NeMo RL's load_config merges them."""
    import yaml

    folder, tree = None, source
    if not isinstance(source, dict):
        folder, tree = Path(source).parent, yaml.safe_load(Path(source).read_text(encoding="utf-8"))
        if not isinstance(tree, dict):
            raise ValueError(f"{source} holds a {type(tree).__name__}; a NeMo RL configuration is a mapping")
    tree = dict(tree)
    parents = tree.pop("defaults", [])
    merged: dict[str, Any] = {}
    for parent in [parents] if isinstance(parents, str) else parents:
        if Path(parent).name == BASE_FILE:
            continue
        if folder is None or not (folder / parent).is_file():
            raise ValueError(
                f"defaults names {parent!r}, which is not here; give the path of a file in a NeMo RL checkout, or an "
                f"override of {BASE_FILE}"
            )
        merged = overlaid(merged, with_defaults(folder / parent))
    for key, value in tree.items():
        if isinstance(value, dict) and value.get("_override_"):
            merged.pop(key, None)
            tree[key] = {k: v for k, v in value.items() if k != "_override_"}
    return overlaid(merged, tree)


# ---- the precision plan -----------------------------------------------------------------------------


def plan_keys(plan: PrecisionPlan) -> tuple[dict[str, Any], list[str]]:
    """The keys that make NeMo RL use this plan, and what of it they cannot say."""
    rollout, trainer, notes = plan.rollout, plan.trainer, []
    fp8, mx, pow2 = rollout.linear.is_fp8, _is_mx(rollout.linear), rollout.linear.rule == "pow2"
    keys: dict[str, Any] = {
        VLLM + "precision": "fp8" if fp8 else "bfloat16",
        VLLM + "kv_cache_dtype": "fp8" if rollout.attention.is_fp8 else "auto",
        VLLM + "is_mx": fp8 and mx,
        VLLM + "pow2_weight_scaling_factors": fp8 and pow2 and not mx,
        VLLM + "pow2_activation_scaling_factors": fp8 and pow2 and not mx,
        VLLM + "num_first_layers_in_bf16": rollout.fallback.first if fp8 else 0,
        VLLM + "num_last_layers_in_bf16": rollout.fallback.last if fp8 else 0,
        KEYWORDS: _keywords(rollout.fallback, notes) if fp8 else [],
        MEGATRON + "fp8_cfg.enabled": trainer.linear.is_fp8,
    }
    if trainer.linear.is_fp8:
        mx = _is_mx(trainer.linear)
        keys[MEGATRON + "fp8_cfg.fp8"] = "hybrid" if trainer.linear.gradient == "e5m2" else "e4m3"
        keys[MEGATRON + "fp8_cfg.fp8_recipe"] = "mxfp8" if mx else "blockwise"
        keys[FP32_SCALES] = "1" if trainer.linear.rule != "pow2" else None
        if trainer.fallback != Fallback():
            notes.append(f"not expressible: trainer-side BF16 layers ({trainer.fallback}); NeMo RL trains all in FP8")
    if trainer.attention.is_fp8:
        notes.append("not expressible: FP8 attention or KV cache in the trainer; NeMo RL has no key for it")
    if rollout.attention.is_fp8:
        nemo = AttentionPrecision(kv_cache="e4m3", query="e4m3", probabilities="e4m3", calibration="nemo_rl")
        changed = [k for k, v in vars(nemo).items() if getattr(rollout.attention, k) != v]
        if changed:
            notes.append(f"not expressible: rollout attention {', '.join(changed)}; NeMo RL always uses {nemo!r}")
    for name, linear in (("rollout", rollout.linear), ("trainer", trainer.linear)):
        notes += _linear_limits(name, linear)
    return keys, notes


def _is_mx(linear: LinearPrecision) -> bool:
    return linear.weight_block == (1, 32) and linear.group == 32 and linear.rule == "pow2"


def _linear_limits(side: str, linear: LinearPrecision) -> list[str]:
    if not linear.is_fp8:
        return []
    found = []
    if (linear.weight, linear.activation) != ("e4m3", "e4m3"):
        found.append(f"weight {linear.weight} with activation {linear.activation} (NeMo RL: both e4m3)")
    if side == "trainer" and linear.gradient == "bf16":
        found.append("BF16 gradients beside FP8 weights")
    if linear.rule not in ("default", "pow2", "nemo_rl"):
        found.append(f"scale rule {linear.rule!r} (NeMo RL: float32 or powers of two)")
    if not _is_mx(linear) and (linear.weight_block, linear.group) != ((128, 128), 128):
        found.append(f"blocks {linear.weight_block} and 1x{linear.group} (NeMo RL: 128x128 and 1x128, or MX)")
    if linear.weight_source != "bf16":
        found.append("weight_source fp32 (NeMo RL quantizes BF16 weights)")
    return [f"not expressible: {side} {what}" for what in found]


def _keywords(fallback: Fallback, notes: list[str]) -> list[str]:
    """The substrings for the layers and patterns of a fallback."""
    words = [f"layers.{i}." for i in fallback.layers]
    for pattern in fallback.modules:
        core = pattern.removeprefix("*.").strip("*")
        letters = re.fullmatch(r"(.*)\[(\w+)\](.*)", core)
        cores = [f"{letters[1]}{c}{letters[3]}" for c in letters[2]] if letters else [core]
        if pattern.startswith("re:") or any(set(c) & set("*?[]") for c in cores):
            notes.append(f"not expressible: rollout pattern {pattern!r}; NeMo RL matches plain substrings")
            continue
        start = "" if pattern.removeprefix("*.").startswith("*") else "."
        words += [start + c for c in cores]
        if not pattern.endswith("*"):
            notes.append(f"NeMo RL matches substrings: {start + cores[0]!r} also takes names that continue it")
    return words


def plan_of(values: dict[str, Any]) -> PrecisionPlan:
    """The plan that resolved keys describe; ValueError for a training recipe without a counterpart."""
    rollout, trainer = SidePlan(), SidePlan()
    if values[VLLM + "precision"] == "fp8":
        kv = values[VLLM + "kv_cache_dtype"] in ("fp8", "fp8_e4m3")
        attention = (
            AttentionPrecision(**{**vars(FP8_ATTENTION), "calibration": "nemo_rl"}) if kv else AttentionPrecision()
        )
        words = values[KEYWORDS] or []
        layers = [re.fullmatch(r"layers\.(\d+)\.", word) for word in words]
        fallback = Fallback(
            first=values[VLLM + "num_first_layers_in_bf16"] or 0,
            last=values[VLLM + "num_last_layers_in_bf16"] or 0,
            layers=tuple(int(found[1]) for found in layers if found),
            modules=tuple(_pattern(w) for w, found in zip(words, layers, strict=True) if not found),
        )
        pow2 = values[VLLM + "pow2_weight_scaling_factors"]
        rollout = SidePlan(linear=_linear(values[VLLM + "is_mx"], pow2), attention=attention, fallback=fallback)
    if values[MEGATRON + "fp8_cfg.enabled"]:
        recipe, formats = values[MEGATRON + "fp8_cfg.fp8_recipe"], values[MEGATRON + "fp8_cfg.fp8"]
        if recipe not in ("blockwise", "mxfp8") or formats not in ("e4m3", "hybrid"):
            raise ValueError(
                f"{MEGATRON}fp8_cfg has fp8_recipe {recipe!r} and fp8 {formats!r}; fp8lab reads blockwise or mxfp8 "
                "with e4m3 or hybrid (tensorwise scales one tensor at a time, which no plan here does)"
            )
        gradient = "e5m2" if formats == "hybrid" else "e4m3"
        pow2 = str(values[FP32_SCALES]) != "1"
        trainer = SidePlan(linear=_linear(recipe == "mxfp8", pow2, gradient=gradient))
    return PrecisionPlan(rollout=rollout, trainer=trainer)


def _linear(mx: bool, pow2: bool, gradient: str = "e4m3") -> LinearPrecision:
    if mx:
        return LinearPrecision(rule="pow2", weight_block=(1, 32), group=32, gradient=gradient)
    return LinearPrecision(rule="pow2" if pow2 else "default", gradient=gradient)


def _pattern(word: str) -> str:
    """The pattern that matches the names a substring is in."""
    return f"{word[1:]}*" if word.startswith(".") else f"*{word}*"


# ---- what is wrong with a file ----------------------------------------------------------------------

DEAD = ("first_last_layers_bf16", "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")
"""Keys of megatron_cfg in some of NeMo RL's own files that no NeMo RL code reads."""
ALGORITHM = {
    "loss_fn.disable_ppo_ratio": False,
    "loss_fn.use_cispo": False,
    "loss_fn.use_kl_in_reward": False,
    "loss_fn.use_on_policy_kl_approximation": False,
    "loss_fn.positive_example_nll_weight": 0.0,
    "loss_fn.reference_policy_kl_type": "k3",
    "grpo.use_dynamic_sampling": False,
    "grpo.reward_shaping.enabled": False,
    "grpo.reward_scaling.enabled": False,
    "grpo.adv_estimator.name": "grpo",
    "grpo.advantage_clip_low": None,
    "grpo.advantage_clip_high": None,
    "grpo.async_grpo.enabled": False,
    "policy.generation.top_p": 1.0,
    "policy.generation.top_k": None,
}
"""Keys that change what is computed and that fp8lab does not run, with their defaults."""


def unknown_keys(flat: dict[str, Any]) -> list[str]:
    """A note for each key that is in none of NeMo RL's files, with the known key it resembles."""
    import difflib

    lines = (Path(__file__).parent / "recipes" / "nemo_rl_keys.txt").read_text(encoding="utf-8").splitlines()
    known = {name: words.split() for name, words in (line.split(": ") for line in lines if not line.startswith("#"))}
    notes = []
    for path in flat:
        parts = path.split(".")
        for i, part in enumerate(parts):
            section = ".".join(parts[:i]) or "top"
            if section not in known:
                break
            if part not in known[section] and part not in DEAD:
                near = difflib.get_close_matches(part, known[section], n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                notes.append(f"unknown key: {path} is in none of NeMo RL's files{hint}")
                break
    return notes


def contradictions(values: dict[str, Any]) -> list[str]:
    """A note for each combination that NeMo RL refuses, or that makes the sides differ without a word."""
    fp8, mx = values[VLLM + "precision"] == "fp8", values[VLLM + "is_mx"]
    kv = values[VLLM + "kv_cache_dtype"] in ("fp8", "fp8_e4m3")
    blockwise = values[MEGATRON + "fp8_cfg.enabled"] and values[MEGATRON + "fp8_cfg.fp8_recipe"] == "blockwise"
    weights, activations = (values[f"{VLLM}pow2_{what}_scaling_factors"] for what in ("weight", "activation"))
    trainer_pow2 = str(values[FP32_SCALES]) != "1"
    sides = "power-of-two scales in the trainer, float32 scales in the rollout"
    rules = (
        (fp8 and not values["loss_fn.use_importance_sampling_correction"],
         "precision fp8 without loss_fn.use_importance_sampling_correction: NeMo RL's setup asserts it"),
        (kv and not fp8, "kv_cache_dtype fp8 with precision other than fp8: NeMo RL refuses it"),
        (kv and values["grpo.async_grpo.enabled"], "kv_cache_dtype fp8 with async_grpo: NeMo RL refuses it"),
        (kv and values[MEGATRON + "pipeline_model_parallel_size"] > 1,
         "kv_cache_dtype fp8 with pipeline_model_parallel_size > 1: NeMo RL refuses it"),
        (mx and not fp8, "is_mx with precision other than fp8: NeMo RL refuses it"),
        (fp8 and not mx and bool(weights) != bool(activations),
         "pow2_weight_scaling_factors and pow2_activation_scaling_factors differ; a plan here has one rule for both"),
        (fp8 and not mx and blockwise and trainer_pow2 and not weights,
         f"NVTE_FP8_BLOCK_SCALING_FP32_SCALES is not '1': {sides}, and NeMo RL does not warn"),
        (fp8 and not mx and blockwise and not trainer_pow2 and bool(weights),
         "NVTE_FP8_BLOCK_SCALING_FP32_SCALES is '1' with pow2_weight_scaling_factors: the sides' scales differ"),
    )  # fmt: skip
    return [f"contradiction: {text}" for found, text in rules if found]
