"""FSDP2: two gloo processes learn what one does, from the same batch, and their checkpoints are a single process's.

The file is also what torchrun starts: `test_distributed.py FOLDER` runs all cases and writes what it found.
"""

import dataclasses
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fp8lab import distributed
from fp8lab.experiment import ExperimentConfig, Loop, resume
from fp8lab.grpo import GRPOConfig
from fp8lab.models import load_model, load_tokenizer, named_weights
from fp8lab.precision import PrecisionPlan
from fp8lab.rollout import NativeEngine, Rollout, SamplingParams
from fp8lab.routing import record_routes, routes_at
from fp8lab.runlog import RunLog
from fp8lab.trainer import Trainer

CONFIG = GRPOConfig(num_generations=4, learning_rate=1e-4, warmup_steps=1, max_grad_norm=1e9)
PROMPT, COMPLETION, GROUPS = 8, 5, 32
"""Of each process: 16 prompts of 8 tokens, 64 completions of which 4 tokens predict another: 128 and 256 tokens."""


def torchrun(*arguments, processes=2):
    """Run `torchrun ARGUMENTS` to its end, one thread a process; CalledProcessError shows what it wrote."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
    command = [*launcher, "--master-addr", "127.0.0.1", "--master-port", port, *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    return done


def build(case):
    """The model of a case, the same in every process."""
    from transformers import LlamaConfig, LlamaForCausalLM

    if case != "ragged":
        return load_model("tiny-qwen3-moe" if case.startswith("moe") else "tiny-llama")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=130,  # half of 130, of 200 and of 328 rows lie inside a block of 128
        hidden_size=200,
        intermediate_size=328,
        num_hidden_layers=2,
        num_attention_heads=5,
        tie_word_embeddings=True,
        attn_implementation="sdpa",
        attention_bias=True,
        eos_token_id=2,
    )
    return LlamaForCausalLM(config).eval()


def batch(case):
    """A fixed rollout of GROUPS prompts, and rewards; in `short` the second half of it has one-token completions."""
    generator = torch.Generator().manual_seed(1)
    rows, width = GROUPS * CONFIG.num_generations, PROMPT + COMPLETION
    prompts = torch.randint(3, 100, (GROUPS, PROMPT), generator=generator).repeat_interleave(CONFIG.num_generations, 0)
    tokens = torch.cat([prompts, torch.randint(3, 100, (rows, COMPLETION), generator=generator)], dim=1)
    lengths = torch.full((rows,), width)
    if case == "short":
        lengths[rows // 2 :] = PROMPT + 1
    mask = (torch.arange(width) >= PROMPT) & (torch.arange(width) < lengths[:, None])
    rollout = Rollout(
        tokens=torch.where(torch.arange(width) < lengths[:, None], tokens, 0),
        logprobs=torch.where(mask, -3 + torch.randn(rows, width, generator=generator), 0.0),
        mask=mask,
        prompt_lengths=torch.full((rows,), PROMPT),
        lengths=lengths,
        finished=torch.ones(rows, dtype=torch.bool),
        completions=("",) * rows,
        sampling=SamplingParams(n=CONFIG.num_generations, temperature=1.0, max_tokens=COMPLETION),
    )
    return rollout, torch.rand(rows, generator=generator)


def learn(case, **changes):
    """Gradients of the first step; after each of three steps its metrics and the loss of the batch's own tokens."""
    plan = PrecisionPlan.preset("bf16" if case.endswith("bf16") else "fp8-e2e")
    trainer = Trainer(build(case), plan, dataclasses.replace(CONFIG, **CHANGES.get(case, {}) | changes))
    if distributed.size() > 1:
        trainer.shard()
    rollout, rewards = batch(case)
    update, gradients, losses, rows = trainer._optimizer_step, {}, [], []

    def first_update():
        gradients.update({n: distributed.whole(p.grad).clone() for n, p in trainer.model.named_parameters()})
        trainer._optimizer_step = update
        update()

    trainer._optimizer_step = first_update
    for _ in range(3):
        rows.append(trainer.step(rollout, rewards))
        losses.append(-trainer.score(rollout)[rollout.mask].mean().item())
    return {"gradients": gradients, "losses": losses, "rows": rows}, trainer


CASES = ("fp8", "ragged", "micro", "short", "moe-bf16", "moe-fp8")
GRADIENTS, LOSSES = 1e-3, 1e-4
"""Bounds of the gradients' relative L2 distance, and of the losses' relative difference."""
HALF = GROUPS * CONFIG.num_generations // 2
CHANGES = {"micro": {"beta": 0.1, "micro_batch_size": 32}, "moe-fp8": {"micro_batch_size": HALF}}
"""Of CONFIG. An expert's tokens fill no whole 128-token blocks, so the single process must take an FP8 mixture of
experts in the halves that two processes have: see the test of that."""


def main(folder):
    """What each process of torchrun does: learn, save, move on, and load again."""
    distributed.join()
    for case in CASES:
        found, trainer = learn(case)
        checkpoint = Path(folder) / case
        trainer.save(checkpoint)
        torch.distributed.barrier()
        before = state_of(trainer)
        trainer.step(*batch(case))
        moved = state_of(trainer)
        trainer.load(checkpoint)
        after = state_of(trainer)
        found["moved"] = any(not torch.equal(before[name], moved[name]) for name in before)
        found["reloads"] = all(torch.equal(before[name], after[name]) for name in before)
        found["kinds"] = {type(p).__name__ for p in trainer.model.parameters()}
        found["state"] = before
        if distributed.rank() == 0:
            torch.save(found, Path(folder) / f"{case}.pt")
    del trainer
    distributed.leave()
    threads = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]  # none where there is no /proc
    assert not [name for name in threads if "gloo" in name], threads  # one that outlives Python aborts the process


def state_of(trainer):
    """Weights and both moments of AdamW, gathered."""
    names = {id(p): name for name, p in trainer.model.named_parameters()}
    moments = {
        f"{names[id(p)]}:{key}": distributed.whole(state[key])
        for p, state in trainer.optimizer.state.items()
        for key in ("exp_avg", "exp_avg_sq")
    }
    return {**named_weights(trainer.model), **moments}


def relative(a, b):
    """Relative L2 distance of two dicts of tensors."""
    difference = sum((a[name] - b[name]).square().sum() for name in b)
    return (difference / sum(t.square().sum() for t in b.values())).sqrt().item()


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    torchrun(__file__, folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_two_processes_learn_what_one_does(case, two_processes):
    one, trainer = learn(case)
    two = torch.load(two_processes / f"{case}.pt")
    gradient = relative(two["gradients"], one["gradients"])
    losses = max(abs(a / b - 1) for a, b in zip(two["losses"], one["losses"], strict=True))
    print(f"{case}: gradients {gradient:.1e}, losses {losses:.1e}, {one['losses']}")
    assert two["kinds"] == {"DTensor"}
    assert gradient < GRADIENTS
    assert losses < LOSSES
    assert abs(one["losses"][2] / one["losses"][0] - 1) > 3e-4  # or the losses would show nothing
    for a, b in zip(two["rows"], one["rows"], strict=True):
        assert a == pytest.approx(b, rel=10 * LOSSES, abs=1e-4)
    assert two["moved"] and two["reloads"]
    fresh = Trainer(build(case), trainer.plan, trainer.config)  # a single process reads what two wrote
    fresh.load(two_processes / case)
    assert all(torch.equal(tensor, two["state"][name]) for name, tensor in state_of(fresh).items())


@pytest.mark.slow
def test_an_experts_gradient_depends_on_what_shares_its_token_blocks(two_processes):
    """Two processes against one that takes the whole batch at once: grad_weight of the experts, which is rounded in
    blocks of 128 tokens of one expert, is rounded otherwise. Nothing else moves: no router chose another expert."""
    two = torch.load(two_processes / "moe-fp8.pt")["gradients"]
    whole, _ = learn("moe-fp8", micro_batch_size=2 * HALF)
    distance = {name: relative({name: two[name]}, {name: g}) for name, g in whole["gradients"].items()}
    experts = {name: value for name, value in distance.items() if ".experts." in name}
    assert len(experts) == 8 and max(value for name, value in distance.items() if name not in experts) < 1e-6
    assert 1e-3 < min(experts.values()) and max(experts.values()) < 0.05  # an FP8 rounding or two, 2^-4 each at most
    assert 1e-3 < relative(two, whole["gradients"]) < 1e-2


@pytest.mark.slow
def test_a_run_of_two_processes_resumes_to_the_same_bytes(tmp_path):
    grpo = {"num_generations": 2, "warmup_steps": 1}
    experiment = {"name": "two", "plan": "fp8-e2e-kv", "steps": 3, "prompts_per_step": 4, "checkpoint_every": 1}
    experiment |= {"grpo": grpo, "eval_prompts": 5, "eval_samples": 1}
    (tmp_path / "two.yaml").write_text(json.dumps({"about": "test", "experiment": experiment}))
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    done = torchrun("-m", "fp8lab", "run", tmp_path / "two.yaml", "--out", whole, "--json")
    assert json.loads(done.stdout)["step"] == 3  # one process prints
    rows = RunLog(whole).rows()
    assert [row["step"] for row in rows] == [0, 1, 2, 3] and rows[0]["validation_samples"] == 4
    assert json.loads((whole / "environment.json").read_text())["processes"] == 2
    shutil.copytree(whole, cut)
    shutil.rmtree(cut / "checkpoints" / "step-000003")
    torchrun("-m", "fp8lab", "resume", cut)
    assert (cut / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
    assert (cut / "calibration.jsonl").read_bytes() == (whole / "calibration.jsonl").read_bytes()
    shutil.rmtree(cut / "checkpoints" / "step-000003")
    with pytest.warns(UserWarning, match="processes 2"):
        alone = resume(cut)  # one process goes on with it, from the same weights
    assert alone.rows()[:3] == rows[:3] and alone.rows()[3]["step"] == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompts_per_step": 6}, "must be a multiple of 4"),
        ({"engine": "vllm"}, "only 'native'"),
        ({"plan": PrecisionPlan.preset("fp8-e2e-kv"), "recalibrate": "rollout"}, "every-step"),
    ],
)
def test_what_cannot_be_divided_is_refused(changes, message, monkeypatch):
    monkeypatch.setattr(distributed, "size", lambda: 2)
    config = ExperimentConfig(**{"prompts_per_step": 8, "grpo": GRPOConfig(steps_per_generation=2)} | changes)
    with pytest.raises(ValueError, match=message):
        Loop(config)


def test_shares_are_equal_and_cover_everything(monkeypatch):
    assert distributed.share([1, 2, 3]) == [1, 2, 3] and distributed.gather("x") == ["x"]
    monkeypatch.setattr(distributed, "size", lambda: 3)
    parts = []
    for number in range(3):
        monkeypatch.setattr(distributed, "rank", lambda number=number: number)
        parts += distributed.share(list(range(6)))
    assert parts == list(range(6))
    with pytest.raises(ValueError, match="7 prompts do not split evenly over 3"):
        distributed.share(list(range(7)))


def test_gathered_rollouts_are_one_rollout(monkeypatch):
    """Gathering the halves of a rollout, as two engines would have made them, gives it back."""
    model, tokenizer = load_model("tiny-qwen3-moe"), load_tokenizer("tiny-qwen3-moe")
    engine, parts = NativeEngine(model, PrecisionPlan.preset("bf16"), tokenizer=tokenizer), []
    for prompts in (["1+2=", "3+4="], ["5+6=", "17+81="]):
        with record_routes(engine.model) as recording:
            parts.append(engine.generate(prompts, SamplingParams(n=2, temperature=1.0, max_tokens=4), seed=0))
        parts[-1] = recording.add_to(parts[-1])
    monkeypatch.setattr(distributed, "gather", lambda value: parts)
    both = distributed.gather_rollout(parts[0])
    assert both.completions == parts[0].completions + parts[1].completions
    for part, rows in zip(parts, (slice(0, 4), slice(4, 8)), strict=True):
        width = part.tokens.shape[1]
        for name in ("tokens", "logprobs", "mask"):
            assert torch.equal(getattr(both, name)[rows, :width], getattr(part, name))
            assert not getattr(both, name)[rows, width:].any()
        assert torch.equal(both.lengths[rows], part.lengths) and torch.equal(both.finished[rows], part.finished)
        assert torch.equal(both.routes[rows, :width], part.routes) and bool((both.routes[rows, width:] == -1).all())
    own = routes_at(both, torch.arange(8), torch.zeros(8, 1, dtype=torch.long))  # checked against the gathered tokens
    assert torch.equal(own[:, 0], both.routes[:, 0])


if __name__ == "__main__":
    main(*sys.argv[1:])
