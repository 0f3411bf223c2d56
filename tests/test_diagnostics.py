"""Mismatch metrics by hand and against NeMo RL's formulas; and the proof that both sides hold the same bytes."""

import copy
import dataclasses
import inspect
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8lab.conversion import convert, restore
from fp8lab.diagnostics import MismatchReport, differing_layers, gap_parts, mismatch
from fp8lab.linear import float8_layers, refresh
from fp8lab.precision import LinearPrecision, PrecisionPlan, SidePlan
from fp8lab.rollout import NativeEngine, SamplingParams
from fp8lab.trainer import Trainer

from . import references

NAN, INF = float("nan"), float("inf")
EQUAL = {"token_mult_prob_error": 1.0, "sampling_importance_ratio": 1.0}


pytestmark = pytest.mark.usefixtures("one_thread")


def logprobs(seed=0, shape=(4, 9), noise=0.1):
    r = torch.Generator().manual_seed(seed)
    g = torch.randn(shape, generator=r) - 3
    return g, g + noise * torch.randn(shape, generator=r), torch.rand(shape, generator=r) < 0.7


# ---- metrics --------------------------------------------------------------------------------------


def test_by_hand():
    """One token twice as likely under the trainer, one half as likely."""
    g = torch.log(torch.tensor([[0.25, 0.5]]))
    t = torch.log(torch.tensor([[0.5, 0.25]]))
    report = mismatch(g, t, torch.ones(1, 2, dtype=torch.bool))
    log2 = math.log(2)
    k3 = (2 - log2 - 1 + 0.5 + log2 - 1) / 2  # mean of exp(d) - d - 1 for d = log 2, -log 2
    js = (4 / 3 - math.log(4 / 3) - 1 + 2 / 3 - math.log(2 / 3) - 1) / 2  # M = log 0.375
    want = {
        "token_mult_prob_error": 2.0,
        "gen_kl_error": k3,
        "policy_kl_error": k3,
        "js_divergence_error": js,
        "sampling_importance_ratio": 1.25,
        "mean_abs_difference": log2,
        "max_abs_difference": log2,
        "tokens": 2,
        "nonfinite_tokens": 0,
    }
    assert report.as_dict() == pytest.approx(want, rel=1e-6)
    assert list(report.as_dict()) == [f.name for f in dataclasses.fields(MismatchReport)]
    source = inspect.getsource(MismatchReport)
    for value in ("0.25]", "0.0589]", "1.25]", "log 2 = 0.693]"):  # the worked example in the docstrings
        assert value in source
    assert (k3, js, log2) == pytest.approx((0.25, 0.0589, 0.693), abs=5e-4)


def test_directions():
    """A trainer that always gives less: gen_kl sees exp(d) with d < 0, policy_kl the other way around."""
    g, mask = torch.full((1, 3), -1.0), torch.ones(1, 3, dtype=torch.bool)
    report = mismatch(g, g - 1, mask)
    assert report.gen_kl_error == pytest.approx(math.exp(-1) + 1 - 1)
    assert report.policy_kl_error == pytest.approx(math.e - 1 - 1)
    assert report.sampling_importance_ratio == pytest.approx(math.exp(-1))
    assert report.token_mult_prob_error == pytest.approx(math.e)


def test_worked_example_of_nemo_rl():
    """g = -5, p = -15 in docs/guides/grpo.md: the code's formula gives 4.31 (the text says about 9)."""
    report = mismatch(torch.tensor([[-5.0]]), torch.tensor([[-15.0]]), torch.tensor([[True]]))
    assert report.js_divergence_error == pytest.approx(4.31, abs=0.005)
    assert report.gen_kl_error == pytest.approx(9.0, abs=1e-3)


@pytest.mark.parametrize("noise", [1e-3, 0.1, 2.0])
def test_against_nemo_rl_formulas(noise):
    g, t, mask = logprobs(noise=noise)
    report = mismatch(g, t, mask).as_dict()
    want = references.nemo_rl_mismatch(g[mask], t[mask])
    assert {k: report[k] for k in want} == pytest.approx(want, rel=1e-9, abs=1e-12)
    d = (t[mask].double() - g[mask].double()).abs().numpy()
    assert report["mean_abs_difference"] == pytest.approx(d.mean()) and report["max_abs_difference"] == d.max()
    assert report["tokens"] == int(mask.sum())
    assert min(report[k] for k in ("gen_kl_error", "policy_kl_error", "js_divergence_error")) > 0


def test_equal_engines():
    g, _, mask = logprobs()
    report = mismatch(g, g, mask).as_dict()
    assert report == {k: EQUAL.get(k, 0) for k in report} | {"tokens": int(mask.sum())}


@settings(max_examples=40)
@given(
    left=st.integers(0, 3),
    right=st.integers(0, 3),
    order=st.permutations(range(4)),
    fill=st.sampled_from([0.0, -1e30, NAN, INF, -INF]),
)
def test_padding_order_and_what_is_masked_never_matter(left, right, order, fill):
    g, t, mask = logprobs()

    def pad(x, value):
        return torch.nn.functional.pad(x[list(order)], (left, right), value=value)

    ours = mismatch(pad(g.masked_fill(~mask, fill), fill), pad(t.masked_fill(~mask, -fill), 1.0), pad(mask, False))
    assert ours.as_dict() == pytest.approx(mismatch(g, t, mask).as_dict(), rel=1e-12)


def test_nonfinite_tokens_are_left_out_and_counted():
    g, t, mask = logprobs()
    mask[:] = True
    keep = mask.clone()
    for i, (a, b) in enumerate([(NAN, -1.0), (-INF, -1.0), (-1.0, INF), (-INF, -INF), (NAN, NAN)]):
        g[i % 4, i], t[i % 4, i], keep[i % 4, i] = a, b, False
    report = mismatch(g, t, mask).as_dict()
    assert report == mismatch(g, t, keep).as_dict() | {"nonfinite_tokens": 5}
    assert all(math.isfinite(v) for v in report.values())


def test_no_usable_token():
    g, t, mask = logprobs()
    for arguments, bad in (((g, t, mask & False), 0), ((g[:0], t[:0], mask[:0]), 0), ((g * NAN, t, mask), mask.sum())):
        report = mismatch(*arguments).as_dict()
        assert report == {k: EQUAL.get(k, 0) for k in report} | {"nonfinite_tokens": bad}


def test_extremes_stay_finite_and_integer_masks_work():
    g, t = torch.tensor([[-1e4, -1.0]]), torch.tensor([[-1.0, -1e4]])
    report = mismatch(g, t, torch.ones(1, 2, dtype=torch.long)).as_dict()
    assert all(math.isfinite(v) for v in report.values())
    assert report["token_mult_prob_error"] == pytest.approx(math.exp(20))
    assert report == mismatch(g, t, torch.ones(1, 2, dtype=torch.bool)).as_dict()
    assert mismatch(g.bfloat16(), g.bfloat16().requires_grad_(), torch.ones(1, 2)).token_mult_prob_error == 1


@pytest.mark.parametrize("shapes", [((2, 3), (2, 3), (2, 4)), ((2, 3), (3, 2), (2, 3)), ((2, 3), (2, 3), (3,))])
def test_shapes_must_agree(shapes):
    with pytest.raises(ValueError, match=r"must be one \(B, T\)"):
        mismatch(*(torch.zeros(s) for s in shapes))


# ---- the same bytes on both sides -------------------------------------------------------------------


def sides(plan=None, *, trainer=None, rollout=None):
    """Two copies of a tiny Llama, converted."""
    models = references.tiny_llama(attention_bias=True), references.tiny_llama(attention_bias=True)
    plan = plan or PrecisionPlan.preset("fp8-e2e")
    for model, side, own in zip(models, ("trainer", "rollout"), (trainer, rollout), strict=True):
        convert(model, own or plan, side=side)
    return models


NAME = "model.layers.1.mlp.up_proj"


def layer(model, name=NAME):
    return dict(float8_layers(model))[name]


def test_equal_models_differ_nowhere():
    for name in ("bf16", "fp8-e2e"):
        assert differing_layers(*sides(PrecisionPlan.preset(name))) == {}
    a, b = sides()
    assert differing_layers(a, copy.deepcopy(b)) == differing_layers(b, a) == {}
    e5m2 = dataclasses.replace(LinearPrecision(), gradient="e5m2")
    assert differing_layers(*sides(trainer=PrecisionPlan(trainer=SidePlan(linear=e5m2)))) == {}


def test_one_flipped_byte():
    for model in (0, 1):
        pair = sides()
        layer(pair[model]).quantized.packed.codes[3, 4] ^= 1
        found = differing_layers(*pair)
        assert list(found) == [NAME] and found[NAME].startswith("1 codes")


def test_an_inverted_scale():
    a, b = sides()
    cache = layer(b).quantized
    layer(b)._cache = cache._replace(packed=dataclasses.replace(cache.packed, scale=1 / cache.packed.scale))
    found = differing_layers(a, b)
    assert list(found) == [NAME] and "scales differ" in found[NAME]


def test_multiplied_values_must_be_those_of_the_bytes():
    a, b = sides()
    layer(b).quantized.values[0, 0] += 1
    assert differing_layers(a, b) == {NAME: "1 values differ"}


def test_power_of_two_scales_on_one_side():
    found = differing_layers(*sides(rollout=PrecisionPlan.preset("fp8-e2e", rule="pow2")))
    assert len(found) == 14 and found[NAME] == "scale rules differ: trainer default, rollout pow2"


def test_another_format_or_precision_on_one_side():
    e5m2 = PrecisionPlan(rollout=SidePlan(linear=dataclasses.replace(LinearPrecision(), weight="e5m2")))
    assert len(differing_layers(*sides(rollout=e5m2))) == 14
    found = differing_layers(*sides(PrecisionPlan.preset("fp8-e2e").with_bf16(layers=[1], side="trainer")))
    assert len(found) == 7 and found[NAME] == "trainer bf16, rollout e4m3[128x128] x e4m3[1x128]"


def test_a_stale_cache():
    a, b = sides()
    with torch.no_grad():
        for model in (a, b):
            layer(model).weight.mul_(1.5)
    a_layer = layer(a)
    a_layer.refresh()
    found = differing_layers(a, b)
    assert list(found) == [NAME]
    refresh(b)
    assert differing_layers(a, b) == {}


def test_other_weights_are_compared_in_float32():
    for name in ("model.norm.weight", "model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.bias"):
        a, b = sides()
        with torch.no_grad():
            tensor = b.get_parameter(name).view(-1)
            tensor[3] = torch.nextafter(tensor[3], torch.tensor(9.0))
        assert differing_layers(a, b) == {name: "float32 weights differ"}
    a, b = sides()
    with torch.no_grad():
        layer(a, "lm_head").weight[0, 0] += 1
    refresh(a)
    assert differing_layers(a, b) == {"lm_head": "1 values differ"}


def test_masters_may_differ_where_the_bytes_agree():
    """Below half a BF16 step: the same code on both sides, which is all that is claimed."""
    a, b = sides()
    with torch.no_grad():
        layer(b).weight.copy_(torch.from_numpy(references.bf16(layer(a).weight.numpy())))
    refresh(b)
    assert not torch.equal(layer(a).weight, layer(b).weight) and differing_layers(a, b) == {}


def test_layers_and_weights_on_one_side_only():
    a, b = sides()
    restore(b.model.layers[1])
    for pair in ((a, b), (b, a)):
        found = differing_layers(*pair)
        assert {k: v for k, v in found.items() if v == "only on one side"}.keys() == {
            n for n, _ in float8_layers(a) if ".layers.1." in n
        }
    a, b = sides()
    b.model.norm.register_parameter("extra", torch.nn.Parameter(torch.ones(2)))
    assert differing_layers(a, b) == differing_layers(b, a) == {"model.norm.extra": "only on one side"}
    a.model.norm.register_buffer("extra", torch.tensor(1.0))  # a scalar
    b.model.norm.extra = torch.nn.Parameter(torch.tensor(1.0))
    assert differing_layers(a, b) == {}
    a, _ = sides()
    wide = references.tiny_llama(attention_bias=True, intermediate_size=96)
    convert(wide, PrecisionPlan.preset("fp8-e2e"), side="rollout")
    found = differing_layers(a, wide)
    assert found[NAME] == "shapes differ: trainer (80, 48), rollout (96, 48)"
    assert len([n for n, why in found.items() if "shapes differ" in why]) == 6


def test_nan_weights_compare_by_bits():
    a, b = sides(PrecisionPlan.preset("bf16"))
    with torch.no_grad():
        for model in (a, b):
            model.model.norm.weight[0] = np.nan
            layer(model).weight[0, 0] = np.nan
            refresh(model)
    assert differing_layers(a, b) == {}


def test_the_gap_has_an_engine_part_and_a_precision_part():
    plan = PrecisionPlan.preset("fp8-rollout")
    trainer = Trainer("tiny-llama", plan)
    engine = NativeEngine(trainer.model, plan, tokenizer=trainer.tokenizer, kernels="other")
    rollout = engine.generate(["47+38=", "5-9="], SamplingParams(n=8, max_tokens=6), seed=0)
    before = trainer.score(rollout)
    parts = gap_parts(trainer, rollout)
    report = mismatch(rollout.logprobs, before, rollout.mask)
    assert parts["precision_gap"] > 5 * parts["engine_gap"] > 0
    assert report.mean_abs_difference <= sum(parts.values()) + 1e-6
    assert torch.equal(trainer.score(rollout), before)  # the trainer is left as it was
    same = Trainer("tiny-llama", PrecisionPlan.preset("fp8-e2e"))
    assert gap_parts(same, rollout)["precision_gap"] == 0


def test_the_gaps_parts_with_an_fp8_cache():
    """The engine's own scales, or some calibrated on the rollout: its part stays small beside the cache's."""
    plan = PrecisionPlan.preset("fp8-rollout-kv")
    trainer = Trainer("tiny-llama", plan)
    engine = NativeEngine(trainer.model, plan, tokenizer=trainer.tokenizer)
    engine.calibrate(["47+38=", "5-9="])
    rollout = engine.generate(["47+38=", "5-9="], SamplingParams(n=8, max_tokens=6), seed=0)
    given, own = gap_parts(trainer, rollout, engine.attention_scales), gap_parts(trainer, rollout)
    assert given["precision_gap"] > 5 * given["engine_gap"] > 0
    assert own["precision_gap"] > given["engine_gap"] and own != given
