"""FP8 attention against float64, ml_dtypes and vLLM's kernel written again; inside transformers; the FP8 cache."""

import copy
import dataclasses
import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch

from fp8lab.attention import attend, attention_of, encode, observed, quantize, set_attention, token_head_scale
from fp8lab.attention_scales import OPERANDS, AttentionScales
from fp8lab.calibration import calibrate
from fp8lab.conversion import convert, restore
from fp8lab.formats import E4M3
from fp8lab.models import load_model, load_tokenizer
from fp8lab.operands import FP8_ATTENTION, AttentionPrecision
from fp8lab.precision import PrecisionPlan
from fp8lab.rollout import NativeEngine, SamplingParams
from fp8lab.rollout.decode import Decoder, KVCache
from fp8lab.rollout.float8_cache import Float8KVCache, decode, float8_cache
from fp8lab.trainer import Trainer
from tests.references import SIZES, sqnr, tiny_llama, tiny_moe, tokens

ROOT = Path(__file__).resolve().parents[1]
PROMPTS = ["47+38=", "5-9=", "12+7=", "99+99="]
KV_ONLY = AttentionPrecision(kv_cache="e4m3")
DYNAMIC = AttentionPrecision(kv_cache="e4m3", scales="per-token-head")


def to_e4m3(x):
    """Code values of x: clamp, then ml_dtypes' cast, as float64."""
    return np.clip(np.asarray(x, np.float32), -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)


def qkv(seed=0, batch=2, heads=4, kv_heads=2, tq=5, tk=9, dim=16, spread=2.0):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((batch, heads, tq, dim), (batch, kv_heads, tk, dim), (batch, kv_heads, tk, dim))
    return [torch.randn(shape, generator=generator) * spread for shape in shapes]


def causal(tq, tk):
    return np.tril(np.ones((1, 1, tq, tk), bool), tk - tq)


def reference(q, k, v, mask, softmax_scale, scales, *, p_scale=256.0, normalized=False):
    """The module's formula in float64; scales: numbers, arrays (B, H, T, 1), or None for an operand left as it is."""
    q, k, v = (np.asarray(x, np.float32) for x in (q, k, v))
    values = [
        x.astype(np.float64) if s is None else to_e4m3(x / np.float32(s)) * s
        for x, s in zip((q, k, v), scales, strict=True)
    ]
    k, v = (np.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in values[1:])
    scores = np.where(mask, values[0] @ k.swapaxes(2, 3) * softmax_scale, -np.inf)
    with np.errstate(invalid="ignore"):
        p = np.exp(scores - np.maximum(scores.max(-1, keepdims=True), -1e300))
    total = p.sum(-1, keepdims=True)
    total[total == 0] = 1
    if normalized:
        p, total = p / total, 1.0
    if p_scale is not None:
        p = to_e4m3(p * p_scale) / p_scale
    return p @ v / total


def ours(q, k, v, mask, softmax_scale, scales, round_probabilities=True):
    operands = (quantize(x, s) for x, s in zip((q, k, v), scales, strict=True))
    mask = None if mask is None else torch.as_tensor(mask)
    return attend(*operands, mask, softmax_scale, round_probabilities=round_probabilities).numpy()


def vllm_tiles(q, k, v, visible, scales, softmax_scale, tile):
    """One head of vllm/v1/attention/ops/triton_unified_attention.py (0.32.0, Apache-2.0), FP8 per tensor with FP8 q:
    scores and P tile by tile with a running maximum, p_scale = 256, value_scale at the end."""
    q, k, v = (to_e4m3(x / np.float32(s)).astype(np.float32) for x, s in zip((q, k, v), scales, strict=True))
    m, total, acc = (np.full((len(q), 1), x, np.float32) for x in (-np.inf, 0, 0))
    for start in range(0, len(k), tile):
        part = slice(start, start + tile)
        s = np.where(visible[:, part], np.float32(softmax_scale * scales[0] * scales[1]) * (q @ k[part].T), -np.inf)
        new = np.maximum(m, s.max(-1, keepdims=True))
        new = np.where(np.isinf(new), np.float32(0), new)
        p, alpha = np.exp(s - new), np.exp(m - new)
        total, m = total * alpha + p.sum(-1, keepdims=True), new
        acc = acc * alpha + to_e4m3(p * 256).astype(np.float32) @ v[part] / 256
    return acc * np.float32(scales[2]) / total


# ---- pure functions ------------------------------------------------------------------------------------


def test_codes_under_a_given_scale_are_those_of_ml_dtypes():
    x = torch.cat([torch.randn(40, 33) * s for s in (1e-4, 1.0, 300.0)])
    x[0, :3] = torch.tensor([0.0, -0.0, 1e-30])
    for scale in (0.0123, 1.0, 2.0**-9):
        expected = np.clip(x.numpy() / np.float32(scale), -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
        assert np.array_equal(encode(x, scale).numpy(), expected)
        np.testing.assert_array_equal(quantize(x, scale).values.numpy(), to_e4m3(x.numpy() / np.float32(scale)))


def test_token_head_scales_are_vllms():
    """triton_reshape_and_cache_flash.py: k_scale = max(absmax / QUANT_MAX, 1e-6); k_q = clamp(k_h * (1 / k_scale))."""
    x = torch.randn(2, 3, 4, 8) * torch.logspace(-9, 3, 4)[:, None]
    x[0, 0, 0] = 0
    scale = np.maximum(np.abs(x.numpy()).max(-1, keepdims=True) / np.float32(448), np.float32(1e-6))
    codes = np.clip(x.numpy() * (np.float32(1) / scale), -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    assert np.array_equal(token_head_scale(x).numpy(), scale)
    assert np.array_equal(encode(x, token_head_scale(x)).numpy(), codes)


@pytest.mark.parametrize("heads, kv_heads, tq, tk", [(4, 4, 6, 6), (4, 2, 5, 9), (6, 1, 1, 13), (2, 2, 3, 3)])
def test_attention_equals_the_float64_reference(heads, kv_heads, tq, tk):
    q, k, v = qkv(heads=heads, kv_heads=kv_heads, tq=tq, tk=tk)
    scales = (0.02, 0.015, 0.01)
    out = ours(q, k, v, None, 0.25, scales)
    expected = reference(q, k, v, causal(tq, tk), 0.25, scales)
    np.testing.assert_allclose(out, expected, atol=1e-5 * np.abs(expected).max() + 1e-5)
    assert sqnr(expected, out) > 60  # a code of P that flips in its last place is rare


def test_probabilities_left_alone_and_dynamic_scales():
    q, k, v = qkv(spread=3.0)
    scales = [token_head_scale(x).numpy() for x in (q, k, v)]
    mask = causal(5, 9)
    expected = reference(q, k, v, mask, 0.25, scales, p_scale=None)
    assert sqnr(expected, ours(q, k, v, mask, 0.25, (None, None, None), False)) > 60
    expected = reference(q, k, v, mask, 0.25, (0.02, 0.02, 0.02), p_scale=None)
    np.testing.assert_allclose(ours(q, k, v, mask, 0.25, (0.02,) * 3, False), expected, atol=1e-5)
    with pytest.raises(ValueError, match="use probabilities='bf16'"):
        ours(q, k, v, mask, 0.25, (None, None, None))


def test_padding_changes_nothing_and_a_blind_query_gets_zero():
    q, k, v = qkv(batch=1, tq=4, tk=4)
    alone = ours(q, k, v, causal(4, 4), 0.25, (0.02,) * 3)
    pad = [torch.cat([torch.full_like(x[:, :, :2], 50.0), x], dim=2) for x in (q, k, v)]
    mask = causal(6, 6) & (np.arange(6) >= 2)
    padded = ours(*pad, mask, 0.25, (0.02,) * 3)
    np.testing.assert_array_equal(padded[:, :, 2:], alone)
    assert np.all(padded[:, :, :2] == 0)


@pytest.mark.parametrize("tile, db", [(64, 90), (16, 35)])
def test_vllms_kernel_in_tiles(tile, db):
    """With one tile its formula is ours; with several its running maximum rounds P on other grids: FP8's own error."""
    q, k, v = (x[0, 0] for x in qkv(batch=1, heads=1, kv_heads=1, tq=40, tk=40, dim=32))
    scales, visible = (0.02, 0.015, 0.01), causal(40, 40)[0, 0]
    expected = vllm_tiles(q.numpy(), k.numpy(), v.numpy(), visible, scales, 32**-0.5, tile)
    out = ours(*(x[None, None] for x in (q, k, v)), None, 32**-0.5, scales)[0, 0]
    assert sqnr(expected, out) > db


def test_the_factor_256_keeps_long_rows_alive():
    """numerics.md section 5: of a normalized P nearly everything is flushed at scale 1; our P keeps FP8's 30 dB."""
    q, k, v = qkv(batch=1, heads=1, kv_heads=1, tq=8, tk=4096, dim=32, spread=1.0)
    mask = np.ones((1, 1, 8, 4096), bool)
    exact = reference(q, k, v, mask, 32**-0.5, (None,) * 3, p_scale=None)
    kept = attend(*(quantize(x, 0.01) for x in (q, k, v)), torch.tensor(mask), 32**-0.5, round_probabilities=True)
    unscaled = reference(q, k, v, mask, 32**-0.5, (None,) * 3, p_scale=1.0, normalized=True)
    assert sqnr(exact, kept.numpy()) > 24
    assert sqnr(exact, unscaled) < sqnr(exact, kept.numpy()) - 6


def test_gradients_go_straight_through():
    q, k, v = (x.requires_grad_() for x in qkv(tq=6, tk=6))
    scales = (0.02, 0.004, 0.01)  # many keys are clamped: their gradient passes, too
    mask = torch.tensor(causal(6, 6))
    operands = [quantize(x, s) for x, s in zip((q, k, v), scales, strict=True)]
    weight = torch.randn(2, 4, 6, 16, generator=torch.Generator().manual_seed(5))
    (attend(*operands, mask, 0.25, round_probabilities=True) * weight).sum().backward()

    def through(x, rounded):
        return x + (rounded - x).detach()

    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    rounded = [
        through(x, torch.tensor(to_e4m3(x.detach().numpy() / s) * s)) for x, s in zip(exact, scales, strict=True)
    ]
    k2, v2 = (x.repeat_interleave(2, dim=1) for x in rounded[1:])
    scores = (rounded[0] @ k2.transpose(2, 3) * 0.25).masked_fill(~mask, -torch.inf)
    p = (scores - scores.amax(-1, keepdim=True).detach()).exp()
    out = through(p, torch.tensor(to_e4m3(p.detach().numpy() * 256) / 256)) @ v2 / p.sum(-1, keepdim=True)
    (out * weight).sum().backward()
    for x, expected in zip((q, k, v), exact, strict=True):
        torch.testing.assert_close(x.grad.double(), expected.grad, atol=1e-4, rtol=1e-4)


# ---- inside transformers -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shipped():
    """tiny-llama with FP8 attention and calibrated scales, and the prompts as ids."""
    model, tokenizer = load_model("tiny-llama"), load_tokenizer("tiny-llama")
    ids = [tokenizer(prompt).input_ids for prompt in PROMPTS]
    scales = calibrate(model, ids, FP8_ATTENTION).scales
    set_attention(model, FP8_ATTENTION).scales = scales
    return model, ids


def with_reference(model, state):
    """A copy of the model whose attention is the float64 reference, through transformers' interface."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask

    def function(module, query, key, value, attention_mask, scaling=None, **_):
        scales = [getattr(state.scales, operand)[module.layer_idx] for operand in OPERANDS]
        tq, tk = query.shape[2], key.shape[2]
        mask = causal(tq, tk) if attention_mask is None else attention_mask.numpy() == 0
        out = reference(query.detach(), key.detach(), value.detach(), mask, scaling, scales)
        return torch.tensor(out, dtype=torch.float32).transpose(1, 2), None

    AttentionInterface.register("fp8_reference", function)
    AttentionMaskInterface.register("fp8_reference", eager_mask)
    other = copy.deepcopy(model)
    other.set_attn_implementation("fp8_reference")
    return other


@torch.no_grad()
def test_a_models_logits_equal_those_with_the_reference_inside(shipped):
    model, ids = shipped
    batch = torch.zeros(4, 8, dtype=torch.long)
    mask = torch.zeros_like(batch)
    for row, prompt in enumerate(ids):
        batch[row, 8 - len(prompt) :], mask[row, 8 - len(prompt) :] = torch.tensor(prompt), 1
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    logits = model(batch, attention_mask=mask, position_ids=positions).logits
    expected = with_reference(model, attention_of(model))(batch, attention_mask=mask, position_ids=positions).logits
    torch.testing.assert_close(logits[mask.bool()], expected[mask.bool()], atol=1e-3, rtol=0)
    plain = load_model("tiny-llama")(batch, attention_mask=mask, position_ids=positions).logits
    assert 1e-2 < (logits - plain)[mask.bool()].abs().max() < 2  # it does round


@torch.no_grad()
def test_sliding_windows_work_as_far_as_the_mask_says():
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    model = MistralForCausalLM(MistralConfig(**SIZES, sliding_window=3)).eval()
    scales = calibrate(model, tokens(shape=(2, 12)).tolist(), FP8_ATTENTION).scales
    set_attention(model, FP8_ATTENTION).scales = scales
    logits = model(tokens(shape=(2, 12))).logits
    torch.testing.assert_close(
        logits, with_reference(model, attention_of(model))(tokens(shape=(2, 12))).logits, atol=1e-3, rtol=0
    )


def test_restore_and_save_leave_no_trace(shipped, tmp_path):
    from transformers import AutoModelForCausalLM

    model, ids = shipped
    prompt = torch.tensor(ids[:1])
    model.save_pretrained(tmp_path)
    assert "fp8" not in (tmp_path / "config.json").read_text() and "attn_implementation" not in json.dumps(
        json.loads((tmp_path / "config.json").read_text())
    )
    copied = copy.deepcopy(model)
    assert attention_of(copied) is not attention_of(model)
    assert attention_of(copied) is copied.model.layers[0].self_attn.fp8_attention
    set_attention(copied, AttentionPrecision())
    expected = load_model("tiny-llama")(prompt).logits
    assert torch.equal(copied(prompt).logits, expected) and attention_of(copied) is None
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    assert torch.equal(loaded(prompt).logits, expected)
    convert(copied, PrecisionPlan.preset("fp8-e2e-kv"), side="rollout")
    assert attention_of(copied).precision == FP8_ATTENTION
    restore(copied)
    assert torch.equal(copied(prompt).logits, expected)


def test_observing_changes_nothing():
    model = tiny_llama()
    expected = model(tokens()).logits
    with observed(model) as meter:
        assert torch.equal(model(tokens()).logits, expected)
    assert attention_of(model) is None and bool((meter.amax > 0).all())
    assert torch.equal(model(tokens()).logits, expected)


def test_without_scales_it_refuses():
    model = tiny_llama()
    state = set_attention(model, FP8_ATTENTION)
    with pytest.raises(RuntimeError, match="has no scales"):
        model(tokens())
    with pytest.raises(ValueError, match="are for 3 layers; this model has 2"):
        state.scales = AttentionScales.ones(3)
    state.scales = AttentionScales.ones(2)
    assert model(tokens()).logits.isfinite().all()


def test_rounded_p_over_dynamic_scales_is_refused_by_the_plan():
    with pytest.raises(ValueError, match="use probabilities='bf16'"):
        dataclasses.replace(FP8_ATTENTION, scales="per-token-head")


def test_per_token_head_needs_no_scales():
    model = tiny_llama()
    expected = model(tokens()).logits
    set_attention(model, DYNAMIC)
    assert 0 < (model(tokens()).logits - expected).abs().max() < 0.1


def refused_models():
    from transformers import (
        DeepseekV3Config,
        DeepseekV3ForCausalLM,
        Gemma2Config,
        Gemma2ForCausalLM,
        GptOssConfig,
        GptOssForCausalLM,
    )

    mla = dict(q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8)
    experts = dict(n_routed_experts=4, n_group=1, topk_group=1, num_experts_per_tok=2, moe_intermediate_size=16)
    sizes = {**SIZES, "num_key_value_heads": 4}
    yield "MLA", lambda: DeepseekV3ForCausalLM(DeepseekV3Config(**sizes, **mla, **experts, first_k_dense_replace=2))
    yield "softcap", lambda: Gemma2ForCausalLM(Gemma2Config(**SIZES, head_dim=12))
    yield "s_aux", lambda: GptOssForCausalLM(GptOssConfig(**SIZES, head_dim=12, num_local_experts=2))


@pytest.mark.parametrize("what, make", refused_models())
def test_what_it_does_not_cover_is_refused_by_name(what, make):
    model = make().eval()
    with pytest.raises(ValueError, match=what):
        set_attention(model, DYNAMIC)
        model(tokens())


def test_dropout_and_models_without_plain_attention_are_refused():
    model = tiny_llama(attention_dropout=0.1)
    set_attention(model, DYNAMIC)
    model(tokens())
    with pytest.raises(ValueError, match="dropout 0.1"):
        model.train()(tokens())
    broken = tiny_llama()
    del broken.model.layers[1].self_attn.num_key_value_groups
    with pytest.raises(ValueError, match="2 decoder layers and 1 attention modules"):
        set_attention(broken, FP8_ATTENTION)
    assert broken.config._attn_implementation == "sdpa"


# ---- the FP8 cache -------------------------------------------------------------------------------------


def test_decoded_codes_are_the_formats_values():
    codes = torch.arange(256, dtype=torch.uint8).view(2, 128)
    assert torch.equal(decode(codes).view(torch.int32)[:, :127], E4M3.decode(codes).view(torch.int32)[:, :127])
    assert decode(codes)[:, 127].isnan().all()
    assert torch.equal(decode(codes.t())[:127], decode(codes).t()[:127])
    assert decode(encode(torch.tensor([[float("nan"), float("inf"), 1.0]]), 1.0)).isnan().tolist() == [
        [True, True, False]
    ]


@pytest.mark.parametrize("precision", [FP8_ATTENTION, KV_ONLY, DYNAMIC], ids=str)
@pytest.mark.parametrize("make", [lambda: tiny_llama(num_key_value_heads=1), tiny_moe], ids=["llama", "moe"])
@torch.no_grad()
def test_the_cache_gives_what_the_full_forward_gives(precision, make):
    """Float32 linears: what is left between the two is the order of sums, and of code values they hardly have one."""
    model = make()
    batch, lengths = tokens(shape=(3, 9)), torch.tensor([9, 4, 7])
    state = set_attention(model, precision)
    if precision.scales == "per-layer":
        state.scales = calibrate(model, batch.tolist(), precision).scales
    decoder = Decoder(model, **float8_cache(model))
    logits, cache = decoder.prefill(batch, lengths, 12)
    assert isinstance(cache, Float8KVCache)
    new = tokens(seed=4, shape=(3, 2))
    steps = [logits, *(decoder.step(new[:, i], lengths + i, cache) for i in range(2))]
    for row, length in enumerate(lengths.tolist()):
        whole = model(torch.cat([batch[row, :length], new[row]])[None]).logits[0, length - 1 :]
        torch.testing.assert_close(torch.stack([s[row] for s in steps]), whole, atol=2e-5, rtol=0)


def test_the_meter_does_not_see_padding():
    counts = []
    for forward in ("own", "transformers"):
        engine = NativeEngine("tiny-llama", PrecisionPlan.preset("fp8-e2e-kv"), forward=forward)
        engine.calibrate(PROMPTS)
        engine.generate(PROMPTS, SamplingParams(n=2, max_tokens=4), seed=0)
        counts.append(attention_of(engine.model).meter)
    assert torch.equal(counts[0].elements, counts[1].elements)
    torch.testing.assert_close(counts[0].amax, counts[1].amax, rtol=1e-2, atol=0)


class Bfloat16KVCache(KVCache):
    """What FP8 is measured against: the cache really held in BF16."""

    def fields(self, head_dim):
        return ((torch.bfloat16, head_dim),)

    def store(self, layer, kv):
        return (kv.bfloat16(),)

    def load(self, layer, kind, stored):
        return stored[0].float()


def test_bytes_are_half_of_bf16():
    model = load_model("tiny-llama")
    prompts = torch.tensor([[1, 5, 9], [1, 7, 0]]), torch.tensor([3, 2])
    for precision, expected in ((FP8_ATTENTION, 0.5), (DYNAMIC, 0.5 + 4 / (2 * 32))):
        set_attention(model, precision)
        if precision == FP8_ATTENTION:
            attention_of(model).scales = AttentionScales.ones(4)
        _, fp8 = Decoder(model, **float8_cache(model)).prefill(*prompts, 40)
        _, bf16 = Decoder(model, cache_type=Bfloat16KVCache).prefill(*prompts, 40)
        assert bf16.nbytes == 2 * 4 * 2 * 4 * 40 * 32 * 2  # k and v, layers, rows, heads, columns, width, bytes
        assert fp8.nbytes / bf16.nbytes == expected


def peak_megabytes(run):
    """How far `run` raises this process's memory at its highest, by the kernel's own count."""

    def status(name):
        text = open("/proc/self/status", encoding="ascii").read()
        return int(re.search(rf"{name}:\s+(\d+) kB", text)[1]) / 1024

    with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")
    before = status("VmRSS")
    run()
    return status("VmHWM") - before


@torch.no_grad()
def cache_peaks():
    """Peak megabytes of an FP8 and of a BF16 cache of 48 layers x 64 rows x 4 heads x 96 columns x 32."""
    x = torch.randn(64, 96, 4, 32)
    positions = torch.arange(96).expand(64, 96)
    state = set_attention(tiny_llama(num_hidden_layers=48), FP8_ATTENTION)
    state.scales = AttentionScales.ones(48)

    def use(make):
        def run():
            cache = make(48, 64, 4, 96, 32, torch.device("cpu"))
            for layer in range(48):
                cache.append(layer, torch.stack((x, x), dim=2), cache.places(positions))
                cache.read(layer, 96)

        return peak_megabytes(run)

    use(lambda *shape: Float8KVCache(state, *shape))  # compiles
    return use(lambda *shape: Float8KVCache(state, *shape)), use(Bfloat16KVCache)


@pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="peak memory is read from Linux's /proc and glibc's allocator"
)
def test_peak_memory_is_about_half_of_bf16():
    """144 MB of keys and values in BF16, 72 in FP8, in a process whose allocator keeps nothing: a tensor's memory
    is mapped when it comes and unmapped when it goes, whatever ran before."""
    code = "import json; from tests.test_attention import cache_peaks; print(json.dumps(cache_peaks()))"
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    fp8, bf16 = json.loads(done.stdout.splitlines()[-1])
    assert bf16 > 140 and 70 < fp8 < 0.6 * bf16


# ---- both sides ----------------------------------------------------------------------------------------


def test_fp8_attention_on_one_side_is_a_gap_and_on_both_is_none():
    plan = PrecisionPlan.preset("fp8-e2e-kv")
    trainer = Trainer("tiny-llama", plan)
    engine = NativeEngine(trainer.model, plan, tokenizer=trainer.tokenizer)
    with pytest.raises(RuntimeError, match="engine.calibrate"):
        engine.generate(PROMPTS, SamplingParams(n=8, max_tokens=6), seed=2)
    assert engine.calibrate(PROMPTS)["tokens"] == sum(len(trainer.tokenizer(p).input_ids) for p in PROMPTS)
    rollout = engine.generate(PROMPTS, SamplingParams(n=8, max_tokens=6), seed=2)
    one_side = (rollout.logprobs - trainer.score(rollout))[rollout.mask].abs().mean()
    both = Trainer("tiny-llama", dataclasses.replace(plan, trainer=plan.rollout))
    attention_of(both.model).scales = engine.attention_scales
    two_sides = (rollout.logprobs - both.score(rollout))[rollout.mask].abs().mean()
    assert one_side > 5e-3 and two_sides < 2e-3
    rewards = torch.arange(32) % 3
    metrics = both.step(rollout, rewards.float())
    assert metrics["grad_norm"] > 0 and np.isfinite(metrics["grad_norm"])


def test_batch_invariant_kernels_are_refused():
    with pytest.raises(ValueError, match="do not cover FP8 attention"):
        NativeEngine("tiny-llama", PrecisionPlan.preset("fp8-e2e-kv"), kernels="batch_invariant")
