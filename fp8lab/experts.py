"""Fused experts in FP8: the three GEMMs of `linear.py`, for each expert of a mixture-of-experts layer.

A router picks k of E experts for every token; transformers 5 keeps the experts of a layer in two tensors,

    gate_up_proj (E, 2I, H)      gate and up projection, stacked along rows
    down_proj    (E, H, I)

    y[token] = sum over its experts e of  p_e * down_e( act(gate_e(x)) * up_e(x) )

Each expert is quantized by itself, gate and up too, in the 128x128 blocks of a linear: the bytes are those of the
`experts.{e}.gate_proj.weight` of FP8 checkpoints (DeepSeek-V3, NeMo RL's refit). Tokens are sorted by expert;
activations in 1x128 blocks along K need no more than that, and `grad_weight` packs the tokens of one expert, real ones
only, into 128-token blocks of their own. An expert without tokens gets a zero gradient. The router, its choice and the
weights p_e stay float32. BF16 experts are emulated in the same way, with operands rounded to BF16.

It plugs into transformers' experts interface: the module keeps its class, parameters and state dict keys; `attach`
gives it a config of its own that says `fp8lab`, and two parameter-free children that hold what a `Float8Linear` holds
(precision, cached quantized copy).

Left out: real FP8 grouped GEMMs (DeepGEMM, transformers' `finegrained_fp8`), expert parallelism, and layouts that store
experts transposed, interleaved or with biases (GPT-OSS, Llama 4).
"""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn.utils import parametrize

from fp8lab.formats import round_bf16
from fp8lab.linear import (
    KERNELS,
    QuantizedCopy,
    QuantizedWeight,
    _Float8Matmul,
    eager,
    matmul,
    quantize_weight,
    round_operand,
    token_mask,
)
from fp8lab.operands import FP8, LinearPrecision

IMPLEMENTATION = "fp8lab"
CHILD = "float8_"
LAYOUT = {"is_transposed": False, "has_bias": False, "is_concatenated": True, "has_post_expert_norm": False}
"""What transformers' experts module must say of itself."""


class ExpertWeights(QuantizedCopy, nn.Module):
    """One fused tensor of an experts module, its child `float8_<tensor>`: precision, quantized copy, no parameters."""

    def __init__(self, experts: nn.Module, tensor: str, precision: LinearPrecision, kernels: str = "default") -> None:
        super().__init__()
        if kernels not in KERNELS:
            raise ValueError(f"kernels is {kernels!r}; allowed: {', '.join(KERNELS)}")
        self.__dict__["experts"] = experts  # not a child: the experts module is the parent
        self.tensor, self.precision, self.kernels, self._cache = tensor, precision, kernels, None
        self.train(experts.training)
        _register()

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        _register()

    @property
    def weight(self) -> nn.Parameter:
        """The float32 master (E, N, K), which belongs to the experts module."""
        return getattr(self.experts, self.tensor)

    def quantize(self) -> QuantizedWeight:
        """A quantized copy of the current weight."""
        return quantize_experts(self.tensor, self.weight, self.precision)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None, tokens_per_expert: list[int]) -> torch.Tensor:
        """x (S, K), sorted by expert -> (S, N), float32; mask (S,): the rows of real tokens."""
        return _Float8Matmul.apply(x, self.weight, None, _SortedMatmul(self, mask, tokens_per_expert), None)

    def extra_repr(self) -> str:
        return f"{self.tensor}, {self.precision}, backend=emulated" + (
            "" if self.kernels == "default" else f", kernels={self.kernels}"
        )


class _SortedMatmul:
    """The three GEMMs of one call of ExpertWeights, expert by expert, as `_Float8Matmul` wants them of a layer."""

    def __init__(self, weights: ExpertWeights, mask: torch.Tensor | None, tokens_per_expert: list[int]) -> None:
        self.precision, self.quantized, self.kernels = weights.precision, weights.quantized, weights.kernels
        self.mask, self.groups = mask, tokens_per_expert

    def output(self, x: torch.Tensor, weight: QuantizedWeight, bias: None = None) -> torch.Tensor:
        return self._round(self._matmul(round_operand(x, self.precision.activation, self.precision), weight.values))

    def grad_input(self, grad: torch.Tensor, weight: QuantizedWeight) -> torch.Tensor:
        rounded = round_operand(grad, self.precision.gradient, self.precision)
        return self._round(self._matmul(rounded, weight.values.mT))

    def grad_weight(self, grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """(E, N, K): the real tokens of each expert in blocks of their own.

        Rows of zeros, which change no scale, fill an expert's last block: so all experts are quantized in one call.
        """
        precision, groups = self.precision, self.groups
        unit = precision.group if precision.gradient in FP8 or precision.activation in FP8 else 1
        if unit > 1 and self.mask is not None:
            groups = [int(part.sum()) for part in self.mask.split(groups)]
            grad, x = grad[self.mask], x[self.mask]
        sizes = [-(-tokens // unit) * unit for tokens in groups]
        real = torch.zeros(sum(sizes), dtype=torch.bool, device=x.device)
        for rows, tokens in zip(real.split(sizes), groups, strict=True):
            rows[:tokens] = True
        g_t, x_t = (
            round_operand(_place(t, real).t(), fmt, precision).split(sizes, dim=1)
            for t, fmt in ((grad, precision.gradient), (x, precision.activation))
        )
        return torch.stack([matmul(g, x, self.kernels) for g, x in zip(g_t, x_t, strict=True)])

    def _matmul(self, a: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
        groups = zip(a.split(self.groups), matrices, strict=True)
        return torch.cat([matmul(rows, matrix, self.kernels) for rows, matrix in groups])

    def _round(self, y: torch.Tensor) -> torch.Tensor:
        return round_bf16(y) if self.precision.output == "bf16" else y


def _place(rows: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
    if len(rows) == len(where):
        return rows
    out = rows.new_zeros(len(where), rows.shape[1])
    out[where] = rows
    return out


def _register() -> None:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, experts_forward)


@eager
def experts_forward(
    experts: nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """transformers' experts interface: hidden_states (T, H), top_k_index and top_k_weights (T, k) -> (T, H)."""
    if parametrize.is_parametrized(experts):
        raise ValueError(
            "an adapter computes the fused expert tensors anew in each forward (peft's target_parameters), which their "
            "quantized copies would not see; restore(model) first, or let the adapter target linears only"
        )
    up = experts.float8_gate_up_proj if experts.has_gate else experts.float8_up_proj
    tokens, k = top_k_index.shape
    expert, order = torch.sort(top_k_index.reshape(-1), stable=True)
    token = order // k
    tokens_per_expert = torch.bincount(expert, minlength=experts.num_experts).tolist()
    mask = token_mask(hidden_states.shape[:-1])
    mask = None if mask is None else mask[token]
    y = up(hidden_states.float()[token], mask, tokens_per_expert)
    y = experts._apply_gate(y) if experts.has_gate else experts.act_fn(y)
    y = experts.float8_down_proj(y, mask, tokens_per_expert)
    y = y * top_k_weights.reshape(-1, 1)[order]
    back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    return y[back].view(tokens, k, -1).sum(dim=1).to(hidden_states.dtype)


def projections(tensor: str) -> tuple[str, ...]:
    """The matrices a fused tensor stacks for each expert: `gate_up_proj` -> (`gate_proj`, `up_proj`)."""
    return ("gate_proj", "up_proj") if tensor == "gate_up_proj" else (tensor,)


def quantize_experts(tensor: str, weight: torch.Tensor, precision: LinearPrecision) -> QuantizedWeight:
    """weight (E, N, K), each projection of each expert quantized by itself: codes (E, P, N / P, K) of P projections."""
    parts = weight.unflatten(1, (len(projections(tensor)), -1))
    values, packed = quantize_weight(parts, precision)
    return QuantizedWeight(values.view(weight.shape), packed)


def unsupported(experts: nn.Module) -> str | None:
    """Why this module's fused experts cannot be emulated, or None."""
    kind = type(experts).__name__
    if not hasattr(experts, "has_gate"):
        return f"{kind} does not use transformers' experts interface"
    said = ((key, getattr(experts, key, wanted), wanted) for key, wanted in LAYOUT.items())
    return next((f"{kind} has {key}={found}" for key, found, wanted in said if found != wanted), None)


def attach(experts: nn.Module, tensor: str, precision: LinearPrecision, kernels: str = "default") -> None:
    """Run one fused tensor of an experts module under this precision; the others of the module need theirs, too."""
    setattr(experts, CHILD + tensor, ExpertWeights(experts, tensor, precision, kernels))
    if not hasattr(experts, "float8_replaced_config"):
        experts.float8_replaced_config, experts.config = experts.config, copy.copy(experts.config)
        experts.config._experts_implementation_internal = IMPLEMENTATION


def detach(experts: nn.Module) -> None:
    """Undo every `attach` of this module."""
    if hasattr(experts, "float8_replaced_config"):
        experts.config = experts.float8_replaced_config
        for name in [name for name in (*experts._modules, "float8_replaced_config") if name.startswith(CHILD)]:
            delattr(experts, name)
