"""Compare runs: a table per arm with intervals, and each arm's paired difference to a base arm.

    compare(folders)            what was found, as plain dicts (JSON)
    as_text(comparison)         the same as a table
    results(folders)            a DataFrame with a row a run, for statistics and plots of one's own
    differing_settings(folders) what makes each arm another than the base

An *arm* is a run name, its seeds are repetitions of one config. Differences are taken within a seed, because runs of
one seed see the same prompts and the same sampling noise. With one seed there is no interval, and the table says so.
Arms are called equivalent only if the whole interval of their difference lies within a margin that was named before.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp8lab.experiment import ExperimentConfig
from fp8lab.runlog import RunLog, find_runs
from fp8lab.sweep import final_metrics, interval, paired_difference

if TYPE_CHECKING:
    import pandas

Folders = str | Path | Iterable[str | Path]

MARGIN = 0.03
"""Accuracy margin within which two arms count as equivalent, fixed before the studies in data/."""
COMPARED = ("accuracy_last", "token_mult_prob_error")


def compare(folders: Folders, *, base: str | None = None, margin: float = MARGIN) -> dict[str, Any]:
    """Means per arm and paired differences to `base` (default: bf16 if there, else the first arm).

    folders: run directories, or folders of them. Unfinished runs are left out and named; so are those with a damaged
    config or metrics, since the others are no worse for it. Returns `margin`, `base`, `seeds`, `unfinished`, `arms`
    (arm -> metric -> mean, low, high, sd, n; low and high are None for one seed), `paired_differences` ("arm - base" ->
    the same for COMPARED, and `equivalent_within_margin`) and, only if there are any, `damaged` (folder -> why).
    ValueError if no run is finished, if two have the same arm and seed, if runs of one arm differ in more than their
    seed, or if there is no such base.
    """
    finished, unfinished, damaged = _sorted_out(folders)
    _arm_settings(finished)
    by: dict[str, dict[int, dict[str, float]]] = {}
    for folder, row in zip(finished, final_metrics(finished), strict=True):
        arm = by.setdefault(row["name"], {})
        if row["seed"] in arm:
            raise ValueError(
                f"{folder} is a second run of {row['name']!r} with seed {row['seed']}; compare one at a time"
            )
        arm[row["seed"]] = {k: v for k, v in row.items() if k not in ("name", "seed")}
    base = _base_of(by, base)
    arms = {
        name: {key: _mean([row[key] for row in seeds.values()]) for key in next(iter(seeds.values()))}
        for name, seeds in by.items()
    }
    differences = {f"{name} - {base}": _difference(by[name], by[base], margin) for name in by if name != base}
    return {
        "margin": margin,
        "base": base,
        "seeds": sorted({seed for seeds in by.values() for seed in seeds}),
        "backend": "emulated",
        "unfinished": [str(run) for run in unfinished],
        "arms": arms,
        "paired_differences": differences,
        **({"damaged": damaged} if damaged else {}),
    }


def results(folders: Folders) -> pandas.DataFrame:
    """One row per finished run: `run` (its folder), `arm`, `seed`, and the columns of `sweep.final_metrics`.

    Unfinished runs have no row, nor have damaged ones, for which it warns. ValueError if no run is finished.
    """
    import pandas

    finished, _, damaged = _sorted_out(folders)
    for why in damaged.values():
        warnings.warn(f"left out: {why}", stacklevel=2)
    table = pandas.DataFrame(final_metrics(finished)).rename(columns={"name": "arm"})
    table.insert(0, "run", [str(run) for run in finished])
    return table


def differing_settings(folders: Folders, *, base: str | None = None) -> dict[str, list[str]]:
    """Arm -> the settings, besides name and seed, in which it differs from the base: dotted keys, but `plan` for any of
    the plan's. Base and errors as `compare`'s."""
    arms = _arm_settings(_sorted_out(folders)[0])
    expected = arms.pop(_base_of(arms, base))
    found = {}
    for arm, settings in arms.items():
        keys = ("plan" if key.startswith("plan.") else key for key in _differing(expected, settings))
        found[arm] = list(dict.fromkeys(keys))
    return found


def _base_of(arms: dict[str, Any], base: str | None) -> str:
    base = base or ("bf16" if "bf16" in arms else next(iter(arms)))
    if base not in arms:
        raise ValueError(f"base is {base!r}; the finished runs are {', '.join(arms)}")
    return base


def _sorted_out(folders: Folders) -> tuple[list[Path], list[Path], dict[str, str]]:
    """Runs that are finished, runs that are not, and folder -> why of damaged ones; ValueError if none is finished."""
    finished, unfinished, damaged = [], [], {}
    for run in find_runs(folders):
        log = RunLog(run)
        try:
            log.rows(strict=True)
            (finished if log.is_finished else unfinished).append(run)
        except ValueError as error:
            damaged[str(run)] = str(error)
    if not finished:
        found = f"none of {len(unfinished) + len(damaged)} runs is finished"
        raise ValueError("; ".join([found, *(["`resume` them first"] if unfinished else []), *damaged.values()]))
    return finished, unfinished, damaged


def _arm_settings(runs: list[Path]) -> dict[str, dict[str, Any]]:
    """Arm -> settings, by dotted key, which all of its runs share; ValueError for runs of one name that differ in more
    than the seed. What an older version did not write has its default."""
    defaults = _flat(json.loads(json.dumps(ExperimentConfig().to_dict())))
    arms: dict[str, tuple[Path, dict[str, Any]]] = {}
    for run in runs:
        settings = defaults | _flat(RunLog(run).config)
        name, _ = settings.pop("name"), settings.pop("seed")
        first, expected = arms.setdefault(name, (run, settings))
        if differing := _differing(expected, settings):
            found = ", ".join(f"{key} {expected.get(key)!r} vs {settings.get(key)!r}" for key in differing)
            raise ValueError(
                f"{first} and {run} are both runs of {name!r}, but differ in {found}; runs of one name may differ in "
                "their seed alone: compare one config at a time, or give each a name"
            )
    return {name: settings for name, (_, settings) in arms.items()}


def _differing(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    return [key for key in {**a, **b} if a.get(key) != b.get(key)]


def _flat(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """`{"grpo": {"beta": 0}}` as `{"grpo.beta": 0}`."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


def _mean(values: list[float]) -> dict[str, Any]:
    if len(values) > 1:
        return dataclasses.asdict(interval(values))
    return {"mean": values[0], "low": None, "high": None, "sd": None, "n": 1}


def _difference(arm: dict[int, dict], base: dict[int, dict], margin: float) -> dict[str, Any]:
    common = sorted(arm.keys() & base.keys())
    if len(common) < 2:
        single = {key: _mean([arm[s][key] - base[s][key] for s in common]) for key in COMPARED} if common else {}
        return {**single, "equivalent_within_margin": None}
    found = {
        key: paired_difference({s: arm[s][key] for s in common}, {s: base[s][key] for s in common}) for key in COMPARED
    }
    result: dict[str, Any] = {key: dataclasses.asdict(value) for key, value in found.items()}
    return result | {"equivalent_within_margin": found["accuracy_last"].within(margin)}


def value_text(value: dict[str, Any] | None, digits: int = 4, sign: str = "") -> str:
    """`0.8737 [0.8680, 0.8794]`, or the mean alone where there is no interval, or nothing."""
    if not value:
        return ""
    form = f"{sign}.{digits}f"
    if value["low"] is None:
        return f"{value['mean']:{form}} (one seed)"
    return f"{value['mean']:{form}} [{value['low']:{form}}, {value['high']:{form}}]"


def table_rows(comparison: dict[str, Any]) -> list[dict[str, str]]:
    """One row per arm, cells as text."""
    rows = []
    for name, values in comparison["arms"].items():
        difference = comparison["paired_differences"].get(f"{name} - {comparison['base']}", {})
        equivalent = {True: "yes", False: "not shown", None: ""}[difference.get("equivalent_within_margin")]
        rows.append(
            {
                "arm": name,
                "seeds": str(values["accuracy_last"]["n"]),
                "accuracy before": value_text(values["accuracy_first"], 3),
                "accuracy after": value_text(values["accuracy_last"], 3),
                f"minus {comparison['base']}": value_text(difference.get("accuracy_last"), 4, "+"),
                f"equivalent (±{comparison['margin']:g})": equivalent,
                "token_mult_prob_error": value_text(values["token_mult_prob_error"], 5),
            }
        )
    return rows


def as_text(comparison: dict[str, Any], differing: dict[str, list[str]] | None = None) -> str:
    """The table, and below it what `differing_settings` found, if given, and the runs that were left out."""
    rows = table_rows(comparison)
    widths = {key: max(len(key), *(len(row[key]) for row in rows)) for key in rows[0]}
    lines = ["  ".join(key.ljust(width) for key, width in widths.items())]
    lines += ["  ".join(row[key].ljust(width) for key, width in widths.items()) for row in rows]
    for arm, keys in (differing or {}).items():
        lines.append(f"{arm} differs from {comparison['base']} in: {', '.join(keys) or 'its name alone'}")
    lines += [f"left out, not finished: {run}" for run in comparison["unfinished"]]
    lines += [f"left out: {why}" for why in comparison.get("damaged", {}).values()]
    return "\n".join(line.rstrip() for line in lines)


def curves(folders: Folders, metric: str) -> dict[str, dict[int, list[tuple[int, float]]]]:
    """Arm -> seed -> (step, value) of a logged metric, over all runs, finished or not. ValueError if a config is
    damaged."""
    found: dict[str, dict[int, list[tuple[int, float]]]] = {}
    for folder in find_runs(folders):
        log = RunLog(folder)
        points = [(row["step"], row[metric]) for row in log.rows() if metric in row]
        found.setdefault(log.config["name"], {})[log.config["seed"]] = points
    return found


def mean_curve(seeds: dict[int, list[tuple[int, float]]]) -> list[tuple[int, float, float, float]]:
    """(step, mean, low, high) over seeds, at steps that every seed has; low and high are the 95 % interval, or the mean
    itself for one seed."""
    steps = sorted(set.intersection(*({s for s, _ in points} for points in seeds.values()))) if seeds else []
    rows = []
    for step in steps:
        values = [dict(points)[step] for points in seeds.values()]
        mean = statistics.fmean(values)
        low, high = (interval(values).low, interval(values).high) if len(values) > 1 else (mean, mean)
        rows.append((step, mean, low, high))
    return rows
