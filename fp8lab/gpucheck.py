"""What only a GPU can tell, in one run: are the FP8 kernels right, how fast are they, does the loop run on them?

    python -m fp8lab gpu-check [--dry] --out FOLDER        writes gpu-check.json and gpu-check.md

    exact      each GEMM of `scaled_mm` against the emulated layer: the largest difference, in units of |a| @ |b|. Both
               multiply the same codes. A Hopper core keeps 13 fraction bits (gemm.py) and cuts, so a chain of 128 loses
               at most a few 2^-13; the limit is 2^-10 before BF16 output rounding
    linears    milliseconds of BF16 and FP8 linears over sizes, quantization included, forward and forward + backward
    quantizer  GB/s of our plain torch quantizer against a copy
    arms       three arms of the tiny model, the same loop as on a CPU, on real kernels
    llama      a random Llama of 1B shape: forward, forward + backward, and a decode step, in BF16 and FP8

    transformer_engine   the three GEMMs of TE's layer against the emulated one, as relative L2 distances (TE_LIMIT)
    vllm                 vLLM's rollouts and NativeEngine's, scored by the emulated trainer of the same plan: the gap
                         (GAP_LIMITS), and whether the engine holds the trainer's bytes; vLLM's own, which a GPU has,
                         are not read back, so there the gap alone decides

The last two say `skipped` where the package is missing. Sections are separate: one that fails is recorded with its
error and the rest goes on. One that would start after the time is up is recorded as not run. `--dry` runs all of it on
a CPU with small shapes, the emulated backend, and emulation in another order of sums for TE and vLLM, which proves the
script and nothing about a GPU.

Left out: a fused quantization kernel; vLLM's CUDA graphs, so its tokens a second are no peak. **Run so far in dry mode
only.**
"""

from __future__ import annotations

import json
import statistics
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fp8lab import diagnostics
from fp8lab.backends import support
from fp8lab.conversion import convert
from fp8lab.formats import round_bf16
from fp8lab.grpo import GRPOConfig
from fp8lab.linear import Float8Linear
from fp8lab.models import forward as cached_forward
from fp8lab.models import load_model, load_tokenizer
from fp8lab.operands import BF16_LINEAR, LinearPrecision
from fp8lab.precision import PrecisionPlan
from fp8lab.quantizers import BlockQuantizer
from fp8lab.rollout import NativeEngine, RolloutEngine, SamplingParams, VLLMEngine
from fp8lab.runlog import environment
from fp8lab.scaled_mm import ScaledMMLinear
from fp8lab.tasks import load_task, prompt_batch
from fp8lab.te_linear import TransformerEngineLinear, settle_environment
from fp8lab.trainer import Trainer

LIMIT = 2.0**-10
"""Largest difference of a GEMM to the emulated one, in units of |a| @ |b|."""
ARMS = ("bf16", "fp8-rollout", "fp8-e2e")
TE_LIMIT = 2.0**-7
"""Largest distance of TE's GEMMs to the emulated ones in L2 norms, all rounded to BF16: as if every element were one
BF16 step off. Emulated, Hopper's accumulator costs 0.07 %. Beyond the limit are weights not rounded to BF16 first
(1.3 %), an operand left in BF16 (2.6 %), power-of-two scales (5 %) and E5M2 (6 %); within it is the rule `default`,
which differs in last bits (0.3 %)."""
GAP_LIMITS = {"fp8-e2e": 1.05, "bf16": 1.02}
"""Plan -> largest token_mult_prob_error: NeMo RL's two bands (sequence_metrics.py). vLLM on a GPU holds activations in
BF16, the trainer here in float32. Emulated, that alone gives 1.003 in BF16, and 1.021 in FP8, where it flips codes: as
much as FP8 on one side only. So wrong weights are seen, FP8 left out is not. FP8 comes first, because vLLM settles
DeepGEMM's scale rule once a process."""
NOT_READ_BACK = "not read back: vLLM's own layout"
BUDGET_S = 330.0


def gpu_check(out: Path, *, dry: bool = False, budget_s: float = BUDGET_S) -> dict[str, Any]:
    """Run every section and write both files into the folder `out`; `ok` is False if any section failed or was not run.

    RuntimeError without a GPU that scaled_mm supports, unless dry.
    """
    usable, why = support()["scaled_mm"]
    if not dry and not usable:
        raise RuntimeError(f"the GPU check needs scaled_mm: {why}; --dry runs the script on a CPU")
    start = time.perf_counter()
    report = {"dry": dry, "backend": "emulated" if dry else "scaled_mm", "environment": environment(), "sections": {}}
    out.mkdir(parents=True, exist_ok=True)
    for name, section in SECTIONS.items():
        began = time.perf_counter()
        if began - start > budget_s:
            found = {"ok": False, "error": f"not run: {budget_s:.0f} s were up"}
        else:
            try:
                found = {"ok": True, **section(dry)}
            except Exception as error:  # whatever it is, the other sections must still run
                found = {"ok": False, "error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
        report["sections"][name] = found | {"seconds": time.perf_counter() - began}
        report["ok"] = all(section["ok"] for section in report["sections"].values())
        (out / "gpu-check.json").write_text(json.dumps(report, indent=1), encoding="utf-8")
        (out / "gpu-check.md").write_text(as_markdown(report), encoding="utf-8")
    return report


def exact(dry: bool) -> dict[str, Any]:
    """Differences of the three GEMMs at float32 output, in units of |a| @ |b| (w as it was rounded)."""
    kind, rows = _real_layer(dry), []
    for m, k, n in ((130, 256, 128), (256, 384, 256)) if dry else ((130, 256, 128), (2048, 4096, 4096)):
        linear = nn.Linear(k, n, bias=False, device=_device(dry))
        precision = LinearPrecision(output="float32")
        real, model = (c.from_linear(linear, precision) for c in (kind, Float8Linear))
        x, g = (_random((m, width), dry) for width in (k, n))
        w = model.quantized.values.abs()
        magnitudes = (x.abs() @ w.t(), g.abs() @ w, g.abs().t() @ x.abs())
        calls = ("output", (x,)), ("grad_input", (g,)), ("grad_weight", (g, x))
        for (name, operands), magnitude in zip(calls, magnitudes, strict=True):
            weights = () if name == "grad_weight" else ("quantized",)
            a, b = (getattr(layer, name)(*operands, *(getattr(layer, q) for q in weights)) for layer in (real, model))
            difference = float(((a - b).abs() / magnitude).max())
            rows.append({"gemm": name, "shape": [m, k, n], "difference": difference, "ok": difference <= LIMIT})
    return {"ok": all(row["ok"] for row in rows), "limit": LIMIT, "rows": rows}


def linears(dry: bool) -> dict[str, Any]:
    """Milliseconds of torch's BF16 linear and of ours in BF16 and FP8."""
    rows, kind = [], _real_layer(dry)
    for m, width in ((128, 256),) if dry else ((64, 4096), (1024, 4096), (8192, 2048), (8192, 4096), (8192, 8192)):
        linear = nn.Linear(width, width, bias=False, device=_device(dry))
        x = _random((m, width), dry).requires_grad_()
        layers = {"torch BF16": None if dry else nn.Linear(width, width, bias=False).to(x.device, torch.bfloat16)}
        layers |= {"fp8lab BF16": kind.from_linear(linear, BF16_LINEAR)}
        layers |= {"fp8lab FP8": kind.from_linear(linear, LinearPrecision())}
        for name, layer in layers.items():
            if layer is not None:
                inputs = x.detach().to(layer.weight.dtype).requires_grad_()
                rows.append({"layer": name, "m": m, "k": width, "n": width, **_both(layer, inputs, dry)})
    return {"rows": rows}


def quantizer(dry: bool) -> dict[str, Any]:
    """GB/s, counting the float32 read and written: a copy, and quantize-dequantize in plain torch."""
    x = _random((256, 512) if dry else (8192, 8192), dry)
    calls: dict[str, Callable[[], Any]] = {"copy": lambda: x.clone()}
    for block in ((1, 128), (128, 128)):
        calls[f"reference {block[0]}x{block[1]}"] = lambda b=block: BlockQuantizer(b).reference(x)
    return {"rows": [{"name": n, "gb_per_s": 2 * x.nbytes / _ms(call, dry) / 1e6} for n, call in calls.items()]}


def arms(dry: bool) -> dict[str, Any]:
    """The tiny model's loop, a few steps per arm; reward and mismatch of each step, and the backends that ran."""
    task, tokenizer, rows = load_task("arithmetic"), load_tokenizer("tiny-llama"), []
    steps, prompts = (1, 4) if dry else (10, 96)
    sampling = SamplingParams(n=8, max_tokens=6)
    for arm in ARMS:
        model, plan = load_model("tiny-llama").to(_device(dry)), PrecisionPlan.preset(arm)
        engine = NativeEngine(model, plan, tokenizer=tokenizer)
        trainer = Trainer(model, plan, GRPOConfig(), tokenizer=tokenizer)
        for step in range(1, steps + 1):
            began = time.perf_counter()
            batch = prompt_batch(task.train, prompts, 0, step)
            rollout = engine.generate(batch["prompt"], sampling, seed=step)
            columns = {name: [v for v in values for _ in range(8)] for name, values in batch.items()}
            found = trainer.step(rollout, task.reward(columns.pop("prompt"), list(rollout.completions), **columns))
            engine.refit(trainer)
            row = {"arm": arm, "step": step, "seconds": time.perf_counter() - began, "reward": found["reward"]}
            row |= {"token_mult_prob_error": found["token_mult_prob_error"]}
            rows.append(row | {"rollout": engine.conversion.backend, "trainer": trainer.conversion.backend})
    wanted = {"emulated" if dry else "scaled_mm"}
    return {"ok": {row[side] for row in rows for side in ("rollout", "trainer")} == wanted, "rows": rows}


def llama(dry: bool) -> dict[str, Any]:
    """Milliseconds of a random Llama of 1B shape, its linears in BF16 and in FP8."""
    from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32}
    shape |= {"num_key_value_heads": 8, "vocab_size": 128_256}
    if dry:
        shape |= {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
        shape |= {"num_key_value_heads": 2, "vocab_size": 256}
    config = LlamaConfig(**shape)
    batch, length = (2, 16) if dry else (4, 1024)
    tokens, rows = torch.randint(config.vocab_size, (batch, length), device=_device(dry)), []
    for plan in ("bf16", "fp8-e2e"):
        torch.manual_seed(0)
        with torch.device(_device(dry)):
            model = LlamaForCausalLM(config)
        backend = convert(model, PrecisionPlan.preset(plan), side="trainer").backend

        def forward(model=model):
            return model(input_ids=tokens, use_cache=False).logits

        def both(model=model):
            forward(model).float().logsumexp(-1).mean().backward()
            model.zero_grad(set_to_none=True)

        def without_gradient(call):
            with torch.no_grad():
                return call()

        row = {"plan": plan, "backend": backend, "forward_ms": _ms(lambda f=forward: without_gradient(f), dry)}
        row["forward_backward_ms"] = _ms(both, dry)
        cache = DynamicCache(config=config)

        def decode(model=model, cache=cache, count=1):
            positions = torch.arange(count, device=tokens.device).expand(batch, count) + cache.get_seq_length()
            seen = torch.ones((batch, cache.get_seq_length() + count), dtype=torch.long, device=tokens.device)
            return cached_forward(model, tokens[:, :count], seen, positions, cache)

        without_gradient(lambda d=decode: d(count=length))
        row["decode_step_ms"] = _ms(lambda d=decode: without_gradient(d), dry)
        rows.append(row)
        cache.reset()
        model.to("meta")  # its memory, which the next one needs
    return {"batch": batch, "length": length, "rows": rows}


def transformer_engine(dry: bool) -> dict[str, Any]:
    """Relative L2 distances of TE's GEMMs to the emulated ones on equal w, x and g, and milliseconds of both."""
    if missing := _skipped("transformer_engine", dry):
        return missing
    precision, rows = LinearPrecision(rule="transformer_engine"), []
    settle_environment(precision.rule)
    for m, k, n in ((130, 256, 128), (256, 384, 512)) if dry else ((130, 256, 128), (8192, 4096, 14336)):
        linear = nn.Linear(k, n, bias=False, device=_device(dry))
        linear.weight.data = _random((n, k), dry)  # blocks of different scales, unlike nn.Linear's
        x, g = (round_bf16(_random((m, width), dry)) for width in (k, n))  # TE gets BF16 from autocast
        layers = {"te": _te_layer(linear, precision, dry), "emulated": Float8Linear.from_linear(linear, precision)}
        theirs, ours = (_gemms(layer, x, g) for layer in layers.values())
        row = {"shape": [m, k, n]}
        row |= {name: float((theirs[name] - ours[name]).norm() / ours[name].norm()) for name in ours}
        row["ok"] = all(row[name] <= TE_LIMIT for name in ours)
        for name, layer in layers.items():
            times = _both(layer, x.clone().requires_grad_(), dry)
            row |= {f"{name}_{key}": value for key, value in times.items()}
        rows.append(row)
    note = {"note": "Dry run: the emulated layer with kernels='other' stands in for TE's."} if dry else {}
    return {"ok": all(row["ok"] for row in rows), "limit": TE_LIMIT, **note, "rows": rows}


def vllm(dry: bool) -> dict[str, Any]:
    """Gap of vLLM's and of NativeEngine's rollouts to the trainer of the same plan; vLLM alone is on the GPU.

    fp8-rollout has the rollout side of fp8-e2e, so its engine is the same.
    """
    if missing := _skipped("vllm", dry):
        return missing
    prompts = prompt_batch(load_task("arithmetic").train, 4 if dry else 256, 0, 1)["prompt"]
    sampling, rows = SamplingParams(n=8, max_tokens=6), []
    for name, limit in GAP_LIMITS.items():
        plan = PrecisionPlan.preset(name)
        trainer = Trainer("tiny-llama", plan, GRPOConfig())  # on the CPU, so emulated
        for kind in ("native", "stand-in" if dry else "vllm"):
            engine = NativeEngine("tiny-llama", plan) if kind == "native" else _second_engine(plan, dry)
            engine.generate(prompts[:2], sampling, seed=0)  # what only a first call does
            began = time.perf_counter()
            rollout = engine.generate(prompts, sampling, seed=1)
            seconds = time.perf_counter() - began
            gap = diagnostics.mismatch(rollout.logprobs, trainer.score(rollout), rollout.mask)
            row = {"plan": name, "engine": kind, "backend": engine.stats()["backend"], "bytes": _bytes(engine, trainer)}
            engine.close()
            row |= {"token_mult_prob_error": gap.token_mult_prob_error, "limit": limit, "k3": gap.gen_kl_error}
            row |= {"tokens": gap.tokens, "tokens_per_s": gap.tokens / seconds}
            whole = gap.tokens > 0 and gap.nonfinite_tokens == 0 and row["bytes"] in ("equal", NOT_READ_BACK)
            rows.append(row | {"ok": whole and gap.token_mult_prob_error <= limit})
    note = {"note": "Dry run: NativeEngine with kernels='other' stands in for vLLM."} if dry else {}
    return {"ok": all(row["ok"] for row in rows), **note, "rows": rows}


SECTIONS: dict[str, Callable[[bool], dict[str, Any]]] = {
    section.__name__: section for section in (exact, linears, quantizer, arms, llama, transformer_engine, vllm)
}


def as_markdown(report: dict[str, Any]) -> str:
    """The report: one table per section, and what failed."""
    where = report["environment"].get("cuda") or "CPU"
    lines = [f"# GPU check: {where}, backend {report['backend']}" + (" (dry run)" if report["dry"] else "")]
    for name, section in report["sections"].items():
        verdict = "ok" if section["ok"] else f"FAILED {section.get('error', 'see the rows')}"
        if "skipped" in section:
            verdict = f"skipped: {section['skipped']}"
        lines += ["", f"## {name}: {verdict}, {section['seconds']:.1f} s", ""]
        if note := section.get("note"):
            lines += [note, ""]
        if rows := section.get("rows"):
            lines += ["| " + " | ".join(rows[0]) + " |", "|" + "---|" * len(rows[0])]
            lines += ["| " + " | ".join(_cell(value) for value in row.values()) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _device(dry: bool) -> str:
    return "cpu" if dry else "cuda"


def _real_layer(dry: bool) -> type[Float8Linear]:
    return Float8Linear if dry else ScaledMMLinear


def _skipped(package: str, dry: bool) -> dict[str, Any] | None:
    """What a section says whose package is missing; None if it can run."""
    usable, why = support()[package]
    return None if dry or usable else {"skipped": f"{package} is not installed: {why}"}


def _te_layer(linear: nn.Linear, precision: LinearPrecision, dry: bool) -> Float8Linear:
    if dry:
        return Float8Linear.from_linear(linear, precision, kernels="other")
    return TransformerEngineLinear.from_linear(linear, precision)


def _gemms(layer: Float8Linear, x: torch.Tensor, g: torch.Tensor) -> dict[str, torch.Tensor]:
    """What the three GEMMs give in forward and backward; all rounded to BF16, as TE's grad_weight is."""
    x, layer.weight.grad = x.clone().requires_grad_(), None
    y = layer(x)
    y.backward(g)
    found = {"output": y.detach(), "grad_input": x.grad, "grad_weight": layer.weight.grad}
    return {name: round_bf16(value) for name, value in found.items()}


def _second_engine(plan: PrecisionPlan, dry: bool) -> RolloutEngine:
    if dry:
        return NativeEngine("tiny-llama", plan, kernels="other")
    memory = {"gpu_memory_utilization": 0.2, "kv_cache_memory_bytes": 2**30}  # beside what torch still holds
    return VLLMEngine("tiny-llama", plan, device="gpu", enforce_eager=True, **memory)


def _bytes(engine: RolloutEngine, trainer: Trainer) -> str:
    """Whether the engine holds the trainer's codes, scales and weights; see VLLMEngine.check_same_bytes."""
    if engine.stats()["backend"] == "vllm":
        return NOT_READ_BACK
    found = engine.check_same_bytes(trainer)
    return f"{len(found)} layers differ, first {next(iter(found))}" if found else "equal"


def _random(shape: tuple[int, int], dry: bool) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(_device(dry))


def _both(layer: nn.Module, x: torch.Tensor, dry: bool) -> dict[str, float]:
    def forward():
        with torch.no_grad():
            layer(x)

    def backward():
        layer(x).sum().backward()
        x.grad = layer.weight.grad = None

    return {"forward_ms": _ms(forward, dry), "forward_backward_ms": _ms(backward, dry)}


def _ms(call: Callable[[], Any], dry: bool, repeats: int = 7) -> float:
    """Median milliseconds after a first call apart, with the GPU idle before and after."""
    wait = (lambda: None) if dry else torch.cuda.synchronize
    times = []
    for _ in range(1 + (2 if dry else repeats)):
        wait()
        start = time.perf_counter()
        call()
        wait()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times[1:])
