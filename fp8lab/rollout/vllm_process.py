"""vLLM as a guest in this process: which version, which settings, and what it must not leave behind.

vLLM expects a process of its own. Here it shares one with the trainer, so that weights and codes can be passed and
compared as tensors. Environment variables tell it so, before it is imported. What it changes for everybody is put back
after every call: it seeds torch's, NumPy's and Python's global generators, draws from them, makes
`torch.set_num_threads` do nothing, and freezes whatever objects there are from garbage collection.

Left out: undoing its NUMA binding of memory, and its log configuration.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import os
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch

TESTED = {"0.32": "run on a CPU", "0.33": "written for, never run"}
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}
"""Set before vLLM is imported, unless set already: one process, no usage statistics, 1 GiB of KV cache, and one thread
that is not bound to a core (bound threads stall when anything else runs: 480 tokens a second, not 1,642)."""

LIVE: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()
"""Engines that are not closed -> whether their model has experts."""


def start_vllm() -> Any:
    """Import vLLM in one process and return the module; ModuleNotFoundError or RuntimeError say what is wrong."""
    if importlib.util.find_spec("vllm") is None:
        raise ModuleNotFoundError(
            "engine 'vllm' needs the package vllm, which this environment does not have: `make vllm` makes .venv-vllm "
            "with it (Linux, CPU), environment.yml has it for GPUs; or use engine 'native'"
        )
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] != "0":
        raise RuntimeError("VLLM_ENABLE_V1_MULTIPROCESSING must be 0: fp8lab reaches vLLM's model in its own process")
    import vllm

    require_tested(vllm.__version__)
    _adapt()
    return vllm


def _adapt() -> None:
    """Two places of vLLM 0.32 that take the process for their own.

    Its CPU worker looks for Triton kernels in every object of every loaded module, by vars(object).get, and dies of
    numba's llvmlite, whose library object answers any name, `__dict__` too, with a function. And an engine that is shut
    down takes the process groups, which all engines of a process share, with it.
    """
    dispatcher = importlib.import_module("vllm.triton_utils.dispatcher")

    def plain_vars(value: Any) -> Mapping[str, Any]:
        found = vars(value)
        return found if isinstance(found, Mapping) else {}

    dispatcher.vars = plain_vars  # shadows the builtin in that module only
    importlib.import_module("vllm.v1.engine.core").cleanup_dist_env_and_memory = gc.collect


def make_room(has_experts: bool) -> None:
    """Before an engine starts: process groups fit the first of the engines that live at the same time; RuntimeError if
    those have no experts and this one has."""
    if not LIVE:
        importlib.import_module("vllm.distributed.parallel_state").cleanup_dist_env_and_memory()
    elif has_experts and not any(LIVE.values()):
        raise RuntimeError(
            "vLLM cannot start a mixture of experts while a dense model's engine lives: close() that first"
        )


def require_tested(version: str) -> None:
    """RuntimeError unless fp8lab knows this vLLM: its inner interfaces change with every release."""
    if ".".join(version.split(".")[:2]) not in TESTED:
        known = ", ".join(f"{tested} ({how})" for tested, how in TESTED.items())
        raise RuntimeError(
            f"vLLM {version} found; fp8lab knows {known}. Install one of them (`make vllm`), or try: run tests/vllm "
            "after adding the version to fp8lab.rollout.vllm_process.TESTED"
        )


@contextmanager
def process_unchanged() -> Iterator[None]:
    """Around every call of vLLM: run it on OMP_NUM_THREADS threads, and put back what it changes (module's text)."""
    set_threads, threads = torch.set_num_threads, torch.get_num_threads()
    states = random.getstate(), np.random.get_state()
    set_threads(int(os.environ["OMP_NUM_THREADS"].split(",")[0]))
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        torch.set_num_threads = set_threads
        set_threads(threads)
        random.setstate(states[0])
        np.random.set_state(states[1])
        gc.unfreeze()
