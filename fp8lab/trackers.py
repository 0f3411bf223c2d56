"""Trackers: the metrics of a run shown elsewhere too, while it goes on; none by default.

    run(config, "runs/a", tracker="tensorboard")      or:  python -m fp8lab run RECIPE --tracker tensorboard
    resume("runs/a")                                  goes on in the same run of the same tracker

    tensorboard   event files in the run directory           pip install tensorboard
    trackio       a local database (TRACKIO_DIR)             pip install trackio
    wandb         Weights & Biases (offline: WANDB_MODE)     pip install wandb

metrics.jsonl stays the record, and a tracker a copy of its numbers under the same names. A tracker that is not
installed is an error before the run begins; one that fails later (no network, no login, a full disk) is one warning,
and the run goes on without it. Steps that a resumed run takes again are not sent twice; what a run was killed in
between logging and sending is missing there. Left out: samples, checkpoints and plots, and metrics of the machine.
"""

from __future__ import annotations

import json
import secrets
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from importlib.util import find_spec
from typing import Any

from fp8lab.checks import require_choice
from fp8lab.runlog import RunLog, write_atomically

Callback = Callable[[dict[str, Any]], None]
Tracker = tuple[Callable[[int, dict[str, float]], None], Callable[[], None]]
"""What sends the numbers of a step, and what ends."""
FILE, PROJECT = "tracker.json", "fp8lab"


def tensorboard(log: RunLog, run: str) -> Tracker:
    """Event files in the folder `tensorboard` of the run directory."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(log.folder / "tensorboard"))

    def send(step: int, numbers: dict[str, float]) -> None:
        for name, value in numbers.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return send, writer.close


def trackio(log: RunLog, run: str) -> Tracker:
    """A run of the project `fp8lab` in trackio's database."""
    import trackio

    quiet = {"embed": False, "auto_log_cpu": False, "auto_log_gpu": False}
    with redirect_stdout(sys.stderr):  # it greets where our results are printed
        trackio.init(project=PROJECT, name=run, config=log.config, resume="allow", **quiet)
    return lambda step, numbers: trackio.log(numbers, step=step), trackio.finish


def wandb(log: RunLog, run: str) -> Tracker:
    """A run of the project `fp8lab`, kept in the run directory until it is sent."""
    import wandb

    now = wandb.init(project=PROJECT, name=run, id=run, resume="allow", config=log.config, dir=str(log.folder))
    return lambda step, numbers: now.log(numbers, step=step), now.finish


TRACKERS = {"tensorboard": tensorboard, "trackio": trackio, "wandb": wandb}


def require_tracker(name: str | None) -> None:
    """ValueError for an unknown tracker, ImportError with what to install for a missing one; None is no tracker."""
    if name is None:
        return
    require_choice("tracker", name, tuple(TRACKERS))
    if find_spec(name) is None:
        raise ImportError(f"tracker {name!r} is not installed: pip install {name}")


def begin(log: RunLog, name: str | None) -> None:
    """Note the tracker of a new run, and what the run is called there: its folder's name and six random digits."""
    if name is not None:
        about = {"tracker": name, "run": f"{log.folder.resolve().name}-{secrets.token_hex(3)}"}
        write_atomically(log.folder / FILE, json.dumps(about))


@contextmanager
def followed(log: RunLog, on_step: Callback | None) -> Iterator[Callback | None]:
    """on_step, and with it the tracker that `begin` noted, if any: called with every row after the last that is logged
    now."""
    path = log.folder / FILE
    if not path.is_file():
        yield on_step
        return
    about, rows = json.loads(path.read_text(encoding="utf-8")), log.rows()
    sent = rows[-1]["step"] if rows else -1
    tracker: Tracker | None = None

    def attempt(do: Callable[..., Any], *arguments: Any) -> Any:
        nonlocal tracker
        try:
            return do(*arguments)
        except Exception as error:  # whatever it is, it is not the run's
            tracker = None
            what = f"tracker {about['tracker']} failed, the run goes on without it: {type(error).__name__}: {error}"
            warnings.warn(what, stacklevel=2)

    def step(row: dict[str, Any]) -> None:
        if on_step is not None:
            on_step(row)
        if tracker is not None and row["step"] > sent:
            numbers = {name: value for name, value in row.items() if isinstance(value, (int, float)) and name != "step"}
            attempt(tracker[0], row["step"], numbers)

    tracker = attempt(TRACKERS[about["tracker"]], log, about["run"])
    try:
        yield step
    finally:
        if tracker is not None:
            with redirect_stdout(sys.stderr):
                attempt(tracker[1])
