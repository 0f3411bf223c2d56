"""Does the model fit: block shapes, tensor-parallel shards, padding, memory. The half of preflight that needs a model.

Scales belong to 128x128 blocks of the *full* matrix. Where a shard, or the seam between matrices that an engine joins
(q, k and v; gate and up), is off a multiple of 128, a block would be torn, and engines refuse or, worse, make other
blocks than the other side. Rules and sources:

    activations     K % 128 == 0                              vLLM, per_token_group_quant_fp8
    columns         rows of a shard % 128 == 0                vLLM, validate_fp8_block_shape (also MoE: gate and up)
    rows            columns of a shard % 128 == 0             the same (o_proj, down_proj)
    joined          all FP8 or all BF16; seams on 128         vLLM, is_layer_skipped
    TE              both dimensions % 16 == 0                 Transformer Engine, assert_dim_for_fp8_exec
    padding         128 (MX 32) x 2 cp x tp tokens            NeMo RL, nemo_rl/models/megatron/data.py

Memory is a lower bound: perfect sharding, no activations, no buffers. What does not fit here fits nowhere.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from torch import nn

from fp8lab.coverage import memory, size_text
from fp8lab.names import expert_tensors, is_router, layer_index, linear_modules, num_decoder_layers
from fp8lab.precision import PrecisionPlan, Side
from fp8lab.setting import Problem, Setting

JOINED = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("in_proj_qkv", "in_proj_z"),
    ("in_proj_b", "in_proj_a"),
)
"""Linears that vLLM joins into one, in this order."""
SPLIT_ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "q_b_proj", "kv_b_proj", "gate_up_proj")
SPLIT_COLUMNS = ("o_proj", "down_proj", "out_proj")
"""How tensor parallelism cuts a weight (N, K): output rows, or input columns. Others are replicated."""


class Matrix(NamedTuple):
    """One weight that a plan decides on; of fused experts one expert, gate and up counted apart."""

    name: str
    rows: int
    columns: int

    @property
    def kind(self) -> str:
        """Last part of the name."""
        return self.name.rpartition(".")[2]


def fit_problems(plan: PrecisionPlan, where: Setting, model: nn.Module) -> list[Problem]:
    """Everything that this module knows of."""
    found = [*_numbers(where, model), *_padding(plan, where, model), *_cache(plan, where, model)]
    for side in ("rollout", "trainer"):
        found += _folded(_shapes(plan, where, model, side))
    found += _joined(plan, where, model)
    return found + list(_memory(plan, where, model))


def matrices(model: nn.Module) -> list[Matrix]:
    """The weights of the decoder layers that a plan decides on, routers left out."""
    found = [Matrix(name, m.out_features, m.in_features) for name, m in linear_modules(model)]
    for name, module, parameter in expert_tensors(model):
        rows, columns = parameter.shape[1:][::-1] if getattr(module, "is_transposed", False) else parameter.shape[1:]
        found.append(Matrix(name, rows // 2 if name.endswith("gate_up_proj") else rows, columns))
    return [matrix for matrix in found if layer_index(matrix.name) is not None and not is_router(matrix.name)]


def _fp8(plan: PrecisionPlan, model: nn.Module, side: Side) -> list[Matrix]:
    layers = num_decoder_layers(model)
    return [m for m in matrices(model) if plan.decide(m.name, side, layers).precision.is_fp8]


def _shapes(plan: PrecisionPlan, where: Setting, model: nn.Module, side: Side) -> Iterator[Problem]:
    engine, linear = getattr(where, side), plan.side(side).linear
    rows, columns = (abs(size) for size in linear.weight_block)
    parallel = where.rollout_tensor_parallel if side == "rollout" else where.tensor_parallel
    for matrix in _fp8(plan, model, side):
        dims, fix = (
            f"{matrix.rows} x {matrix.columns} (N x K)",
            f"keep it in BF16 (with_bf16(modules=['{matrix.kind}']))",
        )
        if engine == "native":
            if matrix.rows % rows or matrix.columns % columns:
                what = f"multiples of {rows} x {columns}, or edge blocks that hold their real elements only"
                yield Problem("note", matrix.name, dims, what, "vLLM and TE refuse or pad such shapes: results differ")
            continue
        if matrix.columns % linear.group:
            what = f"K a multiple of {linear.group}, the group of activations"
            yield Problem("error", matrix.name, dims, what, fix)
        elif engine != "vllm" and (matrix.rows % 16 or matrix.columns % 16):
            yield Problem("error", matrix.name, dims, "multiples of 16 (Transformer Engine)", fix)
        expert = ".experts." in matrix.name
        if parallel == 1 or (expert and (side == "trainer" or where.rollout_expert_parallel > 1)):
            continue
        heads = _kv_heads(model) if matrix.kind in ("k_proj", "v_proj") else None
        shards = min(parallel, heads) if heads else parallel
        if matrix.kind in SPLIT_ROWS and (matrix.rows % shards or matrix.rows // shards % rows):
            found = f"{dims} in {shards} shards of {matrix.rows / shards:g} rows"
            yield Problem("error", matrix.name, found, f"shards of whole {rows}-row blocks", f"fewer shards, or {fix}")
        if matrix.kind in SPLIT_COLUMNS and (matrix.columns % parallel or matrix.columns // parallel % columns):
            found = f"{dims} in {parallel} shards of {matrix.columns / parallel:g} columns"
            yield Problem(
                "error", matrix.name, found, f"shards of whole {columns}-column blocks", f"fewer shards, or {fix}"
            )


def _kv_heads(model: nn.Module) -> int:
    config = model.config.get_text_config()
    return getattr(config, "num_key_value_heads", None) or config.num_attention_heads


def _joined(plan: PrecisionPlan, where: Setting, model: nn.Module) -> list[Problem]:
    """vLLM's joined linears: one precision, and seams between blocks."""
    if where.rollout != "vllm" or not plan.rollout.linear.is_fp8:
        return []
    fp8, found = {m.name for m in _fp8(plan, model, "rollout")}, []
    everything = {m.name: m for m in matrices(model)}
    for name in everything:
        parent, _, kind = name.rpartition(".")
        group = next((g for g in JOINED if g[0] == kind), ())
        members = [everything[f"{parent}.{k}"] for k in group if f"{parent}.{k}" in everything]
        inside = [m for m in members if m.name in fp8]
        if inside and len(inside) < len(members):
            outside = ", ".join(m.kind for m in members if m not in inside)
            what = f"FP8 for {', '.join(m.kind for m in inside)}, BF16 for {outside}"
            fix = "vLLM joins them into one linear; put all of them into the fallback, or none"
            found.append(Problem("error", name, what, "one precision for joined linears", fix))
        for matrix in inside[:-1]:
            rows = plan.rollout.linear.weight_block[0]
            if matrix.rows % rows:
                what = f"{matrix.rows} rows before a seam of {'+'.join(group)}"
                fix = f"keep all of {', '.join(group)} in BF16"
                found.append(Problem("error", matrix.name, what, f"a multiple of {rows}", fix))
    return _folded(found)


def _folded(problems) -> list[Problem]:
    """Equal findings of several layers as one, which names the first and counts them."""
    groups: dict[tuple, list[Problem]] = {}
    for problem in problems:
        folded = re.sub(r"\.\d+\.", ".*.", problem.where)
        groups.setdefault((folded, problem.severity, problem.found, problem.allowed), []).append(problem)
    return [
        p[0] if len(p) == 1 else Problem(p[0].severity, f"{p[0].where} (and {len(p) - 1} more)", *key[2:], p[0].fix)
        for key, p in groups.items()
    ]


def _numbers(where: Setting, model: nn.Module) -> Iterator[Problem]:
    """Parallel sizes and lengths that do not divide what they divide."""
    config = model.config.get_text_config()
    experts = {parameter.shape[0] for _, _, parameter in expert_tensors(model)}
    whole = where.tensor_parallel * where.pipeline_parallel * where.context_parallel
    checks = [("tensor x pipeline x context parallel", whole, "gpus", where.gpus)]
    checks += [("rollout_tensor_parallel", where.rollout_tensor_parallel, "gpus", where.gpus)]
    for name in ("tensor_parallel", "rollout_tensor_parallel"):
        checks.append((name, getattr(where, name), "attention heads", config.num_attention_heads))
    checks += [("expert_parallel", where.expert_parallel, "experts", count) for count in experts]
    for name, size, of, total in checks:
        if total % size:
            yield Problem("error", name, f"{size} for {total} {of}", f"a divisor of {total}", "change one of them")
    if where.expert_parallel > 1 and not experts:
        yield Problem("error", "expert_parallel", str(where.expert_parallel), "1", "this model has no fused experts")
    limit = getattr(config, "max_position_embeddings", None)
    if where.max_length and limit and where.max_length > limit:
        fix = "shorten the sequences, or take a model with a longer context"
        yield Problem("error", "max_length", str(where.max_length), f"at most {limit}", fix)


def _padding(plan: PrecisionPlan, where: Setting, model: nn.Module) -> Iterator[Problem]:
    """Tokens of a packed batch must fill whole blocks on every rank; NeMo RL sees to it itself, save for Qwen3.5."""
    linear = plan.trainer.linear
    if not (linear.is_fp8 and where.has_transformer_engine):
        return
    kind = model.config.model_type
    if kind.startswith("qwen3_5"):
        needed, why = max(16, 8 * where.tensor_parallel), "Qwen3.5 packs inside the model: 8 x TP, at least 16"
    else:
        needed = linear.group if linear.group in (128, 32) else 16
        needed *= 2 * where.context_parallel if where.context_parallel > 1 else 1
        needed *= where.tensor_parallel if where.sequence_parallel else 1
        why = f"{linear.group} x 2 CP (if CP > 1) x TP (with sequence parallelism)"
    fix = f"pad packed sequences to a multiple of {needed} ({why})"
    if where.packing_multiple is None:
        yield Problem("note", "packing_multiple", "not given", f"a multiple of {needed}", fix)
    elif where.packing_multiple % needed and (where.trainer != "megatron" or kind.startswith("qwen3_5")):
        yield Problem("error", "packing_multiple", str(where.packing_multiple), f"a multiple of {needed}", fix)


def _cache(plan: PrecisionPlan, where: Setting, model: nn.Module) -> Iterator[Problem]:
    """An FP8 KV cache over multi-head latent attention."""
    if plan.rollout.attention.is_fp8 and getattr(model.config.get_text_config(), "kv_lora_rank", None):
        severity = "error" if where.rollout == "native" or where.is_nemo_rl else "warning"
        fix = "the cache holds a latent vector, not k and v, and scales are named after k and v; take a plan without KV"
        yield Problem(severity, "plan.rollout.attention", "an FP8 KV cache with MLA", "k and v per head", fix)


def _memory(plan: PrecisionPlan, where: Setting, model: nn.Module) -> Iterator[Problem]:
    if where.gpu is None:
        return
    size, limit, gb = memory(plan, model), where.gpu.memory, 1e9
    gpus, tokens, share = where.rollout_tensor_parallel, where.max_length or 1, where.memory_share
    weights = size["rollout_weights" if where.rollout == "vllm" else "master_weights"]
    wide = (
        2 if where.rollout == "native" and not plan.rollout.attention.is_fp8 else 1
    )  # float32 where engines have BF16
    token = wide * size["kv_cache_per_token"]
    room = share * limit * gpus - weights
    fits = int(room // token) if token else tokens
    engine = f"{gpus} x {where.hardware} ({share * limit / gb:.0f} GB usable each)"
    if fits < tokens:
        found = f"{size_text(weights)} of weights and {tokens} tokens of KV cache on {engine}"
        fix = "raise rollout_tensor_parallel, take a larger GPU, shorten max_length, or FP8 in more layers"
        yield Problem("error", "memory (rollout)", found, f"{share * limit * gpus / gb:.0f} GB", fix)
    else:
        found = f"{size_text(weights)} of weights leave room for {fits:,} tokens of KV cache on {engine}"
        yield Problem("note", "memory (rollout)", found, f"{share * limit * gpus / gb:.0f} GB", "it fits")
    state = size["master_weights"] + size["adam"] + size["gradients"]
    state += 0 if where.trainer == "native" else size["master_weights"] // 2  # BF16 parameters beside FP32 masters
    each = state / where.gpus
    found = f"at least {size_text(each)} of weights, gradients and Adam on each of {where.gpus} GPUs"
    if each > limit:
        fix = "more GPUs (sharded), CPU offload of the optimizer, LoRA, or a smaller model"
        yield Problem("error", "memory (trainer)", found, f"{limit / gb:.0f} GB ({where.hardware})", fix)
    elif each + weights / gpus > share * limit and not where.asynchronous:
        fix = "they must take turns on the GPUs: offload the trainer, or let the engine sleep, between phases"
        yield Problem(
            "warning", "memory (both sides)", f"{found}, beside the rollout's weights", "either at a time", fix
        )
