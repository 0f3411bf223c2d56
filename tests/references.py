"""What the tests hold fp8lab against: the formulas written again in NumPy, without importing fp8lab.

Casts are those of ml_dtypes, scales of powers of two come from exact fractions, and GEMMs run in float64. Slow and
plain on purpose. At the end: tiny random transformers models, built from configs.
"""

from fractions import Fraction

import ml_dtypes
import numpy as np
import torch

CAST = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
MAX = {"e4m3": np.float32(448), "e5m2": np.float32(57344)}
NAN_CODE = 0x7F

# ---- casts --------------------------------------------------------------------------------------


def encode(x, fmt):
    """Codes (uint8) of a saturating cast: clamp, round to nearest even; NaN and infinity become code 0x7f."""
    x = np.asarray(x, np.float32)
    finite = np.isfinite(x)
    codes = np.clip(np.where(finite, x, 0), -MAX[fmt], MAX[fmt]).astype(CAST[fmt]).view(np.uint8)
    return np.where(finite, codes, np.uint8(NAN_CODE))


def decode(codes, fmt):
    """float32 values of codes."""
    return np.asarray(codes, np.uint8).view(CAST[fmt]).astype(np.float32)


def bf16(x):
    """x rounded to BF16, as float32."""
    with np.errstate(invalid="ignore"):
        return np.asarray(x, np.float32).astype(ml_dtypes.bfloat16).astype(np.float32)


# ---- block quantization ---------------------------------------------------------------------------


def block_scale(amax, fmt, pow2):
    """The scale of one block: amax / max in float32, or the smallest power of two that is not below it, >= 2^-127."""
    scale = np.float32(amax) / MAX[fmt]
    if scale == 0:
        return np.float32(1)
    if not pow2:
        return scale
    exact = Fraction(float(amax)) / Fraction(float(MAX[fmt]))
    power = exact.numerator.bit_length() - exact.denominator.bit_length() - 1
    while Fraction(2) ** power < exact:
        power += 1
    return np.float32(2.0 ** max(power, -127))


def quantize(x, block, fmt="e4m3", pow2=False):
    """(codes, scale, values) of x, quantized block by block over its last two dimensions; -1 is a whole dimension.

    scale has shape (..., ceil(N / rows), ceil(K / cols)); a vector counts as one row.
    """
    x = np.asarray(x, np.float32)
    matrices = x.reshape(-1, *(1, 1, *x.shape)[-2:]) if x.size else x.reshape(0, 1, 1)
    rows, cols = (d if b == -1 else b for b, d in zip(block, matrices.shape[1:], strict=True))
    grid = [-(-matrices.shape[1] // rows), -(-matrices.shape[2] // cols)]
    codes = np.zeros(matrices.shape, np.uint8)
    values = np.zeros(matrices.shape, np.float32)
    scale = np.zeros((len(matrices), *grid), np.float32)
    for m, i, j in np.ndindex(*scale.shape):
        where = m, slice(i * rows, (i + 1) * rows), slice(j * cols, (j + 1) * cols)
        tile = matrices[where]
        finite = np.abs(tile[np.isfinite(tile)])
        s = block_scale(finite.max() if finite.size else 0, fmt, pow2)
        with np.errstate(over="ignore", invalid="ignore"):
            codes[where] = encode(np.where(np.isfinite(tile), np.clip(tile / s, -MAX[fmt], MAX[fmt]), np.nan), fmt)
            values[where] = decode(codes[where], fmt) * s
        scale[m, i, j] = s
    return codes.reshape(x.shape), scale.reshape(*x.shape[:-2], *grid), values.reshape(x.shape)


def rounded(x, fmt, block, pow2=False):
    """x as a GEMM sees it: fake-quantized in blocks, or rounded to BF16."""
    return (bf16(x) if fmt == "bf16" else quantize(x, block, fmt, pow2)[2]).astype(np.float64)


def linear(x, w, g, *, weight="e4m3", activation="e4m3", gradient="e4m3", pow2=False):
    """(output, grad_input, grad_weight, grad_bias) of a linear layer in float64; x (M, K), w (N, K), g (M, N).

    The weight is rounded to BF16 first; grad_weight requantizes g and x along tokens, from the originals.
    """
    wq = rounded(bf16(w), weight, (128, 128), pow2)
    output = rounded(x, activation, (1, 128), pow2) @ wq.T
    grad_input = rounded(g, gradient, (1, 128), pow2) @ wq
    along_tokens = rounded(g.T, gradient, (1, 128), pow2), rounded(x.T, activation, (1, 128), pow2)
    return output, grad_input, along_tokens[0] @ along_tokens[1].T, g.astype(np.float64).sum(0)


def sqnr(exact, approximate):
    """Signal to quantization noise in dB."""
    exact = np.asarray(exact, np.float64)
    return 10 * np.log10((exact**2).sum() / ((exact - np.asarray(approximate, np.float64)) ** 2).sum())


# ---- reinforcement learning -------------------------------------------------------------------------


def nemo_rl_mismatch(g, t):
    """NeMo RL's mismatch metrics (docs/guides/grpo.md) of log-probs g (rollout) and t (trainer), both (tokens,)."""
    g, t = np.asarray(g, np.float64), np.asarray(t, np.float64)
    middle = np.log(0.5 * np.exp(t) + 0.5 * np.exp(g))
    return {
        "token_mult_prob_error": np.mean(np.exp(np.abs(g - t))),
        "gen_kl_error": np.mean(np.exp(t - g) - (t - g) - 1),
        "policy_kl_error": np.mean(np.exp(g - t) - (g - t) - 1),
        "js_divergence_error": np.mean(
            0.5 * (np.exp(t - middle) - (t - middle) - 1) + 0.5 * (np.exp(g - middle) - (g - middle) - 1)
        ),
        "sampling_importance_ratio": np.mean(np.exp(t - g)),
    }


def clipped_loss(logp, old, advantages, low, high, delta=None):
    """PPO's loss token by token, by cases: (B, T) loss and whether the gradient is cut by the upper or lower clip."""
    loss, cut = np.zeros(logp.shape), np.zeros(logp.shape, bool)
    for i, j in np.ndindex(*logp.shape):
        ratio, a = np.exp(np.clip(float(logp[i, j]) - float(old[i, j]), -20, 20)), float(advantages[i])
        if a >= 0:
            used = min(ratio, 1 + high)
        else:
            used = max(ratio, 1 - low)
            if delta is not None:
                used = min(used, delta)
        cut[i, j] = a != 0 and ((a > 0 and ratio > 1 + high) or (a < 0 and ratio < 1 - low))
        loss[i, j] = -used * a
    return loss, cut


def corrected_weights(g, t, mask, mode, low, high):
    """Weights (B, T) under the frameworks' own formulas, row by row: seq-mask-tis is NeMo RL's, sequence-tis verl's,
    sequence-mask TRL's, geometric AReaL's (ratio, mean, mask). Non-finite tokens weigh 0 and count in no aggregate."""
    out = np.zeros(g.shape)
    for i in range(len(g)):
        use = mask[i] & np.isfinite(g[i]) & np.isfinite(t[i])
        if not use.any():
            continue
        d = t[i][use].astype(np.float64) - g[i][use].astype(np.float64)
        if mode == "seq-mask-tis":
            geometric = np.exp(np.clip(d.sum() / use.sum(), -20, 20))
            out[i, use] = np.exp(np.clip(d, -20, 20)) * (low <= geometric <= high)
        elif mode == "sequence-tis":
            out[i, use] = np.clip(np.exp(np.clip(d.sum(), -20, 20)), low, high)
        elif mode == "sequence-mask":
            product = np.exp(np.clip(d.sum(), -20, 20))
            out[i, use] = product if low <= product <= high else 0
        elif mode == "geometric":
            weight = np.exp(np.clip(d.mean(), -20, 20))
            out[i, use] = weight if low <= weight <= high else 0
    return out


def verl_mismatch(g, t, mask):
    """verl's compute_offpolicy_metrics, its effective sample size of raw ratios, and NeMo RL's errors by sequence."""
    rows = [(a[m].astype(np.float64), b[m].astype(np.float64)) for a, b, m in zip(g, t, mask, strict=True) if m.any()]
    gap = np.array([a.mean() - b.mean() for a, b in rows])
    d = np.concatenate([b - a for a, b in rows])
    normal = np.exp(d) / np.exp(d).mean()
    error = [np.exp(np.abs(a - b)).mean() for a, b in rows]
    return {
        "kl": -d.mean(),
        "k3_kl": (np.exp(d) - d - 1).mean(),
        "training_ppl": np.mean([np.exp(-b.mean()) for _, b in rows]),
        "rollout_ppl": np.mean([np.exp(-a.mean()) for a, _ in rows]),
        "log_ppl_diff": gap.mean(),
        "log_ppl_abs_diff": np.abs(gap).mean(),
        "log_ppl_diff_max": gap.max(),
        "log_ppl_diff_min": gap.min(),
        "ppl_ratio": np.exp(gap).mean(),
        "chi2_token": (np.exp(d) ** 2).mean() - 1,
        "chi2_seq": np.mean([np.exp(2 * (b - a).sum()) for a, b in rows]) - 1,
        "effective_sample_size": 1 / (normal**2).mean(),
        "max_seq_mult_prob_error": max(error),
        "mean_seq_mult_prob_error": np.mean(error),
        "min_seq_mult_prob_error": min(error),
        "sequences": len(rows),
        "tokens": len(d),
    }


# ---- tiny models --------------------------------------------------------------------------------------

SIZES = dict(
    vocab_size=61,
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
)


def tiny_llama(seed=0, **changes):
    """A random float32 LlamaForCausalLM in evaluation mode, with biases by `attention_bias=True`."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**{**SIZES, **changes})).eval()


def tiny_moe(seed=0):
    """A random float32 Qwen3MoeForCausalLM: fused experts behind a router."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(seed)
    experts = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, head_dim=12)
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **experts)).eval()


def tokens(seed=1, shape=(2, 7)):
    """Random token ids for the tiny models."""
    return torch.randint(0, SIZES["vocab_size"], shape, generator=torch.Generator().manual_seed(seed))
