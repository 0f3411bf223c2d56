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
other published figures are predictions, and tests/test_speed.py holds the model to them within five points. Every
number is in speed_numbers.py, with its source or as a named assumption. Three things to know:

- MISSED: recalibration is said to take 2 to 3 % of a step; the model says 10 %. NeMo RL scores the whole batch once
  more (grpo.py, `recompute_kv_scales`), so that is what is charged; with forward and backward at the speed of the best
  GEMM and nothing around them it is 8.1 %. The model's steps are too short: 32 s where NeMo RL reports 97.7 s (pull
  request 1560: Llama 3.1 8B, 16 H100). Padding, waiting and the long tail of answers, all left out, make a step longer
  and that share smaller. So compare plans by the model; do not read seconds off it.
- 48 % with KV cache hangs on a third assumption, answers of 4,000 tokens on average; the mean is not published, the
  limit was about 20,000. With `decode_fixed` fitted anew to the same 30 % it is 63 % at 2,000 tokens, 53 % at 3,000,
  47.5 % at 4,000, 44 % at 5,000, 42 % at 6,000: within five points from about 3,000 to 5,000, not at 2,000 or 6,000,
  and again from 8,000 to 9,000, where memory limits BF16 (and recalibration is 6 to 7 %).
- For MoE training much hangs on one assumption, `eager_kernel`: at 8 us a launch Qwen3-30B-A3B trains slower in FP8,
  at 2.5 us it does not.

Left out besides: overlap of rollout and training (async RL), pipeline bubbles, the choice of kernels, the bytes that
quantizing activations moves. This is a model. Nothing here was measured on a GPU by us.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fp8lab import coverage
from fp8lab.checks import require_count, require_positive
from fp8lab.names import num_decoder_layers
from fp8lab.precision import PrecisionPlan, Side
from fp8lab.speed_numbers import DEFAULTS, GPU, GPUS, PARAMETERS


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One RL step: who answers what, and on how many GPUs."""

    prompts: int = int(DEFAULTS["prompts"].value)
    generations: int = int(DEFAULTS["generations"].value)
    prompt_tokens: float = DEFAULTS["prompt_tokens"].value
    """Mean."""
    response_tokens: float = DEFAULTS["response_tokens"].value
    """Mean."""
    gpus: int = int(DEFAULTS["gpus"].value)
    tensor_parallel: int = int(DEFAULTS["tensor_parallel"].value)
    """GPUs that share one rollout engine."""
    expert_parallel: int = int(DEFAULTS["expert_parallel"].value)
    """GPUs that share the experts of a MoE in training; each sees the tokens of all of them."""
    micro_batch_tokens: int = int(DEFAULTS["micro_batch_tokens"].value)
    """Tokens per GPU in one forward and backward of training."""
    score_passes: int = int(DEFAULTS["score_passes"].value)
    """Forward passes over the answers besides training: 1 for the trainer's log-probs, 2 with a reference model."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if field.name.endswith("_tokens"):
                require_positive(field.name, getattr(self, field.name), finite=True)
            else:
                require_count(field.name, getattr(self, field.name))
        for name in ("tensor_parallel", "expert_parallel"):
            if self.gpus % getattr(self, name):
                raise ValueError(f"{self.gpus} gpus are no multiple of {name} {getattr(self, name)}; take a divisor")


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
    """Tokens whose keys and values fit beside the weights on one rollout engine.

    ValueError: as `decode_step`.
    """
    p = _values(parameters)
    require_count("tensor_parallel", tensor_parallel)
    _require_fp8(gpu, plan)
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
    """Seconds of one decode step of one engine, by cause: `fixed`, `weights`, `kv`, `quantize`.

    ValueError if the plan needs FP8 tensor cores that the GPU lacks, or if a number is not > 0.
    """
    p = _values(parameters)
    require_positive("sequences", sequences, finite=True)
    require_positive("context", context, finite=True)
    require_count("tensor_parallel", tensor_parallel)
    _require_fp8(gpu, plan)
    weights = shape.weights(plan, "rollout")
    bandwidth = gpu.bandwidth * p["bandwidth_share"] * tensor_parallel
    read_fp8, read_bf16 = (_touched(shape, plan, sequences, fp8) for fp8 in (True, False))
    read = (read_fp8 + 2 * (read_bf16 + shape.head)) / bandwidth
    compute = _linear_seconds(weights, shape, gpu, p, sequences, gemms=1) / tensor_parallel
    return {
        "fixed": shape.layers * p["decode_fixed"],
        "weights": max(read, compute),
        "kv": sequences * context * shape.kv_elements * kv_bytes(plan) / bandwidth,
        "quantize": p["rollout_kernels"] * shape.layers * p["graph_kernel"] if weights.fp8 else 0.0,
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

    ValueError if the plan needs FP8 tensor cores that the GPU lacks, if not even one sequence fits into the memory
    of an engine, or if the experts cannot be spread over `expert_parallel` GPUs.
    """
    p = _values(parameters)
    _require_fp8(gpu, plan)
    for name, _, copies, _ in shape.linears:
        if copies > 1 and copies % work.expert_parallel:
            raise ValueError(f"{name}: {copies} experts are no multiple of expert_parallel {work.expert_parallel}")
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
    prefill = _linear_seconds(shape.weights(plan, "rollout"), shape, gpu, p, work.prompts * work.prompt_tokens, gemms=1)
    rollout = sequences / engines / running * work.response_tokens * sum(decode.values()) + prefill / work.gpus
    tokens = sequences * length
    trainer = shape.weights(plan, "trainer")
    forward = _train_seconds(shape, trainer, gpu, p, tokens, work, backward=False)
    payload = 2 * (trainer.fp8 + trainer.bf16 + shape.other + shape.head)
    refit_speed = p["refit_fp8"] if shape.weights(plan, "rollout").fp8 else p["refit_bf16"]
    return {
        "rollout": rollout,
        "score": work.score_passes * forward,
        "train": _train_seconds(shape, trainer, gpu, p, tokens, work, backward=True),
        "refit": payload / refit_speed,
        "calibrate": forward if plan.rollout.attention.is_fp8 else 0.0,
    }


def _linear_seconds(
    weights: Weights, shape: ModelShape, gpu: GPU, p: Mapping[str, float], tokens: float, *, gemms: int
):
    """Seconds on one GPU for the linears: 1 GEMM a weight forward, 3 with backward, 2 FLOPs a parameter and token."""
    flops = 2 * gemms * tokens
    fp8 = flops * weights.fp8_used / (gpu.fp8 * p["gemm_fp8"]) if weights.fp8_used else 0.0
    return fp8 + flops * (weights.bf16_used + shape.head) / (gpu.bf16 * p["gemm_bf16"])


def _train_seconds(
    shape: ModelShape, weights: Weights, gpu: GPU, p: Mapping[str, float], tokens, work, *, backward: bool
):
    """Seconds on all GPUs for tokens: linears, everything else (as long as in BF16), and quantizing."""
    gemms = 1 + 2 * backward  # y = x w; grad x = g w, grad w = g x: the weight is an operand of the first two
    linear = _linear_seconds(weights, shape, gpu, p, tokens, gemms=gemms)
    flops = 2 * gemms * (weights.fp8_used + weights.bf16_used + shape.head) * tokens
    other = flops / gpu.bf16 * (1 / p["train_share"] - 1 / p["gemm_bf16"])
    micro_batches = tokens / work.gpus / work.micro_batch_tokens
    matrices = weights.fp8_matrices + weights.fp8_experts / work.expert_parallel
    launches = micro_batches * 2 * gemms * p["operand_kernels"] * matrices * p["eager_kernel"]
    size = weights.fp8 - weights.fp8_expert_size * (1 - 1 / work.expert_parallel)
    moved = micro_batches * (1 + backward) * p["quantize_bytes"] * size
    return (linear + other) / work.gpus + launches + moved / (gpu.bandwidth * p["bandwidth_share"])


def fit_decode_fixed(shape: ModelShape, gpu: GPU, work: Workload, *, gain: float = 0.30) -> float:
    """Value of `decode_fixed` at which an FP8 KV cache over FP8 linears brings `gain` more rollout.

    How that parameter was calibrated; 0.30 is pull request 1212's, for Qwen3-8B-Base. A rollout's time is a straight
    line in it, so two points of each plan say all. ValueError if no value > 0 does it.
    """
    lines = []
    for name in ("fp8-rollout", "fp8-rollout-kv"):
        plan = PrecisionPlan.preset(name)
        zero, one = (step(shape, plan, gpu, work, parameters={"decode_fixed": x})["rollout"] for x in (0.0, 1.0))
        lines.append((zero, one - zero))
    (linear, linear_slope), (cache, cache_slope) = lines
    found = (linear - (1 + gain) * cache) / ((1 + gain) * cache_slope - linear_slope)
    if not found > 0:
        raise ValueError(
            f"no decode_fixed > 0 makes the KV cache bring {gain:+.0%} with {work}; try other answer lengths"
        )
    return found


def gains(times: Mapping[str, Mapping[str, float]], base: str = "bf16") -> dict[str, dict[str, float]]:
    """Plan -> phase -> how much more throughput than `base` (0.48: 48 % more), plus `step` for the whole."""
    result = {}
    for name, phases in times.items():
        whole = sum(times[base].values()) / sum(phases.values()) - 1
        result[name] = {k: times[base][k] / v - 1 for k, v in phases.items() if v and times[base].get(k)}
        result[name]["step"] = whole
    return result


def cost(
    seconds: float,
    steps: int,
    gpu: GPU,
    gpus: int,
    *,
    price: float = DEFAULTS["price"].value,
    load: float = DEFAULTS["load"].value,
) -> dict[str, float]:
    """GPU-hours, kWh and price of a run.

    price: currency per GPU-hour. load: share of the GPU's greatest power it draws on average. 48 % more throughput is
    1 - 1/1.48 = 32 % fewer GPU-hours.
    """
    for name, value in (("seconds", seconds), ("price", price), ("load", load)):
        require_positive(name, value, zero=True, finite=True)
    for name, value in (("steps", steps), ("gpus", gpus)):
        require_count(name, value)
    if load > 1:
        raise ValueError(f"load is {load!r}; it is a share of the GPU's greatest power, at most 1")
    hours = seconds * steps / 3600 * gpus
    return {"gpu_hours": hours, "kwh": hours * gpu.watts * load / 1000, "price": hours * price}


def _require_fp8(gpu: GPU, plan: PrecisionPlan) -> None:
    fp8 = plan.rollout.linear.is_fp8 or plan.trainer.linear.is_fp8 or plan.rollout.attention.is_fp8
    if gpu.fp8 == 0 and fp8:
        able = ", ".join(name for name, other in GPUS.items() if other.fp8)
        raise ValueError(f"{gpu.name} has no FP8 tensor cores; plan {plan.name!r} needs one of {able}")


def _values(parameters: Mapping[str, float] | None) -> dict[str, float]:
    parameters = parameters or {}
    if unknown := sorted(set(parameters) - set(PARAMETERS)):
        raise ValueError(f"unknown parameters {unknown}; allowed: {', '.join(PARAMETERS)}")
    for name, value in parameters.items():
        zero = PARAMETERS[name].unit.startswith(("s per", "quantization", "bytes moved"))
        require_positive(name, value, zero=zero, finite=True)
    return {name: parameter.value for name, parameter in PARAMETERS.items()} | dict(parameters)
