"""Paired benchmarks: ours beside what one would compare it with, interleaved in one run on one machine.

    python -m fp8lab bench quantize | linear [--json]

A laptop's clock is not steady and other programs run, so absolute times mean little. Each round times every candidate
once, in turn; what is reported is the median over rounds of each candidate's *ratio to the baseline of the same
round*, with the quartiles, next to the best time. First calls (which compile) are timed apart. Everything here is
emulation: no figure says anything about the speed of FP8 hardware.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F

from fp8lab.linear import Float8Linear
from fp8lab.precision import BF16_LINEAR, LinearPrecision
from fp8lab.quantizers import BlockQuantizer


def paired(
    candidates: Mapping[str, Callable[[], Any]], baseline: str, *, rounds: int = 9, per: int = 1
) -> list[dict[str, Any]]:
    """Time candidates in turn; one row each.

    Rows: `name`, `first_call_s`, `best_ns` (per unit of `per` elements), `ratio` (median of time / baseline's time in
    the same round) with `ratio_low` and `ratio_high` (quartiles).
    """
    first = {name: _seconds(call) for name, call in candidates.items()}
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(rounds):
        for name, call in candidates.items():
            times[name].append(_seconds(call))
    rows = []
    for name, values in times.items():
        ratios = [a / b for a, b in zip(values, times[baseline], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        row = {"name": name, "first_call_s": first[name], "best_ns": min(values) * 1e9 / per}
        rows.append(row | {"ratio": middle, "ratio_low": low, "ratio_high": high})
    return rows


def bench_quantize(size: int = 4096, rounds: int = 9) -> dict[str, Any]:
    """ns per element of fake quantization of a size x size float32 matrix, against a copy of it.

    `eager torch` is our reference in plain torch operations; `torchao emulation` is torchao's CPU reference for 1x128
    activations, where torchao is installed.
    """
    x = torch.randn((size, size), generator=torch.Generator().manual_seed(0))
    out = torch.empty_like(x)
    candidates: dict[str, Callable[[], Any]] = {"copy": lambda: out.copy_(x)}
    for block in ((1, 128), (128, 128)):
        quantizer = BlockQuantizer(block)
        name = f"{block[0]}x{block[1]}"
        candidates[f"fp8lab {name}"] = lambda q=quantizer: q.fake_quantize(x, out=out)
        candidates[f"fp8lab {name}, codes"] = lambda q=quantizer: q.quantize(x)
        candidates[f"eager torch {name}"] = lambda q=quantizer: q.reference(x)
    torchao = _torchao()
    if torchao is not None:
        candidates["torchao emulation 1x128"] = lambda: torchao(x)
    rows = paired(candidates, "copy", rounds=rounds, per=x.numel())
    missing = [] if torchao is not None else ["torchao is not installed: its emulation was not measured"]
    return {
        "bench": "quantize",
        "shape": [size, size],
        "unit": "ns/element",
        "baseline": "copy",
        "rows": rows,
    } | _machine(missing)


def bench_linear(m: int = 512, k: int = 2048, n: int = 2048, rounds: int = 9) -> dict[str, Any]:
    """ms of one emulated linear layer on (m, k) tokens, forward and forward + backward, against a float32 nn.Linear."""
    generator = torch.Generator().manual_seed(0)
    plain = torch.nn.Linear(k, n, bias=False)
    layers = {"float32 nn.Linear": plain}
    layers["fp8lab BF16"] = Float8Linear.from_linear(plain, BF16_LINEAR)
    layers["fp8lab FP8"] = Float8Linear.from_linear(plain, LinearPrecision())
    x = torch.randn((m, k), generator=generator, requires_grad=True)
    g = torch.randn((m, n), generator=generator)
    w = plain.weight.detach()

    def forward(layer):
        with torch.no_grad():
            layer(x)

    def both(layer):
        layer(x).backward(g)
        x.grad = layer.weight.grad = None

    candidates: dict[str, Callable[[], Any]] = {
        f"{name}, forward": lambda a=a: forward(a) for name, a in layers.items()
    }
    candidates["bf16 matmul of the CPU, forward"] = lambda: F.linear(x.detach().bfloat16(), w.bfloat16())
    forward_rows = paired(candidates, "float32 nn.Linear, forward", rounds=rounds)
    candidates = {f"{name}, forward + backward": lambda a=a: both(a) for name, a in layers.items()}
    backward_rows = paired(candidates, "float32 nn.Linear, forward + backward", rounds=rounds)
    result = {"bench": "linear", "shape": [m, k, n], "unit": "ns", "baseline": "float32 nn.Linear"}
    return result | {"rows": forward_rows + backward_rows} | _machine([])


BENCHES = {"quantize": bench_quantize, "linear": bench_linear}


def as_text(result: dict[str, Any]) -> str:
    """A benchmark's result as a table."""
    shape = " x ".join(map(str, result["shape"]))
    lines = [
        f"{result['bench']} at {shape}, {result['threads']} threads; ratio to {result['baseline']} of the same round"
    ]
    lines.append(f"{'':38s}{result['unit']:>14s}{'ratio':>8s}  quartiles      first call")
    for row in result["rows"]:
        spread = f"{row['ratio_low']:.2f}-{row['ratio_high']:.2f}"
        lines.append(
            f"{row['name']:38s}{row['best_ns']:14.4g}{row['ratio']:8.2f}  {spread:13s}{row['first_call_s']:8.2f} s"
        )
    return "\n".join([*lines, *result["not_measured"]])


def _seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _machine(not_measured: list[str]) -> dict[str, Any]:
    return {"backend": "emulated", "threads": torch.get_num_threads(), "torch": torch.__version__} | {
        "not_measured": not_measured
    }


def _torchao() -> Callable[[torch.Tensor], Any] | None:
    try:
        from torchao.prototype.blockwise_fp8_training.kernels import torch_blockwise_scale_act_quant_lhs
    except ImportError:
        return None
    return torch_blockwise_scale_act_quant_lhs
