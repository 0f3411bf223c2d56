"""Importance weights against the formulas of NeMo RL, written out."""

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fp8lab.corrections import MODES, weights
from fp8lab.grpo import GRPOConfig, policy_loss

NAN, INF = float("nan"), float("inf")
G = torch.tensor([[-1.0, -2.0, -0.5, -3.0], [-0.1, -4.0, -1.0, -2.0]])
T = torch.tensor([[-1.5, -0.5, -0.5, -2.9], [-0.3, -1.0, -6.0, -2.1]])
MASK = torch.tensor([[True, True, True, False], [True, True, True, True]])


def nemo_rl(g, t, mode, low, high):
    """One token's weight: exp(prev - gen), then NeMo RL's truncation; non-finite becomes 0."""
    if not (math.isfinite(g) and math.isfinite(t)):
        return 0.0
    r = math.exp(min(20.0, max(-20.0, t - g)))
    if mode == "none":
        return 1.0
    if mode == "tis":
        return min(max(r, low), high)
    if mode == "icepop":
        return r if low <= r <= high else 0.0
    return r


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("low, high", [(0.0, 2.0), (0.5, 5.0), (0.7, 1.0)])
def test_formulas(mode, low, high):
    c = weights(G, T, MASK, mode=mode, low=low, high=high)
    want = np.array([[nemo_rl(g, t, mode, low, high) for g, t in zip(*r, strict=True)] for r in zip(G, T, strict=True)])
    assert c.weights.shape == G.shape and c.weights.dtype == torch.float32
    assert np.allclose(c.weights.numpy(), np.where(MASK.numpy(), want, 0), rtol=1e-6)
    ratio = np.exp((T - G).double().numpy())[MASK.numpy()]
    oob = ((ratio < low) | (ratio > high)).sum()
    if mode in ("tis", "icepop"):
        assert c.statistics["oob_tokens"] == oob and 0 < oob < 7
    else:
        assert "oob_tokens" not in c.statistics
    assert c.statistics["nonfinite_tokens"] == c.statistics["clamped_exponents"] == 0


def test_by_hand():
    """Ratios 1/2, 3 and 1."""
    g = torch.tensor([[0.0, math.log(1 / 3), -1.0]])
    t = torch.tensor([[math.log(0.5), 0.0, -1.0]])
    mask = torch.ones(1, 3, dtype=torch.bool)
    for mode, want in (("none", [1, 1, 1]), ("is", [0.5, 3, 1]), ("tis", [0.5, 2, 1]), ("icepop", [0.5, 0, 1])):
        assert weights(g, t, mask, mode=mode).weights[0].tolist() == pytest.approx(want)
    assert weights(g, t, mask, mode="tis", low=0.8, high=4).weights[0].tolist() == pytest.approx([0.8, 3, 1])
    assert weights(g, t, mask, mode="icepop", low=0.8, high=4).weights[0].tolist() == pytest.approx([0, 3, 1])
    assert weights(g, t, mask, mode="icepop", low=0.8, high=4).statistics["oob_tokens"] == 1


def test_equal_engines_get_ones_under_every_mode():
    for mode in MODES:
        assert torch.equal(weights(G, G, MASK, mode=mode).weights, MASK.float())


@pytest.mark.parametrize("mode", MODES)
def test_nonfinite_tokens_weigh_zero_and_are_counted(mode):
    bad = G.clone()
    bad[0, 0], bad[0, 3], bad[1, 1], bad[1, 2] = -INF, NAN, NAN, INF  # [0, 3] is masked out
    keep = MASK & bad.isfinite()
    for pair in ((bad, T), (T, bad), (bad, bad)):
        c = weights(*pair, MASK, mode=mode)
        assert c.statistics["nonfinite_tokens"] == 3 and c.weights.isfinite().all()
        assert not c.weights[~keep].any()
    clean = weights(G, T, MASK, mode=mode).weights
    assert torch.equal(weights(bad, T, MASK, mode=mode).weights, torch.where(keep, clean, 0.0))
    if mode == "tis":
        assert weights(bad, T, MASK, mode=mode).statistics == weights(G, T, keep, mode=mode).statistics | {
            "nonfinite_tokens": 3.0
        }


def test_exponents_are_clamped_and_counted():
    g = torch.tensor([[-60.0, -1.0, -20.5, -21.0, -99.0]])
    t = torch.tensor([[-1.0, -60.0, -0.5, -0.5, -1.0]])
    mask = torch.tensor([[True, True, True, True, False]])
    c = weights(g, t, mask, mode="is")
    assert c.statistics["clamped_exponents"] == 3  # exactly 20 is not clamped
    assert c.weights[0].tolist() == pytest.approx([math.exp(20), math.exp(-20), math.exp(20), math.exp(20), 0])


def test_detached_and_inputs_untouched():
    g, t = G.clone().requires_grad_(), T.clone().requires_grad_()
    c = weights(g, t, MASK, mode="tis")
    assert not c.weights.requires_grad
    assert torch.equal(g, G) and torch.equal(t, T)


def test_no_tokens():
    for mask in (torch.zeros(2, 4, dtype=torch.bool), torch.zeros(0, 4, dtype=torch.bool)):
        c = weights(G[: len(mask)], T[: len(mask)], mask, mode="icepop")
        assert not c.weights.any() and not any(c.statistics.values())


@pytest.mark.parametrize("low, high", [(-0.1, 2), (3, 2), (NAN, 2), (0, NAN)])
def test_bad_bounds(low, high):
    with pytest.raises(ValueError, match="0 <= low <= high"):
        weights(G, T, MASK, low=low, high=high)


def test_bad_mode():
    with pytest.raises(ValueError, match="'trunc'.*none, is, tis, icepop"):
        weights(G, T, MASK, mode="trunc")


# ---- with the loss ----------------------------------------------------------------------------------

any_logprob = st.floats(width=32) | st.floats(-30, 0, width=32)
finite_logprob = st.floats(-1e6, 0, width=32) | st.floats(-5, 0, width=32)


@settings(max_examples=80)
@given(
    rows=st.lists(st.tuples(any_logprob, finite_logprob, finite_logprob, st.booleans()), min_size=2, max_size=8),
    advantages=st.tuples(st.floats(-5, 5, width=32), st.floats(-5, 5, width=32)),
    mode=st.sampled_from(MODES),
    delta=st.sampled_from([None, 3.0]),
)
@example(rows=[(-INF, -1, -1, True), (NAN, -1e6, 0, True)], advantages=(-5, 5), mode="is", delta=None)
def test_loss_and_gradient_stay_finite(rows, advantages, mode, delta):
    """Whatever the rollout engine reports, inside and outside the mask."""
    g, old, now, mask = (torch.tensor(column)[None].expand(2, -1) for column in zip(*rows, strict=True))
    g, old, now = g.float(), old.float(), now.float()
    leaf = now.clone().requires_grad_()
    c = weights(g, old, mask, mode=mode)
    loss, _ = policy_loss(leaf, old, torch.tensor(advantages), GRPOConfig(delta=delta))
    total = torch.where(mask, loss * c.weights, 0.0).sum()
    total.backward()
    assert total.isfinite() and leaf.grad.isfinite().all()
    assert not leaf.grad[~mask | ~g.isfinite()].any()


@settings(max_examples=30)
@given(mode=st.sampled_from(MODES), left=st.integers(0, 3), right=st.integers(0, 3), fill=any_logprob)
def test_padding_changes_nothing(mode, left, right, fill):
    def pad(x, value):
        return torch.nn.functional.pad(x, (left, right), value=value)

    want = weights(G, T, MASK, mode=mode, low=0.5)
    ours = weights(pad(G, fill), pad(T, -fill), pad(MASK, False), mode=mode, low=0.5)
    assert torch.equal(ours.weights, pad(want.weights, 0.0)) and ours.statistics == want.statistics
