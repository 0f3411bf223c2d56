"""Scores of one model in several versions: a replay, a change and its undoing give what a whole run gives."""

import dataclasses

import pytest
import torch

from fp8lab.conversion import convert
from fp8lab.linear import float8_layers
from fp8lab.models import load_model
from fp8lab.operands import BF16_LINEAR
from fp8lab.precision import PrecisionPlan
from fp8lab.scoring import Replay, changed, score_side, shared_copy, token_logprobs

PLAN = PrecisionPlan.preset("fp8-e2e")
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module", params=["tiny-llama", "tiny-qwen3-moe"])
def model(request):
    return load_model(request.param)


@pytest.fixture
def tokens():
    return torch.randint(4, 90, (70, 16), generator=torch.Generator().manual_seed(0))  # more than one batch


def test_a_replay_is_the_whole_run_bit_for_bit(model, tokens):
    work = shared_copy(model)
    convert(work, PLAN, side="rollout")
    start = Replay(work, tokens)
    assert torch.equal(start.logprobs, token_logprobs(work, tokens))
    layers = {name: layer for name, layer in float8_layers(work) if name.endswith("o_proj")}
    calls = []
    for number, name in enumerate(layers):
        with changed(layers, {name: BF16_LINEAR}):
            whole = token_logprobs(work, tokens)
            handle = work.model.layers[0].self_attn.register_forward_hook(lambda *_: calls.append(1))
            replayed = start.since(number)
            handle.remove()
        assert torch.equal(replayed, whole) and not torch.equal(whole, start.logprobs)
        assert len(calls) == (2 if number == 0 else 0)  # batches in which the first layer has run
        calls.clear()
    assert torch.equal(start.since(None), start.logprobs) and torch.equal(start.since(2), start.logprobs)


def test_a_replay_does_not_see_what_changes_before_its_layer(model, tokens):
    """What it is told must be true: it cannot know."""
    work = shared_copy(model)
    convert(work, PLAN, side="rollout")
    start = Replay(work, tokens)
    name = "model.layers.0.self_attn.o_proj"
    with changed(dict(float8_layers(work)), {name: BF16_LINEAR}):
        assert torch.equal(start.since(1), start.logprobs)


def test_a_change_is_undone_with_the_bytes_it_had(model, tokens):
    work = shared_copy(model)
    convert(work, PLAN, side="rollout")
    layers, before = dict(float8_layers(work)), token_logprobs(work, tokens)
    name = "model.layers.1.self_attn.q_proj"
    held = layers[name].quantized
    with pytest.raises(ZeroDivisionError), changed(layers, {name: BF16_LINEAR}):
        assert layers[name].quantized.packed is None
        raise ZeroDivisionError
    assert layers[name].quantized is held and torch.equal(token_logprobs(work, tokens), before)


def test_scores_are_log_softmax_of_the_tokens_and_heed_the_temperature(model, tokens):
    work = shared_copy(model)
    convert(work, PrecisionPlan.preset("bf16"), side="rollout")
    with torch.no_grad():
        logits = work(input_ids=tokens[:8]).logits.double()
    for temperature in (1.0, 0.5):
        expected = (logits / temperature).log_softmax(-1)[:, :-1].gather(2, tokens[:8, 1:, None]).squeeze(2)
        found = token_logprobs(work, tokens[:8], temperature)
        assert torch.all(found[:, 0] == 0) and torch.allclose(found[:, 1:], expected, atol=2e-5)
    sides = [score_side(work, plan, "rollout", tokens[:8], 1.0) for plan in (PLAN, dataclasses.replace(PLAN, name="x"))]
    assert torch.equal(*sides)
