"""Past one process: `torchrun --nproc-per-node N -m fp8lab run RECIPE`, data parallel with FSDP2.

    rollout    each process samples for its share of the prompts, on an engine of its own; then all exchange rollouts,
               so that each holds the whole batch: advantages, loss weights and metrics are those of one process
    train      each runs the forwards and backwards of its share of the groups; gradients are summed over processes
    weights    `fully_shard`, a unit per decoder layer: parameters, gradients and AdamW's moments are spread out
    refit      parameters are gathered whole, and each engine quantizes them

A layer's float32 weight is whole while its forward runs. It is quantized there, so its blocks are those of the full
tensor wherever the shards begin, and nothing is ever sliced inside a block. The quantized copies stay until the next
update, on every process: emulation saves no memory on those. `grad_weight` sums over a process's own tokens, in 128
token blocks: two processes give the gradients of one where a process's tokens fill whole blocks. An expert's never do:
its gradient differs by 1 to 2 % from that of the undivided batch, and not at all from that of a single process which
takes the same parts as micro-batches (`micro_batch_size`). No other gradient changes, and no token another expert.

Everything that communicates is torch's: `fully_shard`, DTensor, all_reduce, all_gather_object. Left out: tensor,
pipeline and expert parallelism, more than the CPU's gloo (the loop runs on CPUs), and a sharded checkpoint format: a
checkpoint is gathered and written by the first process as by a single one, so any number of processes can resume it.
Shares of the prompts draw other random numbers: another number of processes is another sample, not a bit-exact replay.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import importlib
import os
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from fp8lab.names import layer_index

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from fp8lab.experiment import ExperimentConfig
    from fp8lab.rollout import Rollout

Items = TypeVar("Items", bound=Sequence)


def join() -> None:
    """Join the processes that torchrun started; nothing to do in a process on its own."""
    if int(os.environ.get("WORLD_SIZE", 1)) > 1 and not _joined():
        importlib.import_module("torch.distributed.nn")  # later, this group would be its functions' default argument
        dist.init_process_group("gloo")


def leave() -> None:
    """Undo `join`, at the end of the program, when no sharded model is used any more.

    gloo's threads end with the last reference to their group, and torch's DTensor caches keep one in the mesh. A thread
    that outlives the interpreter may let go of a tensor when that is gone, and then aborts the process.
    """
    if _joined():
        dist.destroy_process_group()
        if _mesh.cache_info().currsize:
            getattr(_mesh(), "_pg_registry", {}).clear()
            _mesh.cache_clear()
        gc.collect()


@functools.cache
def _mesh() -> DeviceMesh:
    """All processes in a row."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (size(),))


def _joined() -> bool:
    return dist.is_available() and dist.is_initialized()


def size() -> int:
    """How many processes train together; 1 outside torchrun."""
    return dist.get_world_size() if _joined() else 1


def rank() -> int:
    """The number of this process; 0, which alone writes, outside torchrun."""
    return dist.get_rank() if _joined() else 0


def share(items: Items) -> Items:
    """This process's part of a sequence, in order; ValueError if not all processes can have equally many."""
    if len(items) % size():
        raise ValueError(f"{len(items)} prompts do not split evenly over {size()} processes; choose a multiple")
    each = len(items) // size()
    return items[rank() * each : (rank() + 1) * each]


def require_shares(config: ExperimentConfig) -> None:
    """ValueError, under torchrun, for an experiment that cannot be divided."""
    if size() == 1:
        return
    share = size() * config.grpo.steps_per_generation
    if config.prompts_per_step % share:
        raise ValueError(
            f"prompts_per_step is {config.prompts_per_step}; with {size()} processes and steps_per_generation="
            f"{config.grpo.steps_per_generation} it must be a multiple of {share}"
        )
    if config.engine == "vllm":
        raise ValueError("engine is 'vllm'; with several processes only 'native' is supported")
    if config.calibrates and config.recalibrate == "rollout":
        raise ValueError("recalibrate is 'rollout', but each process saw another rollout; use 'every-step'")


def add_up(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of the processes' tensors."""
    if size() > 1:
        tensor = tensor.clone()
        dist.all_reduce(tensor)
    return tensor


def gather(value: Any) -> list[Any]:
    """Every process's value, in the order of their numbers."""
    if size() == 1:
        return [value]
    values = [None] * size()
    dist.all_gather_object(values, value)
    return values


def gather_rollout(rollout: Rollout) -> Rollout:
    """The rollouts of all processes as one."""
    parts = gather(rollout)
    if len(parts) == 1:
        return rollout
    width = max(part.tokens.shape[1] for part in parts)

    def rows(name: str, fill: int = 0) -> torch.Tensor | None:
        tensors = [getattr(part, name) for part in parts]
        if tensors[0] is None or tensors[0].ndim == 1:
            return None if tensors[0] is None else torch.cat(tensors)
        after = [0, 0] * (tensors[0].ndim - 2)
        return torch.cat([F.pad(t, (*after, 0, width - t.shape[1]), value=fill) for t in tensors])

    names = ("tokens", "logprobs", "mask", "prompt_lengths", "lengths", "finished", "route_checksums")
    columns = {name: rows(name) for name in names} | {"routes": rows("routes", fill=-1)}
    columns["completions"] = tuple(text for part in parts for text in part.completions)
    return dataclasses.replace(rollout, **columns)


def shard(model: nn.Module) -> None:
    """Spread the parameters of a model over the processes, in place; its gradients become sums over processes.

    Make the optimizer afterwards: the parameters are new objects (DTensors).
    """
    from torch.distributed.fsdp import FSDPModule, fully_shard

    mesh = _mesh()
    names = [name for name, _ in model.named_modules() if name.rpartition(".")[2].isdigit()]
    for name in names:
        if layer_index(name) is not None and layer_index(name.rpartition(".")[0]) is None:
            fully_shard(model.get_submodule(name), mesh=mesh)
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    # Logits are a view of the head's output; nothing here changes them in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo knows sums alone
            module.set_gradient_divide_factor(1.0)


def is_sharded(tensor: torch.Tensor) -> bool:
    """True for a DTensor."""
    return hasattr(tensor, "full_tensor")


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A sharded tensor gathered, on every process; any other one as it is."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def spread_like(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A whole tensor, which every process holds, laid out as `like`."""
    if not is_sharded(like):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)
