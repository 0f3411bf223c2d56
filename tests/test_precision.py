"""PrecisionPlan: what runs where, and why; and its way through JSON and YAML."""

import dataclasses
import json

import pytest
import torch
import yaml

from fp8lab.precision import (
    BF16_HEAD,
    BF16_LINEAR,
    PRESETS,
    Fallback,
    LinearPrecision,
    PrecisionPlan,
    SidePlan,
    layer_index,
    matches,
    num_decoder_layers,
)

from . import references

E2E = PrecisionPlan.preset("fp8-e2e")
UP = "model.layers.{}.mlp.up_proj"


def fp8_names(plan, side, names, layers=4):
    return [n for n in names if plan.decide(n, side, layers).precision.is_fp8]


# ---- presets and decisions ------------------------------------------------------------------------


@pytest.mark.parametrize("name, rollout, trainer", [("bf16", 0, 0), ("fp8-rollout", 1, 0), ("fp8-e2e", 1, 1)])
def test_presets(name, rollout, trainer):
    plan = PrecisionPlan.preset(name)
    assert plan.name == name and name in PRESETS
    for side, is_fp8 in (("rollout", rollout), ("trainer", trainer)):
        decision = plan.decide(UP.format(0), side, 2)
        assert (decision.name, decision.side) == (UP.format(0), side)
        assert decision.precision == (LinearPrecision() if is_fp8 else BF16_LINEAR)
        assert decision.reason == (f"plan {name}" if is_fp8 else "this side is BF16")
    assert plan.same_on_both_sides() == (rollout == trainer)


def test_the_recipe():
    fp8 = PrecisionPlan.preset("fp8-e2e").trainer.linear
    assert (fp8.weight, fp8.activation, fp8.gradient) == ("e4m3",) * 3
    assert (fp8.weight_block, fp8.group, fp8.rule, fp8.weight_source) == ((128, 128), 128, "default", "bf16")
    assert PrecisionPlan.preset("fp8-e2e", rule="pow2").rollout.linear == dataclasses.replace(fp8, rule="pow2")
    assert PrecisionPlan.preset("bf16", rule="pow2") == PrecisionPlan.preset("bf16")


def test_reasons():
    plan = E2E.with_bf16(first=1, last=1, layers=[3], modules=["mlp.down_proj"])
    reasons = {
        "lm_head": "outside the decoder layers",
        "model.layers.2.mlp.gate": "a router",
        UP.format(0): "one of the first 1 layers",
        UP.format(5): "one of the last 1 layers",
        UP.format(3): "layer 3 is listed",
        "model.layers.2.mlp.down_proj": "matches 'mlp.down_proj'",
        UP.format(2): "plan fp8-e2e",
    }
    for name, reason in reasons.items():
        decision = plan.decide(name, "rollout", 6)
        assert reason in decision.reason
        assert decision.precision.is_fp8 == (name == UP.format(2))
        assert decision.precision.output == ("float32" if name in ("lm_head", "model.layers.2.mlp.gate") else "bf16")
    routers = ["model.layers.0.mlp.gate", "model.layers.0.mlp.router", "model.layers.0.mlp.shared_expert_gate"]
    assert all(E2E.decide(n, "trainer", 2).precision == BF16_HEAD for n in routers)


def test_with_bf16_adds_up_and_leaves_the_original():
    names = [UP.format(i) for i in range(4)]
    one = E2E.with_bf16(first=1, layers=[2], side="rollout")
    assert fp8_names(one, "rollout", names) == [UP.format(1), UP.format(3)]
    assert fp8_names(one, "trainer", names) == names and not one.same_on_both_sides()
    two = one.with_bf16(last=1, layers=[2, 0], modules=["a", "a"])
    assert two.rollout.fallback == Fallback(first=1, last=1, layers=(0, 2), modules=("a",))
    assert two.trainer.fallback == Fallback(last=1, layers=(0, 2), modules=("a",))
    assert fp8_names(two, "rollout", names) == [UP.format(1)]
    assert E2E == PrecisionPlan.preset("fp8-e2e") and E2E.same_on_both_sides()
    assert E2E.with_bf16() == E2E
    everything = E2E.with_bf16(first=99)
    assert fp8_names(everything, "trainer", names) == []


def test_same_on_both_sides_is_about_forward_operands():
    gradient = dataclasses.replace(E2E.trainer.linear, gradient="e5m2")
    assert dataclasses.replace(E2E, trainer=SidePlan(linear=gradient)).same_on_both_sides()
    for change in ({"rule": "pow2"}, {"weight_source": "fp32"}, {"activation": "bf16"}, {"group": 64}):
        linear = dataclasses.replace(E2E.trainer.linear, **change)
        assert not dataclasses.replace(E2E, trainer=SidePlan(linear=linear)).same_on_both_sides()
    bf16 = PrecisionPlan.preset("bf16")
    assert bf16.with_bf16(first=1, side="rollout").same_on_both_sides()  # nothing left to fall back


# ---- names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "pattern, name, want",
    [
        ("mlp.gate", "model.layers.0.mlp.gate", True),
        ("mlp.gate", "model.layers.0.mlp.gate_proj", False),
        ("gate_proj", "model.layers.0.mlp.gate_proj", True),
        ("layers.1", "model.layers.1.mlp.up_proj", True),
        ("layers.1", "model.layers.11.mlp.up_proj", False),
        ("*.mlp.down_proj", "model.layers.3.mlp.down_proj", True),
        ("*.mlp.down_proj", "mlp.down_proj", True),
        ("mlp.*_proj", "model.layers.3.mlp.down_proj", True),
        ("self_attn.*_proj", "model.layers.3.mlp.down_proj", False),
        ("self_attn.[qk]_proj", "model.layers.3.self_attn.q_proj", True),
        ("self_attn.[qk]_proj", "model.layers.3.self_attn.v_proj", False),
        ("layers.*.mlp", "model.layers.3.mlp.down_proj", True),
        ("model.mlp", "model.layers.3.mlp.down_proj", False),  # parts must be neighbours
        ("a.b.c", "b.c", False),
        ("re:.*down_proj", "model.layers.3.mlp.down_proj", True),
        (r"re:.*layers\.(1|2)\..*", "model.layers.12.mlp.up_proj", False),
        (r"re:.*layers\.(1|2)\..*", "model.layers.2.mlp.up_proj", True),
        ("re:down_proj", "model.layers.3.mlp.down_proj", False),  # the whole name
        (r"re:model\.layers", "model.layers.3.mlp.down_proj", False),
        ("MLP", "model.layers.3.mlp.up_proj", False),
    ],
)
def test_matching_is_on_whole_parts(pattern, name, want):
    assert matches(pattern, name) is want
    kept = E2E.with_bf16(modules=[pattern]).decide(name, "trainer", 99)
    if layer_index(name) is not None and not name.endswith(".gate"):
        assert kept.precision.is_fp8 is not want and (repr(pattern) in kept.reason) is want


@pytest.mark.parametrize(
    "name, want",
    [
        ("model.layers.3.mlp", 3),
        ("transformer.h.12.attn", 12),
        ("lm_head", None),
        ("layers.x.1", None),
        ("a.3.b", None),
    ],
)
def test_layer_index(name, want):
    assert layer_index(name) == want


# ---- JSON, YAML, repr -----------------------------------------------------------------------------

PLANS = [
    *(PrecisionPlan.preset(name) for name in PRESETS),
    PrecisionPlan.preset("fp8-e2e", rule="pow2").with_bf16(
        first=1, last=2, layers=[4], modules=["*.down_proj", "re:x"]
    ),
    PrecisionPlan(
        rollout=SidePlan(linear=LinearPrecision(gradient="e5m2", weight_block=(64, 32), group=32, weight_source="fp32"))
    ),
]


@pytest.mark.parametrize("plan", PLANS, ids=lambda p: p.name)
def test_round_trips(plan):
    data = plan.to_dict()
    assert PrecisionPlan.from_dict(data) == plan
    assert json.loads(json.dumps(data)) == data  # lists, no tuples
    assert PrecisionPlan.from_dict(json.loads(json.dumps(data))) == plan
    for dump in (yaml.safe_dump, yaml.dump):
        again = PrecisionPlan.from_dict(yaml.safe_load(dump(data)))
        assert again == plan and hash(again) == hash(plan) and repr(again) == repr(plan)


def test_partial_dicts_take_defaults():
    plan = PrecisionPlan.from_dict({"rollout": {"linear": {"weight": "e4m3"}, "fallback": {"last": 1}}})
    assert plan == PrecisionPlan(rollout=SidePlan(linear=LinearPrecision(), fallback=Fallback(last=1)))
    assert PrecisionPlan.from_dict({}) == PrecisionPlan()


@pytest.mark.parametrize(
    "data, words",
    [
        ({"rolout": {}}, "rolout.*PrecisionPlan.*rollout"),
        ({"rollout": {"liner": {}}}, "liner.*SidePlan.*linear"),
        ({"rollout": {"linear": {"wieght": "e4m3"}}}, "wieght.*LinearPrecision.*weight"),
        ({"trainer": {"fallback": {"layer": [1]}}}, "layer.*Fallback.*layers"),
        ({"trainer": {"linear": {"weight": "fp4"}}}, "weight is 'fp4'; allowed: e4m3, e5m2, bf16"),
    ],
)
def test_unknown_keys_and_values_are_named(data, words):
    with pytest.raises(ValueError, match=words):
        PrecisionPlan.from_dict(data)


@pytest.mark.parametrize("plan", PLANS, ids=lambda p: p.name)
def test_yaml(plan):
    again = PrecisionPlan.from_yaml(plan.to_yaml())
    assert again == plan and hash(again) == hash(plan) and again.diff(plan) == []
    assert list(yaml.safe_load(plan.to_yaml())) == ["name", "rollout", "trainer"]  # in the order of the fields


def test_equality_and_hash():
    assert len(set(PLANS)) == len(PLANS)
    copies = [PrecisionPlan.from_dict(plan.to_dict()) for plan in PLANS]
    assert set(copies) == set(PLANS) and {plan: i for i, plan in enumerate(PLANS)}[copies[3]] == 3
    assert E2E != E2E.with_bf16(first=1) and E2E.with_bf16(layers=[2, 1]) == E2E.with_bf16(layers=(1, 2))
    assert hash(Fallback(layers=[1], modules=["a"])) == hash(Fallback(layers=(1,), modules=("a",)))


def test_diff():
    other = PrecisionPlan.preset("fp8-rollout", rule="pow2").with_bf16(last=2, side="rollout")
    assert E2E.diff(other) == [
        "name: fp8-e2e -> fp8-rollout",
        "rollout.linear.rule: default -> pow2",
        "rollout.fallback.last: 0 -> 2",
        "trainer.linear.weight: e4m3 -> bf16",
        "trainer.linear.activation: e4m3 -> bf16",
        "trainer.linear.gradient: e4m3 -> bf16",
    ]
    assert len(other.diff(E2E)) == 6 and E2E.diff(PrecisionPlan.preset("fp8-e2e")) == []
    for a in PLANS:
        for b in PLANS:
            assert (a.diff(b) == []) == (a == b)


@pytest.mark.parametrize("plan", PLANS, ids=lambda p: p.name)
def test_repr_is_one_line(plan):
    assert "\n" not in repr(plan) and plan.name in repr(plan) and len(repr(plan)) < 300


def test_reprs():
    assert repr(PrecisionPlan.preset("fp8-rollout").with_bf16(last=1, side="rollout")) == (
        "PrecisionPlan(fp8-rollout: rollout e4m3[128x128] x e4m3[1x128] but bf16 for last=1; trainer bf16)"
    )
    assert str(LinearPrecision(rule="pow2", activation="e5m2")) == "e4m3[128x128] x e5m2[1x128] pow2"
    assert str(LinearPrecision(gradient="e5m2")) == "e4m3[128x128] x e4m3[1x128] grad e5m2"


def test_a_gradient_alone_is_fp8_too():
    linear = LinearPrecision(weight="bf16", activation="bf16")
    plan = PrecisionPlan(trainer=SidePlan(linear=linear))
    assert linear.is_fp8 and plan.decide(UP.format(0), "trainer", 1).reason == "plan custom"
    assert plan.with_bf16(first=1).decide(UP.format(0), "trainer", 1).precision == BF16_LINEAR


# ---- bad values -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change, words",
    [
        ({"weight": "fp8"}, "weight is 'fp8'"),
        ({"activation": None}, "activation is None"),
        ({"gradient": "E4M3"}, "gradient is 'E4M3'"),
        ({"rule": "ceil"}, "rule is 'ceil'; allowed: default, pow2"),
        ({"weight_source": "bfloat16"}, "weight_source.*allowed: bf16, fp32"),
        ({"output": "fp16"}, "output.*allowed: bf16, float32"),
        ({"weight_block": (128, 0)}, r"\(128, 0\)"),
        ({"weight_block": (128,)}, r"\(128,\)"),
        ({"group": 0}, r"\(1, 0\)"),
        ({"group": "128"}, r"\(1, '128'\)"),
    ],
)
def test_bad_linear_precision(change, words):
    with pytest.raises(ValueError, match=words):
        LinearPrecision(**change)


@pytest.mark.parametrize(
    "change",
    [{"first": -1}, {"last": 1.0}, {"last": True}, {"layers": [-1]}, {"layers": ["1"]}, {"modules": "mlp.gate"}],
)
def test_bad_fallback(change):
    with pytest.raises(ValueError, match=next(iter(change))):
        Fallback(**change)
    with pytest.raises(ValueError, match=next(iter(change))):
        E2E.with_bf16(**change)


def test_bad_names():
    with pytest.raises(ValueError, match="'fp8'.*allowed: bf16, fp8-rollout, fp8-e2e"):
        PrecisionPlan.preset("fp8")
    with pytest.raises(ValueError, match="side is 'left'; allowed: both, rollout, trainer"):
        E2E.with_bf16(side="left")
    for call in (E2E.side, lambda s: E2E.decide(UP, s, 2)):
        with pytest.raises(ValueError, match="side is 'both'; allowed: rollout, trainer"):
            call("both")
    with pytest.raises(dataclasses.FrozenInstanceError):
        E2E.name = "x"


# ---- models ---------------------------------------------------------------------------------------


def test_coverage_of_llama_8b_on_the_meta_device():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    assert num_decoder_layers(model) == 32
    decisions = E2E.with_bf16(last=2, modules=["self_attn.o_proj"], side="trainer").coverage(model)
    assert len(decisions) == len({(d.name, d.side) for d in decisions}) == 2 * (32 * 7 + 1)
    fp8 = {
        side: [d.name for d in decisions if d.side == side and d.precision.is_fp8] for side in ("rollout", "trainer")
    }
    assert len(fp8["rollout"]) == 32 * 7 and len(fp8["trainer"]) == 30 * 6
    assert not any("o_proj" in n or ".31." in n or "lm_head" in n for n in fp8["trainer"])
    assert all(d.reason for d in decisions)


def test_coverage_of_a_moe_model():
    decisions = E2E.coverage(references.tiny_moe())
    fp8 = {d.name.rsplit(".", 1)[-1] for d in decisions if d.precision.is_fp8}
    assert fp8 == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_up_proj", "down_proj"}
    experts = {d.name for d in decisions if ".experts." in d.name}
    assert experts == {f"model.layers.{i}.mlp.experts.{t}_proj" for i in (0, 1) for t in ("gate_up", "down")}
    kept = E2E.with_bf16(modules=["mlp.experts"], layers=[1]).coverage(references.tiny_moe())
    assert {d.name for d in kept if d.precision.is_fp8} == {f"model.layers.0.self_attn.{p}_proj" for p in "qkvo"}


def test_a_model_without_layers_is_refused():
    with pytest.raises(ValueError, match="Linear has no numbered decoder layers"):
        num_decoder_layers(torch.nn.Linear(2, 2))
