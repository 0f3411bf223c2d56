"""Preflight: what would break, or would quietly compute something else, said before a weight is loaded.

    problems = plan.check(config, rollout="vllm", trainer="megatron", hardware="H100", gpus=16, tensor_parallel=2)
    require(problems)                      ValueError with all errors
    print(as_text(problems))

Frameworks find these late, in a worker, after the weights were read: at start, at the first refit, or never. Here a
config is enough. The rules are in rules.py (plan, engines, environment, loss) and in fit.py (shapes, shards, memory).
`check_recipe` asks for a recipe on the machine it was written for, or on yours: can my GPU run this, and why not?
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fp8lab.architectures import ARCHITECTURES
from fp8lab.coverage import meta_model
from fp8lab.fit import fit_problems
from fp8lab.names import planned_names
from fp8lab.precision import PrecisionPlan
from fp8lab.rules import MX, engine_problems
from fp8lab.setting import HARDWARE, SEVERITIES, Problem, Setting

__all__ = ["HARDWARE", "Problem", "Setting", "as_text", "check", "check_recipe", "require"]


def check(plan: PrecisionPlan, model: Any = None, **setting: Any) -> list[Problem]:
    """All problems of running `plan`, errors first.

    model: a module, config, config dict or name (see coverage.meta_model), or None for what the plan alone tells.
    setting: fields of Setting. A bad plan or model gives problems; only a bad setting raises ValueError.
    """
    if unknown := sorted(set(setting) - set(Setting.__dataclass_fields__)):
        raise ValueError(f"unknown settings {unknown}; allowed: {', '.join(Setting.__dataclass_fields__)}")
    where = Setting(**setting)
    found = list(engine_problems(plan, where))
    if model is not None:
        found += _model(plan, where, model)
    return sorted(found, key=lambda problem: SEVERITIES.index(problem.severity))


def check_recipe(data: Mapping[str, Any], **changes: Any) -> list[Problem]:
    """All problems of a recipe (`recipes.recipe_data`) on the machine it carries; `changes` replace fields of Setting.

    Of `environment` only the variables count that the recipe does not set itself. The model's sizes are those of
    `architectures.py`, or of a model on this disk; without either, shapes and memory are not checked, and a note says
    so.
    """
    from fp8lab.recipes import experiment_of

    config, recipe = experiment_of(data), recipe_setting(data)
    environment = {**changes.get("environment", {}), **recipe.get("environment", {})}
    setting = {**recipe, **changes, "environment": environment}
    model = recipe_model(data)
    found = check(config.plan, model, **setting)
    if model is None:
        fix = "shapes, shards and memory were not checked; give its config to plan.check, or add it to architectures.py"
        found.append(Problem("note", "model", f"{config.model}, which is on the hub", "a config on this disk", fix))
    return found


def recipe_model(data: Mapping[str, Any]) -> Any:
    """The name of a recipe's model, if its sizes are known without the hub, else None."""
    name = data["experiment"].get("model", "tiny-llama")
    return name if name in ARCHITECTURES or "/" not in name else None


def recipe_setting(data: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of Setting that a recipe tells: as NeMo RL would run it if it carries NeMo RL's keys, else here."""
    from fp8lab import nemo_rl
    from fp8lab.interop import to_nemo_rl
    from fp8lab.recipes import experiment_of

    config, carried = experiment_of(data), data.get("carried", {})
    setting = {"grpo": config.grpo, "allow_uncorrected_fp8_rollout": config.allow_uncorrected_fp8_rollout}
    if machine := carried.get("hardware"):
        setting |= {"hardware": machine["gpu"], "gpus": machine["gpus"]}
    if "nemo_rl" not in carried:
        return setting
    values = {**nemo_rl.DEFAULTS, **nemo_rl.flatten(to_nemo_rl(data).settings)}

    def value(key: str, default: Any = None) -> Any:
        found = nemo_rl.resolved(values, key)
        return default if found is None else found

    environment = {"NVTE_FP8_BLOCK_SCALING_FP32_SCALES": value(nemo_rl.FP32_SCALES)}
    if value(nemo_rl.VLLM + "use_deep_gemm"):
        environment |= {"VLLM_USE_DEEP_GEMM": "1", "VLLM_USE_DEEP_GEMM_E8M0": "0"}  # set by NeMo RL's init_fp8
    packing = value("policy.make_sequence_length_divisible_by")
    return setting | {
        "rollout": "vllm",
        "trainer": "megatron" if value(nemo_rl.MEGATRON + "enabled") else "dtensor",
        "rollout_tensor_parallel": value(nemo_rl.VLLM + "tensor_parallel_size"),
        "rollout_expert_parallel": value(nemo_rl.VLLM + "expert_parallel_size", 1),
        "memory_share": float(value(nemo_rl.VLLM + "gpu_memory_utilization", 0.9)),
        "tensor_parallel": value(nemo_rl.MEGATRON + "tensor_model_parallel_size"),
        "pipeline_parallel": value(nemo_rl.MEGATRON + "pipeline_model_parallel_size"),
        "expert_parallel": value(nemo_rl.MEGATRON + "expert_model_parallel_size"),
        "context_parallel": value(nemo_rl.MEGATRON + "context_parallel_size"),
        "sequence_parallel": value(nemo_rl.MEGATRON + "sequence_parallel", False),
        "max_length": value("policy.max_total_sequence_length"),
        "packing_multiple": packing if type(packing) is int else None,
        "asynchronous": value("grpo.async_grpo.enabled"),
        "environment": {name: text for name, text in environment.items() if text is not None},
    }


def require(problems: list[Problem]) -> None:
    """ValueError with every error among `problems`, one a line."""
    if errors := [str(p) for p in problems if p.severity == "error"]:
        raise ValueError("\n".join([f"{len(errors)} errors before the start", *errors]))


def as_text(problems: list[Problem]) -> str:
    """One finding a paragraph, and a verdict."""
    errors = sum(problem.severity == "error" for problem in problems)
    verdict = f"no: {errors} errors" if errors else "yes, as far as a config can tell"
    return "\n".join([*map(str, problems), f"can it run: {verdict}"])


def _model(plan: PrecisionPlan, where: Setting, model: Any) -> list[Problem]:
    try:
        built = meta_model(model)
        plan.coverage(built)
    except ValueError as error:
        what = "plan" if "fallback" in str(error) else "model"
        allowed = "a causal language model with nn.Linear layers, and fallbacks that fit it"
        return [Problem(severity="error", where=what, found=str(error), allowed=allowed, fix="change one of them")]
    found = fit_problems(plan, where, built)
    kind = built.config.model_type
    if where.is_nemo_rl and plan.rollout.linear.is_fp8 and kind.startswith("mistral3"):
        found.append(
            Problem(
                "error",
                "model",
                kind,
                "another architecture",
                "NeMo RL silently rolls Mistral 3 out in BF16",
            )
        )
    if (
        where.is_nemo_rl
        and plan.rollout.linear.weight_block == MX
        and any(".experts." in n for n in planned_names(built))
    ):
        found.append(
            Problem(
                "warning",
                "model",
                "fused experts with an MXFP8 rollout",
                "experts that Megatron exports one by one",
                "NeMo RL raises NotImplementedError at the first refit if they come as one slab",
            )
        )
    return found
