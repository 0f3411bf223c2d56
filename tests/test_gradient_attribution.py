"""Which layer's FP8 gradient bends the update: against whole-model gradients, and a GEMM rounded by ml_dtypes."""

import dataclasses

import ml_dtypes
import numpy as np
import pytest
import torch

from fp8lab.attribution import sample_tokens
from fp8lab.conversion import convert
from fp8lab.gradient_attribution import attribute_gradient
from fp8lab.models import load_model
from fp8lab.precision import PrecisionPlan
from fp8lab.scoring import next_logprobs

PLAN = PrecisionPlan.preset("fp8-e2e")
LAST = "model.layers.3.mlp.down_proj"
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def sample():
    size = load_model("tiny-llama").config.vocab_size
    return torch.randint(0, size, (6, 24), generator=torch.Generator().manual_seed(1))


def gradients(plan, sample, advantages, capture=None):
    """Of the policy gradient, over all weights, with the trainer side of a plan."""
    model = load_model("tiny-llama")
    convert(model, plan, side="trainer")
    if capture is not None:

        def see(module, arguments, output):
            capture["x"] = arguments[0].detach()
            output.register_hook(lambda gradient: capture.update(g=gradient))

        model.get_submodule(LAST).register_forward_hook(see)
    _, mask, _ = sample_tokens(sample, None)
    logprobs = next_logprobs(model, sample, 1.0, input_ids=sample[:, :-1])
    loss = -(logprobs * torch.where(mask, advantages[:, None], 0.0)[:, 1:]).sum() / mask.sum()
    loss.backward()
    return {name: p.grad.double() for name, p in model.named_parameters()}


def relative(found, exact):
    whole = [torch.cat([g[name].flatten() for name in exact]) for g in (found, exact)]
    return ((whole[0] - whole[1]).norm() / whole[1].norm()).item()


def test_errors_are_those_of_two_backward_passes(sample):
    advantages = torch.linspace(-1, 1, 6)
    table = attribute_gradient(load_model("tiny-llama"), PLAN, sample, advantages=advantages).set_index("name")
    assert len(table) == 28 and table["gradient_error"].is_monotonic_decreasing
    exact = gradients(PrecisionPlan.preset("bf16"), sample, advantages)
    only = dataclasses.replace(PLAN.trainer.linear, weight="bf16", activation="bf16")
    side = dataclasses.replace(PLAN.trainer, linear=only)
    others = [name for name in table.index if name != LAST]
    plan = dataclasses.replace(PLAN, trainer=side).with_bf16(modules=others, side="trainer")
    found = gradients(plan, sample, advantages)
    row = table.loc[LAST]
    assert row["gradient_error"] == pytest.approx(relative(found, exact), rel=1e-3)
    own = {f"{LAST}.weight": exact[f"{LAST}.weight"]}
    assert row["weight_error"] == pytest.approx(relative(found, own), rel=1e-3)
    assert 0.99 < row["cosine"] < 1 and row["format"] == "e4m3"


def test_a_modules_own_part_is_the_gemm_with_a_rounded_gradient(sample):
    """grad_weight = g^T x with g^T rounded in 1x128 blocks along tokens, in float64 by ml_dtypes."""
    advantages, seen = torch.ones(6), {}
    gradients(PrecisionPlan.preset("bf16"), sample, advantages, seen)
    g, x = seen["g"].flatten(0, -2).double().numpy(), seen["x"].flatten(0, -2).bfloat16().double().numpy()
    rounded = []
    for start in range(0, len(g), 128):
        block = g[start : start + 128].astype(np.float32)
        scale = np.abs(block).max(0, keepdims=True) / np.float32(448)
        scale[scale == 0] = 1
        rounded.append((block / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * scale)
    exact = g.T @ x
    want = np.linalg.norm(np.concatenate(rounded).T @ x - exact) / np.linalg.norm(exact)
    table = attribute_gradient(load_model("tiny-llama"), PLAN, sample, advantages=advantages).set_index("name")
    assert table.loc[LAST, "weight_error"] == pytest.approx(want, rel=0.02)


def test_coarser_formats_and_whole_layers_err_more(sample):
    """E5M2 has two fraction bits, E4M3 three; a layer holds seven modules."""
    coarse = dataclasses.replace(PLAN.trainer.linear, gradient="e5m2")
    plan = dataclasses.replace(PLAN, trainer=dataclasses.replace(PLAN.trainer, linear=coarse))
    model, calls = load_model("tiny-llama"), []
    before = {name: p.clone() for name, p in model.named_parameters()}
    fine = attribute_gradient(model, PLAN, sample, by="layer", on_progress=lambda *done: calls.append(done))
    rough = attribute_gradient(model, plan, sample, by="layer")
    ratio = rough.set_index("name")["gradient_error"] / fine.set_index("name")["gradient_error"]
    assert len(ratio) == 4 and ratio.between(1.4, 3).all()
    assert calls == [(n, 4) for n in (1, 2, 3, 4)]
    assert fine["gradient_error"].min() > attribute_gradient(model, PLAN, sample)["gradient_error"].min()
    assert all(torch.equal(p, before[n]) and p.grad is None and p.requires_grad for n, p in model.named_parameters())


def test_bad_input_is_named(sample):
    model = load_model("tiny-llama")
    for name in ("bf16", "fp8-rollout"):
        with pytest.raises(ValueError, match="no FP8 gradient on the trainer side"):
            attribute_gradient(model, PrecisionPlan.preset(name), sample)
    with pytest.raises(ValueError, match="there must be 6"):
        attribute_gradient(model, PLAN, sample, advantages=torch.ones(5))
    with pytest.raises(ValueError, match="by has 'row'"):
        attribute_gradient(model, PLAN, sample, by="row")
