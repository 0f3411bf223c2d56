"""verl's metrics and errors by sequence, by hand and against NumPy; histogram, positions, published bands."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8lab.corrections import weights
from fp8lab.diagnostics import mismatch
from fp8lab.sequence_metrics import by_position, effective_sample_size, ratio_histogram, sequence_report, verdict

from . import references

NAN, INF, LOG2 = float("nan"), float("inf"), math.log(2)
# The worked example of the module's docstrings.
G = torch.tensor([[0.25, 0.5], [0.5, 1.0]]).log()
T = torch.tensor([[0.5, 0.25], [0.25, 0.1]]).log()
MASK = torch.tensor([[True, True], [True, False]])
STARTS = torch.zeros(2, dtype=torch.long)
ONES = ("training_ppl", "rollout_ppl", "ppl_ratio", "effective_sample_size")


def logprobs(seed=0, shape=(6, 9), noise=0.1):
    r = torch.Generator().manual_seed(seed)
    g = torch.randn(shape, generator=r) - 3
    return g, g + noise * torch.randn(shape, generator=r), torch.rand(shape, generator=r) < 0.7


def everything(g, t, mask, starts):
    """All results on one input, as one flat dict."""
    return {
        "report": sequence_report(g, t, mask).as_dict(),
        "histogram": ratio_histogram(g, t, mask, [0, 0.9, 1, 1.1, 9]).__dict__,
        "position": by_position(g, t, mask, starts),
    }


def test_by_hand():
    root = math.sqrt(8)
    want = {
        "kl": LOG2 / 3,
        "k3_kl": LOG2 / 3,
        "training_ppl": (root + 4) / 2,
        "rollout_ppl": (root + 2) / 2,
        "log_ppl_diff": LOG2 / 2,
        "log_ppl_abs_diff": LOG2 / 2,
        "log_ppl_diff_max": LOG2,
        "log_ppl_diff_min": 0,
        "ppl_ratio": 1.5,
        "chi2_token": 0.5,
        "chi2_seq": -0.375,
        "effective_sample_size": 2 / 3,
        "max_seq_mult_prob_error": 2,
        "mean_seq_mult_prob_error": 2,
        "min_seq_mult_prob_error": 2,
        "sequences": 2,
        "tokens": 3,
        "nonfinite_tokens": 0,
        "clamped_exponents": 0,
    }
    assert sequence_report(G, T, MASK).as_dict() == pytest.approx(want, rel=1e-6, abs=1e-7)
    assert ratio_histogram(G, T, MASK, (0, 1, 3)).counts == (2, 1)
    rows = by_position(G, T, MASK, STARTS)
    assert rows["position"] == [0, 1] and rows["tokens"] == [2, 1]
    assert rows["token_mult_prob_error"] == pytest.approx([2, 2])


@pytest.mark.parametrize("noise", [1e-3, 0.1, 2.0])
def test_against_verl_and_nemo_rl_formulas(noise):
    g, t, mask = logprobs(noise=noise)
    mask[3] = False
    report = sequence_report(g, t, mask).as_dict()
    want = references.verl_mismatch(g.numpy(), t.numpy(), mask.numpy())
    assert {k: report[k] for k in want} == pytest.approx(want, rel=1e-9, abs=1e-12)
    assert report["k3_kl"] == pytest.approx(mismatch(g, t, mask).gen_kl_error, rel=1e-12)


def test_effective_sample_size():
    assert effective_sample_size(torch.tensor([1, 1, 2, 0.5])) == pytest.approx(0.81)
    assert effective_sample_size(torch.tensor([[3.0, 0], [0, 0]])) == 0.25
    assert effective_sample_size(torch.zeros(0)) == 1 and effective_sample_size(torch.zeros(3)) == 0
    for bad in (-1.0, NAN, INF):
        with pytest.raises(ValueError, match="finite and >= 0"):
            effective_sample_size(torch.tensor([1.0, bad]))
    g, t, mask = logprobs(noise=1.0)
    truncated = weights(g, t, mask, mode="tis", high=1.5).weights
    raw = sequence_report(g, t, mask)
    assert sequence_report(g, t, mask, truncated).effective_sample_size > raw.effective_sample_size
    with pytest.raises(ValueError, match="weights have shape"):
        sequence_report(g, t, mask, truncated[:1])


@settings(max_examples=40)
@given(
    left=st.integers(0, 3),
    right=st.integers(0, 3),
    order=st.permutations(range(6)),
    fill=st.sampled_from([0.0, -1e30, NAN, INF, -INF]),
)
def test_padding_order_and_what_is_masked_never_matter(left, right, order, fill):
    g, t, mask = logprobs()

    def pad(x, value):
        return torch.nn.functional.pad(x[list(order)], (left, right), value=value)

    starts = torch.zeros(6, dtype=torch.long)
    ours = everything(
        pad(g.masked_fill(~mask, fill), fill), pad(t.masked_fill(~mask, -fill), 1.0), pad(mask, False), starts + left
    )
    for name, want in everything(g, t, mask, starts).items():
        for key, value in want.items():
            assert ours[name][key] == pytest.approx(value, rel=1e-9, abs=1e-12), key


def test_nonfinite_tokens_are_left_out_and_counted():
    g, t, mask = logprobs()
    mask[:] = True
    keep = mask.clone()
    for i, (a, b) in enumerate([(NAN, -1.0), (-INF, -1.0), (-1.0, INF), (-INF, -INF), (NAN, NAN)]):
        g[i, i], t[i, i], keep[i, i] = a, b, False
    starts = torch.zeros(6, dtype=torch.long)
    ours, want = everything(g, t, mask, starts), everything(g, t, keep, starts)
    assert ours["report"] == want["report"] | {"nonfinite_tokens": 5}
    assert ours["histogram"] == want["histogram"] | {"nonfinite_tokens": 5}
    assert ours["position"] == want["position"] | {"nonfinite_tokens": [1] * 5 + [0] * 4}


def test_no_usable_token():
    for g, t, mask, bad in ((G, T, MASK & False, 0), (G[:0], T[:0], MASK[:0], 0), (G * NAN, T, MASK, 3)):
        report = sequence_report(g, t, mask).as_dict()
        assert report == {k: float(k in ONES or "mult" in k) for k in report} | {"nonfinite_tokens": bad}
        assert not any(ratio_histogram(g, t, mask).counts)
        assert by_position(g, t, mask, STARTS[: len(g)])["tokens"] == []
        assert verdict(sequence_report(g, t, mask)) == []


def test_equal_engines():
    g, _, mask = logprobs()
    report = sequence_report(g, g, mask).as_dict()
    assert report["chi2_seq"] == report["k3_kl"] == 0 and report["effective_sample_size"] == report["ppl_ratio"] == 1
    assert report["training_ppl"] == report["rollout_ppl"]


def test_extremes_stay_finite():
    g, t = torch.tensor([[-1e4, -1.0], [-1.0, -1.0]]), torch.tensor([[-1.0, -1e4], [-50.0, -1.0]])
    report = sequence_report(g, t, torch.ones(2, 2)).as_dict()
    assert all(math.isfinite(v) for v in report.values())
    assert report["clamped_exponents"] == 4  # three tokens; of the two sums, one cancels


# ---- histogram and positions --------------------------------------------------------------------------


def test_histogram_edges():
    ratios = torch.tensor([[0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 9.0]], dtype=torch.float64)
    g, mask = torch.zeros_like(ratios), torch.ones(1, 7, dtype=torch.bool)
    h = ratio_histogram(g, ratios.log(), mask, [0.2, 0.75, 1.5, 5])
    assert (h.counts, h.below, h.above) == ((2, 1, 2), 1, 1)
    h = ratio_histogram(*logprobs(), 40)
    assert len(h.edges) == 41 and (h.edges[0], h.edges[20], h.edges[40]) == (0.25, 1, 4)
    assert sum(h.counts) + h.below + h.above == int(logprobs()[2].sum())


@pytest.mark.parametrize("bins", [0, [1.0], [1.0, 1.0], [2.0, 1.0], [0.0, NAN]])
def test_bad_bins(bins):
    with pytest.raises(ValueError, match="bins"):
        ratio_histogram(G, T, MASK, bins)


def test_positions_count_from_the_end_of_each_prompt():
    g = torch.zeros(2, 5)
    t = torch.tensor([[0, 0, 1.0, 2.0, 0], [0, 0, 0, 0, 3.0]])
    mask = torch.tensor([[0, 0, 1, 1, 0], [0, 0, 0, 1, 1]]).bool()
    rows = by_position(g, t, mask, torch.tensor([2, 3]))
    assert rows["position"] == [0, 1] and rows["tokens"] == [2, 2]
    assert rows["mean_abs_difference"] == pytest.approx([0.5, 2.5])
    assert rows["k3_kl"] == pytest.approx([(math.e - 2) / 2, (math.exp(2) - 3 + math.exp(3) - 4) / 2])
    with pytest.raises(ValueError, match="inside the prompt"):
        by_position(g, t, mask, torch.tensor([3, 3]))


@pytest.mark.parametrize("shapes", [((2, 3), (2, 3), (2, 4)), ((2, 3), (3, 2), (2, 3)), ((3,), (3,), (3,))])
def test_shapes_must_agree(shapes):
    for function in (sequence_report, ratio_histogram):
        with pytest.raises(ValueError, match=r"must be one \(B, T\)"):
            function(*(torch.zeros(s) for s in shapes))


# ---- bands ----------------------------------------------------------------------------------------------


def test_published_bands_disagree():
    """d = -0.03 on every token: NeMo RL's 2 % fails, its 1.05 passes; Tinker's 0.01 fails, prime-rl's k3 passes."""
    g, mask = torch.full((1, 4), -1.0), torch.ones(1, 4, dtype=torch.bool)
    token, sequence = verdict(mismatch(g, g - 0.03, mask)), verdict(sequence_report(g, g - 0.03, mask))
    assert {(v.source, v.limit): v.ok for v in token if v.band.startswith("token")} == {
        ("NeMo RL docs/guides/grpo.md", 1.02): False,
        ("NeMo RL docs/guides/dtensor-tp-accuracy.md", 1.05): True,
    }
    assert all(v.ok for v in token if v.limit < 1) and len(token) == 7
    assert [(v.limit, v.ok) for v in sequence] == [(0.015, True), (0.01, False)]
    assert sequence[1].value == pytest.approx(0.03, rel=1e-5)
    assert not verdict(sequence_report(g, g + 0.03, mask))[1].ok  # the sign of k1 does not hide a gap


def test_equal_engines_pass_every_band():
    g, _, mask = logprobs()
    for report in (mismatch(g, g, mask), sequence_report(g, g, mask)):
        assert verdict(report) and all(v.ok for v in verdict(report))
