"""The step-time model against published figures; sources stand beside them."""

import dataclasses

import pytest

from fp8lab import coverage, speed
from fp8lab.precision import PrecisionPlan
from fp8lab.speed import GPUS, PARAMETERS, ModelShape, Workload

MODELS = {
    "llama": "meta-llama/Llama-3.1-8B-Instruct",
    "qwen": "Qwen/Qwen3-8B-Base",
    "moe": "Qwen/Qwen3-30B-A3B",
    "mla": "moonshotai/Moonlight-16B-A3B-Instruct",
}
PLANS = ("bf16", "fp8-rollout", "fp8-e2e", "fp8-rollout-kv", "fp8-e2e-kv")
DEFAULT = Workload()
E2E = Workload(prompts=64, generations=32, response_tokens=1200, gpus=16, score_passes=2)  # NeMo RL's e2e recipe
MOE = Workload(response_tokens=2000, expert_parallel=8, micro_batch_tokens=4096)


@pytest.fixture(scope="module")
def shapes():
    return {name: ModelShape.of(model) for name, model in MODELS.items()}


def times(shape, gpu="H100", work=DEFAULT, plans=PLANS, **parameters):
    return {p: speed.step(shape, PrecisionPlan.preset(p), GPUS[gpu], work, parameters=parameters) for p in plans}


def total(shape):
    return sum(size * copies for _, size, copies, _ in shape.linears) + shape.head + shape.other


def test_shapes_are_the_published_sizes(shapes):
    assert total(shapes["llama"]) == 8_030_261_248  # "8.03B"
    assert round(total(shapes["qwen"]) / 1e9, 1) == 8.2  # Qwen3-8B's card
    assert round(total(shapes["moe"]) / 1e9, 1) == 30.5  # Qwen3-30B-A3B's card: 30.5B, 3.3B activated
    used = sum(size * active for _, size, _, active in shapes["moe"].linears) + shapes["moe"].head
    assert used / 1e9 == pytest.approx(3.3, abs=0.3)
    assert round(total(shapes["mla"]) / 1e9, 1) == 16.0  # Moonlight's card: 15.96B
    assert shapes["qwen"].kv_elements == 2 * 36 * 8 * 128
    assert shapes["mla"].kv_elements == 27 * (512 + 64)  # a latent vector and the rotary key, DeepSeek-V2's MLA


@pytest.mark.parametrize("model", [*MODELS.values(), "tiny-llama", "tiny-qwen3-moe"])
def test_every_parameter_is_counted_once(model):
    built = coverage.meta_model(model)
    assert total(ModelShape.of(built)) == sum(p.numel() for p in built.parameters())


def test_a_tied_head_is_the_embedding_and_is_counted_once():
    tied = {"model_type": "llama", "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    tied |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1000, "tie_word_embeddings": True}
    shape, built = ModelShape.of(tied), coverage.meta_model(tied)
    assert shape.head == 128 * 1000 and total(shape) == sum(p.numel() for p in built.parameters())


def test_kv_capacities_of_nemo_rl_pull_request_1212(shapes):
    """249,952 tokens were calibrated on; 299,344 and 598,672 are predicted."""
    found = [
        speed.kv_capacity(shapes["qwen"], PrecisionPlan.preset(p), GPUS["H100"])
        for p in ("bf16", "fp8-rollout", "fp8-rollout-kv")
    ]
    assert found == pytest.approx([249_952, 299_344, 598_672], rel=0.01)


def test_rollout_gains_on_qwen3_8b(shapes):
    gains = speed.gains(times(shapes["qwen"]))
    linear, kv = gains["fp8-rollout"]["rollout"], gains["fp8-rollout-kv"]["rollout"]
    assert (1 + kv) / (1 + linear) - 1 == pytest.approx(0.30, abs=0.01), "calibrated on this"
    assert kv == pytest.approx(0.48, abs=0.05), "NeMo RL PR 1212: about 48 % in total"
    assert linear == pytest.approx(0.15, abs=0.05), "verl docs/advance/fp8.md: 12 to 18 %"


def test_recalibration_share(shapes):
    """Published: 2 to 3 % of a step. Every 256 of 512 answers scored again costs the model about twice that."""
    phases = times(shapes["qwen"])["fp8-rollout-kv"]
    assert 0.025 <= phases["calibrate"] / sum(phases.values()) <= 0.075


def test_step_gain_of_linear_layers(shapes):
    """NeMo RL docs/fp8.md: 15 to 25 % less step time, Llama 3.1 8B end to end; training alone: FP8-RL about 20 %."""
    gains = speed.gains(times(shapes["llama"], work=E2E))
    assert 0.15 <= gains["fp8-e2e"]["step"] <= 0.25
    assert 1 - 1 / (1 + gains["fp8-e2e"]["train"]) == pytest.approx(0.20, abs=0.05)
    assert gains["fp8-rollout"]["step"] < gains["fp8-e2e"]["step"]


def test_mixture_of_experts(shapes):
    """Rollout: FP8-RL (arXiv 2601.18150), 30 to 50 % on a 30B MoE. Training on 8 GPUs: verl issue 7232 got slower."""
    gains = speed.gains(times(shapes["moe"], "H200", MOE))
    assert 0.25 <= gains["fp8-rollout"]["rollout"] <= 0.55
    assert gains["fp8-e2e"]["train"] < 0
    plans = ("bf16", "fp8-e2e")
    cheap = speed.gains(times(shapes["moe"], "H200", MOE, plans, eager_kernel=PARAMETERS["graph_kernel"].value))
    assert cheap["fp8-e2e"]["train"] > 0, "the sign rests on the assumed launch cost, as the module says"


def test_small_batches_and_short_answers_gain_nothing(shapes):
    small = Workload(prompts=8, generations=8, prompt_tokens=100, response_tokens=200)
    assert speed.gains(times(shapes["llama"], work=small))["fp8-e2e"]["step"] < 0.02


def test_longer_answers_gain_more_from_the_kv_cache(shapes):
    found = [
        speed.gains(times(shapes["qwen"], work=Workload(response_tokens=n)))["fp8-rollout-kv"]["rollout"]
        for n in (500, 2000, 8000)
    ]
    assert found == sorted(found)


def test_layers_kept_in_bf16_cost_speed(shapes):
    plans = [PrecisionPlan.preset("fp8-e2e").with_bf16(last=n) for n in (0, 9, 36)]
    seconds = [sum(speed.step(shapes["qwen"], plan, GPUS["H100"], Workload()).values()) for plan in plans]
    bf16 = sum(times(shapes["qwen"], plans=["bf16"])["bf16"].values())
    assert seconds[0] < seconds[1] < seconds[2]
    assert seconds[2] == pytest.approx(bf16, rel=0.02), "all layers kept: BF16, but for the slower refit"


def test_costs():
    one, faster = (speed.cost(s, 1000, GPUS["H100"], 8) for s in (148.0, 100.0))
    assert one["gpu_hours"] == pytest.approx(148 * 1000 / 3600 * 8)
    assert one["kwh"] == pytest.approx(one["gpu_hours"] * 0.7 * 0.8)
    assert 1 - faster["gpu_hours"] / one["gpu_hours"] == pytest.approx(0.32, abs=0.01), "48 % more is 32 % fewer"


def test_impossible_asks_say_why(shapes):
    with pytest.raises(ValueError, match="A100 has no FP8 tensor cores"):
        times(shapes["llama"], "A100", plans=["fp8-e2e"])
    assert times(shapes["llama"], "A100", plans=["bf16"])
    with pytest.raises(ValueError, match="raise tensor_parallel"):
        times(shapes["moe"], "H100", plans=["bf16"])
    with pytest.raises(ValueError, match="unknown parameters .*'speed'"):
        times(shapes["llama"], speed=2)
    with pytest.raises(ValueError, match="gpus is 0"):
        Workload(gpus=0)
    with pytest.raises(ValueError, match="no multiple"):
        Workload(gpus=8, tensor_parallel=3)


def test_every_number_has_a_source():
    assert all(p.source and p.unit for p in PARAMETERS.values())
    assert all(gpu.source for gpu in GPUS.values())
    assert {f.name for f in dataclasses.fields(speed.GPU)} >= {"bandwidth", "watts"}
