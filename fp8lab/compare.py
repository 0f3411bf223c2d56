"""Compare runs: a table per arm with intervals, and each arm's paired difference to a base arm.

    compare(folders)            what was found, as plain dicts (JSON)
    as_text(comparison)         the same as a table

An *arm* is a run name, its seeds are repetitions. Differences are taken within a seed, because runs of one seed see the
same prompts and the same sampling noise. With one seed there is no interval, and the table says so. Arms are called
equivalent only if the whole interval of their difference lies within a margin that was named before.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fp8lab.runlog import RunLog, find_runs
from fp8lab.sweep import final_metrics, interval, is_finished, paired_difference

MARGIN = 0.03
"""Accuracy margin within which two arms count as equivalent, fixed before the studies in data/."""
COMPARED = ("accuracy_last", "token_mult_prob_error")


def compare(folders: Iterable[str | Path], *, base: str | None = None, margin: float = MARGIN) -> dict[str, Any]:
    """Means per arm and paired differences to `base` (default: bf16 if there, else the first arm).

    folders: run directories, or folders of them. Unfinished runs are left out and named. Returns `margin`, `base`,
    `seeds`, `unfinished`, `arms` (arm -> metric -> mean, low, high, sd, n; low and high are None for one seed) and
    `paired_differences` ("arm - base" -> the same for COMPARED, and `equivalent_within_margin`). ValueError if no run
    is finished, if two have the same arm and seed, or if there is no such base.
    """
    runs = find_runs(folders)
    finished = [run for run in runs if is_finished(run)]
    if not finished:
        raise ValueError(f"none of {len(runs)} runs is finished; `resume` them first")
    rows = final_metrics(finished)
    by: dict[str, dict[int, dict[str, float]]] = {}
    for folder, row in zip(finished, rows, strict=True):
        arm = by.setdefault(row["name"], {})
        if row["seed"] in arm:
            raise ValueError(
                f"{folder} is a second run of {row['name']!r} with seed {row['seed']}; compare one at a time"
            )
        arm[row["seed"]] = {k: v for k, v in row.items() if k not in ("name", "seed")}
    base = base or ("bf16" if "bf16" in by else next(iter(by)))
    if base not in by:
        raise ValueError(f"base is {base!r}; the finished runs are {', '.join(by)}")
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
        "unfinished": [str(run) for run in runs if run not in finished],
        "arms": arms,
        "paired_differences": differences,
    }


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


def as_text(comparison: dict[str, Any]) -> str:
    """The table, and below it the runs that were left out."""
    rows = table_rows(comparison)
    widths = {key: max(len(key), *(len(row[key]) for row in rows)) for key in rows[0]}
    lines = ["  ".join(key.ljust(width) for key, width in widths.items())]
    lines += ["  ".join(row[key].ljust(width) for key, width in widths.items()) for row in rows]
    lines += [f"left out, not finished: {run}" for run in comparison["unfinished"]]
    return "\n".join(line.rstrip() for line in lines)


def curves(folders: Iterable[str | Path], metric: str) -> dict[str, dict[int, list[tuple[int, float]]]]:
    """Arm -> seed -> (step, value) of a logged metric, over all runs, finished or not."""
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
