"""Every exercise's solution is accepted, its starting point is not, and wrong answers get a hint, never an exception.

Solutions are taken from notebooks/solutions, tensors from the notebooks' own cells.
"""

import runpy
from pathlib import Path

import nbformat
import pandas as pd
import pytest
import torch

from fp8lab.conversion import convert
from fp8lab.precision import LinearPrecision, PrecisionPlan
from fp8lab.runlog import find_runs
from fp8lab.sweep import final_metrics
from fp8lab.tasks import data_dir
from fp8lab.ui import exercises, exercises_loop, exercises_moe, lessons

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


def test_00():
    answer = solution("00_quickstart")
    runs = pd.DataFrame(final_metrics(find_runs([data_dir() / "evidence" / "three-arms"])))
    assert lessons.check_order(runs, answer["better"], answer["worse"]).ok
    assert "ahead in 3 of 10" in lessons.check_order(runs, answer["better"], answer["worse"]).message
    plan = PrecisionPlan.preset("fp8-rollout")
    parts = plan.with_bf16(modules=["*.mlp.*", "*.q_proj", "*.v_proj", "*.o_proj"])
    one = plan.with_bf16(modules=["model.layers.0.self_attn.k_proj", "model.layers.1.mlp.*"])
    assert lessons.check_fallback(one, 0.5, 1.0).ok and "2 of 4" in lessons.check_fallback(one, 0.5, 1.0).message
    for wrong, hint in (
        (lessons.check_fallback(parts, 0.1, 1.0), "4 of 4 layers have linears in BF16"),
        (lessons.check_fallback(plan.with_bf16(modules=["*.k_proj"]), 0.1, 1.0), "4 of 4"),
        (lessons.check_fallback(one, float("nan"), 1.0), "measure it again"),
        (lessons.check_order(runs, 2, 1), "not above it"),
        (lessons.check_order(runs, 1, 6), "not below it"),
        (lessons.check_order(runs, 1, 11), "none of the seeds"),
    ):
        assert not wrong.ok and hint in wrong.message


ODD = (
    *(None, True, "", "1e-5", b"1", 0, -1, 10**400, -(10**400), 10**5000, 1e39, -1e39, 1e300, 5e-324, 1j),
    *(float("nan"), float("inf"), -float("inf"), [], [0.1, "x"], [[1, 2], [3]], [10**400], [None], {"a": 1}, (1, 2, 3)),
    *((0, 0), (10**400, 1), ("1", 1), (None, None), {1, 2}, object(), int, lambda: 1),
    *(torch.tensor(1.0), torch.ones(3), torch.ones(2, 2), torch.tensor([1, 2]), torch.tensor([True]), torch.empty(0)),
    *(torch.tensor(1.0, dtype=torch.complex64), torch.ones(1, dtype=torch.float8_e4m3fn)),
)
"""What a reader may type in by mistake: no checker may raise on it, nor accept it."""
ACCEPTED = {("check_bad_number", "1e+39"), ("check_bad_number", "-1e+39"), ("check_bad_number", "1e+300")}
"""Right after all: far beyond 448, where everything is clamped."""


def one_answer():
    """Checker -> functions of the one answer that may be odd. If that is a measured value, none can be enough."""
    from fp8lab.models import load_model
    from fp8lab.speed import ModelShape

    gradient, x = torch.tensor([3e-7, 2e-6, 1.5e-5, 4e-4]), torch.randn(256, 256)
    linear, plan = torch.nn.Linear(128, 64, bias=False), PrecisionPlan.preset("fp8-rollout")
    model, changed = load_model("tiny-llama"), {"1e-07": 0.01, "1e-06": 0.14, "1e-05": 1.4}
    convert(model, plan, side="rollout")
    table = pd.DataFrame({"name": ["model.layers.0.mlp.up_proj"], "layer": [0], "flops_share": [1.0], "in_k3": [1.0]})
    runs = pd.DataFrame({"seed": [1, 1, 2, 2], "name": ["bf16", "fp8-rollout"] * 2, "accuracy_last": [0, 1, 1, 0]})
    routes, shape = plan.report("tiny-qwen3-moe"), ModelShape.of("meta-llama/Llama-3.1-8B-Instruct")
    limits, all_routes = {"budget": 1.0, "most": -float("inf")}, {"experts": 128, "per_token": 8, "share": 0.5}
    hopper = {"rollout": "vllm", "trainer": "megatron", "gpus": 8}
    return {
        "check_fallback": [
            lambda odd: lessons.check_fallback(odd, 0.5, 1.0),
            lambda odd: lessons.check_fallback(plan, odd, 1.0, budget=-1),
        ],
        "check_order": [lambda odd: lessons.check_order(runs, odd, 2), lambda odd: lessons.check_order(runs, 1, odd)],
        "check_code": [lambda odd: exercises.check_code(odd, 0.4375, "e4m3")],
        "check_bad_number": [exercises.check_bad_number],
        "check_multiplier": [lambda odd: exercises.check_multiplier(gradient, odd)],
        "check_block": [lambda odd: exercises.check_block(x, odd, 36.0, 70_000)],
        "check_columns": [lambda odd: exercises.check_columns(x, torch.ones(256), odd, 0.025, 70_000)],
        "check_double_quantization": [lambda odd: exercises.check_double_quantization(x, x, odd)],
        "check_operands": [lambda odd: exercises.check_operands(linear, torch.randn(8, 128), odd, 31.0)],
        "check_band": [
            lambda odd: exercises.check_band(odd, 0.99, 1.01),
            lambda odd: exercises.check_band("geometric", odd, 1.01),
            lambda odd: exercises.check_band("product", 1e-320, odd),
        ],
        "check_translation": [
            lambda odd: exercises.check_translation("verl", odd, mode="icepop", low=0.5, high=5.0),
            lambda odd: exercises.check_translation("verl", {"rollout_is": odd}, mode="icepop", low=0.5, high=5.0),
            lambda odd: exercises.check_translation(
                "verl", {"rollout_is": "token", "rollout_is_threshold": odd}, mode="icepop", low=0.5, high=5.0
            ),
        ],
        "check_one_token": [exercises.check_one_token],
        "check_temperature": [lambda odd: exercises.check_temperature(torch.randn(1, 9), odd, low=0.6, high=0.61)],
        "check_rate": [lambda odd: exercises.check_rate(changed, odd, share=1.0)],
        "check_hidden_gap": [exercises.check_hidden_gap],
        "check_scatter": [exercises.check_scatter],
        "check_culprit": [lambda odd: exercises.check_culprit(model, model, odd)],
        "check_set": [
            lambda odd: exercises.check_set(table, odd, 0.1, 1.0, budget=0.5, least=0.35),
            lambda odd: exercises.check_set(table, plan, odd, 1.0, budget=0.5, least=float("inf")),
        ],
        "check_forecast": [lambda odd: exercises.check_forecast(table, "up_proj", odd, 0.3)],
        "check_even": [lambda odd: exercises.check_even(odd, 0.0)],
        "check_smallest_weight": [exercises.check_smallest_weight],
        "check_margin": [lambda odd: exercises.check_margin(odd, x[None], growth=1.005, updates=20)],
        "check_cache_bytes": [lambda odd: exercises.check_cache_bytes(odd, layers=2, heads=2, head_dim=16)],
        "check_dual_clip": [
            lambda odd: exercises_loop.check_dual_clip(odd, pushed=3.0, stopped=6.0),
            lambda odd: exercises_loop.check_dual_clip({"delta": odd}, pushed=3.0, stopped=6.0),
            lambda odd: exercises_loop.check_dual_clip({"epsilon": odd}, pushed=3.0, stopped=6.0),
        ],
        "check_seeds": [lambda odd: exercises_loop.check_seeds([0.01, -0.02, 0.005], odd)],
        "check_unprofitable": [lambda odd: exercises_loop.check_unprofitable(shape, odd)],
        "check_throughput": [lambda odd: exercises_loop.check_throughput(0.25, odd)],
        "check_blackwell": [lambda odd: exercises_loop.check_blackwell("tiny-llama", odd, **hopper)],
        "check_depth": [lambda odd: exercises_moe.check_depth(odd, share=0.1, anywhere=0.94)],
        "check_batch": [lambda odd: exercises_moe.check_batch(odd, **all_routes)],
        "check_routes": [lambda odd: exercises_moe.check_routes(routes, odd, 0.1, **limits)],
    }


def test_no_checker_raises_on_anything_nor_accepts_it():
    asked = one_answer()
    modules = (lessons, exercises, exercises_loop, exercises_moe)
    assert set(asked) == {name for module in modules for name in vars(module) if name.startswith("check_")}
    for name, ways in asked.items():
        for odd in ODD:
            for way in ways:
                verdict = way(odd)
                assert isinstance(verdict, lessons.Verdict) and len(verdict.message) < 2000, name
                assert verdict.ok == ((name, lessons.shown(odd)) in ACCEPTED), (
                    f"{name}({lessons.shown(odd)}): {verdict}"
                )


def test_what_a_reader_typed_in():
    assert lessons.number(3) == 3.0 and lessons.number(10**300) == 1e300 and lessons.number(True) is None
    assert lessons.shown(10**5000) == "this int" and lessons.shown("1e-5") == "'1e-5'"
    assert len(lessons.shown(torch.randn(100))) == 60


@pytest.mark.parametrize(
    ("x", "ok"), [(30.0, False), (30.4, True), (33, True), (33.69, True), (37.0, True), (37.2, False)]
)
def test_one_token_is_asked_for_to_10_per_cent(x, ok):
    """The root is 33.69: (1000 + x)^2 / (1001 (1000 + x^2)) = 1/2."""
    verdict = exercises.check_one_token(x)
    assert verdict.ok is ok and ("33.7" in verdict.message or not ok)


def test_01():
    answer = solution("01_numbers")
    assert exercises.check_code(answer["code"], 0.4375, "e4m3").ok
    assert exercises.check_bad_number(answer["number"]).ok and exercises.check_bad_number(0.0014).ok
    assert "1e+39 becomes 448, off by 100%" in exercises.check_bad_number(1e39).message
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
    columns = lambda block: exercises.check_columns(wild, channels, block, 0.025, allowed["most_bytes"])  # noqa: E731
    assert columns(answer["column_block"]).ok
    for wrong, hint in (
        (exercises.check_block(activation, (-1, -1), **allowed), "outliers"),
        (exercises.check_block(activation, (1, 8), **allowed), "too many scales"),
        (exercises.check_block(activation, "1x128", **allowed), "block is"),
        (columns((1, 128)), "mixes"),
        (columns((256, 1)), "at most 128"),
        (columns((0, 1)), "block is"),
        (columns((1, 1)), "too many scales"),
        (columns((32, 1)), "too many scales"),
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
        (exercises.check_throughput(0.25, 0.25), "takes 0.75 of the time it took, so how many steps fit"),
        (exercises.check_throughput(0.25, 33.3), "percentage"),
        (exercises.check_throughput(0.25, "a third"), "number"),
        (blackwell(PrecisionPlan.preset("fp8-e2e")), "power-of-two"),
        (blackwell(PrecisionPlan.preset("fp8-rollout")), "one side"),
        (blackwell("fp8-pow2"), "no PrecisionPlan"),
    ):
        assert not wrong.ok and hint in wrong.message
