"""The trainer step: bookkeeping against plain autograd, metrics, bad input, save and load."""

import dataclasses

import pytest
import torch

from fp8lab import grpo
from fp8lab.completions import completion_logprobs
from fp8lab.conversion import restore
from fp8lab.linear import float8_layers, refresh
from fp8lab.models import load_model
from fp8lab.precision import PrecisionPlan
from fp8lab.rollout import NativeEngine, SamplingParams
from fp8lab.trainer import GRPOConfig, NonFiniteLossError, Trainer

PROMPTS = ["47+38=", "5-9=", "12+7=", "99+99="]
CONFIG = GRPOConfig(num_generations=4, warmup_steps=1, learning_rate=1e-3)


def make(plan="bf16", config=CONFIG, kernels="default"):
    plan = PrecisionPlan.preset(plan)
    trainer = Trainer("tiny-llama", plan, config)
    engine = NativeEngine(trainer.model, plan, tokenizer=trainer.tokenizer, kernels=kernels)
    return trainer, engine.generate(PROMPTS, SamplingParams(n=config.num_generations, max_tokens=6), seed=0)


def rewards_of(rollout):
    return [float(len(text) == 2) for text in rollout.completions]


def test_gradient_equals_plain_autograd_of_the_written_out_loss():
    """Float32 linears, one row at a time without padding, the dapo loss written out; against one trainer step."""
    trainer, rollout = make()
    restore(trainer.model)
    rewards = torch.tensor(rewards_of(rollout))
    model = load_model("tiny-llama")
    groups = rewards.view(-1, 4)
    advantages = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).flatten()
    advantages[(groups.amax(1) == groups.amin(1)).repeat_interleave(4)] = 0
    total = 0.0
    for row in range(len(rewards)):
        length = int(rollout.lengths[row])
        tokens = rollout.tokens[row : row + 1, :length]
        logprobs = model(tokens).logits[0, :-1].log_softmax(-1).gather(1, tokens[0, 1:, None]).squeeze(1)
        logprobs = logprobs[rollout.prompt_lengths[row] - 1 :]
        weight = (logprobs.detach() - rollout.logprobs[row][rollout.mask[row]]).exp()
        ratio = (logprobs - logprobs.detach()).exp()
        total = total - (weight * ratio * advantages[row]).sum() / rollout.mask.sum()
    total.backward()
    expected = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    metrics = trainer.step(rollout, rewards)
    assert metrics["loss"] == pytest.approx(total.item(), abs=1e-6)
    assert metrics["grad_norm"] == pytest.approx(expected.item(), rel=1e-4)


def test_equal_completions_are_read_once_with_the_gradient_of_all():
    """Float32 linears; against a forward of every row alone. Group 0 is one answer four times, group 1 two answers."""
    trainer, rollout = make()
    restore(trainer.model)
    rows = torch.tensor([0, 0, 0, 0, 4, 5, 5, 4, *range(8, 16)])
    assert not torch.equal(rollout.tokens[4], rollout.tokens[5])
    tensors = ("tokens", "logprobs", "mask", "prompt_lengths", "lengths", "finished")
    rollout = dataclasses.replace(rollout, **{name: getattr(rollout, name)[rows] for name in tensors})
    seen = []
    trainer.model.model.layers[0].register_forward_pre_hook(lambda _, arguments: seen.append(len(arguments[0])))
    logprobs = completion_logprobs(trainer.model, rollout, torch.arange(16))
    different = {(row // 4, *tokens.tolist()) for row, tokens in enumerate(rollout.tokens)}
    assert seen == [4, len(different)] and len(different) <= 11
    weights = torch.randn(logprobs.shape, generator=torch.Generator().manual_seed(0))
    (logprobs * weights).sum().backward()
    alone = load_model("tiny-llama")
    for row in range(16):
        tokens = rollout.tokens[row : row + 1]
        expected = alone(tokens).logits[:, :-1].log_softmax(-1).gather(2, tokens[:, 1:, None])[0, :, 0]
        expected = torch.where(rollout.mask[row, 1:], expected, 0.0)
        torch.testing.assert_close(logprobs[row, 1:], expected, rtol=0, atol=1e-5)
        (expected * weights[row, 1:]).sum().backward()
    for one, other in zip(trainer.model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-3, atol=1e-4)


def test_micro_batches_give_the_same_update():
    whole, rollout = make("fp8-e2e")
    parts = Trainer("tiny-llama", whole.plan, dataclasses.replace(CONFIG, micro_batch_size=5))
    a, b = whole.step(rollout, rewards_of(rollout)), parts.step(rollout, rewards_of(rollout))
    assert a["loss"] == pytest.approx(b["loss"], abs=1e-4)  # another batch, other last bits, a few other FP8 codes
    # FP8 blocks of grad_weight run over the tokens of a micro-batch, so gradients agree to FP8's own error only.
    assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=0.05)
    assert a["token_mult_prob_error"] == pytest.approx(b["token_mult_prob_error"], abs=1e-3)


def test_padding_changes_nothing():
    trainer, rollout = make("fp8-e2e")
    twin = Trainer("tiny-llama", trainer.plan, CONFIG)
    padded = dataclasses.replace(
        rollout,
        tokens=torch.nn.functional.pad(rollout.tokens, (0, 9), value=5),
        logprobs=torch.nn.functional.pad(rollout.logprobs, (0, 9)),
        mask=torch.nn.functional.pad(rollout.mask, (0, 9)),
    )
    rewards = rewards_of(rollout)
    one, two = trainer.step(rollout, rewards), twin.step(padded, rewards)
    assert one.pop("loss") == pytest.approx(two.pop("loss"), abs=1e-7)  # a sum over more zeros: another last bit
    assert one == two
    for a, b in zip(trainer.model.parameters(), twin.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_one_update_scores_in_the_same_pass_and_several_score_first():
    trainer, rollout = make("fp8-e2e")
    scored = trainer.score(rollout)
    single = trainer.step(rollout, rewards_of(rollout))
    assert single["clip_ratio"] == 0.0  # old and current policy are the same
    several = Trainer("tiny-llama", trainer.plan, dataclasses.replace(CONFIG, steps_per_generation=2, num_iterations=2))
    metrics = several.step(rollout, rewards_of(rollout))
    assert several.updates == 4
    assert metrics["token_mult_prob_error"] == pytest.approx(single["token_mult_prob_error"], abs=1e-6)
    assert torch.equal(scored, Trainer("tiny-llama", trainer.plan, CONFIG).score(rollout))


def test_fp8_copies_are_refreshed_after_every_update():
    trainer, rollout = make("fp8-e2e")
    trainer.step(rollout, rewards_of(rollout))
    for name, layer in float8_layers(trainer.model):
        cached = layer.quantized.values.clone()
        layer.refresh()
        assert torch.equal(cached, layer.quantized.values), name


def test_kl_penalty_pulls_towards_the_reference():
    config = dataclasses.replace(CONFIG, beta=1.0, learning_rate=1e-4)
    trainer, rollout = make("bf16", config)
    equal = [1.0] * len(rollout.tokens)  # no policy gradient at all
    assert trainer.step(rollout, equal)["loss"] == 0.0
    noise = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=noise), alpha=0.03)
    refresh(trainer.model)
    losses = [trainer.step(rollout, equal)["loss"] for _ in range(12)]
    assert losses[0] > 0 and losses[-1] < 0.8 * losses[0]


def test_equal_rewards_give_no_policy_gradient():
    trainer, rollout = make()
    before = [p.clone() for p in trainer.model.parameters()]
    metrics = trainer.step(rollout, [1.0] * len(rollout.tokens))
    assert metrics["loss"] == 0.0 and metrics["grad_norm"] == 0.0 and metrics["equal_reward_groups"] == 1.0
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))


def test_all_tokens_masked_makes_no_update_and_says_so():
    trainer, rollout = make()
    nothing = dataclasses.replace(
        rollout, mask=torch.zeros_like(rollout.mask), logprobs=torch.zeros_like(rollout.logprobs)
    )
    before = [p.clone() for p in trainer.model.parameters()]
    metrics = trainer.step(nothing, rewards_of(rollout))
    assert metrics["skipped_updates"] == 1 and metrics["tokens"] == 0 and metrics["loss"] == 0.0
    assert trainer.updates == 0
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))


def test_an_empty_completion_among_others_is_harmless():
    trainer, rollout = make()
    mask = rollout.mask.clone()
    mask[0] = False
    metrics = trainer.step(dataclasses.replace(rollout, mask=mask), rewards_of(rollout))
    assert metrics["tokens"] == int(mask.sum()) and torch.tensor(metrics["loss"]).isfinite()


def test_truncated_completions_can_be_masked():
    trainer, rollout = make("bf16", dataclasses.replace(CONFIG, mask_truncated_completions=True))
    cut = dataclasses.replace(rollout, finished=torch.zeros_like(rollout.finished))
    assert trainer.step(cut, rewards_of(rollout))["skipped_updates"] == 1


def test_nan_raises_before_any_weight_changes():
    trainer, rollout = make()
    with torch.no_grad():
        trainer.model.model.norm.weight[3] = float("nan")
    before = [p.clone() for p in trainer.model.parameters()]
    with pytest.raises(NonFiniteLossError, match="no weight was changed"):
        trainer.step(rollout, rewards_of(rollout))
    assert all(
        torch.equal(
            a,
            b,
        )
        or a.isnan().any()
        for a, b in zip(before, trainer.model.parameters(), strict=True)
    )
    assert trainer.updates == 0 and all(p.grad is None for p in trainer.model.parameters())


def test_a_nonfinite_rollout_logprob_gets_weight_zero_and_is_counted():
    trainer, rollout = make()
    logprobs = rollout.logprobs.clone()
    row, column = rollout.mask.nonzero()[0].tolist()
    logprobs[row, column] = float("-inf")
    metrics = trainer.step(dataclasses.replace(rollout, logprobs=logprobs), rewards_of(rollout))
    assert metrics["nonfinite_tokens"] == 1
    assert all(torch.tensor(v).isfinite() for v in metrics.values())
    mask = rollout.mask.clone()
    mask[row, column] = False
    without = make()[0].step(dataclasses.replace(rollout, mask=mask), rewards_of(rollout))
    assert metrics["approx_entropy"] == pytest.approx(without["approx_entropy"], rel=1e-5)


def after_a_step(config):
    """A trainer whose optimizer has momentum, and its rollout."""
    trainer, rollout = make("fp8-rollout", config)
    trainer.step(rollout, rewards_of(rollout))
    return trainer, rollout


@pytest.mark.parametrize("fault", ["rejected", "nan"])
def test_no_token_left_moves_no_weight(fault):
    """AdamW would move them by momentum alone."""
    trainer, rollout = after_a_step(
        dataclasses.replace(CONFIG, importance_sampling="icepop", importance_sampling_min=0.1)
    )
    bounds = {"importance_sampling_min": 50.0, "importance_sampling_max": 60.0}
    if fault == "rejected":
        trainer.config = dataclasses.replace(trainer.config, **bounds)
    else:
        rollout = dataclasses.replace(rollout, logprobs=torch.full_like(rollout.logprobs, float("nan")))
    before = [p.clone() for p in trainer.model.parameters()]
    metrics = trainer.step(rollout, rewards_of(rollout))
    assert metrics["skipped_updates"] == 1 and metrics["loss"] == 0 and trainer.updates == 1
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))


def test_rejected_tokens_can_leave_the_denominator():
    """The dapo loss over tokens left, as verl has it, against the same loss over all tokens."""
    config = dataclasses.replace(
        CONFIG, importance_sampling="icepop", importance_sampling_min=0.97, importance_sampling_max=1.03
    )
    trainer, rollout = make("fp8-rollout", config)
    ratio = (trainer.score(rollout) - rollout.logprobs).exp()
    left = ((ratio >= 0.97) & (ratio <= 1.03))[rollout.mask]
    assert 0.1 < left.float().mean() < 0.9
    counted = trainer.step(rollout, rewards_of(rollout))
    dropping = Trainer("tiny-llama", trainer.plan, dataclasses.replace(config, drop_rejected=True))
    dropped = dropping.step(rollout, rewards_of(rollout))
    assert dropped["loss"] == pytest.approx(counted["loss"] * len(left) / int(left.sum()), rel=1e-4)
    assert dropped["is_oob_ratio"] == counted["is_oob_ratio"] == pytest.approx(1 - left.float().mean().item(), abs=1e-6)


@pytest.mark.parametrize(
    ("sampling", "mixed"),
    [
        ({"temperature": 0.5}, False),
        ({"temperature": 0.5, "raw_logprobs": True}, True),
        ({"top_p": 0.7}, True),
        ({"top_k": 2}, True),
        ({"top_p": 0.7, "raw_logprobs": True}, False),
        ({"raw_logprobs": True}, False),
    ],
)
def test_log_probs_of_another_distribution_are_said(sampling, mixed, recwarn):
    """Equal sides, so every ratio is 1, or the mass that top-p and top-k kept."""
    trainer, _ = make()
    engine = NativeEngine(trainer.model, trainer.plan, tokenizer=trainer.tokenizer)
    rollout = engine.generate(PROMPTS, SamplingParams(n=4, max_tokens=6, **sampling), seed=0)
    metrics = trainer.step(rollout, rewards_of(rollout))
    assert any("ratios are biased" in str(w.message) for w in recwarn) == mixed
    assert (metrics["token_mult_prob_error"] > 1.01) == mixed


def test_a_step_times_its_parts():
    trainer, rollout = make("fp8-e2e", dataclasses.replace(CONFIG, num_iterations=2))
    trainer.step(rollout, rewards_of(rollout))
    assert trainer.seconds.keys() == {"score", "quantize"} and min(trainer.seconds.values()) > 0


@pytest.mark.parametrize(
    ("rewards", "message"),
    [([1.0], "1 rewards for 16"), ([float("nan")] * 16, "not finite"), ([float("inf")] + [0.0] * 15, "not finite")],
)
def test_bad_rewards(rewards, message):
    trainer, rollout = make()
    with pytest.raises(ValueError, match=message):
        trainer.step(rollout, rewards)


def test_save_and_load_continue_bit_for_bit(tmp_path):
    trainer, rollout = make("fp8-e2e")
    rewards = rewards_of(rollout)
    trainer.step(rollout, rewards)
    trainer.save(tmp_path / "checkpoint")
    twin = Trainer("tiny-llama", trainer.plan, CONFIG)
    twin.load(tmp_path / "checkpoint")
    for _ in range(2):
        assert trainer.step(rollout, rewards) == twin.step(rollout, rewards)
    reloaded = Trainer(tmp_path / "checkpoint", trainer.plan, CONFIG)  # it is a Hugging Face folder, too
    assert torch.equal(reloaded.score(rollout), _scored_after_load(tmp_path, trainer.plan, rollout))


def _scored_after_load(tmp_path, plan, rollout):
    twin = Trainer("tiny-llama", plan, CONFIG)
    twin.load(tmp_path / "checkpoint")
    return twin.score(rollout)


def test_load_names_what_is_missing(tmp_path):
    trainer, _ = make()
    with pytest.raises(FileNotFoundError, match="optimizer.safetensors"):
        trainer.load(tmp_path)


def test_a_failed_save_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    trainer, _ = make()
    trainer.save(tmp_path / "checkpoint")
    before = (tmp_path / "checkpoint" / "model.safetensors").read_bytes()

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(OSError, match="No space left"):
        trainer.save(tmp_path / "checkpoint")
    assert (tmp_path / "checkpoint" / "model.safetensors").read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint"]


def test_the_mask_is_not_ignored(monkeypatch):
    """A planted fault: weights that count padding and prompt tokens change the loss."""
    trainer, rollout = make()
    honest = trainer.step(rollout, rewards_of(rollout))
    broken, _ = make()
    original = grpo.token_weights
    monkeypatch.setattr("fp8lab.trainer.token_weights", lambda mask, *a: original(torch.ones_like(mask), *a))
    faulty = broken.step(rollout, rewards_of(rollout))
    assert faulty["loss"] != pytest.approx(honest["loss"], rel=1e-3)


def test_linear_schedule():
    config = dataclasses.replace(CONFIG, lr_scheduler_type="linear", warmup_steps=2, learning_rate=1.0)
    trainer = Trainer("tiny-llama", PrecisionPlan.preset("bf16"), config, max_updates=12)
    rates = []
    for trainer.updates in (1, 2, 7, 12, 20):
        rates.append(trainer.learning_rate)
    assert rates == pytest.approx([0.5, 1.0, 0.55, 0.1, 0.1])
    with pytest.raises(ValueError, match="max_updates"):
        Trainer("tiny-llama", PrecisionPlan.preset("bf16"), config)


def test_rows_must_be_whole_groups():
    trainer, rollout = make()
    with pytest.raises(ValueError, match="whole groups of 4"):
        trainer.score(dataclasses.replace(rollout, tokens=rollout.tokens.roll(1, 0)))


# ---- what NeMo RL's configurations ask for ----------------------------------------------------------------


def test_a_forced_ratio_changes_nothing_with_one_update():
    first, rollout = make("fp8-rollout")
    forced = Trainer("tiny-llama", first.plan, dataclasses.replace(CONFIG, force_on_policy_ratio=True))
    a, b = (trainer.step(rollout, rewards_of(rollout)) for trainer in (first, forced))
    assert a == b
    for p, q in zip(first.model.parameters(), forced.model.parameters(), strict=True):
        assert torch.equal(p, q)


def test_a_threshold_drops_sequences_from_loss_and_denominator():
    trainer, rollout = make("fp8-rollout")
    d = (trainer.score(rollout) - rollout.logprobs).abs().exp()
    error = torch.where(rollout.mask, d, 0.0).sum(1) / rollout.mask.sum(1)
    threshold = error.sort().values[7:9].mean().item()
    config = dataclasses.replace(CONFIG, seq_logprob_error_threshold=threshold)
    metrics = Trainer("tiny-llama", trainer.plan, config).step(rollout, rewards_of(rollout))
    assert metrics["num_masked_seqs"] == (error > threshold).sum() == 8  # half of 16
    kept = dataclasses.replace(rollout, mask=rollout.mask & (error <= threshold)[:, None])
    want = trainer.step(kept, rewards_of(rollout))
    assert metrics["loss"] == pytest.approx(want["loss"], abs=1e-6)
    assert metrics["grad_norm"] == pytest.approx(want["grad_norm"], rel=1e-4)
    assert metrics["token_mult_prob_error"] > want["token_mult_prob_error"]  # the gap is measured on all of them


def test_a_threshold_that_drops_everything_makes_no_update():
    trainer, rollout = make("fp8-rollout", dataclasses.replace(CONFIG, seq_logprob_error_threshold=1.0))
    before = [p.clone() for p in trainer.model.parameters()]
    metrics = trainer.step(rollout, rewards_of(rollout))
    assert metrics["num_masked_seqs"] == 16 and metrics["skipped_updates"] == 1
    assert all(torch.equal(p, q) for p, q in zip(before, trainer.model.parameters(), strict=True))
