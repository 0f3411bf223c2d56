"""ArmEditor, driven as plain Python: what it makes is what its controls say, or a reason why it cannot be."""

import dataclasses
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8lab.corrections import MODES
from fp8lab.experiment import ExperimentConfig
from fp8lab.grpo import GRPOConfig
from fp8lab.operands import AttentionPrecision
from fp8lab.precision import PRESETS, PrecisionPlan
from fp8lab.scales import SCALE_RULES
from fp8lab.ui.arm_editor import ArmEditor, layer_count

BASE = ExperimentConfig(steps=3, seed=4)
EDITOR = ArmEditor(lambda: BASE)
FORMATS, BOUNDS = ["bf16", "e4m3", "e5m2"], (0.0, 0.5, 0.999, 2.0, 10.0)
ATTENTIONS = [
    AttentionPrecision(),
    AttentionPrecision(kv_cache="e4m3"),
    AttentionPrecision(kv_cache="e4m3", query="e4m3", probabilities="e4m3"),
]


def options(control):
    """The values a dropdown offers."""
    return [option[1] if isinstance(option, tuple) else option for option in control.options]


def moved(data):
    """Every control at a value of its range: {(side or "loss", name): value}."""
    values = {}
    for side, editor in EDITOR.sides.items():
        for name in ("weight", "activation", "attention", "rule", *(["gradient"] if side == "trainer" else [])):
            values[side, name] = data.draw(st.sampled_from(options(getattr(editor, name))), f"{side} {name}")
        for name in ("first", "last"):
            control = getattr(editor, name)
            values[side, name] = data.draw(st.integers(control.min, control.max), f"{side} {name}")
    values["loss", "mode"] = data.draw(st.sampled_from(options(EDITOR.mode)), "correction")
    values |= {("loss", name): data.draw(st.sampled_from(BOUNDS), name) for name in ("low", "high")}
    values["loss", "uncorrected"] = data.draw(st.booleans(), "uncorrected")
    for (place, name), value in values.items():
        getattr(EDITOR if place == "loss" else EDITOR.sides[place], name).value = value
    return values


def reasons(values):
    """Why these values cannot be, by the rules of corrections.check_bounds and ExperimentConfig."""
    mode, low, high, uncorrected = (values["loss", name] for name in ("mode", "low", "high", "uncorrected"))
    if mode not in ("none", "is") and not (low <= high and high > 0):
        yield "bounds"
    if mode in ("icepop", "seq-mask-tis") and low == 0:
        yield "needs a lower bound"
    fp8_cache = {side: values[side, "attention"].kv_cache == "e4m3" for side in ("rollout", "trainer")}
    if fp8_cache["trainer"] and not fp8_cache["rollout"]:
        yield "give both sides the same attention"
    rounds = fp8_cache["rollout"] or {values["rollout", "weight"], values["rollout", "activation"]} != {"bf16"}
    if rounds and mode == "none" and not uncorrected:
        yield "allow_uncorrected_fp8_rollout"


def test_the_controls_offer_all_that_there_is():
    for side in EDITOR.sides.values():
        for control in (side.weight, side.activation, side.gradient):
            assert options(control) == FORMATS
        assert options(side.rule) == list(SCALE_RULES) and options(side.attention) == ATTENTIONS
        assert side.first.max == side.last.max == 4, "tiny-llama's layers"
    assert options(EDITOR.mode) == list(MODES)
    assert EDITOR.sides["rollout"].gradient not in list(EDITOR.controls()), "a rollout has no gradients"


@pytest.mark.filterwarnings("ignore:FP8 rollout without importance sampling")
@settings(max_examples=150)
@given(st.data())
def test_every_combination_is_what_the_controls_say_or_a_message(data):
    EDITOR.show(BASE)
    values = moved(data)
    why = list(reasons(values))
    if why:
        with pytest.raises(ValueError) as error:
            EDITOR.config()
        assert any(reason in str(error.value) for reason in why)
        assert "This arm cannot run" in EDITOR.line.value and any(reason in EDITOR.line.value for reason in why)
        return
    config = EDITOR.config()
    assert ExperimentConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    uncorrected = values["loss", "uncorrected"]
    rest = dataclasses.replace(BASE, name="custom", allow_uncorrected_fp8_rollout=uncorrected)
    assert dataclasses.replace(config, plan=BASE.plan, grpo=BASE.grpo) == rest
    for side in ("rollout", "trainer"):
        made, editor = config.plan.side(side), EDITOR.sides[side]
        assert (made.linear.weight, made.linear.activation) == (values[side, "weight"], values[side, "activation"])
        fp8 = {made.linear.weight, made.linear.activation, values.get((side, "gradient"), "bf16")} != {"bf16"}
        assert made.linear.is_fp8 == fp8 == (not editor.rule.disabled) == (not editor.last.disabled)
        assert made.linear.rule == (values[side, "rule"] if fp8 else "default")
        assert made.attention == values[side, "attention"]
        assert (made.fallback.first, made.fallback.last) == (values[side, "first"], values[side, "last"])
    assert config.plan.trainer.linear.gradient == values["trainer", "gradient"]
    mode, low, high = (values["loss", name] for name in ("mode", "low", "high"))
    ignored = mode in ("none", "is")
    assert EDITOR.low.disabled == EDITOR.high.disabled == ignored
    correction = {} if ignored else {"importance_sampling_min": low, "importance_sampling_max": high}
    assert config.grpo == dataclasses.replace(BASE.grpo, importance_sampling=mode, **correction)
    assert str(config.plan).replace("'", "&#x27;") in EDITOR.line.value and f"correction {mode}" in EDITOR.line.value
    assert ArmEditor(lambda: config).config() == config


@pytest.mark.parametrize("preset", PRESETS)
def test_a_given_plan_is_kept_where_there_is_no_control(preset):
    plan = PrecisionPlan.preset(preset).with_bf16(layers=[2], modules=["*.q_proj"])
    attention = AttentionPrecision(kv_cache="e4m3", scales="per-token-head", margin=1.2)
    rollout = dataclasses.replace(plan.rollout, attention=attention)
    plan = dataclasses.replace(plan, name="custom", rollout=rollout)
    grpo = GRPOConfig(importance_sampling="tis", importance_sampling_max=float("inf"))
    config = dataclasses.replace(BASE, name="custom", plan=plan, grpo=grpo)
    editor = ArmEditor(lambda: config)
    assert editor.config() == config
    editor.sides["trainer"].last.value = 1
    assert plan.diff(editor.plan()) == ["trainer.fallback.last: 0 -> 1"]
    editor.high.value = 3.0
    assert editor.config().grpo.importance_sampling_max == 3.0
    editor.show(BASE)
    own = dataclasses.replace(BASE.plan, name="custom")
    assert editor.config() == dataclasses.replace(BASE, name="custom", plan=own)


def test_a_preset_can_be_set_by_hand():
    editor = ArmEditor(lambda: BASE)
    for side in editor.sides.values():
        for control in (side.weight, side.activation, side.gradient):
            control.value = "e4m3"
    assert PrecisionPlan.preset("fp8-e2e").diff(editor.plan()) == ["name: fp8-e2e -> custom"]
    rollout = editor.sides["rollout"]
    rollout.weight.value = rollout.activation.value = "bf16"
    assert editor.plan().rollout == PrecisionPlan.preset("bf16").rollout


def test_an_ablation_that_is_meant_says_so():
    editor = ArmEditor(lambda: BASE)
    editor.sides["rollout"].weight.value, editor.mode.value = "e4m3", "none"
    assert "cannot run" in editor.line.value
    editor.uncorrected.value = True
    assert "cannot run" not in editor.line.value and "the gradient is biased" in editor.line.value


def test_layers_are_counted_without_loading():
    assert (layer_count("tiny-llama"), layer_count("no-such-model"), layer_count("who/what")) == (4, None, None)
