"""Loading models for RL: any transformers causal LM, in float32, from a folder or the hub.

Master weights are float32 (`dtype=torch.float32`): an RL update is often smaller than BF16's spacing and would be lost.
Both sides read a prompt once for all its completions: `left_pad` and `forward` are what they share.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from torch import nn

from fp8lab.distributed import whole
from fp8lab.tasks import data_dir

SHORT_CONTEXT = 256  # tokens


def resolve_model(name: str | Path) -> str:
    """The folder of a model shipped in data/ (`tiny-llama`), an existing folder, or else a hub name, unchanged.

    FileNotFoundError if the name looks like a path that is not there or is a folder without config.json.
    """
    shipped = data_dir() / str(name) if not Path(name).is_absolute() else Path(name)
    for folder in (Path(name), shipped):
        if folder.is_dir():
            if not (folder / "config.json").is_file():
                raise FileNotFoundError(f"{folder} has no config.json; give a folder that save_pretrained wrote")
            return str(folder)
    if Path(name).is_absolute() or str(name).startswith((".", "~")) or "/" not in str(name):
        available = sorted(p.parent.name for p in data_dir().glob("*/config.json"))
        raise FileNotFoundError(
            f"no checkpoint {str(name)!r}; allowed: one shipped in data/ ({', '.join(available)}), a folder, or a "
            "hub name such as 'meta-llama/Llama-3.1-8B-Instruct'"
        )
    return str(name)


def load_model(name: str | Path) -> nn.Module:
    """A causal LM in float32 on the CPU, in evaluation mode (no dropout).

    Attention is torch's SDPA, or in a model of short context transformers' own matmuls (`eager`), with which a training
    step of tiny-llama takes a sixth less time on a CPU.
    """
    from transformers import AutoModelForCausalLM

    folder = resolve_model(name)
    with quiet() if Path(folder).parent == data_dir() else nullcontext():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    if model.config.max_position_embeddings <= SHORT_CONTEXT:
        model.set_attn_implementation("eager")
    return model.eval()


@contextmanager
def quiet() -> Iterator[None]:
    """No progress bars from transformers: for what takes no time."""
    from transformers.utils import logging

    enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            logging.enable_progress_bar()


def load_tokenizer(name: str | Path):
    """The tokenizer of a checkpoint; a missing padding token becomes the end-of-sequence token."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(resolve_model(name))
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def named_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter and persistent buffer by name, detached, tied ones once each name: what a refit carries.

    Sharded ones are gathered, on every process.
    """
    tensors = model.state_dict(keep_vars=True)
    once = {id(tensor): whole(tensor.detach()) for tensor in tensors.values()}
    return {name: once[id(tensor)] for name, tensor in tensors.items()}


def merged(model: nn.Module) -> nn.Module:
    """The model with its peft adapters merged in float32, in a copy; the model itself if it has none.

    An engine quantizes the merged weight, a trainer the base weight beside float32 adapters: a precision gap of LoRA.
    """
    return copy.deepcopy(model).merge_and_unload() if hasattr(model, "merge_and_unload") else model


def left_pad(tokens: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Move each row's first `lengths` tokens to the right edge, so that all rows end in the same column.

    tokens: (B, T) int64, lengths: (B,) >= 1. Returns tokens, attention mask (1 on real tokens) and positions, each (B,
    longest).
    """
    longest = int(lengths.max())
    index = torch.arange(longest) - (longest - lengths)[:, None]
    return tokens.gather(1, index.clamp(min=0)), (index >= 0).long(), index.clamp(min=0)


def forward(model: nn.Module, tokens, attention, positions, cache, **kwargs) -> torch.Tensor:
    """Logits (B, T, V) of tokens (B, T) that follow what `cache` holds; attention: (B, cached + T); the cache grows.

    The model may be on another device: rollouts and logits stay where the tokens are."""
    kind = type(model.get_base_model() if hasattr(model, "get_base_model") else model)  # peft passes arguments through
    arguments = {"attention_mask": attention, "position_ids": positions, _cache_argument(kind): cache}
    device = next(model.parameters()).device
    arguments = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}
    return model(input_ids=tokens.to(device), use_cache=True, **arguments, **kwargs).logits.to(tokens.device)


@functools.cache
def _cache_argument(kind: type) -> str:
    """transformers renamed `past_key_values` to `cache` between 5.19 and 5.24."""
    return "cache" if "cache" in inspect.signature(kind.forward).parameters else "past_key_values"
