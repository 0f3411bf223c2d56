"""Advantages, clipped loss and token weights against NumPy, and against numbers worked out by hand."""

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fp8lab.grpo import (
    GRPOConfig,
    group_advantages,
    policy_loss,
    reference_kl,
    token_weights,
    within_logprob_error,
)

from . import references

LOGP = torch.log(torch.tensor([[1.0, 1.1, 1.5, 0.5], [1.0, 1.1, 1.5, 0.5]]))  # ratios, with old = 0
OLD = torch.zeros(2, 4)


# ---- advantages -----------------------------------------------------------------------------------


def test_advantages_by_hand():
    """Rewards 1, 0, 0, 1: mean 0.5, sample standard deviation sqrt(1/3); the second group 0, 0, 0, 4: mean 1, std 2."""
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 4.0])
    first, second = 0.5 / (math.sqrt(1 / 3) + 1e-4), 1 / (2 + 1e-4)
    want = [first, -first, -first, first, -second, -second, -second, 3 * second]
    a = group_advantages(rewards, 4)
    assert a.tolist() == pytest.approx(want, rel=1e-6) and a.dtype == torch.float32 and a.shape == (8,)
    none = group_advantages(rewards, 4, scale_rewards="none")
    assert none.tolist() == [0.5, -0.5, -0.5, 0.5, -1, -1, -1, 3]
    batch = group_advantages(rewards, 4, scale_rewards="batch")
    spread = np.std(rewards.numpy(), ddof=1) + 1e-4
    assert batch.tolist() == pytest.approx([x / spread for x in none.tolist()], rel=1e-6)


@settings(max_examples=50)
@given(
    groups=st.lists(st.lists(st.integers(-8, 8), min_size=4, max_size=4), min_size=1, max_size=4),
    scale=st.sampled_from(["group", "batch", "none"]),
    loo=st.booleans(),
)
def test_advantages_against_numpy(groups, scale, loo):
    r = np.array(groups, np.float64)
    if loo:
        centred = np.array([[row[i] - np.delete(row, i).mean() for i in range(4)] for row in r])
    else:
        centred = r - r.mean(1, keepdims=True)
    spread = {"group": r.std(1, ddof=1, keepdims=True) + 1e-4, "batch": r.std(ddof=1) + 1e-4, "none": 1.0}[scale]
    ours = group_advantages(torch.tensor(groups).flatten(), 4, scale_rewards=scale, leave_one_out=loo)
    assert np.allclose(ours.numpy(), (centred / spread).ravel(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("loo", [False, True])
@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, 1e8, -3.3e-7])
def test_equal_rewards_give_exactly_zero(scale, loo, value):
    for n in (3, 7):
        others = torch.arange(float(n))
        rewards = torch.cat([torch.full((n,), value), others])
        a = group_advantages(rewards, n, scale_rewards=scale, leave_one_out=loo)
        assert a[:n].tolist() == [0.0] * n and a[n:].abs().sum() > 0


def test_leave_one_out_by_hand():
    a = group_advantages(torch.tensor([3.0, 0.0, 0.0]), 3, scale_rewards="none", leave_one_out=True)
    assert a.tolist() == pytest.approx([3.0, -1.5, -1.5])


def test_groups_of_one():
    rewards = torch.tensor([1.0, 5.0])
    for scale in ("group", "batch", "none"):
        assert group_advantages(rewards, 1, scale_rewards=scale).tolist() == [0.0, 0.0]
    with pytest.raises(ValueError, match="leave_one_out needs num_generations >= 2"):
        group_advantages(rewards, 1, leave_one_out=True)


@pytest.mark.parametrize("shape", [(7,), (2, 4), ()])
def test_bad_sizes(shape):
    with pytest.raises(ValueError, match="do not split into groups of 4"):
        group_advantages(torch.zeros(shape), 4)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_nonfinite_rewards_are_named(bad):
    rewards = torch.zeros(8)
    rewards[5] = bad
    with pytest.raises(ValueError, match=r"\[5\] are not finite"):
        group_advantages(rewards, 4)


# ---- token weights ----------------------------------------------------------------------------------


def test_token_weights_by_hand():
    mask = torch.tensor([[0, 1, 1, 1, 1, 0], [0, 1, 0, 0, 0, 0]], dtype=torch.bool)
    m = mask.float()
    assert torch.allclose(token_weights(mask, "dapo", 8), m / 5)
    assert torch.allclose(token_weights(mask, "grpo", 8), m / 2 / torch.tensor([[4.0], [1.0]]))
    assert torch.allclose(token_weights(mask, "dr_grpo", 8), m / 16)


@settings(max_examples=40)
@given(mask=st.lists(st.lists(st.booleans(), min_size=5, max_size=5), min_size=1, max_size=5))
@example(mask=[[False] * 5] * 2)
def test_token_weights_normalize(mask):
    m = torch.tensor(mask)
    for kind in ("dapo", "grpo", "dr_grpo"):
        w = token_weights(m, kind, 5)
        assert w.isfinite().all() and not w[~m].any() and w.dtype == torch.float32
        padded = token_weights(torch.nn.functional.pad(m, (2, 3)), kind, 5)
        assert torch.equal(padded[:, 2:-3], w)
    assert token_weights(m, "dapo", 5).sum().item() == pytest.approx(float(m.any()))
    assert token_weights(m, "grpo", 5).sum().item() == pytest.approx(m.any(1).float().mean().item())
    assert token_weights(m, "dr_grpo", 5).sum().item() == pytest.approx(m.float().mean().item())


# ---- the clipped loss ---------------------------------------------------------------------------------


def test_clipping_by_hand():
    """Ratios 1, 1.1, 1.5, 0.5 under advantages +2 and -2, epsilon 0.2."""
    loss, clipped = policy_loss(LOGP, OLD, torch.tensor([2.0, -2.0]), GRPOConfig(epsilon=0.2))
    assert loss[0].tolist() == pytest.approx([-2, -2.2, -2.4, -1.0])  # 1.5 is cut to 1.2
    assert loss[1].tolist() == pytest.approx([2, 2.2, 3.0, 1.6])  # 0.5 is raised to 0.8
    assert clipped.tolist() == [[False, False, True, False], [False, False, False, True]]


def test_epsilon_high_and_dual_clip_by_hand():
    config = GRPOConfig(epsilon=0.2, epsilon_high=0.4, delta=1.3)
    loss, clipped = policy_loss(LOGP, OLD, torch.tensor([2.0, -2.0]), config)
    assert loss[0].tolist() == pytest.approx([-2, -2.2, -2.8, -1.0])
    assert loss[1].tolist() == pytest.approx([2, 2.2, 2.6, 1.6])  # 1.5 is bounded by delta
    assert clipped[0].tolist() == [False, False, True, False]


@settings(max_examples=60)
@given(
    rows=st.lists(st.tuples(st.floats(-25, 0, width=32), st.floats(-25, 0, width=32)), min_size=1, max_size=6),
    advantage=st.floats(-4, 4, width=32),
    low=st.sampled_from([0.0, 0.1, 0.2]),
    high=st.sampled_from([None, 0.0, 0.28]),
    delta=st.sampled_from([None, 1.5, 10.0]),
)
def test_loss_against_numpy(rows, advantage, low, high, delta):
    now, old = (np.array(c, np.float32)[None] for c in zip(*rows, strict=True))
    config = GRPOConfig(epsilon=low, epsilon_high=high, delta=delta)
    loss, clipped = policy_loss(torch.tensor(now), torch.tensor(old), torch.tensor([advantage]), config)
    want, cut = references.clipped_loss(now, old, [advantage], low, low if high is None else high, delta)
    assert np.allclose(loss.numpy(), want, rtol=3e-6, atol=1e-6)
    ratio = np.exp((now - old).astype(np.float64))
    edge = np.minimum(abs(ratio - 1 + low), abs(ratio - 1 - (low if high is None else high))) < 1e-6
    assert (edge | (abs(advantage) < 1e-30) | (clipped.numpy() == cut)).all()


def test_gradient_is_the_policy_gradient_where_not_clipped():
    logp = LOGP.clone().requires_grad_()
    a = torch.tensor([2.0, -2.0])
    loss, clipped = policy_loss(logp, OLD, a, GRPOConfig(delta=1.4))
    loss.sum().backward()
    want = -a[:, None] * LOGP.exp()
    want[0, 2] = want[1, 3] = 0  # clipped
    want[1, 2] = 0  # bounded by delta
    assert torch.allclose(logp.grad, want)
    assert not clipped.requires_grad


def test_first_update_has_the_gradient_of_reinforce():
    logp = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    loss, clipped = policy_loss(logp, logp.detach(), torch.tensor([0.7]), GRPOConfig())
    assert torch.equal(loss.detach(), torch.full((1, 2), -0.7)) and not clipped.any()
    loss.sum().backward()
    assert torch.equal(logp.grad, torch.full((1, 2), -0.7))


def test_huge_ratios_stay_finite():
    logp = torch.tensor([[-1e4, 0.0]], requires_grad=True)
    for a in (1.0, -1.0):
        loss, _ = policy_loss(logp, logp.detach().flip(1), torch.tensor([a]), GRPOConfig())
        (gradient,) = torch.autograd.grad(loss.sum(), logp)
        assert loss.isfinite().all() and gradient.isfinite().all()


# ---- the reference KL -----------------------------------------------------------------------------------


def test_reference_kl_is_k3():
    logp = torch.tensor([[math.log(0.5), math.log(0.25), -1.0, -40.0]], requires_grad=True)
    ref = torch.tensor([[math.log(0.25), math.log(0.5), -1.0, -1.0]])
    kl = reference_kl(logp, ref)
    want = [0.5 + math.log(2) - 1, 2 - math.log(2) - 1, 0.0, math.exp(20) - 20 - 1]
    assert kl[0].tolist() == pytest.approx(want, rel=1e-6)
    kl.sum().backward()  # d/dlogp = 1 - exp(ref - logp)
    assert logp.grad[0, :3].tolist() == pytest.approx([0.5, -1.0, 0.0], abs=1e-6) and logp.grad.isfinite().all()


def test_reference_kl_is_an_unbiased_estimate():
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.3, 0.5])
    expected = (p * reference_kl(p.log()[None], q.log()[None])[0]).sum().item()
    assert expected == pytest.approx((p * (p / q).log()).sum().item(), rel=1e-5)


# ---- sequences that the engines disagree about ------------------------------------------------------------


def test_logprob_error_by_hand():
    """Ratios 2 and 1/2 have mean exp(|d|) = 2; a masked token and a non-finite one do not count; no token agrees."""
    g = torch.tensor([[-1.0, -1, -9], [-1, -1, -1], [-1, -math.inf, -1], [-1, -1, -1]])
    d = torch.tensor([[2, 0.5, 99], [1, 3, 2.0], [1.5, 1, 1.5], [7, 7, 7]]).log()
    mask = torch.tensor([[True, True, False], [True, True, True], [True, True, True], [False] * 3])
    assert within_logprob_error(g, g + d, mask, 1.99).tolist() == [False, False, True, True]
    assert within_logprob_error(g, g + d, mask, 2.0 + 1e-6).tolist() == [True, True, True, True]
    assert within_logprob_error(g, g + d, mask, 1.49).tolist() == [False, False, False, True]


def test_logprob_error_against_nemo_rl():
    """compute_and_apply_seq_logprob_error_masking (nemo_rl/algorithms/grpo.py at 7ea279abf), line by line."""
    r = torch.Generator().manual_seed(0)
    g = torch.randn((50, 7), generator=r)
    t = g + 0.5 * torch.randn(g.shape, generator=r)
    mask = torch.rand(g.shape, generator=r) < 0.7
    num = (torch.exp((g - t).abs() * mask) * mask).sum(dim=-1)
    error = num / mask.sum(dim=-1).clamp(min=1)
    for threshold in (1.4, 1.6, 2.0):
        want = error <= threshold
        assert torch.equal(within_logprob_error(g, t, mask, threshold), want) and 0 < want.sum() < 50


# ---- the configuration ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change, words",
    [
        ({"loss_type": "bnpo"}, "loss_type is 'bnpo'; allowed: dapo, grpo, dr_grpo"),
        ({"scale_rewards": True}, "scale_rewards is True, of type bool"),
        ({"importance_sampling": "trunc"}, "importance_sampling.*allowed: none, is, tis, icepop"),
        ({"num_generations": 0}, "num_generations is 0.*integer >= 1"),
        ({"steps_per_generation": 1.0}, "steps_per_generation"),
        ({"num_iterations": True}, "num_iterations"),
        ({"micro_batch_size": -1}, "micro_batch_size"),
        ({"learning_rate": 0}, "learning_rate.*> 0"),
        ({"learning_rate": float("nan")}, "learning_rate"),
        ({"max_grad_norm": -1}, "max_grad_norm"),
        ({"epsilon": 1.0}, "epsilon"),
        ({"epsilon": -0.1}, "epsilon"),
        ({"epsilon_high": -0.1}, "epsilon_high"),
        ({"delta": 1.2}, "dual clip must lie above"),
        ({"force_on_policy_ratio": True, "num_iterations": 2}, "with 2 updates per rollout"),
        ({"seq_logprob_error_threshold": 0.9}, "number >= 1, or None"),
        ({"seq_logprob_error_threshold": float("nan")}, "seq_logprob_error_threshold is"),
    ],
)
def test_bad_configuration(change, words):
    with pytest.raises(ValueError, match=words):
        GRPOConfig(**change)


def test_updates_per_rollout():
    assert GRPOConfig().updates_per_rollout == 1
    assert GRPOConfig(steps_per_generation=4, num_iterations=3).updates_per_rollout == 12
