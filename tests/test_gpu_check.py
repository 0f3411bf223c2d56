"""The GPU check runs through on a CPU, tells a wrong kernel or engine from a right one, and survives what fails."""

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from fp8lab import gpucheck
from fp8lab.cli import main
from fp8lab.formats import round_bf16
from fp8lab.gemm import reference_gemm
from fp8lab.linear import Float8Linear, float8_layers, refresh
from fp8lab.operands import LinearPrecision
from fp8lab.precision import PrecisionPlan
from fp8lab.quantizers import BlockQuantizer
from fp8lab.rollout import NativeEngine
from fp8lab.te_linear import BACKWARD_OVERRIDE, FP32_SCALES, TransformerEngineLinear

GEMMS = ("output", "grad_input", "grad_weight")


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """The section about TE settles its variables; they are put back."""
    for name in (FP32_SCALES, BACKWARD_OVERRIDE):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def test_a_dry_run_goes_through_every_section(tmp_path, capsys):
    assert main(["gpu-check", "--dry", "--out", str(tmp_path)]) == 0
    report = json.loads((tmp_path / "gpu-check.json").read_text())
    assert list(report["sections"]) == [
        "exact",
        "linears",
        "quantizer",
        "arms",
        "llama",
        "transformer_engine",
        "vllm",
    ]
    assert report["ok"] and report["dry"] and report["backend"] == "emulated"
    assert {row["arm"] for row in report["sections"]["arms"]["rows"]} == set(gpucheck.ARMS)
    assert {row["gemm"] for row in report["sections"]["exact"]["rows"]} == set(GEMMS)
    assert {(row["plan"], row["engine"]) for row in report["sections"]["vllm"]["rows"]} == {
        (plan, engine) for plan in gpucheck.GAP_LIMITS for engine in ("native", "stand-in")
    }
    text = (tmp_path / "gpu-check.md").read_text()
    assert text in capsys.readouterr().out
    assert "stands in for TE's" in text and "stands in for vLLM" in text and "skipped" not in text


IMAGE = """
accelerate annotated-doc anyio attrs certifi charset-normalizer click filelock fsspec h11 hf-xet httpcore httpx
huggingface-hub idna jinja2 llvmlite markdown-it-py markupsafe mdurl ml-dtypes mpmath msgpack narwhals networkx numba
numpy packaging pandas peft pillow protobuf psutil pyarrow pygments python-dateutil pyyaml regex requests rich
safetensors scikit-learn scipy sentencepiece setuptools shellingham six sympy tokenizers torch tqdm transformers triton
typer typing-extensions urllib3 xxhash
httpcore2 httpx2 truststore
""".split()
"""What the image of the GPU machine has of what could be installed here (the last line: what huggingface-hub became
since), and this package; nothing else is found."""

ON_THE_IMAGE = """
import importlib.metadata, re, sys
from importlib.machinery import PathFinder
from pathlib import Path

allowed = {"fp8lab", *sys.argv[2:]}
normal = lambda name: re.sub("[-_.]+", "-", name).lower()
owners = importlib.metadata.packages_distributions()
absent = {module for module, names in owners.items() if not allowed & {normal(name) for name in names}}

class Image(PathFinder):
    @staticmethod
    def find_spec(name, path=None, target=None):
        return None if name.partition(".")[0] in absent else PathFinder.find_spec(name, path, target)

sys.meta_path = [Image if finder is PathFinder else finder for finder in sys.meta_path]
assert {"datasets", "plotly", "ipywidgets"} <= absent
from fp8lab.gpucheck import gpu_check
report = gpu_check(Path(sys.argv[1]), dry=True)
print({name: section.get("error") for name, section in report["sections"].items() if not section["ok"]})
print(sorted(absent & {name.partition(".")[0] for name in sys.modules}))
"""


def test_it_needs_nothing_that_the_image_of_the_gpu_machine_lacks(tmp_path, root):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}
    command = [sys.executable, "-c", ON_THE_IMAGE, str(tmp_path), *IMAGE]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.stdout.splitlines() == ["{}", "[]"], done.stdout + done.stderr


@pytest.mark.parametrize("gemm", GEMMS)
def test_a_kernel_that_is_off_by_more_than_the_accumulator_is_caught(gemm, monkeypatch):
    class Wrong(Float8Linear):
        pass

    setattr(Wrong, gemm, lambda self, *operands: getattr(Float8Linear, gemm)(self, *operands) * 1.5)
    monkeypatch.setattr(gpucheck, "_real_layer", lambda dry: Wrong)
    found = gpucheck.exact(True)
    assert not found["ok"] and {row["gemm"] for row in found["rows"] if not row["ok"]} == {gemm}


def test_a_failing_section_is_recorded_and_the_rest_runs(tmp_path, monkeypatch):
    def broken(dry):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(gpucheck, "SECTIONS", {"broken": broken, "quantizer": gpucheck.quantizer})
    report = gpucheck.gpu_check(tmp_path, dry=True)
    assert not report["ok"] and report["sections"]["quantizer"]["ok"]
    assert "FAILED RuntimeError: no such kernel" in (tmp_path / "gpu-check.md").read_text()


def test_what_the_time_does_not_allow_is_not_called_done(tmp_path):
    report = gpucheck.gpu_check(tmp_path, dry=True, budget_s=-1)
    assert not report["ok"] and all("not run" in s["error"] for s in report["sections"].values())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here, so the check would start")
def test_without_a_gpu_it_says_what_is_missing(tmp_path, capsys):
    assert main(["gpu-check", "--out", str(tmp_path / "never")]) == 1
    assert "--dry runs the script on a CPU" in capsys.readouterr().err and not (tmp_path / "never").exists()


# ---- Transformer Engine -----------------------------------------------------------------------------


def te_section(monkeypatch, make):
    """The section's dry run with make(linear, precision) for TE's layer."""
    monkeypatch.setattr(gpucheck, "_te_layer", lambda linear, precision, dry: make(linear, precision))
    return gpucheck.transformer_engine(True)


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({"rule": "transformer_engine+pow2"}, GEMMS),  # TE's default, without the environment variable
        ({"weight": "e5m2"}, ("output", "grad_input")),
        ({"activation": "e5m2"}, ("output", "grad_weight")),
        ({"gradient": "e5m2"}, ("grad_input", "grad_weight")),
        ({"weight": "bf16"}, ("output", "grad_input")),
        ({"gradient": "bf16"}, ("grad_input", "grad_weight")),
        ({"weight_source": "fp32"}, ("output", "grad_input")),
        ({"weight_block": (1, 128)}, ("output", "grad_input")),
        ({"group": 64}, GEMMS),
    ],
    ids=str,
)
def test_operands_rounded_in_another_way_are_caught(changes, wrong, monkeypatch):
    found = te_section(
        monkeypatch,
        lambda linear, precision: Float8Linear.from_linear(linear, dataclasses.replace(precision, **changes)),
    )
    assert not found["ok"] and not any(row["ok"] for row in found["rows"])
    for row in found["rows"]:
        assert all(row[name] > 1.2 * gpucheck.TE_LIMIT for name in wrong)
        assert all(row[name] == 0 for name in set(GEMMS) - set(wrong))


class HopperLinear(Float8Linear):
    """The same codes on the modelled tensor core (gemm.py), which tests hold against an H100's."""

    def rows(self, x):
        return BlockQuantizer((1, 128), "e4m3", self.precision.rule).quantize(x)

    def output(self, x, weight, bias=None):
        return round_bf16(reference_gemm(self.rows(x), weight.packed, accumulate="hopper"))

    def grad_input(self, grad, weight):
        return round_bf16(reference_gemm(self.rows(grad), weight.packed.transpose(), accumulate="hopper"))

    def grad_weight(self, grad, x):
        return reference_gemm(self.rows(grad.t()), self.rows(x.t()), accumulate="hopper")


def test_hoppers_accumulator_is_far_within_the_limit():
    linear, precision = nn.Linear(256, 128, bias=False), LinearPrecision(rule="transformer_engine")
    linear.weight.data, x, g = (gpucheck._random(shape, True) for shape in ((128, 256), (130, 256), (130, 128)))
    layers = (kind.from_linear(linear, precision) for kind in (HopperLinear, Float8Linear))
    theirs, ours = (gpucheck._gemms(layer, round_bf16(x), round_bf16(g)) for layer in layers)
    for name in GEMMS:
        distance = float((theirs[name] - ours[name]).norm() / ours[name].norm())
        assert 4e-4 < distance < gpucheck.TE_LIMIT / 10, name


def test_another_last_bit_of_the_scales_is_let_through(monkeypatch):
    found = te_section(monkeypatch, lambda linear, _: Float8Linear.from_linear(linear, LinearPrecision()))
    assert found["ok"] and max(row[name] for row in found["rows"] for name in GEMMS) < gpucheck.TE_LIMIT / 2


def test_a_layer_that_gives_no_numbers_is_not_ok(monkeypatch):
    class Broken(Float8Linear):
        def output(self, x, weight, bias=None):
            return super().output(x, weight, bias) * float("nan")

    assert not te_section(monkeypatch, Broken.from_linear)["ok"]


def test_an_environment_that_contradicts_the_rule_is_said(tmp_path, monkeypatch):
    monkeypatch.setenv(FP32_SCALES, "0")
    monkeypatch.setattr(gpucheck, "SECTIONS", {"transformer_engine": gpucheck.transformer_engine})
    assert not gpucheck.gpu_check(tmp_path, dry=True)["ok"]
    assert f"FAILED ValueError: {FP32_SCALES}=0" in (tmp_path / "gpu-check.md").read_text()


# ---- vLLM -------------------------------------------------------------------------------------------


def vllm_section(monkeypatch, change, kind=NativeEngine):
    """The section's dry run with an engine for vLLM's whose model change(model) has seen."""

    def second(plan, dry):
        engine = kind("tiny-llama", plan, forward="transformers")
        with torch.no_grad():
            change(engine.model)
        refresh(engine.model)
        return engine

    monkeypatch.setattr(gpucheck, "_second_engine", second)
    found = gpucheck.vllm(True)
    assert all(row["ok"] for row in found["rows"] if row["engine"] == "native")
    return found, [row for row in found["rows"] if row["engine"] != "native"]


class HiddenBytes(NativeEngine):
    """Its bytes cannot be read back, as those of vLLM on a GPU."""

    def stats(self):
        return {**super().stats(), "backend": "vllm"}


def activations_in_bf16(model):
    """Every module's output rounded, but for the logits: what vLLM computes on a GPU."""

    def rounded(module, arguments, output):
        return round_bf16(output) if isinstance(output, torch.Tensor) else output

    for module in [module for layer in model.model.layers for module in layer.modules()]:
        module.register_forward_hook(rounded)
    for module in (model.model.embed_tokens, model.model.norm):
        module.register_forward_hook(rounded)


def test_one_other_weight_is_caught_by_its_bytes(monkeypatch):
    def change(model):
        dict(float8_layers(model))["model.layers.1.self_attn.k_proj"].weight[0, 0] += 0.5

    found, rows = vllm_section(monkeypatch, change)
    assert not found["ok"] and not any(row["ok"] for row in rows)
    assert {row["bytes"] for row in rows} == {"1 layers differ, first model.layers.1.self_attn.k_proj"}
    assert all(row["token_mult_prob_error"] < row["limit"] for row in rows)  # the gap alone does not show it


def test_wrong_weights_are_caught_by_the_gap_where_bytes_are_hidden(monkeypatch):
    def change(model):
        weight = dict(float8_layers(model))["model.layers.1.self_attn.k_proj"].weight
        weight.copy_(weight.flip(1))

    found, rows = vllm_section(monkeypatch, change, HiddenBytes)
    assert not found["ok"] and not any(row["ok"] for row in rows)
    assert {row["bytes"] for row in rows} == {gpucheck.NOT_READ_BACK}


def test_bf16_activations_are_within_the_limits(monkeypatch):
    found, rows = vllm_section(monkeypatch, activations_in_bf16, HiddenBytes)
    gaps = {row["plan"]: row["token_mult_prob_error"] for row in rows}
    assert found["ok"] and gaps["bf16"] > 1.001 and gaps["fp8-e2e"] > 1.01


def test_log_probs_that_are_no_numbers_are_not_ok(monkeypatch):
    class NoNumbers(NativeEngine):
        def generate(self, *arguments, **options):
            rollout = super().generate(*arguments, **options)
            return dataclasses.replace(rollout, logprobs=rollout.logprobs * float("nan"))

    found, rows = vllm_section(monkeypatch, lambda model: None, NoNumbers)
    assert not found["ok"] and not any(row["ok"] for row in rows)


# ---- without the packages ---------------------------------------------------------------------------


@pytest.mark.parametrize("package", ["transformer_engine", "vllm"])
def test_a_missing_package_is_skipped_not_passed(package, tmp_path, monkeypatch):
    monkeypatch.setattr(
        gpucheck,
        "support",
        lambda: {"scaled_mm": (True, "said so"), package: (False, f"package {package} not installed")},
    )
    monkeypatch.setattr(gpucheck, "SECTIONS", {package: gpucheck.SECTIONS[package]})
    report = gpucheck.gpu_check(tmp_path)
    assert report["ok"] and "rows" not in report["sections"][package]
    heading = f"## {package}: skipped: {package} is not installed: package {package} not installed"
    assert heading in (tmp_path / "gpu-check.md").read_text()


def test_the_real_layer_and_engine_are_asked_for():
    linear = nn.Linear(128, 128, bias=False)
    assert isinstance(gpucheck._te_layer(linear, LinearPrecision(), False), TransformerEngineLinear)
    if importlib.util.find_spec("vllm"):
        pytest.skip("vLLM is installed here, so its engine would start")
    with pytest.raises(ModuleNotFoundError, match="engine 'vllm' needs the package vllm"):
        gpucheck._second_engine(PrecisionPlan.preset("bf16"), False)
