"""Where an FP8 GEMM can run, and why not here.

`emulated` always works: operands rounded to FP8, float32 GEMM (see linear.py). The others need hardware and are probed
without touching it: a probe that crashes on a machine without a GPU helps nobody.
"""

from __future__ import annotations

import importlib.util

import torch


def support() -> dict[str, tuple[bool, str]]:
    """Backend name -> (usable for fp8lab's linears on this machine now, reason)."""
    return {
        "emulated": (True, "rounds operands and multiplies in float32; right results, no FP8 speed"),
        "scaled_mm": (False, f"{_gpu()}; fp8lab has no scaled_mm linear yet"),
        "transformer_engine": (False, f"{_package('transformer_engine')}; {_gpu()}; fp8lab has no TE linear yet"),
        "vllm": (False, f"{_package('vllm')}; fp8lab has no vLLM engine yet"),
    }


def _gpu() -> str:
    if not torch.cuda.is_available():
        return "no CUDA GPU"
    major, minor = torch.cuda.get_device_capability()
    return f"{torch.cuda.get_device_name()} has compute capability {major}.{minor} (blockwise FP8 needs 9.0)"


def _package(name: str) -> str:
    return f"package {name} {'found' if importlib.util.find_spec(name) else 'not installed'}"
