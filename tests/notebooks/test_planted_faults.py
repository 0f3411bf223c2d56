"""The notebooks' checks can fail: with a fault planted in the package, at least one of them does.

The code cells that a check needs are run in this process, once as they are and once with the fault.
"""

from pathlib import Path

import nbformat
import pytest
import torch

from fp8lab import (
    corrections,
    diagnostics,
    experiment,
    formats,
    gemm,
    kernels,
    linear,
    quantizers,
    scales,
    sequence_metrics,
)
from fp8lab.rollout import native

ROOT = Path(__file__).resolve().parents[2]


def run_cells(name, ids):
    """Run these code cells of a notebook, in order, without showing anything."""
    notebook = nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)
    found = {cell.id: cell.source for cell in notebook.cells if cell.cell_type == "code"}
    space = {"__name__": "notebook"}
    for each in ids:
        exec(found[each], space)


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    from fp8lab.ui import lessons, plots

    monkeypatch.setenv("FP8LAB_FAST", "1")
    monkeypatch.setattr(plots, "show", lambda figure: None)
    monkeypatch.setattr(lessons, "start", lambda **_: "")
    torch.set_num_threads(1)


def scale_inverted(patch):
    real = quantizers.QuantizedTensor.dequantize
    fault = lambda self, dtype=torch.float32: real(self, dtype) / self.scale.max() ** 2  # noqa: E731
    patch.setattr(quantizers.QuantizedTensor, "dequantize", fault)


def pow2_rounded_down(patch):
    real = kernels.quantize_blocks

    def fault(x, block, fmt, rule, codes, fixed, place=None):
        values, found, scale, bad = real(x, block, fmt, rule, codes, fixed, place)
        return values, found, scale / 2 if rule.pow2 else scale, bad

    patch.setattr(kernels, "quantize_blocks", fault)


def ties_rounded_up(patch):
    real = formats.Float8Format.round
    patch.setattr(formats.Float8Format, "round", lambda self, x: real(self, x.float() * (1 + 2**-20)))


def subnormals_have_a_leading_one(patch):
    real = formats.Float8Format.values

    def fault(self, device="cpu"):
        values = real(self, device).clone()
        values[1 : 2**self.mantissa_bits] += self.min_normal
        return values

    patch.setattr(formats.Float8Format, "values", fault)


def padding_moves_blocks(patch):
    patch.setattr(linear, "token_mask", lambda shape: None)


def weight_gradient_quantized_twice(patch):
    real = linear.Float8Linear.grad_weight

    def fault(self, grad, x, *rest, **named):
        rounded = quantizers.BlockQuantizer((1, 128)).fake_quantize(x)
        return real(self, grad, rounded, *rest, **named)

    patch.setattr(linear.Float8Linear, "grad_weight", fault)


def no_promotion(patch):
    patch.setattr(gemm, "PROMOTE_EVERY", 10**9)
    real = gemm.reference_gemm
    patch.setattr(gemm, "reference_gemm", lambda a, b, accumulate="fp32": real(a, b, accumulate="fp32"))


def refit_forgotten(patch):
    patch.setattr(native.NativeEngine, "refit", lambda self, source: None)


def importance_weights_are_one(patch):
    real = corrections.weights
    patch.setattr(corrections, "weights", lambda *a, mode, **k: real(*a, mode="none" if mode == "is" else mode, **k))


def effective_size_is_not_normalized(patch):
    patch.setattr(
        sequence_metrics, "effective_sample_size", lambda w: float(w.sum() ** 2 / (w**2).sum() / len(w) * 0 + 1)
    )


def mask_ignored(patch):
    real = diagnostics.mismatch
    patch.setattr(diagnostics, "mismatch", lambda g, t, mask: real(g, t, torch.ones_like(mask)))


def other_random_numbers(patch):
    real = experiment.stream
    patch.setattr(experiment, "stream", lambda seed, purpose, step: real(seed, purpose, step) ^ 1)


def edge_blocks_see_padding(patch):
    real = kernels.quantize_blocks

    def fault(x, block, fmt, rule, codes, fixed, place=None):
        ragged = torch.nn.functional.pad(x, (0, -x.shape[1] % block[1], 0, -x.shape[0] % block[0]), value=9.0)
        values, found, scale, bad = real(ragged.contiguous(), block, fmt, rule, codes, None, None)
        cut = [v[: x.shape[0], : x.shape[1]].contiguous() if v is not None else None for v in (values, found)]
        return *cut, scale, bad

    patch.setattr(kernels, "quantize_blocks", fault)


FAULTS = [
    (scale_inverted, "00_quickstart", ["setup", "eight", "eight-table", "eight-check"]),
    (ties_rounded_up, "01_numbers", ["setup", "all"]),
    (subnormals_have_a_leading_one, "01_numbers", ["setup", "all"]),
    (pow2_rounded_down, "02_block_quantization", ["setup", "pow2"]),
    (edge_blocks_see_padding, "02_block_quantization", ["setup", "ragged"]),
    (
        padding_moves_blocks,
        "03_fp8_linear",
        ["setup", "data", "predict", "output", "layer", "pad", "pad-run", "pad-check"],
    ),
    (weight_gradient_quantized_twice, "03_fp8_linear", ["setup", "data", "predict", "output", "layer", "layer-check"]),
    (no_promotion, "03_fp8_linear", ["setup", "acc-predict", "acc", "acc-run", "acc-compare"]),
    (refit_forgotten, "04_rollout", ["setup", "one", "group", "same", "refit", "refit-check"]),
    (mask_ignored, "06_mismatch", ["setup", "toy", "toy-metrics", "toy-check"]),
    (importance_weights_are_one, "07_importance_sampling", ["setup", "rollout", "modes", "modes-check"]),
    (effective_size_is_not_normalized, "07_importance_sampling", ["setup", "predict", "ess", "ess-compare"]),
    (other_random_numbers, "08_full_loop", ["setup", "repeat"]),
]


@pytest.mark.parametrize("fault, name, ids", FAULTS, ids=lambda x: x.__name__ if callable(x) else "")
def test_a_planted_fault_is_found(fault, name, ids, monkeypatch):
    run_cells(name, ids)
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        run_cells(name, ids)


def test_the_default_rule_is_what_the_lesson_shows():
    assert scales.default_scale(torch.tensor([448.0, 0.0]), formats.E4M3).tolist() == [1.0, 1.0]
