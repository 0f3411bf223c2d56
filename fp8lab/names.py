"""What is what in a transformers model, by name: decoder layers, linears, fused experts, routers; and patterns.

A module's dotted name says where it stands: `model.layers.3.mlp.gate_proj` is in decoder layer 3; a vision tower's
`model.visual.blocks.3.mlp` is in none. A **pattern** is a sequence of name parts that must match whole parts that are
neighbours: "mlp.gate" matches `layers.0.mlp.gate`, never `layers.0.mlp.gate_proj`; each part may use shell wildcards
("*_proj"); "re:..." is a regular expression for the whole name. (Substrings, as in NeMo RL, would match all three.)

Mixture-of-experts models of transformers 5 hold all experts of a layer in two 3-D parameters instead of linears,
`mlp.experts.gate_up_proj` (E, 2I, H) and `mlp.experts.down_proj` (E, H, I); GPT-OSS and Llama 4 store them transposed.
Their router is `mlp.gate` or `mlp.router`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from fnmatch import fnmatchcase

from torch import nn

LAYER_LISTS = ("layers", "layer", "h", "blocks")
OTHER_TOWERS = ("visual", "vision_tower", "vision_model", "audio_tower", "multi_modal_projector")
ROUTERS = ("gate", "router", "shared_expert_gate")
EXPERTS = ("gate_up_proj", "gate_proj", "up_proj", "down_proj")


def check_pattern(pattern: str) -> None:
    """ValueError if `pattern` is not text, is empty, or is no regular expression after "re:"."""
    if not isinstance(pattern, str) or not pattern.removeprefix("*.").removeprefix("re:"):
        raise ValueError(f"module pattern is {pattern!r}; it must be text such as 'mlp.down_proj' or 're:.*o_proj'")
    try:
        re.compile(pattern[3:] if pattern.startswith("re:") else "")
    except re.error as error:
        raise ValueError(f"module pattern {pattern!r} is no regular expression: {error}") from error


def matches(pattern: str, name: str) -> bool:
    """True if `pattern` (see the module's text) matches the dotted module name."""
    if pattern.startswith("re:"):
        return re.fullmatch(pattern[3:], name) is not None
    parts, wanted = name.split("."), pattern.removeprefix("*.").split(".")
    windows = (parts[i : i + len(wanted)] for i in range(len(parts) - len(wanted) + 1))
    return any(all(fnmatchcase(p, w) for p, w in zip(window, wanted, strict=True)) for window in windows)


def layer_index(name: str) -> int | None:
    """The decoder layer number in a module name: `model.layers.3.mlp.up_proj` -> 3; None outside them."""
    parts = name.split(".")
    if in_other_tower(name):
        return None
    pairs = zip(parts, parts[1:], strict=False)
    return next((int(number) for key, number in pairs if key in LAYER_LISTS and number.isdigit()), None)


def in_other_tower(name: str) -> bool:
    """True for what encodes images or sound: `model.visual.blocks.3.mlp`."""
    return any(part in OTHER_TOWERS for part in name.split("."))


def is_router(name: str) -> bool:
    """True if a whole part of the name is a router's: `mlp.gate`, `mlp.router.weight`; not `mlp.gate_proj`."""
    return any(part in ROUTERS for part in name.split("."))


def linear_modules(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """(name, module) of every nn.Linear, save the adapters of peft (lora_A, lora_B), which stay in high precision."""
    tuners = ((name, getattr(m, "adapter_layer_names", ())) for name, m in model.named_modules())
    adapters = tuple(f"{name}.{kind}." for name, kinds in tuners for kind in kinds)
    linears = ((name, m) for name, m in model.named_modules() if isinstance(m, nn.Linear))
    return ((name, m) for name, m in linears if not name.startswith(adapters))


def expert_tensors(model: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Parameter]]:
    """(name, module that holds it, parameter) of every fused expert tensor (E, N, K), or (E, K, N) if the module says
    `is_transposed`."""
    for name, module in model.named_modules():
        if layer_index(name) is not None:
            for key, parameter in module.named_parameters(name, recurse=False):
                if parameter.ndim == 3 and key.rpartition(".")[2] in EXPERTS:
                    yield key, module, parameter


def planned_names(model: nn.Module) -> list[str]:
    """Names a plan decides on: all linears, then all fused expert tensors."""
    return [name for name, _ in linear_modules(model)] + [name for name, _, _ in expert_tensors(model)]


def module_names(model: nn.Module) -> list[str]:
    """Names a fallback pattern may be about: the planned ones, then every other module (an expert's parent, a
    convolution that NeMo RL's recipes list)."""
    return list(dict.fromkeys([*planned_names(model), *(name for name, _ in model.named_modules())]))


def no_linears(model: nn.Module) -> str:
    """What to say of a model whose decoder layers hold nothing that can be planned."""
    kinds = sorted({type(m).__name__ for m in model.modules() if "Conv1D" in type(m).__name__})
    found = f" (found {kinds[0]})" if kinds else ""
    return (
        f"{type(model).__name__} has no nn.Linear in its decoder layers{found}; fp8lab quantizes nn.Linear: use a "
        "Llama-, Qwen-, Mistral- or Gemma-like model"
    )


def num_decoder_layers(model: nn.Module) -> int:
    """One more than the largest layer number in the model's module names; ValueError if there is none."""
    found = [layer_index(name) for name, _ in model.named_modules()]
    numbers = [i for i in found if i is not None]
    if not numbers:
        raise ValueError(f"{type(model).__name__} has no numbered decoder layers (looked for {', '.join(LAYER_LISTS)})")
    return max(numbers) + 1
