"""Which layer's FP8 gradient bends the update? Leave-one-in over the trainer's gradient operands.

`attribution.py` asks what makes the gap between the engines, to which the format of gradients adds nothing: they are
rounded after the log-probs are known. What they change is the update. So here G is the gradient of all weights with
every operand in BF16, G_u that with the gradient operand of unit u rounded as the plan says (in both GEMMs that take
it: grad_input, which hands the error on to the layers below, and grad_weight), and

    gradient_error    |G_u - G| / |G| over all weights          what u does to the whole update
    weight_error      the same over u's own weights             what u does to its own part
    cosine            G_u . G / (|G_u| |G|)                     is it still the same direction

of the policy gradient sum_i A_i log p_i / tokens with an advantage A per sequence.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import nn

from fp8lab.attribution import Progress, planned_linears, require_known, sample_tokens, units_of
from fp8lab.conversion import convert
from fp8lab.linear import Float8Linear
from fp8lab.names import layer_index
from fp8lab.operands import FP8
from fp8lab.precision import PrecisionPlan
from fp8lab.rollout.engine import Rollout
from fp8lab.scoring import SCORED_TOKENS, batches, changed, next_logprobs, shared_copy

if TYPE_CHECKING:
    import pandas


def attribute_gradient(
    model: nn.Module,
    plan: PrecisionPlan,
    sample: Rollout | torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    advantages: torch.Tensor | None = None,
    by: str = "module",
    on_progress: Progress | None = None,
) -> pandas.DataFrame:
    """One row per unit whose gradient operand `plan` rounds to FP8 on the trainer side; `model` is left as it is.

    sample, mask, by, on_progress as in `attribution.attribute`; advantages (B,), default +1 and -1 in turn. Columns:
    `name`, `layer`, `side`, `tensor` ("gradient"), `format`, `gradient_error`, `weight_error`, `cosine`, most error
    first. Exact for this sample: a forward and backward a unit, no estimate. ValueError if no gradient is FP8, or for
    arguments that do not fit.
    """
    import pandas

    require_known(by=[by])
    tokens, mask, temperature = sample_tokens(sample, mask)
    advantages = 1.0 - torch.arange(len(tokens)) % 2 * 2 if advantages is None else advantages
    if advantages.shape != tokens.shape[:1]:
        raise ValueError(f"advantages have shape {tuple(advantages.shape)}; there must be {len(tokens)}")
    signal = torch.where(mask, advantages[:, None], 0.0) / mask.sum().clamp(min=1)
    planned = {n: p for n, p in planned_linears(model, plan, "trainer").items() if p.gradient in FP8}
    if not planned:
        raise ValueError(f"plan {plan.name!r} has no FP8 gradient on the trainer side; nothing to attribute")
    work = shared_copy(model)
    convert(work, PrecisionPlan.preset("bf16"), side="trainer", backend="emulated")
    layers = {name: layer for name, layer in work.named_modules() if isinstance(layer, Float8Linear)}
    weights = {name: weight.requires_grad_() for name, weight in work.named_parameters()}

    def gradient() -> dict[str, torch.Tensor]:
        total = {name: torch.zeros_like(weight, dtype=torch.float64) for name, weight in weights.items()}
        for rows, signs in zip(*(batches(x, SCORED_TOKENS) for x in (tokens, signal)), strict=True):
            logprobs = next_logprobs(work, rows, temperature, input_ids=rows[:, :-1])
            loss = -(logprobs * signs[:, 1:]).sum()
            for sums, part in zip(total.values(), torch.autograd.grad(loss, [*weights.values()]), strict=True):
                sums += part
        return total

    rows, units, exact = [], units_of(list(planned), by), gradient()
    size = _norm(exact.values())
    for number, (unit, members) in enumerate(units.items(), start=1):
        only = {name: dataclasses.replace(planned[name], weight="bf16", activation="bf16") for name in members}
        with changed(layers, only):
            found = gradient()
        own = [f"{name}.weight" for name in members]
        differences = {name: found[name] - exact[name] for name in exact}
        product = sum((found[name] * exact[name]).sum() for name in exact)
        rows.append(
            {
                "name": unit,
                "layer": layer_index(members[0]),
                "side": "trainer",
                "tensor": "gradient",
                "format": planned[members[0]].gradient,
                "gradient_error": (_norm(differences.values()) / size).item(),
                "weight_error": (_norm(differences[n] for n in own) / _norm(exact[n] for n in own)).item(),
                "cosine": (product / (_norm(found.values()) * size)).item(),
            }
        )
        if on_progress is not None:
            on_progress(number, len(units))
    return pandas.DataFrame(rows).sort_values("gradient_error", ascending=False, ignore_index=True)


def _norm(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    return torch.stack([tensor.square().sum() for tensor in tensors]).sum().sqrt()
