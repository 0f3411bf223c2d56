"""FP8 attention: q, k, v and P rounded to E4M3, as pure functions and inside any transformers model.

    q, k, v ~ codes * scale            after RoPE and q/k-norm; what the KV cache stores of k and v
    S = (q_codes @ k_codes^T) * (q_scale * k_scale * softmax_scale)
    P = exp(S - rowmax)                float32, in (0, 1]
    O = (e4m3(256 P) @ v_codes) * v_scale / 256 / rowsum(P)

Without the 256 most of P would fall below E4M3's smallest number. P is rounded before it is divided by its row's sum,
and the sum is of the unrounded P: so do FlashAttention-3 (hopper/softmax.h, Max_offset = 8) and vLLM
(triton_unified_attention.py, p_scale). Those work in tiles with a running maximum, so their e4m3(256 P) can differ in
the last bit; here whole rows are at hand. The GEMMs multiply code values, whose products are exact in float32, so the
order of summation matters little.

Scales are one number per layer and operand, calibrated beforehand (NeMo RL; attention_scales.py), or one per token and
head, taken from the values as they are written (vLLM's fp8_per_token_head). Then k's scales multiply the columns of S,
and v's those of P, which stays unrounded.

`set_attention` puts this behind transformers' attention interface. k and v are rounded on the way in, so a float32
DynamicCache gives what an FP8 one gives. Gradients go straight through the rounding, of clamped elements too.

Refused by name: MLA (its cache holds a latent vector), attention sinks, soft-capping, position biases, dropout. Sliding
windows work as far as they are in the mask.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from fp8lab.attention_scales import OPERANDS, AttentionMeter, AttentionScales
from fp8lab.formats import E4M3
from fp8lab.names import num_decoder_layers
from fp8lab.operands import AttentionPrecision
from fp8lab.scales import ScaleRule

IMPLEMENTATION = "fp8lab_fp8"
"""Name in transformers' attention interface."""
P_SCALE = 256.0
"""P is multiplied by it before it is rounded."""
TOKEN_HEAD_RULE = ScaleRule(
    name="token-head",
    apply="reciprocal",
    scale_floor=1e-6,
    note="vllm/v1/attention/ops/triton_reshape_and_cache_flash.py (0.32.0)",
)


class Operand(NamedTuple):
    """q, k or v as the GEMMs see it: values * scale."""

    values: torch.Tensor
    """(B, H, T, D) float32: E4M3 code values, or the tensor itself with scale 1."""
    scale: float | torch.Tensor
    """A number, or (B, H, T, 1) float32."""


def encode(x: torch.Tensor, scale: float | torch.Tensor) -> torch.Tensor:
    """Codes (uint8) of x (..., D) under given scales: one number (x / scale), or one per row, (..., 1) (x * (1 /
    scale), as in vLLM's kernel)."""
    return _code_values(x, scale, want_codes=True)[1]


def _code_values(x: torch.Tensor, scale: float | torch.Tensor, *, want_codes: bool):
    """(values of the codes float32, codes or None) of x under `encode`'s rules."""
    x = x.detach().float()
    per_row = isinstance(scale, torch.Tensor)
    if x.device.type != "cpu" or x.numel() == 0:
        ratio = x * (1 / scale) if per_row else x / scale
        return E4M3.round(ratio), E4M3.encode(ratio) if want_codes else None
    from fp8lab.kernels import quantize_blocks

    rows = x.reshape(-1, x.shape[-1]).contiguous()
    block = (1 if per_row else 64, rows.shape[1])
    grid = (-(-len(rows) // block[0]), 1)
    factor = (1 / scale).reshape(grid) if per_row else torch.full(grid, scale)
    given = (torch.ones(grid), factor)  # scale 1: the values of the codes themselves
    rule = TOKEN_HEAD_RULE if per_row else ScaleRule()
    values, codes, _, _ = quantize_blocks(rows, block, E4M3, rule, want_codes, given)
    return values.view(x.shape), codes.view(x.shape) if want_codes else None


def token_head_scale(x: torch.Tensor) -> torch.Tensor:
    """(..., 1) float32: max(amax / 448, 1e-6) of each row of x (..., D), a token's head."""
    return TOKEN_HEAD_RULE.scale(x.detach().abs().amax(dim=-1, keepdim=True), E4M3)[0]


class _Round(torch.autograd.Function):
    """Code values of x under a scale; the gradient passes straight through, of clamped elements too."""

    @staticmethod
    def forward(ctx, x, scale):
        ctx.scale = scale
        return _code_values(x, scale, want_codes=False)[0]

    @staticmethod
    def backward(ctx, grad):
        return grad / ctx.scale, None


def quantize(x: torch.Tensor, scale: float | None) -> Operand:
    """x (B, H, T, D) in E4M3 under a per-layer scale, or, with None, under one per token and head; differentiable."""
    chosen = token_head_scale(x) if scale is None else scale
    return Operand(_Round.apply(x, chosen), chosen)


def attend(
    query: Operand,
    key: Operand,
    value: Operand,
    mask: torch.Tensor | None,
    softmax_scale: float,
    *,
    round_probabilities: bool,
) -> torch.Tensor:
    """Attention output (B, H, Tq, D) float32 of rounded operands; see the module's text.

    query: (B, H, Tq, D); key, value: (B, Hkv, Tk, D), each serving H / Hkv neighbouring query heads. mask: (B or 1, 1,
    Tq, Tk) bool, True is visible; None: causal, the last query sees all. A query that sees nothing gets 0.
    """
    batch, heads, tq, dim = query.values.shape
    kv_heads, tk = key.values.shape[1:3]
    grouped = (batch, kv_heads, heads // kv_heads * tq)
    scores = query.values.reshape(*grouped, dim) @ key.values.transpose(2, 3)
    q_scale = query.scale.reshape(*grouped, 1) if isinstance(query.scale, torch.Tensor) else query.scale
    k_scale = key.scale.transpose(2, 3) if isinstance(key.scale, torch.Tensor) else key.scale
    scores = (scores * (q_scale * softmax_scale * k_scale)).view(batch, kv_heads, -1, tq, tk)
    if mask is None and tq > 1:
        mask = torch.ones(1, 1, tq, tk, dtype=torch.bool, device=scores.device).tril(tk - tq)
    if mask is not None:
        scores = scores.masked_fill(~mask[:, :, None], -math.inf)
    top = scores.detach().amax(dim=-1, keepdim=True).clamp(min=torch.finfo(torch.float32).min)
    weights = (scores - top).exp()
    total = weights.sum(dim=-1, keepdim=True)
    if isinstance(value.scale, torch.Tensor):
        if round_probabilities:
            raise ValueError("P cannot be e4m3 with per-token-head scales of v; use probabilities='bf16', as vLLM does")
        weights, factor = weights * value.scale.transpose(2, 3)[:, :, None], 1.0
    elif round_probabilities:
        weights, factor = _Round.apply(weights, 1 / P_SCALE), value.scale / P_SCALE
    else:
        factor = value.scale
    out = weights.reshape(*grouped, tk) @ value.values
    out = out.view(batch, kv_heads, -1, tq, value.values.shape[-1]) * (factor / total.masked_fill(total == 0, 1.0))
    return out.reshape(batch, heads, tq, -1)


class Float8Attention:
    """How one model rounds its attention: precision, scales, meter. Shared by its attention modules.

    `scales` may be set at any time; without them per-layer attention refuses to run.
    """

    def __init__(self, precision: AttentionPrecision, layers: int, previous: str) -> None:
        self.precision, self.layers, self.previous = precision, layers, previous
        self.meter = AttentionMeter(layers)
        self.observer: AttentionMeter | None = None
        self.observes_padding = False
        self._scales: AttentionScales | None = None

    @property
    def scales(self) -> AttentionScales | None:
        """The per-layer scales in use, or None."""
        return self._scales

    @scales.setter
    def scales(self, scales: AttentionScales) -> None:
        if scales.layers != self.layers:
            raise ValueError(f"scales are for {scales.layers} layers; this model has {self.layers}")
        self._scales = scales

    @property
    def dynamic(self) -> bool:
        """True if scales are per token and head, taken from the values themselves."""
        return self.precision.scales == "per-token-head"

    def alarms(self) -> list[str]:
        """What the meter has against the scales in use; see AttentionMeter.alarms."""
        return [] if self._scales is None else self.meter.alarms(self._scales)

    def scale(self, operand: str, layer: int) -> float | None:
        """The per-layer scale, or None if scales are dynamic; RuntimeError if there is none yet."""
        if self.dynamic:
            return None
        if self._scales is None:
            raise RuntimeError(
                "FP8 attention has no scales for q, k and v: call engine.calibrate(prompts) first. (Other engines use "
                "1.0 without a word; set AttentionScales.ones(layers) if that ablation is meant.)"
            )
        return getattr(self._scales, operand)[layer]

    def round(self, operand: str, layer: int, x: torch.Tensor, real: torch.Tensor | None = None) -> Operand:
        """q, k or v (B, H, T, D) as the plan has it: E4M3, or as it is; the meter sees its last `real` (B, t) tokens,
        all if None."""
        if operand == "query" and self.precision.query == "bf16":
            return Operand(x, 1.0)
        scale = self.scale(operand, layer)
        self.meter.record(layer, operand, x if real is None else x[:, :, -real.shape[1] :], real, scale)
        return quantize(x, scale)

    def forward(self, layer: int, query, key, value, mask, softmax_scale: float) -> torch.Tensor:
        """Attention over unrounded q (B, H, Tq, D) and k, v (B, Hkv, Tk, D) -> (B, H, Tq, D)."""
        real = new_tokens(mask, query.shape[2])
        q, k, v = (self.round(name, layer, x, real) for name, x in zip(OPERANDS, (query, key, value), strict=True))
        return attend(q, k, v, mask, softmax_scale, round_probabilities=self.precision.probabilities == "e4m3")


def new_tokens(mask: torch.Tensor | None, count: int) -> torch.Tensor:
    """(B or 1, count) bool: which of the newest tokens are real: padding is what no query sees."""
    if mask is None:
        return torch.ones(1, count, dtype=torch.bool)
    return mask[:, 0, :, -count:].any(dim=1)


def attention_of(model: nn.Module) -> Float8Attention | None:
    """The model's FP8 attention, or None if its attention is not FP8."""
    return getattr(model, "fp8_attention", None)


def set_attention(model: nn.Module, precision: AttentionPrecision) -> Float8Attention | None:
    """Give a transformers model the attention of a plan's side, in place; BF16 brings back what it had before.

    Returns its Float8Attention, without scales yet. ValueError, with the model unchanged, for architectures this does
    not cover; see the module's text.
    """
    old = attention_of(model)
    if not precision.is_fp8:
        if old is not None:
            model.set_attn_implementation(old.previous)
            for module in [model, *attention_modules(model)]:
                del module.fp8_attention
        return None
    modules, layers = attention_modules(model), num_decoder_layers(model)
    config, name = model.config.get_text_config(), type(model).__name__
    if getattr(config, "kv_lora_rank", None):
        raise ValueError(
            f"{name} has MLA, whose cache holds a latent vector; FP8 attention covers ordinary k and v only"
        )
    if sorted(m.layer_idx for m in modules) != list(range(layers)):
        raise ValueError(
            f"{name} has {layers} decoder layers and {len(modules)} attention modules of the kind FP8 attention "
            "covers; it needs one in each: use attention in bf16 for this model"
        )
    _register()
    state = Float8Attention(precision, layers, old.previous if old else model.config._attn_implementation)
    model.set_attn_implementation(IMPLEMENTATION)
    if model.config._attn_implementation != IMPLEMENTATION:
        raise ValueError(f"{name} does not use transformers' attention interface; use attention in bf16 for this model")
    for module in [model, *modules]:
        module.fp8_attention = state
    return state


def attention_modules(model: nn.Module) -> list[nn.Module]:
    """The model's attention modules, told by the attributes that transformers gives them."""
    wanted = ("layer_idx", "num_key_value_groups", "scaling")
    return [m for m in model.modules() if all(hasattr(m, name) for name in wanted)]


@contextmanager
def observed(model: nn.Module, *, padding: bool = False) -> Iterator[AttentionMeter]:
    """Within this block the model's attention runs unrounded, whatever its plan, and the meter given sees q, k and v.

    padding: let it see padding tokens, too.
    """
    old = attention_of(model)
    state = old or set_attention(model, AttentionPrecision(kv_cache="e4m3"))
    state.observer, state.observes_padding = AttentionMeter(state.layers), padding
    try:
        yield state.observer
    finally:
        state.observer = None
        if old is None:
            set_attention(model, AttentionPrecision())


def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    AttentionInterface.register(IMPLEMENTATION, _interface)
    AttentionMaskInterface.register(IMPLEMENTATION, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])


def _interface(
    module: nn.Module, query, key, value, attention_mask, scaling=None, dropout=0.0, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    """transformers' signature: (B, H, T, D) in, (B, Tq, H, D) out."""
    for name in ("softcap", "s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise ValueError(
                f"{type(module).__name__} passes {name}, which FP8 attention does not do; use bf16 attention"
            )
    if dropout or query.shape[-1] != value.shape[-1]:
        found = f"dropout {dropout}" if dropout else f"head sizes {query.shape[-1]} and {value.shape[-1]} of k and v"
        raise ValueError(f"{type(module).__name__} has {found}; FP8 attention takes no dropout and equal head sizes")
    state, layer = module.fp8_attention, module.layer_idx
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if state.observer is not None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        real = None if state.observes_padding else new_tokens(attention_mask, query.shape[2])
        for name, x in zip(OPERANDS, (query, key, value), strict=True):
            state.observer.record(layer, name, x[:, :, -query.shape[2] :], real)
        if state.previous == "eager":  # a short context, see models.load_model
            plain = (Operand(x, 1.0) for x in (query, key, value))
            return attend(*plain, attention_mask, scaling, round_probabilities=False).transpose(1, 2), None
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    out = state.forward(layer, query, key, value, attention_mask, scaling)
    return out.transpose(1, 2).contiguous(), None
