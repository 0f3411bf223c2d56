"""The numbers of the step-time model (speed.py), each with its source, or named an assumption.

`GPUS` are data sheets. `PARAMETERS` are what the equations hold besides: published or measured by others, two of them
calibrated, and some assumed. `DEFAULTS` are the workload and the prices that are taken where nobody says otherwise.

An assumption is nobody's measurement: its `source` is the reason for the value. A source is a place to look it up: an
address, an arXiv number, a file of a named repository. tests/test_speed.py holds the table to that, lists the
assumptions, and finds no other number in the equations.
"""

from __future__ import annotations

from dataclasses import dataclass

from fp8lab.checks import require_positive
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

    def __post_init__(self) -> None:
        if self.name not in HARDWARE:
            raise ValueError(f"no GPU {self.name!r} in setting.HARDWARE; allowed: {', '.join(HARDWARE)}")
        for name in ("bf16", "bandwidth", "watts"):
            require_positive(name, getattr(self, name), finite=True)
        require_positive("fp8", self.fp8, zero=True, finite=True)

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
            source="https://www.nvidia.com/en-us/data-center/a100/ (80 GB SXM); no FP8 tensor cores",
        ),
        GPU(
            name="H100",
            bf16=989e12,
            fp8=1979e12,
            bandwidth=3.35e12,
            watts=700,
            source="https://www.nvidia.com/en-us/data-center/h100/ (SXM)",
        ),
        GPU(
            name="H200",
            bf16=989e12,
            fp8=1979e12,
            bandwidth=4.8e12,
            watts=700,
            source="https://www.nvidia.com/en-us/data-center/h200/ (SXM)",
        ),
        GPU(
            name="B200",
            bf16=2250e12,
            fp8=4500e12,
            bandwidth=8e12,
            watts=1000,
            source="https://www.nvidia.com/en-us/data-center/dgx-b200/, an eighth of it",
        ),
    )
}


@dataclass(frozen=True)
class Parameter:
    """A number of the model."""

    value: float
    unit: str
    source: str
    """Where it can be looked up; of an assumption the reason for it."""
    assumption: bool = False
    """Nobody's measurement."""


PR_1212 = "https://github.com/NVIDIA-NeMo/RL/pull/1212"
AO_2784 = "https://github.com/pytorch/ao/pull/2784"
REFIT = "NVIDIA-NeMo/RL docs/design-docs/nccl-reshard-refit.md"
RECIPE = "NVIDIA-NeMo/RL examples/configs/recipes/llm/grpo-qwen3-8b-base-1n8g-fp8-kvcache-megatron.yaml"
BASE = "NVIDIA-NeMo/RL examples/configs/grpo_math_1B.yaml"

PARAMETERS = {
    "memory_share": Parameter(
        0.6655, "of GPU memory for weights and KV", f"calibrated: 249,952 KV tokens for BF16 Qwen3-8B, {PR_1212}"
    ),
    "decode_fixed": Parameter(
        1.41e-4,
        "s per layer and decode step",
        f"calibrated, for answers of 4,000 tokens: +30 % rollout from FP8 KV over FP8 linears, {PR_1212}",
    ),
    "bandwidth_share": Parameter(
        0.85,
        "of peak bandwidth",
        "quantization kernels reach 85-94 % of the achievable: README of https://github.com/pytorch/ao",
    ),
    "gemm_bf16": Parameter(0.615, "of peak BF16", f"608 of 989 TFLOP/s on an H100, {AO_2784}"),
    "gemm_fp8": Parameter(0.51, "of peak FP8", f"1009 of 1979 TFLOP/s, 1x128 x 128x128, {AO_2784}"),
    "train_share": Parameter(
        0.41, "of peak BF16 in a whole training step", "Llama 3 pre-training, arXiv 2407.21783, table 4"
    ),
    "graph_kernel": Parameter(
        2.5e-6, "s per quantization kernel in a CUDA graph", "a few us; the data is small, the start dominates", True
    ),
    "eager_kernel": Parameter(
        8e-6, "s per quantization kernel launched by Python", "5 to 10 us is what people report", True
    ),
    "rollout_kernels": Parameter(
        4, "quantization kernels per layer and decode step", "inputs of fused qkv, o, gate-up and down: one each", True
    ),
    "operand_kernels": Parameter(
        1, "quantization kernel per operand of a GEMM in training", "none fused with its neighbour", True
    ),
    "quantize_bytes": Parameter(
        3,
        "bytes moved to quantize one weight",
        "reads BF16 (2), writes E4M3 (1): NVIDIA/TransformerEngine transformer_engine/common/recipe/__init__.py",
    ),
    "refit_bf16": Parameter(70e9, "bytes/s of BF16 weights", f"Qwen3-30B in 0.74-1.0 s, {REFIT}"),
    "refit_fp8": Parameter(18e9, "bytes/s of BF16 weights", f"the same in 2.9-4.0 s when it is quantized, {REFIT}"),
}
"""Name -> value, unit and source. Functions take other values as keyword `parameters`."""

DEFAULTS = {
    "prompts": Parameter(32, "prompts a step", f"num_prompts_per_step, {BASE}"),
    "generations": Parameter(16, "answers a prompt", f"num_generations_per_prompt, {BASE}"),
    "prompt_tokens": Parameter(150, "tokens, mean", "a question in prose; it hardly matters beside the answer", True),
    "response_tokens": Parameter(
        4000, "tokens, mean", f"not published; the run could write 20,480 (11.10 sequences fit, {PR_1212})", True
    ),
    "gpus": Parameter(8, "GPUs", f"gpus_per_node, {RECIPE}"),
    "tensor_parallel": Parameter(1, "GPUs per rollout engine", f"vllm_cfg.tensor_parallel_size, {BASE}"),
    "expert_parallel": Parameter(1, "GPUs that share the experts", f"expert_model_parallel_size, {BASE}"),
    "micro_batch_tokens": Parameter(
        8192, "tokens per GPU and micro-batch", f"max_total_sequence_length of one sequence, {RECIPE}"
    ),
    "score_passes": Parameter(
        1, "forward passes besides training", "log-probs without a reference: NVIDIA-NeMo/RL nemo_rl/algorithms/grpo.py"
    ),
    "price": Parameter(3.0, "currency per GPU-hour", "a round number; yours to set", True),
    "load": Parameter(0.8, "of the greatest power, on average", "between decoding and GEMMs; yours to set", True),
}
"""What `Workload` and `cost` take unless told: name -> value, unit and source."""
