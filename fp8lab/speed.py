"""Where does the time of one RL step go on GPUs, and when does FP8 pay? A roofline model, and its sources.

    decode step   = fixed + weight bytes / bandwidth + KV bytes of all running sequences / bandwidth
    rollout       = (tokens to write / sequences that fit) x decode step + prefill
    train         = linear FLOPs / GEMM speed + everything else (attention, norms, optimizer, network) + quantizing
    step          = rollout + score + train + refit + calibrate

FP8 halves the bytes of weights and of the KV cache, which is what decoding waits for, and doubles the peak of the
GEMMs, which is what training waits for. It does not touch `fixed`, and it adds kernels that quantize. So it pays with
large batches and long answers, and not with small ones.

The model is calibrated on two figures of NeMo RL pull request 1212 (Qwen3-8B-Base): the KV capacity in BF16 fixes the
memory that the engine may use, and 30 % more rollout from an FP8 KV cache over FP8 linears fixes `decode_fixed`. The
other published figures are predictions, and tests/test_speed.py holds the model to them within five points. Every other
number is in `PARAMETERS` with its source; those that say "assumed" are nobody's measurement, nor are the answer lengths
of that run, which are not published. For MoE training much hangs on one assumed number, `eager_kernel`: at 8 us a
launch Qwen3-30B-A3B trains slower in FP8, at 2.5 us it does not.

Left out: overlap of rollout and training (async RL), the long tail of answers in a batch, pipeline bubbles, the choice
of kernels. This is a model. Nothing here was measured on a GPU by us.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fp8lab import coverage
from fp8lab.names import num_decoder_layers
from fp8lab.precision import PrecisionPlan, Side
from fp8lab.setting import HARDWARE


@dataclass(frozen=True, kw_only=True)
class GPU:
    """Data sheet of one GPU (dense, without sparsity)."""

    name: str
    """In setting.HARDWARE, which knows its memory."""
    bf16: float
    """Peak FLOP/s."""
    fp8: float
    """Peak FLOP/s; 0 where there are no FP8 tensor cores."""
    bandwidth: float
    """Bytes/s of its memory."""
    watts: float
    """Most it may draw."""
    source: str

    @property
    def memory(self) -> float:
        """Bytes."""
        return HARDWARE[self.name].memory


GPUS = {
    gpu.name: gpu
    for gpu in (
        GPU(
            name="A100",
            bf16=312e12,
            fp8=0,
            bandwidth=2.039e12,
            watts=400,
            source="NVIDIA A100 80GB SXM data sheet; no FP8 tensor cores",
        ),
        GPU(
            name="H100",
            bf16=989e12,
            fp8=1979e12,
            bandwidth=3.35e12,
            watts=700,
            source="NVIDIA H100 SXM data sheet",
        ),
        GPU(
            name="H200",
            bf16=989e12,
            fp8=1979e12,
            bandwidth=4.8e12,
            watts=700,
            source="NVIDIA H200 SXM data sheet",
        ),
        GPU(
            name="B200",
            bf16=2250e12,
            fp8=4500e12,
            bandwidth=8e12,
            watts=1000,
            source="NVIDIA DGX B200 data sheet, an eighth of it",
        ),
    )
}


@dataclass(frozen=True)
class Parameter:
    """A number of the model."""

    value: float
    unit: str
    source: str


PARAMETERS = {
    "memory_share": Parameter(
        0.6655, "of GPU memory for weights and KV", "calibrated: 249,952 KV tokens for BF16 Qwen3-8B (NeMo RL PR 1212)"
    ),
    "decode_fixed": Parameter(
        1.37e-4,
        "s per layer and decode step",
        "calibrated: +30 % rollout from FP8 KV over FP8 linears (NeMo RL PR 1212)",
    ),
    "bandwidth_share": Parameter(0.85, "of peak bandwidth", "torchao README: quantization kernels reach 85-94 %"),
    "gemm_bf16": Parameter(0.615, "of peak BF16", "608 of 989 TFLOP/s on an H100 (pytorch/ao issue 2784)"),
    "gemm_fp8": Parameter(0.51, "of peak FP8", "1009 of 1979 TFLOP/s, 1x128 x 128x128 (pytorch/ao issue 2784)"),
    "train_share": Parameter(
        0.41, "of peak BF16 in a whole training step", "Llama 3 (arXiv 2407.21783, table 4): 400 TFLOP/s per H100"
    ),
    "graph_kernel": Parameter(2.5e-6, "s per quantization kernel in a CUDA graph", "assumed"),
    "eager_kernel": Parameter(8e-6, "s per quantization kernel launched by Python", "assumed (5-10 us is usual)"),
    "refit_bf16": Parameter(70e9, "bytes/s of BF16 weights", "Qwen3-30B in 0.74-1.0 s (NeMo RL nccl-reshard-refit.md)"),
    "refit_fp8": Parameter(18e9, "bytes/s of BF16 weights", "the same in 2.9-4.0 s when it is quantized"),
    "calibration_samples": Parameter(256, "sequences", "NeMo RL lm_policy.py, max_calib_samples"),
}
"""Name -> value, unit and source. Functions take other values as keyword `parameters`."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One RL step: who answers what, and on how many GPUs."""

    prompts: int = 32
    generations: int = 16
    prompt_tokens: float = 150
    """Mean."""
    response_tokens: float = 4000
    """Mean."""
    gpus: int = 8
    tensor_parallel: int = 1
    """GPUs that share one rollout engine."""
    expert_parallel: int = 1
    """GPUs that share the experts of a MoE in training; each sees the tokens of all of them."""
    micro_batch_tokens: int = 8192
    """Tokens per GPU in one forward and backward of training."""
    score_passes: int = 1
    """Forward passes over the answers besides training: 1 for the trainer's log-probs, 2 with a reference model."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if not getattr(self, field.name) > 0:
                raise ValueError(f"{field.name} is {getattr(self, field.name)!r}; it must be > 0")
        if self.gpus % self.tensor_parallel:
            raise ValueError(f"{self.gpus} gpus are no multiple of tensor_parallel {self.tensor_parallel}")


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """What the model costs: counted on the meta device, so an 8B config needs no memory."""

    layers: int
    linears: tuple[tuple[str, int, int, int], ...]
    """(name, parameters, copies, copies a token uses) of every planned weight: a dense linear is one copy, a fused
    expert tensor as many as there are experts."""
    head: int
    """Parameters of lm_head."""
    other: int
    """All other parameters, embeddings included unless lm_head is tied to them."""
    kv_elements: int
    """Keys and values of one token, over all layers."""

    @classmethod
    def of(cls, model: Any) -> ModelShape:
        """Count a model, config, config dict or name that `coverage.meta_model` takes."""
        model, bf16 = coverage.meta_model(model), PrecisionPlan.preset("bf16")
        linears, head, other = [], 0, 0
        for row in coverage.rows(bf16, model):
            size = math.prod(row.shape)
            if row.side == "trainer":
                continue
            if row.tensor in ("linear", "experts"):
                copies = row.shape[0] if row.tensor == "experts" else 1
                used = round(row.flops / 2 / size * copies)
                linears.append((row.name.removesuffix(".weight"), size // copies, copies, used))
            elif row.tensor == "lm_head":
                head = size
                other -= size if row.bytes == 0 else 0  # tied: one tensor, counted as an embedding before
            else:
                other += size
        kv = coverage.kv_cache_bytes(bf16, model.config) // 2
        return cls(layers=num_decoder_layers(model), linears=tuple(linears), head=head, other=other, kv_elements=kv)

    def weights(self, plan: PrecisionPlan, side: Side) -> Weights:
        """Parameters stored and used per token, in FP8 and in BF16."""
        fp8 = [x for x in self.linears if plan.decide(x[0], side, self.layers).precision.is_fp8]
        bf16 = [x for x in self.linears if x not in fp8]
        experts = [(size, copies) for _, size, copies, _ in fp8 if copies > 1]
        return Weights(
            fp8=sum(size * copies for _, size, copies, _ in fp8),
            bf16=sum(size * copies for _, size, copies, _ in bf16),
            fp8_used=sum(size * active for _, size, _, active in fp8),
            bf16_used=sum(size * active for _, size, _, active in bf16),
            fp8_matrices=len(fp8) - len(experts),
            fp8_experts=sum(copies for _, copies in experts),
            fp8_expert_size=sum(size * copies for size, copies in experts),
        )


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Parameters of the planned linears under one side of a plan."""

    fp8: int
    bf16: int
    fp8_used: int
    """By one token: of experts only the chosen ones."""
    bf16_used: int
    fp8_matrices: int
    """Dense matrices, each quantized on every GPU."""
    fp8_experts: int
    """Matrices of experts, spread over expert_parallel GPUs."""
    fp8_expert_size: int
    """Parameters of all of these."""


def kv_capacity(
    shape: ModelShape,
    plan: PrecisionPlan,
    gpu: GPU,
    *,
    tensor_parallel: int = 1,
    parameters: Mapping[str, float] | None = None,
) -> int:
    """Tokens whose keys and values fit beside the weights on one rollout engine."""
    p = _values(parameters)
    weights = shape.weights(plan, "rollout")
    stored = weights.fp8 + 2 * (weights.bf16 + shape.other + shape.head)
    room = p["memory_share"] * gpu.memory * tensor_parallel - stored
    return max(0, int(room / (shape.kv_elements * kv_bytes(plan))))


def kv_bytes(plan: PrecisionPlan) -> int:
    """Bytes of one element of the KV cache under the plan's rollout side."""
    return 1 if plan.rollout.attention.is_fp8 else 2


def decode_step(
    shape: ModelShape,
    plan: PrecisionPlan,
    gpu: GPU,
    *,
    sequences: float,
    context: float,
    tensor_parallel: int = 1,
    parameters: Mapping[str, float] | None = None,
) -> dict[str, float]:
    """Seconds of one decode step of one engine, by cause: `fixed`, `weights`, `kv`, `quantize`."""
    p = _values(parameters)
    weights = shape.weights(plan, "rollout")
    bandwidth = gpu.bandwidth * p["bandwidth_share"] * tensor_parallel
    read_fp8, read_bf16 = (_touched(shape, plan, sequences, fp8) for fp8 in (True, False))
    read = (read_fp8 + 2 * (read_bf16 + shape.head)) / bandwidth
    fp8_flops, bf16_flops = 2 * sequences * weights.fp8_used, 2 * sequences * (weights.bf16_used + shape.head)
    peak = tensor_parallel * max(1.0, gpu.fp8) * p["gemm_fp8"], tensor_parallel * gpu.bf16 * p["gemm_bf16"]
    return {
        "fixed": shape.layers * p["decode_fixed"],
        "weights": max(read, fp8_flops / peak[0] + bf16_flops / peak[1]),
        "kv": sequences * context * shape.kv_elements * kv_bytes(plan) / bandwidth,
        "quantize": 4 * shape.layers * p["graph_kernel"] if weights.fp8 else 0.0,
    }


def _touched(shape: ModelShape, plan: PrecisionPlan, sequences: float, fp8: bool) -> float:
    """Parameters of one format that a decode step reads: of experts those that any sequence chose, if all are alike."""
    total = 0.0
    for name, size, copies, active in shape.linears:
        if plan.decide(name, "rollout", shape.layers).precision.is_fp8 == fp8:
            total += size * copies * (1 - (1 - active / copies) ** sequences)
    return total


def step(
    shape: ModelShape, plan: PrecisionPlan, gpu: GPU, work: Workload, *, parameters: Mapping[str, float] | None = None
) -> dict[str, float]:
    """Seconds of one RL step by phase: `rollout`, `score`, `train`, `refit`, `calibrate`.

    ValueError if the plan needs FP8 tensor cores that the GPU lacks, or if not even one sequence fits into the memory
    of an engine.
    """
    p = _values(parameters)
    if gpu.fp8 == 0 and (plan.rollout.linear.is_fp8 or plan.trainer.linear.is_fp8):
        raise ValueError(f"{gpu.name} has no FP8 tensor cores; plan {plan.name!r} needs H100, H200 or B200")
    engines = work.gpus // work.tensor_parallel
    sequences = work.prompts * work.generations
    length = work.prompt_tokens + work.response_tokens
    context = work.prompt_tokens + work.response_tokens / 2
    capacity = kv_capacity(shape, plan, gpu, tensor_parallel=work.tensor_parallel, parameters=parameters)
    fit = capacity / context
    if fit < 1:
        raise ValueError(
            f"the weights leave room for {capacity} tokens of KV cache on {work.tensor_parallel} x {gpu.name}, one "
            f"sequence needs {context:.0f}; raise tensor_parallel or take a larger GPU"
        )
    running = min(sequences / engines, fit)
    decode = decode_step(
        shape,
        plan,
        gpu,
        sequences=running,
        context=context,
        tensor_parallel=work.tensor_parallel,
        parameters=parameters,
    )
    prefill = _linear_seconds(shape.weights(plan, "rollout"), shape, gpu, p, work.prompts * work.prompt_tokens, 2)
    rollout = sequences / engines / running * work.response_tokens * sum(decode.values()) + prefill / work.gpus
    tokens = sequences * length
    trainer = shape.weights(plan, "trainer")
    forward = _train_seconds(shape, trainer, gpu, p, tokens, work, passes=2)
    payload = 2 * (trainer.fp8 + trainer.bf16 + shape.other + shape.head)
    refit_speed = p["refit_fp8"] if shape.weights(plan, "rollout").fp8 else p["refit_bf16"]
    calibrated = min(1.0, p["calibration_samples"] / sequences) if plan.rollout.attention.is_fp8 else 0.0
    return {
        "rollout": rollout,
        "score": work.score_passes * forward,
        "train": _train_seconds(shape, trainer, gpu, p, tokens, work, passes=6),
        "refit": payload / refit_speed,
        "calibrate": calibrated * forward,
    }


def _linear_seconds(weights: Weights, shape: ModelShape, gpu: GPU, p: Mapping[str, float], tokens: float, passes: int):
    """Seconds on one GPU for the linears: passes = 2 FLOPs per parameter and token forward, 6 with backward."""
    fp8 = passes * weights.fp8_used * tokens / (gpu.fp8 * p["gemm_fp8"]) if weights.fp8_used else 0.0
    return fp8 + passes * (weights.bf16_used + shape.head) * tokens / (gpu.bf16 * p["gemm_bf16"])


def _train_seconds(shape: ModelShape, weights: Weights, gpu: GPU, p: Mapping[str, float], tokens, work, passes: int):
    """Seconds on all GPUs for tokens: linears, everything else (as long as in BF16), and quantizing."""
    linear = _linear_seconds(weights, shape, gpu, p, tokens, passes)
    flops = passes * (weights.fp8_used + weights.bf16_used + shape.head) * tokens
    other = flops / gpu.bf16 * (1 / p["train_share"] - 1 / p["gemm_bf16"])
    micro_batches = tokens / work.gpus / work.micro_batch_tokens
    kernels = 2 if passes == 2 else 6  # x and w forward; with backward also g, twice, x and w the other way round
    matrices = weights.fp8_matrices + weights.fp8_experts / work.expert_parallel
    launches = micro_batches * kernels * matrices * p["eager_kernel"]
    size = weights.fp8 - weights.fp8_expert_size * (1 - 1 / work.expert_parallel)
    weight_bytes = micro_batches * kernels / 2 * 3 * size / (gpu.bandwidth * p["bandwidth_share"])
    return (linear + other) / work.gpus + launches + weight_bytes


def gains(times: Mapping[str, Mapping[str, float]], base: str = "bf16") -> dict[str, dict[str, float]]:
    """Plan -> phase -> how much more throughput than `base` (0.48: 48 % more), plus `step` for the whole."""
    result = {}
    for name, phases in times.items():
        whole = sum(times[base].values()) / sum(phases.values()) - 1
        result[name] = {k: times[base][k] / v - 1 for k, v in phases.items() if v and times[base].get(k)}
        result[name]["step"] = whole
    return result


def cost(seconds: float, steps: int, gpu: GPU, gpus: int, *, price: float = 3.0, load: float = 0.8) -> dict[str, float]:
    """GPU-hours, kWh and price of a run.

    price: currency per GPU-hour. load: share of the GPU's greatest power it draws on average. 48 % more throughput is
    1 - 1/1.48 = 32 % fewer GPU-hours.
    """
    hours = seconds * steps / 3600 * gpus
    return {"gpu_hours": hours, "kwh": hours * gpu.watts * load / 1000, "price": hours * price}


def _values(parameters: Mapping[str, float] | None) -> dict[str, float]:
    parameters = parameters or {}
    if unknown := sorted(set(parameters) - set(PARAMETERS)):
        raise ValueError(f"unknown parameters {unknown}; allowed: {', '.join(PARAMETERS)}")
    return {name: parameter.value for name, parameter in PARAMETERS.items()} | dict(parameters)
