"""batch_invariant kernels: bit for bit equality between rollout and trainer, and whatever else shares the batch."""

import dataclasses
import random

import pytest
import torch
import torch.nn.functional as F

from fp8lab import invariant
from fp8lab.completions import completion_logprobs
from fp8lab.models import load_model, load_tokenizer
from fp8lab.precision import PrecisionPlan
from fp8lab.rollout import NativeEngine, SamplingParams
from fp8lab.trainer import GRPOConfig, Trainer

KERNELS = "batch_invariant"


def random_prompts(count: int, seed: int) -> list[str]:
    draw = random.Random(seed)
    return [
        f"{draw.randrange(10 ** draw.randint(1, 6))}+{draw.randrange(10 ** draw.randint(1, 4))}=" for _ in range(count)
    ]


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("tiny-llama")


def tiny(kind: str) -> torch.nn.Module:
    """A random two-layer model with shared key heads, odd head counts and q/k-norm where the kind has it."""
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    torch.manual_seed(3)
    config = CONFIG_MAPPING[kind](
        vocab_size=128, hidden_size=96, intermediate_size=200, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=256, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("rows", [1, 2, 3, 31, 32, 33, 100])
def test_a_row_of_a_gemm_does_not_depend_on_the_others(rows):
    torch.manual_seed(rows)
    weight, x = torch.randn(200, 130), torch.randn(130)
    alone = invariant.linear(x[None], weight)[0]
    batch = torch.randn(rows, 130)
    batch[rows // 2] = x
    assert torch.equal(invariant.linear(batch, weight)[rows // 2], alone)
    torch.testing.assert_close(invariant.linear(batch, weight), F.linear(batch, weight))


def test_attention_equals_torchs_and_ignores_the_batch():
    torch.manual_seed(0)
    rows, heads, shared, length, dim = 3, 6, 2, 70, 16
    q = torch.randn(rows, heads, length, dim)
    k, v = torch.randn(2, rows, shared, length, dim)
    causal = torch.ones(length, length, dtype=torch.bool).tril()[None, None]
    out, _ = invariant.attention(None, q, k, v, causal, scaling=0.25)
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=causal, scale=0.25, enable_gqa=True).transpose(1, 2)
    torch.testing.assert_close(out, expected)
    for position in (0, 5, 63, 64, 69):
        for keys in (position + 1, length):
            mask = torch.arange(keys)[None, None, None] <= position
            one = (q[1:2, :, position : position + 1], k[1:2, :, :keys], v[1:2, :, :keys], mask)
            assert torch.equal(invariant.attention(None, *one, scaling=0.25)[0][0, 0], out[1, position])


def test_torchs_silu_is_why_there_is_an_own_one():
    torch.manual_seed(0)
    x = torch.randn(1003) * 3
    own = invariant.SiLU()
    torch.testing.assert_close(own(x), F.silu(x))
    assert torch.equal(torch.cat([own(part) for part in x.split(7)]), own(x))


@pytest.mark.parametrize(
    ("kind", "plan"),
    [("tiny-llama", "float32"), ("tiny-llama", "bf16"), ("tiny-llama", "fp8-e2e"), ("llama", "float32")]
    + [("llama", "fp8-e2e"), ("qwen3", "float32"), ("qwen3", "fp8-pow2")],
)
def test_rollout_and_trainer_agree_bit_for_bit(kind, plan, tokenizer, monkeypatch):
    if plan == "float32":  # the same GEMMs without any rounding, which would hide other last bits
        monkeypatch.setattr("fp8lab.linear.round_bf16", lambda x: x)
    plan = PrecisionPlan.preset("bf16" if plan == "float32" else plan)
    model = load_model(kind) if kind == "tiny-llama" else tiny(kind)
    trainer = Trainer(model, plan, tokenizer=tokenizer, kernels=KERNELS)
    engine = NativeEngine(trainer.model, plan, tokenizer=tokenizer, kernels=KERNELS)
    sampling = SamplingParams(n=4, max_tokens=9, temperature=0.8)
    prompts = random_prompts(9, seed=1)
    rollout = engine.generate(prompts, sampling, seed=0)
    assert rollout.mask.sum() > 60
    assert torch.equal(trainer.score(rollout), rollout.logprobs)

    engine.max_batch_size = 4  # one prompt at a time
    alone = engine.generate(prompts, sampling, seed=0)
    assert torch.equal(alone.tokens, rollout.tokens) and torch.equal(alone.logprobs, rollout.logprobs)

    padded = dataclasses.replace(
        rollout,
        tokens=F.pad(rollout.tokens, (0, 70), value=5),
        logprobs=F.pad(rollout.logprobs, (0, 70)),
        mask=F.pad(rollout.mask, (0, 70)),
    )
    assert torch.equal(trainer.score(padded)[:, :-70], rollout.logprobs)
    trainer.config = dataclasses.replace(trainer.config, micro_batch_size=4)
    assert torch.equal(trainer.score(rollout), rollout.logprobs)


def test_a_training_step_sees_no_gap_at_all(tokenizer):
    plan = PrecisionPlan.preset("fp8-e2e")
    config = GRPOConfig(num_generations=4, warmup_steps=1, learning_rate=1e-3)
    trainer = Trainer("tiny-llama", plan, config, kernels=KERNELS)
    engine = NativeEngine(trainer.model, plan, tokenizer=tokenizer, kernels=KERNELS)
    for step in range(2):
        rollout = engine.generate(random_prompts(4, seed=step), SamplingParams(n=4, max_tokens=6), seed=step)
        metrics = trainer.step(rollout, [float(row % 3 == 0) for row in range(16)])
        assert metrics["max_abs_difference"] == 0.0 and metrics["token_mult_prob_error"] == 1.0
        assert metrics["grad_norm"] > 0
        engine.refit(trainer)
        assert engine.check_same_bytes(trainer) == {}


def test_its_gradient_is_that_of_the_default_kernels(tokenizer):
    """Float32 GEMMs on both: the differentiable forward in tiles against transformers' own."""
    gradients = []
    for kernels in ("default", KERNELS):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("fp8lab.linear.round_bf16", lambda x: x)
            trainer = Trainer("tiny-llama", PrecisionPlan.preset("bf16"), kernels=kernels)
            engine = NativeEngine(trainer.model, trainer.plan, tokenizer=tokenizer, kernels=kernels)
            rollout = engine.generate(random_prompts(3, seed=5), SamplingParams(n=4, max_tokens=6), seed=3)
            completion_logprobs(trainer.model, rollout, torch.arange(12)).sum().backward()
            gradients.append({name: p.grad for name, p in trainer.model.named_parameters()})
    for name, grad in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], grad, atol=1e-3, rtol=1e-3)


def test_default_kernels_do_not_have_this_property(tokenizer):
    """The control: the equality above comes from the kernels, not from the test being easy."""
    plan = PrecisionPlan.preset("fp8-e2e")
    trainer = Trainer(tiny("llama"), plan, tokenizer=tokenizer)
    engine = NativeEngine(trainer.model, plan, tokenizer=tokenizer)
    rollout = engine.generate(random_prompts(9, seed=1), SamplingParams(n=4, max_tokens=9), seed=0)
    assert not torch.equal(trainer.score(rollout), rollout.logprobs)


def test_what_it_does_not_cover_is_refused(tokenizer):
    plan = PrecisionPlan.preset("bf16")
    with pytest.raises(ValueError, match="fused experts"):
        NativeEngine("tiny-qwen3-moe", plan, kernels=KERNELS)
    with pytest.raises(ValueError, match="fused experts"):
        Trainer("tiny-qwen3-moe", plan, kernels=KERNELS)
    with pytest.raises(ValueError, match="own forward"):
        NativeEngine("tiny-llama", plan, kernels=KERNELS, forward="transformers")
    with pytest.raises(ValueError, match="FP8 attention"):
        NativeEngine("tiny-llama", PrecisionPlan.preset("fp8-e2e-kv"), kernels=KERNELS)
    gelu = tiny("llama")
    gelu.config.hidden_act = "gelu"
    with pytest.raises(ValueError, match="hidden_act is 'gelu'"):
        NativeEngine(gelu, plan, tokenizer=tokenizer, kernels=KERNELS)
