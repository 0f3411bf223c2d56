"""The KV cache in FP8: one byte per element, half of BF16's, and the attention that reads it.

    store    k, v (after RoPE and q/k-norm) -> E4M3 codes (uint8) under the layer's scale, or with a float32 scale
             per token and head beside them
    read     codes -> code values, which the GEMMs of `attention.attend` take; their scales multiply the result

Decoder(model, **float8_cache(model)) runs a model's FP8 attention on it. A read decodes the whole cache of one layer to
float32, which a GPU kernel would do in registers. Transformers' path (attention.py) rounds the same values under the
same scales, so both give the same codes.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from fp8lab.attention import Float8Attention, Operand, attend, attention_of, encode, token_head_scale
from fp8lab.formats import E4M3
from fp8lab.rollout.decode import KINDS, KVCache


class Float8KVCache(KVCache):
    """A KVCache of E4M3 codes; `attention` says under which scales, and its meter counts what they clamp."""

    def __init__(self, attention: Float8Attention, *shape: Any) -> None:
        self.attention, self.real = attention, None
        super().__init__(*shape)

    def fields(self, head_dim: int) -> tuple[tuple[torch.dtype, int], ...]:
        """Codes, and a scale per token and head if scales are dynamic."""
        codes = (torch.uint8, head_dim)
        return (codes, (torch.float32, 1)) if self.attention.dynamic else (codes,)

    def store(self, layer: int, kv: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Codes (and scales) of keys and values (R, T, 2, heads, D)."""
        scales = [self.attention.scale(kind, layer) for kind in KINDS]
        for kind, x, scale in zip(KINDS, kv.unbind(2), scales, strict=True):
            self.attention.meter.record(layer, kind, x.transpose(1, 2), self.real, scale)
        if not self.attention.dynamic:
            return (torch.stack([encode(x, s) for x, s in zip(kv.unbind(2), scales, strict=True)], dim=2),)
        dynamic = token_head_scale(kv)
        return encode(kv, dynamic), dynamic

    def read(self, layer: int, length: int) -> tuple[Operand, Operand]:
        """Code values and scales of k and v in the first `length` columns, for `attend`."""

        def operand(kind: str, codes: torch.Tensor, dynamic: torch.Tensor | None = None) -> Operand:
            return Operand(decode(codes), self.attention.scale(kind, layer) if dynamic is None else dynamic)

        k, v = (operand(kind, *fields) for kind, fields in self.stored(layer, length))
        return k, v


def decode(codes: torch.Tensor) -> torch.Tensor:
    """Values (float32) of E4M3 codes (uint8), any shape."""
    if codes.device.type != "cpu":
        return codes.view(E4M3.dtype).float()
    from fp8lab.kernels import decode_e4m3

    return decode_e4m3(codes)


def float8_cache(model: nn.Module) -> dict[str, Any]:
    """What a `Decoder` needs for a model with FP8 attention, as keyword arguments; {} for any other model."""
    state = attention_of(model)
    if state is None:
        return {}

    def attention(module: nn.Module, q, k: Operand, v: Operand, mask, *, scaling: float, real: torch.Tensor, **_):
        q = state.round("query", module.layer_idx, q, real)
        out = attend(q, k, v, mask, scaling, round_probabilities=state.precision.probabilities == "e4m3")
        return out.transpose(1, 2), None

    return {"attention": attention, "cache_type": partial(Float8KVCache, state)}
