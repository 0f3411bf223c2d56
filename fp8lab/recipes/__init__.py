"""Recipes: whole experiments as short YAML files, by name.

    config = load_recipe("fp8-e2e")

A recipe holds `about` (a sentence), `sources`, an optional `extends` (another recipe, whose values it starts from) and
`experiment`: fields of ExperimentConfig, where `plan` may be the name of a preset. A path to a YAML file of yours works
too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fp8lab.experiment import ExperimentConfig

FOLDER = Path(__file__).parent
KEYS = ("about", "sources", "extends", "experiment")


def recipe_names() -> list[str]:
    """Names of the recipes that ship with fp8lab."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def recipe_data(name: str | Path) -> dict[str, Any]:
    """The recipe as a dict, `extends` followed; ValueError for an unknown name or key, or a file that is no mapping."""
    import yaml

    path = FOLDER / f"{name}.yaml"
    if str(name).endswith((".yaml", ".yml")):
        path = Path(name)
    if not path.is_file():
        raise ValueError(f"no recipe {str(name)!r}; allowed: {', '.join(recipe_names())}, or a path to a .yaml file")
    data = yaml.safe_load(path.read_text(encoding="utf-8"))
    if not isinstance(data, dict) or (unknown := sorted(set(data) - set(KEYS))):
        found = f"unknown keys {unknown}" if isinstance(data, dict) else f"a {type(data).__name__}"
        raise ValueError(f"{path} holds {found}; a recipe is a mapping with {', '.join(KEYS)}")
    base = recipe_data(data["extends"]) if "extends" in data else {}
    own = data.get("experiment") or {}
    merged = {**base.get("experiment", {}), **own}
    merged["grpo"] = {**base.get("experiment", {}).get("grpo", {}), **own.get("grpo", {})}
    return {**base, **data, "experiment": merged}


def load_recipe(name: str | Path) -> ExperimentConfig:
    """The experiment of a recipe; ValueError names what is wrong with it."""
    experiment = recipe_data(name)["experiment"]
    return ExperimentConfig.from_dict({"name": Path(str(name)).stem, **experiment})
