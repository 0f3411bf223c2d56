"""Which layer makes the gap between the engines, and what would it cost to keep it in BF16?

g and t are the log-probs of the same tokens under two versions of a model, d = t - g. Everything is paired: the same
tokens, the same weights, one difference at a time.

    leave-one-in     only this unit is FP8, all else is BF16;  d against the model all in BF16
    leave-one-out    all as the plan says, only this unit is BF16;  how much the gap to the *other side* falls
    first order      no sweep: d of a unit is about  sum over its output y of  (d log p / d y) * (error of y)

A unit is a linear module or all of a decoder layer; its weight, its activation, or both are quantized. One backward
pass gives the gradient of a *sum* of log-probs only, in which the d of different tokens could cancel. So the sum takes
random signs s_i = +-1: the expected square of sum_i s_i d_i over a sequence is sum_i d_i^2 (Hutchinson's trick, one
sample a sequence). As k3 is about d^2 / 2, the estimate predicts k3 in its own units, and with a Gaussian in mind mean
|d| as well. Cost: one forward, one backward, and each unit once more from its own input. The exact sweep costs a whole
forward a unit. `rank_agreement` says how well the two agree (Spearman).

Between sides that round alike (plan `fp8-e2e`) the gap is zero by construction and leave-one-out is negative: keeping a
layer in BF16 on one side *makes* a gap. Intervals are percentile bootstraps over sequences. Left out: fused experts,
KV cache and attention (rows of linears only); gradients' precision, which changes the update and not the gap.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import nn

from fp8lab.conversion import convert
from fp8lab.diagnostics import k3
from fp8lab.formats import round_bf16
from fp8lab.linear import Float8Linear, float8_layers, matmul, quantize_weight, round_operand
from fp8lab.names import layer_index
from fp8lab.operands import BF16_LINEAR, LinearPrecision
from fp8lab.precision import PrecisionPlan, Side
from fp8lab.quantizers import BlockQuantizer, quantization_error
from fp8lab.rollout.engine import Rollout
from fp8lab.sequence_metrics import interval_over_sequences

if TYPE_CHECKING:
    import pandas

TENSORS = ("weight+activation", "weight", "activation")
UNITS = ("module", "layer")
SCORED_TOKENS, RECORDED_TOKENS = 2048, 512
"""Tokens in one batch: only scored, or held with all inputs, outputs and gradients of all linears (about 2 MB a token
for a model of 135 M parameters)."""
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

    Columns: `name`, `layer`, `side`, `tensor`; `flops_share` among the units; `first_order_mean_abs` and
    `first_order_k3`; `in_mean_abs` and `in_k3` with `_low` and `_high` (95 %), and `out_...`: what is *removed*; per
    module also `weight_` and `activation_` `sqnr_db`, `flushed` (share of non-zeros that became 0), `saturated` (share
    at the largest code; each block's largest element is always there) and `outlier_channels` of the activation.
    ValueError if nothing of the side is FP8, or for arguments that are not as said here.
    """
    import pandas

    _check(by, tensors, sweeps, probes)
    tokens, mask, temperature = sample_tokens(sample, mask)
    work = shared_copy(model)
    convert(work, plan, side=side, backend="emulated")
    planned = {n: layer.precision for n, layer in _linears(work) if layer.precision.is_fp8}
    if not planned:
        raise ValueError(f"plan {plan.name!r} has no FP8 linear on the {side} side; nothing to attribute")
    units = _units(list(planned), by)
    convert(work, PrecisionPlan.preset("bf16"), side=side, backend="emulated")
    layers = {name: layer for name, layer in _linears(work) if name in planned}
    effects, health = first_order(work, layers, planned, tokens, mask, temperature, tensors, probes, seed)
    flops = {name: 2.0 * layer.weight.numel() for name, layer in layers.items()}
    rows = []
    for unit, members in units.items():
        for tensor in tensors:
            row = {"name": unit, "layer": layer_index(members[0]), "side": side, "tensor": tensor}
            row["flops_share"] = sum(flops[m] for m in members) / sum(flops.values())
            rows.append(row | _estimate(sum(effects[m, tensor] for m in members), mask))
    total, done = len(rows) * len(sweeps), 0
    for sweep in sweeps:
        reference, start = _sweep_start(work, plan, side, sweep, tokens, temperature)
        gap = start - reference
        for row in rows:
            changes = _changes(planned, units[row["name"]], row["tensor"], sweep)
            with changed(dict(_linears(work)), changes):
                d = token_logprobs(work, tokens, temperature) - reference
            row |= _effect(sweep, d, gap, mask)
            done += 1
            if on_progress is not None:
                on_progress(done, total)
    if by == "module":
        rows = [row | health[row["name"]] for row in rows]
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


def shared_copy(model: nn.Module) -> nn.Module:
    """A copy of the model's modules around the very same weights, frozen: it can be converted, the model stays."""
    memo = {id(p): nn.Parameter(p.detach(), requires_grad=False) for p in model.parameters()}
    return copy.deepcopy(model, memo).eval()


@torch.no_grad()
def token_logprobs(model: nn.Module, tokens: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """Log-probs (B, T) float64 of right-padded tokens (B, T), each in the column of its token; 0 in the first."""
    parts = [_logprobs(model, rows, temperature, input_ids=rows[:, :-1]) for rows in _batches(tokens, SCORED_TOKENS)]
    return nn.functional.pad(torch.cat(parts).double(), (1, 0))


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
) -> tuple[dict[tuple[str, str], torch.Tensor], dict[str, dict[str, float]]]:
    """(module, tensor) -> sums (probes, B) over a sequence of s_i d_i to first order; and module -> quantization
    health, from the first batch. `model` is in BF16, `layers` are its linears, `precisions` what they would become."""
    generator, sums, health = torch.Generator().manual_seed(seed), {}, {}
    for rows, use in zip(*(_batches(x, RECORDED_TOKENS) for x in (tokens, mask)), strict=True):
        inputs, outputs = {}, {}
        with _recorded(layers, inputs, outputs):
            embedded = model.get_input_embeddings()(rows[:, :-1]).detach().requires_grad_()
            logprobs = _logprobs(model, rows, temperature, inputs_embeds=embedded)
        gradients = []
        for probe in range(probes):
            signs = torch.randint(0, 2, logprobs.shape, generator=generator) * 2.0 - 1
            total = torch.where(use[:, 1:], logprobs * signs, 0.0).sum()
            wanted = [outputs[name] for name in layers]
            gradients.append(torch.autograd.grad(total, wanted, retain_graph=probe + 1 < probes))
        for i, (name, layer) in enumerate(layers.items()):
            for tensor, error in _errors(layer, inputs[name], precisions[name], tensors):
                found = [(g[i].double() * error.view_as(g[i])).reshape(len(rows), -1).sum(1) for g in gradients]
                sums.setdefault((name, tensor), []).append(torch.stack(found))
        for name, layer in layers.items():
            if name not in health:
                real = inputs[name].flatten(0, -2)[(use[:, 1:] | use[:, :-1]).flatten()]
                health[name] = quantization_health(layer.weight, real, precisions[name])
    return {key: torch.cat(parts, dim=1) for key, parts in sums.items()}, health


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


@contextmanager
def changed(layers: dict[str, Float8Linear], precisions: dict[str, LinearPrecision]) -> Iterator[None]:
    """Within this block the named layers have other precisions."""
    before = {name: layers[name].precision for name in precisions}
    try:
        _set(layers, precisions)
        yield
    finally:
        _set(layers, before)


def _set(layers: dict[str, Float8Linear], precisions: dict[str, LinearPrecision]) -> None:
    for name, precision in precisions.items():
        layers[name].precision = precision
        layers[name].refresh()


def _linears(model: nn.Module) -> Iterator[tuple[str, Float8Linear]]:
    return ((name, layer) for name, layer in float8_layers(model) if isinstance(layer, Float8Linear))


def _units(names: list[str], by: str) -> dict[str, list[str]]:
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


def _errors(layer, x: torch.Tensor, precision: LinearPrecision, tensors) -> Iterator[tuple[str, torch.Tensor]]:
    """(tensor, error of the layer's output (M, N) float64) when it is quantized, x (..., K) as it is."""
    flat = x.reshape(-1, x.shape[-1])

    def output(precision: LinearPrecision) -> torch.Tensor:
        values = quantize_weight(layer.weight, precision).values
        return round_bf16(matmul(round_operand(flat, precision.activation, precision), values))

    exact = output(BF16_LINEAR)
    return ((tensor, (output(_only(precision, tensor)) - exact).double()) for tensor in tensors)


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


def _logprobs(model: nn.Module, tokens: torch.Tensor, temperature: float, **inputs: torch.Tensor) -> torch.Tensor:
    logits = model(**inputs, use_cache=False).logits
    logits = logits if temperature in (0, 1) else logits / temperature
    return logits.gather(2, tokens[:, 1:, None]).squeeze(2) - logits.logsumexp(dim=2)


def _batches(tokens: torch.Tensor, size: int) -> Sequence[torch.Tensor]:
    return tokens.split(max(1, size // tokens.shape[1]))


def other_side(side: Side) -> Side:
    """The side that `side` is compared with."""
    return "trainer" if side == "rollout" else "rollout"


def score_side(work: nn.Module, plan: PrecisionPlan, side: Side, tokens, temperature: float) -> torch.Tensor:
    """`token_logprobs` under one side of a plan, which is put on `work`."""
    convert(work, plan, side=side, backend="emulated")
    return token_logprobs(work, tokens, temperature)


def _sweep_start(work, plan, side: Side, sweep: str, tokens, temperature) -> tuple[torch.Tensor, torch.Tensor]:
    """(log-probs to compare with, log-probs before any unit is changed); `work` is left as the sweep needs it."""
    if sweep == "in":
        reference = score_side(work, PrecisionPlan.preset("bf16"), side, tokens, temperature)
        return reference, reference
    reference = score_side(work, plan, other_side(side), tokens, temperature)
    return reference, score_side(work, plan, side, tokens, temperature)


def _estimate(sums: torch.Tensor, mask: torch.Tensor) -> dict[str, float]:
    """Mean |d| and k3 from sums (probes, B) of s_i d_i over sequences of n tokens: E |sum| = sqrt(n) E |d| for Gaussian
    d, E sum^2 = n E d^2."""
    count = mask.sum(1).double()
    tokens = count.sum().item() * len(sums)
    return {
        "first_order_mean_abs": (sums.abs() * count.sqrt()).sum().item() / tokens,
        "first_order_k3": sums.square().sum().item() / 2 / tokens,
    }


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


def _check(by: str, tensors: Sequence[str], sweeps: Sequence[str], probes: int) -> None:
    for name, given, allowed in (("by", [by], UNITS), ("tensors", tensors, TENSORS), ("sweeps", sweeps, ("in", "out"))):
        if wrong := [value for value in given if value not in allowed]:
            raise ValueError(f"{name} has {wrong[0]!r}; allowed: {', '.join(allowed)}")
    if isinstance(tensors, str) or not tensors or probes < 1:
        raise ValueError(f"tensors is {tensors!r} and probes {probes}; give a list of tensors and at least one probe")
