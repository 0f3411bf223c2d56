"""fp8lab: see, try and understand FP8 reinforcement learning of language models on a laptop.

The package is flat; each module is one idea (see README's file map). Nothing heavy is imported here: names below are
loaded when they are first used, so `import fp8lab` needs only the standard library and makes no network call.
"""

from __future__ import annotations

import importlib

__version__ = "0.1.0"

_HOME = {
    "BlockQuantizer": "quantizers",
    "QuantizedTensor": "quantizers",
    "ScaleRule": "quantizers",
    "quantization_error": "quantizers",
    "PrecisionPlan": "precision",
    "Float8Linear": "linear",
    "convert": "conversion",
    "restore": "conversion",
    "NativeEngine": "rollout",
    "SamplingParams": "rollout",
    "Rollout": "rollout",
    "Trainer": "trainer",
    "GRPOConfig": "grpo",
    "ExperimentConfig": "experiment",
    "run": "experiment",
    "resume": "experiment",
    "load_task": "tasks",
}
_MODULES = ("conversion", "corrections", "diagnostics", "experiment", "formats", "grpo", "linear", "precision")
_MODULES += ("quantizers", "rollout", "runlog", "tasks", "trainer", "alarms", "attribution", "diagnosis", "frontier")
__all__ = ["__version__", *_HOME]


def __getattr__(name: str):
    if name in _HOME:
        return getattr(importlib.import_module(f"fp8lab.{_HOME[name]}"), name)
    if name in _MODULES:
        return importlib.import_module(f"fp8lab.{name}")
    raise AttributeError(f"module 'fp8lab' has no attribute {name!r}; it has {', '.join(sorted(_HOME))}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME, *_MODULES})
