"""Apply one side of a PrecisionPlan to a transformers model, in place, and take it back.

    convert(model, plan, side="trainer")     every nn.Linear becomes a Float8Linear that shares its parameters
    restore(model)                           and an nn.Linear again

Parameters keep their identity, so an optimizer made before stays valid, and so do state dict keys, `save_pretrained`
and tied embeddings. Converting twice, or with another plan, simply applies the latest plan. Modules that are no
nn.Linear are left alone, among them the fused expert tensors of MoE models, which `Conversion.untouched` names.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
from torch import nn

from fp8lab.linear import Float8Linear, refresh
from fp8lab.precision import Decision, PrecisionPlan, Side, linear_modules, num_decoder_layers

BACKENDS = ("auto", "emulated")


@dataclass(frozen=True)
class Conversion:
    """What `convert` did: the decision for each linear, and the weights it left in float32."""

    side: Side
    backend: str
    decisions: tuple[Decision, ...]
    untouched: tuple[str, ...]
    """Parameters of decoder layers with two or more dimensions that belong to no linear: fused experts, for example."""

    @property
    def fp8(self) -> tuple[str, ...]:
        """Names of the linears that run in FP8."""
        return tuple(d.name for d in self.decisions if d.precision.is_fp8)

    def __repr__(self) -> str:
        counts = Counter(str(d.precision) for d in self.decisions)
        parts = [f"{n} x {precision}" for precision, n in counts.items()]
        parts += [f"{len(self.untouched)} tensors untouched (float32)"] if self.untouched else []
        return f"Conversion({self.side}, {self.backend}: {'; '.join(parts)})"


def convert(
    model: nn.Module, plan: PrecisionPlan, *, side: Side, backend: str = "auto", kernels: str = "default"
) -> Conversion:
    """Put one side of `plan` on `model`, in place; see the module's text.

    Raises ValueError for an unknown backend, a model that is not float32 (master weights must be), one without decoder
    layers, or one whose decoder layers hold no nn.Linear (GPT-2's Conv1D).
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r}; allowed: {', '.join(BACKENDS)}")
    layers = num_decoder_layers(model)
    linears = list(linear_modules(model))
    plan.require_fit([name for name, _ in linears], layers)
    decisions = tuple(plan.decide(name, side, layers) for name, _ in linears)
    if not any(d.precision.output == "bf16" for d in decisions):
        kinds = sorted({type(m).__name__ for m in model.modules() if "Conv1D" in type(m).__name__})
        raise ValueError(
            f"{type(model).__name__} has no nn.Linear in its decoder layers{f' (found {kinds[0]})' if kinds else ''}; "
            "fp8lab quantizes nn.Linear: use a Llama-, Qwen-, Mistral- or Gemma-like model"
        )
    wrong = {m.weight.dtype for _, m in linears} - {torch.float32}
    if wrong:
        raise ValueError(
            f"weights have dtype {wrong.pop()}; master weights must be float32: load the model with dtype=torch.float32"
        )
    for decision, (name, linear) in zip(decisions, linears, strict=True):
        _replace(model, name, Float8Linear.from_linear(linear, decision.precision, kernels))
    refresh(model)
    return Conversion(side, "emulated", decisions, tuple(_untouched(model)))


def restore(model: nn.Module) -> None:
    """Turn every Float8Linear back into an nn.Linear with the same parameters, in place."""
    for name, layer in list(linear_modules(model)):
        if isinstance(layer, Float8Linear):
            plain = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta")
            plain.weight, plain.bias = layer.weight, layer.bias
            plain.train(layer.training)
            _replace(model, name, plain)


def _replace(model: nn.Module, name: str, new: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, new)


def _untouched(model: nn.Module) -> list[str]:
    linear_weights = {f"{name}.weight" for name, _ in linear_modules(model)}
    return [n for n, p in model.named_parameters() if p.ndim >= 2 and ".layers." in n and n not in linear_weights]
