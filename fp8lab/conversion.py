"""Apply one side of a PrecisionPlan to a transformers model, in place, and take it back.

    convert(model, plan, side="trainer")     every nn.Linear becomes a Float8Linear that shares its parameters; fused
                                             experts run through experts.py, attention through attention.py
    restore(model)                           and everything is what it was before

Parameters keep their identity, so an optimizer made before stays valid, and so do state dict keys, `save_pretrained`
and tied embeddings. Converting twice, or with another plan, simply applies the latest plan. The adapters of a peft
model (lora_A, lora_B) stay plain float32 linears, whether it is converted before or after `get_peft_model`; the layers
they adapt follow the plan. `Conversion.untouched` names every matrix of the decoder layers that nothing rounds.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
from torch import nn

from fp8lab import backends
from fp8lab.attention import set_attention
from fp8lab.experts import attach, detach, unsupported
from fp8lab.linear import Float8Linear, refresh
from fp8lab.names import (
    expert_tensors,
    layer_index,
    linear_modules,
    module_names,
    no_linears,
    num_decoder_layers,
    planned_names,
)
from fp8lab.operands import AttentionPrecision
from fp8lab.precision import PRESETS, Decision, PrecisionPlan, Side


@dataclass(frozen=True)
class Conversion:
    """What `convert` did: the decision for each linear and fused expert tensor, and the weights it left in float32."""

    side: Side
    backend: str
    """What runs the linears: `emulated`, `scaled_mm` or `transformer_engine`. Fused experts are always emulated."""
    backend_reason: str
    """Why that one, and with `auto` why no faster one."""
    decisions: tuple[Decision, ...]
    untouched: tuple[str, ...]
    """Parameters of decoder layers with two or more dimensions that nothing rounds: routers and adapters, for
    example."""

    @property
    def fp8(self) -> tuple[str, ...]:
        """Names of the linears and fused expert tensors that run in FP8."""
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

    backend: see backends.py; `auto` picks, and the Conversion says what and why.

    Raises, with the model as it was, RuntimeError for a backend that this machine cannot run, and ValueError for what
    is no plan, an unknown backend or one that refuses a layer, a model that is not float32 (master weights must be),
    one without decoder layers or whose decoder layers hold no nn.Linear (GPT-2's Conv1D), and for experts or attention
    that are planned in FP8 but built in a way that is not emulated.
    """
    require_plan(plan)
    layers, names = num_decoder_layers(model), planned_names(model)
    plan.require_fit(module_names(model), layers)
    if all(layer_index(name) is None for name in names):
        raise ValueError(no_linears(model))
    decisions = {name: plan.decide(name, side, layers) for name in names}
    linears, experts = dict(linear_modules(model)), _emulated_experts(model, decisions)
    planned = {name: model.get_parameter(f"{name}.weight" if name in linears else name) for name in names}
    wrong = {parameter.dtype for parameter in planned.values()} - {torch.float32}
    if wrong:
        raise ValueError(
            f"weights have dtype {wrong.pop()}; master weights must be float32: load the model with dtype=torch.float32"
        )
    of_linears = [decisions[name] for name in linears]
    runner, reason = backends.choose(backend, of_linears, list(linears.values()), side, kernels)
    new = {d.name: runner.layer(d.precision).from_linear(linears[d.name], d.precision, kernels) for d in of_linears}
    set_attention(model, plan.side(side).attention)
    for name, layer in new.items():
        _replace(model, name, layer)
    for name, module in experts.items():
        attach(module, name.rpartition(".")[2], decisions[name].precision, kernels)
    refresh(model)
    rounded = {id(planned[name]) for name in (*linears, *experts)}
    matrices = ((n, p) for n, p in model.named_parameters() if p.ndim >= 2 and layer_index(n) is not None)
    return Conversion(
        side=side,
        backend=runner.name,
        backend_reason=reason,
        decisions=tuple(decisions[name] for name in (*linears, *experts)),
        untouched=tuple(name for name, parameter in matrices if id(parameter) not in rounded),
    )


def require_plan(plan: PrecisionPlan) -> None:
    """ValueError, saying what is meant, for what is not a PrecisionPlan: a preset's name, for example."""
    if not isinstance(plan, PrecisionPlan):
        name = plan if isinstance(plan, str) and plan in PRESETS else "fp8-e2e"
        raise ValueError(f"plan is {plan!r}; it must be a PrecisionPlan, such as PrecisionPlan.preset({name!r})")


def restore(model: nn.Module) -> None:
    """Turn every Float8Linear back into an nn.Linear with the same parameters, in place; experts and attention too."""
    set_attention(model, AttentionPrecision())
    for _, module, _ in list(expert_tensors(model)):
        detach(module)
    for name, layer in list(linear_modules(model)):
        if isinstance(layer, Float8Linear):
            plain = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta")
            plain.weight, plain.bias = layer.weight, layer.bias
            plain.train(layer.training)
            _replace(model, name, plain)


def _emulated_experts(model: nn.Module, decisions: dict[str, Decision]) -> dict[str, nn.Module]:
    """Fused expert tensor -> experts module, where that can be emulated; ValueError if another is planned in FP8."""
    found = {}
    for name, module, _ in expert_tensors(model):
        reason = unsupported(module)
        if reason is None:
            found[name] = module
        elif decisions[name].precision.is_fp8:
            raise ValueError(
                f"{name} is planned in FP8, but {reason}; fp8lab emulates experts that are stored as (experts, "
                "out, in), without biases. Keep these in high precision: plan.with_bf16(modules=['mlp.experts'])"
            )
    return found


def _replace(model: nn.Module, name: str, new: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, new)
