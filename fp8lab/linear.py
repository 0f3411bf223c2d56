"""Float8Linear: a linear layer whose three GEMMs take FP8 (or BF16) operands.

    output      = Q(x)  @ Q(w)^T      x in 1x128 blocks along K, w in 128x128 blocks
    grad_input  = Q(g)  @ Q(w)        g in 1x128 blocks along N, w the same bytes, read transposed
    grad_weight = Q(g^T) @ Q(x^T)^T   both quantized again, from high precision, in 1x128 blocks along *tokens*

Each GEMM sums over another dimension, and the blocks of an operand lie along the dimension that is summed, which is why
x and g are quantized twice, from the original and never from the other copy (33 dB against 29 dB). The square weight
block serves both directions. Recipe: DeepSeek-V3 (arXiv:2412.19437, section 3.3), Transformer Engine's
Float8BlockScaling.

The backend of this class is `emulated`: operands are rounded to their format and held in float32, the GEMM runs in
float32 and its output is rounded to BF16. Tensor cores accumulate in (nearly) float32 as well, so this is faithful to
what FP8 hardware computes, and on a CPU without BF16 units it is also the fastest way. BF16 layers are emulated by the
same class in the same way, so arms differ in the format alone. The weight stays a float32 master `nn.Parameter`; its
quantized copy is a cache, refreshed explicitly (`refresh`) by the trainer's step, by a refit and by loading, and never
pickled.

With other tools: under torch.autocast these GEMMs stay float32 and only the rest of the model follows autocast. Under
torch.compile each Float8Linear is a graph break and runs as without compiling (0.7 us a call where nothing is compiled;
the quantizer as a torch custom op cost 11 to 25). peft's adapters go around a Float8Linear as around any linear, but
merging or unmerging them changes weights: call `refresh(model)` after it, before it the layers answer as unmerged.

Real FP8 GEMMs are subclasses: `ScaledMMLinear` (scaled_mm.py) and `TransformerEngineLinear` (te_linear.py), chosen by
backends.py.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from fp8lab import invariant
from fp8lab.distributed import is_sharded
from fp8lab.formats import round_bf16
from fp8lab.operands import FP8, LinearPrecision
from fp8lab.quantizers import BlockQuantizer, QuantizedTensor

KERNELS = ("default", "other", invariant.NAME)
_real_tokens: ContextVar[torch.Tensor | None] = ContextVar("real_tokens", default=None)


@contextmanager
def real_tokens(mask: torch.Tensor) -> Iterator[None]:
    """Within this block, grad_weight sums over the tokens where mask (bool, the leading shape of x) is True.

    Padding has no gradient, but it would shift the 128-token blocks, so real tokens are packed before they are
    quantized. Also, layers that take the same x after each other (q, k and v; gate and up) round it once.
    """
    token = _real_tokens.set(mask)
    try:
        yield
    finally:
        _real_tokens.reset(token)


def token_mask(shape: torch.Size) -> torch.Tensor | None:
    """The mask of `real_tokens`, flat, if it is for tokens laid out as shape (or flat); None for other tokens, e.g. the
    last position's logits."""
    mask = _real_tokens.get()
    return None if mask is None or shape not in (mask.shape, (mask.numel(),)) else mask.reshape(-1)


class QuantizedWeight(NamedTuple):
    """The cached copy of a weight: what the GEMM multiplies, and the bytes it stands for."""

    values: torch.Tensor
    """(N, K) float32, dequantized (or rounded to BF16)."""
    packed: QuantizedTensor | None
    """Codes and scales; None for BF16."""


def eager(forward: Callable) -> Callable:
    """Keep torch.compile out of a method that runs a numba kernel: its callers get a graph break.

    As torch.compiler.disable, but without the second that importing torch's compiler takes, until something compiles.
    """
    chosen = forward

    @functools.wraps(forward)
    def run(*args, **kwargs):
        nonlocal chosen
        if chosen is forward and "torch._dynamo" in sys.modules:
            chosen = torch.compiler.disable(forward, reason="quantizes in a numba kernel")
        return chosen(*args, **kwargs)

    return run


class QuantizedCopy:
    """What a module with a float32 master `weight` keeps: its precision, and a quantized copy that is only a cache."""

    precision: LinearPrecision
    kernels: str
    weight: torch.Tensor
    _cache: QuantizedWeight | None

    def refresh(self) -> None:
        """Quantize the current weight; call it after every change of the weight.

        A sharded weight is quantized by the next forward, in which it is whole.
        """
        self._cache = None if self.weight.is_meta or is_sharded(self.weight) else self.quantize()

    def quantize(self) -> QuantizedWeight:
        """A quantized copy of the current weight."""
        return quantize_weight(self.weight, self.precision)

    @property
    def quantized(self) -> QuantizedWeight:
        """The quantized copy of the weight as of the last refresh."""
        if self._cache is None:
            self.refresh()
        return self._cache

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_cache": None}

    def _apply(self, fn, recurse: bool = True):
        self._cache = None
        return super()._apply(fn, recurse)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._cache = None


class Float8Linear(QuantizedCopy, nn.Linear):
    """nn.Linear with per-operand precision; same parameters, same state dict keys, (..., K) -> (..., N) float32.

    A subclass is another backend: it overrides the three GEMMs, and what `quantize` prepares for them, or `multiply`.
    """

    backend = "emulated"

    @classmethod
    def from_linear(cls, linear: nn.Linear, precision: LinearPrecision, kernels: str = "default") -> Float8Linear:
        """A Float8Linear that shares the parameters of `linear`.

        kernels: `default` is one float32 matmul; `other` adds up K in tiles of 64 from the far end, which gives another
        last bit: a stand-in for a second engine's kernels; `batch_invariant` takes fixed row tiles (invariant.py).
        """
        if kernels not in KERNELS:
            raise ValueError(f"kernels is {kernels!r}; allowed: {', '.join(KERNELS)}")
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer.in_features, layer.out_features = linear.in_features, linear.out_features
        layer.weight, layer.bias = linear.weight, linear.bias
        layer.precision, layer.kernels, layer._cache = precision, kernels, None
        layer.train(linear.training)
        return layer

    @eager
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., K) of any dtype -> (..., N) float32: the GEMM `output`; its gradients run the other two."""
        shape = x.shape[:-1]
        mask = token_mask(shape)
        return self.multiply(x.reshape(-1, x.shape[-1]).float(), mask).view(*shape, self.out_features)

    def multiply(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """x (M, K) -> (M, N), both float32, with its gradients; mask (M,): the tokens grad_weight sums over."""
        if not torch.is_grad_enabled():
            return self.output(x, self.quantized, self.bias)
        return _Float8Matmul.apply(x, self.weight, self.bias, self, mask)

    def output(self, x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x (M, K) -> (M, N), both float32; the bias is added before the result is rounded."""
        training = _real_tokens.get() is not None
        x = (
            _round_once("rows", x, x, self.precision)
            if training
            else round_operand(x, self.precision.activation, self.precision)
        )
        y = matmul(x, weight.values, self.kernels)
        y = y if bias is None else y + bias
        return round_bf16(y) if self.precision.output == "bf16" else y

    def grad_input(self, grad: torch.Tensor, weight: QuantizedWeight) -> torch.Tensor:
        """grad (M, N) -> (M, K), both float32."""
        y = matmul(round_operand(grad, self.precision.gradient, self.precision), weight.values.t(), self.kernels)
        return round_bf16(y) if self.precision.output == "bf16" else y

    def grad_weight(self, grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """grad (M, N), x (M, K) -> (N, K), all float32; the blocks lie along M."""
        g_t = round_operand(grad.t(), self.precision.gradient, self.precision)
        return matmul(g_t, _round_once("columns", x, x.t(), self.precision), self.kernels)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.precision}, backend={self.backend}" + (
            "" if self.kernels == "default" else f", kernels={self.kernels}"
        )


def fuse(layers: Sequence[nn.Module]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Linears of one input as one GEMM, as inference engines run them (vLLM: qkv_proj, gate_up_proj); forward only.

    Returns x (..., K) -> (..., sum of N), layer after layer, which holds until a weight is replaced. An FP8 operand is
    rounded once instead of once per layer, to the same codes. The layers' weights become rows of one tensor, so nothing
    is stored twice. Layers that differ in kind, precision or backend, have a bias, hooks or fixed tiles run one by one.
    """
    first = layers[0]
    if not all(_fuses(first, layer) for layer in layers):
        return lambda x: torch.cat([layer(x) for layer in layers], dim=-1)
    emulated = isinstance(first, Float8Linear)
    weights = [layer.quantized.values if emulated else layer.weight.data for layer in layers]
    weight = _rows_of_one(weights)
    if weight is None:  # the first time, and after a refresh
        with torch.inference_mode(False):  # weights are written to later
            weight = torch.cat(weights)
        for layer, part in zip(layers, weight.split([len(w) for w in weights]), strict=True):
            if emulated:
                layer._cache = layer.quantized._replace(values=part)
            else:
                layer.weight.data = part
    if not emulated:
        return lambda x: F.linear(x, weight)
    whole = QuantizedWeight(weight, None)
    return lambda x: first.output(x.reshape(-1, x.shape[-1]).float(), whole).view(*x.shape[:-1], -1)


def _fuses(first: nn.Module, layer: nn.Module) -> bool:
    """True if one GEMM can do the work of both."""
    if type(layer) is not type(first) or layer.bias is not None or layer._forward_hooks or layer._forward_pre_hooks:
        return False
    if type(first) is Float8Linear:
        same = layer.precision == first.precision and layer.kernels == first.kernels
        return same and first.kernels != invariant.NAME
    return type(first) is nn.Linear


def _rows_of_one(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Tensors (N, K) as one (sum of N, K), if they follow each other in one piece of memory."""
    first = tensors[0]
    storage, end = first.untyped_storage().data_ptr(), first.data_ptr()
    for tensor in tensors:
        if tensor.data_ptr() != end or tensor.untyped_storage().data_ptr() != storage or not tensor.is_contiguous():
            return None
        end += tensor.nbytes
    return first.as_strided((sum(map(len, tensors)), first.shape[1]), first.stride())


class _Shared(threading.local):
    """The last value of each kind with what it was made from: q, k and v (gate and up) take the same operand.

    As the sources are kept, a tensor with the address and version of one is that one.
    """

    def __init__(self) -> None:
        self.last: dict[str, tuple[tuple, tuple[torch.Tensor, ...], torch.Tensor]] = {}

    def get(self, kind: str, sources: tuple[torch.Tensor, ...], settings: tuple, make: Callable[[], torch.Tensor]):
        """make(), or its last result if sources and settings are still the same."""
        if sources[0].is_inference():  # has no version
            return make()
        key = (settings, *((x.data_ptr(), x.shape, x.stride(), x._version) for x in sources))
        if kind not in self.last or self.last[kind][0] != key:
            self.last[kind] = key, sources, make()
        return self.last[kind][2]


_shared = _Shared()


def _round_once(kind: str, source: torch.Tensor, x: torch.Tensor, precision: LinearPrecision) -> torch.Tensor:
    """The activation operand x, a view of source, rounded: once for the layers that take it after each other."""
    settings = precision.activation, precision.group, precision.rule
    return _shared.get(kind, (source,), settings, lambda: round_operand(x, precision.activation, precision))


def quantize_weight(weight: torch.Tensor, precision: LinearPrecision) -> QuantizedWeight:
    """The copy of a float32 master weight (N, K) that a layer of this precision multiplies with."""
    weight = weight.detach()
    source = round_bf16(weight) if precision.weight == "bf16" or precision.weight_source == "bf16" else weight
    if precision.weight == "bf16":
        return QuantizedWeight(source, None)
    packed, values = BlockQuantizer(precision.weight_block, precision.weight, precision.rule).quantize_both(source)
    return QuantizedWeight(values, packed)


def round_operand(x: torch.Tensor, fmt: str, precision: LinearPrecision) -> torch.Tensor:
    """An activation or gradient operand (M, K) rounded to fmt in 1 x group blocks along K, held in float32."""
    return _group_quantizer(precision.group, fmt, precision.rule).fake_quantize(x) if fmt in FP8 else round_bf16(x)


@functools.cache
def _group_quantizer(group: int, fmt: str, rule: str) -> BlockQuantizer:
    return BlockQuantizer((1, group), fmt, rule)


def matmul(a: torch.Tensor, b: torch.Tensor, kernels: str = "default") -> torch.Tensor:
    """a (M, K) @ b (N, K)^T -> (M, N), accumulated in float32 in the order of `kernels`, also under autocast."""
    if torch.is_autocast_enabled(a.device.type):  # asked first, because leaving autocast costs 4 us
        with torch.autocast(a.device.type, enabled=False):
            return matmul(a, b, kernels)
    if kernels == "default":
        return F.linear(a, b)
    if kernels == invariant.NAME:
        return invariant.linear(a, b)
    tiles = zip(a.split(64, dim=1)[::-1], b.split(64, dim=1)[::-1], strict=True)
    first_a, first_b = next(tiles)
    total = F.linear(first_a, first_b)
    for tile_a, tile_b in tiles:
        total += F.linear(tile_a, tile_b)
    return total


class _Float8Matmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, layer: QuantizedCopy, mask):
        ctx.save_for_backward(x, mask)
        ctx.layer, ctx.quantized = layer, layer.quantized  # this one, should a refresh come before backward
        return layer.output(x, ctx.quantized, bias)

    @staticmethod
    def backward(ctx, grad):
        x, mask = ctx.saved_tensors
        grad_input = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_input = ctx.layer.grad_input(grad, ctx.quantized)
        if ctx.needs_input_grad[1]:
            precision = ctx.layer.precision
            blocks = precision.gradient in FP8 or precision.activation in FP8
            if blocks and mask is not None:
                grad, x = grad[mask], _shared.get("real", (x, mask), (), lambda: x[mask])
            grad_weight = ctx.layer.grad_weight(grad, x)
        if ctx.needs_input_grad[2]:
            grad_bias = grad.sum(dim=0)
        return grad_input, grad_weight, grad_bias, None, None


def float8_layers(model: nn.Module) -> Iterator[tuple[str, QuantizedCopy]]:
    """(name, layer) of every Float8Linear in the model, and of every fused expert tensor under the tensor's name."""
    return ((name.replace(".float8_", "."), m) for name, m in model.named_modules() if isinstance(m, QuantizedCopy))


def refresh(model: nn.Module) -> None:
    """Requantize every weight of the model from its float32 master: after a step, a refit or a load."""
    _shared.last.clear()
    for _, layer in float8_layers(model):
        layer.refresh()
