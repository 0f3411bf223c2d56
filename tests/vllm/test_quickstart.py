"""The quickstart's three arms, a few steps each, with rollouts by vLLM; what it reports of the two parts of the gap."""

import dataclasses

import pytest

from fp8lab.experiment import ExperimentConfig, resume, run
from fp8lab.recipes import load_recipe

pytestmark = pytest.mark.vllm
ARMS = ("bf16", "fp8-rollout", "fp8-e2e")


@pytest.fixture(scope="module")
def arms(tmp_path_factory):
    """Arm -> rows of its metrics."""
    folder, rows = tmp_path_factory.mktemp("arms"), {}
    for arm in ARMS:
        size = {"steps": 3, "prompts_per_step": 16, "eval_prompts": 32, "eval_samples": 1, "eval_every": 3}
        config = dataclasses.replace(load_recipe(arm), engine="vllm", checkpoint_every=1, **size)
        rows[arm] = run(config, folder / arm).rows("metrics")
    rows["folder"] = folder
    return rows


def test_the_report_shows_engine_gap_and_precision_gap_apart(arms):
    steps = {arm: [row for row in arms[arm] if "engine_gap" in row] for arm in ARMS}
    assert all(len(rows) == 3 for rows in steps.values())
    mean = {
        (arm, key): sum(row[key] for row in rows) / len(rows)
        for arm, rows in steps.items()
        for key in ("engine_gap", "precision_gap", "mean_abs_difference")
    }
    print("arm           engine gap  precision gap  together (mean |d|, nats)")
    for arm in ARMS:
        parts = [mean[arm, key] for key in ("engine_gap", "precision_gap", "mean_abs_difference")]
        print(f"{arm:12} {parts[0]:11.1e} {parts[1]:14.1e} {parts[2]:9.1e}")
    for arm in ("bf16", "fp8-e2e"):  # equal formats on both sides
        assert mean[arm, "precision_gap"] == 0
        assert mean[arm, "engine_gap"] > 0
    assert mean["bf16", "engine_gap"] < mean["fp8-e2e", "engine_gap"] < 1e-2  # FP8 enlarges last-bit differences
    assert mean["fp8-rollout", "precision_gap"] > 5 * mean["fp8-rollout", "engine_gap"]
    for arm in ARMS:  # t - g = (t - s) + (s - g)
        together = mean[arm, "engine_gap"] + mean[arm, "precision_gap"]
        assert mean[arm, "mean_abs_difference"] <= together * 1.01 + 1e-6


def test_a_run_on_vllm_resumes(arms):
    import shutil

    log_folder = arms["folder"] / "fp8-e2e"
    shutil.rmtree(log_folder / "checkpoints" / sorted(p.name for p in (log_folder / "checkpoints").iterdir())[-1])
    rows = resume(log_folder).rows("metrics")
    assert [row["step"] for row in rows] == [row["step"] for row in arms["fp8-e2e"]]
    assert rows[-1]["validation_accuracy"] == arms["fp8-e2e"][-1]["validation_accuracy"]


def test_an_engine_that_is_not_known_is_refused():
    with pytest.raises(ValueError, match="native, vllm"):
        ExperimentConfig(engine="sglang")
