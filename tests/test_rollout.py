"""The native engine against transformers' own forward and generate, and its behaviour on bad input."""

import copy
import dataclasses
import re

import pytest
import torch

from fp8lab.conversion import convert, restore
from fp8lab.diagnostics import differing_layers
from fp8lab.models import load_model, load_tokenizer, named_weights
from fp8lab.precision import PrecisionPlan
from fp8lab.rollout import NativeEngine, Rollout, SamplingParams, VLLMEngine
from fp8lab.rollout.engine import GenerationStopped
from fp8lab.rollout.sampling import draw, processed_logprobs
from fp8lab.trainer import GRPOConfig, Trainer

PROMPTS = ["47+38=", "5-9=", "12+7=", "99+99="]
PLANS = ("bf16", "fp8-rollout", "fp8-e2e")


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("tiny-llama")


@pytest.fixture(scope="module")
def engine():
    return NativeEngine("tiny-llama", PrecisionPlan.preset("bf16"))


def full_forward_logprobs(model, rollout: Rollout) -> torch.Tensor:
    """Log-probs from transformers, one unpadded sequence at a time, without a cache."""
    out = torch.zeros_like(rollout.logprobs)
    for row, length in enumerate(rollout.lengths.tolist()):
        logits = model(rollout.tokens[row : row + 1, :length], use_cache=False).logits[0].double()
        chosen = logits[:-1].log_softmax(-1).gather(1, rollout.tokens[row, 1:length, None]).squeeze(1)
        out[row, 1:length] = chosen.float()
    return torch.where(rollout.mask, out, 0.0)


@pytest.mark.parametrize("model_name", ["tiny-llama", "tiny-qwen3-moe"])
def test_logprobs_equal_the_full_forward_in_float32(model_name):
    engine = NativeEngine(model_name, PrecisionPlan.preset("bf16"))
    restore(engine.model)  # plain float32 linears: what is left is the engine's own bookkeeping
    rollout = engine.generate(PROMPTS, SamplingParams(n=3, max_tokens=6), seed=1)
    with torch.no_grad():
        reference = full_forward_logprobs(load_model(model_name), rollout)
    assert rollout.mask.sum() > 20
    torch.testing.assert_close(rollout.logprobs, reference, atol=1e-4, rtol=0)


def test_greedy_tokens_equal_generate(tokenizer):
    model = load_model("tiny-llama")
    engine = NativeEngine(model, PrecisionPlan.preset("bf16"), tokenizer=tokenizer)
    restore(engine.model)
    rollout = engine.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=6), seed=0)
    for row, prompt in enumerate(PROMPTS):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        expected = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=6)[0]
        ours = rollout.tokens[row, : rollout.lengths[row]]
        assert ours.tolist() == expected[: len(ours)].tolist()


def test_fp8_logprobs_match_the_trainers_fp8_forward():
    plan = PrecisionPlan.preset("fp8-e2e")
    trainer = Trainer("tiny-llama", plan)
    engine = NativeEngine(trainer.model, plan, tokenizer=trainer.tokenizer)
    rollout = engine.generate(PROMPTS, SamplingParams(n=8, max_tokens=6), seed=2)
    difference = (rollout.logprobs - trainer.score(rollout))[rollout.mask].abs()
    assert difference.mean() < 2e-3
    other = NativeEngine(trainer.model, plan, tokenizer=trainer.tokenizer, kernels="other")
    rollout = other.generate(PROMPTS, SamplingParams(n=8, max_tokens=6), seed=2)
    difference = (rollout.logprobs - trainer.score(rollout))[rollout.mask].abs()
    assert 0 < difference.mean() < 2e-2


def test_layout_of_a_rollout(engine, tokenizer):
    rollout = engine.generate(PROMPTS, SamplingParams(n=2, max_tokens=6), seed=3)
    assert rollout.tokens.shape == rollout.mask.shape == rollout.logprobs.shape
    assert len(rollout.completions) == 8 and len(rollout.finished) == 8
    for row in range(8):
        prompt = tokenizer(PROMPTS[row // 2]).input_ids
        start, end = len(prompt), int(rollout.lengths[row])
        assert rollout.prompt_lengths[row] == start
        assert rollout.tokens[row, :start].tolist() == prompt
        assert rollout.mask[row].nonzero().flatten().tolist() == list(range(start, end))
        ended = rollout.tokens[row, end - 1] == tokenizer.eos_token_id
        assert bool(rollout.finished[row]) == bool(ended)
        assert (rollout.logprobs[row][~rollout.mask[row]] == 0).all()
        assert (rollout.logprobs[row][rollout.mask[row]] < 0).all()
        text = tokenizer.decode(rollout.tokens[row, start:end], skip_special_tokens=True)
        assert rollout.completions[row] == text


def test_same_seed_same_rollout_and_batches_do_not_matter(engine):
    sampling = SamplingParams(n=4, max_tokens=6)
    first = engine.generate(PROMPTS, sampling, seed=7)
    again = engine.generate(PROMPTS, sampling, seed=7)
    assert torch.equal(first.tokens, again.tokens) and torch.equal(first.logprobs, again.logprobs)
    assert not torch.equal(first.tokens, engine.generate(PROMPTS, sampling, seed=8).tokens)
    small = copy.copy(engine)
    small.max_batch_size = 4
    calls = []
    split = small.generate(PROMPTS, sampling, seed=7, on_batch=lambda done, total: calls.append((done, total)))
    assert torch.equal(first.tokens, split.tokens)
    torch.testing.assert_close(first.logprobs, split.logprobs, atol=0.05, rtol=0)  # BF16 rounding of other last bits
    assert calls == [(4, 16), (8, 16), (12, 16), (16, 16)]


def test_sampling_frequencies_follow_the_model(engine, tokenizer):
    rollout = engine.generate(["47+38="], SamplingParams(n=4000, max_tokens=1), seed=0)
    first = rollout.tokens[:, rollout.prompt_lengths[0]]
    probability = rollout.logprobs[rollout.mask].exp()
    for token in first.unique():
        share, expected = (first == token).float().mean(), probability[first == token][0]
        assert abs(share - expected) < 5 * (expected * (1 - expected) / 4000).sqrt() + 1e-3


def test_processed_distribution():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    plain = processed_logprobs(logits, SamplingParams())
    torch.testing.assert_close(plain, logits.log_softmax(-1))
    warm = processed_logprobs(logits, SamplingParams(temperature=0.5))
    torch.testing.assert_close(warm, (2 * logits).log_softmax(-1))
    top2 = processed_logprobs(logits, SamplingParams(top_k=2))
    torch.testing.assert_close(top2[0, :2], logits[0, :2].log_softmax(-1))
    assert top2[0, 2:].isinf().all()
    # probabilities 0.644, 0.237, 0.087, 0.032: two tokens are needed to reach 0.7
    nucleus = processed_logprobs(logits, SamplingParams(top_p=0.7))
    torch.testing.assert_close(nucleus, top2)
    assert processed_logprobs(logits, SamplingParams(top_p=1e-9))[0, 0] == 0


def test_raw_logprobs_ignore_processing():
    logits, uniform = torch.tensor([[2.0, 1.0, 0.0]]), torch.tensor([0.99], dtype=torch.float64)
    token, raw = draw(logits, uniform, SamplingParams(temperature=3.0, raw_logprobs=True))
    assert token.item() == 2
    torch.testing.assert_close(raw, logits.log_softmax(-1)[:, 2])
    _, processed = draw(logits, uniform, SamplingParams(temperature=3.0))
    torch.testing.assert_close(processed, (logits / 3).log_softmax(-1)[:, 2])


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-53])
def test_draw_never_takes_a_removed_token(uniform):
    logits = torch.tensor([[float("-inf"), 0.0, float("-inf")]])
    token, logprob = draw(logits, torch.tensor([uniform], dtype=torch.float64), SamplingParams())
    assert token.item() == 1 and logprob.item() == 0.0


@pytest.mark.parametrize("plan", PLANS)
def test_refit_is_idempotent_and_proves_equal_bytes(plan, tokenizer):
    plan = PrecisionPlan.preset(plan)
    trainer = Trainer("tiny-llama", plan)
    engine = NativeEngine(trainer.model, plan, tokenizer=tokenizer)
    first = {name: tensor.clone() for name, tensor in named_weights(trainer.model).items()}
    second = {name: tensor * 1.01 for name, tensor in first.items()}
    sampling = SamplingParams(n=2, max_tokens=6)
    before = engine.generate(PROMPTS, sampling, seed=4)
    engine.refit(second)
    assert differing_layers(trainer.model, engine.model)
    assert not torch.equal(before.logprobs, engine.generate(PROMPTS, sampling, seed=4).logprobs)
    engine.refit(first)
    after = engine.generate(PROMPTS, sampling, seed=4)
    assert torch.equal(before.tokens, after.tokens) and torch.equal(before.logprobs, after.logprobs)
    assert bool(differing_layers(trainer.model, engine.model)) == (not plan.same_on_both_sides())
    assert engine.refits == 2


def test_a_bad_refit_changes_nothing(engine):
    good = {name: tensor.clone() for name, tensor in named_weights(engine.model).items()}
    name = "model.layers.0.mlp.up_proj.weight"
    cases = [
        ({k: v for k, v in good.items() if k != name}, f"missing {name}"),
        ({**good, "extra": torch.zeros(1)}, "unknown extra"),
        ({**good, name: good[name][:1]}, r"has shape \(1, 128\), expected \(256, 128\)"),
    ]
    before = engine.generate(PROMPTS, SamplingParams(max_tokens=4), seed=1)
    for bad, message in cases:
        changed = {k: v + 1 for k, v in bad.items()}
        with pytest.raises(ValueError, match=message):
            engine.refit(changed)
    after = engine.generate(PROMPTS, SamplingParams(max_tokens=4), seed=1)
    assert torch.equal(before.logprobs, after.logprobs)


def test_bad_prompts_are_refused_and_the_engine_stays_usable(engine):
    limit = engine.model.config.max_position_embeddings
    for prompts, message in [
        ([], "non-empty list"),
        ("47+38=", "non-empty list"),
        ([""], "has no tokens"),
        ([[]], "has no tokens"),
        (["1" * limit], f"the context is {limit}"),
    ]:
        with pytest.raises(ValueError, match=message):
            engine.generate(prompts, SamplingParams(), seed=0)
    size = engine.model.config.vocab_size
    for prompts, message in [
        ([[1], [1, 10**6]], f"prompt 1 .* has token id 1000000; this model's vocabulary of {size} tokens"),
        ([[1, size]], f"prompt 0 .* has token id {size}; .* ids 0 to {size - 1}"),
        ([[1, -3]], "prompt 0 .* has token id -3"),
        ([[1.5, 2.0]], "prompt 0 is .* list of integers"),
        (["1+1=", 5], "prompt 1 is '5'; a prompt must be a string, or a list of integers"),
        ([None], "prompt 0 is 'None'"),
    ]:
        with pytest.raises(ValueError, match=message):
            engine.generate(prompts, SamplingParams(), seed=0)
    sampling, ids = SamplingParams(max_tokens=4), [[1, size - 1, 0]]
    plain = engine.generate(ids, sampling, seed=0)
    for same in (torch.tensor(ids), torch.tensor(ids).numpy()):
        assert torch.equal(plain.tokens, engine.generate(same, sampling, seed=0).tokens)
    longest = engine.generate(["1" * (limit - 2)], SamplingParams(max_tokens=10), seed=0)
    assert longest.mask.sum() <= 2  # room for two tokens, then the context is full
    assert engine.generate(["1+1="], SamplingParams(), seed=0).mask.any()


def test_weights_that_are_not_finite_are_named(engine):
    good = {name: tensor.clone() for name, tensor in named_weights(engine.model).items()}
    name = "model.layers.1.self_attn.q_proj.weight"
    for value in (float("nan"), float("inf")):
        bad = {key: tensor.clone() for key, tensor in good.items()}
        bad[name][3, 5] = value
        with pytest.raises(ValueError, match=rf"{name} has 1 values that are NaN or infinite"):
            engine.refit(bad)
        assert all(torch.equal(tensor, good[key]) for key, tensor in named_weights(engine.model).items())


def test_a_model_that_is_not_finite_makes_no_engine(tokenizer, tmp_path):
    model, plan = load_model("tiny-llama"), PrecisionPlan.preset("fp8-e2e")
    name = "model.layers.1.self_attn.q_proj.weight"
    for value in (float("nan"), float("-inf")):
        with torch.no_grad():
            model.get_parameter(name)[3, 5] = value
        with pytest.raises(ValueError, match=rf"no engine was made .* {name} has 1 values that are NaN or infinite"):
            NativeEngine(model, plan, tokenizer=tokenizer)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"no engine was made .* {name}"):
        NativeEngine(str(tmp_path), plan)


@pytest.mark.parametrize("plan", ["fp8-e2e", "bf17", None, {}, 3])
def test_what_is_no_plan_is_named(plan, engine):
    meant = plan if plan == "fp8-e2e" else "fp8-e2e"
    message = re.escape(f"plan is {plan!r}; it must be a PrecisionPlan, such as PrecisionPlan.preset({meant!r})")
    with pytest.raises(ValueError, match=message):
        NativeEngine("tiny-llama", plan)
    with pytest.raises(ValueError, match=message):
        convert(load_model("tiny-llama"), plan, side="trainer")
    if plan is not None:
        with pytest.raises(ValueError, match=message):
            VLLMEngine("tiny-llama", plan)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.0}, {"top_k": 2}, {"top_p": 0.5}, {"raw_logprobs": True}])
@pytest.mark.parametrize("bad", [[0.0, float("nan")], [float("inf"), 0.0], [float("-inf")] * 2])
def test_logits_that_are_no_distribution_are_named(bad, sampling):
    logits = torch.tensor([[1.0, float("-inf")], bad, [0.0, 2.0]])
    uniform = torch.zeros(3, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"1 of 3 rows of logits are no distribution \(first: row 1\)"):
        draw(logits, uniform, SamplingParams(**sampling))
    tokens, logprobs = draw(logits[[0, 2]], uniform[:2], SamplingParams(temperature=0.01))
    assert tokens.tolist() == [0, 1] and logprobs.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("plan", ["bf16", "fp8-e2e"])
def test_refit_there_and_back_equals_a_fresh_engine(plan, tokenizer):
    plan = PrecisionPlan.preset(plan)
    first = load_model("tiny-llama")
    second = {name: tensor * 1.01 for name, tensor in named_weights(first).items()}
    engine = NativeEngine(first, plan, tokenizer=tokenizer)
    engine.generate(PROMPTS, SamplingParams(n=2), seed=0)
    engine.refit(second)
    engine.generate(PROMPTS, SamplingParams(n=2), seed=1)
    engine.refit(named_weights(first))
    fresh = NativeEngine(first, plan, tokenizer=tokenizer)
    a, b = (e.generate(PROMPTS, SamplingParams(n=4), seed=2) for e in (engine, fresh))
    assert torch.equal(a.tokens, b.tokens) and torch.equal(a.logprobs, b.logprobs)


def test_a_refit_that_was_interrupted_must_be_repeated(tokenizer, monkeypatch):
    engine = NativeEngine("tiny-llama", PrecisionPlan.preset("bf16"))
    weights = {name: tensor.clone() for name, tensor in named_weights(engine.model).items()}

    def interrupt(model):
        raise KeyboardInterrupt

    monkeypatch.setattr("fp8lab.rollout.native.refresh", interrupt)
    with pytest.raises(KeyboardInterrupt):
        engine.refit(weights)
    monkeypatch.undo()
    for call in (
        lambda: engine.generate(PROMPTS, SamplingParams(), seed=0),
        lambda: engine.calibrate(PROMPTS),
        lambda: engine.check_same_bytes(engine),
    ):
        with pytest.raises(RuntimeError, match="refit once more"):
            call()
    engine.refit(weights)
    assert engine.check_same_bytes(engine) == {}
    assert engine.generate(PROMPTS, SamplingParams(), seed=0).mask.any()


def test_generation_can_be_interrupted_and_the_engine_stays_usable(engine):
    sampling = SamplingParams(n=4, max_tokens=6)
    before = engine.generate(PROMPTS, sampling, seed=7)
    asked = []

    def third_token() -> bool:
        asked.append(True)
        return len(asked) == 3

    with pytest.raises(GenerationStopped):
        engine.generate(PROMPTS, sampling, seed=7, should_stop=third_token)
    assert len(asked) == 3
    for error in (KeyboardInterrupt, ZeroDivisionError):

        def fail(done: int, total: int, error: type = error) -> None:
            raise error

        with pytest.raises(error):
            engine.generate(PROMPTS, sampling, seed=7, on_batch=fail)
    after = engine.generate(PROMPTS, sampling, seed=7, should_stop=lambda: False)
    assert torch.equal(before.tokens, after.tokens) and torch.equal(before.logprobs, after.logprobs)


def test_adapters_are_merged_for_the_push(tokenizer):
    peft = pytest.importorskip("peft", reason="peft is not installed (extra `dev`)")
    plan = PrecisionPlan.preset("fp8-e2e")
    changes = {"target_modules": ["q_proj", "down_proj"], "lora_alpha": 8, "use_rslora": True}
    model = peft.get_peft_model(load_model("tiny-llama"), peft.LoraConfig(r=4, **changes))
    trainer = Trainer(model, plan, GRPOConfig(num_generations=4, learning_rate=1e-2, warmup_steps=1))
    engine = NativeEngine("tiny-llama", plan)
    for step in range(2):  # the second moves lora_A too: lora_B starts at zero
        rollout = engine.generate(PROMPTS, SamplingParams(n=4, max_tokens=6), seed=step)
        trainer.step(rollout, [float(row % 3 == 0) for row in range(16)])
        assert engine.check_same_bytes(trainer) != {}
        engine.refit(trainer)
        assert engine.check_same_bytes(trainer) == {}
    weights = named_weights(model)
    prefix = "base_model.model.model.layers.2.mlp.down_proj."
    parts = ("base_layer.weight", "lora_A.default.weight", "lora_B.default.weight")
    base, a, b = (weights[prefix + part] for part in parts)
    merged = named_weights(engine.model)["model.layers.2.mlp.down_proj.weight"]
    torch.testing.assert_close(merged, base + 8 / 4**0.5 * (b @ a))
    assert not torch.equal(merged, base)
    assert any("lora_A" in name for name in named_weights(trainer.model))  # the trainer keeps its adapters apart


def test_stats_and_close():
    engine = NativeEngine("tiny-llama", PrecisionPlan.preset("fp8-rollout"))
    rollout = engine.generate(PROMPTS, SamplingParams(n=4, max_tokens=6), seed=0)
    stats = engine.stats()
    assert stats["engine"] == "native" and stats["backend"] == "emulated" and stats["forward"] == "own"
    assert (stats["sequences"], stats["tokens"]) == (16, int(rollout.mask.sum()))
    assert stats["prompt_tokens"] == int(rollout.prompt_lengths[::4].sum())
    columns = int(rollout.prompt_lengths.max()) + 5
    layers, kinds, rows, heads, head_dim, float32 = 4, 2, 16, 4, 32, 4
    assert 0 < stats["kv_bytes"] <= layers * kinds * columns * rows * heads * head_dim * float32
    assert engine.calibrate(PROMPTS) == {} and engine.calibrate(rollout) == {}
    engine.close()
    engine.close()
    for call in (
        lambda: engine.generate(PROMPTS, SamplingParams(), seed=0),
        lambda: engine.refit({}),
        lambda: engine.calibrate(PROMPTS),
        lambda: engine.check_same_bytes(engine),
        lambda: engine.attention_scales,
    ):
        with pytest.raises(RuntimeError, match="closed"):
            call()
    assert engine.stats() == stats


def test_calibration_refuses_tokens_the_model_does_not_have(tokenizer):
    engine = NativeEngine("tiny-llama", PrecisionPlan.preset("fp8-e2e-kv"))
    size = engine.model.config.vocab_size
    with pytest.raises(ValueError, match=f"prompt 0 .* has token id {size}"):
        engine.calibrate([[size]])
    engine.calibrate(PROMPTS)
    scales = engine.attention_scales
    rollout = engine.generate(PROMPTS, SamplingParams(n=2), seed=0)
    row = int(rollout.lengths.argmin())
    assert rollout.lengths[row] < rollout.tokens.shape[1]
    rollout.tokens[row, -1] = -1
    engine.calibrate(rollout)  # padding is read by nobody
    expected = engine.attention_scales
    rollout.tokens[row, 0] = -1
    with pytest.raises(ValueError, match=f"sequence {row} of the rollout has token id -1"):
        engine.calibrate(rollout)
    assert engine.attention_scales == expected != scales


def test_processed_and_raw_logprobs_against_the_trainers_score(engine):
    """`processed` is what the trainer scores, at any temperature; `raw` is what it would score at temperature 1."""
    trainer = Trainer("tiny-llama", PrecisionPlan.preset("bf16"))
    for temperature in (0.7, 1.0, 1.5):
        sampling = SamplingParams(n=4, max_tokens=6, temperature=temperature)
        processed = engine.generate(PROMPTS, sampling, seed=5)
        torch.testing.assert_close(processed.logprobs, trainer.score(processed), atol=0.01, rtol=0)
        raw = engine.generate(PROMPTS, dataclasses.replace(sampling, raw_logprobs=True), seed=5)
        assert torch.equal(raw.tokens, processed.tokens)
        assert torch.equal(raw.logprobs, processed.logprobs) == (temperature == 1.0)
        at_one = dataclasses.replace(processed, sampling=dataclasses.replace(sampling, temperature=1.0))
        torch.testing.assert_close(raw.logprobs, trainer.score(at_one), atol=0.01, rtol=0)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("n", 0), ("max_tokens", 0), ("top_p", 0.0), ("top_k", -1)],
        *[("temperature", value) for value in (-1.0, float("nan"), float("inf"), 1e-45, 0.009)],
    ],
)
def test_bad_sampling_parameters(field, value):
    with pytest.raises(ValueError, match=field):
        SamplingParams(**{field: value})


def test_missing_checkpoints_say_what_is_allowed(tmp_path):
    plan = PrecisionPlan.preset("bf16")
    with pytest.raises(FileNotFoundError, match="tiny-llama"):
        NativeEngine("no-such-model", plan)
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        NativeEngine(str(tmp_path), plan)
    with pytest.raises(ValueError, match="tokenizer"):
        NativeEngine(load_model("tiny-llama"), plan)
