"""The loop against its peers: rollouts, whole GRPO steps, calibration, import time and memory, measured in one run.

    python -m fp8lab bench rollout | step [--json]

Peers that cannot share our environment are timed in their own, together with us: a child process runs this module with
that environment's Python, and takes turns between fp8lab and the peer there, so the ratio is still one of neighbours.

    vLLM    .venv-vllm (`make vllm`): its CPU build in float32 with its own kernels, without compilation
            (enforce_eager=True), on as many threads as we have
    TRL     the Python in the variable FP8LAB_TRL_PYTHON: an environment with trl and numba, torch and transformers as
            ours (TRL_HOW); GRPOTrainer with the same model, task, prompts a step and completions a prompt

Each result names its peers' versions, threads and settings, as the process that ran them found them. A peer that is not
there is named, never guessed. `transformers.generate` samples the same prompts from the same float32 weights, but other
random numbers: tokens are counted, and what is compared is time for equally many sequences. The goals are on our
float32 engine, whose linears are the peers' (`conversion.restore`); BF16 and FP8 are emulated, and rounding their
operands is work that the peers do not do. A missed goal comes with the five dearest operations of what missed it.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from fp8lab.bench import goal, machine, paired, peer, profiles
from fp8lab.conversion import restore
from fp8lab.experiment import Loop
from fp8lab.models import load_model, load_tokenizer
from fp8lab.precision import PrecisionPlan
from fp8lab.recipes import load_recipe
from fp8lab.rollout import NativeEngine, SamplingParams
from fp8lab.tasks import load_task, prompt_batch

MODEL, TASK = "tiny-llama", "arithmetic"
GROUP, PROMPTS, MAX_TOKENS = 8, 32, 6
EQUAL_TOKENS = 32
ROOT = Path(__file__).parent.parent
TRL_HOW = (
    "make it with `python -m venv DIR` and `DIR/bin/pip install trl==1.16.0 torch==2.13.0 transformers==5.24.0 numba`, "
    "and set FP8LAB_TRL_PYTHON=DIR/bin/python"
)


def bench_rollout(rounds: int = 25, *, prompts: int = PROMPTS, equal_tokens: int = EQUAL_TOKENS) -> dict[str, Any]:
    """Seconds for `prompts` groups of 8 sequences, ours and transformers.generate's, and vLLM's where it is installed.

    Twice: with answers as long as the model makes them, and with `equal_tokens` tokens from everyone.
    """
    questions, tokenizer = _questions(prompts), load_tokenizer(MODEL)
    model = _as_people_load_it()
    engine = _float32_engine(model, tokenizer)
    seeds = itertools.count()

    def generate(max_tokens: int = MAX_TOKENS, equal: bool = False):
        return _generate(model, tokenizer, questions, max_tokens, equal=equal)

    def native(engine: NativeEngine, sampling: SamplingParams):
        return engine.generate(questions, sampling, seed=next(seeds))

    sampling = SamplingParams(n=GROUP, max_tokens=MAX_TOKENS)
    candidates = {"transformers.generate": generate, "fp8lab float32": lambda: native(engine, sampling)}
    rows = paired(candidates, "transformers.generate", rounds=rounds)
    goals = [goal("float32 rollout, times transformers.generate", rows[1]["ratio"], 1 / 3)]
    calls: dict[str, Callable[[], Any]] = {goals[0]["goal"]: lambda: native(engine, sampling)}
    bf16, fp8 = (NativeEngine(model, PrecisionPlan.preset(p), tokenizer=tokenizer) for p in ("bf16", "fp8-rollout"))
    rows += paired(
        {
            "generate, beside emulation": generate,
            "fp8lab BF16": lambda: native(bf16, sampling),
            "fp8lab FP8 linears": lambda: native(fp8, sampling),
        },
        "generate, beside emulation",
        rounds=rounds,
    )
    equal = dataclasses.replace(sampling, max_tokens=equal_tokens)
    endless = _float32_engine(model, tokenizer)
    endless._eos = endless._eos.new_full((1,), -1)  # no token ends an answer
    rows += paired(
        {
            "generate, equal lengths": lambda: generate(equal_tokens, equal=True),
            "fp8lab float32, equal lengths": lambda: native(endless, equal),
        },
        "generate, equal lengths",
        rounds=rounds,
    )
    python = ROOT / ".venv-vllm" / "bin" / "python"
    vllm, peers, missing = _peer("vllm", python, "run `make vllm`", rounds, prompts)
    if vllm:
        rows += vllm
        goals.append(goal("float32 rollout, times vLLM on this CPU", _ratio(vllm, "fp8lab float32, beside vLLM"), 1.0))
        calls[goals[-1]["goal"]] = lambda: native(engine, sampling)
    result = {"bench": "rollout", "shape": [prompts, GROUP], "unit": "ns", "baseline": "the peer", "rows": rows}
    peers = [peer(f"transformers {metadata.version('transformers')}"), *peers]
    return result | {"goals": goals, "profiles": profiles(goals, calls)} | machine(missing, peers)


def bench_step(rounds: int = 5, *, prompts: int = 96) -> dict[str, Any]:
    """Seconds of whole steps of the loop (rollout, reward, training, refit, calibration) and of what they leave out.

    prompts: per step, with 8 completions each, as in the recipes.
    """
    loops = {name: Loop(_config(name, prompts)) for name in ("bf16", "fp8-e2e")}
    # calibration is compared with a forward of the trainer, so the engine has the trainer's kernels
    loops["fp8-e2e-kv"] = Loop(dataclasses.replace(_config("fp8-e2e-kv", prompts), rollout_kernels="default"))
    steps = dict.fromkeys(loops, 0)

    def step(name: str) -> None:
        steps[name] += 1
        loops[name].step(steps[name])

    rows = paired({f"{name}, step": lambda n=name: step(n) for name in loops}, "bf16, step", rounds=rounds)
    goals = [goal("FP8 end to end, times the BF16 step", _ratio(rows, "fp8-e2e, step"), 1.3)]
    calls: dict[str, Callable[[], Any]] = {goals[0]["goal"]: lambda: step("fp8-e2e")}
    calibration, calibration_goals, call, text = _calibration(loops["fp8-e2e-kv"], step, rounds)
    rows += calibration
    goals += calibration_goals
    calls[calibration_goals[0]["goal"]] = call
    environment = os.environ.get("FP8LAB_TRL_PYTHON")
    trl, peers, missing = _peer("trl", Path(environment or "FP8LAB_TRL_PYTHON"), TRL_HOW, rounds, prompts)
    if trl:
        rows += trl
        goals.append(goal("BF16 step, times TRL's GRPOTrainer", _ratio(trl, "fp8lab BF16 step, beside TRL"), 1 / 3))
        calls[goals[-1]["goal"]] = lambda: step("bf16")
    imports = import_seconds()
    goals.append(goal("import the loop beyond torch and transformers, s", imports, 1.0))
    memory = peak_memory(prompts)
    facts = [text, f"peak memory of the FP8 loop: {memory['loop']:.0f} MiB, of which imports {memory['imports']:.0f}"]
    result = {"bench": "step", "shape": [prompts, GROUP], "unit": "ns", "baseline": "BF16 or the peer", "rows": rows}
    result |= {"goals": goals, "profiles": profiles(goals, calls), "memory_mib": memory, "facts": facts}
    return result | machine(missing, peers)


def _calibration(loop: Loop, step: Callable[[str], None], rounds: int):
    """Rows, goals, the call that the first goal times, and a sentence on its share of a step."""
    config = loop.config
    batch = prompt_batch(loop.task.train, config.prompts_per_step, config.seed, 1)
    rollout = loop._generate(batch["prompt"], loop._sampling(), "bench", 1)
    own = next(loop.engine.model.parameters())
    tokens = loop.engine.calibrate(rollout)["tokens"]

    def calibrate():
        loop.engine.calibrate(rollout)

    candidates = {
        "one no-grad forward": lambda: loop.trainer.score(rollout),
        "calibration, every step": calibrate,
        "calibration, from the rollout": lambda: loop.engine.calibrate(None),
        "a step, with calibration": lambda: step("fp8-e2e-kv"),
    }
    rows = paired(candidates, "one no-grad forward", rounds=rounds)
    whole = _ratio(rows, "a step, with calibration")
    share = _ratio(rows, "calibration, every step") / whole
    cheap = _ratio(rows, "calibration, from the rollout") / whole
    goals = [goal("calibration, times one no-grad forward", _ratio(rows, "calibration, every step"), 1.2)]
    goals.append(goal("calibration from the rollout (the call), share of a step", cheap, 0.03))
    text = f"calibration reads {tokens} tokens and takes {share:.1%} of a step ({own.device.type}, emulated)"
    return rows, goals, calibrate, text


def import_seconds(rounds: int = 5) -> float:
    """Median seconds that all of the loop takes to import in a new process after torch and transformers' model classes.

    `import fp8lab` alone loads nothing until a name is used, so it would say little.
    """
    code = "import time, torch; from transformers import AutoModelForCausalLM; t = time.perf_counter(); "
    code += "import fp8lab, fp8lab.experiment; print(time.perf_counter() - t)"
    return statistics.median(float(_child(sys.executable, ["-c", code])) for _ in range(rounds))


def peak_memory(prompts: int) -> dict[str, float]:
    """MiB that a process of its own held at most: after the imports, and after two steps of the FP8 loop."""
    return json.loads(_child(sys.executable, ["-m", "fp8lab.bench_loop", "memory", "2", str(prompts)]))


def _ratio(rows: list[dict[str, Any]], name: str) -> float:
    return next(row["ratio"] for row in rows if row["name"] == name)


def _questions(prompts: int) -> list[str]:
    return prompt_batch(load_task(TASK).train, prompts, 0, 1)["prompt"]


def _config(recipe: str, prompts: int):
    return dataclasses.replace(load_recipe(recipe), prompts_per_step=prompts, steps=10_000)


def _as_people_load_it():
    model = load_model(MODEL)
    model.set_attn_implementation("sdpa")  # transformers' default
    return model


def _float32_engine(model, tokenizer) -> NativeEngine:
    engine = NativeEngine(model, PrecisionPlan.preset("bf16"), tokenizer=tokenizer)
    restore(engine.model)
    return engine


@torch.no_grad()
def _generate(model, tokenizer, questions: list[str], max_tokens: int, *, equal: bool) -> torch.Tensor:
    inputs = tokenizer(questions, return_tensors="pt", padding=True, padding_side="left", return_token_type_ids=False)
    lengths = {"max_new_tokens": max_tokens, "min_new_tokens": max_tokens if equal else 0}
    return model.generate(**inputs, **lengths, do_sample=True, temperature=1.0, top_k=0, num_return_sequences=GROUP)


def _peer(name: str, python: Path, how: str, rounds: int, prompts: int):
    """Rows measured by a child in the peer's environment, and a list with what it found there (bench.peer); or no rows,
    and a list with the sentence that says what is missing."""
    if not python.is_file():
        return [], [], [f"{name} was not measured: no {python}; {how}"]
    try:
        found = json.loads(_child(str(python), ["-m", "fp8lab.bench_loop", name, str(rounds), str(prompts)]))
    except RuntimeError as error:
        return [], [], [f"{name} was not measured: {error}"]
    return found["rows"], [found["peer"]], []


def _child(python: str, arguments: list[str]) -> str:
    """The last line that a new process printed; RuntimeError with what it wrote to stderr last."""
    threads = str(torch.get_num_threads())  # vllm_process.py gives vLLM those of OMP_NUM_THREADS
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "FP8LAB_THREADS": threads, "OMP_NUM_THREADS": threads}
    done = subprocess.run([python, *arguments], env=environment, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["it wrote nothing"])[-1])
    return done.stdout.strip().splitlines()[-1]


def _vllm_rows(rounds: int, prompts: int) -> dict[str, Any]:
    """In .venv-vllm: vLLM in float32 and NativeEngine in turn."""
    from fp8lab.rollout import VLLMEngine
    from fp8lab.rollout.vllm_process import process_unchanged

    questions, sampling = _questions(prompts), SamplingParams(n=GROUP, max_tokens=MAX_TOKENS)
    engines = {"vLLM float32": VLLMEngine(MODEL, None)}
    engines["fp8lab float32, beside vLLM"] = _float32_engine(load_model(MODEL), load_tokenizer(MODEL))
    calls = {name: lambda e=e: e.generate(questions, sampling, seed=0) for name, e in engines.items()}
    with process_unchanged():  # what vLLM runs in
        vllm = engines["vLLM float32"]
        eager = vllm.llm.llm_engine.vllm_config.model_config.enforce_eager
        found = peer(vllm.stats()["engine"], "transformers", enforce_eager=eager)
    return {"rows": paired(calls, "vLLM float32", rounds=rounds), "peer": found}


def _trl_rows(rounds: int, prompts: int) -> dict[str, Any]:
    """In TRL's environment: after each step of GRPOTrainer one of ours; each from begin to end of a step."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    loop, task = Loop(_config("bf16", prompts)), load_task(TASK)
    ours: list[float] = []
    theirs: list[float] = []

    class Turns(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            self.found = peer(f"TRL {metadata.version('trl')}", "transformers")
            self.start = time.perf_counter()

        def on_step_end(self, args, state, control, **kwargs):
            theirs.append(time.perf_counter() - self.start)
            start = time.perf_counter()
            loop.step(len(ours) + 1)
            ours.append(time.perf_counter() - start)

    settings = {"per_device_train_batch_size": prompts * GROUP, "num_generations": GROUP, "steps_per_generation": 1}
    settings |= {"max_completion_length": MAX_TOKENS, "temperature": 1.0, "beta": 0.0, "max_steps": rounds + 1}
    settings |= {"learning_rate": 5e-4, "use_cpu": True, "report_to": "none", "save_strategy": "no", "bf16": False}
    settings |= {"disable_tqdm": True, "logging_strategy": "no", "gradient_checkpointing": False}
    columns = task.train[: prompts * (rounds + 1)]
    turns = Turns()
    with tempfile.TemporaryDirectory() as folder:
        GRPOTrainer(
            model=_as_people_load_it(),
            reward_funcs=task.reward,
            args=GRPOConfig(output_dir=folder, **settings),
            train_dataset=Dataset.from_dict(columns),
            processing_class=load_tokenizer(MODEL),
            callbacks=[turns],
        ).train()
    names = {"TRL GRPOTrainer, step": iter(theirs), "fp8lab BF16 step, beside TRL": iter(ours)}
    rows = rows_of({name: list(times) for name, times in names.items()}, "TRL GRPOTrainer, step")
    return {"rows": rows, "peer": turns.found}


def rows_of(times: dict[str, list[float]], baseline: str) -> list[dict[str, Any]]:
    """The rows of `paired` from seconds that were taken in turn, the first of each apart."""
    turns = {name: iter(values) for name, values in times.items()}
    return paired(
        dict.fromkeys(times), baseline, rounds=len(times[baseline]) - 1, clock=lambda name, _: next(turns[name])
    )


def _memory(steps: int, prompts: int) -> dict[str, float]:
    """In a new process, from /proc: Linux alone (getrusage would count the parent's memory before exec)."""

    def peak() -> float:
        status = Path("/proc/self/status").read_text(encoding="utf-8")
        return int(status.split("VmHWM:")[1].split()[0]) / 1024

    imports = peak()
    loop = Loop(_config("fp8-e2e", prompts))
    for number in range(1, steps + 1):
        loop.step(number)
    return {"imports": imports, "loop": peak()}


if __name__ == "__main__":
    torch.set_num_threads(int(os.environ.get("FP8LAB_THREADS", torch.get_num_threads())))
    found = {"vllm": _vllm_rows, "trl": _trl_rows, "memory": _memory}[sys.argv[1]](*map(int, sys.argv[2:4]))
    print(json.dumps(found))
