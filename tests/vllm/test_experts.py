"""A mixture of experts in vLLM. A file of its own, in a process of its own: vLLM's process groups differ."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.vllm

SCRIPT = """
import torch
from fp8lab import diagnostics
from fp8lab.linear import refresh
from fp8lab.models import named_weights
from fp8lab.precision import PrecisionPlan
from fp8lab.rollout import SamplingParams, VLLMEngine
from fp8lab.trainer import Trainer

plan = PrecisionPlan.preset("fp8-e2e")
trainer = Trainer("tiny-qwen3-moe", plan)
engine = VLLMEngine("tiny-qwen3-moe", plan)
for factor in (1.0, 1.1):
    with torch.no_grad():
        for parameter in list(trainer.model.parameters())[::2]:
            parameter.mul_(factor)
    refresh(trainer.model)
    if factor != 1:
        differing = engine.check_same_bytes(trainer)
        assert any(name.endswith("experts.gate_up_proj") for name in differing), differing
        engine.refit(trainer)
    assert engine.check_same_bytes(trainer) == {}, engine.check_same_bytes(trainer)
    rollout = engine.generate(["47+38=", "5-9="] * 8, SamplingParams(n=8, max_tokens=6), seed=1)
    found = diagnostics.mismatch(rollout.logprobs, trainer.score(rollout), rollout.mask)
    print("experts, FP8 both sides: mean |d|", found.mean_abs_difference)
    assert found.mean_abs_difference < 1e-2
engine.close()
packed = VLLMEngine("tiny-qwen3-moe", None)
try:
    packed.refit(named_weights(trainer.model))
except ValueError as error:
    assert "unpacked after a reload" in str(error), error
else:
    raise AssertionError("vLLM's own experts were reloaded")
print("experts passed")
"""


def test_experts_are_quantized_and_refitted_one_by_one():
    answer = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=300)
    assert answer.returncode == 0, answer.stderr[-3000:]
    assert "experts passed" in answer.stdout
    print(answer.stdout)
