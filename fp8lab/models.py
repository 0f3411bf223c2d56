"""Loading models for RL: any transformers causal LM, in float32, from a folder or the hub.

Master weights are float32 (`dtype=torch.float32`): an RL update is often smaller than BF16's spacing and would be lost.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn


def resolve_model(name: str | Path) -> str:
    """The folder of a model shipped in data/ (`tiny-llama`), an existing folder, or else a hub name, unchanged.

    FileNotFoundError if the name looks like a path that is not there or is a folder without config.json.
    """
    from fp8lab.tasks import data_dir

    shipped = data_dir() / str(name) if not Path(name).is_absolute() else Path(name)
    for folder in (Path(name), shipped):
        if folder.is_dir():
            if not (folder / "config.json").is_file():
                raise FileNotFoundError(f"{folder} has no config.json; give a folder that save_pretrained wrote")
            return str(folder)
    if Path(name).is_absolute() or str(name).startswith((".", "~")) or "/" not in str(name):
        available = sorted(p.parent.name for p in data_dir().glob("*/config.json"))
        raise FileNotFoundError(
            f"no checkpoint {str(name)!r}; allowed: one shipped in data/ ({', '.join(available)}), a folder, or a hub name such "
            "as 'meta-llama/Llama-3.1-8B-Instruct'"
        )
    return str(name)


def load_model(name: str | Path) -> nn.Module:
    """A causal LM in float32 on the CPU, in evaluation mode (no dropout), with SDPA attention."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(resolve_model(name), dtype=torch.float32, attn_implementation="sdpa")
    return model.eval()


def load_tokenizer(name: str | Path):
    """The tokenizer of a checkpoint; a missing padding token becomes the end-of-sequence token."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(resolve_model(name))
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def named_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter and persistent buffer by name, detached, tied ones once each name: what a refit carries."""
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}
