"""Calibration: new scales of q, k and v from one forward over real tokens, after every change of the weights.

    scale = amax * margin / 448            per layer, for each of q, k and v; amax 0 (nothing there) gives scale 1

Two rules for amax:

    max        the largest magnitude over all real tokens; padding does not count
    nemo_rl    per micro-batch the largest magnitude, padding included; of these the 99.9th percentile (nearest rank: up
               to 500 micro-batches it is the plain maximum); the maximum over ranks. NVIDIA NeMo RL,
               nemo_rl/models/policy/workers/megatron_policy_worker.py, calibrate_qkv_fp8_scales

During that forward attention itself is not rounded, so the old scales have no say. A rollout's tokens are read as the
trainer scores them, each prompt once for its group: exactly the tokens that the engine's cache held. NeMo RL runs the
trainer's model over them, this the model it is given; the engine gives its own, whose linears round as in the rollout.

The free alternative needs no forward: `AttentionMeter` has seen every q, k and v of the rollout anyway. Its scales are
one update old, because they come from the weights the rollout was sampled with.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from fp8lab.attention import observed
from fp8lab.attention_scales import OPERANDS, AttentionMeter, AttentionScales
from fp8lab.formats import E4M3
from fp8lab.models import forward
from fp8lab.operands import AttentionPrecision
from fp8lab.rollout.engine import Rollout

PERCENTILE = 99.9


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """What a calibration found."""

    scales: AttentionScales
    tokens: int
    """Real tokens read."""


def scales_from_amax(
    amax: torch.Tensor, precision: AttentionPrecision, ranks: Sequence[torch.Tensor] = ()
) -> AttentionScales:
    """Scales from the maxima of micro-batches, under the plan's rule and margin.

    amax: (micro-batches, 3, layers) >= 0, rows as in OPERANDS; ranks: the same of other data-parallel ranks. ValueError
    for no micro-batch, and names the layer of a NaN or an infinity.
    """
    per_rank = []
    for found in (amax, *ranks):
        if found.ndim != 3 or found.shape[1] != len(OPERANDS) or len(found) == 0:
            raise ValueError(f"amax has shape {tuple(found.shape)}; expected (micro-batches >= 1, 3, layers)")
        for row, operand in enumerate(OPERANDS):
            if bad := (~found[:, row].isfinite()).any(dim=0).nonzero().flatten().tolist():
                raise ValueError(
                    f"the {operand} of layer {bad[0]} holds NaN or infinity; no scale can hold that. Look at the "
                    "weights of the last update"
                )
        per_rank.append(_percentile(found) if precision.calibration == "nemo_rl" else found.amax(dim=0))
    scale = torch.stack(per_rank).amax(dim=0).double() * precision.margin / E4M3.max
    scale = scale.float().masked_fill(scale.float() == 0, 1.0)
    return AttentionScales(**{operand: tuple(scale[row].tolist()) for row, operand in enumerate(OPERANDS)})


def _percentile(amax: torch.Tensor) -> torch.Tensor:
    """Nearest-rank percentile over the first dimension."""
    return amax.sort(dim=0).values[round(PERCENTILE / 100 * (len(amax) - 1))]


def calibrate(
    model: nn.Module,
    batch: Rollout | Sequence[Sequence[int]],
    precision: AttentionPrecision,
    *,
    micro_batch_size: int = 1024,
) -> Calibration:
    """Scales for `model` from one no-grad forward over `batch`, at most micro_batch_size sequences at a time.

    batch: a rollout (prompts and completions), or prompts as lists of token ids. model: any transformers model that FP8
    attention covers, converted or not; it is left as it was.
    """
    maxima, tokens = [], 0
    with torch.no_grad(), observed(model, padding=precision.calibration == "nemo_rl") as meter:
        for read in _forwards(model, batch, micro_batch_size):
            tokens += read
            maxima.append(meter.amax)
            meter.reset()
    return Calibration(scales=scales_from_amax(torch.stack(maxima), precision), tokens=tokens)


def scales_from_meter(meter: AttentionMeter, precision: AttentionPrecision) -> AttentionScales:
    """Scales from what has passed since the meter's last reset: free, and one update old; see the module's text.

    ValueError if nothing has.
    """
    if not bool(meter.elements.any()):
        raise ValueError("no q, k and v have been seen yet; call generate first, or calibrate on prompts")
    return scales_from_amax(meter.amax[None], precision)


def _forwards(model: nn.Module, batch: Rollout | Sequence[Sequence[int]], size: int) -> Iterator[int]:
    """Run the forwards, and yield after each micro-batch how many real tokens it had."""
    from transformers import DynamicCache

    from fp8lab.completions import completion_logprobs  # here, because it imports the engines, which calibrate

    if isinstance(batch, Rollout):
        group = batch.sampling.n
        for rows in torch.arange(len(batch.tokens)).split(max(group, size // group * group)):
            completion_logprobs(model, batch, rows)
            completions = batch.lengths[rows] - batch.prompt_lengths[rows]
            yield int(batch.prompt_lengths[rows][::group].sum() + (completions - 1).clamp(min=0).sum())
        return
    if len(batch) == 0:
        raise ValueError("no prompts to calibrate on; give a rollout, or a non-empty list of prompts")
    for start in range(0, len(batch), size):
        prompts = [torch.as_tensor(prompt) for prompt in batch[start : start + size]]
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        padding = model.config.get_text_config().pad_token_id or 0
        padded = nn.utils.rnn.pad_sequence(prompts, batch_first=True, padding_value=padding)
        positions = torch.arange(padded.shape[1]).expand_as(padded)
        real = (positions < lengths[:, None]).long()
        forward(model, padded, real, positions, DynamicCache(config=model.config), logits_to_keep=1)
        yield int(lengths.sum())
