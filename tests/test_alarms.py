"""Each alarm on a planted fault at several magnitudes, and silence on healthy runs: ours, shipped, and a real one."""

import copy
import dataclasses
import math

import pytest
import torch

import fp8lab.rollout.native as native
from fp8lab import alarms as rules
from fp8lab.alarms import PrefixProbe, alarms, prefix_probe
from fp8lab.cli import main
from fp8lab.diagnostics import differing_layers, stale_layers
from fp8lab.experiment import ExperimentConfig, Loop, resume, run, stream
from fp8lab.grpo import GRPOConfig
from fp8lab.linear import float8_layers
from fp8lab.models import named_weights
from fp8lab.precision import PrecisionPlan
from fp8lab.rollout import NativeEngine, SamplingParams
from fp8lab.runlog import RunLog
from fp8lab.sequence_metrics import one_token_sequences, rejection_length_correlation
from fp8lab.tasks import data_dir
from fp8lab.trainer import Trainer

STUDY = data_dir() / "evidence" / "three-arms"
FP8_ROLLOUT, FP8_BOTH = PrecisionPlan.preset("fp8-rollout"), PrecisionPlan.preset("fp8-e2e")


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def healthy(tmp_path_factory):
    """A real run of 50 steps with FP8 on one side only, the plan with the larger gap."""
    config = ExperimentConfig(
        name="healthy",
        plan=FP8_ROLLOUT,
        grpo=GRPOConfig(num_generations=8, learning_rate=5e-4),
        steps=50,
        prompts_per_step=4,
        eval_every=50,
        eval_prompts=8,
        eval_samples=1,
        checkpoint_every=50,
    )
    return run(config, tmp_path_factory.mktemp("alarms") / "healthy")


@pytest.fixture(scope="module")
def rows():
    return RunLog(STUDY / "fp8-rollout-s1").rows()[1:51]


def names(found):
    return [alarm.name for alarm in found]


def with_error(rows, error, **more):
    return [
        {**row, "token_mult_prob_error": error(i, row["token_mult_prob_error"]), **more} for i, row in enumerate(rows)
    ]


# ---- healthy runs ---------------------------------------------------------------------------------


def test_no_false_alarm_on_a_healthy_run_of_50_steps(healthy):
    rows = healthy.rows()
    assert rows[-1]["step"] == 50
    assert {"effective_sample_size", "one_token_sequences"} <= set(rows[-1])
    assert alarms(healthy) == []
    assert alarms(healthy, resumed=range(5, 46), stale={}) == []


def test_no_false_alarm_on_the_shipped_runs():
    logs = [RunLog(path.parent) for path in sorted(STUDY.glob("*/config.json"))]
    assert len(logs) == 30
    for log in logs:  # every place of every run is also tried as a resume
        assert alarms(log, resumed=range(10, 95)) == [], log.folder.name


def test_nothing_is_said_about_what_is_not_given():
    assert alarms([]) == alarms([{"step": 0, "validation_accuracy": 0.3}]) == []


# ---- KV scales ------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [1, 4, 32])
def test_kv_scales_of_one(layers):
    ones = [{"step": i, **{k: [1.0] * layers for k in "qkv"}} for i in range(3)]
    (alarm,) = alarms([], calibration=ones)
    assert alarm.name == "kv_scales_unset" and alarm.severity == "error" and "1.0" in alarm.found and alarm.step == 2
    ones[-1]["v"][0] = 0.02
    assert alarms([], calibration=ones) == []


@pytest.mark.parametrize("still", [9, 10, 40])
def test_kv_scales_unchanged(still):
    moving = [{"step": i, **{k: [0.02 + 1e-5 * i, 0.03] for k in "qkv"}} for i in range(5)]
    stuck = [{**moving[-1], "step": 5 + i} for i in range(still)]
    assert names(alarms([], calibration=moving + stuck)) == (["kv_scales_stuck"] if still >= rules.UNCHANGED else [])
    assert alarms([], calibration=moving * 8) == []


# ---- the sides ------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["pow2", "deepgemm", "vllm"])
def test_scale_rules_that_differ(rule, rows):
    linear = dataclasses.replace(FP8_BOTH.trainer.linear, rule=rule)
    plan = dataclasses.replace(FP8_BOTH, trainer=dataclasses.replace(FP8_BOTH.trainer, linear=linear))
    (alarm,) = alarms(rows, plan=plan)
    assert alarm.name == "scale_rules" and f"rule: rollout default, trainer {rule}" in alarm.found
    assert alarms(rows, plan=FP8_BOTH) == alarms(rows, plan=FP8_ROLLOUT) == []


@pytest.fixture(scope="module")
def loop():
    config = ExperimentConfig(
        plan=FP8_ROLLOUT,
        grpo=GRPOConfig(num_generations=8, learning_rate=5e-4, warmup_steps=1),
        prompts_per_step=12,
        steps=20,
    )
    return Loop(config)


@pytest.mark.parametrize("share", [1, 0.1, 0.001])
def test_weights_that_differ(loop, share):
    """A BF16 trainer beside an FP8 rollout is no fault; masters that moved without a refit are."""
    trainer, engine = (
        loop.trainer.model,
        NativeEngine(loop.trainer.model, FP8_ROLLOUT, tokenizer=loop.trainer.tokenizer),
    )
    assert len(differing_layers(trainer, engine.model)) == 28 and stale_layers(trainer, engine.model) == {}
    moved = copy.deepcopy(trainer)
    name, layer = next(float8_layers(moved))
    with torch.no_grad():
        flat = layer.weight.view(-1)
        flat[: math.ceil(share * len(flat))] += 0.01
    (alarm,) = alarms([], stale=stale_layers(moved, engine.model))
    assert alarm.name == "weights_differ" and name in alarm.found and "codes" in alarm.found
    with torch.no_grad():
        moved.model.norm.weight += 1e-3
    assert "float32 weights differ" in stale_layers(moved, engine.model)["model.norm.weight"]
    own = {name: layer.precision for name, layer in float8_layers(trainer)}
    assert all(not precision.is_fp8 for precision in own.values())  # the check leaves the trainer's layers alone


# ---- growth, jumps --------------------------------------------------------------------------------


@pytest.mark.parametrize("growth", [0.02, 0.1, 1.0])
def test_growth_with_learning_rate_0(rows, growth):
    noise = [rows[i % 10]["token_mult_prob_error"] - rows[0]["token_mult_prob_error"] for i in range(len(rows))]
    still = with_error(rows, lambda i, _: 1.022 + noise[i], learning_rate=0.0)
    assert alarms(still) == []
    growing = [
        {**r, "token_mult_prob_error": r["token_mult_prob_error"] + growth * i / 49} for i, r in enumerate(still)
    ]
    (alarm,) = alarms(growing)
    assert alarm.name == "growth_without_learning" and alarm.step == rows[-1]["step"]
    assert alarms([{**row, "learning_rate": 5e-4} for row in growing]) == []  # with learning it is another question


@pytest.mark.parametrize("jump", [0.02, 0.05, 0.5])
def test_jump_after_resume(rows, jump):
    after = with_error(rows, lambda i, error: error + jump * (rows[i]["step"] > 20))
    (alarm,) = alarms(after, resumed=[20])
    assert alarm.name == "jump_after_resume" and alarm.step == 20
    assert alarms(after, resumed=[35]) == alarms(after) == []


def test_a_real_resume_without_refit_fires(loop):
    """The loaded trainer is 12 steps ahead of an engine that nobody gave the checkpoint's weights."""
    loop = copy.deepcopy(loop)
    first, rows = copy.deepcopy(loop.engine), []
    for step in range(1, 13):
        rows.append(loop.step(step)[0])
    loop.engine = first
    loop.engine.refit = lambda trainer: None
    rows += [loop.step(step)[0] for step in range(13, 16)]
    assert names(alarms(rows, resumed=[12])) == ["jump_after_resume"]


# ---- what the loop checks by itself ---------------------------------------------------------------


SHORT = ExperimentConfig(
    plan=FP8_ROLLOUT,
    grpo=GRPOConfig(num_generations=8, learning_rate=5e-4, warmup_steps=1),
    steps=12,
    prompts_per_step=12,
    eval_every=4,
    eval_prompts=8,
    eval_samples=1,
    checkpoint_every=4,
)


def stopped_and_resumed(folder, steps, on_resume=lambda: None):
    """A run of SHORT that was stopped after so many steps and resumed."""
    done = []
    run(SHORT, folder, on_step=done.append, should_stop=lambda: len(done) > steps)
    on_resume()
    return resume(folder)


def test_a_healthy_resume_is_recorded_and_fires_nothing(tmp_path):
    log = stopped_and_resumed(tmp_path / "run", 8)
    checks = log.rows("checks")
    assert [(row["step"], row["resumed"]) for row in checks] == [
        (1, False),
        (4, False),
        (8, False),
        (8, True),
        (12, False),
    ]
    assert all(row["stale"] == {} and len(row["seen"]) == len(row["fresh"]) == 24 for row in checks)
    assert min(min(row["seen"] + row["fresh"]) for row in checks) >= 0 and max(checks[0]["seen"]) > 0
    assert all("check" in row for row in log.rows("timing") if row["step"] in (1, 4, 12))
    assert alarms(log) == []


@pytest.mark.parametrize("missed", [1, 30])
def test_a_refit_that_skips_weights_is_found_by_the_loop(tmp_path, monkeypatch, missed):
    """The engine keeps the old values of so many weights, from the first refit on."""
    whole = NativeEngine.refit

    def partial(self, source):
        old = {name: tensor.clone() for name, tensor in list(named_weights(self.model).items())[-missed:]}
        whole(self, {**named_weights(source.model), **old})

    monkeypatch.setattr(NativeEngine, "refit", partial)
    log = run(dataclasses.replace(SHORT, steps=2), tmp_path / "run")
    found = [alarm for alarm in alarms(log) if alarm.name == "weights_differ"]
    assert len(found) == 1 and found[0].step == 1 and found[0].found.startswith(f"{missed} tensors")


def test_a_resume_that_does_not_refit_is_found_by_the_loop(tmp_path, monkeypatch, capsys):
    """The engine has the first weights, the trainer those of the checkpoint: bytes differ, and the mismatch jumps."""
    log = stopped_and_resumed(
        tmp_path / "run", 8, on_resume=lambda: monkeypatch.setattr(NativeEngine, "refit", lambda self, source: None)
    )
    found = {alarm.name: alarm.step for alarm in alarms(log)}
    assert found == {"weights_differ": 8, "jump_after_resume": 8}
    capsys.readouterr()
    assert main(["resume", str(log.folder)]) == 0  # it is finished: nothing to do but to say what was found
    said = capsys.readouterr().err
    assert "error: weights_differ at step 8" in said and "error: jump_after_resume at step 8" in said


def test_a_stale_prefix_cache_is_found_by_the_loop(tmp_path, monkeypatch):
    """What the engine says to a prompt it has read before is off by so many nats."""
    read, plain = set(), NativeEngine.generate

    def remembering(self, prompts, sampling, *, seed, **options):
        rollout = plain(self, prompts, sampling, seed=seed, **options)
        again = torch.tensor([p in read for p in prompts for _ in range(sampling.n)])
        read.update(prompts)
        return dataclasses.replace(rollout, logprobs=rollout.logprobs - 0.1 * again[:, None] * rollout.mask)

    monkeypatch.setattr(NativeEngine, "generate", remembering)
    log = run(dataclasses.replace(SHORT, steps=2, prompts_per_step=16), tmp_path / "run")
    (alarm,) = [alarm for alarm in alarms(log) if alarm.name == "stale_prefix_cache"]
    assert alarm.step == 1


# ---- prefix cache ---------------------------------------------------------------------------------


def test_a_stale_prefix_cache(loop, monkeypatch):
    """Prompts read by old weights: the more the weights moved since, the larger the gap; fresh prompts stay healthy."""
    loop = copy.deepcopy(loop)
    old = copy.deepcopy(loop.engine.model)
    loop.engine = NativeEngine(
        loop.trainer.model, FP8_ROLLOUT, tokenizer=loop.trainer.tokenizer, forward="transformers"
    )
    seen, fresh = loop.task.train[:64]["prompt"], loop.task.train[64:128]["prompt"]
    sampling = SamplingParams(n=4, max_tokens=6)
    cached, fault = {tuple(loop.trainer.tokenizer(p).input_ids) for p in seen}, {"on": True}
    plain = native.forward

    def stale_forward(model, tokens, attention, positions, cache, **options):
        if "logits_to_keep" not in options or not fault["on"]:
            return plain(model, tokens, attention, positions, cache, **options)
        rows = [tuple(t[a.bool()].tolist()) for t, a in zip(tokens, attention, strict=True)]
        return plain(old if set(rows) <= cached else model, tokens, attention, positions, cache, **options)

    monkeypatch.setattr(native, "forward", stale_forward)
    gaps = []
    for step in range(1, 13):
        loop.step(step)
        if step in (4, 8, 12):
            probe = prefix_probe(loop.engine, loop.trainer, seen, fresh, sampling, seed=stream(0, "probe", step))
            assert names(alarms([], prefix=probe)) == ["stale_prefix_cache"]
            gaps.append(probe.seen.mean().item())
    assert gaps[0] < gaps[-1]
    fault["on"] = False
    probe = prefix_probe(loop.engine, loop.trainer, seen, fresh, sampling, seed=1)
    assert alarms([], prefix=probe) == []


def test_a_prefix_probe_without_sequences_says_nothing():
    empty = torch.tensor([])
    assert alarms([], prefix=PrefixProbe(seen=empty, fresh=empty)) == []
    assert alarms([], prefix=PrefixProbe(seen=torch.tensor([math.nan, 1.0]), fresh=torch.ones(3))) == []


# ---- sequences ------------------------------------------------------------------------------------


def sequences(length, spread, rows=400, seed=0):
    generator = torch.Generator().manual_seed(seed)
    g = torch.randn(rows, length, generator=generator) - 3
    return g, g + spread * torch.randn(rows, length, generator=generator), torch.ones(rows, length, dtype=torch.bool)


@pytest.mark.parametrize("nats", [2.0, 5.0, 12.0])
@pytest.mark.parametrize("length", [4, 64])
def test_one_token_that_decides_a_sequence(rows, nats, length):
    g, t, mask = sequences(length, 0.1)
    assert one_token_sequences(g, t, mask) < 0.01
    t[::10, 1] += nats
    share = one_token_sequences(g, t, mask)
    assert share == pytest.approx(0.1, abs=0.02)
    found = alarms([{**row, "one_token_sequences": share, "max_abs_difference": nats} for row in rows])
    assert names(found) == (["one_token_fault", "one_token"] if nats > -math.log(rules.VETO) else ["one_token"])
    assert found[0].severity == ("error" if len(found) == 2 else "warning")


def test_one_token_by_hand():
    d = torch.tensor([[0.1, 0.9, -0.1], [0.4, 0.4, 0.4], [0.9, 9.0, 9.0]])
    mask = torch.tensor([[True] * 3, [True] * 3, [True, False, False]])
    assert one_token_sequences(torch.zeros(3, 3), d, mask) == 0.5  # the third has one token only
    assert one_token_sequences(torch.zeros(3, 3), d, torch.zeros_like(mask)) == 0
    g, t, mask = sequences(1000, 0.18)  # all leave the band by their length; no token is to blame
    assert ((t - g).sum(1).abs() > math.log(2)).float().mean() > 0.8 and one_token_sequences(g, t, mask) == 0


def trainer_rows(mode, spread, count=12, **bounds):
    """Rows of the two metrics from sequences of 4 to 400 tokens, as Trainer._metrics takes them."""
    from fp8lab import corrections

    found = []
    for seed in range(count):
        g, t, mask = sequences(400, spread, rows=64, seed=seed)
        mask &= torch.arange(400) < torch.logspace(0.6, 2.6, 64)[:, None]
        correction = corrections.weights(g, t, mask, mode=mode, **bounds)
        s = correction.statistics
        row = {"step": seed, "token_mult_prob_error": 1.02, "is_oob_ratio": s["oob_sequences"] / s["sequences"]}
        found.append(row | {"rejection_length_correlation": rejection_length_correlation(correction.weights, mask)})
    return found


@pytest.mark.parametrize("spread", [0.05, 0.1, 0.2])
def test_products_masked_by_length(spread):
    (alarm,) = alarms(trainer_rows("sequence-mask", spread, low=0.5, high=2.0))
    assert alarm.name == "masked_by_length" and alarm.severity == "warning"
    assert alarms(trainer_rows("geometric", spread, low=0.5, high=2.0)) == []


def test_rejection_and_length_by_hand():
    mask = torch.arange(9) < torch.tensor([1, 1, 9])[:, None]
    weights = torch.tensor([1.0, 1.0, 0.0])[:, None].expand(3, 9)
    assert rejection_length_correlation(weights, mask) == pytest.approx(1)
    assert rejection_length_correlation(1 - weights, mask) == pytest.approx(-1)
    assert rejection_length_correlation(torch.ones(3, 9), mask) == 0
    assert rejection_length_correlation(weights[:, :1], mask[:, :1]) == 0


@pytest.mark.parametrize(("ess", "severity"), [(0.49, "warning"), (0.31, "warning"), (0.29, "error"), (0.01, "error")])
def test_low_effective_sample_size(rows, ess, severity):
    (alarm,) = alarms([{**row, "effective_sample_size": ess} for row in rows])
    assert alarm.name == "low_ess" and alarm.severity == severity and f"{ess:.2f}" in str(alarm)
    assert alarms([{**row, "effective_sample_size": 0.51} for row in rows]) == []


@pytest.mark.parametrize("ratio", [0.7, 0.97, 1.03, 1.25])
def test_log_probs_of_two_distributions(rows, ratio):
    off = [{**row, "sampling_importance_ratio": row["sampling_importance_ratio"] * ratio} for row in rows]
    assert names(alarms(off)) == ["mixed_logprobs"]
    assert alarms(off[:4]) == []  # too few steps to call it a bias


@pytest.mark.parametrize("sampling", [{"top_p": 0.7}, {"raw_logprobs": True, "temperature": 0.5}])
def test_a_trainer_that_is_fed_mixed_log_probs(sampling):
    """Equal sides: nothing but the sampling differs."""
    trainer = Trainer("tiny-llama", PrecisionPlan.preset("bf16"), GRPOConfig(num_generations=8))
    engine, rows = NativeEngine(trainer.model, trainer.plan, tokenizer=trainer.tokenizer), []
    for step in range(1, 7):
        rollout = engine.generate(["47+38=", "5-9="], SamplingParams(n=8, max_tokens=6, **sampling), seed=step)
        with pytest.warns(UserWarning, match="ratios are biased"):
            rows.append({"step": step, **trainer.step(rollout, [float(len(t) == 2) for t in rollout.completions])})
        engine.refit(trainer)
    assert "mixed_logprobs" in names(alarms(rows))


@pytest.mark.parametrize("count", [1, 20])
def test_log_probs_that_are_not_finite(rows, count):
    bad = [{**row, "nonfinite_tokens": count * (i == 7)} for i, row in enumerate(rows)]
    [alarm] = alarms(bad)
    assert alarm.name == "nonfinite_logprobs" and alarm.step == rows[7]["step"] and str(count) in alarm.found


def test_updates_without_a_token(rows):
    skipped = [{**row, "skipped_updates": float(i >= 45)} for i, row in enumerate(rows)]
    assert names(alarms(skipped)) == ["nothing_learned"]
    assert alarms([{**row, "skipped_updates": float(i < 30)} for i, row in enumerate(rows)]) == []  # long ago


def test_errors_come_first_and_every_alarm_says_what_to_do(rows):
    bad = [{**row, "one_token_sequences": 0.2, "effective_sample_size": 0.1} for row in rows]
    found = alarms(bad, stale={"a": "b"})
    assert [alarm.severity for alarm in found] == ["error", "error", "warning"]
    for alarm in found:
        assert alarm.do and alarm.meaning and alarm.threshold in str(alarm)
