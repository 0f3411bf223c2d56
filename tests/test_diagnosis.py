"""The report of `diagnose`: what it says about a gap, about none, and where its numbers come from."""

import csv
import json

import pytest
import torch

from fp8lab.cli import main
from fp8lab.diagnosis import PARTS, diagnose, diagnose_model, perplexity
from fp8lab.models import load_model
from fp8lab.precision import PrecisionPlan

TEXT = "".join(f"{a}+{b}={a + b}" for a in range(10, 40) for b in range(7, 40, 9))


pytestmark = pytest.mark.usefixtures("one_thread")


def test_the_command_writes_a_report(tmp_path, capsys):
    (tmp_path / "sums.txt").write_text(TEXT)
    out = tmp_path / "report"
    arguments = ["diagnose", "tiny-llama", "--text", str(tmp_path / "sums.txt"), "--tokens", "512", "--out", str(out)]
    assert main([*arguments, "--json"]) == 0
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    assert report == json.loads((out / "report.json").read_text())
    assert f"{PARTS}/{PARTS}" in captured.err and "report.md" in captured.err  # the progress bar is full
    assert report["tokens"] == 508 and report["backend"] == "emulated" and report["plan"]["name"] == "fp8-rollout"
    with open(out / "layers.csv", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(report["layers"]) == 28
    worst = [float(row["first_order_k3"]) for row in rows]
    assert worst == sorted(worst, reverse=True) == [row["first_order_k3"] for row in report["layers"]]
    text = (out / "report.md").read_text()
    gap = report["gaps"]["rollout and trainer"]
    assert f"{gap['mean_abs_difference']:.3f} nats a token" in text and "NeMo RL docs/guides/grpo.md" in text
    assert gap["mean_abs_low"] < gap["mean_abs_difference"] < gap["mean_abs_high"]
    assert report["gaps"]["trainer and BF16"]["mean_abs_difference"] == 0
    assert 0 < report["fallbacks"][-1]["removed"] < 1 and report["fallbacks"][-1]["flops_kept"] <= 0.2 + 1e-9


def test_without_a_text_the_rollout_side_samples():
    seen = []
    found = diagnose_model("tiny-llama", PrecisionPlan.preset("fp8-rollout"), tokens=120, on_progress=seen.append)
    assert len(seen) == PARTS and seen[0] == "loading" and seen[1] == "sampling" and seen[-1] == "done"
    assert "sampled by the rollout side" in found.as_markdown() and 30 <= found.summary["tokens"] <= 240


def test_end_to_end_has_no_gap_by_construction_and_says_so():
    model, tokens = load_model("tiny-llama"), torch.arange(4, 68).view(4, 16)
    found = diagnose(model, PrecisionPlan.preset("fp8-e2e"), tokens)
    gaps = found.summary["gaps"]
    assert gaps["rollout and trainer"]["mean_abs_difference"] == 0
    assert gaps["rollout and BF16"]["mean_abs_difference"] == gaps["trainer and BF16"]["mean_abs_difference"] > 0
    assert "No gap" in found.as_markdown() and "by construction" in found.as_markdown()
    with pytest.raises(ValueError, match="no FP8 linear"):
        diagnose(model, PrecisionPlan.preset("bf16"), tokens)


def test_perplexity_by_hand():
    logprobs = torch.log(torch.tensor([[1.0, 0.5, 0.25], [1.0, 0.5, 0.25]])).double()
    mask = torch.tensor([[False, True, True]] * 2)
    found = perplexity(logprobs, logprobs + 0.1, mask)
    assert found["perplexity"] == pytest.approx(8**0.5)
    assert found["ratio"] == found["ratio_low"] == found["ratio_high"] == pytest.approx(1.1052, abs=1e-4)


def test_a_missing_text_or_model_is_a_clear_error(tmp_path, capsys):
    assert main(["diagnose", "tiny-llama", "--text", str(tmp_path / "no.txt"), "--out", str(tmp_path)]) == 1
    assert main(["diagnose", "no-such-model", "--out", str(tmp_path)]) == 1
    assert main(["diagnose", "tiny-llama", "--plan", "fp4", "--out", str(tmp_path)]) == 1
    assert "precision plan is 'fp4'" in capsys.readouterr().err
