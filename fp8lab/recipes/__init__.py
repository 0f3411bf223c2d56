"""Recipes: whole experiments as short YAML files, by name.

    config = load_recipe("fp8-e2e")

A recipe holds `about` (a sentence), `sources`, an optional `extends` (another recipe, whose values it starts from) and
`experiment`: fields of ExperimentConfig. `plan` is the name of a preset, a whole plan, or a preset with changes:

    plan: {preset: fp8-e2e, rollout: {fallback: {modules: ["*a_proj*"]}}}

Published recipes are for clusters, and much of them has no meaning here: parallelism, memory, data set, logging. Those
values are kept under `carried`, word for word: read, **not run**, and written back on export. `carried.nemo_rl` holds
NeMo RL's keys over its grpo_math_1B.yaml, `carried.hardware` the GPU, `carried.checks` what NeMo RL's own test asks of
the run. A path to a YAML file of yours works too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fp8lab.experiment import ExperimentConfig
from fp8lab.precision import PRESETS, PrecisionPlan

FOLDER = Path(__file__).parent
KEYS = ("about", "sources", "extends", "experiment", "carried")


def recipe_names() -> list[str]:
    """Names of the recipes that ship with fp8lab."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def recipe_data(name: str | Path, below: tuple[Path, ...] = ()) -> dict[str, Any]:
    """The recipe as a dict, `extends` followed; ValueError for an unknown name or key, or a file that is no mapping.

    below: files of the recipes that extend this one.
    """
    import yaml

    path = FOLDER / f"{name}.yaml"
    if str(name).endswith((".yaml", ".yml")):
        path = Path(name)
    if not path.is_file():
        raise ValueError(f"no recipe {str(name)!r}; allowed: {', '.join(recipe_names())}, or a path to a .yaml file")
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is no YAML: {error}") from error
    if not isinstance(data, dict) or (unknown := sorted(map(str, set(data) - set(KEYS)))):
        found = f"unknown keys {unknown}" if isinstance(data, dict) else f"a {type(data).__name__}"
        raise ValueError(f"{path} holds {found}; a recipe is a mapping with {', '.join(KEYS)}")
    if not isinstance(data.get("about"), str):
        raise ValueError(f"{path} has about {data.get('about')!r}; it must be a sentence that says what the recipe is")
    if path.resolve() in below:
        raise ValueError(f"{path} extends itself, by way of {below[-1].name}; a recipe cannot extend itself")
    base = recipe_data(data["extends"], (*below, path.resolve())) if "extends" in data else {}
    own = data.get("experiment") or {}
    grpo = own.get("grpo", {}) if isinstance(own, dict) else {}
    for where, part in (("experiment", own), ("grpo", grpo), ("carried", data.get("carried", {}))):
        if not isinstance(part, dict):
            raise ValueError(f"{path} has {where} {part!r}; it must be a mapping")
    merged = {**base.get("experiment", {}), **own}
    merged["grpo"] = {**base.get("experiment", {}).get("grpo", {}), **own.get("grpo", {})}
    data = {**base, **data, "experiment": merged}
    if "carried" in data:
        data["carried"] = overlaid(base.get("carried", {}), data["carried"])
    return data


def load_recipe(name: str | Path) -> ExperimentConfig:
    """The experiment of a recipe; ValueError names what is wrong with it."""
    return experiment_of(recipe_data(name), name=recipe_title(name))


def recipe_title(name: str | Path) -> str:
    """A recipe's name, or its file's without folder and ending: `mine` for /tmp/mine.yaml."""
    return Path(name).stem if str(name).endswith((".yaml", ".yml")) else str(name)


def experiment_of(data: dict[str, Any], name: str = "custom") -> ExperimentConfig:
    """The experiment of a recipe's data; its own `name` wins."""
    experiment = {"name": name, **data["experiment"]}
    plan = experiment.get("plan")
    if isinstance(plan, dict) and "preset" in plan:
        changes = {key: value for key, value in plan.items() if key != "preset"}
        base = PrecisionPlan.preset(plan["preset"]).to_dict()
        experiment["plan"] = PrecisionPlan.from_dict(overlaid(base, changes)).to_dict()
    return ExperimentConfig.from_dict(experiment)


def plan_spec(plan: PrecisionPlan) -> str | dict[str, Any]:
    """The plan as a recipe writes it: a preset's name, or the nearest preset and what differs from it."""
    whole = plan.to_dict()
    specs = [{"preset": name, **_changes(PrecisionPlan.preset(name).to_dict(), whole)} for name in PRESETS]
    shortest = min(specs, key=lambda spec: len(str({k: v for k, v in spec.items() if k not in ("preset", "name")})))
    if shortest.get("name") in ("custom", *PRESETS):
        del shortest["name"]
    return shortest["preset"] if len(shortest) == 1 else shortest


def runs_here(data: dict[str, Any]) -> str:
    """`runs here` for a recipe of a shipped model, else what it needs."""
    if "/" not in data["experiment"].get("model", ""):
        return "runs here"
    hardware = data.get("carried", {}).get("hardware", {})
    return f"needs the hub and {hardware.get('gpus', 'some')} x {hardware.get('gpu', 'GPU')}"


def overlaid(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """base with the values of changes, mapping by mapping."""
    both = {
        k: overlaid(base[k], v) for k, v in changes.items() if isinstance(v, dict) and isinstance(base.get(k), dict)
    }
    return {**base, **changes, **both}


def _changes(base: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """What must be laid over base to get values."""
    nested = {key: _changes(base[key], value) for key, value in values.items() if isinstance(value, dict)}
    plain = {k: v for k, v in values.items() if not isinstance(v, dict) and base[k] != v}
    return plain | {key: value for key, value in nested.items() if value}
