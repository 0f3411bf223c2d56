"""Engines that the tests share: starting vLLM takes 5 to 15 s, so each model and plan is started once."""

import pytest

from fp8lab.models import load_tokenizer
from fp8lab.precision import PrecisionPlan
from fp8lab.rollout import SamplingParams
from fp8lab.trainer import Trainer

PROMPTS = ["47+38=", "5-9=", "12+7=", "99+99="] * 4
SAMPLING = SamplingParams(n=8, max_tokens=6)


@pytest.fixture(scope="session")
def tokenizer():
    return load_tokenizer("tiny-llama")


class Pair:
    """A trainer and a vLLM engine of the same weights and plan."""

    def __init__(self, model, plan, tokenizer=None):
        from fp8lab.rollout import VLLMEngine

        self.trainer = Trainer(model, plan, tokenizer=tokenizer)
        self.engine = VLLMEngine(self.trainer.model, plan, tokenizer=tokenizer or self.trainer.tokenizer)
        self.first = {name: tensor.clone() for name, tensor in self.trainer.model.state_dict().items()}

    def sample(self, seed=1):
        return self.engine.generate(PROMPTS, SAMPLING, seed=seed)


@pytest.fixture(scope="session")
def pairs():
    """pairs(plan name) -> Pair of tiny-llama."""
    made = {}

    def pair(name):
        if name not in made:
            made[name] = Pair("tiny-llama", PrecisionPlan.preset(name))
        made[name].engine.refit(made[name].first)
        made[name].trainer.model.load_state_dict(made[name].first)
        return made[name]

    yield pair
    for each in made.values():
        each.engine.close()
