"""Log-probs of the same tokens under several versions of one model, each version run no further than it must be.

    score_side(work, plan, side, tokens, 1.0)    put one side of a plan on a model, and score
    with changed(layers, precisions): ...        a few linears in other precisions; the rest is not quantized again
    Replay(work, tokens).since(7)                the model after a change in decoder layer 7: layers 0 to 6 give what
                                                 they gave before, bit for bit, and are not run

All work on a `shared_copy`, whose modules are its own and whose weights are the model's. Tokens are padded on the
right: what comes after a token never changes it. Left out: `Replay` for models whose layers read more than the hidden
states of the layer before, such as keys of an earlier one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from fp8lab.attention import attention_of
from fp8lab.calibration import calibrate
from fp8lab.conversion import convert
from fp8lab.linear import Float8Linear
from fp8lab.names import layer_index
from fp8lab.operands import LinearPrecision
from fp8lab.precision import PrecisionPlan, Side

SCORED_TOKENS = 1024
"""Tokens in one batch."""


def shared_copy(model: nn.Module) -> nn.Module:
    """A copy of the model's modules around the very same weights, frozen: it can be converted, the model stays."""
    memo = {id(p): nn.Parameter(p.detach(), requires_grad=False) for p in model.parameters()}
    return copy.deepcopy(model, memo).eval()


@torch.no_grad()
def token_logprobs(model: nn.Module, tokens: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """Log-probs (B, T) float64 of right-padded tokens (B, T), each in the column of its token; 0 in the first."""
    parts = [next_logprobs(model, rows, temperature, input_ids=rows[:, :-1]) for rows in batches(tokens, SCORED_TOKENS)]
    return nn.functional.pad(torch.cat(parts).double(), (1, 0))


def next_logprobs(model: nn.Module, tokens: torch.Tensor, temperature: float, **inputs: torch.Tensor) -> torch.Tensor:
    """Log-probs (B, T - 1) of all but the first of tokens (B, T) in one forward over `inputs`, with its graph."""
    logits = model(**inputs, use_cache=False).logits
    logits = logits if temperature in (0, 1) else logits / temperature
    return logits.gather(2, tokens[:, 1:, None]).squeeze(2) - logits.logsumexp(dim=2)


def batches(tokens: torch.Tensor, size: int) -> Sequence[torch.Tensor]:
    """Rows of tokens (B, T) in batches of at most `size` tokens, or of one row."""
    return tokens.split(max(1, size // tokens.shape[1]))


def put_side(work: nn.Module, plan: PrecisionPlan, side: Side, tokens: torch.Tensor) -> None:
    """`convert` to one side of a plan, emulated; attention with scales per layer is calibrated on tokens (B, T)."""
    convert(work, plan, side=side, backend="emulated")
    state = attention_of(work)
    if state is not None and not state.dynamic:
        state.scales = calibrate(work, tokens, state.precision).scales


def score_side(work: nn.Module, plan: PrecisionPlan, side: Side, tokens, temperature: float) -> torch.Tensor:
    """`token_logprobs` under one side of a plan, which is put on `work`."""
    put_side(work, plan, side, tokens)
    return token_logprobs(work, tokens, temperature)


@contextmanager
def changed(layers: dict[str, Float8Linear], precisions: dict[str, LinearPrecision]) -> Iterator[None]:
    """Within this block the named layers have other precisions; afterwards their old quantized copies are back."""
    before = {name: (layers[name].precision, layers[name].quantized) for name in precisions}
    try:
        for name, precision in precisions.items():
            layers[name].precision = precision
            layers[name].refresh()
        yield
    finally:
        for name, (precision, quantized) in before.items():
            layers[name].precision, layers[name]._cache = precision, quantized


class Replay:
    """`logprobs` (B, T) of tokens (B, T) under the model as it is; and those after changes, from what was kept of it:
    every decoder layer's output, 4 bytes a token and hidden channel each."""

    def __init__(self, model: nn.Module, tokens: torch.Tensor, temperature: float = 1.0) -> None:
        self._model, self._tokens, self._temperature = model, tokens, temperature
        self._layers = _decoder_layers(model)
        self._kept: list[list[Any]] = [[] for _ in self._layers]
        handles = [
            layer.register_forward_hook(_keep(kept)) for layer, kept in zip(self._layers, self._kept, strict=True)
        ]
        try:
            self.logprobs = token_logprobs(model, tokens, temperature)
        finally:
            for handle in handles:
                handle.remove()

    def since(self, layer: int | None) -> torch.Tensor:
        """`token_logprobs` of the model as it is now, if the decoder layers before `layer` are as they were; None: all
        run."""
        skipped = list(zip(self._layers, self._kept, strict=True))[: layer or 0]
        try:
            for module, kept in skipped:
                module.forward = _give_back(kept)
            return token_logprobs(self._model, self._tokens, self._temperature)
        finally:
            for module, _ in skipped:
                del module.forward


def _keep(kept: list[Any]) -> Callable[..., None]:
    return lambda module, arguments, output: kept.append(output)


def _give_back(kept: list[Any]) -> Callable[..., Any]:
    outputs = iter(kept)
    return lambda *arguments, **options: next(outputs)


def _decoder_layers(model: nn.Module) -> list[nn.Module]:
    found = []
    for name, module in model.named_modules():
        parent, _, number = name.rpartition(".")
        if number.isdigit() and layer_index(name) is not None and layer_index(parent) is None:
            found.append(module)
    return found
