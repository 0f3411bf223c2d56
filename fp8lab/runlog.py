"""A run directory: everything needed to look at a run, and to go on with it.

    config.json        what was asked for
    environment.json   versions, machine, threads, commit
    metrics.jsonl      a line a step, deterministic values only: the same seed gives the same bytes
    timing.jsonl       seconds per phase, a line a step
    samples.jsonl      a few completions a step
    calibration.jsonl  scales of q, k and v per layer, as in use after each step; only if the plan has FP8 attention
    checks.jsonl       bytes and prefix cache of the engine after some refits, and every resume (alarms.refit_check)
    checkpoints/       step-000020/: model, optimizer
    tracker.json       which tracker shows this run, and under what name; only if one does

Small files are written to a temporary name and renamed; logs are appended and flushed line by line. A killed run can
therefore lose only what came after its last checkpoint, and `rewind` cuts the logs back to exactly that step. All that
a kill leaves is a torn last line; a damaged line with others after it is refused by `resume`, since what follows it
would be lost. A lock keeps a second writer out.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import IO, Any

LOGS = ("metrics", "timing", "samples", "calibration", "checks")
CONFIG_TYPES = {"name": str, "seed": int, "steps": int, "checkpoint_every": int}
"""What every reader of a run needs of its config.json; ExperimentConfig.from_dict checks the rest."""


class RunLog:
    """The files of one run; use as a context manager to write, directly to read."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._files: dict[str, IO[str]] = {}
        self._lock: IO[str] | None = None

    @property
    def config(self) -> dict[str, Any]:
        """What config.json holds; FileNotFoundError with a hint if this is no run directory, ValueError if the file is
        damaged."""
        path = self.folder / "config.json"
        if not path.is_file():
            raise FileNotFoundError(f"{self.folder} is no run directory (it has no config.json)")
        remedy = "restore it, or start a new run in another folder"
        config = _read_object(path, remedy)
        for key, kind in CONFIG_TYPES.items():
            if type(config.get(key)) is not kind:
                found = f"{key} is {config[key]!r}" if key in config else f"it has no {key}"
                raise ValueError(f"{path} is damaged ({found}; it must be {kind.__name__}); {remedy}")
        return config

    def rows(self, log: str = "metrics", *, strict: bool = False) -> list[dict[str, Any]]:
        """The lines of one of LOGS up to the first damaged one, none if it was never written; strict: see
        read_jsonl."""
        path = self.folder / f"{log}.jsonl"
        return read_jsonl(path, strict=strict) if path.is_file() else []

    def __enter__(self) -> RunLog:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = open(self.folder / ".lock", "a", encoding="utf-8")  # noqa: SIM115
        except OSError as error:
            raise OSError(
                f"cannot write the run directory {self.folder}: {error.strerror}; choose another --out"
            ) from error
        if not _try_lock(self._lock):
            self._lock.close()
            raise RuntimeError(
                f"{self.folder} is being written by another process; wait for it, or choose another folder"
            )
        for path in self.folder.glob(".*.tmp-*"):  # of a writer that was killed: the lock is ours
            path.unlink()
        return self

    def __exit__(self, *error: object) -> None:
        for file in self._files.values():
            with suppress(OSError):  # every line was flushed; what a full disk refused has raised before
                file.close()
        self._files.clear()
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def start(self, config: dict[str, Any]) -> None:
        """Begin a run: write config.json and environment.json. FileExistsError if the folder already holds a run."""
        if (self.folder / "config.json").exists():
            raise FileExistsError(f"{self.folder} already holds a run; resume it, or choose another folder")
        write_atomically(self.folder / "environment.json", json.dumps(environment(), indent=1))
        write_atomically(self.folder / "config.json", json.dumps(config, indent=1))

    def changed_environment(self) -> str:
        """What decides last bits and is not as when the run began, as text; empty if nothing changed. ValueError if
        environment.json is damaged."""
        path = self.folder / "environment.json"
        remedy = "restore it, or put {} in it to go on without knowing on what machine the run began"
        before, now = _read_object(path, remedy) if path.is_file() else {}, environment()
        changes = [
            f"{key} {before[key]}"
            for key in ("torch_threads", "processes", "processor")
            if before.get(key, now[key]) != now[key]
        ]
        old, new = before.get("packages", {}), now["packages"]
        changes += [f"{name} {old[name]}" for name in ("torch", "numba") if old.get(name, new[name]) != new[name]]
        return ", ".join(changes)

    def append(self, log: str, row: dict[str, Any]) -> None:
        """Add a line to a log and flush it; OSError says what to do about a full disk."""
        path = self.folder / f"{log}.jsonl"
        try:
            if log not in self._files:
                self._files[log] = open(path, "a", encoding="utf-8")  # noqa: SIM115
            self._files[log].write(json.dumps(row) + "\n")
            self._files[log].flush()
        except OSError as error:
            raise OSError(
                f"cannot write {path}: {error.strerror}; make room or allow writing there, then resume the run"
            ) from error

    def rewind(self, step: int) -> None:
        """Drop every log line after `step`, and torn last lines.

        ValueError, before anything is written, if a line of a log is damaged that is not its last, or metrics.jsonl
        does not have each step up to `step` once, in order: a damaged log is not repaired.
        """
        kept = {log: [row for row in self.rows(log, strict=True) if row["step"] <= step] for log in LOGS}
        found = [row["step"] for row in kept["metrics"]]
        if found != list(range(step + 1)):
            gap = next((i for i in range(step + 1) if i >= len(found) or found[i] != i), step)
            raise ValueError(
                f"{self.folder / 'metrics.jsonl'} is damaged: step {gap} of 0 to {step} cannot be read, or is there "
                "twice. Restore the file, or start a new run; the checkpoints are untouched"
            )
        for log, rows in kept.items():
            path = self.folder / f"{log}.jsonl"
            if path.exists():
                write_atomically(path, "".join(json.dumps(row) + "\n" for row in rows))

    @property
    def is_finished(self) -> bool:
        """True if every step from 0 to the last has been logged, once and in order."""
        return [row["step"] for row in self.rows()] == list(range(self.config["steps"] + 1))

    def resume_from(self) -> tuple[int | None, Path | None]:
        """(step, checkpoint) to go on from: the newest checkpoint; (None, None) to begin again, if none was due yet;
        (last step, None) for a finished run without checkpoints, with nothing left to do.

        ValueError if a log of an unfinished run is damaged, as `rewind` says, or if checkpoints are missing of a run
        that must have had some: beginning again would delete its logs.
        """
        newest, rows, config = self.latest_checkpoint(), self.rows(), self.config
        if not self.is_finished:  # said here, before a model is loaded
            for log in LOGS:
                self.rows(log, strict=True)
        if newest is not None:
            return newest
        if self.is_finished:
            return config["steps"], None
        if rows and rows[-1]["step"] > config["checkpoint_every"]:
            raise ValueError(
                f"{self.folder} has logged step {rows[-1]['step']} of {config['steps']}, but its checkpoints are gone; "
                "restore them, or start a new run in another folder"
            )
        return None, None

    def checkpoint_folder(self, step: int) -> Path:
        """Where the checkpoint of a step belongs."""
        return self.folder / "checkpoints" / f"step-{step:06d}"

    def latest_checkpoint(self) -> tuple[int, Path] | None:
        """(step, folder) of the newest complete checkpoint, or None. A checkpoint is complete once it has its final
        name."""
        found = sorted((self.folder / "checkpoints").glob("step-*"))
        return (int(found[-1].name.removeprefix("step-")), found[-1]) if found else None

    def prune_checkpoints(self, keep: int = 2) -> None:
        """Delete all but the newest `keep` checkpoints, and what a killed save left behind."""
        for folder in sorted((self.folder / "checkpoints").glob("step-*"))[:-keep]:
            discard(folder)
        for folder in (self.folder / "checkpoints").glob(".step-*.tmp-*"):
            shutil.rmtree(folder, ignore_errors=True)


def find_runs(folders: str | Path | Iterable[str | Path]) -> list[Path]:
    """The run directories that this folder is, or these are, or hold directly, oldest first by name within a folder;
    FileNotFoundError for a folder with none."""
    found: list[Path] = []
    for folder in map(Path, [folders] if isinstance(folders, str | Path) else folders):
        here = (
            [folder] if (folder / "config.json").is_file() else sorted(p.parent for p in folder.glob("*/config.json"))
        )
        if not here:
            raise FileNotFoundError(
                f"{folder} holds no run; choose a folder with config.json in it, or the one above it"
            )
        found += here
    return list(dict.fromkeys(found))


def read_jsonl(path: Path, *, strict: bool = False) -> list[dict[str, Any]]:
    """The rows of a log up to the first damaged line: one that is no JSON object with an integer `step`.

    The last line may be torn, as the run was killed in it, or is writing it now. strict: ValueError with file and line
    if a damaged line is not the last.
    """
    rows = []
    with open(path, "rb") as file:
        lines = file.readlines()
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):  # also for bytes that are no text
            row = None
        if not isinstance(row, dict) or type(row.get("step")) is not int:
            if strict and number < len(lines):
                raise ValueError(
                    f"{path} is damaged: line {number} of {len(lines)} is no JSON object with an integer step. Restore "
                    "the file, or start a new run; nothing was changed"
                )
            break
        rows.append(row)
    return rows


def _read_object(path: Path, remedy: str) -> dict[str, Any]:
    """The object in a JSON file; ValueError that names the file and the remedy otherwise."""
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged ({error}); {remedy}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} is damaged (it holds a {type(found).__name__}, not an object); {remedy}")
    return found


def write_atomically(path: Path, text: str) -> None:
    """Write text so that a reader or a crash sees the old file or the new one, never a part."""
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise OSError(f"cannot write {path}: {error.strerror}; make room or allow writing there") from error


def discard(folder: Path) -> None:
    """Delete a folder, if there is one, so that a crash never leaves a part of it under its name."""
    if folder.exists():
        doomed = folder.with_name(f".{folder.name}.tmp-old-{os.getpid()}")
        os.replace(folder, doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def environment() -> dict[str, Any]:
    """Versions, machine, threads and commit: what one needs to repeat a run."""
    import torch

    from fp8lab import distributed

    packages = ("fp8lab", "torch", "transformers", "numpy", "numba", "datasets", "safetensors")
    versions = {}
    for name in packages:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "cpus": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "processes": distributed.size(),
        "cuda": torch.cuda.get_device_name(0) if torch.cuda.is_available() else None,
        "backend": "emulated",
        "commit": _commit(),
        "packages": versions,
    }


def _commit() -> str | None:
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _try_lock(file: IO[str]) -> bool:
    """An exclusive lock that ends with the process, however it ends."""
    try:
        if sys.platform == "win32":
            import msvcrt

            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def write_marked(path: Path, mark: str, text: str) -> None:
    """Put text between `<!-- mark -->` and `<!-- end mark -->`, lines of a Markdown file; ValueError without them."""
    document = path.read_text(encoding="utf-8")
    begin, end = f"<!-- {mark} -->\n", f"<!-- end {mark} -->"
    if begin not in document or end not in document:
        raise ValueError(f"{path} has no lines {begin.strip()!r} and {end!r}; add them where the text belongs")
    before, rest = document.split(begin, 1)
    write_atomically(path, f"{before}{begin}{text}\n{end}{rest.split(end, 1)[1]}")
