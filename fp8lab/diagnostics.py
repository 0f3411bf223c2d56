"""How far apart are the two engines? Metrics over the log-probs of the same tokens, and a byte-for-byte check of the
weights.

g is the rollout's log-prob of a sampled token, t the trainer's at the same weights, d = t - g. Every mean runs over
masked-in tokens with finite log-probs; the others are counted. Names and formulas are NeMo RL's
(nemo_rl/algorithms/loss/loss_functions.py and its docs/guides/grpo.md), so a number here can be held against a number
on a cluster. exp() of anything is taken with the exponent clamped to +-20.

verl's set, per-sequence errors, histograms and healthy bands are in `sequence_metrics.py`, attribution to layers in
`attribution.py`, faults that show over a run in `alarms.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from fp8lab.checks import require_alike
from fp8lab.linear import QuantizedWeight, float8_layers
from fp8lab.operands import LinearPrecision

if TYPE_CHECKING:
    from fp8lab.attention_scales import AttentionScales
    from fp8lab.rollout.engine import Rollout
    from fp8lab.trainer import Trainer


@dataclass(frozen=True, kw_only=True)
class MismatchReport:
    """Distances between rollout and trainer over the sampled tokens; 1.0 is perfect for the two ratios, 0 for the KLs.

    Numbers in brackets: two tokens of probability 1/4 and 1/2 in the rollout, 1/2 and 1/4 in the trainer, so d = log 2
    and -log 2.
    """

    token_mult_prob_error: float
    """mean exp(|d|): by what factor the probability of a token is off. NeMo RL: above 1.05 needs investigation. [2]"""
    gen_kl_error: float
    """KL(rollout || trainer), k3: mean exp(d) - d - 1. [(2 + 1/2) / 2 - 1 = 0.25]"""
    policy_kl_error: float
    """The same with the roles swapped: mean exp(-d) + d - 1 (still over tokens the rollout sampled). [0.25]"""
    js_divergence_error: float
    """Jensen-Shannon in NeMo RL's form: mean (k3(t - M) + k3(g - M)) / 2 with M = log(e^t/2 + e^g/2).
    [M = log 3/8 for both tokens, so (4/3 + 2/3 - 2 - log(4/3) - log(2/3)) / 2 = 0.0589]"""
    sampling_importance_ratio: float
    """mean exp(d), before any truncation; it should hover at 1. [(2 + 1/2) / 2 = 1.25]"""
    mean_abs_difference: float
    """mean |d|, in nats. [log 2 = 0.693]"""
    max_abs_difference: float
    """max |d|, in nats. [0.693]"""
    tokens: int
    """Tokens compared. [2]"""
    nonfinite_tokens: int
    """Masked-in tokens left out because a log-prob was not finite. [0]"""

    def as_dict(self) -> dict[str, float]:
        """The fields by name."""
        return dict(self.__dict__)


def mismatch(rollout_logprobs: torch.Tensor, trainer_logprobs: torch.Tensor, mask: torch.Tensor) -> MismatchReport:
    """Compare log-probs of the same tokens under both engines.

    All (B, T), mask bool. Values outside the mask never matter. With no usable token the distances are those of equal
    engines and `tokens` is 0. ValueError if the shapes differ.
    """
    mask = require_alike(rollout_logprobs, trainer_logprobs, mask)
    finite = rollout_logprobs.isfinite() & trainer_logprobs.isfinite()
    g, t = (x.detach()[mask & finite].double() for x in (rollout_logprobs, trainer_logprobs))
    d = t - g
    middle = torch.logaddexp(t, g) - torch.log(torch.tensor(2.0, dtype=torch.float64))

    def mean(x: torch.Tensor, empty: float) -> float:
        return x.mean().item() if len(x) else empty

    return MismatchReport(
        token_mult_prob_error=mean(clamped_exp(d.abs()), 1.0),
        gen_kl_error=mean(k3(d), 0.0),
        policy_kl_error=mean(k3(-d), 0.0),
        js_divergence_error=mean((k3(t - middle) + k3(g - middle)) / 2, 0.0),
        sampling_importance_ratio=mean(clamped_exp(d), 1.0),
        mean_abs_difference=mean(d.abs(), 0.0),
        max_abs_difference=d.abs().max().item() if len(d) else 0.0,
        tokens=len(d),
        nonfinite_tokens=int((mask & ~finite).sum()),
    )


def gap_parts(trainer: Trainer, rollout: Rollout, scales: AttentionScales | None = None) -> dict[str, float]:
    """How much of the gap to a rollout is the engine's and how much the precision's: mean |.| in nats of both parts of

        t - g = (t - s) + (s - g)       s: scored by the trainer's kernels, but rounded as the rollout side does

    `engine_gap` is s - g: equal weights and formats, another engine. `precision_gap` is t - s: equal kernels, other
    formats; 0 where the sides round alike. trainer: at the weights of the rollout; it is left as it is. scales: the
    engine's, of FP8 attention on the rollout side; default: calibrated on the rollout.
    """
    from fp8lab.attention import attention_of
    from fp8lab.calibration import calibrate
    from fp8lab.conversion import convert
    from fp8lab.scoring import shared_copy

    rounded = copy.copy(trainer)
    rounded.model = shared_copy(trainer.model)
    convert(rounded.model, trainer.plan, side="rollout")
    state = attention_of(rounded.model)
    if state is not None and not state.dynamic:
        state.scales = scales or calibrate(rounded.model, rollout, state.precision).scales
    s, t, g = (x[rollout.mask] for x in (rounded.score(rollout), trainer.score(rollout), rollout.logprobs))
    return {"engine_gap": (s - g).abs().mean().item(), "precision_gap": (t - s).abs().mean().item()}


def clamped_exp(x: torch.Tensor) -> torch.Tensor:
    """exp(x) with the exponent clamped to +-20."""
    return x.clamp(-20, 20).exp()


def k3(x: torch.Tensor) -> torch.Tensor:
    """exp(x) - x - 1 >= 0: an unbiased, low-variance KL estimate from samples (Schulman, 2020)."""
    return clamped_exp(x) - x - 1


class HeldWeight(NamedTuple):
    """A weight as an engine of another kind multiplies with it; the names of linear.QuantizedCopy."""

    precision: LinearPrecision
    quantized: QuantizedWeight


def differing_layers(trainer_model: nn.Module, rollout_model: nn.Module) -> dict[str, str]:
    """Layers whose weight the two sides do not hold as the same bytes, with the reason; empty means proven equal.

    Compares the FP8 codes and scales (or BF16 values) each side multiplies with, and every other weight in float32.
    """
    return differing_weights(*((dict(float8_layers(m)), m.state_dict()) for m in (trainer_model, rollout_model)))


def differing_weights(
    trainer: tuple[Mapping[str, Any], Mapping[str, torch.Tensor]],
    rollout: tuple[Mapping[str, Any], Mapping[str, torch.Tensor]],
) -> dict[str, str]:
    """`differing_layers` of what each side holds: its planned layers by name (anything with `precision` and
    `quantized`) and its weights by name, of which those of planned layers do not count."""
    (ours, a_state), (theirs, b_state) = trainer, rollout
    found = {name: "only on one side" for name in [*ours, *theirs] if (name in ours) != (name in theirs)}
    for name in (name for name in ours if name in theirs):
        a, b = ours[name].quantized, theirs[name].quantized
        if a.values.shape != b.values.shape:
            found[name] = f"shapes differ: trainer {tuple(a.values.shape)}, rollout {tuple(b.values.shape)}"
        elif (a.packed is None) != (b.packed is None):
            found[name] = f"trainer {ours[name].precision}, rollout {theirs[name].precision}"
        elif a.packed is not None and a.packed.rule != b.packed.rule:
            found[name] = f"scale rules differ: trainer {a.packed.rule}, rollout {b.packed.rule}"
        elif a.packed is not None and not a.packed.same_bytes(b.packed):
            codes, scales = (a.packed.codes != b.packed.codes).sum(), (a.packed.scale != b.packed.scale).sum()
            found[name] = f"{codes} codes and {scales} scales differ"
        elif not _same_bits(a.values, b.values):
            found[name] = f"{(a.values != b.values).sum()} values differ"
    planned = {f"{name}.weight" for name in ours} | set(ours)  # a fused expert tensor is its own weight
    for name in (name for name in {**a_state, **b_state} if name not in planned):
        if name not in a_state or name not in b_state:
            found[name] = "only on one side"
        elif not _same_bits(a_state[name], b_state[name]):
            found[name] = "float32 weights differ"
    return found


def stale_layers(trainer_model: nn.Module, rollout_model: nn.Module) -> dict[str, str]:
    """Layers where the rollout holds other bytes than the trainer's *own master weights* give in the rollout's formats,
    with the reason; empty means the last refit is proven complete.

    `differing_layers` compares what the sides multiply with, so it also names every layer that the plan treats
    differently. Here only the weights matter: a BF16 trainer beside an FP8 rollout is fine if its masters, quantized
    now, give the rollout's bytes.
    """
    theirs = dict(float8_layers(rollout_model))
    ours = dict(float8_layers(trainer_model))
    fresh = {name: _quantized_as(ours[name], theirs[name].precision) if name in theirs else ours[name] for name in ours}
    return differing_weights((fresh, trainer_model.state_dict()), (theirs, rollout_model.state_dict()))


def _quantized_as(layer: Any, precision: LinearPrecision) -> HeldWeight:
    """A layer's master weight in another precision; the layer's own copy is left alone."""
    own = layer.precision
    layer.precision = precision
    try:
        return HeldWeight(precision, layer.quantize())
    finally:
        layer.precision = own


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    a_bytes, b_bytes = (t.contiguous().view(-1).view(torch.uint8) for t in (a, b))
    return a.shape == b.shape and torch.equal(a_bytes, b_bytes)
