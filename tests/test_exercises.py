"""Every exercise's solution is accepted, its starting point is not, and wrong answers get a hint, never an exception.

Solutions are taken from notebooks/solutions, tensors from the notebooks' own cells.
"""

import runpy
from pathlib import Path

import nbformat
import pytest
import torch

from fp8lab.conversion import convert
from fp8lab.precision import LinearPrecision, PrecisionPlan
from fp8lab.ui import exercises, exercises_moe

ROOT = Path(__file__).resolve().parents[1]


def solution(name):
    return runpy.run_path(str(ROOT / "notebooks" / "solutions" / f"{name}.py"))


def cells(name, *ids):
    """What these cells of a notebook define."""
    notebook = nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)
    found = {cell.id: cell.source for cell in notebook.cells if cell.cell_type == "code"}
    space = {}
    exec("from fp8lab.ui import lessons; lessons.start = lambda: ''; import fp8lab.ui.plots as _p", space)
    for each in ids:
        exec(found[each], space)
    return space


def test_01():
    answer = solution("01_numbers")
    assert exercises.check_code(answer["code"], 0.4375, "e4m3").ok
    assert exercises.check_bad_number(answer["number"]).ok and exercises.check_bad_number(0.0014).ok
    gradient = torch.tensor([3e-7, 2e-6, 1.5e-5, 4e-4])
    assert exercises.check_multiplier(gradient, answer["multiplier"]).ok
    for wrong, hint in (
        (exercises.check_code(answer["code"] | 0x80, 0.4375, "e4m3"), "sign bit"),
        (exercises.check_code(answer["code"] + 1, 0.4375, "e4m3"), "exponent is right"),
        (exercises.check_code(0, 0.4375, "e4m3"), "power of two"),
        (exercises.check_code("0x38", 0.4375, "e4m3"), "integer"),
        (exercises.check_bad_number(1.0), "cliffs"),
        (exercises.check_bad_number(1e-5), "becomes zero"),
        (exercises.check_bad_number(0), "zero"),
        (exercises.check_multiplier(gradient, 1.0), "become zero"),
        (exercises.check_multiplier(gradient, 1e9), "clamped"),
        (exercises.check_multiplier(gradient, -1), "positive"),
    ):
        assert not wrong.ok and hint in wrong.message


def test_02():
    answer = solution("02_block_quantization")
    space = cells("02_block_quantization", "setup", "data")
    activation, channels = space["activation"], space["channels"]
    wild = torch.where(channels > 1, activation * 1000, activation)
    allowed = {"least_db": 36.0, "most_bytes": 545_000}
    assert exercises.check_block(activation, answer["activation_block"], **allowed).ok
    assert exercises.check_columns(wild, channels, answer["column_block"], most_error=0.025).ok
    for wrong, hint in (
        (exercises.check_block(activation, (-1, -1), **allowed), "outliers"),
        (exercises.check_block(activation, (1, 8), **allowed), "too many scales"),
        (exercises.check_block(activation, "1x128", **allowed), "block is"),
        (exercises.check_columns(wild, channels, (1, 128), 0.025), "mixes"),
        (exercises.check_columns(wild, channels, (256, 1), 0.025), "at most 128"),
        (exercises.check_columns(wild, channels, (0, 1), 0.025), "block is"),
    ):
        assert not wrong.ok and hint in wrong.message


def test_03():
    answer = solution("03_fp8_linear")
    space = cells("03_fp8_linear", "setup", "data")
    x, g = space["x"], space["g"]
    linear = torch.nn.Linear(space["K"], space["N"], bias=False)
    linear.weight.data.copy_(space["w"])
    cost = answer["cost_db"](x, g)
    assert cost > 0.5 and exercises.check_double_quantization(x, g, round(cost, 1)).ok
    assert exercises.check_operands(linear, x, answer["precision"], 31.0).ok
    for wrong, hint in (
        (exercises.check_double_quantization(x, g, 0.0), "SQNR"),
        (exercises.check_double_quantization(x, g, -cost), "positive"),
        (exercises.check_double_quantization(x, g, None), "number"),
        (exercises.check_operands(linear, x, LinearPrecision(), 31.0), "both operands"),
        (exercises.check_operands(linear, x, LinearPrecision(weight="bf16", activation="bf16"), 31.0), "enough"),
        (exercises.check_operands(linear, x, "bf16", 31.0), "LinearPrecision"),
    ):
        assert not wrong.ok and hint in wrong.message


@pytest.mark.parametrize("code", range(256))
def test_bits_describe_every_code(code):
    from fp8lab.formats import E4M3, E5M2
    from fp8lab.ui.bits import BitExplorer, describe

    for fmt in (E4M3, E5M2):
        value = float(fmt.values()[code])
        text = describe(code, fmt)
        assert f"{value:.10g}".lstrip("-") in text
    if code % 51 == 0:
        explorer = BitExplorer(code)
        assert explorer.code == code
        explorer.format.value = "e5m2"
        assert explorer.code == code and (
            explorer.value == value or value != value or explorer.value == E5M2.values()[code]
        )


def test_explorer_stays_within_a_byte_and_its_sign():
    from fp8lab.ui.bits import BitExplorer

    explorer = BitExplorer(0x7F)
    explorer.up.click()
    assert explorer.code == 0x7F
    explorer.set(0x80)
    explorer.down.click()
    assert explorer.code == 0x80, "minus zero has no smaller magnitude"
    explorer.up.click()
    assert explorer.code == 0x81 and explorer.value < 0
    with pytest.raises(ValueError, match="eight bits"):
        explorer.set(256)


def test_07():
    answer = solution("07_importance_sampling")
    icepop = {"mode": "icepop", "low": 0.5, "high": 5.0}
    assert exercises.check_band(*answer["band"]).ok and exercises.check_band("product", 0.2466, 4.055).ok
    assert exercises.check_translation("verl", answer["verl"], **icepop).ok
    assert exercises.check_one_token(answer["x"]).ok
    for wrong, hint in (
        (exercises.check_band("product", 0.5, 2.0), "be wider"),
        (exercises.check_band("geometric", 0.5, 2.0), "be narrower"),
        (exercises.check_band("token", 0.5, 2.0), "choose"),
        (exercises.check_band("product", 2.0, 0.5), "low < high"),
        (exercises.check_translation("verl", {"rollout_is": "token", "rollout_is_threshold": 2.0}, **icepop), "reject"),
        (exercises.check_translation("verl", {"rollout_iss": 1}, **icepop), "rollout_iss"),
        (exercises.check_translation("verl", None, **icepop), ""),
        (exercises.check_one_token(1.0), "still 100%"),
        (exercises.check_one_token(1000.0), "already"),
        (exercises.check_one_token(-1), "positive"),
    ):
        assert not wrong.ok and hint in wrong.message


def test_04():
    answer = solution("04_rollout")
    logits = cells("04_rollout", "setup", "one")["logits"]
    changed = {"1e-07": 0.01, "1e-06": 0.14, "1e-05": 1.4, "1e-04": 12.0, "5e-04": 45.0}
    assert exercises.check_temperature(logits, answer["temperature"], low=0.60, high=0.65).ok
    assert exercises.check_rate(changed, answer["learning_rate"], share=1.0).ok
    for wrong, hint in (
        (exercises.check_temperature(logits, 1.0, low=0.60, high=0.65), "cool down"),
        (exercises.check_temperature(logits, 0.1, low=0.60, high=0.65), "warm up"),
        (exercises.check_temperature(logits, 0, low=0.60, high=0.65), "above 0"),
        (exercises.check_rate(changed, 1.0, share=1.0), "more codes"),
        (exercises.check_rate(changed, 1e-9, share=1.0), "fewer codes"),
        (exercises.check_rate(changed, "1e-5", share=1.0), "number"),
    ):
        assert not wrong.ok and hint in wrong.message


def test_06():
    from fp8lab.models import load_model, load_tokenizer
    from fp8lab.rollout import NativeEngine

    answer = solution("06_mismatch")
    assert exercises.check_hidden_gap(answer["differences"]).ok and exercises.check_scatter(answer["sigma"]).ok
    model, tokenizer = load_model("tiny-llama"), load_tokenizer("tiny-llama")
    convert(model, PrecisionPlan.preset("fp8-rollout"), side="trainer")
    engine = NativeEngine(model, PrecisionPlan.preset("fp8-rollout"), tokenizer=tokenizer)
    culprit = lambda name: exercises.check_culprit(model, engine.model, name)  # noqa: E731
    assert not culprit(answer["name"]).ok, "nothing is hidden yet"
    exercises.hide_fault(engine, seed=8)
    assert culprit(answer["name"]).ok
    for wrong, hint in (
        (exercises.check_hidden_gap([0.05, -0.01, 0.02, 0.0]), "add up"),
        (exercises.check_hidden_gap([0.1, -0.1]), "bolder"),
        (exercises.check_hidden_gap([]), "at least one"),
        (exercises.check_hidden_gap([float("nan")]), "finite"),
        (exercises.check_hidden_gap("a lot"), "no list"),
        (exercises.check_scatter(0.05), "0.8 sigma"),
        (exercises.check_scatter(0.07), "0.8 sigma"),
        (exercises.check_scatter(-1), "standard deviation"),
        (culprit("model.layers.0.mlp.up_proj"), "compares all"),
        (culprit("lm_head"), "no FP8 layer"),
        (culprit(None), "no FP8 layer"),
    ):
        assert not wrong.ok and hint in wrong.message


def test_09(monkeypatch):
    monkeypatch.setenv("FP8LAB_FAST", "1")
    answer = solution("09_layer_fallback")
    more = cells("09_layer_fallback", "setup", "plan", "sample", "measure", "exact-table")
    table, measure, plan, whole = more["table"], more["measure"], more["plan"], more["whole"].gen_kl_error
    limits = {"budget": 0.15, "least": 0.35}
    k3 = lambda plan: measure(plan).gen_kl_error  # noqa: E731
    assert exercises.check_set(table, answer["mine"], k3(answer["mine"]), whole, **limits).ok
    assert exercises.check_forecast(table, "o_proj", answer["share"](table), 0.3).ok
    assert exercises.check_even(answer["even"], measure(answer["even"]).mean_abs_difference).ok
    last, first = (plan.with_bf16(side="rollout", **{end: 1}) for end in ("last", "first"))
    small = plan.with_bf16(modules=["model.layers.3.mlp.down_proj"], side="rollout")
    e2e = PrecisionPlan.preset("fp8-e2e")
    for wrong, hint in (
        (exercises.check_set(table, last, k3(last), whole, **limits), "15% allowed"),
        (exercises.check_set(table, small, k3(small), whole, **limits), "for their FLOPs"),
        (exercises.check_set(table, e2e, 0.0, whole, **limits), "rollout only"),
        (exercises.check_set(table, "bf16", 0.0, whole, **limits), "rollout only"),
        (exercises.check_forecast(table, "o_proj", 0.0, 0.3), "add `in_k3`"),
        (exercises.check_forecast(table, "o_proj", 100 * answer["share"](table), 0.3), "percentage"),
        (exercises.check_forecast(table, "o_proj", None, 0.3), "number"),
        (exercises.check_even(e2e.with_bf16(first=1, side="trainer"), 0.02), "rollout side"),
        (exercises.check_even(e2e.with_bf16(modules=["model.layers.0.mlp.up_proj"]), 0.0), "not all"),
        (exercises.check_even(e2e.with_bf16(first=2), 0.0), "later layers"),
        (exercises.check_even(e2e.with_bf16(first=1), 0.02), "one side only"),
        (exercises.check_even(first.to_dict(), 0.0), "start from"),
    ):
        assert not wrong.ok and hint in wrong.message


def test_10():
    answer = solution("10_moe")
    plan = PrecisionPlan.preset("fp8-rollout")
    space = {"layers": {"share": 0.10, "anywhere": 0.94}, "batch": {"experts": 128, "per_token": 8, "share": 0.5}}
    limits = {"budget": 0.30, "most": 0.60}
    depth = lambda layers: exercises_moe.check_depth(layers, **space["layers"])  # noqa: E731
    batch = lambda size: exercises_moe.check_batch(size, **space["batch"])  # noqa: E731
    routes = lambda plan, left: exercises_moe.check_routes(plan.report("tiny-qwen3-moe"), left, 0.1, **limits)  # noqa: E731
    assert depth(answer["layers"]).ok and batch(answer["batch"]).ok
    before, after = changed_tokens(plan), changed_tokens(plan.with_bf16(**answer["keep"]))
    report = plan.with_bf16(**answer["keep"]).report("tiny-qwen3-moe")
    assert exercises_moe.check_routes(report, after, before, **limits).ok
    for wrong, hint in (
        (depth(4), "keeps its experts"),
        (depth(28), "fewer do"),
        (depth("many"), "no number"),
        (batch(1), "leaves an expert alone"),
        (batch(12), "smaller batch"),
        (batch(0), "no batch"),
        (routes(plan.with_bf16(modules=["o_proj"], side="rollout"), 0.09), "what comes before it"),
        (routes(plan.with_bf16(first=2, side="rollout"), 0.01), "allowed"),
        (routes(PrecisionPlan.preset("fp8-e2e"), 0.0), "trainer"),
    ):
        assert not wrong.ok and hint in wrong.message


def changed_tokens(plan):
    """Share of prompt tokens whose experts differ somewhere between this plan's rollout side and BF16."""
    from fp8lab.models import load_model, load_tokenizer
    from fp8lab.rollout import NativeEngine
    from fp8lab.routing import router_agreement
    from fp8lab.tasks import load_task

    tokenizer, model = load_tokenizer("tiny-qwen3-moe"), load_model("tiny-qwen3-moe")
    convert(model, PrecisionPlan.preset("bf16"), side="trainer")
    engine = NativeEngine("tiny-qwen3-moe", plan)
    texts = load_task("arithmetic").train[:512]["prompt"]
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(tokenizer(t).input_ids) for t in texts], batch_first=True)
    return router_agreement(engine.model, model, ids, ids != tokenizer.pad_token_id).anywhere


def test_05():
    answer = solution("05_kv_cache_and_attention")
    keys = cells("05_kv_cache_and_attention", "setup", "rope")["k"]
    growth, llama = {"growth": 1.005, "updates": 20}, {"layers": 32, "heads": 8, "head_dim": 128}
    assert exercises.check_smallest_weight(answer["smallest"]).ok
    assert exercises.check_margin(answer["margin"], keys, **growth).ok
    assert exercises.check_cache_bytes(answer["bytes_per_token"], **llama).ok
    for wrong, hint in (
        (exercises.check_smallest_weight(2.0**-9), "too large"),
        (exercises.check_smallest_weight(2.0**-17), "too large"),
        (exercises.check_smallest_weight(2.0**-19), "too small"),
        (exercises.check_smallest_weight(0), "between 0 and 1"),
        (exercises.check_margin(1.05, keys, **growth), "update 10 of 20"),
        (exercises.check_margin(1.1, keys, **growth), "update 20 of 20"),
        (exercises.check_margin(1.3, keys, **growth), "unused"),
        (exercises.check_margin(0.9, keys, **growth), "at least 1"),
        (exercises.check_margin("1.1", keys, **growth), "no margin"),
        (exercises.check_cache_bytes(2 * 32 * 8 * 128, **llama), "scales"),
        (exercises.check_cache_bytes(32 * 8 * 132, **llama), "both"),
        (exercises.check_cache_bytes(32 * 8 * 128, **llama), "without scales"),
        (exercises.check_cache_bytes(4 * 32 * 8 * 128, **llama), "BF16"),
        (exercises.check_cache_bytes(32 * 32 * 132, **llama), "heads that are cached"),
        (exercises.check_cache_bytes(1.5, **llama), "no number"),
    ):
        assert not wrong.ok and hint in wrong.message


def test_08():
    from fp8lab.compare import find_runs
    from fp8lab.sweep import final_metrics
    from fp8lab.ui import exercises_loop as exercises

    answer = solution("08_full_loop")
    accuracy = {}
    for row in final_metrics(find_runs([ROOT / "data" / "evidence" / "three-arms"])):
        accuracy.setdefault(row["name"], {})[row["seed"]] = row["accuracy_last"]
    differences = [accuracy["fp8-e2e"][seed] - value for seed, value in accuracy["bf16"].items()]
    seeds = answer["seeds"](differences)
    clip = lambda **changes: exercises.check_dual_clip(changes, pushed=3.0, stopped=6.0)  # noqa: E731
    assert clip(**answer["changes"]).ok and clip(delta=5.9).ok and exercises.check_seeds(differences, seeds).ok
    for wrong, hint in (
        (clip(), "bounds punishments"),
        (clip(delta=2.0), "too tight"),
        (clip(delta=7.0), "still 6"),
        (clip(delta=1.0), "above 1 + epsilon"),
        (clip(dleta=4.0), "dleta"),
        (exercises.check_dual_clip(None, pushed=3.0, stopped=6.0), "mapping"),
        (exercises.check_seeds(differences, 10), "spread"),
        (exercises.check_seeds(differences, 10 * seeds), "just past 0"),
        (exercises.check_seeds(differences, 1.5), "at least 2"),
    ):
        assert not wrong.ok and hint in wrong.message


def test_11():
    from fp8lab.speed import ModelShape, Workload
    from fp8lab.ui import exercises_loop as exercises

    answer, model = solution("11_speed_and_scale"), "meta-llama/Llama-3.1-8B-Instruct"
    shape = ModelShape.of(model)
    blackwell = lambda plan: exercises.check_blackwell(model, plan, rollout="vllm", trainer="megatron", gpus=8)  # noqa: E731
    assert exercises.check_unprofitable(shape, answer["work"]).ok
    assert exercises.check_throughput(0.25, answer["more"]).ok and blackwell(answer["plan"]).ok
    for wrong, hint in (
        (exercises.check_unprofitable(shape, Workload()), "which phase"),
        (exercises.check_unprofitable(shape, Workload(prompts=4, generations=8, response_tokens=50)), "256 or more"),
        (exercises.check_unprofitable(shape, 7), "no speed.Workload"),
        (exercises.check_throughput(0.25, 0.25), "in the same time"),
        (exercises.check_throughput(0.25, 33.3), "percentage"),
        (exercises.check_throughput(0.25, "a third"), "number"),
        (blackwell(PrecisionPlan.preset("fp8-e2e")), "power-of-two"),
        (blackwell(PrecisionPlan.preset("fp8-rollout")), "one side"),
        (blackwell("fp8-pow2"), "no PrecisionPlan"),
    ):
        assert not wrong.ok and hint in wrong.message
