"""The GPU check runs through on a CPU, tells a wrong kernel from a right one, and survives a section that fails."""

import json

import pytest
import torch

from fp8lab import gpucheck
from fp8lab.cli import main
from fp8lab.linear import Float8Linear


def test_a_dry_run_goes_through_every_section(tmp_path, capsys):
    assert main(["gpu-check", "--dry", "--out", str(tmp_path)]) == 0
    report = json.loads((tmp_path / "gpu-check.json").read_text())
    assert list(report["sections"]) == ["exact", "linears", "quantizer", "arms", "llama"]
    assert report["ok"] and report["dry"] and report["backend"] == "emulated"
    assert {row["arm"] for row in report["sections"]["arms"]["rows"]} == set(gpucheck.ARMS)
    assert {row["gemm"] for row in report["sections"]["exact"]["rows"]} == {"output", "grad_input", "grad_weight"}
    assert (tmp_path / "gpu-check.md").read_text() in capsys.readouterr().out


@pytest.mark.parametrize("gemm", ["output", "grad_input", "grad_weight"])
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
