"""Where a plan's linear layers can run, and why not here.

    emulated            operands rounded to FP8 and held in float32, float32 GEMM: right results anywhere, no FP8 speed
    scaled_mm           torch's blockwise FP8 GEMMs on Hopper tensor cores (scaled_mm.py)
    transformer_engine  te.pytorch.Linear under Float8BlockScaling, trainer side only (te_linear.py)
    vllm                reported, not chosen here: vLLM runs its own model, behind rollout/vllm.py

A backend answers two questions before a weight is touched: does this machine have what it needs (`support`, probed
without touching the hardware: a probe that crashes where there is no GPU helps nobody), and does it compute what the
plan says of this layer (`refusal`). A backend asked for by name that says no is an error which says why and what to do;
`auto` takes scaled_mm where it says yes to every layer, else emulated, and reports why. Transformer Engine is never
taken unasked: it follows its own scale formula.

Everything but `emulated` is **written, never run**: no GPU was at hand.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import nn

from fp8lab import scaled_mm, te_linear
from fp8lab.linear import Float8Linear
from fp8lab.operands import LinearPrecision
from fp8lab.precision import Decision, Side


class Backend(Protocol):
    """What runs the linears of one side of a plan."""

    name: str
    does: str
    """What it can do, on a line."""

    def support(self) -> tuple[bool, str]:
        """(usable for fp8lab's linears on this machine now, reason)."""

    def refusal(self, precision: LinearPrecision, linear: nn.Linear, side: Side) -> str | None:
        """Why it cannot run this layer, or None."""

    def settle(self, precisions: Sequence[LinearPrecision]) -> None:
        """Make the process ready for these layers; ValueError if its settings contradict them."""

    def layer(self, precision: LinearPrecision) -> type[Float8Linear]:
        """The class that runs a layer of this precision."""


class Emulated:
    """Float32 GEMMs of rounded operands."""

    name = "emulated"
    does = "every format, block and rule, both sides"

    def support(self) -> tuple[bool, str]:
        return True, "rounds operands and multiplies in float32; right results, no FP8 speed"

    def refusal(self, precision: LinearPrecision, linear: nn.Linear, side: Side) -> str | None:
        return None

    def settle(self, precisions: Sequence[LinearPrecision]) -> None:
        pass

    def layer(self, precision: LinearPrecision) -> type[Float8Linear]:
        return Float8Linear


class ScaledMM(Emulated):
    """torch.nn.functional.scaled_mm on compute capability 9.0."""

    name = "scaled_mm"
    does = "E4M3 in 128x128 and 1x128 blocks, any rule, and BF16 layers; both sides"

    def support(self) -> tuple[bool, str]:
        has = hasattr(torch.nn.functional, "scaled_mm")
        missing = _hopper() or (None if has else f"torch {torch.__version__} has no scaled_mm (needs >= 2.10)")
        return missing is None, missing or "blockwise FP8 GEMMs of cuBLASLt; written, never run by us"

    def refusal(self, precision: LinearPrecision, linear: nn.Linear, side: Side) -> str | None:
        if not linear.weight.is_cuda:
            return f"its weight is on {linear.weight.device}; move the model to the GPU first"
        return scaled_mm.refusal(precision, linear.out_features, linear.in_features)

    def layer(self, precision: LinearPrecision) -> type[Float8Linear]:
        return scaled_mm.ScaledMMLinear


class TransformerEngine(ScaledMM):
    """te.pytorch.Linear; the layers that stay in BF16 take scaled_mm's BF16 path."""

    name = "transformer_engine"
    does = "the trainer side: E4M3 (E5M2 gradients) in 128x128 and 1x128 blocks, float32 or power-of-two scales"

    def support(self) -> tuple[bool, str]:
        missing = [m for m in (_hopper(), _package("transformer_engine"), _package("transformer_engine_torch")) if m]
        if missing:
            return False, f"{'; '.join(missing)}; to install it: {te_linear.INSTALL}"
        return True, "Float8BlockScaling; written, never run by us"

    def refusal(self, precision: LinearPrecision, linear: nn.Linear, side: Side) -> str | None:
        if side != "trainer":
            return "Transformer Engine runs the trainer side only; use scaled_mm or emulated for the rollout"
        if not precision.is_fp8 or not linear.weight.is_cuda:
            return super().refusal(precision, linear, side)
        return te_linear.refusal(precision, linear.out_features, linear.in_features)

    def settle(self, precisions: Sequence[LinearPrecision]) -> None:
        for rule in sorted({precision.rule for precision in precisions if precision.is_fp8}):
            te_linear.settle_environment(rule)

    def layer(self, precision: LinearPrecision) -> type[Float8Linear]:
        return te_linear.TransformerEngineLinear if precision.is_fp8 else scaled_mm.ScaledMMLinear


BACKENDS: dict[str, Backend] = {b.name: b for b in (Emulated(), ScaledMM(), TransformerEngine())}


def support() -> dict[str, tuple[bool, str]]:
    """Backend name -> (usable on this machine now, reason), vLLM's among them."""
    vllm = _package("vllm") or "package vllm found; an engine of its own: see rollout/vllm.py"
    return {name: backend.support() for name, backend in BACKENDS.items()} | {"vllm": (not _package("vllm"), vllm)}


def choose(
    name: str, decisions: Sequence[Decision], linears: Sequence[nn.Linear], side: Side, kernels: str = "default"
) -> tuple[Backend, str]:
    """The backend called `name`, or the one that `auto` picks, for these linears, and the reason.

    Raises ValueError for an unknown name and for layers or settings that the backend refuses, RuntimeError if this
    machine cannot run it.
    """
    if name == "vllm":
        raise ValueError("backend 'vllm' is an engine of its own: use fp8lab.rollout.VLLMEngine, not convert")
    if name not in ("auto", *BACKENDS):
        raise ValueError(f"backend is {name!r}; allowed: auto, {', '.join(BACKENDS)}")
    wanted = BACKENDS["scaled_mm" if name == "auto" else name]
    usable, why = wanted.support()
    problem = None if usable else f"{wanted.name} cannot run here: {why}"
    refused = problem or _refused(wanted, decisions, linears, side, kernels)
    if refused is None:
        wanted.settle([d.precision for d in decisions])
        return wanted, why
    if name == "auto":
        return BACKENDS["emulated"], refused
    error = RuntimeError if problem else ValueError
    raise error(f"{refused}; use backend='emulated', which computes the same numbers in float32, or 'auto'")


def _refused(backend: Backend, decisions, linears, side: Side, kernels: str) -> str | None:
    if kernels != "default" and backend.name != "emulated":
        return f"kernels={kernels!r} is a setting of the emulated backend, {backend.name} has its own"
    pairs = list(zip(decisions, linears, strict=True))
    found = [(d.name, backend.refusal(d.precision, linear, side)) for d, linear in pairs]
    reasons = [(name, reason) for name, reason in found if reason]
    if not reasons:
        return None
    more = f" (and {len(reasons) - 1} more layers)" if len(reasons) > 1 else ""
    return f"{backend.name} cannot run {reasons[0][0]}{more}: {reasons[0][1]}"


def _hopper() -> str | None:
    """What this machine lacks for blockwise FP8 GEMMs, or None."""
    if not torch.cuda.is_available():
        return "no CUDA GPU (needs compute capability 9.0, CUDA >= 12.9)"
    capability = torch.cuda.get_device_capability()
    if capability != (9, 0):
        return f"{torch.cuda.get_device_name()} has compute capability {capability[0]}.{capability[1]} (needs 9.0)"
    version = tuple(map(int, (torch.version.cuda or "0.0").split(".")[:2]))
    return None if version >= (12, 9) else f"torch was built for CUDA {torch.version.cuda} (needs >= 12.9)"


def _package(name: str) -> str | None:
    return None if importlib.util.find_spec(name) else f"package {name} not installed"
