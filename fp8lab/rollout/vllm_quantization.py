"""FP8 emulated inside the real vLLM: a registered quantization config that follows a PrecisionPlan.

vLLM asks its quantization config, layer by layer, for a "method" that loads the layer's weights and runs it:

    qkv_proj = q_proj, k_proj, v_proj       vLLM fuses them: one weight, rows stacked
    lm_head                                 BF16 operands, float32 logits
    experts                                 w13 (E, 2I, H) and w2 (E, H, I)

The methods here keep vLLM's float32 weight as the master and answer with `Float8Linear` and the experts of
experts.py, which is the trainer's own code: same scale rule, same blocks, same bytes. Each matrix of a fused weight is
quantized by itself, as a checkpoint or a trainer has it (a block never spans q and k); neighbours that agree in
precision share one GEMM. What stays vLLM's: attention and its paged cache, RoPE, norms, activations, routing, sampling,
scheduling.

Quantized copies are made at first use and forgotten whenever weights were loaded (`forget`). vLLM calls
`process_weights_after_loading` for that, but not for an lm_head tied to the embeddings: its weight is never loaded.

vLLM's CPU experts are not used: they pack their weights once, and a reload leaves them unpacked (0.32: wrong results).
Arithmetic only: no time measured here says anything about FP8's speed. This file needs vLLM; import it after
`vllm.start_vllm`.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod

from fp8lab.diagnostics import HeldWeight
from fp8lab.experts import ExpertWeights, experts_forward
from fp8lab.linear import Float8Linear, QuantizedWeight, quantize_weight
from fp8lab.precision import Decision, PrecisionPlan

NAME = "fp8lab"


class FusedLinear(Float8Linear):
    """Neighbouring matrices of one precision, quantized one by one and multiplied in one GEMM."""

    names: list[str]
    rows: list[int]
    copies: list[QuantizedWeight]

    @classmethod
    def build(cls, decisions: list[Decision], rows: list[int], weight: torch.Tensor, bias: torch.Tensor | None):
        """The layer over weight (sum(rows), K), which it shares, and bias (sum(rows),)."""
        plain = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
        plain.weight = nn.Parameter(weight, requires_grad=False)
        plain.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        layer = cls.from_linear(plain, decisions[0].precision)
        layer.names, layer.rows = [d.name for d in decisions], rows
        return layer

    def quantize(self) -> QuantizedWeight:
        """All matrices, stacked; each one's codes and scales are in `copies`."""
        self.copies = [quantize_weight(matrix, self.precision) for matrix in self.weight.split(self.rows)]
        return QuantizedWeight(torch.cat([copy.values for copy in self.copies]), None)


class _Planned:
    """What linears and lm_head share: the decisions for their matrices, and the layers that follow them."""

    def __init__(self, decisions: list[Decision]) -> None:
        super().__init__()
        self.decisions, self.rows, self.layers = decisions, [], None

    def create_weights(self, layer, input_size_per_partition, output_partition_sizes, *args, **kwargs) -> None:
        if len(output_partition_sizes) != len(self.decisions):
            names = [d.name for d in self.decisions]
            raise ValueError(f"vLLM stacks {len(output_partition_sizes)} matrices where fp8lab knows {names}")
        self.rows = list(output_partition_sizes)
        super().create_weights(layer, input_size_per_partition, output_partition_sizes, *args, **kwargs)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Forget the quantized copies; vLLM's own packing of the weight is left out."""
        self.layers = None

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x (..., K) -> (..., sum(rows)) float32."""
        if self.layers is None:
            self.layers = self._build(layer, bias)
        parts = [part(x) for part in self.layers]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)

    def _build(self, layer: nn.Module, bias: torch.Tensor | None) -> list[FusedLinear]:
        start, built = 0, []
        pairs = zip(self.decisions, self.rows, strict=True)
        for _, group in groupby(pairs, key=lambda pair: pair[0].precision):
            decisions, rows = map(list, zip(*group, strict=True))
            part = slice(start, start + sum(rows))
            built.append(FusedLinear.build(decisions, rows, layer.weight[part], None if bias is None else bias[part]))
            start = part.stop
        return built

    def held(self, layer: nn.Module) -> Iterator[tuple[str, HeldWeight]]:
        """(name, weight) of each matrix, without the rows that pad a vocabulary."""
        for part in self.layers or self._build(layer, None):
            part.quantized  # noqa: B018 (fills copies)
            for name, copy in zip(part.names, part.copies, strict=True):
                values = copy.values[: getattr(layer, "org_vocab_size", None)]
                yield name, HeldWeight(part.precision, copy._replace(values=values))


class PlannedLinear(_Planned, UnquantizedLinearMethod):
    """One or several stacked linears."""


class UnplannedLinear(UnquantizedLinearMethod):
    """What transformers does not run as a linear, a router: float32, its weight left readable."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """vLLM's own packing of the weight is left out."""

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x (..., K) -> (..., N) float32."""
        return F.linear(x, layer.weight, bias)


class PlannedHead(_Planned, UnquantizedEmbeddingMethod):
    """lm_head, tied or not."""


class PlannedExperts(UnquantizedFusedMoEMethod):
    """Fused experts through fp8lab's experts interface; `decisions`: of gate_up_proj and of down_proj."""

    has_gate = True
    training = False

    def __init__(self, moe: Any, decisions: list[Decision]) -> None:
        super().__init__(moe)
        self.decisions = decisions

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Take the layer's weights as they are (unpacked), and forget the quantized copies."""
        if layer.activation != MoEActivation.SILU:
            raise ValueError(f"experts have activation {layer.activation}; fp8lab emulates gated SiLU experts only")
        self.num_experts = layer.w13_weight.shape[0]
        self.gate_up_proj, self.down_proj = layer.w13_weight, layer.w2_weight
        up, down = self.decisions
        self.float8_gate_up_proj = ExpertWeights(self, "gate_up_proj", up.precision)
        self.float8_down_proj = ExpertWeights(self, "down_proj", down.precision)

    def _apply_gate(self, y: torch.Tensor) -> torch.Tensor:
        gate, up = y.chunk(2, dim=-1)
        return F.silu(gate) * up

    def apply(self, layer, x, topk_weights, topk_ids, shared_experts=None, shared_experts_input=None) -> torch.Tensor:
        """x (T, H), topk_weights and topk_ids (T, k) -> (T, H)."""
        return experts_forward(self, x, topk_ids, topk_weights)

    def held(self, layer: nn.Module) -> Iterator[tuple[str, HeldWeight]]:
        """(name, weight) of the two fused tensors."""
        for decision, weights in zip(self.decisions, (self.float8_gate_up_proj, self.float8_down_proj), strict=True):
            yield decision.name, HeldWeight(weights.precision, weights.quantized)


@register_quantization_config(NAME)
class PlanConfig(QuantizationConfig):
    """The rollout side of a plan, as vLLM's `quantization_config`."""

    def __init__(self, plan: PrecisionPlan, names: list[str], num_layers: int) -> None:
        super().__init__()
        self.plan, self.names, self.num_layers = plan, set(names), num_layers

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> PlanConfig:
        """What `settings` made."""
        return cls(PrecisionPlan.from_dict(config["plan"]), config["names"], config["num_layers"])

    def get_name(self) -> str:
        return NAME

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    def get_quant_method(self, layer: nn.Module, prefix: str) -> Any:
        """The method of the layer that vLLM calls `prefix`; None for embeddings and attention: vLLM's own."""
        parent, _, last = prefix.rpartition(".")

        def decide(children: list[str]) -> list[Decision]:
            names = [f"{parent}.{child}" if parent else child for child in children]
            return [self.plan.decide(name, "rollout", self.num_layers) for name in names if name in self.names]

        if isinstance(layer, RoutedExperts):
            parent = prefix
            return PlannedExperts(layer.moe_config, decide(["gate_up_proj", "down_proj"]))
        if isinstance(layer, LinearBase):
            decisions = decide(self.packed_modules_mapping.get(last, [last]))
            return PlannedLinear(decisions) if decisions else UnplannedLinear()
        if isinstance(layer, ParallelLMHead):
            return PlannedHead(decide([last]))
        return None


def settings(plan: PrecisionPlan, names: list[str], num_layers: int) -> dict[str, Any]:
    """The `quantization_config` entry of a model's config that makes vLLM follow `plan`; names: what is planned."""
    return {"quant_method": NAME, "plan": plan.to_dict(), "names": names, "num_layers": num_layers}


def _planned(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """(name, module) of vLLM's layers that run one of the methods above."""
    for name, module in model.named_modules():
        if isinstance(getattr(module, "quant_method", None), _Planned | PlannedExperts):
            yield name, module


def forget(model: nn.Module) -> None:
    """Drop every quantized copy, after weights changed: they are made anew at the next use."""
    for _, module in _planned(model):
        module.quant_method.process_weights_after_loading(module)


def held_weights(model: nn.Module) -> tuple[dict[str, HeldWeight], dict[str, torch.Tensor]]:
    """What vLLM's model multiplies with, by transformers' names, and every other parameter, in float32."""
    planned = dict(_planned(model))
    held = {name: weight for module in planned.values() for name, weight in module.quant_method.held(module)}
    others = {}
    for name, parameter in model.named_parameters():
        module, _, last = name.rpartition(".")
        if module not in planned:
            owner = model.get_submodule(module)
            others[name] = parameter.detach()[: getattr(owner, "org_vocab_size", None)]
        elif last == "bias":
            method = planned[module].quant_method
            parts = parameter.detach().split(method.rows)
            others |= {f"{d.name}.bias": part for d, part in zip(method.decisions, parts, strict=True)}
    return held, others
