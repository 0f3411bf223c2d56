"""Benchmarks: what they time is right, goals are judged, and the kernels compile once. No timing is asserted."""

import json
import os
import subprocess
import sys
from importlib import metadata

import pytest
import torch

from fp8lab import bench, cli
from fp8lab.cli import main
from fp8lab.quantizers import BlockQuantizer
from fp8lab.runlog import write_marked

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("block", [(1, 128), (128, 128)])
def test_the_eager_candidate_computes_the_same(block):
    x = torch.randn(256, 384, generator=torch.Generator().manual_seed(0))
    x[:, :128] = 0
    assert torch.equal(bench.eager_fake_quantize(x, block), BlockQuantizer(block).fake_quantize(x))


def test_quantize_reports_ratios_goals_and_what_was_not_measured():
    result = bench.bench_quantize(size=256, rounds=3)
    names = [row["name"] for row in result["rows"]]
    assert names[:3] == ["copy", "fp8lab 1x128", "fp8lab 128x128"] and "eager torch 1x128" in names
    assert all(row["ratio_low"] <= row["ratio"] <= row["ratio_high"] for row in result["rows"])
    assert [(g["goal"], g["limit"]) for g in result["goals"]] == [
        ("fp8lab 1x128, times a copy", 1.5),
        ("fp8lab 128x128, times a copy", 1.5),
        ("longest first call of a kernel, s", 3.0),
    ]
    ratio = {row["name"]: row["ratio"] for row in result["rows"]}
    assert result["goals"][1]["measured"] == ratio["fp8lab 128x128"]
    text = bench.as_text(json.loads(json.dumps(result)))
    if "torchao emulation 1x128" in names:
        assert f"beside torchao 0.18.0 (torch {torch.__version__}) on 1 threads" in text
    else:
        assert "torchao's emulation was not measured: no torchao; `make test`" in text
    assert text.count("goal ") == 3 and "kernels compiled in this run" in text


def test_goals_are_met_or_missed():
    assert bench.goal("a", 1.5, 1.5)["met"] and not bench.goal("a", 1.5001, 1.5)["met"]
    result = {"bench": "x", "shape": [1], "threads": 1, "baseline": "b", "unit": "ns", "rows": [], "not_measured": []}
    text = bench.as_text(result | {"goals": [bench.goal("slow", 2, 1.5), bench.goal("fast", 1, 1.5)]})
    assert "goal missed: slow: 2.00, at most 1.5" in text and "goal met: fast: 1.00, at most 1.5" in text


def test_goals_go_between_the_marks_of_a_readme(tmp_path):
    common = {
        "threads": 2,
        "instructions": "AVX2",
        "torch": "2.13.0",
        "not_measured": ["vllm was not measured"],
        "facts": ["it took a while"],
    }
    results = [{"bench": "x", "goals": [bench.goal("slow", 2, 1.5), bench.goal("fast", 1, 1.5)]} | common]
    readme = tmp_path / "README.md"
    readme.write_text("before\n<!-- bench -->\nold\n<!-- end bench -->\nafter\n")
    write_marked(readme, "bench", bench.goals_table(results))
    text = readme.read_text()
    assert text.startswith("before\n<!-- bench -->\n| benchmark") and text.endswith("\n<!-- end bench -->\nafter\n")
    assert "| x | slow | 2.00 | 1.5 | **missed** |\n| x | fast | 1.00 | 1.5 | met |" in text
    assert "2 threads, AVX2, torch 2.13.0; it took a while; vllm was not measured." in text and "old" not in text
    with pytest.raises(ValueError, match="no lines '<!-- other -->'"):
        write_marked(readme, "other", "text")


def test_torchaos_reference_is_found_without_triton_and_is_its_quantizer(monkeypatch, tmp_path):
    reference, name = bench.torchao_reference()
    if reference is None:
        pytest.skip(name)
    assert name == "torchao 0.18.0"
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    codes, scale = reference(x)
    ours = BlockQuantizer((1, 128), rule="torchao").quantize(x)
    assert torch.equal(codes.view(torch.uint8), ours.codes) and torch.equal(scale, ours.scale)
    monkeypatch.delenv("FP8LAB_REFERENCES")  # what conftest.py found
    assert bench.torchao_reference()[1] == name
    monkeypatch.setenv("FP8LAB_REFERENCES", str(tmp_path))
    reference, why_not = bench.torchao_reference()
    assert reference is None and f"no torchao; `make test` puts it into {tmp_path}" in why_not


def test_a_peer_is_named_with_versions_threads_and_settings():
    found = bench.peer("vllm 0.32.0", "transformers", enforce_eager=True)
    versions = f"transformers {metadata.version('transformers')}, torch {torch.__version__}"
    phrase = f"vllm 0.32.0 ({versions}) on 1 threads, enforce_eager=True"
    assert bench.peer_text(json.loads(json.dumps(found))) == phrase
    result = {"bench": "x", "goals": [], **bench.machine(["TRL was not measured"], [found])}
    machine = f"1 threads, {torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__}"
    assert bench.goals_table([result]).endswith(f"{machine}; {phrase}; TRL was not measured.")


@pytest.mark.parametrize("what", ["quantize", "linear", "rollout", "step"])
def test_one_benchmark_does_not_replace_the_table_of_all(what, tmp_path, capsys):
    readme = tmp_path / "README.md"
    readme.write_text("<!-- bench -->\nold\n<!-- end bench -->\n")
    assert main(["bench", what, "--readme", str(readme)]) == 1
    assert f"found '{what}': use `bench all`" in capsys.readouterr().err and "old" in readme.read_text()


def test_a_readme_is_looked_at_before_anything_is_timed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(cli, "_bench_alone", lambda *a: pytest.fail("a benchmark was started"))
    readme = tmp_path / "README.md"
    assert main(["bench", "all", "--readme", str(readme)]) == 1
    assert f"no file {readme}; --readme takes a Markdown file with the lines <!-- bench -->" in capsys.readouterr().err
    for text, missing in (("a table", "<!-- bench -->"), ("<!-- bench -->\nold\n", "<!-- end bench -->")):
        readme.write_text(text)
        assert main(["bench", "all", "--readme", str(readme)]) == 1
        assert f"has no line '{missing}'" in capsys.readouterr().err and readme.read_text() == text


def test_all_benchmarks_go_into_the_readme(tmp_path, monkeypatch):
    def alone(name, arguments):
        return {"bench": name, "goals": [bench.goal(f"of {name}", 1, 2)], **bench.machine([])}

    monkeypatch.setattr(cli, "_bench_alone", alone)
    readme = tmp_path / "README.md"
    readme.write_text("<!-- bench -->\nold\n<!-- end bench -->")
    assert main(["bench", "all", "--json", "--readme", str(readme)]) == 0
    rows = [line for line in readme.read_text().splitlines() if "| of " in line]
    assert rows == [f"| {name} | of {name} | 1.00 | 2 | met |" for name in bench.benches()]


def test_linear_reports_both_goals_and_the_error_of_each_gemm():
    result = bench.bench_linear(m=32, k=128, n=128, rounds=2)
    assert [g["limit"] for g in result["goals"]] == [1.15, 1.4]
    assert "SQNR in dB: weights 128x128" in bench.as_text(result)


def test_sqnr_of_each_operand_and_gemm_on_realistic_data():
    found = bench.gemm_sqnr()
    assert 31 < found["weights 128x128"] < 32  # 31.6
    assert 32.5 < found["activations 1x128"] < 35 and 32.5 < found["gradients 1x128"] < 35  # 33.9 and 33.8
    for name in ("output", "grad_input", "grad_weight"):
        assert 28.5 < found[name] < 31  # two operands' errors add up: 29.5 to 29.6
        assert found[name] < min(found["weights 128x128"], found["activations 1x128"])


COUNT = """
import torch
from fp8lab.kernels import times_compiled
from fp8lab.quantizers import BlockQuantizer
x = torch.randn(3, 200)
BlockQuantizer().quantize(x), BlockQuantizer((128, 128), rule="vllm").fake_quantize(x)
print(times_compiled())
"""


def test_the_quantizer_compiles_once_for_all_shapes_rules_and_processes(tmp_path):
    env = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    runs = [subprocess.run([sys.executable, "-c", COUNT], env=env, capture_output=True, text=True) for _ in range(2)]
    assert [run.stdout.strip() for run in runs] == ["1", "0"], runs[0].stderr + runs[1].stderr
