"""Where a plan is to run: engines, GPUs, how they are split, and the environment; and what may be wrong with it.

A `Setting` describes a run as far as FP8 cares. `HARDWARE` is a small table of GPUs. A `Problem` is one finding of
preflight.py: where, what was found, what is allowed, what to do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from fp8lab.checks import require_choice, require_types
from fp8lab.grpo import GRPOConfig

ROLLOUTS = ("native", "vllm")
TRAINERS = ("native", "transformer_engine", "megatron", "dtensor")
SEVERITIES = ("error", "warning", "note")


@dataclass(frozen=True)
class Problem:
    """One finding."""

    severity: str
    """`error`: it fails, or computes something else than the plan says; `warning`: unproven or doubtful; `note`."""
    where: str
    """A plan's key, a setting, an environment variable, or a layer."""
    found: str
    allowed: str
    fix: str

    def __str__(self) -> str:
        return f"{self.severity}: {self.where}: found {self.found}; allowed: {self.allowed}; {self.fix}"


@dataclass(frozen=True)
class GPUKind:
    """What preflight needs to know of a GPU."""

    memory: float
    """Bytes, by the data sheet."""
    capability: tuple[int, int]
    """CUDA compute capability (https://developer.nvidia.com/cuda-gpus)."""

    @property
    def has_fp8(self) -> bool:
        """FP8 tensor cores: Ada (8.9), Hopper (9.0) and later."""
        return self.capability >= (8, 9)


HARDWARE = {
    "A100": GPUKind(80e9, (8, 0)),
    "L40S": GPUKind(48e9, (8, 9)),
    "RTX4090": GPUKind(24e9, (8, 9)),
    "H100": GPUKind(80e9, (9, 0)),
    "H200": GPUKind(141e9, (9, 0)),
    "B200": GPUKind(180e9, (10, 0)),
    "GB200": GPUKind(186e9, (10, 0)),
    "RTX5090": GPUKind(32e9, (12, 0)),
}
"""Memory from NVIDIA's data sheets (A100 and H100: the 80 GB SXM; B200: an eighth of a DGX; GB200: 13.4 TB / 72)."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Everything preflight looks at besides the plan and the model; all of it has a harmless default."""

    rollout: str = "native"
    """`native` (transformers, here) or `vllm`."""
    trainer: str = "native"
    """`native`, `transformer_engine` (fp8lab on a GPU), or NeMo RL's `megatron` and `dtensor`."""
    hardware: str | None = None
    """A name in HARDWARE; None: this machine, emulated."""
    gpus: int = 1
    rollout_tensor_parallel: int = 1
    """GPUs that share one rollout engine."""
    rollout_expert_parallel: int = 1
    """Above 1 an engine's GPUs hold whole experts instead of slices of all."""
    memory_share: float = 0.9
    """Share of each GPU's memory that the rollout engine may take; vLLM's `gpu_memory_utilization` and its default."""
    tensor_parallel: int = 1
    """The trainer's; likewise the next ones."""
    pipeline_parallel: int = 1
    expert_parallel: int = 1
    context_parallel: int = 1
    sequence_parallel: bool = False
    max_length: int | None = None
    """Longest sequence in tokens, prompt included."""
    packing_multiple: int | None = None
    """The trainer pads packed sequences to a multiple of this (NeMo RL: make_sequence_length_divisible_by)."""
    asynchronous: bool = False
    """Rollouts run beside training, on other GPUs."""
    lora: bool = False
    grpo: GRPOConfig | None = None
    allow_uncorrected_fp8_rollout: bool = False
    environment: Mapping = field(default_factory=dict)
    """Environment variables of the run; one that is not here is not set."""

    def __post_init__(self) -> None:
        require_types(self)
        require_choice("rollout", self.rollout, ROLLOUTS)
        require_choice("trainer", self.trainer, TRAINERS)
        require_choice("hardware", self.hardware, (None, *HARDWARE))
        for name in ("gpus", "max_length", "packing_multiple", *(f.name for f in fields(self) if "parallel" in f.name)):
            if type(value := getattr(self, name)) is int and value < 1:
                raise ValueError(f"{name} is {value!r}; it must be an integer >= 1")
        if not 0 < self.memory_share <= 1:
            raise ValueError(f"memory_share is {self.memory_share!r}; it must be above 0 and at most 1")
        for name, value in self.environment.items():
            if not isinstance(value, str):
                raise ValueError(f"environment has {name}={value!r}; it must map names to text, for example '1'")

    @property
    def gpu(self) -> GPUKind | None:
        """The row of HARDWARE."""
        return HARDWARE.get(self.hardware or "")

    @property
    def is_nemo_rl(self) -> bool:
        """True if the trainer is one of NeMo RL's."""
        return self.trainer in ("megatron", "dtensor")

    @property
    def has_transformer_engine(self) -> bool:
        """True if the trainer's FP8 is Transformer Engine's."""
        return self.trainer in ("transformer_engine", "megatron")
