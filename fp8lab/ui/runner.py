"""Runner: experiments in one worker thread, so that a notebook stays alive while they train.

Configs are run one after the other; their rows are collected and written to run folders. The worker prints nothing
(output of a thread lands in a random cell): it calls `on_change` instead, which may be called from the worker. An
exception is kept in `error` and raised by `wait`; Ctrl-C or the interrupt button while waiting means Stop.

Left out: processes. A thread shares the interpreter with the widgets, which costs a few per cent, and lets cells look
at everything.
"""

from __future__ import annotations

import asyncio
import functools
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from fp8lab.experiment import ExperimentConfig, run
from fp8lab.runlog import RunLog, find_runs
from fp8lab.ui import plots


def runs_home() -> Path:
    """Where panels write runs: $FP8LAB_HOME, or `runs/` beside the notebook (git ignores it)."""
    return Path(os.environ.get("FP8LAB_HOME") or "runs").expanduser().resolve()


class Runner:
    """Runs {arm: config} in a thread.

    home: folder for the run folders, default `runs_home()`. on_change(runner, ended) is called in the worker: after
    every row, and once at the end with ended=True. If it raises, the run ends with that error.
    """

    def __init__(self, home: str | Path | None = None, on_change: Callable[[Runner, bool], None] | None = None) -> None:
        self.home, self.on_change = (
            Path(home) if home is not None else runs_home(),
            on_change or (lambda runner, ended: None),
        )
        self.runs: dict[str, list[dict[str, Any]]] = {}
        self.folders: dict[str, Path] = {}
        self.error: BaseException | None = None
        self.done, self.total, self.now = 0, 1, ""
        self.seconds = 0.0
        self._over, self._ended = False, threading.Event()  # not Thread.is_alive: an interrupted join() makes it lie
        self._ended.set()
        self._stop, self._lock = threading.Event(), threading.RLock()

    @property
    def running(self) -> bool:
        """True while the worker thread lives."""
        return not self._ended.is_set()

    @property
    def stopping(self) -> bool:
        """True once a stop was asked for, until the next start."""
        return self._stop.is_set()

    def start(self, configs: Mapping[str, ExperimentConfig]) -> None:
        """Start and return at once; RuntimeError if at work already. Rows of the same arms are forgotten (not on
        disk)."""
        with self._lock:
            if self._over:
                self._ended.wait(5)  # only its last redraw is left
            if self.running:
                raise RuntimeError("a run is in progress; stop it first, or wait")
            self._over = False
            self._ended.clear()
            self.error, self.done, self.total = None, 0, sum(config.steps for config in configs.values())
            self._stop.clear()
            for arm in configs:
                self.runs[arm] = []
            work = threading.Thread(target=self._work, args=(dict(configs),), name="fp8lab-run", daemon=True)
            work.start()

    def stop(self) -> None:
        """Ask the worker to end after the step it is in; what it has done is kept, with a checkpoint."""
        self._stop.set()

    def wait(self, timeout: float | None = None) -> pd.DataFrame:
        """Block until the worker is done and return all rows; raises what it raised, TimeoutError after `timeout`
        seconds.

        A KeyboardInterrupt (the kernel's interrupt button) means Stop, and the rows so far come back.
        """
        end = None if timeout is None else time.monotonic() + timeout
        while self.running:
            try:
                self._ended.wait(0.1)
                if end is not None and time.monotonic() > end:
                    raise TimeoutError(f"the run is not done after {timeout} s; it goes on until it is stopped")
            except KeyboardInterrupt:
                self.stop()
        if self.error is not None:
            raise self.error
        return self.frame()

    async def finished(self) -> pd.DataFrame:
        """`wait` for a notebook cell: `rows = await runner.finished()` leaves the kernel free to hear the Stop button.

        ipykernel handles a click during a cell only if the cell is waiting like this (since 7.4; before it depended on
        the front end). Interrupting the kernel cancels the cell, which means Stop here too.
        """
        while self.running:
            try:
                await asyncio.sleep(0.1)
            except asyncio.CancelledError:
                self.stop()
        return self.wait()

    def frame(self) -> pd.DataFrame:
        """All rows so far, a line an arm and step."""
        return plots.frame(self.snapshot())

    def snapshot(self) -> dict[str, list[dict[str, Any]]]:
        """The rows so far by arm, as lists of their own."""
        with self._lock:
            return {arm: list(rows) for arm, rows in self.runs.items()}

    def attach(self, folder: str | Path) -> int:
        """Read the runs in `folder` (a run directory, or a folder of them: of each arm the newest); returns how many
        arms.

        FileNotFoundError if there is none.
        """
        found = find_runs([folder])
        for path in found:
            log = RunLog(path)
            with self._lock:
                self.runs[log.config["name"]], self.folders[log.config["name"]] = log.rows(), path
        return len({RunLog(path).config["name"] for path in found})

    def _work(self, configs: dict[str, ExperimentConfig]) -> None:
        start = time.monotonic()
        try:
            _no_progress_bars()
            for arm, config in configs.items():
                if self._stop.is_set():
                    break
                self.now = f"{plots.arm_style(arm).label}: loading the model, first evaluation"
                self.on_change(self, False)
                self.folders[arm] = self._new_folder(arm)
                on_step = functools.partial(self._on_step, arm, config.steps, start)
                run(config, self.folders[arm], on_step=on_step, should_stop=self._stop.is_set)
        except BaseException as error:  # a thread has nobody above it to see what it raises
            self.error = error
        self.seconds, self.now, self._over = time.monotonic() - start, "", True
        try:
            self.on_change(self, True)
        except BaseException as error:
            self.error = self.error or error
        self._ended.set()

    def _on_step(self, arm: str, steps: int, start: float, row: dict[str, Any]) -> None:
        with self._lock:
            self.runs[arm].append(row)
            self.done += row["step"] > 0
        self.seconds = time.monotonic() - start
        self.now = f"{plots.arm_style(arm).label}: step {row['step']} of {steps}"
        self.on_change(self, False)

    def _new_folder(self, arm: str) -> Path:
        name = time.strftime("%Y%m%d-%H%M%S-") + arm.replace(",", "").replace(" ", "-")
        path, number = self.home / name, 1
        while path.exists():
            number += 1
            path = self.home / f"{name}-{number}"
        return path


def _no_progress_bars() -> None:
    """transformers' loading bars print, see above."""
    from transformers.utils import logging

    logging.disable_progress_bar()
