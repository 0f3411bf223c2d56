"""The step-time model against published figures; sources stand beside them."""

import ast
import dataclasses
import inspect
import re

import pytest

from fp8lab import coverage, speed
from fp8lab.precision import PrecisionPlan
from fp8lab.speed import DEFAULTS, GPUS, PARAMETERS, ModelShape, Workload

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


@pytest.mark.parametrize(
    ("tokens", "total", "within"),
    [(2000, 0.628, False), (3000, 0.528, True), (4000, 0.475, True), (5000, 0.442, True), (6000, 0.420, False)]
    + [(7000, 0.403, False), (8000, 0.440, True), (9000, 0.528, True), (10_000, 0.533, False)],
)
def test_48_percent_holds_for_some_answer_lengths_only(shapes, tokens, total, within):
    """The third assumption: calibrated anew for answers of other lengths, the total is something else."""
    work = Workload(response_tokens=tokens)
    fixed = speed.fit_decode_fixed(shapes["qwen"], GPUS["H100"], work)
    gains = speed.gains(times(shapes["qwen"], work=work, decode_fixed=fixed))
    linear, kv = gains["fp8-rollout"]["rollout"], gains["fp8-rollout-kv"]["rollout"]
    assert (1 + kv) / (1 + linear) == pytest.approx(1.30)
    assert kv == pytest.approx(total, abs=0.002) and (abs(kv - 0.48) <= 0.05) == within


def test_decode_fixed_is_what_the_calibration_gives(shapes):
    fixed = speed.fit_decode_fixed(shapes["qwen"], GPUS["H100"], DEFAULT)
    assert PARAMETERS["decode_fixed"].value == pytest.approx(fixed, rel=0.005)
    with pytest.raises(ValueError, match=r"no decode_fixed > 0 .* \+30%"):
        speed.fit_decode_fixed(shapes["qwen"], GPUS["H100"], Workload(response_tokens=500))


def share_of_recalibration(shape, **parameters):
    phases = times(shape, plans=["fp8-rollout-kv"], **parameters)["fp8-rollout-kv"]
    return phases["calibrate"] / sum(phases.values())


def test_recalibration_is_missed(shapes):
    """The stated exception to "within five points": published 2 to 3 % of a step, predicted 10.1 %.

    NeMo RL runs log-probs over the whole train_data once more (grpo.py, recompute_kv_scales), so a scoring pass is the
    charge. Even forward and backward at the speed of the best GEMM, and nothing else, miss it.
    """
    phases = times(shapes["qwen"])["fp8-rollout-kv"]
    assert phases["calibrate"] == phases["score"]
    assert share_of_recalibration(shapes["qwen"]) == pytest.approx(0.101, abs=0.001)
    bound = share_of_recalibration(shapes["qwen"], train_share=PARAMETERS["gemm_bf16"].value)
    assert bound == pytest.approx(0.081, abs=0.001) and bound > 0.03 + 0.05
    assert all(word in " ".join(speed.__doc__.split()) for word in ("MISSED", "model says 10 %", "8.1 %", "2 to 3 %"))


def test_seconds_are_too_few(shapes):
    """NeMo RL PR 1560: Llama 3.1 8B, 16 H100, 2,048 answers of 1,060 tokens with the question: 97.7 s a step."""
    work = Workload(prompts=64, generations=32, response_tokens=1060 - 150, gpus=16)
    assert sum(times(shapes["llama"], work=work, plans=["bf16"])["bf16"].values()) == pytest.approx(32.5, abs=0.1)
    assert "32 s where NeMo RL reports 97.7 s" in speed.__doc__


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
    with pytest.raises(ValueError, match="raise tensor_parallel"):
        times(shapes["moe"], "H100", plans=["bf16"])
    with pytest.raises(ValueError, match="unknown parameters .*'speed'"):
        times(shapes["llama"], speed=2)
    with pytest.raises(ValueError, match="gemm_fp8 is 0"):
        times(shapes["llama"], gemm_fp8=0)
    assert times(shapes["llama"], eager_kernel=0)
    with pytest.raises(ValueError, match="128 experts are no multiple of expert_parallel 3"):
        times(shapes["moe"], "H200", dataclasses.replace(MOE, gpus=12, expert_parallel=3), plans=["bf16"])


@pytest.mark.parametrize("plan", ["fp8-rollout", "fp8-e2e", "fp8-rollout-kv"])
def test_an_a100_has_no_fp8(shapes, plan):
    plan, gpu = PrecisionPlan.preset(plan), GPUS["A100"]
    for ask in (
        lambda plan: speed.step(shapes["llama"], plan, gpu, DEFAULT),
        lambda plan: speed.decode_step(shapes["llama"], plan, gpu, sequences=8, context=1000),
        lambda plan: speed.kv_capacity(shapes["llama"], plan, gpu),
    ):
        with pytest.raises(ValueError, match="A100 has no FP8 tensor cores; .* H100, H200, B200"):
            ask(plan)
        assert ask(PrecisionPlan.preset("bf16"))


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [(field.name, value, "must be") for field in dataclasses.fields(Workload) for value in (0, -1, float("nan"), "8")]
    + [(name, 2.5, "integer") for name in DEFAULTS if DEFAULTS[name].unit.startswith(("GPUs", "prompts"))]
    + [("response_tokens", float("inf"), "finite"), ("prompts", True, "integer")]
    + [
        ("tensor_parallel", 3, "no multiple"),
        ("expert_parallel", 64, "no multiple"),
        ("tensor_parallel", 16, "no mul"),
    ],
)
def test_a_workload_is_checked(field, value, says):
    with pytest.raises(ValueError, match=f"{field}.*{says}|{says}.*{field}"):
        Workload(**{field: value})


@pytest.mark.parametrize(
    "change", [{"bf16": 0}, {"fp8": -1}, {"bandwidth": float("nan")}, {"watts": "700"}, {"name": "H1"}]
)
def test_a_gpu_is_checked(change):
    with pytest.raises(ValueError, match=next(iter(change)) if "name" not in change else "no GPU 'H1' .* H100"):
        dataclasses.replace(GPUS["H100"], **change)


@pytest.mark.parametrize(
    "change", [{"sequences": 0}, {"context": -1}, {"tensor_parallel": 0}, {"sequences": float("nan")}]
)
def test_a_decode_step_is_checked(shapes, change):
    asked = {"sequences": 8, "context": 1000} | change
    with pytest.raises(ValueError, match=f"{next(iter(change))} is"):
        speed.decode_step(shapes["llama"], PrecisionPlan.preset("bf16"), GPUS["H100"], **asked)


@pytest.mark.parametrize("change", [{"price": -1}, {"load": 1.5}, {"load": float("nan")}, {"steps": 0}, {"gpus": 0.5}])
def test_a_cost_is_checked(change):
    asked = {"seconds": 1.0, "steps": 10, "gpu": GPUS["H100"], "gpus": 8} | change
    with pytest.raises(ValueError, match=f"{next(iter(change))} is"):
        speed.cost(**asked)


ASSUMPTIONS = {"graph_kernel", "eager_kernel", "rollout_kernels", "operand_kernels"}
ASSUMPTIONS |= {"prompt_tokens", "response_tokens", "price", "load"}
PLACE = r"https://\S+\.\w+/|arXiv \d{4}\.\d{5}|[\w-]+/[\w-]+ [\w/.-]+\.(md|py|yaml)\b"
"""An address, an arXiv number, or owner/repository and a file."""


def test_every_number_has_a_source_or_is_an_assumption():
    numbers = PARAMETERS | DEFAULTS
    assert len(numbers) == len(PARAMETERS) + len(DEFAULTS)
    assert {name for name, number in numbers.items() if number.assumption} == ASSUMPTIONS
    unsourced = [name for name, x in numbers.items() if not (x.assumption or re.search(PLACE, x.source))]
    assert unsourced == [] and all(x.source and x.unit for x in numbers.values())
    assert all(re.search(PLACE, gpu.source) for gpu in GPUS.values())
    assert not re.search(PLACE, "assumed (5-10 us is usual)") and not re.search(PLACE, "NeMo RL lm_policy.py")


def test_workload_and_cost_take_their_defaults_from_the_table():
    found = {field.name: field.default for field in dataclasses.fields(Workload)}
    found |= {k: p.default for k, p in inspect.signature(speed.cost).parameters.items() if p.default is not p.empty}
    assert found == {name: number.value for name, number in DEFAULTS.items()}


EQUATIONS = ["kv_capacity", "kv_bytes", "decode_step", "_touched", "step", "_linear_seconds", "_train_seconds"]


def test_no_number_hides_in_the_equations():
    """0, 1 and 2 are structure (2 FLOPs, 2 bytes, 2 operands, half an answer); any other is for the table."""
    for name in EQUATIONS:
        tree = ast.parse(inspect.getsource(getattr(speed, name)))
        constants = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
        assert {x for x in constants if isinstance(x, int | float)} <= {0, 1, 2}, name
