"""Correction settings of NeMo RL, verl and TRL in our words and back, and a table of five more frameworks.

"TIS with C = 2", "sequence", "mask" name different formulas in different frameworks. What must agree is the weight that
multiplies a token's loss; `corrections.py` says which weight each of our modes gives.

    read("verl", {"rollout_is": "token", "rollout_is_threshold": 2.0})  ->  Setting(mode="tis", low=0, high=2, notes=…)
    write("trl", setting)  ->  ({"vllm_importance_sampling_mode": "token_truncate", …}, notes)

A translation has equal weights for finite log-probs with |t - g| and |log R| below 20 (beyond, we clamp the exponent).
What differs outside of that, and in the loss's denominator, is in the notes. If no mode or key gives the same weights,
`NoEquivalent` says so; nothing is approximated silently. Read in the sources: NeMo RL 7ea279abf (loss_functions.py),
verl 1dda039b9 (rollout_corr_helper.py), TRL f2cd57710 (grpo_trainer.py). Not translated: slime, OpenRLHF, SkyRL, AReaL
and prime-rl, which are rows of `PEERS`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from fp8lab.checks import require_choice, require_positive
from fp8lab.corrections import MODES, WITHOUT_BOUNDS, check_bounds

UNBOUNDED = 1e9
"""Stands for "no bound" where a framework wants a number: above exp(20), the largest ratio after clamping."""
NOTES = {
    "nemo_rl": (
        "NeMo RL: a rejected token stays in the loss's denominator, as here",
        "NeMo RL: a non-finite ratio, and an exp(t - g) that overflows, weighs 0 before the bounds, so `tis` lifts it "
        "to its minimum; here a non-finite one weighs 0, and exponents are clamped at 20",
    ),
    "verl": (
        "verl: rollout_rs takes rejected tokens out of response_mask, so out of the loss's denominator too, as "
        "GRPOConfig.drop_rejected does here; IcePop thresholds do not",
        "verl: a NaN log-prob is not caught and makes the loss NaN; here it weighs 0 and is counted",
        "verl: the YAML default is rollout_is: null, the dataclass default is 'sequence'",
    ),
    "trl": (
        "TRL: a rejected token stays in the loss's denominator, as here",
        "TRL: exp() is not guarded and NaN propagates; after PR #6693 a missing log-prob means ratio 1, here weight 0",
        "TRL: corrects only with use_vllm=True, and logs ratios after truncation",
    ),
}
NEMO_KEYS = {
    "use_importance_sampling_correction": False,
    "truncated_importance_sampling_type": None,
    "truncated_importance_sampling_ratio": None,
    "truncated_importance_sampling_ratio_min": None,
    "sequence_level_importance_ratios": False,
}
"""Keys of NeMo RL's loss_fn that make the correction, with their defaults."""
VERL_KEYS = {
    "rollout_is": None,
    "rollout_is_threshold": 2.0,
    "rollout_is_batch_normalize": False,
    "rollout_rs": None,
    "rollout_rs_threshold": None,
    "bypass_mode": False,
    "loss_type": "ppo_clip",
}
"""Keys of verl's algorithm.rollout_correction, with the defaults of its YAML."""
TRL_KEYS = {
    "vllm_importance_sampling_correction": True,
    "vllm_importance_sampling_mode": "sequence_mask",
    "vllm_importance_sampling_clip_max": 3.0,
    "vllm_importance_sampling_clip_min": None,
}
"""Fields of TRL's GRPOConfig, with their defaults."""


class NoEquivalent(ValueError):
    """The settings have no counterpart with the same weights; the message says what comes nearest."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A correction in our words, and what to know about the framework it came from."""

    mode: str
    """See corrections.MODES."""
    low: float = 0.0
    high: float = math.inf
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require_choice("mode", self.mode, MODES)
        require_positive("low", self.low, zero=True)
        require_positive("high", self.high)
        check_bounds(self.mode, self.low, self.high)

    def grpo(self) -> dict[str, Any]:
        """The fields of GRPOConfig that set it; bounds only for modes that use them."""
        fields: dict[str, Any] = {"importance_sampling": self.mode}
        if self.mode not in WITHOUT_BOUNDS:
            fields |= {"importance_sampling_min": self.low, "importance_sampling_max": self.high}
        return fields


def read(framework: str, settings: dict[str, Any]) -> Setting:
    """A framework's own correction keys in our words; missing keys have the framework's defaults.

    framework: `nemo_rl` (loss_fn), `verl` (algorithm.rollout_correction) or `trl` (GRPOConfig). ValueError for an
    unknown key, a value that is not what the key takes, or what the framework itself refuses; NoEquivalent if no mode
    of ours gives these weights.
    """
    reader, _, defaults = _framework(framework)
    if not isinstance(settings, dict):
        raise ValueError(f"settings is {settings!r}; give a dict of {framework} keys")
    if unknown := sorted(map(str, set(settings) - set(defaults))):
        raise ValueError(f"{framework} correction has unknown keys {unknown}; allowed: {', '.join(defaults)}")
    mode, low, high, notes = reader({**defaults, **settings})
    return Setting(mode=mode, low=low, high=high, notes=(*notes, *NOTES[framework]) if mode != "none" else tuple(notes))


def write(framework: str, setting: Setting) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Our correction as a framework's keys, all of them, and notes; NoEquivalent if none gives these weights."""
    _, writer, defaults = _framework(framework)
    keys, notes = writer(setting.mode, setting.low, setting.high)
    return {**defaults, **keys}, (*notes, *NOTES[framework]) if setting.mode != "none" else tuple(notes)


def _framework(name: str) -> tuple:
    known = {
        "nemo_rl": (_read_nemo_rl, _write_nemo_rl, NEMO_KEYS),
        "verl": (_read_verl, _write_verl, VERL_KEYS),
        "trl": (_read_trl, _write_trl, TRL_KEYS),
    }
    if not isinstance(name, str) or name not in known:
        others = sorted({row["framework"] for row in PEERS})
        raise ValueError(f"framework is {name!r}; allowed: {', '.join(known)} (PEERS describes {', '.join(others)})")
    return known[name]


# ---- NeMo RL ----------------------------------------------------------------------------------------

GSPO_NOTE = (
    "NeMo RL: sequence_level_importance_ratios also makes the clipped policy ratio a sequence's (GSPO) and needs "
    "token_level_loss: false; only the correction weight is the same here"
)


def _read_nemo_rl(s: dict[str, Any]) -> tuple[str, float, float, list[str]]:
    top, bottom = "truncated_importance_sampling_ratio", "truncated_importance_sampling_ratio_min"
    kind, high, low = s["truncated_importance_sampling_type"], s[top], s[bottom]
    require_choice("truncated_importance_sampling_type", kind, (None, "tis", "icepop", "seq-mask-tis"))
    for key in ("use_importance_sampling_correction", "sequence_level_importance_ratios"):
        require_choice(key, s[key], (True, False))
    whole = s["sequence_level_importance_ratios"]
    if kind is None:
        if high is not None:
            raise ValueError(f"{top} is {high} without a type; NeMo RL refuses that")
        if not s["use_importance_sampling_correction"]:
            return "none", 0.0, math.inf, []
        return ("sequence-tis", 0.0, math.inf, [GSPO_NOTE]) if whole else ("is", 0.0, math.inf, [])
    if not s["use_importance_sampling_correction"]:
        raise ValueError(f"truncated_importance_sampling_type {kind!r} needs use_importance_sampling_correction: true")
    if high is None or (low is None and kind != "tis"):
        raise ValueError(f"{kind} needs {top if high is None else bottom}")
    high = require_positive(top, high)
    low = 0.0 if low is None else require_positive(bottom, low, zero=kind == "tis" or whole, finite=True)
    if low > high:
        raise ValueError(f"{bottom} is {low} and {top} {high}; they must satisfy low <= high")
    if kind == "seq-mask-tis" and whole:
        raise ValueError("NeMo RL refuses seq-mask-tis with sequence_level_importance_ratios")
    mode = {"tis": "sequence-tis", "icepop": "sequence-mask"}[kind] if whole else kind
    notes = [GSPO_NOTE] if whole else []
    if kind == "seq-mask-tis":
        notes.append("NeMo RL: a non-finite token counts as ratio 1 in the geometric mean; here it is left out")
    return mode, low, high, notes


def _write_nemo_rl(mode: str, low: float, high: float) -> tuple[dict[str, Any], list[str]]:
    if mode == "none":
        return {}, []
    keys: dict[str, Any] = {"use_importance_sampling_correction": True}
    if mode == "is":
        return keys, []
    if mode == "geometric":
        raise NoEquivalent(
            "NeMo RL has no weight that is a sequence's geometric mean; seq-mask-tis filters by it but keeps each "
            "token's own ratio"
        )
    whole = mode in ("sequence-tis", "sequence-mask")
    keys["sequence_level_importance_ratios"] = whole
    if mode == "sequence-tis" and low == 0 and high == math.inf:
        return keys, [GSPO_NOTE]
    keys["truncated_importance_sampling_type"] = {"sequence-tis": "tis", "sequence-mask": "icepop"}.get(mode, mode)
    keys["truncated_importance_sampling_ratio"] = min(high, UNBOUNDED)
    keys["truncated_importance_sampling_ratio_min"] = None if mode in ("tis", "sequence-tis") and low == 0 else low
    return keys, [GSPO_NOTE] if whole else []


# ---- verl -------------------------------------------------------------------------------------------


def _bounds(name: str, threshold: Any) -> tuple[float | None, float]:
    """verl's threshold: a number, which may be text, is an upper bound, "0.5_5.0" both."""
    texts = threshold.split("_", 1) if isinstance(threshold, str) else []
    try:
        if any("_" in text for text in texts):
            raise ValueError("more than two numbers")
        *low, high = [require_positive(name, value) for value in [float(text) for text in texts] or [threshold]]
        if low and (low[0] > high or low[0] == math.inf):
            raise ValueError("a lower bound above the upper one")
    except ValueError as error:
        allowed = "a number above 0, or text 'low_high' with 0 < low <= high"
        raise ValueError(f"{name} is {threshold!r}, of type {type(threshold).__name__}; allowed: {allowed}") from error
    return (low[0] if low else None), high


def _read_verl(s: dict[str, Any]) -> tuple[str, float, float, list[str]]:
    level, rs = s["rollout_is"], s["rollout_rs"]
    require_choice("rollout_is", level, (None, "token", "sequence"))
    for key in ("bypass_mode", "rollout_is_batch_normalize"):
        require_choice(key, s[key], (True, False))
    if s["bypass_mode"]:
        raise NoEquivalent(
            "verl's bypass mode takes the rollout's log-probs as the old policy's, so the clipped ratio holds the "
            "correction; here the ratio starts at 1 and the correction is a weight (verl's decoupled mode)"
        )
    if s["rollout_is_batch_normalize"]:
        raise NoEquivalent("verl's rollout_is_batch_normalize divides weights by their mean; no mode here does")
    low, high = (None, math.inf) if level is None else _bounds("rollout_is_threshold", s["rollout_is_threshold"])
    if rs is not None:
        return _read_verl_rejection(level, low, high, rs, s["rollout_rs_threshold"])
    if level is None:
        return "none", 0.0, math.inf, []
    if low is not None:
        return ("icepop" if level == "token" else "sequence-mask"), low, high, []
    if high >= math.exp(20):
        return ("is", 0.0, math.inf, []) if level == "token" else ("sequence-tis", 0.0, math.inf, [])
    return ("tis" if level == "token" else "sequence-tis"), 0.0, high, []


def _read_verl_rejection(level, low, high, rs, threshold) -> tuple[str, float, float, list[str]]:
    pairs = {"token_k1": "token", "seq_sum_k1": "sequence", "seq_mean_k1": "token"}
    if not isinstance(rs, str):
        raise ValueError(f"rollout_rs is {rs!r}, of type {type(rs).__name__}; allowed: None, or text as 'token_k1'")
    if rs not in pairs:
        raise NoEquivalent(f"rollout_rs {rs!r}: only one of {', '.join(pairs)} has a counterpart here")
    if threshold is None:
        raise ValueError("rollout_rs needs rollout_rs_threshold")
    if level != pairs[rs]:
        raise NoEquivalent(
            f"rollout_rs {rs!r} with rollout_is {level!r}: a kept token would weigh "
            f"{'1' if level is None else 'by the ' + level}; a counterpart here needs rollout_is {pairs[rs]!r}"
        )
    k1_low, k1_high = _bounds("rollout_rs_threshold", threshold)
    bottom, top = 1 / k1_high, k1_high if k1_low is None else 1 / k1_low
    if not 0 < bottom <= top < math.inf:
        raise ValueError(f"rollout_rs_threshold is {threshold!r}; allowed: finite, >= 1, or 'low_high' above 0")
    reach = math.exp(20) if rs == "seq_mean_k1" else top
    if low is not None or high < reach:
        raise NoEquivalent(
            f"rollout_rs {rs!r} keeps ratios up to {reach:.4g}, and rollout_is_threshold bounds them at {high}; a "
            "counterpart here needs a threshold above what is kept"
        )
    mode = {"token_k1": "icepop", "seq_sum_k1": "sequence-mask", "seq_mean_k1": "seq-mask-tis"}[rs]
    note = (
        f"verl: *_k1 bounds apply to g - t, so {threshold!r} keeps ratios in [{bottom:.6g}, {top:.6g}], the reciprocals"
    )
    return mode, bottom, top, [note]


def _write_verl(mode: str, low: float, high: float) -> tuple[dict[str, Any], list[str]]:
    if mode == "none":
        return {}, []
    keys: dict[str, Any] = {"rollout_is": "sequence" if mode in ("sequence-tis", "sequence-mask") else "token"}
    high = min(high, UNBOUNDED)
    if mode in ("tis", "sequence-tis") and low > 0:
        raise NoEquivalent(
            f"verl clamps weights from above only; {mode} with a lower bound of {low} has no counterpart"
        )
    if mode == "geometric":
        raise NoEquivalent("verl's sequence weight is the product; the geometric mean only filters (seq_mean_k1)")
    if mode == "seq-mask-tis":
        text = f"{1 / high!r}_{1 / low!r}"
        rejection = {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": text}
        note = f"verl: *_k1 bounds apply to g - t, so [{low}, {high}] is written as its reciprocals, {text!r}"
        return {**keys, "rollout_is_threshold": UNBOUNDED, **rejection}, [note]
    if mode in ("icepop", "sequence-mask"):
        keys["rollout_is_threshold"] = f"{max(low, 1 / UNBOUNDED)!r}_{high!r}"
    else:
        keys["rollout_is_threshold"] = UNBOUNDED if mode == "is" else high
    return keys, []


# ---- TRL --------------------------------------------------------------------------------------------

TRL_MODES = {
    "token_truncate": "tis",
    "token_mask": "icepop",
    "sequence_truncate": "sequence-tis",
    "sequence_mask": "sequence-mask",
}


def _read_trl(s: dict[str, Any]) -> tuple[str, float, float, list[str]]:
    kind = s["vllm_importance_sampling_mode"]
    low, high = s["vllm_importance_sampling_clip_min"], s["vllm_importance_sampling_clip_max"]
    require_choice("vllm_importance_sampling_mode", kind, tuple(TRL_MODES))
    require_choice("vllm_importance_sampling_correction", s["vllm_importance_sampling_correction"], (True, False))
    if not s["vllm_importance_sampling_correction"]:
        return "none", 0.0, math.inf, []
    low = None if low is None else require_positive("vllm_importance_sampling_clip_min", low, zero=True, finite=True)
    high = None if high is None else require_positive("vllm_importance_sampling_clip_max", high)
    if low is not None and high is not None and low >= high:
        raise ValueError(f"vllm_importance_sampling_clip_min {low} must be less than clip_max {high}")
    if low is None and high is None and kind.endswith("truncate"):
        raise ValueError(f"{kind} needs vllm_importance_sampling_clip_min or clip_max")
    notes = []
    if kind.startswith("sequence"):
        notes.append("TRL: a sequence's ratio is the product, whose spread grows with its length")
    if kind == "token_mask" and not low:
        low = 1 / UNBOUNDED  # below exp(-20), so it rejects nothing
    return TRL_MODES[kind], low or 0.0, math.inf if high is None else high, notes


def _write_trl(mode: str, low: float, high: float) -> tuple[dict[str, Any], list[str]]:
    prefix = "vllm_importance_sampling"
    if mode == "none":
        return {f"{prefix}_correction": False}, []
    names = {ours: theirs for theirs, ours in TRL_MODES.items()}
    if mode == "is":
        mode, low, high = "tis", 0.0, math.inf
    if mode not in names:
        raise NoEquivalent(f"TRL has no geometric mean of a sequence, so nothing with the weights of {mode}")
    if low == high:
        raise NoEquivalent(f"TRL wants clip_min below clip_max; both are {low}")
    top = None if high == math.inf else high
    bottom = None if low == 0 and top is not None else low  # a truncate mode needs at least one bound
    return {f"{prefix}_mode": names[mode], f"{prefix}_clip_max": top, f"{prefix}_clip_min": bottom}, []


# ---- the others -------------------------------------------------------------------------------------


PEER_SOURCES = {
    "slime": "THUDM/slime@624b824: slime/backends/megatron_utils/loss.py, examples/train_infer_mismatch_helper/mis.py",
    "OpenRLHF": "OpenRLHF/OpenRLHF@3c3be62: openrlhf/models/loss.py",
    "SkyRL": "NovaSky-AI/SkyRL@a956457: off_policy_correction_utils.py",
    "AReaL": "inclusionAI/AReaL@4aef98d: areal/utils/functional/functional.py",
    "prime-rl": "PrimeIntellect-ai/prime-rl@559b447: src/prime_rl/trainer/rl/loss.py",
}


def _row(framework: str, setting: str, ours: str, difference: str) -> dict[str, str]:
    row = {"framework": framework, "setting": setting, "ours": ours, "difference": difference}
    return {**row, "source": PEER_SOURCES[framework]}


PEERS = [
    _row("slime", "--tis-clip 2.0, --tis-clip-low 0", "tis 0..2", "exp() without a guard; NaN propagates"),
    _row("slime", "icepop function, same flags", "icepop", "its default lower bound 0 rejects nothing below"),
    _row(
        "slime",
        "mis.py: token, truncate, 0.5..2.0; rejection, veto 1e-4, batch normalization on",
        "no equivalent: weights are divided by their mean",
        "rejected tokens leave the denominator",
    ),
    _row(
        "OpenRLHF", "tis, [0.5, 5.0]", "tis 0.5..5", "both ends clamp, others clamp from above; exp() without a guard"
    ),
    _row("OpenRLHF", "icepop, [0.5, 5.0]", "icepop 0.5..5", "only with policy_loss_type 'ppo'"),
    _row(
        "OpenRLHF",
        "seq-mask-tis, [0.5, 5.0]",
        "seq-mask-tis 0.5..5",
        "such bounds almost never fire on a geometric mean (NeMo RL: 0.999..1.002); ratios are raw",
    ),
    _row("SkyRL", "token TIS, cap 2.0", "tis 0..2", "a non-finite log-prob is floored and counted; here it weighs 0"),
    _row("SkyRL", "sequence TIS, cap 5.0", "sequence-tis 0..5", "one non-finite token pins the sequence at the cap"),
    _row(
        "SkyRL",
        "geometric mask 0.99..1.01, product mask 0.5..2.0, outlier mask 1e-4..100",
        "no equivalent: kept tokens weigh 1 or the TIS weight",
        "edits loss_mask, so rejected tokens leave the denominator",
    ),
    _row(
        "AReaL",
        "mask, ratio, token, upper 5.0",
        "icepop with a lower bound near 0, high 5",
        "a non-finite difference becomes 0, so weight 1; here weight 0",
    ),
    _row(
        "AReaL",
        "mask, ratio, aggregation mean, upper 5.0",
        "geometric 0..5",
        "the weight itself is the geometric mean; rejected tokens stay in the denominator",
    ),
    _row(
        "prime-rl",
        "r * A without a PPO clip; tokens with e^t - e^g > 0.2 (A > 0) or < -0.2 masked",
        "no equivalent: the mask depends on the advantage",
        "plus 1e-3 d^2 on all tokens; masked tokens leave the policy term only",
    ),
]
"""Rows for a DataFrame: a setting of a framework that is not translated in code, our nearest words, the difference, and
where it was read (August 2026; AReaL in May)."""
