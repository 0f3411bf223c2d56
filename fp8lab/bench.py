"""Paired benchmarks: ours beside what one would compare it with, interleaved in one run on one machine.

    python -m fp8lab bench quantize | linear | rollout | step | all [--json]      (the last two: bench_loop.py)

A laptop's clock is not steady and other programs run, so absolute times mean little. Each round times every candidate
once, in turn; what is reported is the median over rounds of each candidate's *ratio to the baseline of the same
round*, with the quartiles, next to the best time. First calls (which compile) are timed apart. Goals that the project
set itself are listed with what was measured, met or missed. Everything here is emulation: no figure says anything about
the speed of FP8 hardware.
"""

from __future__ import annotations

import ast
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from fp8lab.formats import E4M3
from fp8lab.linear import Float8Linear
from fp8lab.operands import BF16_LINEAR, LinearPrecision
from fp8lab.quantizers import BlockQuantizer, quantization_error

MARKS = ("<!-- bench -->", "<!-- end bench -->")


def paired(
    candidates: Mapping[str, Callable[[], Any]],
    baseline: str,
    *,
    rounds: int = 9,
    per: int = 1,
    clock: Callable[[str, Callable[[], Any]], float] | None = None,
) -> list[dict[str, Any]]:
    """Time candidates in turn; one row each.

    Rows: `name`, `first_call_s`, `best_ns` (per unit of `per` elements), `ratio` (median of time / baseline's time in
    the same round) with `ratio_low` and `ratio_high` (quartiles). clock(name, call) ->
    seconds: another way to time a call.
    """
    seconds = clock or (lambda name, call: _seconds(call))
    first = {name: seconds(name, call) for name, call in candidates.items()}
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(rounds):
        for name, call in candidates.items():
            times[name].append(seconds(name, call))
    rows = []
    for name, values in times.items():
        ratios = [a / b for a, b in zip(values, times[baseline], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        row = {"name": name, "first_call_s": first[name], "best_ns": min(values) * 1e9 / per}
        rows.append(row | {"ratio": middle, "ratio_low": low, "ratio_high": high})
    return rows


def goal(what: str, measured: float, limit: float) -> dict[str, Any]:
    """One goal: `measured` is to be at most `limit`."""
    return {"goal": what, "limit": limit, "measured": measured, "met": measured <= limit}


def top_operations(call: Callable[[], Any], count: int = 5) -> list[str]:
    """The operations of one call with the most time of their own, `name share calls`."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    events = sorted(profile.key_averages(), key=lambda event: -event.self_cpu_time_total)
    total = sum(event.self_cpu_time_total for event in events) or 1.0
    return [f"{e.key[:52]:52s}{e.self_cpu_time_total / total:6.1%}  {e.count} calls" for e in events[:count]]


def profiles(goals: list[dict[str, Any]], calls: dict[str, Callable[[], Any]]) -> dict[str, list[str]]:
    """`top_operations` of the call behind each missed goal, by goal."""
    missed = [g["goal"] for g in goals if not g["met"] and g["goal"] in calls]
    return {name: top_operations(calls[name]) for name in missed}


def eager_fake_quantize(x: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """What one writes in plain torch for a matrix of whole, finite blocks: torch's own cast to FP8 and back."""
    tiles = x.unflatten(1, (-1, block[1])).unflatten(0, (-1, block[0]))
    amax = tiles.abs().amax(dim=(1, 3), keepdim=True)
    scale = torch.where(amax == 0, 1.0, amax / E4M3.max)
    codes = (tiles / scale).clamp(-E4M3.max, E4M3.max).to(E4M3.dtype)
    return (codes.float() * scale).view_as(x)


def bench_quantize(size: int = 4096, rounds: int = 9) -> dict[str, Any]:
    """ns per element of fake quantization of a size x size float32 matrix, against a copy of it.

    Both write to memory that is there already. `eager torch` is `eager_fake_quantize`; `torchao emulation` is torchao's
    CPU reference for 1x128 activations, which gives codes, where torchao can be found.
    """
    from fp8lab.kernels import times_compiled

    x = torch.randn((size, size), generator=torch.Generator().manual_seed(0))
    out = torch.empty_like(x)
    quantizers = {f"{block[0]}x{block[1]}": BlockQuantizer(block) for block in ((1, 128), (128, 128))}
    candidates: dict[str, Callable[[], Any]] = {"copy": lambda: out.copy_(x)}
    for name, q in quantizers.items():
        candidates[f"fp8lab {name}"] = lambda q=q: q.fake_quantize(x, out=out)
    for name, q in quantizers.items():
        candidates[f"fp8lab {name}, codes"] = lambda q=q: q.quantize(x)
        candidates[f"eager torch {name}"] = lambda q=q: eager_fake_quantize(x, q.block)
    torchao, name = torchao_reference()
    if torchao is not None:
        candidates["torchao emulation 1x128"] = lambda: torchao(x)
    before = times_compiled()
    rows = paired(candidates, "copy", rounds=rounds, per=x.numel())
    compiled = times_compiled() - before
    ours = {row["name"]: row for row in rows if row["name"].startswith("fp8lab")}
    goals = [goal(f"fp8lab {name}, times a copy", ours[f"fp8lab {name}"]["ratio"], 1.5) for name in quantizers]
    goals.append(goal("longest first call of a kernel, s", max(row["first_call_s"] for row in ours.values()), 3.0))
    result = {"bench": "quantize", "shape": [size, size], "unit": "ns/element", "baseline": "copy", "rows": rows}
    result |= {"goals": goals, "kernels_compiled": compiled}
    if torchao is None:
        return result | machine([f"torchao's emulation was not measured: {name}"])
    return result | machine([], [peer(name)])


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
    ratio = {row["name"]: row["ratio"] for row in forward_rows + backward_rows}
    goals = [goal("FP8 forward, cached weight, times float32", ratio["fp8lab FP8, forward"], 1.15)]
    goals.append(goal("FP8 forward + backward, times float32", ratio["fp8lab FP8, forward + backward"], 1.4))
    calls = {g["goal"]: lambda f=f: f(layers["fp8lab FP8"]) for g, f in zip(goals, (forward, both), strict=True)}
    result = {"bench": "linear", "shape": [m, k, n], "unit": "ns", "baseline": "float32 nn.Linear"}
    result["profiles"] = profiles(goals, calls)
    return result | {"rows": forward_rows + backward_rows, "goals": goals, "sqnr_db": gemm_sqnr()} | machine([])


def gemm_sqnr(m: int = 512, k: int = 1024, n: int = 768) -> dict[str, float]:
    """SQNR in dB of FP8 operands, alone and multiplied, against float64 products of the unrounded ones.

    Operands as in training: tokens with a few outlier channels, weights of standard deviation 0.02, heavy-tailed
    gradients. The three GEMMs are those of a Float8Linear with float32 output.
    """
    generator = torch.Generator().manual_seed(0)
    x, w, g = (torch.randn(shape, generator=generator) for shape in ((m, k), (n, k), (m, n)))
    x *= torch.randn(k, generator=generator).exp()
    w *= 0.02
    g *= torch.randn((m, n), generator=generator).exp() * 1e-4
    linear = torch.nn.Linear(k, n, bias=False)
    linear.weight.data.copy_(w)
    layer = Float8Linear.from_linear(linear, LinearPrecision(output="float32", weight_source="fp32"))
    x.requires_grad_()
    y = layer(x)
    y.backward(g)
    exact = {"output": x.double() @ w.double().t(), "grad_input": g.double() @ w.double()}
    exact["grad_weight"] = g.double().t() @ x.double()
    found = {"output": y, "grad_input": x.grad, "grad_weight": layer.weight.grad}
    decibels = {"weights 128x128": quantization_error(w, layer.quantized.values)["sqnr_db"]}
    for name, operand in (("activations 1x128", x), ("gradients 1x128", g)):
        decibels[name] = quantization_error(operand, BlockQuantizer().fake_quantize(operand))["sqnr_db"]
    return decibels | {name: quantization_error(exact[name], found[name].double())["sqnr_db"] for name in exact}


def benches() -> dict[str, Callable[..., dict[str, Any]]]:
    """Name -> benchmark; each takes `rounds`."""
    from fp8lab.bench_loop import bench_rollout, bench_step

    return {"quantize": bench_quantize, "linear": bench_linear, "rollout": bench_rollout, "step": bench_step}


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
    for met in result["goals"]:
        verdict = "met" if met["met"] else "missed"
        lines.append(f"goal {verdict}: {met['goal']}: {met['measured']:.2f}, at most {met['limit']:.3g}")
        lines += [f"    {line}" for line in result.get("profiles", {}).get(met["goal"], [])]
    lines += [f"beside {text}" for text in map(peer_text, result.get("peers", []))] + result.get("facts", [])
    if "kernels_compiled" in result:
        lines.append(f"kernels compiled in this run: {result['kernels_compiled']} (0: all came from the cache)")
    if "sqnr_db" in result:
        lines.append(f"SQNR in dB: {_decibels(result)}")
    return "\n".join([*lines, *result["not_measured"]])


def goals_table(results: list[dict[str, Any]]) -> str:
    """All goals of several benchmarks as a Markdown table, and under it where they were measured and what else was."""
    lines = ["| benchmark | goal | measured | at most | |", "|---|---|---|---|---|"]
    for result in results:
        for g in result["goals"]:
            verdict = "met" if g["met"] else "**missed**"
            lines.append(f"| {result['bench']} | {g['goal']} | {g['measured']:.2f} | {g['limit']:.3g} | {verdict} |")
    facts = [f"{results[0]['threads']} threads, {results[0]['instructions']}, torch {results[0]['torch']}"]
    for result in results:
        facts += [f"SQNR in dB: {_decibels(result)}"] if "sqnr_db" in result else []
        facts += [*map(peer_text, result.get("peers", [])), *result.get("facts", []), *result["not_measured"]]
    return "\n".join([*lines, "", "; ".join(facts) + "."])


def _decibels(result: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value:.1f}" for name, value in result["sqnr_db"].items())


def _seconds(call: Callable[[], Any]) -> float:
    time.sleep(0.01)  # OpenMP's threads spin for a while after their last job, on the cores that this call needs
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def machine(not_measured: list[str], peers: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    """What a result says of where it was measured, beside whom (`peer`), and of what was not."""
    return {"backend": "emulated", "threads": torch.get_num_threads(), "torch": torch.__version__} | {
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "peers": peers or [],
        "not_measured": not_measured,
    }


def peer(name: str, *packages: str, **settings: Any) -> dict[str, Any]:
    """What this process, in which a peer is timed, has: `name` (with its version), the versions of `packages` and of
    torch, torch's threads, and settings of the peer that matter to its speed."""
    versions = {package: metadata.version(package) for package in packages} | {"torch": torch.__version__}
    return {"name": name, "versions": versions, "threads": torch.get_num_threads(), "settings": settings}


def peer_text(found: dict[str, Any]) -> str:
    """A `peer` as a phrase."""
    beside = ", ".join(f"{package} {version}" for package, version in found["versions"].items())
    settings = "".join(f", {name}={value}" for name, value in found["settings"].items())
    return f"{found['name']} ({beside}) on {found['threads']} threads{settings}"


def require_marks(path: Path) -> None:
    """FileNotFoundError or ValueError unless `path` is a Markdown file with the lines between which the goals go."""
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}; --readme takes a Markdown file with the lines {' and '.join(MARKS)}")
    document = path.read_text(encoding="utf-8")
    if missing := [mark for mark in MARKS if f"{mark}\n" not in f"{document}\n"]:
        raise ValueError(f"{path} has no line {missing[0]!r}; the goals go between {' and '.join(MARKS)}: add them")


def torchao_reference() -> tuple[Callable[[torch.Tensor], Any] | None, str]:
    """torchao's reference quantizer of 1x128 activations and `torchao VERSION`, or None and why there is none.

    It is plain torch, but its module needs triton to be imported, also on a CPU: so the function alone is read.
    """
    references = os.environ.get("FP8LAB_REFERENCES") or str(Path(sys.prefix) / "references")
    name, module = "torch_blockwise_scale_act_quant_lhs", "torchao/prototype/blockwise_fp8_training/kernels.py"
    folder = next((f for f in (references, *sys.path) if Path(f, module).is_file()), None)
    if folder is None:
        return None, f"no torchao; `make test` puts it into {references} (Linux), or set FP8LAB_REFERENCES to a folder"
    nodes = ast.parse(Path(folder, module).read_text(encoding="utf-8")).body
    wanted = [node for node in nodes if isinstance(node, ast.FunctionDef) and node.name == name]
    (version,) = {found.version for found in metadata.distributions(name="torchao", path=[folder])} or {"?"}
    scope: dict[str, Any] = {"torch": torch, "e4m3_dtype": torch.float8_e4m3fn, "EPS": 1e-12}
    exec(compile(ast.Module(body=wanted, type_ignores=[]), "torchao", "exec"), scope)
    return scope[name], f"torchao {version}"
