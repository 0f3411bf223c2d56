"""Importance weights by hand and against NeMo RL, verl, TRL and AReaL, written out."""

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fp8lab.corrections import MODES, NEED_A_MINIMUM, SEQUENCE_MODES, TOKEN_MODES, weights
from fp8lab.grpo import GRPOConfig, policy_loss, reference_kl, token_weights
from fp8lab.precision import PrecisionPlan
from fp8lab.rollout import NativeEngine, SamplingParams
from fp8lab.trainer import Trainer

from . import references

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


@pytest.mark.parametrize("mode", TOKEN_MODES)
@pytest.mark.parametrize("low, high", [(0.001, 2.0), (0.5, 5.0), (0.7, 1.0)])
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
        assert weights(g, t, mask, mode=mode, low=0.1).weights[0].tolist() == pytest.approx(want)
    assert weights(g, t, mask, mode="tis", low=0.8, high=4).weights[0].tolist() == pytest.approx([0.8, 3, 1])
    assert weights(g, t, mask, mode="icepop", low=0.8, high=4).weights[0].tolist() == pytest.approx([0, 3, 1])
    assert weights(g, t, mask, mode="icepop", low=0.8, high=4).statistics["oob_tokens"] == 1


def test_equal_engines_get_ones_under_every_mode():
    for mode in MODES:
        assert torch.equal(weights(G, G, MASK, mode=mode, low=0.5).weights, MASK.float())


@pytest.mark.parametrize("mode", MODES)
def test_nonfinite_tokens_weigh_zero_and_are_counted(mode):
    bad = G.clone()
    bad[0, 0], bad[0, 3], bad[1, 1], bad[1, 2] = -INF, NAN, NAN, INF  # [0, 3] is masked out
    keep = MASK & bad.isfinite()
    for pair in ((bad, T), (T, bad), (bad, bad)):
        c = weights(*pair, MASK, mode=mode, low=0.1)
        assert c.statistics["nonfinite_tokens"] == 3 and c.weights.isfinite().all()
        assert not c.weights[~keep].any()
    ours, clean = (weights(*a, mode=mode, low=0.1) for a in ((bad, T, MASK), (G, T, keep)))
    assert torch.equal(ours.weights, clean.weights)  # so they are in no aggregate either
    assert ours.statistics == clean.statistics | {"nonfinite_tokens": 3.0}


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
        for mode in MODES:
            c = weights(G[: len(mask)], T[: len(mask)], mask, mode=mode, low=0.5)
            assert not c.weights.any() and not any(c.statistics.values())


@pytest.mark.parametrize("low, high", [(-0.1, 2), (3, 2), (NAN, 2), (0, NAN), (0, 0)])
def test_bad_bounds(low, high):
    with pytest.raises(ValueError, match="0 <= low <= high"):
        weights(G, T, MASK, low=low, high=high)
    with pytest.raises(ValueError, match="0 <= low <= high|importance_sampling_m.. is NaN"):
        GRPOConfig(importance_sampling_min=low, importance_sampling_max=high)


@pytest.mark.parametrize("mode", NEED_A_MINIMUM)
def test_a_missing_minimum_is_named(mode):
    with pytest.raises(ValueError, match=f"'{mode}' needs a lower bound above 0.*importance_sampling_min"):
        weights(G, T, MASK, mode=mode)
    with pytest.raises(ValueError, match=mode):
        GRPOConfig(importance_sampling=mode)
    config = GRPOConfig(importance_sampling=mode, importance_sampling_min=0.999, importance_sampling_max=1.002)
    assert config.importance_sampling_min == 0.999


def test_bad_mode():
    with pytest.raises(ValueError, match="'trunc'.*none, is, tis, icepop"):
        weights(G, T, MASK, mode="trunc")


# ---- whole sequences --------------------------------------------------------------------------------


def test_sequences_by_hand():
    """Ratios (2, 1/2, 8 | masked) with product 8 and geometric mean 2; and (1/2, 1/2) with 1/4 and 1/2."""
    ratios = torch.tensor([[2, 0.5, 8, 99], [0.5, 0.5, 99, 99]])
    mask = torch.tensor([[True, True, True, False], [True, True, False, False]])
    g = torch.full((2, 4), -1.0)

    def rows(mode, low, high):
        c = weights(g, g + ratios.log(), mask, mode=mode, low=low, high=high)
        assert c.statistics["sequences"] == 2 and "oob_tokens" not in c.statistics
        return [c.weights[0].tolist(), c.weights[1].tolist(), c.statistics["oob_sequences"]]

    def approx(first, second, outside):
        return [pytest.approx([*first, 0], rel=1e-5), pytest.approx([*second, 0, 0], rel=1e-5), outside]

    assert rows("seq-mask-tis", 0.4, 1.5) == approx([0, 0, 0], [0.5, 0.5], 1)
    assert rows("seq-mask-tis", 0.6, 2.5) == approx([2, 0.5, 8], [0, 0], 1)  # r itself is not truncated
    assert rows("sequence-tis", 0.5, 3) == approx([3, 3, 3], [0.5, 0.5], 2)
    assert rows("sequence-tis", 0, 10) == approx([8, 8, 8], [0.25, 0.25], 0)
    assert rows("sequence-mask", 0, 3) == approx([0, 0, 0], [0.25, 0.25], 1)
    assert rows("geometric", 0, 5) == approx([2, 2, 2], [0.5, 0.5], 0)
    assert rows("geometric", 0, 1.5) == approx([0, 0, 0], [0.5, 0.5], 1)


@pytest.mark.parametrize("mode", SEQUENCE_MODES)
@pytest.mark.parametrize("noise, low, high", [(0.01, 0.999, 1.002), (0.5, 0.8, 1.2), (8.0, 1e-2, 1e2)])
def test_sequences_against_the_frameworks(mode, noise, low, high):
    r = torch.Generator().manual_seed(3)
    g = torch.randn((40, 9), generator=r) - 3
    t = g + noise * torch.randn(g.shape, generator=r)
    mask = torch.rand(g.shape, generator=r) < 0.7
    mask[0, 2] = mask[1, 3] = True
    g[0, 2], t[1, 3], mask[2] = -INF, NAN, False
    c = weights(g, t, mask, mode=mode, low=low, high=high)
    want = references.corrected_weights(g.numpy(), t.numpy(), mask.numpy(), mode, low, high)
    assert np.allclose(c.weights.numpy(), want, rtol=1e-5) and 0 < (c.weights > 0).sum()
    assert 0 < c.statistics["oob_sequences"] < c.statistics["sequences"] == 39
    assert c.statistics["nonfinite_tokens"] == 2


def test_sequence_exponents_are_clamped_and_counted():
    g, t, mask = torch.full((2, 3), -15.0), torch.full((2, 3), -5.0), torch.ones(2, 3, dtype=torch.bool)
    g[1], t[1] = -60, -1
    count = {mode: weights(g, t, mask, mode=mode, low=0.1).statistics["clamped_exponents"] for mode in SEQUENCE_MODES}
    assert count == {"seq-mask-tis": 4, "sequence-tis": 2, "sequence-mask": 2, "geometric": 1}
    c = weights(g, t, mask, mode="sequence-tis", high=INF)
    assert c.weights[0].tolist() == pytest.approx([math.exp(20)] * 3)


def test_huge_differences_do_not_cancel_to_nan():
    """float32 would make inf - inf of these."""
    g, t = torch.tensor([[3e38, -3e38]]), torch.tensor([[-3e38, 3e38]])
    for mode in SEQUENCE_MODES:
        assert weights(g, t, g < INF, mode=mode, low=0.5).weights.isfinite().all()


def test_rejected_tokens_stay_in_the_denominator():
    g = torch.zeros(2, 2)
    t, mask = torch.tensor([[0.0, 0.0], [-9.0, -9.0]]), torch.ones(2, 2, dtype=torch.bool)
    c = weights(g, t, mask, mode="geometric", low=0.5)
    loss, _ = policy_loss(t, t, torch.ones(2), GRPOConfig())
    assert (loss * c.weights * token_weights(mask, "dapo", 2)).sum() == -0.5  # of 4 tokens, not of the 2 left


@pytest.mark.parametrize("mode", SEQUENCE_MODES)
def test_a_training_step_logs_the_fraction_of_sequences_outside(mode):
    plan, bounds = PrecisionPlan.preset("fp8-rollout"), {"low": 0.999, "high": 1.002}
    config = GRPOConfig(
        num_generations=4,
        importance_sampling=mode,
        importance_sampling_min=bounds["low"],
        importance_sampling_max=bounds["high"],
        micro_batch_size=4,
    )
    trainer = Trainer("tiny-llama", plan, config)
    engine = NativeEngine(trainer.model, plan, tokenizer=trainer.tokenizer)
    rollout = engine.generate(["47+38=", "5-9="], SamplingParams(n=4, max_tokens=6), seed=0)
    c = weights(rollout.logprobs, trainer.score(rollout), rollout.mask, mode=mode, **bounds)
    metrics = trainer.step(rollout, [1.0, 0, 0, 1, 0, 1, 1, 0])
    assert metrics["is_oob_ratio"] == c.statistics["oob_sequences"] / 8 > 0
    assert math.isfinite(metrics["loss"]) and math.isfinite(metrics["grad_norm"])


# ---- with the loss ----------------------------------------------------------------------------------

any_logprob = st.floats(width=32) | st.floats(-30, 0, width=32)


@settings(max_examples=200)
@given(
    rows=st.lists(st.tuples(any_logprob, any_logprob, any_logprob, st.booleans()), min_size=2, max_size=8),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    advantages=st.tuples(st.floats(-5, 5, width=32), st.floats(-5, 5, width=32)),
    mode=st.sampled_from(MODES),
    delta=st.sampled_from([None, 3.0]),
)
@example(
    rows=[(-INF, -1, -1, True), (NAN, -1e6, 0, True)], dtype=torch.float32, advantages=(-5, 5), mode="is", delta=None
)
@example(
    rows=[(-1, NAN, -1, True), (-1, -1, -INF, True)], dtype=torch.bfloat16, advantages=(-5, 5), mode="tis", delta=3.0
)
def test_loss_and_gradient_stay_finite(rows, dtype, advantages, mode, delta):
    """Whatever either engine reports, inside and outside the mask."""
    *logprobs, mask = (torch.tensor(column)[None].expand(2, -1) for column in zip(*rows, strict=True))
    g, old, now = (x.to(dtype) for x in logprobs)
    leaf = now.clone().requires_grad_()
    c = weights(g, old, mask, mode=mode, low=1e-6)
    loss, _ = policy_loss(leaf, old, torch.tensor(advantages), GRPOConfig(delta=delta))
    total = torch.where(mask, loss * c.weights + 0.1 * reference_kl(leaf, old), 0.0).sum()
    total.backward()
    assert total.isfinite() and leaf.grad.isfinite().all() and c.weights.isfinite().all()
    usable = old.isfinite() & now.isfinite()
    assert not leaf.grad[~mask | ~usable].any() and not c.weights[~mask | ~g.isfinite() | ~old.isfinite()].any()


@pytest.mark.parametrize("mode", MODES)
def test_shapes_that_do_not_agree_are_refused(mode):
    for wrong in ((G, T[:1], MASK), (G[:1], T, MASK), (G, T, MASK[0]), (G[0], T[0], MASK[0])):
        with pytest.raises(ValueError, match="must be one"):
            weights(*wrong, mode=mode, low=0.5)
    ours = weights(G, T, MASK.float(), mode=mode, low=0.5).weights
    assert torch.equal(ours, weights(G, T, MASK, mode=mode, low=0.5).weights)


@pytest.mark.parametrize(
    ("mode", "want"),
    [("tis", [1, 1, 1, 0]), ("icepop", [1, 0, 1, 0]), ("sequence-mask", [0, 0, 0, 0]), ("geometric", [1, 1, 1, 0])],
)
def test_the_mask_of_a_correction_holds_what_still_counts(mode, want):
    """Ratios 1, 4, 1 and a NaN under bounds 0.5 .. 3: R is 4 as a product, 4^(1/3) = 1.59 as a mean."""
    g, ratio = torch.tensor([[-1.0, -2.0, -3.0, NAN]]), torch.tensor([[1.0, 4.0, 1.0, 1.0]])
    c = weights(g, g + ratio.log(), torch.ones(1, 4, dtype=torch.bool), mode=mode, low=0.5, high=3.0)
    assert c.mask.int().tolist() == [want]


@settings(max_examples=30)
@given(mode=st.sampled_from(MODES), left=st.integers(0, 3), right=st.integers(0, 3), fill=any_logprob)
def test_padding_changes_nothing(mode, left, right, fill):
    def pad(x, value):
        return torch.nn.functional.pad(x, (left, right), value=value)

    want = weights(G, T, MASK, mode=mode, low=0.5)
    ours = weights(pad(G, fill), pad(T, -fill), pad(MASK, False), mode=mode, low=0.5)
    assert torch.equal(ours.weights, pad(want.weights, 0.0)) and ours.statistics == want.statistics
