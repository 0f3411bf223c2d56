"""An own forward for sampling: the model's own modules, one token at a time, over a preallocated KV cache.

transformers' forward is made for every case; between two tokens of a small model it spends most of its time on masks,
cache objects and keyword arguments. A decoder-only Llama-like model needs little more than this per layer:

    q, k, v = W_q h, W_k h, W_v h        h = norm(x); q and k are normed once more in Qwen3
    q, k    = rope(q), rope(k)           at each token's own position
    x      += W_o softmax(q K^T / sqrt(D)) V
    x      += mlp(norm(x))

Every W, norm and mlp is the model's module itself, so what is quantized, and how, stays the layers' own business; q, k
and v, and gate and up, run as one GEMM each where they may (`linear.fuse`). Of a prompt the last layer needs only the
last token, once its keys and values are in the cache.

Column = position: token p of a sequence lies in column p of its cache row, whatever the batch. So the mask is just
"column <= position", padding (on the right) is overwritten before it could be seen, and a sum over keys runs in an
order that no other sequence can change, which is what `invariant.py` needs.

Two pieces are made to be replaced:

    storage     subclass KVCache and override `fields`, `store` and `load` (FP8 codes and scales instead of float32):
                Decoder(model, cache_type=MyCache). Keys and values arrive after RoPE and q/k-norm.
    attention   Decoder(model, attention=f) with transformers' attention interface:
                f(module, q (R, H, T, D), k (R, H_kv, L, D), v, mask (R, 1, T, L) bool, scaling=...,
                bias=the mask as 0 and -inf, real=which of the new tokens are no padding) -> (R, T, H, D), None

Left out: sliding windows, latent attention, per-layer position schemes: `unsupported` names why a model needs
transformers' forward. Sequences that part no longer share the memory of what they had in common.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import nn

from fp8lab.linear import fuse

MODEL_TYPES = ("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")
COLUMNS = 8
"""Columns of a cache that are begun at a time."""
FEW_TOKENS = 16
SMALLEST_PRODUCT = 400
"""Multiplications of one matrix product from which on torch.bmm calls a BLAS (ATen/native/LinearAlgebra.cpp)."""
KEPT = 64 * 2**20
"""Bytes of keys and values that stay allocated between calls."""
KINDS = ("key", "value")
STATIC_ROPE = ("default", "linear", "llama3", "yarn")


def unsupported(model: nn.Module) -> str | None:
    """Why `Decoder` cannot run this model, or None if it can."""
    config = model.config
    if config.model_type not in MODEL_TYPES:
        return f"model type {config.model_type} is none of {', '.join(MODEL_TYPES)}"
    rope = config.rope_parameters.get("rope_type", "default")
    if rope not in STATIC_ROPE:
        return f"RoPE of type {rope} depends on the sequence length"
    kinds = getattr(config, "layer_types", None)
    if "sliding_attention" in (kinds or ()) or (kinds is None and getattr(config, "sliding_window", None)):
        return f"some layers attend over a sliding window of {config.sliding_window} tokens"
    return None


class KVCache:
    """Keys and values of R sequences: per layer a buffer (2, R, heads, columns, width), column = position.

    Columns stand next to width, so that what one query reads is one block of memory: over 36 keys attention takes a
    third of the time that it takes with columns first.
    """

    def __init__(
        self,
        layers: int,
        rows: int,
        heads: int,
        columns: int,
        head_dim: int,
        device: torch.device,
        free: list[torch.Tensor] | None = None,
    ) -> None:
        self.free = [] if free is None else free
        shapes = [((len(KINDS), rows, heads, columns, width), dtype) for dtype, width in self.fields(head_dim)]
        self.buffers = [[self._room(shape, dtype, device) for shape, dtype in shapes] for _ in range(layers)]
        self.used = 0  # columns that some row has written; the others hold nothing yet

    def fields(self, head_dim: int) -> tuple[tuple[torch.dtype, int], ...]:
        """Type and width of what is stored for one head of one token."""
        return ((torch.float32, head_dim),)

    def store(self, layer: int, kv: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Keys and values (R, T, 2, heads, D) float32 -> one tensor (R, T, 2, heads, width) per field."""
        return (kv,)

    def load(self, layer: int, kind: str, stored: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """What `store` gave, back to (..., D) float32."""
        return stored[0]

    def reach(self, length: int) -> None:
        """Begin columns up to `length`, as zeros: rows that have no token there yet are masked, but 0 * NaN is NaN."""
        if length > self.used:
            first = self.buffers[0][0]
            length = min(first.shape[3], -(-length // COLUMNS) * COLUMNS)
            for buffer in itertools.chain(*self.buffers):
                buffer[..., self.used : length, :].zero_()
            self.used = length

    def places(self, positions: torch.Tensor) -> torch.Tensor:
        """Where `append` writes tokens at these positions (R, T): for each of their heads' keys and values (R, T, 2,
        heads) the number of its place, counted through kinds, rows, heads and columns."""
        *shape, columns, _ = self.buffers[0][0].shape
        first = torch.arange(0, math.prod(shape) * columns, columns, device=positions.device)
        return first.view(shape).transpose(0, 1)[:, None] + positions[:, :, None, None]

    def append(self, layer: int, kv: torch.Tensor, places: torch.Tensor) -> None:
        """Write keys and values (R, T, 2, heads, D) of every row at its `places`."""
        for buffer, new in zip(self.buffers[layer], self.store(layer, kv), strict=True):
            buffer.view(-1, buffer.shape[-1])[places] = new

    def read(self, layer: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """k and v of the first `length` columns, (R, heads, length, D) float32."""
        (_, k), (_, v) = self.stored(layer, length)
        return self.load(layer, "key", k), self.load(layer, "value", v)

    def stored(self, layer: int, length: int) -> Iterator[tuple[str, tuple[torch.Tensor, ...]]]:
        """`key` and `value`, each with its fields (R, heads, length, width)."""
        return zip(KINDS, zip(*(b[..., :length, :].unbind() for b in self.buffers[layer]), strict=True), strict=True)

    def select(self, rows: torch.Tensor) -> None:
        """Keep these rows, in this order; a row named several times is copied."""
        first = self.buffers[0][0][0]
        rows = rows.to(first.device)
        if torch.equal(rows, torch.arange(len(first), device=rows.device)):
            return
        for buffers in self.buffers:
            for field, old in enumerate(buffers):
                new = self._room((len(old), len(rows), *old.shape[2:]), old.dtype, old.device)
                torch.index_select(old[..., : self.used, :], 1, rows, out=new[..., : self.used, :])
                buffers[field] = new
                if _memory(old) >= new.nbytes:  # else a growing batch would hold all that it has outgrown
                    self.free.append(old)

    def _room(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """An uninitialized buffer, in memory that was freed if some is large enough: fresh memory costs more than the
        copy that goes there."""
        size, inference = math.prod(shape), torch.is_inference_mode_enabled()
        for number, old in enumerate(self.free):
            usable = inference or not old.is_inference()
            if usable and old.dtype == dtype and _memory(old) >= size * old.itemsize:
                return self.free.pop(number).as_strided((size,), (1,), 0).view(shape)
        return torch.empty(shape, dtype=dtype, device=device)

    def release(self) -> None:
        """End this cache: its memory, up to KEPT bytes, is for the next one of the same decoder."""
        buffers = list(itertools.chain(*self.buffers))
        self.free += buffers
        self.free.sort(key=_memory, reverse=True)
        del self.free[len(buffers) + len(self.buffers[0]) :]  # too small by now
        while sum(map(_memory, self.free)) > KEPT:
            self.free.pop(0)
        self.buffers = []

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(b.nbytes for b in itertools.chain(*self.buffers))


def _memory(buffer: torch.Tensor) -> int:
    return buffer.untyped_storage().nbytes()


def attend(module: nn.Module, q, k, v, mask, *, scaling: float, bias: torch.Tensor, **_) -> tuple[torch.Tensor, None]:
    """Attention as in transformers' forward; of few new tokens as two batched matmuls, which are faster there, or as
    products and sums where torch.bmm would have each matrix product done by a plain loop."""
    if q.shape[2] <= FEW_TOKENS:
        together = q.shape[1] // k.shape[1] * q.shape[2]  # queries that share keys become rows of one matrix
        grouped = q.reshape(*k.shape[:2], together, q.shape[-1])
        small = together * k.shape[2] * k.shape[3] < SMALLEST_PRODUCT
        scores = (grouped[..., None, :] * k[:, :, None]).sum(-1) if small else torch.matmul(grouped, k.transpose(2, 3))
        scores.mul_(scaling).view(*k.shape[:2], -1, *bias.shape[2:]).add_(bias[:, :, None])
        p = scores.softmax(dim=-1)
        out = (p[..., None] * v[:, :, None]).sum(-2) if small else torch.matmul(p, v)
        return out.view(*q.shape[:3], -1).transpose(1, 2), None
    shared = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scaling, enable_gqa=shared)
    return out.transpose(1, 2), None


class Decoder:
    """The forward of a supported model (see `unsupported`) on a KVCache."""

    def __init__(self, model: nn.Module, *, attention: Callable = attend, cache_type: type[KVCache] = KVCache) -> None:
        self.model, self.attention, self.cache_type = model, attention, cache_type
        self.free: list[torch.Tensor] = []  # memory of the caches before
        config, base = model.config, model.model
        self.head_dim = base.layers[0].self_attn.head_dim
        self.heads = config.num_key_value_heads
        positions = torch.arange(config.max_position_embeddings, device=base.embed_tokens.weight.device)[None]
        cos, sin = base.rotary_emb(base.embed_tokens.weight[:1], position_ids=positions)
        first, second = sin[0].chunk(2, dim=-1)
        self.cos, self.sin = cos[0], torch.cat((-first, second), dim=-1)

    def prefill(self, prompts: torch.Tensor, lengths: torch.Tensor, columns: int) -> tuple[torch.Tensor, KVCache]:
        """Read prompts (R, T), padded on the right, of these lengths (R,): logits (R, V) after each prompt's last
        token, and the cache, which has room for `columns` tokens a row."""
        base = self.model.model
        device = self.cos.device
        shape = len(base.layers), len(prompts), self.heads, columns, self.head_dim
        cache = self.cache_type(*shape, device, self.free)
        positions = torch.arange(prompts.shape[1], device=device).expand_as(prompts)
        last = (lengths - 1).to(device)
        self.layers, self.norm = [_Layer(layer) for layer in base.layers], _norm(base.norm)
        return self._forward(prompts.to(device), positions, cache, last).to(prompts.device), cache

    def step(self, tokens: torch.Tensor, positions: torch.Tensor, cache: KVCache) -> torch.Tensor:
        """Logits (R, V) after one more token (R,) at its position (R,) in every row of the cache."""
        device = self.cos.device
        new, at = tokens[:, None].to(device), positions[:, None].to(device)
        return self._forward(new, at, cache, torch.zeros_like(at[:, 0])).to(tokens.device)

    def _forward(self, tokens, positions, cache: KVCache, last: torch.Tensor) -> torch.Tensor:
        """tokens, positions: (R, T); logits (R, V) float32 after token last[r] of each row; the cache grows."""
        base = self.model.model
        length = int(positions.max()) + 1
        mask = torch.arange(length, device=tokens.device) <= positions[:, None, :, None]
        bias = torch.where(mask, 0.0, float("-inf"))
        cos, sin = self.cos[positions][:, :, None], self.sin[positions][:, :, None]
        cache.reach(length)
        places = cache.places(positions)
        cache.real = torch.arange(tokens.shape[1], device=tokens.device) <= last[:, None]
        x = base.embed_tokens(tokens).flatten(0, 1)  # (R * T, hidden): two dimensions save a linear some microseconds
        first = torch.arange(len(tokens), device=tokens.device) * tokens.shape[1]
        for number, layer in enumerate(self.layers):
            out = self._attend(number, layer, layer.norm(x), places, cache, mask, bias, cos, sin)
            if number == len(self.layers) - 1 and layer.dense and tokens.shape[1] > 1:
                x, out = x[first + last], out[first + last]
            x += layer.out(out)
            h = layer.mlp_norm(x)
            x += layer.mlp(h if layer.dense else h.view(*tokens.shape, -1)).view(x.shape)
        x = x if len(x) == len(tokens) else x[first + last]
        return self.model.lm_head(self.norm(x)).float()

    def _attend(self, number, layer: _Layer, h, places, cache, mask, bias, cos, sin) -> torch.Tensor:
        """Normed input h (R * T, hidden) -> attention (R * T, H * D) before its output projection."""
        module = layer.attention
        qkv = layer.qkv(h).view(*places.shape[:2], -1, self.head_dim)
        heads = qkv.shape[2] - 2 * self.heads
        if layer.qk_norm:
            q, k, v = qkv.split((heads, self.heads, self.heads), dim=2)
            qkv = torch.cat((module.q_norm(q), module.k_norm(k), v), dim=2)
        rotate(qkv[:, :, : heads + self.heads], cos, sin)
        cache.append(number, qkv[:, :, heads:].view(*places.shape, self.head_dim), places)
        k, v = cache.read(number, mask.shape[-1])
        more = {"scaling": module.scaling, "bias": bias, "real": cache.real}
        out, _ = self.attention(module, qkv[:, :, :heads].transpose(1, 2), k, v, mask, **more)
        return out.reshape(len(h), -1)


class _Layer:
    """The pieces of a decoder layer as functions. They hold until its weights change, so each batch takes them anew."""

    def __init__(self, layer: nn.Module) -> None:
        self.attention, mlp = layer.self_attn, layer.mlp
        self.norm, self.mlp_norm = _norm(layer.input_layernorm), _norm(layer.post_attention_layernorm)
        self.qk_norm = hasattr(self.attention, "q_norm")
        self.qkv = fuse((self.attention.q_proj, self.attention.k_proj, self.attention.v_proj))
        self.out = fuse((self.attention.o_proj,))
        self.dense = hasattr(mlp, "gate_proj")  # else experts, whose routes are of interest for every token
        self.mlp = _gated(fuse((mlp.gate_proj, mlp.up_proj)), mlp) if self.dense else mlp


def _gated(gate_up: Callable, module: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    down, act = fuse((module.down_proj,)), module.act_fn

    def mlp(h: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up(h).chunk(2, dim=-1)
        return down(act(gate).mul_(up))

    return mlp


def _norm(module: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """The module, or torch's function where it is the same to the last bit: transformers' RMSNorm in float32."""
    if module.weight.dtype != torch.float32 or not type(module).__name__.endswith("RMSNorm"):
        return module
    weight, shape, epsilon = module.weight, module.weight.shape, module.variance_epsilon
    return lambda x: F.rms_norm(x, shape, weight, epsilon)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding of x (R, T, H, D), in place, in Llama's half-split layout; the first half of sin comes
    negated."""
    turned = x.roll(x.shape[-1] // 2, dims=-1).mul_(sin)
    return x.mul_(cos).add_(turned)
