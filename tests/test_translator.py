"""Translated corrections give the weights of the frameworks' own code, which is written out again here.

References: NeMo RL 7ea279abf nemo_rl/algorithms/loss/loss_functions.py lines 561-675, verl 1dda039b9
verl/trainer/ppo/rollout_corr_helper.py, TRL f2cd57710 trl/trainer/grpo_trainer.py lines 2579-2622, each in float64 and
with their own guards.
"""

import math
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8lab import translator
from fp8lab.corrections import MODES, NEED_A_MINIMUM, weights
from fp8lab.grpo import GRPOConfig
from fp8lab.translator import NEMO_KEYS, TRL_KEYS, UNBOUNDED, VERL_KEYS, NoEquivalent, Setting, read, write


def nemo_rl(g, t, mask, s):
    if not s["use_importance_sampling_correction"]:
        return np.where(mask, 1.0, 0.0)
    kind, high = s["truncated_importance_sampling_type"], s["truncated_importance_sampling_ratio"]
    low = s["truncated_importance_sampling_ratio_min"]
    if s["sequence_level_importance_ratios"]:
        w = np.broadcast_to(np.exp(((t - g) * mask).sum(-1, keepdims=True)), g.shape)
    else:
        w = np.exp(t - g)
    w = np.nan_to_num(w, nan=0.0, posinf=0.0, neginf=0.0)
    if kind == "tis":
        w = np.clip(w, 0.0 if low is None else low, high)
    elif kind == "icepop":
        w = np.where((w >= low) & (w <= high), w, 0)
    elif kind == "seq-mask-tis":
        geomean = np.exp(((t - g) * mask).sum(-1) / mask.sum(-1))
        w = w * ((geomean >= low) & (geomean <= high))[:, None]
    return w * mask


def verl(g, t, mask, s):
    """The weights times what rejection leaves of response_mask."""
    d = t - g
    w, keep = np.ones_like(g), np.ones_like(g)
    if s["rollout_is"] is not None:
        raw = d if s["rollout_is"] == "token" else np.broadcast_to((d * mask).sum(-1, keepdims=True), d.shape)
        raw = np.exp(np.clip(raw, -20, 20)) * mask
        spec = s["rollout_is_threshold"]
        if isinstance(spec, str) and "_" in spec:
            low, high = map(float, spec.split("_", 1))
            w = np.where((raw >= low) & (raw <= high), raw, 0)
        else:
            w = np.minimum(raw, float(spec))
    if s["rollout_rs"] is not None:
        k1 = -np.clip(d, -20, 20)
        spec = str(s["rollout_rs_threshold"])
        low, high = spec.split("_", 1) if "_" in spec else (1 / float(spec), spec)
        low, high = math.log(float(low)), math.log(float(high))
        statistic = {
            "token_k1": k1,
            "seq_sum_k1": (k1 * mask).sum(-1, keepdims=True),
            "seq_mean_k1": (k1 * mask).sum(-1, keepdims=True) / mask.sum(-1, keepdims=True),
        }[s["rollout_rs"]]
        keep = (statistic >= low) & (statistic <= high)
    return w * keep * mask


def trl(g, t, mask, s):
    if not s["vllm_importance_sampling_correction"]:
        return np.where(mask, 1.0, 0.0)
    kind = s["vllm_importance_sampling_mode"]
    low, high = s["vllm_importance_sampling_clip_min"], s["vllm_importance_sampling_clip_max"]
    d = (t - g) * mask
    ratio = np.exp(d.sum(-1, keepdims=True) if kind.startswith("sequence") else d)
    low, high = -math.inf if low is None else low, math.inf if high is None else high
    ratio = (
        np.clip(ratio, low, high) if kind.endswith("truncate") else np.where((ratio < low) | (ratio > high), 0, ratio)
    )
    return np.broadcast_to(ratio, g.shape) * mask


REFERENCES = {"nemo_rl": (nemo_rl, NEMO_KEYS), "verl": (verl, VERL_KEYS), "trl": (trl, TRL_KEYS)}
ON = {"use_importance_sampling_correction": True}
TIS = "truncated_importance_sampling_"
VLLM = "vllm_importance_sampling_"
CASES = [
    ("nemo_rl", {}, "none", 0, math.inf),
    ("nemo_rl", ON, "is", 0, math.inf),
    ("nemo_rl", {**ON, TIS + "type": "tis", TIS + "ratio": 2}, "tis", 0, 2),
    ("nemo_rl", {**ON, TIS + "type": "tis", TIS + "ratio": 2, TIS + "ratio_min": 0.7}, "tis", 0.7, 2),
    ("nemo_rl", {**ON, TIS + "type": "icepop", TIS + "ratio": 5, TIS + "ratio_min": 0.5}, "icepop", 0.5, 5),
    ("nemo_rl", {**ON, TIS + "type": "seq-mask-tis", TIS + "ratio": 1.1, TIS + "ratio_min": 0.9},
     "seq-mask-tis", 0.9, 1.1),
    ("nemo_rl", {**ON, "sequence_level_importance_ratios": True}, "sequence-tis", 0, math.inf),
    ("nemo_rl", {**ON, "sequence_level_importance_ratios": True, TIS + "type": "tis", TIS + "ratio": 3},
     "sequence-tis", 0, 3),
    ("nemo_rl", {**ON, "sequence_level_importance_ratios": True, TIS + "type": "icepop", TIS + "ratio": 3,
                 TIS + "ratio_min": 0.2}, "sequence-mask", 0.2, 3),
    ("verl", {}, "none", 0, math.inf),
    ("verl", {"rollout_is": "token"}, "tis", 0, 2),
    ("verl", {"rollout_is": "token", "rollout_is_threshold": "1.5"}, "tis", 0, 1.5),
    ("verl", {"rollout_is": "token", "rollout_is_threshold": 1e9}, "is", 0, math.inf),
    ("verl", {"rollout_is": "token", "rollout_is_threshold": "0.5_5.0"}, "icepop", 0.5, 5),
    ("verl", {"rollout_is": "sequence", "rollout_is_threshold": 4}, "sequence-tis", 0, 4),
    ("verl", {"rollout_is": "sequence", "rollout_is_threshold": "0.3_3"}, "sequence-mask", 0.3, 3),
    ("verl", {"rollout_is": "token", "rollout_rs": "token_k1", "rollout_rs_threshold": "0.6_1.4"},
     "icepop", 1 / 1.4, 1 / 0.6),
    ("verl", {"rollout_is": "sequence", "rollout_is_threshold": 10, "rollout_rs": "seq_sum_k1",
              "rollout_rs_threshold": "0.25_3.0"}, "sequence-mask", 1 / 3, 4),
    ("verl", {"rollout_is": "token", "rollout_is_threshold": 1e9, "rollout_rs": "seq_mean_k1",
              "rollout_rs_threshold": "0.8_1.1"}, "seq-mask-tis", 1 / 1.1, 1.25),
    ("verl", {"rollout_is": "token", "rollout_is_threshold": 1e9, "rollout_rs": "seq_mean_k1",
              "rollout_rs_threshold": 1.2}, "seq-mask-tis", 1 / 1.2, 1.2),
    ("trl", {}, "sequence-mask", 0, 3),
    ("trl", {VLLM + "correction": False}, "none", 0, math.inf),
    ("trl", {VLLM + "mode": "token_truncate"}, "tis", 0, 3),
    ("trl", {VLLM + "mode": "token_truncate", VLLM + "clip_max": None, VLLM + "clip_min": 0.5}, "tis", 0.5, math.inf),
    ("trl", {VLLM + "mode": "token_mask", VLLM + "clip_min": 0.6}, "icepop", 0.6, 3),
    ("trl", {VLLM + "mode": "token_mask"}, "icepop", 1e-9, 3),
    ("trl", {VLLM + "mode": "token_mask", VLLM + "clip_min": 0}, "icepop", 1e-9, 3),
    ("trl", {VLLM + "mode": "sequence_truncate", VLLM + "clip_min": 0.4}, "sequence-tis", 0.4, 3),
    ("trl", {VLLM + "mode": "sequence_mask", VLLM + "clip_min": 0.4, VLLM + "clip_max": 2}, "sequence-mask", 0.4, 2),
]  # fmt: skip


def logprobs(noise, seed=0):
    """Log-probs of 60 sequences of up to 8 tokens, and their mask; every sequence has a token."""
    r = np.random.default_rng(seed)
    g = r.normal(-2, 1, (60, 8))
    mask = np.arange(8) < r.integers(1, 9, (60, 1))
    return g, g + noise * r.normal(size=g.shape), mask


def ours(setting, g, t, mask):
    import torch

    bounds = {"low": setting.low, "high": setting.high}
    return weights(torch.tensor(g), torch.tensor(t), torch.tensor(mask), mode=setting.mode, **bounds).weights.numpy()


@pytest.mark.parametrize("noise", [0.1, 0.6])
@pytest.mark.parametrize("framework, keys, mode, low, high", CASES)
def test_reading_keeps_the_weights(framework, keys, mode, low, high, noise):
    setting = read(framework, keys)
    assert setting.mode == mode and (setting.low, setting.high) == pytest.approx((low, high))
    reference, defaults = REFERENCES[framework]
    g, t, mask = logprobs(noise)
    want = reference(g, t, mask, {**defaults, **keys})
    assert np.allclose(ours(setting, g, t, mask), want, rtol=1e-5, atol=1e-7)


BOUNDS = [(0.5, 2.0), (0.95, 1.05), (0.0, 3.0), (0.0, math.inf)]
ALL = [(mode, *bounds) for mode in MODES for bounds in BOUNDS if bounds[0] > 0 or mode not in NEED_A_MINIMUM]


@pytest.mark.parametrize("framework", REFERENCES)
@pytest.mark.parametrize("mode, low, high", ALL)
def test_writing_keeps_the_weights_or_refuses(framework, mode, low, high):
    setting = Setting(mode=mode, low=low, high=high)
    reference, defaults = REFERENCES[framework]
    try:
        keys, _ = write(framework, setting)
    except NoEquivalent:
        lacks = {
            "nemo_rl": mode == "geometric",
            "verl": mode == "geometric" or (low > 0 and mode in ("tis", "sequence-tis")),
            "trl": mode in ("geometric", "seq-mask-tis"),
        }
        assert lacks[framework]
        return
    assert set(keys) == set(defaults)
    again = read(framework, keys)
    for noise in (0.02, 0.6):
        g, t, mask = logprobs(noise, seed=1)
        want = ours(setting, g, t, mask)
        assert np.allclose(reference(g, t, mask, keys), want, rtol=1e-5, atol=1e-7)
        assert np.allclose(ours(again, g, t, mask), want, rtol=1e-5, atol=1e-7)


def test_the_cases_tell_modes_and_bounds_apart():
    """A translator that ignored a bound or an aggregate would be caught: the cases' weights differ from raw ratios."""
    g, t, mask = logprobs(0.6)
    raw = ours(Setting(mode="is"), g, t, mask)
    for framework, keys, mode, _, _ in CASES:
        reference, defaults = REFERENCES[framework]
        assert np.allclose(reference(g, t, mask, {**defaults, **keys}), raw, rtol=1e-3) == (mode == "is")


@pytest.mark.parametrize(
    "keys, words",
    [
        ({"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.999_1.001"}, "would weigh 1"),
        ({"rollout_is": "token", "rollout_rs": "token_k3", "rollout_rs_threshold": 0.01}, "'token_k3'.*seq_mean_k1"),
        ({"rollout_is": "token", "rollout_rs": "token_k1,seq_sum_k1", "rollout_rs_threshold": 2}, "only one of"),
        ({"rollout_is": "token", "rollout_rs": "seq_mean_k1", "rollout_rs_threshold": 1.1}, "threshold above"),
        ({"rollout_is": "token", "rollout_is_threshold": 1.2, "rollout_rs": "token_k1", "rollout_rs_threshold": 2},
         "bounds them at 1.2"),
        ({"rollout_is": "token", "rollout_is_batch_normalize": True}, "batch_normalize"),
        ({"bypass_mode": True, "rollout_is": "sequence"}, "bypass mode"),
    ],
)  # fmt: skip
def test_verl_without_equivalent(keys, words):
    with pytest.raises(NoEquivalent, match=words):
        read("verl", keys)


@pytest.mark.parametrize(
    "framework, keys, words",
    [
        ("nemo_rl", {TIS + "type": "tis", TIS + "ratio": 2}, "needs use_importance_sampling_correction"),
        ("nemo_rl", {**ON, TIS + "type": "tis"}, "needs truncated_importance_sampling_ratio"),
        ("nemo_rl", {**ON, TIS + "type": "icepop", TIS + "ratio": 2}, "needs truncated_importance_sampling_ratio_min"),
        ("nemo_rl", {**ON, TIS + "type": "tis", TIS + "ratio": 2, TIS + "ratio_min": 3}, "low <= high"),
        ("nemo_rl", {**ON, TIS + "ratio": 2}, "without a type"),
        ("nemo_rl", {**ON, TIS + "type": "mis", TIS + "ratio": 2}, "allowed: None, tis, icepop, seq-mask-tis"),
        ("nemo_rl", {**ON, TIS + "type": "seq-mask-tis", TIS + "ratio": 2, TIS + "ratio_min": 1,
                     "sequence_level_importance_ratios": True}, "refuses seq-mask-tis"),
        ("verl", {"rollout_is": "geometric"}, "allowed: None, token, sequence"),
        ("verl", {"rollout_is": "token", "rollout_rs": "token_k1"}, "needs rollout_rs_threshold"),
        ("trl", {VLLM + "mode": "token"}, "allowed: token_truncate"),
        ("trl", {VLLM + "clip_min": 3.0}, "must be less than"),
        ("trl", {VLLM + "mode": "token_truncate", VLLM + "clip_max": None}, "needs .*clip_min or"),
        ("trl", {VLLM + "cap": 2.0}, "unknown keys .*vllm_importance_sampling_cap"),
        ("slime", {}, "allowed: nemo_rl, verl, trl .PEERS describes AReaL"),
    ],
)  # fmt: skip
def test_what_is_refused(framework, keys, words):
    with pytest.raises(ValueError, match=words):
        read(framework, keys)


NOT_NUMBERS = ["x", "", True, math.nan, -1, -math.inf, [2], (1, 2), {"low": 1}, b"2", 1j, 10**400]
NEMO_TIS = {**ON, TIS + "type": "tis", TIS + "ratio": 2}
NEMO_ICEPOP = {**ON, TIS + "type": "icepop", TIS + "ratio": 5, TIS + "ratio_min": 0.5}
NEMO_SEQUENCE = {**ON, TIS + "type": "seq-mask-tis", TIS + "ratio": 5, TIS + "ratio_min": 0.5}
VERL_IS, VERL_RS = {"rollout_is": "token"}, {"rollout_is": "token", "rollout_rs": "token_k1"}
VERL_SUM = {"rollout_is": "sequence", "rollout_is_threshold": 1e9, "rollout_rs": "seq_sum_k1"}
PAIRS = ["0_2", "2_1", "-1_2", "nan_2", "1_nan", "inf_inf", "1_2_3", "a_b", "_2", "2_", "_", "0_0", "0.5 5", "0.5,5"]
TRL_LOW = {VLLM + "mode": "token_mask", VLLM + "clip_max": None}
BAD = [
    ("nemo_rl", NEMO_TIS, TIS + "ratio", [*NOT_NUMBERS, 0, "2"]),
    ("nemo_rl", NEMO_TIS, TIS + "ratio_min", [*NOT_NUMBERS, math.inf, 3, "0.5"]),
    ("nemo_rl", NEMO_ICEPOP, TIS + "ratio_min", [*NOT_NUMBERS, math.inf, 6, 0]),
    ("nemo_rl", NEMO_ICEPOP, TIS + "ratio", [*NOT_NUMBERS, 0, 0.1]),
    ("nemo_rl", NEMO_SEQUENCE, TIS + "ratio_min", [*NOT_NUMBERS, math.inf, 6, 0]),
    ("nemo_rl", NEMO_SEQUENCE, TIS + "ratio", [*NOT_NUMBERS, 0, 0.1]),
    ("nemo_rl", NEMO_TIS, TIS + "type", [True, ["tis"], 1, {"tis": 1}, ""]),
    ("nemo_rl", NEMO_TIS, "use_importance_sampling_correction", ["true", 1, None, [True]]),
    ("nemo_rl", NEMO_TIS, "sequence_level_importance_ratios", ["false", 0, None, []]),
    ("verl", VERL_IS, "rollout_is_threshold", [*NOT_NUMBERS, *PAIRS, 0, "0", "nan", "-1", None]),
    ("verl", VERL_RS, "rollout_rs_threshold", [*NOT_NUMBERS, *PAIRS, 0, "0", "nan", 0.5, math.inf, "1_inf", 1e-320]),
    ("verl", VERL_SUM, "rollout_rs_threshold", [*NOT_NUMBERS, *PAIRS, 0, 0.5, math.inf, "1_inf", "1e-320_1"]),
    ("verl", {}, "rollout_is", [True, ["token"], 1, {"token": 1}, ""]),
    ("verl", VERL_RS, "rollout_rs", [True, ["token_k1"], 1, {"token_k1": 2}]),
    ("verl", VERL_IS, "bypass_mode", ["false", 0, None, []]),
    ("verl", VERL_IS, "rollout_is_batch_normalize", ["false", 0, None, []]),
    ("trl", {VLLM + "mode": "token_truncate"}, VLLM + "clip_max", [*NOT_NUMBERS, 0, "3"]),
    ("trl", {}, VLLM + "clip_max", [*NOT_NUMBERS, 0, "3"]),
    ("trl", {}, VLLM + "clip_min", [*NOT_NUMBERS, math.inf, 5, "0.5"]),
    ("trl", TRL_LOW, VLLM + "clip_min", [*NOT_NUMBERS, math.inf, "0.5"]),
    ("trl", {}, VLLM + "mode", [True, ["token_mask"], 1, {"token_mask": 1}, "", None]),
    ("trl", {}, VLLM + "correction", ["false", 0, None, []]),
]  # fmt: skip


@pytest.mark.parametrize("framework, keys, name, values", BAD)
def test_a_value_that_a_key_does_not_take_is_named(framework, keys, name, values):
    """The message has the setting, the value as it was given, and what is allowed."""
    for value in values:
        with pytest.raises(ValueError, match=name) as raised:
            read(framework, {**keys, name: value})
        message = str(raised.value)
        shown = [repr(value), *([str(float(value))] if type(value) in (int, float) and abs(value) < 9 else [])]
        assert not isinstance(raised.value, NoEquivalent) and any(text in message for text in shown), message
        assert re.search(r"allowed: |must be |must satisfy |give a ", message), message


@pytest.mark.parametrize("framework", REFERENCES)
@given(data=st.data())
def test_reading_anything_gives_a_setting_or_a_value_error(framework, data):
    numbers = st.floats() | st.integers() | st.booleans() | st.none()
    pairs = st.builds("{}_{}".format, st.floats(0), st.floats(0))
    words = [*MODES, *translator.TRL_MODES, "token", "sequence", "token_k1", "seq_sum_k1", "seq_mean_k1"]
    values = numbers | pairs | st.sampled_from(words) | st.text(max_size=5) | st.lists(st.integers(), max_size=2)
    start = data.draw(st.sampled_from([keys for name, keys, *_ in CASES if name == framework]))
    keys = start | data.draw(st.fixed_dictionaries({}, optional=dict.fromkeys(REFERENCES[framework][1], values)))
    try:
        found = read(framework, keys)
    except ValueError:
        return
    assert found.mode in MODES and 0 <= found.low <= found.high and found.high > 0


@pytest.mark.parametrize("settings", [None, [], "token", [("rollout_is", "token")], 2])
def test_settings_that_are_no_dict(settings):
    with pytest.raises(ValueError, match="settings is .*give a dict of verl keys"):
        read("verl", settings)
    with pytest.raises(ValueError, match="unknown keys .'2', 'x'."):
        read("verl", {"x": 1, 2: 3})
    with pytest.raises(ValueError, match="framework is .'verl'.; allowed"):
        read(["verl"], {})


@pytest.mark.parametrize("name, values", [("low", [*NOT_NUMBERS, "0.5", None]), ("high", [*NOT_NUMBERS, 0, "3", None])])
def test_a_setting_checks_its_bounds(name, values):
    for value in values:
        with pytest.raises(ValueError, match=f"{name} is .*; it must be a number"):
            Setting(mode="tis", **{name: value})
    with pytest.raises(ValueError, match="mode is .'tis'.; allowed: none"):
        Setting(mode=["tis"])


def test_trl_wants_bounds_apart():
    with pytest.raises(NoEquivalent, match="clip_min below clip_max"):
        write("trl", Setting(mode="tis", low=1, high=1))


def test_the_traps_are_in_the_notes():
    k1 = read("verl", {"rollout_is": "token", "rollout_rs": "token_k1", "rollout_rs_threshold": "0.6_1.4"})
    assert any("reciprocals" in note and "[0.714286, 1.66667]" in note for note in k1.notes)
    assert any("denominator" in note for note in k1.notes) and any("NaN" in note for note in k1.notes)
    assert any("product" in note for note in read("trl", {}).notes)
    assert any("lifts it to" in note for note in read("nemo_rl", ON).notes)
    assert any("GSPO" in note for note in write("nemo_rl", Setting(mode="sequence-tis", high=2))[1])
    assert read("nemo_rl", {}).notes == () and write("trl", Setting(mode="none"))[1] == ()


def test_the_note_on_overflow_is_true():
    """exp overflows in float32 at 89: NeMo RL's weight is then 0, lifted to tis's minimum; ours is the upper bound."""
    g, t, mask = np.float32([[-100, -1, np.nan]]), np.float32([[-1, -1, -1]]), np.array([[True] * 3])
    keys = {**ON, TIS + "type": "tis", TIS + "ratio": 2, TIS + "ratio_min": 0.5}
    with np.errstate(over="ignore"):
        assert nemo_rl(g, t, mask, {**NEMO_KEYS, **keys}).tolist() == [[0.5, 1, 0.5]]
    assert ours(read("nemo_rl", keys), g, t, mask).tolist() == [[2, 1, 0]]


def test_grpo_fields():
    assert read("nemo_rl", ON).grpo() == {"importance_sampling": "is"}
    config = GRPOConfig(**read("verl", {"rollout_is": "token"}).grpo())
    assert (config.importance_sampling, config.importance_sampling_max) == ("tis", 2.0)
    assert math.exp(20) < UNBOUNDED


def test_peers_are_a_table():
    frameworks = {row["framework"] for row in translator.PEERS}
    assert frameworks == {"slime", "OpenRLHF", "SkyRL", "AReaL", "prime-rl"}
    assert len({tuple(row) for row in translator.PEERS}) == 1
    for row in translator.PEERS:
        assert all(row.values()) and (row["ours"].startswith("no equivalent: ") or row["ours"].split()[0] in MODES)
