"""Many runs: start those that are missing, go on with those that were killed, and compare arms with error bars.

    sweep(configs, "out")            one run directory per (name, seed), in local processes
    final_metrics(["out/..."])       one row a run (as a DataFrame: compare.results("out"))
    paired_difference(a, b)          mean difference over seeds with its 95 % interval

Runs with the same seed see the same prompts and the same sampling noise in every arm, so arms are compared *within* a
seed: the paired difference loses the spread between seeds. The interval is Student's t. "No difference was found" is
not "they are equal": two arms are called equivalent only if the whole interval lies within a margin named before.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import statistics
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8lab.experiment import ExperimentConfig, resume, run
from fp8lab.runlog import RunLog
from fp8lab.trackers import require_tracker


def run_folder(out: str | Path, config: ExperimentConfig) -> Path:
    """Where a sweep puts the run of a config."""
    return Path(out) / f"{config.name}-s{config.seed}"


def sweep(
    configs: Iterable[ExperimentConfig],
    out: str | Path,
    *,
    workers: int = 2,
    threads: int = 1,
    on_done: Callable[[str, str | None], None] | None = None,
    ray: str | None = None,
    tracker: str | None = None,
) -> dict[str, str]:
    """Bring every config's run in `out` to its end, `workers` processes at a time with `threads` CPU threads each.

    ray: address of a Ray cluster (`auto`: the one this machine belongs to, `local`: a new one here); its tasks take
    `threads` CPUs each, and `out` must be a folder that all its machines share. tracker: shows every run, see `run`.
    ImportError says what to install.

    Finished runs are left alone, unfinished ones resumed. on_done(folder, error or None) is called after each. One
    that fails does not stop the rest; returns folder -> error for those. ValueError if two configs share a name and a
    seed, or if a folder holds the run of another config.
    """
    require_tracker(tracker)
    configs = list(configs)
    folders = [run_folder(out, c) for c in configs]
    if len(set(folders)) < len(folders):
        raise ValueError("two configs of the sweep share a name and a seed; give them different names")
    for folder, config in zip(folders, configs, strict=True):
        if (folder / "config.json").is_file() and ExperimentConfig.from_dict(RunLog(folder).config) != config:
            raise ValueError(f"{folder} holds a run of another config; delete it or choose another folder")
    failed = {}
    jobs = list(zip(configs, folders, strict=True))
    options = {"threads": threads, "tracker": tracker}
    for folder, error in _on_ray(jobs, options, ray) if ray else _in_processes(jobs, options, workers):
        if error is not None:
            failed[str(folder)] = f"{type(error).__name__}: {error}"
        if on_done is not None:
            on_done(str(folder), failed.get(str(folder)))
    return failed


Jobs = Sequence[tuple[ExperimentConfig, Path]]


def _in_processes(jobs: Jobs, options: dict[str, Any], workers: int) -> Iterator[tuple[Path, BaseException | None]]:
    """(folder, error or None) of each job, in the order they end. options: `_finish`'s.

    A process that dies (out of memory, kill -9) breaks its pool: what was in it is resumed, each in a pool of its own,
    so that a job that always dies takes no other with it.
    """
    context, broken = multiprocessing.get_context("spawn"), []
    with ProcessPoolExecutor(max_workers=workers, mp_context=context, initializer=_end_with_parent) as pool:
        futures = {pool.submit(_finish, *job, **options): job for job in jobs}
        for future in as_completed(futures):
            job, error = futures[future], future.exception()
            if isinstance(error, BrokenProcessPool) and len(jobs) > 1:
                broken.append(job)
            else:
                yield job[1], error
    for job in broken:
        yield from _in_processes([job], options, 1)


def _on_ray(jobs: Jobs, options: dict[str, Any], address: str) -> Iterator[tuple[Path, BaseException | None]]:
    """The same as tasks of a Ray cluster, which starts them as CPUs become free."""
    try:
        import ray
    except ImportError as error:
        raise ImportError("sweep(ray=...) needs Ray: pip install 'fp8lab[ray]'") from error
    started = not ray.is_initialized()
    if started:
        ray.init(address=None if address == "local" else address, log_to_driver=False, include_dashboard=False)
    try:
        task = ray.remote(num_cpus=options["threads"], max_retries=1)(_finish)
        left = {task.remote(config, folder.resolve(), **options): folder for config, folder in jobs}
        while left:
            done, _ = ray.wait(list(left))
            try:
                ray.get(done[0])
                error = None
            except Exception as problem:  # of one run; the others go on
                error = getattr(problem, "cause", None) or problem
            yield left.pop(done[0]), error
    finally:
        if started:
            ray.shutdown()


def is_finished(folder: str | Path) -> bool:
    """True if `folder` holds a run that has logged all of its steps."""
    log = RunLog(folder)
    return (log.folder / "config.json").is_file() and log.is_finished


def _finish(config: ExperimentConfig, folder: Path, threads: int, tracker: str | None) -> None:
    """What a worker does: the run of one config, from wherever it is to its end."""
    import torch

    torch.set_num_threads(threads)
    log = RunLog(folder)
    if not (folder / "config.json").is_file():
        run(config, folder, tracker=tracker)
    elif not (log.is_finished and log.resume_from()[0] == config.steps):  # its last checkpoint may be missing
        resume(folder)


def _end_with_parent() -> None:
    """In a worker: end when the sweep was killed. It would hold its run's lock, and wait for more work, for ever."""
    parent = multiprocessing.parent_process()

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def final_metrics(folders: Iterable[str | Path]) -> list[dict[str, Any]]:
    """One row per finished run: name, seed, first and last accuracy, and mismatch over its steps."""
    rows = []
    for folder in folders:
        log = RunLog(folder)
        steps = log.rows()
        accuracy = [row["validation_accuracy"] for row in steps if "validation_accuracy" in row]
        trained = steps[1:]
        errors = [row["token_mult_prob_error"] for row in trained]
        rows.append(
            {
                "name": log.config["name"],
                "seed": log.config["seed"],
                "accuracy_first": accuracy[0],
                "accuracy_last": accuracy[-1],
                "token_mult_prob_error": statistics.fmean(errors),
                "token_mult_prob_error_first_30": statistics.fmean(errors[:30]),
                "token_mult_prob_error_last_10": statistics.fmean(errors[-10:]),
                "approx_entropy_first_30": statistics.fmean(row["approx_entropy"] for row in trained[:30]),
                "approx_entropy_last_10": statistics.fmean(row["approx_entropy"] for row in trained[-10:]),
            }
        )
    return rows


@dataclass(frozen=True)
class Interval:
    """A mean with its 95 % interval (Student's t over n values)."""

    mean: float
    low: float
    high: float
    sd: float
    n: int

    def within(self, margin: float) -> bool:
        """True if the whole interval lies within +-margin: the only thing that counts as equivalence."""
        return -margin <= self.low and self.high <= margin

    def __str__(self) -> str:
        return f"{self.mean:.4f} [{self.low:.4f}, {self.high:.4f}] (n={self.n})"


def interval(values: Sequence[float]) -> Interval:
    """Mean and 95 % t-interval of at least two values; ValueError otherwise."""
    from scipy import stats

    if len(values) < 2:
        raise ValueError(f"{len(values)} values; an interval needs at least 2 seeds")
    mean, sd = statistics.fmean(values), statistics.stdev(values)
    half = float(stats.t.ppf(0.975, len(values) - 1)) * sd / math.sqrt(len(values))
    return Interval(mean, mean - half, mean + half, sd, len(values))


def paired_difference(a: dict[int, float], b: dict[int, float]) -> Interval:
    """Interval of a - b over the seeds both have (seed -> value)."""
    return interval([a[seed] - b[seed] for seed in sorted(a.keys() & b.keys())])
