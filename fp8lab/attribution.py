"""Which layer makes the gap between the engines, and what would it cost to keep it in BF16?

g and t are the log-probs of the same tokens under two versions of a model, d = t - g. Everything is paired: the same
tokens, the same weights, one difference at a time.

    leave-one-in     only this unit is FP8, all else is BF16;  d against the model all in BF16
    leave-one-out    all as the plan says, only this unit is BF16;  how much the gap to the *other side* falls
    first order      no sweep: d of a unit is about  sum over its output y of  (d log p / d y) * (error of y)

A unit is a linear module or all of a decoder layer; its weight, its activation, or both are quantized. One backward
pass gives the gradient of a *sum* of log-probs only, in which the d of different tokens could cancel. So the sum takes
random signs s_i = +-1: the expected square of sum_i s_i d_i over a sequence is sum_i d_i^2 (Hutchinson's trick, one
sample a sequence and probe; n of them leave an error of about sqrt(2 / n)). As k3 is about d^2 / 2, the estimate
predicts k3 in its own units, and with a Gaussian in mind mean |d| as well. In a decoder layer, linears that read the
same input share its error: their sums add up first. Those of different inputs round independently, so their squares
add, and that estimate is the less noisy one. Cost: one forward, a backward a probe, and each linear once more from its
own input. The exact sweep costs a forward a unit, from the unit on. `rank_agreement` says how well the two agree
(Spearman); data/evidence/frontier.json has it for two models.

Between sides that round alike (plan `fp8-e2e`) the gap is zero by construction and leave-one-out is negative: keeping a
layer in BF16 on one side *makes* a gap. Intervals are percentile bootstraps over sequences. The KV cache and attention
have a sweep of their own, `attribute_kv`. Left out: fused experts (`coverage.planned_flops` has their FLOPs);
gradients' precision, which changes the update and not the gap.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import nn

from fp8lab.attention import attention_modules, attention_of, observed
from fp8lab.conversion import convert
from fp8lab.coverage import planned_flops
from fp8lab.diagnostics import k3
from fp8lab.linear import Float8Linear, float8_layers
from fp8lab.names import layer_index, linear_modules, module_names, num_decoder_layers
from fp8lab.operands import BF16_LINEAR, LinearPrecision
from fp8lab.precision import PrecisionPlan, Side
from fp8lab.quantizers import BlockQuantizer, quantization_error
from fp8lab.rollout.engine import Rollout
from fp8lab.scoring import Replay, batches, changed, next_logprobs, put_side, score_side, shared_copy
from fp8lab.sequence_metrics import interval_over_sequences

if TYPE_CHECKING:
    import pandas

TENSORS = ("weight+activation", "weight", "activation")
UNITS = ("module", "layer")
SWEEPS = ("in", "out")
RECORDED_TOKENS = 512
"""Tokens in one batch of `first_order`, which holds inputs, outputs and gradients of all linears (some 2 MB a token for
a model of 135 M parameters)."""
OUTLIER = (6.0, 0.06)
"""An outlier channel has magnitude 6 or more in at least 6 % of the tokens: LLM.int8(), arXiv:2208.07339."""
Progress = Callable[[int, int], None]


def attribute(
    model: nn.Module,
    plan: PrecisionPlan,
    sample: Rollout | torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    side: Side = "rollout",
    by: str = "module",
    tensors: Sequence[str] = ("weight+activation",),
    sweeps: Sequence[str] = ("in", "out"),
    probes: int = 1,
    seed: int = 0,
    on_progress: Progress | None = None,
) -> pandas.DataFrame:
    """One row per unit and tensor of what `plan` makes FP8 on `side`; `model` is left as it is.

    sample: a Rollout, or tokens (B, T) int64, right-padded, with `mask` (B, T) bool on the tokens that count (default:
    all but the first column). by: `module` or `layer`. tensors: of TENSORS. sweeps: `in`, `out`, both or none.
    probes: random sign vectors, one backward pass each (their gradients are held together). on_progress(done, total)
    counts forwards of the sweeps.

    Columns: `name`, `layer`, `side`, `tensor`; `flops_share` of all FLOPs that the plan makes FP8 on the side, fused
    experts included; `first_order_mean_abs` and `first_order_k3`, `in_mean_abs` and `in_k3`, and `out_...`, which is
    what is *removed*, all with `_low` and `_high` (95 %); per module also `weight_` and `activation_` `sqnr_db`,
    `flushed` (share of non-zeros that became 0), `saturated` (share at the largest code; each block's largest element
    is always there) and `outlier_channels` of the activation.
    ValueError if nothing of the side is FP8, or for arguments that are not as said here.
    """
    import pandas

    _check(by, tensors, sweeps, probes)
    tokens, mask, temperature = sample_tokens(sample, mask)
    planned = planned_linears(model, plan, side)
    if not planned:
        raise ValueError(
            f"plan {plan.name!r} has no FP8 linear on the {side} side; nothing to attribute (fused experts never are)"
        )
    flops = planned_flops(plan, model, side)
    units, work = units_of(list(planned), by), shared_copy(model)
    convert(work, PrecisionPlan.preset("bf16"), side=side, backend="emulated")
    layers = {name: layer for name, layer in _linears(work) if name in planned}
    effects, readers, health = first_order(work, layers, planned, tokens, mask, temperature, tensors, probes, seed)
    rows = []
    for unit, members in units.items():
        for tensor in tensors:
            row = {"name": unit, "layer": layer_index(members[0]), "side": side, "tensor": tensor}
            row["flops_share"] = sum(flops[m] for m in members) / sum(flops.values())
            alike: dict[str, torch.Tensor] = {}
            for member in members:
                alike[readers[member]] = alike.get(readers[member], 0) + effects[member, tensor]
            rows.append(row | _estimate(torch.stack(list(alike.values())), mask))
    total, done = len(rows) * len(sweeps), 0
    for sweep in sweeps:
        reference, start = _sweep_start(work, plan, side, sweep, tokens, temperature)
        gap = start.logprobs - reference
        for row in rows:
            changes = _changes(planned, units[row["name"]], row["tensor"], sweep)
            with changed(dict(_linears(work)), changes):
                d = start.since(row["layer"]) - reference
            row |= _effect(sweep, d, gap, mask)
            done += 1
            if on_progress is not None:
                on_progress(done, total)
    if by == "module":
        rows = [row | health[row["name"]] for row in rows]
    return pandas.DataFrame(rows)


def attribute_kv(
    model: nn.Module,
    plan: PrecisionPlan,
    sample: Rollout | torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    side: Side = "rollout",
) -> pandas.DataFrame:
    """Leave-one-in for the FP8 KV cache and attention of `plan`: one row a decoder layer, all linears in BF16.

    Arguments and columns as in `attribute`: `name`, `layer`, `side`, `tensor` ("kv"), `in_mean_abs` and `in_k3` with
    `_low` and `_high`. Scales are calibrated on the sample. ValueError if that side's attention is not FP8.
    """
    import pandas

    precision = plan.side(side).attention
    if not precision.is_fp8:
        raise ValueError(f"plan {plan.name!r} has bf16 attention on the {side} side; nothing to attribute")
    tokens, mask, temperature = sample_tokens(sample, mask)
    work, bf16 = shared_copy(model), PrecisionPlan.preset("bf16")
    only_kv = dataclasses.replace(bf16.side(side), attention=precision)
    put_side(work, dataclasses.replace(bf16, **{side: only_kv}), side, tokens)
    rows, names = [], {module: name for name, module in work.named_modules()}
    with observed(work):  # attention as it is without FP8
        state, start = attention_of(work), Replay(work, tokens, temperature)
        for layer, module in enumerate(sorted(attention_modules(work), key=lambda module: module.layer_idx)):
            module.fp8_attention = copy.copy(state)
            module.fp8_attention.observer = None
            d = start.since(layer) - start.logprobs
            module.fp8_attention = state
            row = {"name": names[module].rpartition(".")[0], "layer": layer, "side": side, "tensor": "kv"}
            rows.append(row | _effect("in", d, d, mask))
    return pandas.DataFrame(rows)


def rank_agreement(
    table: pandas.DataFrame, column: str = "k3", *, resamples: int = 2000, seed: int = 0
) -> tuple[float, float, float]:
    """Spearman correlation of `first_order_<column>` with `in_<column>` over the rows, with its 95 % interval
    (percentile bootstrap over units)."""
    from scipy.stats import rankdata

    pair = torch.tensor(table[[f"first_order_{column}", f"in_{column}"]].to_numpy().T)

    def spearman(values: torch.Tensor) -> torch.Tensor:
        """(2, R, n) -> (R,): the correlation of ranks."""
        ranks = torch.from_numpy(rankdata(values.numpy(), axis=-1))
        ranks = ranks - ranks.mean(-1, keepdim=True)
        return ranks.prod(0).sum(-1) / ranks.square().sum(-1).prod(0).sqrt()

    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(pair.shape[1], (resamples, pair.shape[1]), generator=generator)
    values = spearman(pair[:, drawn]).sort().values
    low, high = values[int(0.025 * (resamples - 1))], values[int(0.975 * (resamples - 1))]
    return spearman(pair[:, None]).item(), low.item(), high.item()


def first_order(
    model: nn.Module,
    layers: dict[str, Float8Linear],
    precisions: dict[str, LinearPrecision],
    tokens: torch.Tensor,
    mask: torch.Tensor,
    temperature: float,
    tensors: Sequence[str],
    probes: int,
    seed: int,
) -> tuple[dict[tuple[str, str], torch.Tensor], dict[str, str], dict[str, dict[str, float]]]:
    """(module, tensor) -> sums (probes, B) over a sequence of s_i d_i to first order; module -> the first module that
    reads the same input; and module -> quantization health, from the first batch. `model` is in BF16, `layers` are its
    linears, `precisions` what they would become."""
    generator, sums, health = torch.Generator().manual_seed(seed), {}, {}
    for rows, use in zip(*(batches(x, RECORDED_TOKENS) for x in (tokens, mask)), strict=True):
        inputs, outputs = {}, {}
        with _recorded(layers, inputs, outputs):
            embedded = model.get_input_embeddings()(rows[:, :-1]).detach().requires_grad_()
            logprobs = next_logprobs(model, rows, temperature, inputs_embeds=embedded)
        gradients = []
        for probe in range(probes):
            signs = torch.randint(0, 2, logprobs.shape, generator=generator) * 2.0 - 1
            total = torch.where(use[:, 1:], logprobs * signs, 0.0).sum()
            wanted = [outputs[name] for name in layers]
            gradients.append(torch.autograd.grad(total, wanted, retain_graph=probe + 1 < probes))
        for i, (name, layer) in enumerate(layers.items()):
            for tensor in tensors:
                with changed({name: layer}, {name: _only(precisions[name], tensor)}), torch.no_grad():
                    error = layer(inputs[name]) - outputs[name]
                found = [(g[i] * error).flatten(1).sum(1) for g in gradients]
                sums.setdefault((name, tensor), []).append(torch.stack(found).double())
        for name, layer in layers.items():
            if name not in health:
                real = inputs[name].flatten(0, -2)[(use[:, 1:] | use[:, :-1]).flatten()]
                health[name] = quantization_health(layer.weight, real, precisions[name])
    first: dict[int, str] = {}
    readers = {name: first.setdefault(inputs[name].data_ptr(), name) for name in layers}
    return {key: torch.cat(parts, dim=1) for key, parts in sums.items()}, readers, health


def quantization_health(weight: torch.Tensor, x: torch.Tensor, precision: LinearPrecision) -> dict[str, float]:
    """How well a weight (N, K) and an activation (M, K) survive the formats of `precision`; names as in `attribute`."""
    found = {}
    for what, value, fmt, block in (
        ("weight", weight.detach(), precision.weight, precision.weight_block),
        ("activation", x.detach(), precision.activation, (1, precision.group)),
    ):
        if fmt != "bf16":
            packed = BlockQuantizer(block, fmt, precision.rule).quantize(value)
            error = quantization_error(value, packed)
            found |= {f"{what}_{key}": error[key] for key in ("sqnr_db", "flushed", "saturated")}
    size, share = OUTLIER
    found["outlier_channels"] = int(((x.abs() >= size).float().mean(0) >= share).sum())
    return found


def _linears(model: nn.Module) -> Iterator[tuple[str, Float8Linear]]:
    return ((name, layer) for name, layer in float8_layers(model) if isinstance(layer, Float8Linear))


def planned_linears(model: nn.Module, plan: PrecisionPlan, side: Side) -> dict[str, LinearPrecision]:
    """What a plan makes of each linear that has an FP8 operand on that side; ValueError if the plan does not fit."""
    number = num_decoder_layers(model)
    plan.require_fit(module_names(model), number)
    decided = {name: plan.decide(name, side, number).precision for name, _ in linear_modules(model)}
    return {name: precision for name, precision in decided.items() if precision.is_fp8}


def units_of(names: list[str], by: str) -> dict[str, list[str]]:
    """Name of each module, or of each decoder layer -> the modules it has of `names`."""
    if by == "module":
        return {name: [name] for name in names}
    units: dict[str, list[str]] = {}
    for name in names:
        parts = name.split(".")
        number = str(layer_index(name))
        units.setdefault(".".join(parts[: parts.index(number) + 1]), []).append(name)
    return units


def _only(precision: LinearPrecision, tensor: str) -> LinearPrecision:
    """The precision with the other operand in BF16."""
    other = {"weight": {"activation": "bf16"}, "activation": {"weight": "bf16"}}.get(tensor, {})
    return dataclasses.replace(precision, **other)


def _changes(planned, members: list[str], tensor: str, sweep: str) -> dict[str, LinearPrecision]:
    if sweep == "in":
        return {name: _only(planned[name], tensor) for name in members}
    rest = {"weight": "activation", "activation": "weight"}.get(tensor)  # what stays FP8 of the unit
    return {name: _only(planned[name], rest) if rest else BF16_LINEAR for name in members}


@contextmanager
def _recorded(layers: dict[str, Float8Linear], inputs: dict, outputs: dict) -> Iterator[None]:
    def hook(name: str):
        def record(module, arguments, output):
            inputs[name], outputs[name] = arguments[0].detach(), output

        return record

    handles = [layer.register_forward_hook(hook(name)) for name, layer in layers.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def other_side(side: Side) -> Side:
    """The side that `side` is compared with."""
    return "trainer" if side == "rollout" else "rollout"


def _sweep_start(work, plan, side: Side, sweep: str, tokens, temperature) -> tuple[torch.Tensor, Replay]:
    """(log-probs to compare with, the model before any unit is changed); `work` is left as the sweep needs it."""
    reference = None if sweep == "in" else score_side(work, plan, other_side(side), tokens, temperature)
    put_side(work, PrecisionPlan.preset("bf16") if sweep == "in" else plan, side, tokens)
    start = Replay(work, tokens, temperature)
    return start.logprobs if reference is None else reference, start


def _estimate(sums: torch.Tensor, mask: torch.Tensor) -> dict[str, float]:
    """Mean |d| and k3 from sums (inputs, probes, B) of s_i d_i over sequences of n tokens, independent between inputs:
    E sum^2 = n E d^2, and E |sum| = sqrt(n) E |d| for Gaussian d, whatever the signs of the inputs' parts."""
    count = mask.sum(1).double()
    signs = torch.randint(0, 2, (16, len(sums)), generator=torch.Generator().manual_seed(0)) * 2.0 - 1
    total = torch.einsum("ri,ipb->rpb", signs.double(), sums)
    found = {
        "first_order_mean_abs": total.abs().mean((0, 1)) / count.sqrt(),
        "first_order_k3": sums.square().sum(0).mean(0) / 2 / count,
    }
    columns = (interval_columns(name, value[:, None].expand(mask.shape), mask) for name, value in found.items())
    return {name: value for found in columns for name, value in found.items()}


def _effect(sweep: str, d: torch.Tensor, gap: torch.Tensor, mask: torch.Tensor) -> dict[str, float]:
    if sweep == "in":
        return interval_columns("in_mean_abs", d.abs(), mask) | interval_columns("in_k3", k3(-d), mask)
    removed = gap.abs() - d.abs()
    return interval_columns("out_mean_abs", removed, mask) | interval_columns("out_k3", k3(-gap) - k3(-d), mask)


def interval_columns(name: str, values: torch.Tensor, mask: torch.Tensor) -> dict[str, float]:
    """The mean over tokens as `name`, its interval as `name_low` and `name_high`."""
    mean, low, high = interval_over_sequences(values, mask)
    return {name: mean, f"{name}_low": low, f"{name}_high": high}


def sample_tokens(
    sample: Rollout | torch.Tensor, mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, float]:
    """(tokens, mask, temperature) of what `attribute` takes; ValueError for shapes that do not fit."""
    if isinstance(sample, Rollout):
        return sample.tokens, sample.mask, sample.sampling.temperature
    if sample.ndim != 2 or sample.shape[1] < 2:
        raise ValueError(f"tokens have shape {tuple(sample.shape)}; they must be (B, T) with T >= 2")
    mask = torch.ones_like(sample, dtype=torch.bool) if mask is None else mask.clone()
    if mask.shape != sample.shape:
        raise ValueError(f"mask has shape {tuple(mask.shape)}, tokens {tuple(sample.shape)}; they must agree")
    mask[:, 0] = False  # nothing predicts the first token
    return sample, mask, 1.0


def require_known(**given: Sequence[str]) -> None:
    """ValueError for a `by`, `tensors` or `sweeps` with a value that is not allowed."""
    for name, values in given.items():
        allowed = {"by": UNITS, "tensors": TENSORS, "sweeps": SWEEPS}[name]
        if wrong := [value for value in values if value not in allowed]:
            raise ValueError(f"{name} has {wrong[0]!r}; allowed: {', '.join(allowed)}")


def _check(by: str, tensors: Sequence[str], sweeps: Sequence[str], probes: int) -> None:
    require_known(by=[by], tensors=tensors, sweeps=sweeps)
    if isinstance(tensors, str) or not tensors or probes < 1:
        raise ValueError(f"tensors is {tensors!r} and probes {probes}; give a list of tensors and at least one probe")
