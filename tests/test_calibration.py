"""Scales of q, k and v: what is refused, NeMo RL's rule written again, growing keys, the loop."""

import dataclasses
import json
import math
import re
import warnings

import pytest
import torch

from fp8lab import experiment
from fp8lab.attention import attention_of, set_attention
from fp8lab.attention_scales import OPERANDS, AttentionMeter, AttentionScales
from fp8lab.calibration import calibrate, scales_from_amax, scales_from_meter
from fp8lab.experiment import ExperimentConfig, Loop, resume, run
from fp8lab.grpo import GRPOConfig
from fp8lab.models import load_model, load_tokenizer, named_weights
from fp8lab.operands import FP8_ATTENTION
from fp8lab.precision import PrecisionPlan
from fp8lab.recipes import load_recipe
from fp8lab.rollout import NativeEngine, SamplingParams
from tests.references import tiny_llama, tokens

PROMPTS = ["47+38=", "5-9=", "12+7=", "99+99="]
SAMPLING = SamplingParams(n=4, max_tokens=5)
NEMO_RL = dataclasses.replace(FP8_ATTENTION, calibration="nemo_rl")
SMALL = ExperimentConfig(
    name="fp8-e2e-kv",
    plan=PrecisionPlan.preset("fp8-e2e-kv"),
    steps=4,
    prompts_per_step=8,
    eval_every=2,
    eval_prompts=16,
    eval_samples=1,
    checkpoint_every=2,
    grpo=GRPOConfig(num_generations=4, warmup_steps=2, learning_rate=5e-4),
)


def scales(layers=2, **changes):
    values = {operand: (0.01,) * layers for operand in OPERANDS}
    return AttentionScales(**{**values, **changes})


# ---- the record ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [0.0, -0.01, math.nan, math.inf, 1e-60])
@pytest.mark.parametrize("operand", OPERANDS)
def test_a_scale_that_is_no_scale_is_refused(operand, bad):
    with pytest.raises(ValueError, match=f"the {operand} scale of layer 1 is .*calibrate anew"):
        scales(**{operand: (0.01, bad)})


def test_a_layer_too_few_and_no_layer_are_refused():
    with pytest.raises(ValueError, match="found 2 query, 1 key, 2 value scales"):
        scales(key=(0.01,))
    with pytest.raises(ValueError, match="one per decoder layer"):
        scales(layers=0)


def test_names_are_those_of_nemo_rl_and_a_missing_one_is_an_error():
    """nemo_rl/models/generation/vllm/quantization/fp8_train_utils.py, get_vllm_qkv_scale_names."""
    named = scales(query=(0.1, 0.2), key=(0.3, 0.4), value=(0.5, 0.6)).to_named()
    assert list(named)[3:] == [f"model.layers.1.self_attn.{end}" for end in ("attn.q_scale", "k_scale", "v_scale")]
    assert AttentionScales.from_named(named, 2).to_named() == named
    del named["model.layers.1.self_attn.k_scale"]
    with pytest.raises(ValueError, match="1 scales are missing, 'model.layers.1.self_attn.k_scale' first"):
        AttentionScales.from_named(named, 2)
    silent = AttentionScales.from_named(named, 2, missing="one")
    assert silent.key == (pytest.approx(0.3), 1.0) and silent.value == pytest.approx((0.5, 0.6))
    with pytest.raises(ValueError, match="unknown scale 'model.layers.1.self_attn.attn.q_scale'"):
        AttentionScales.from_named(named, 1)
    with pytest.raises(ValueError, match="allowed: error, one"):
        AttentionScales.from_named(named, 2, missing="zero")


def test_through_json_it_comes_back_bit_for_bit():
    found = scales(query=(0.1, 1 / 3), key=(1e-7, 3.0))
    assert AttentionScales(**json.loads(json.dumps(found.to_dict()))) == found


# ---- the rules -----------------------------------------------------------------------------------------


def nemo_rl_scale(values, percentile=99.9, margin=1.05, fp8_max=448.0):
    """NVIDIA NeMo RL (Apache-2.0), megatron_policy_worker.py, calibrate_qkv_fp8_scales: its percentile and scale."""
    rank = max(0, min(len(values) - 1, int(round((percentile / 100.0) * (len(values) - 1)))))
    return sorted(values)[rank] * margin / fp8_max


@pytest.mark.parametrize("count", [1, 2, 7, 500, 501, 1200])
def test_the_nemo_rl_rule(count):
    amax = torch.rand(count, 3, 2, generator=torch.Generator().manual_seed(count)) * 50
    found = scales_from_amax(amax, NEMO_RL)
    for row, operand in enumerate(OPERANDS):
        expected = [nemo_rl_scale(amax[:, row, layer].tolist()) for layer in range(2)]
        assert getattr(found, operand) == pytest.approx(expected, rel=1e-7)
    is_maximum = found == scales_from_amax(amax, FP8_ATTENTION)
    assert is_maximum == (count <= 501)  # round(0.999 * 500) is 500 still (ties to even)


def test_ranks_are_merged_by_their_maximum():
    amax = torch.rand(3, 600, 3, 2, generator=torch.Generator().manual_seed(0))
    found = scales_from_amax(amax[0], NEMO_RL, ranks=amax[1:])
    expected = max(nemo_rl_scale(rank[:, 1, 0].tolist()) for rank in amax)
    assert found.key[0] == pytest.approx(expected, rel=1e-7)


def test_nothing_and_nan_are_told_apart():
    amax = torch.ones(2, 3, 2)
    amax[:, 2, 0] = 0.0
    found = scales_from_amax(amax, FP8_ATTENTION)
    assert found.value[0] == 1.0 and found.value[1] == pytest.approx(1.05 / 448)
    amax[1, 1, 1] = math.nan
    with pytest.raises(ValueError, match="the key of layer 1 holds NaN or infinity"):
        scales_from_amax(amax, FP8_ATTENTION)
    with pytest.raises(ValueError, match="micro-batches >= 1"):
        scales_from_amax(amax[:0], FP8_ATTENTION)
    with pytest.raises(ValueError, match="no q, k and v have been seen"):
        scales_from_meter(AttentionMeter(2), FP8_ATTENTION)


# ---- one forward ---------------------------------------------------------------------------------------


def spied_maxima(model, sequences):
    """(3, layers) maxima of q, k and v, one unpadded sequence at a time, by an attention function of its own."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    maxima = torch.zeros(3, model.config.num_hidden_layers)

    def spy(module, query, key, value, attention_mask, **kwargs):
        for row, x in enumerate((query, key, value)):
            maxima[row, module.layer_idx] = max(maxima[row, module.layer_idx], x.abs().max())
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)

    AttentionInterface.register("spy", spy)
    AttentionMaskInterface.register("spy", sdpa_mask)
    model.set_attn_implementation("spy")
    with torch.no_grad():
        for sequence in sequences:
            model(torch.tensor(sequence)[None], use_cache=False)
    model.set_attn_implementation("sdpa")
    return maxima


def assert_scales(found, maxima, margin=1.05):
    for row, operand in enumerate(OPERANDS):
        assert getattr(found, operand) == pytest.approx((maxima[row] * margin / 448).tolist(), rel=1e-4)


@pytest.mark.parametrize("micro_batch_size", [1, 3, 256])
def test_on_prompts_it_finds_what_single_forwards_show(micro_batch_size):
    model, tokenizer = load_model("tiny-llama"), load_tokenizer("tiny-llama")
    ids = [tokenizer(prompt).input_ids for prompt in PROMPTS]
    found = calibrate(model, ids, FP8_ATTENTION, micro_batch_size=micro_batch_size)
    assert found.tokens == sum(map(len, ids))
    assert_scales(found.scales, spied_maxima(model, ids))
    with pytest.raises(ValueError, match="no prompts"):
        calibrate(model, [], FP8_ATTENTION)


@pytest.mark.parametrize("micro_batch_size", [4, 256])
def test_on_a_rollout_it_reads_what_the_cache_held(micro_batch_size):
    engine = NativeEngine("tiny-llama", PrecisionPlan.preset("bf16"))
    rollout = engine.generate(PROMPTS, SAMPLING, seed=0)
    model = load_model("tiny-llama")
    held = [row[: n - 1].tolist() for row, n in zip(rollout.tokens, rollout.lengths.tolist(), strict=True)]
    found = calibrate(model, rollout, FP8_ATTENTION, micro_batch_size=micro_batch_size)
    assert_scales(found.scales, spied_maxima(model, held))
    prompts = rollout.prompt_lengths[::4].sum()
    assert found.tokens == int(prompts + (rollout.lengths - rollout.prompt_lengths - 1).sum())


def test_padding_counts_under_nemo_rls_rule_alone():
    """Padding holds token 0, which gets keys that no other token has."""
    model = tiny_llama()
    with torch.no_grad():  # RMSNorm takes lengths away: what makes a token stand out is a direction of its own
        embeddings = model.model.embed_tokens.weight
        embeddings[:, 0], embeddings[0] = 0, 0
        embeddings[0, 0] = 1
        model.model.layers[0].self_attn.k_proj.weight[:, 0] = 5
    batch = [[t or 1 for t in tokens(seed=n, shape=(1, n))[0].tolist()] for n in (9, 3)]
    found = calibrate(model, batch, FP8_ATTENTION).scales
    assert_scales(found, spied_maxima(model, batch))
    assert calibrate(model, batch, NEMO_RL).scales.key[0] > 1.5 * found.key[0]


def test_values_that_are_all_zero_and_weights_that_are_nan():
    model = tiny_llama()
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.weight.zero_()
    found = calibrate(model, tokens().tolist(), FP8_ATTENTION).scales
    assert found.value[1] == 1.0 and found.value[0] < 0.1
    set_attention(model, FP8_ATTENTION).scales = found
    assert model(tokens()).logits.isfinite().all()
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight[0, 0] = math.nan
    with pytest.raises(ValueError, match="the key of layer 0 holds NaN"):
        calibrate(model, tokens().tolist(), FP8_ATTENTION)
    assert attention_of(model).scales == found and attention_of(model).observer is None


def test_old_scales_have_no_say_in_new_ones():
    model = tiny_llama()
    fresh = calibrate(model, tokens().tolist(), FP8_ATTENTION).scales
    set_attention(model, FP8_ATTENTION).scales = scales(key=(1e-6, 1e-6))
    assert calibrate(model, tokens().tolist(), FP8_ATTENTION).scales == fresh


# ---- engine: ablations and alarms ------------------------------------------------------------------------


@pytest.fixture()
def engine():
    engine = NativeEngine("tiny-llama", PrecisionPlan.preset("fp8-e2e-kv"))
    engine.calibrate(PROMPTS)
    engine.calibrate(engine.generate(PROMPTS, SAMPLING, seed=0))
    return engine


def test_fresh_scales_raise_no_alarm(engine):
    engine.generate(PROMPTS, SAMPLING, seed=0)
    stats = engine.stats()
    assert stats["attention_alarms"] == []
    assert all(max(shares) == 0 for shares in stats["saturation"].values())
    assert NativeEngine("tiny-llama", PrecisionPlan.preset("bf16")).calibrate(PROMPTS) == {}


@pytest.mark.parametrize(
    "fault, alarm",
    [
        (lambda s: AttentionScales.ones(s.layers), "times what the values need: calibrate, or is 1.0 meant"),
        (
            lambda s: AttentionScales.from_named(
                {k: v for k, v in s.to_named().items() if "v_scale" not in k}, s.layers, missing="one"
            ),
            "the value scale of layer 0, 1,",
        ),
        (lambda s: dataclasses.replace(s, key=(s.key[0] / 3, *s.key[1:])), "the key scale of layer 0, .*clamped"),
    ],
    ids=["ones", "missing", "too small"],
)
def test_planted_faults_raise_an_alarm_and_the_engine_goes_on(engine, fault, alarm):
    good = engine.attention_scales
    engine.attention_scales = fault(good)
    engine.generate(PROMPTS, SAMPLING, seed=0)
    found = engine.stats()["attention_alarms"]
    assert any(re.search(alarm, sentence) for sentence in found)
    engine.attention_scales = good
    engine.generate(PROMPTS, SAMPLING, seed=0)
    assert engine.stats()["attention_alarms"] == []


def test_scales_of_the_wrong_layer_raise_an_alarm(engine):
    """Layers whose keys differ by a factor of 20, which the queries take back: the function is as before."""
    weights = {name: tensor.clone() for name, tensor in named_weights(engine.model).items()}
    weights["model.layers.2.self_attn.k_proj.weight"] *= 20
    weights["model.layers.2.self_attn.q_proj.weight"] /= 20
    engine.refit(weights)
    engine.calibrate(PROMPTS)
    right = engine.attention_scales
    engine.attention_scales = dataclasses.replace(right, key=right.key[2:] + right.key[:2])
    engine.generate(PROMPTS, SAMPLING, seed=0)
    alarms = "\n".join(engine.stats()["attention_alarms"])
    assert "the key scale of layer 2" in alarms and "clamped" in alarms
    assert "the key scale of layer 0" in alarms and "times what the values need" in alarms
    with pytest.raises(ValueError, match="are for 3 layers; this model has 4"):
        engine.attention_scales = scales(layers=3)
    with pytest.raises(ValueError, match="has no per-layer attention scales"):
        NativeEngine("tiny-llama", PrecisionPlan.preset("fp8-e2e")).attention_scales = right


@pytest.mark.slow
def test_growing_keys_are_followed_by_fresh_scales_and_clamped_by_stale_ones():
    """50 updates of 6 % on all keys, which the queries take back: the model stays the same function throughout."""
    plan = PrecisionPlan.preset("fp8-e2e-kv")
    fresh, stale = NativeEngine("tiny-llama", plan), NativeEngine("tiny-llama", plan)
    weights = {name: tensor.clone() for name, tensor in named_weights(fresh.model).items()}
    for engine in (fresh, stale):
        engine.calibrate(PROMPTS)
        engine.calibrate(engine.generate(PROMPTS, SAMPLING, seed=0))
    first, history, batch = fresh.attention_scales, [], fresh.generate(PROMPTS, SAMPLING, seed=0)
    for _ in range(50):
        for name in weights:
            if "k_proj" in name or "q_proj" in name:
                weights[name] *= 1.06 if "k_proj" in name else 1 / 1.06
        for engine in (fresh, stale):
            engine.refit(weights)
        fresh.calibrate(batch)
        batch = fresh.generate(PROMPTS, SAMPLING, seed=0)
        stale.generate(PROMPTS, SAMPLING, seed=0)
        history.append({key: max(e.stats()["saturation"]["key"]) for key, e in (("fresh", fresh), ("stale", stale))})
    assert max(row["fresh"] for row in history) < 1e-3
    assert history[9]["stale"] > 1e-3 and history[-1]["stale"] > 0.2
    growth = [new / old for new, old in zip(fresh.attention_scales.key, first.key, strict=True)]
    assert growth == pytest.approx([1.06**50] * 4, rel=0.3)
    assert stale.attention_scales.key == first.key and stale.stats()["attention_alarms"]


def test_scales_from_the_rollout_cost_nothing_and_are_those_of_its_weights(engine):
    rollout = engine.generate(PROMPTS, SAMPLING, seed=0)
    assert engine.calibrate(None)["tokens"] == 0
    seen = engine.attention_scales
    engine.calibrate(rollout)
    for operand in OPERANDS:  # the meter saw q, k, v under FP8 attention, the forward sees them unrounded
        assert getattr(seen, operand) == pytest.approx(getattr(engine.attention_scales, operand), rel=0.1)


def test_refit_twice_and_calibrate_is_a_fresh_engine():
    plan = PrecisionPlan.preset("fp8-e2e-kv")
    engine, fresh = NativeEngine("tiny-llama", plan), NativeEngine("tiny-llama", plan)
    first = {name: tensor.clone() for name, tensor in named_weights(engine.model).items()}
    for weights in ({name: tensor * 1.1 for name, tensor in first.items()}, first):
        engine.refit(weights)
        engine.calibrate(PROMPTS)
    fresh.calibrate(PROMPTS)
    assert engine.attention_scales == fresh.attention_scales
    a, b = (e.generate(PROMPTS, SAMPLING, seed=1) for e in (engine, fresh))
    assert torch.equal(a.tokens, b.tokens) and torch.equal(a.logprobs, b.logprobs)


# ---- the loop ------------------------------------------------------------------------------------------


def test_the_loop_calibrates_after_every_step_and_logs_it(tmp_path):
    log = run(SMALL, tmp_path / "run")
    rows, calibration, timing = log.rows(), log.rows("calibration"), log.rows("timing")
    assert [row["step"] for row in calibration] == [0, 1, 2, 3, 4]
    assert all(a["key"] != b["key"] for a, b in zip(calibration, calibration[1:], strict=False))
    assert all(row["calibrate"] > 0 for row in timing)
    for before, row in zip(calibration, rows[1:], strict=False):
        assert row["key_scale"] == max(before["key"])  # a rollout runs on the scales of the step before
        assert 0 <= row["key_saturation"] < 1e-2
    assert rows[-1]["attention_alarms"] == 0
    assert "calibration" not in {path.stem for path in (tmp_path / "run").glob("*.json")}
    plain = run(dataclasses.replace(SMALL, plan=PrecisionPlan.preset("fp8-e2e"), steps=1), tmp_path / "plain")
    assert plain.rows("calibration") == [] and "key_scale" not in plain.rows()[1]
    assert "calibrate" not in plain.rows("timing")[1]


@pytest.mark.slow
@pytest.mark.parametrize("recalibrate", experiment.RECALIBRATE)
def test_a_killed_run_resumes_bit_for_bit(tmp_path, recalibrate):
    config = dataclasses.replace(SMALL, recalibrate=recalibrate, steps=3, eval_every=3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # `ones` raises its alarm
        run(config, tmp_path / "whole")
        with pytest.raises(KeyboardInterrupt):
            run(config, tmp_path / "killed", on_step=lambda row: interrupt(row, 3))
        resume(tmp_path / "killed")
    for log in ("metrics", "calibration", "samples"):
        whole, killed = (tmp_path / name / f"{log}.jsonl" for name in ("whole", "killed"))
        assert whole.read_bytes() == killed.read_bytes()


def interrupt(row, step):
    if row["step"] == step:
        raise KeyboardInterrupt


def test_resume_without_the_scales_is_refused(tmp_path):
    run(SMALL, tmp_path / "run", should_stop=stop_after(2))
    (tmp_path / "run" / "calibration.jsonl").unlink()
    with pytest.raises(ValueError, match="calibration.jsonl has no step 2"):
        resume(tmp_path / "run")


def stop_after(steps):
    asked = []
    return lambda: asked.append(0) or len(asked) > steps


def test_both_sides_in_fp8_agree_and_one_side_does_not():
    one = SMALL.plan
    both = dataclasses.replace(one, name="both", trainer=one.rollout)
    errors = {}
    for plan in (PrecisionPlan.preset("fp8-e2e"), one, both):
        loop = Loop(dataclasses.replace(SMALL, plan=plan, prompts_per_step=32))
        errors[plan.name] = sum(loop.step(n)[0]["token_mult_prob_error"] for n in (1, 2)) / 2
    assert errors["fp8-e2e"] < 1.005 and errors["both"] < 1.005
    assert errors["fp8-e2e-kv"] > 1.015
    assert attention_of(loop.trainer.model).scales == loop.engine.attention_scales


def test_stale_and_unit_scales_are_ablations_that_warn():
    with pytest.warns(UserWarning, match="times what the values need"):
        Loop(dataclasses.replace(SMALL, recalibrate="ones")).step(2)
    loop = Loop(dataclasses.replace(SMALL, recalibrate="never"))
    first = loop.engine.attention_scales
    loop.step(1)
    assert loop.engine.attention_scales == first and "calibrate" in loop.seconds


def test_configs_that_cannot_work_are_refused():
    with pytest.raises(ValueError, match="recalibrate is 'sometimes'; allowed: every-step, rollout, never, ones"):
        dataclasses.replace(SMALL, recalibrate="sometimes")
    kv = SMALL.plan.rollout
    with pytest.raises(ValueError, match="give both sides the same attention"):
        dataclasses.replace(SMALL, plan=PrecisionPlan(trainer=kv))
    only_kv = PrecisionPlan(rollout=dataclasses.replace(PrecisionPlan().rollout, attention=FP8_ATTENTION))
    with pytest.raises(ValueError, match="learns from samples of another policy"):
        dataclasses.replace(SMALL, plan=only_kv, grpo=dataclasses.replace(SMALL.grpo, importance_sampling="none"))


@pytest.mark.parametrize("name", ["fp8-e2e-kv", "fp8-rollout-kv"])
def test_the_recipes(name):
    config = load_recipe(name)
    assert config.plan == PrecisionPlan.preset(name) and config.calibrates and config.recalibrate == "every-step"
    assert config.grpo == load_recipe("bf16").grpo
