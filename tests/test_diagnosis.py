"""The report of `diagnose`: what it says about a gap, about none, and where its numbers come from."""

import csv
import json
import re

import pytest
import torch

from fp8lab.attribution import attribute_kv
from fp8lab.cli import main
from fp8lab.diagnosis import BUDGETS, PARTS, conclusion, diagnose, diagnose_model, perplexity
from fp8lab.diagnostics import k3
from fp8lab.models import load_model
from fp8lab.precision import PrecisionPlan
from fp8lab.scoring import score_side, shared_copy

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
    assert re.search(r"^\d+ s, \d+ s of CPU time, \d+ threads$", captured.err, re.MULTILINE)
    assert report["tokens"] == 504 and report["backend"] == "emulated" and report["plan"]["name"] == "fp8-rollout"
    with open(out / "layers.csv", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(report["layers"]) == 28
    worst = [float(row["first_order_k3"]) for row in rows]
    assert worst == sorted(worst, reverse=True) == [row["first_order_k3"] for row in report["layers"]]
    text = (out / "report.md").read_text()
    gap = report["gaps"]["rollout and trainer"]
    assert f"{gap['mean_abs_difference']:.3f} nats a token" in text and "NeMo RL docs/guides/grpo.md" in text
    for name in ("mean_abs", "token_mult_prob_error", "gen_kl_error"):
        assert gap[f"{name}_low"] < gap[name] < gap[f"{name}_high"]
    assert gap["mean_abs"] == pytest.approx(gap["mean_abs_difference"])
    assert report["gaps"]["trainer and BF16"]["mean_abs_difference"] == 0
    best = report["fallbacks"][-1]
    assert best["removed_low"] < best["removed"] < best["removed_high"]
    assert all(
        row["first_order_k3_low"] < row["first_order_k3"] < row["first_order_k3_high"] for row in report["layers"]
    )
    assert text.count(f"{best['removed']:.4g} [{best['removed_low']:.4g}, {best['removed_high']:.4g}]") == 1
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


def test_a_plan_with_an_fp8_kv_cache_is_calibrated_on_the_tokens():
    """`fp8-e2e-kv` has FP8 linears on both sides, and FP8 attention in the rollout alone: that makes the gap."""
    model, tokens = load_model("tiny-llama"), torch.randint(4, 90, (24, 16), generator=torch.Generator().manual_seed(0))
    found = diagnose(model, PrecisionPlan.preset("fp8-e2e-kv"), tokens)
    gap = found.summary["gaps"]["rollout and trainer"]
    assert 0 < gap["mean_abs_low"] < gap["mean_abs"] and "No gap" not in found.as_markdown()
    kv = attribute_kv(model, PrecisionPlan.preset("fp8-e2e-kv"), tokens)  # among BF16 linears
    assert 0 < kv["in_k3"].sum() < gap["policy_kl_error"]  # FP8 linears round what it moved to other codes: more gap


def test_a_moe_says_what_is_not_attributed_and_how_much_of_the_gap_is_left():
    """Its fused experts: 2 of 8 of them, 6 / 10 of the planned FLOPs. By hand: attention kept in BF16 by the plan."""
    plan, model = PrecisionPlan.preset("fp8-rollout"), load_model("tiny-qwen3-moe")
    tokens = torch.randint(4, 90, (24, 16), generator=torch.Generator().manual_seed(0))
    found = diagnose(model, plan, tokens)
    missing = found.summary["not_attributed"]
    assert missing["expert_tensors"] == 8 and missing["flops_share"] == pytest.approx(0.6) and not missing["attention"]
    names = list(found.layers["name"])
    assert len(names) == 16 and all(name.split(".")[3] == "self_attn" for name in names)
    assert found.layers["flops_share"].sum() == pytest.approx(0.4)
    assert len(found.fallbacks) == 1 + len(BUDGETS) and found.fallbacks["flops_kept"].max() <= max(BUDGETS) + 1e-9
    rest, mask = tokens[12:], torch.ones(12, 16, dtype=torch.bool)  # attribution took the first half
    mask[:, 0] = False
    work, kept = shared_copy(model), plan.with_bf16(modules=["self_attn.*"], side="rollout")
    bf16, whole, left = (
        score_side(work, p, s, rest, 1.0) for p, s in ((plan, "trainer"), (plan, "rollout"), (kept, "rollout"))
    )
    share = k3(bf16 - left)[mask].mean() / k3(bf16 - whole)[mask].mean()
    assert missing["k3_left"] == pytest.approx(share.item(), rel=1e-6) and 0 < missing["k3_left"] < 1
    assert missing["k3_left_low"] < missing["k3_left"] < missing["k3_left_high"]
    said = (
        f"fused experts (8 tensors, 60% of the FP8-planned FLOPs); with all attributed modules in BF16, {share:.0%} ["
    )
    assert (
        said in conclusion(found)
        and said in found.as_markdown()
        and "The ten attributed modules" in found.as_markdown()
    )
    assert json.loads(json.dumps(found.as_dict()))["not_attributed"] == missing
    both = conclusion(diagnose(model, PrecisionPlan.preset("fp8-e2e"), tokens))
    assert "No gap" in both and "fused experts (8 tensors" in both and "is not known" in both


def test_what_is_not_attributed_of_a_dense_model_is_nothing_or_its_cache():
    found = diagnose_model("tiny-llama", PrecisionPlan.preset("fp8-rollout"), tokens=64)
    assert found.summary["not_attributed"] == {} and "ot attributed" not in found.as_markdown()
    assert "The ten modules" in found.as_markdown() and found.layers["flops_share"].sum() == pytest.approx(1)
    found = diagnose_model("tiny-llama", PrecisionPlan.preset("fp8-rollout-kv"), tokens=64)  # sampled with an FP8 cache
    missing = found.summary["not_attributed"]
    assert (missing["expert_tensors"], missing["flops_share"], missing["attention"]) == (0, 0, True)
    left = f"with all attributed modules in BF16, {missing['k3_left']:.0%} ["
    assert f"**Not attributed:** the FP8 KV cache and attention; {left}" in conclusion(found)


@pytest.mark.parametrize("text", [None, TEXT])
@pytest.mark.parametrize("tokens", [0, -5, 2.5, True, "64", None, float("nan")])
def test_tokens_are_a_count(tokens, text):
    with pytest.raises(ValueError, match=r"tokens is .*; it must be an integer >= (1|64)$"):
        diagnose_model("tiny-llama", PrecisionPlan.preset("fp8-rollout"), text, tokens=tokens)


def test_a_text_wants_a_window_of_tokens():
    with pytest.raises(ValueError, match="tokens is 63, of type int; it must be an integer >= 64"):
        diagnose_model("tiny-llama", PrecisionPlan.preset("fp8-rollout"), TEXT, tokens=63)
    with pytest.raises(ValueError, match="the text has 5 tokens; one window takes 64: give a longer text"):
        diagnose_model("tiny-llama", PrecisionPlan.preset("fp8-rollout"), "1+2=3", tokens=64)


def test_few_tokens_of_a_real_model_are_called_few(monkeypatch):
    model, tokens = load_model("tiny-llama"), torch.arange(4, 68).view(4, 16)
    assert "tokens are fewer than" not in diagnose(model, PrecisionPlan.preset("fp8-rollout"), tokens).as_markdown()
    monkeypatch.setattr("fp8lab.diagnosis.REAL_MODEL", 100_000)
    found = diagnose(model, PrecisionPlan.preset("fp8-rollout"), tokens)
    assert "**60 tokens are fewer than the 4,000 that a figure of a real model needs" in found.as_markdown()
    assert found.as_dict()["warning"].startswith("60 tokens")
    monkeypatch.setattr("fp8lab.diagnosis.REAL_TOKENS", 60)
    assert diagnose(model, PrecisionPlan.preset("fp8-rollout"), tokens).summary["warning"] == ""


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


def test_every_table_of_the_report_is_one():
    """GitHub's rule: as many cells in each row as in the header; a bar inside a cell is escaped (`max |d|`)."""
    found = diagnose_model("tiny-llama", PrecisionPlan.preset("fp8-rollout"), tokens=64)
    tables = re.findall(r"(?:^\|.*\n?)+", found.as_markdown(), re.M)
    assert len(tables) == 5 and "max \\|d\\|" in tables[0]
    for table in tables:
        rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in table.strip().splitlines()]
        assert len({len(row) for row in rows}) == 1 and set(map(str.strip, rows[1])) == {"---"}


@pytest.mark.parametrize(("low", "words"), [(0.1, "removes 30% [10%, 50%]"), (-0.2, "shows no gain")])
def test_a_gain_that_may_be_none_is_not_called_one(low, words):
    found = diagnose_model("tiny-llama", PrecisionPlan.preset("fp8-rollout"), tokens=64)
    best = found.fallbacks[found.fallbacks["order"] == "recommended"].index[-1]
    found.fallbacks.loc[best, ["removed", "removed_low", "removed_high"]] = (0.3, low, 0.5)
    assert words in conclusion(found)
