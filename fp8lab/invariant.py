"""Batch-invariant kernels: a token's numbers do not depend on what else is in the batch.

Floating-point sums depend on their order, and fast libraries pick the order by the *shape* of the call: one row at a
time in decoding, hundreds in training. So the same token at the same weights gets other last bits on the two sides;
FP8 turns some of them into other codes, and the rollout/trainer gap is never exactly zero. It is zero, bit for bit, if
every sum runs in an order that only the token's own position decides (kernels="batch_invariant" on both sides):

    GEMMs        always TILE rows at a time, the last tile filled up with zeros
    attention    always QUERY_TILE x KEY_TILE at a time; keys stand in the column of their position, so another
                 sequence's length only adds tiles of zeros at the end
    reductions   norms and softmax run along one row each; torch sums a row the same way however many there are
    SiLU         as x / (1 + exp(-x)): torch's own silu gives other last bits to the elements left over after its
                 vector loop, and which those are depends on the size of the whole tensor

Measured on this project's CPUs: MKL changes its order below 4 rows and for matrix-vector products, nowhere else; the
fixed tiles hold whatever a library does with other shapes. The same idea for GPUs: He and Thinking Machines Lab,
"Defeating Nondeterminism in LLM Inference" (2025); vLLM's VLLM_BATCH_INVARIANT.

Left out: fused experts (how many tokens an expert gets is the batch's affair), other activations than SiLU, rows above
32,768 elements, where torch splits a single row over threads.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

NAME = "batch_invariant"
TILE = 32
"""Rows of a GEMM call."""
QUERY_TILE, KEY_TILE = 16, 64


def linear(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a (M, K) @ b (N, K)^T -> (M, N) float32, TILE rows of a at a time."""
    padded = F.pad(a, (0, 0, 0, -len(a) % TILE))
    return torch.cat([F.linear(tile, b) for tile in padded.split(TILE)])[: len(a)]


def attention(module: nn.Module, q, k, v, mask, *, scaling: float, **_) -> tuple[torch.Tensor, None]:
    """Softmax attention in fixed tiles, under transformers' attention interface; differentiable.

    q (R, H, T, D), k and v (R, H_kv, L, D), mask bool, broadcastable to (R, 1, T, L), True where a query sees a key.
    Returns (R, T, H, D). Key l must stand in column l = its position in every call.
    """
    rows, heads, length, dim = q.shape
    shared, keys = k.shape[1], k.shape[2]
    q = q.reshape(rows, shared, -1, dim)
    queries = q.shape[2]
    q = F.pad(q, (0, 0, 0, -queries % QUERY_TILE)).split(QUERY_TILE, dim=2)
    k, v = (F.pad(x, (0, 0, 0, -keys % KEY_TILE)).split(KEY_TILE, dim=2) for x in (k, v))
    scores = torch.cat([torch.cat([a @ b.transpose(2, 3) for b in k], dim=3) for a in q], dim=2)[:, :, :queries]
    hidden = ~F.pad(mask, (0, -keys % KEY_TILE))
    scores = (scores * scaling).view(rows, heads, length, -1).masked_fill(hidden, float("-inf"))
    p = F.pad(scores.softmax(dim=-1).view(rows, shared, queries, -1), (0, 0, 0, -queries % QUERY_TILE))
    out = []
    for tile in p.split(QUERY_TILE, dim=2):
        first, *rest = (a @ b for a, b in zip(tile.split(KEY_TILE, dim=3), v, strict=True))
        out.append(sum(rest, first))
    out = torch.cat(out, dim=2)[:, :, :queries]
    return out.reshape(rows, heads, length, dim).transpose(1, 2), None


class SiLU(nn.Module):
    """x / (1 + exp(-x)) from operations that treat every element alike; see the module's text."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Any shape, elementwise."""
        return x / (1 + (-x).exp())


def prepare(model: nn.Module) -> None:
    """Give a transformers model this attention and this SiLU, in place.

    ValueError if its activation is not SiLU or it has fused experts.
    """
    from transformers import AttentionInterface

    activation = model.config.hidden_act
    if activation != "silu":
        raise ValueError(f"hidden_act is {activation!r}; {NAME} allows 'silu': use kernels='default' for this model")
    if experts := [name for name, _ in model.named_modules() if name.endswith(".experts")]:
        raise ValueError(f"{experts[0]} holds fused experts; {NAME} allows dense models: use kernels='default'")
    AttentionInterface.register(NAME, attention)
    model.set_attn_implementation(NAME)
    for module in model.modules():
        if hasattr(module, "act_fn"):
            module.act_fn = SiLU()
