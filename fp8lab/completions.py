"""The trainer's log-probs of a rollout's completions: a group's prompt is read once, and so are completions that are
alike."""

from __future__ import annotations

import torch
from torch import nn

from fp8lab import invariant
from fp8lab.linear import real_tokens
from fp8lab.models import forward, left_pad
from fp8lab.names import expert_tensors
from fp8lab.rollout.engine import Rollout
from fp8lab.routing import replay_routes, routes_at


def completion_logprobs(model: nn.Module, rollout: Rollout, rows: torch.Tensor) -> torch.Tensor:
    """Log-probs of the completion tokens of some rows of a rollout, (len(rows), T) float32; 0 elsewhere;
    differentiable.

    rows: whole groups, in order. Each group's prompt is read once; its keys and values serve all its completions, and
    the gradient flows back through them. So with completions that are alike: they are read once, and their gradients
    added up before a GEMM sees (and rounds) them; not in a MoE, where each may take other experts. If the rollout has
    routes, tokens take these (routing.py). ValueError if the rows of a group do not start with the same prompt, or the
    routes do not fit.
    """
    from transformers import DynamicCache

    if model.config._attn_implementation == invariant.NAME:
        return whole_row_logprobs(model, rollout, rows)
    n, temperature = rollout.sampling.n, rollout.sampling.temperature
    tokens, start = rollout.tokens[rows], rollout.prompt_lengths[rows]
    lengths = rollout.lengths[rows] - start
    of_all = int((rollout.lengths - rollout.prompt_lengths).max())
    longest = max(int(lengths.max()), min(2, of_all))  # as many forwards on every process, or they wait for each other
    out = torch.zeros(tokens.shape)
    if longest == 0:
        return out
    prompts, attention, positions = left_pad(tokens[::n], start[::n])
    if not torch.equal(left_pad(tokens, start)[0], prompts.repeat_interleave(n, dim=0)):
        raise ValueError(f"rows are not whole groups of {n} completions of one prompt, neighbours of each other")
    cache = DynamicCache(config=model.config)
    routes = routes_at(rollout, rows[::n], torch.where(attention.bool(), positions, -1))
    with real_tokens(attention.bool()), replay_routes(model, routes):
        logits = forward(model, prompts, attention, positions, cache, logits_to_keep=1)
    first, like = _different(tokens, lengths, n, apart=next(expert_tensors(model), None) is not None)
    group = first // n
    logits, columns = logits[group], start[first, None] + torch.arange(longest)
    real = torch.arange(longest) < lengths[first, None]
    completions = tokens[first].gather(1, columns.clamp(max=tokens.shape[1] - 1))
    if longest > 1:
        cache.batch_select_indices(group)
        attention = torch.cat([attention[group], real[:, :-1].long()], dim=1)
        routes = routes_at(rollout, rows[first], torch.where(real[:, 1:], columns[:, :-1], -1))
        with real_tokens(real[:, 1:]), replay_routes(model, routes):  # a completion's last token predicts nothing
            rest = forward(model, completions[:, :-1], attention, columns[:, :-1], cache)
        logits = torch.cat([logits, rest], dim=1)
    if temperature not in (0, 1):
        logits = logits / temperature
    logprobs = logits.gather(2, completions[:, :, None]).squeeze(2) - logits.logsumexp(dim=2)
    logprobs, columns, real = logprobs[like], columns[like], real[like]
    row = torch.arange(len(rows))[:, None].expand_as(columns)
    return out.index_put((row[real], columns[real]), logprobs[real])


def _different(tokens, lengths, n: int, *, apart: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows (U,) where each different completion of a group of n stands first, and for every row (B,) which of these
    it equals. tokens (B, T), lengths of the completions (B,); apart: take all as different.
    """
    row = torch.arange(len(tokens))
    if apart:
        return row, row
    keys = torch.cat([(row // n)[:, None], lengths[:, None], tokens], dim=1)
    different, like = keys.unique(dim=0, return_inverse=True)
    return row.new_full((len(different),), len(row)).scatter_reduce_(0, like, row, "amin"), like


def whole_row_logprobs(model: nn.Module, rollout: Rollout, rows: torch.Tensor) -> torch.Tensor:
    """What `completion_logprobs` returns, for batch_invariant kernels: a row is read whole, every token in the column
    of its position, as the rollout's own forward has it. A prompt is read once for every completion."""
    lengths, temperature = rollout.lengths[rows], rollout.sampling.temperature
    width = int(lengths.max())
    tokens, mask = rollout.tokens[rows, :width], rollout.mask[rows, :width]
    positions = torch.arange(width).expand_as(tokens)
    causal = torch.ones(width, width, dtype=torch.bool).tril()[None, None]
    with real_tokens(positions < lengths[:, None] - 1):  # a row's last token predicts nothing
        logits = model(input_ids=tokens, attention_mask=causal, position_ids=positions, use_cache=False).logits
    if temperature not in (0, 1):
        logits = logits / temperature
    logprobs = logits[:, :-1].log_softmax(dim=-1).gather(2, tokens[:, 1:, None]).squeeze(2)
    return torch.zeros(rollout.tokens[rows].shape).index_put(mask.nonzero(as_tuple=True), logprobs[mask[:, 1:]])
