"""Rollout engines: sample completions with their log-probabilities, and take new weights after every step.

`engine.py` holds the records and the protocol, `sampling.py` the distribution that is sampled from, `native.py` the
engine that runs a transformers model in this process, `vllm.py` the one that runs vLLM in it, where that is installed.
"""

from fp8lab.rollout.engine import Rollout, RolloutEngine
from fp8lab.rollout.native import NativeEngine
from fp8lab.rollout.sampling import SamplingParams
from fp8lab.rollout.vllm import VLLMEngine

__all__ = ["NativeEngine", "Rollout", "RolloutEngine", "SamplingParams", "VLLMEngine"]
