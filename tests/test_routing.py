"""Router agreement, recording and replay, against transformers' own router logits and the formulas written again."""

import dataclasses

import pytest
import torch

from fp8lab import diagnostics
from fp8lab.conversion import convert
from fp8lab.models import load_model
from fp8lab.precision import PrecisionPlan
from fp8lab.rollout import NativeEngine, SamplingParams
from fp8lab.routing import NOT_RECORDED, record_routes, replay_routes, router_agreement, routers, routes_at
from fp8lab.tasks import load_task
from fp8lab.trainer import Trainer

from . import references
from .test_conversion import deepseek, mixtral, qwen2_moe

MODEL = "tiny-qwen3-moe"
ROLLOUT_ONLY, BF16 = PrecisionPlan.preset("fp8-rollout"), PrecisionPlan.preset("bf16")
PROMPTS = ["12+7=", "3+4=", "91-15=", "3+4=", "8*6=", "77+6="]


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def recorded():
    """(engine of FP8, BF16 trainer, recording, rollout without routes, rollout with them)."""
    engine, trainer = NativeEngine(MODEL, ROLLOUT_ONLY), Trainer(MODEL, ROLLOUT_ONLY)
    prompts = load_task("arithmetic").train[:64]["prompt"]
    with record_routes(engine.model) as recording:
        rollout = engine.generate(prompts, SamplingParams(n=8, max_tokens=6), seed=0)
    return engine, trainer, recording, rollout, recording.add_to(rollout)


def read(rollout):
    """(B, T) bool: the tokens that a forward reads; the last of a sequence is not."""
    return torch.arange(rollout.tokens.shape[1]) < rollout.lengths[:, None] - 1


def transformers_routes(model, tokens, k=2):
    """(B, T, L, k) experts by the router logits that transformers itself reports, sorted."""
    with torch.no_grad():
        scores = model(input_ids=tokens, use_cache=False, output_router_logits=True).router_logits
    return torch.stack([s.view(*tokens.shape, -1).topk(k).indices.sort().values for s in scores], dim=2)


# ---- recording ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("forward", ["own", "transformers"])
@pytest.mark.parametrize("max_batch_size", [6, 1024])
def test_recorded_routes_are_those_of_a_forward_over_the_whole_sequences(forward, max_batch_size):
    """Prompts of several lengths, one of them twice, in batches of two prompts or all at once."""
    engine = NativeEngine(MODEL, BF16, forward=forward, max_batch_size=max_batch_size)
    with record_routes(engine.model) as recording:
        rollout = engine.generate(PROMPTS, SamplingParams(n=3, max_tokens=5), seed=1)
    rollout = recording.add_to(rollout)
    assert rollout.routes.shape == (*rollout.tokens.shape, 4, 2) and rollout.routes.dtype == torch.int16
    want = transformers_routes(engine.model, rollout.tokens)
    now, ours = read(rollout), rollout.routes.long().sort().values
    assert torch.equal(ours[now], want[now]) and (ours[~now] == NOT_RECORDED).all()
    assert len({int(n) for n in rollout.lengths - rollout.prompt_lengths}) > 1  # sequences left the batch


def test_recording_ends_with_its_block_and_changes_nothing():
    engine = NativeEngine(MODEL, BF16)
    plain = engine.generate(PROMPTS, SamplingParams(n=2, max_tokens=4), seed=1)
    with record_routes(engine.model) as recording:
        seen = engine.generate(PROMPTS, SamplingParams(n=2, max_tokens=4), seed=1)
    count = len(recording.forwards)
    engine.generate(PROMPTS, SamplingParams(n=2, max_tokens=4), seed=2)
    assert count == len(recording.forwards) and torch.equal(seen.logprobs, plain.logprobs) and plain.routes is None


def test_a_recording_of_another_rollout_is_refused(recorded):
    engine, _, recording, rollout, _ = recorded
    other = rollout.tokens.clone()
    other[5, rollout.prompt_lengths[5]] += 1
    with pytest.raises(ValueError, match="not of this rollout"):
        recording.add_to(dataclasses.replace(rollout, tokens=other))
    with record_routes(engine.model) as empty:
        pass
    with pytest.raises(ValueError, match="nothing was recorded"):
        empty.add_to(rollout)
    half = dataclasses.replace(recording, forwards=recording.forwards[:-1])
    with pytest.raises(ValueError, match=r"\d+ of the \d+ tokens that this rollout read were not recorded"):
        half.add_to(rollout)
    twice = dataclasses.replace(recording, forwards=recording.forwards * 2)
    with pytest.raises(ValueError, match="or more of them"):
        twice.add_to(rollout)


# ---- agreement ----------------------------------------------------------------------------------------


def test_equal_models_agree_and_an_fp8_side_does_less(recorded):
    engine, trainer, _, rollout, _ = recorded
    same = router_agreement(trainer.model, trainer.model, rollout.tokens, read(rollout))
    assert same.agreement == 1 and same.anywhere == 0 and set(same.overlap) == {1.0} and not any(same.logit_rms)
    apart = router_agreement(engine.model, trainer.model, rollout.tokens, read(rollout))
    assert 0.93 < apart.agreement < 0.995 and 1 - apart.agreement < apart.anywhere < 4 * (1 - apart.agreement) + 1e-9
    assert all(0 < rms < margin for rms, margin in zip(apart.logit_rms, apart.margin, strict=True))
    e2e = load_model(MODEL)
    convert(e2e, PrecisionPlan.preset("fp8-e2e"), side="trainer")
    assert router_agreement(engine.model, e2e, rollout.tokens, read(rollout)).agreement == 1


def test_agreement_by_transformers_router_logits(recorded):
    engine, trainer, _, rollout, _ = recorded
    mask = rollout.mask & read(rollout)
    ours = router_agreement(engine.model, trainer.model, rollout.tokens, mask)
    a, b = (transformers_routes(m, rollout.tokens)[mask] for m in (engine.model, trainer.model))
    assert ours.tokens == int(mask.sum()) and ours.layers == tuple(f"model.layers.{i}.mlp.gate" for i in range(4))
    torch.testing.assert_close(torch.tensor(ours.changed), (a != b).any(dim=2).float().mean(dim=0))
    assert ours.anywhere == pytest.approx((a != b).any(dim=2).any(dim=1).float().mean().item())
    overlap = [
        [len({*x.tolist()} & {*y.tolist()}) / 2 for x, y in zip(u, v, strict=True)] for u, v in zip(a, b, strict=True)
    ]
    torch.testing.assert_close(torch.tensor(ours.overlap), torch.tensor(overlap).mean(dim=0))
    mean = sum(ours.overlap) / 4
    assert ours.as_dict() == {
        "router_agreement": ours.agreement,
        "router_overlap": mean,
        "router_changed_anywhere": ours.anywhere,
    }


def test_padding_and_masked_tokens_never_matter(recorded):
    engine, trainer, _, rollout, _ = recorded
    mask = read(rollout)
    padded = torch.nn.functional.pad(rollout.tokens, (0, 3), value=5)
    a = router_agreement(engine.model, trainer.model, rollout.tokens, mask)
    b = router_agreement(engine.model, trainer.model, padded, torch.nn.functional.pad(mask, (0, 3)))
    assert a.changed == b.changed and a.overlap == b.overlap and a.tokens == b.tokens


def test_agreement_of_what_cannot_be_compared():
    dense, moe = references.tiny_llama(), references.tiny_moe()
    ids = references.tokens()
    with pytest.raises(ValueError, match="LlamaForCausalLM has no layers with fused experts"):
        router_agreement(dense, dense, ids, torch.ones_like(ids, dtype=torch.bool))
    with pytest.raises(ValueError, match="mask is True nowhere"):
        router_agreement(moe, moe, ids, torch.zeros_like(ids, dtype=torch.bool))
    with pytest.raises(ValueError, match="do not have the same routers"):
        router_agreement(moe, deepseek(), ids, torch.ones_like(ids, dtype=torch.bool))


# ---- replay -------------------------------------------------------------------------------------------


def test_replay_makes_the_experts_equal_and_the_gap_smaller(recorded):
    """Measured: token_mult_prob_error 1.028 -> 1.022, k3 1.9e-3 -> 0.9e-3; the rest is rounding, not routes."""
    _, trainer, _, rollout, routed = recorded
    before = diagnostics.mismatch(rollout.logprobs, trainer.score(rollout), rollout.mask)
    with record_routes(trainer.model) as replayed:
        t = trainer.score(routed)
    after = diagnostics.mismatch(rollout.logprobs, t, rollout.mask)
    assert 1.01 < after.token_mult_prob_error < before.token_mult_prob_error - 0.002
    assert after.gen_kl_error < 0.8 * before.gen_kl_error
    n, starts, lengths = 8, rollout.prompt_lengths, rollout.lengths
    size = len(replayed.forwards[0].tokens)  # micro-batches: prompts, then completions without their last token
    for part, (prompts, rest) in enumerate(zip(replayed.forwards[::2], replayed.forwards[1::2], strict=True)):
        first = part * size * n
        for i, routes in enumerate(prompts.routes()):
            row = first + i * n
            assert torch.equal(routes[-starts[row] :], routed.routes[row, : starts[row]])
        for i, routes in enumerate(rest.routes()):
            row = first + i
            count = int(lengths[row] - starts[row]) - 1
            assert torch.equal(routes[:count], routed.routes[row, starts[row] : starts[row] + count])


def test_replaying_its_own_routes_changes_no_bit():
    engine, trainer = NativeEngine(MODEL, BF16), Trainer(MODEL, BF16)
    with record_routes(engine.model) as recording:
        rollout = engine.generate(PROMPTS, SamplingParams(n=4, max_tokens=5), seed=0)
    assert torch.equal(trainer.score(recording.add_to(rollout)), trainer.score(rollout))


def test_a_step_learns_on_replayed_routes(recorded):
    _, _, _, rollout, routed = recorded
    rewards = torch.arange(len(rollout.tokens)) % 3 == 0
    metrics = [Trainer(MODEL, ROLLOUT_ONLY).step(r, rewards) for r in (rollout, routed)]
    assert metrics[1]["gen_kl_error"] < 0.8 * metrics[0]["gen_kl_error"] and metrics[1]["grad_norm"] > 0


def gate_weights(kind, logits, experts, config):
    """Weights of given experts from the router's own logits, as R3 and verl's `scores.gather(1, indices)` define."""
    scores = logits.sigmoid() if kind == "deepseek" else logits.softmax(dim=-1)
    weights = scores.gather(1, experts)
    if kind in ("qwen3", "mixtral", "deepseek"):  # normalized over the replayed experts: exp(s_e) / sum of exp(s_j)
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights * (config.routed_scaling_factor if kind == "deepseek" else 1)


@pytest.mark.parametrize("kind", ["qwen3", "mixtral", "deepseek", "qwen2"])
def test_weights_come_from_the_routers_own_logits_at_the_replayed_experts(kind):
    """deepseek chooses two of four groups and then two experts: replay must not take the first for the second."""
    build = {"qwen3": references.tiny_moe, "mixtral": mixtral, "deepseek": deepseek, "qwen2": qwen2_moe}[kind]
    model = build()
    router, ids = list(routers(model).values())[-1], references.tokens()
    router.norm_topk_prob = kind != "qwen2"
    if kind == "deepseek":
        router.num_group, router.topk_group = 4, 2
    layers, count = len(routers(model)), router.weight.shape[0]
    generator = torch.Generator().manual_seed(3)
    routes = torch.rand(*ids.shape, layers, count, generator=generator).argsort().narrow(-1, 0, 2)
    seen = []
    handle = router.register_forward_hook(lambda _, __, output: seen.append(output))
    with replay_routes(model, routes):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    handle.remove()
    logits, weights, experts = seen[0]
    assert torch.equal(experts, routes[:, :, -1].flatten(0, 1))
    torch.testing.assert_close(weights, gate_weights(kind, logits, experts, model.config))
    loss.backward()
    assert router.weight.grad.isfinite().all() and router.weight.grad.any()  # the router still learns
    model(input_ids=ids, use_cache=False)
    assert "forward" not in router.__dict__


def test_tokens_without_routes_choose_for_themselves():
    model, ids = references.tiny_moe(), references.tokens()
    routes = torch.randint(0, 2, (*ids.shape, 2, 1)) * 2 + torch.arange(2)
    routes[:, 3:] = NOT_RECORDED
    with record_routes(model) as plain, torch.no_grad():
        free = model(input_ids=ids, use_cache=False).logits
    with replay_routes(model, routes), record_routes(model) as replayed, torch.no_grad():
        model(input_ids=ids, use_cache=False)
    first = replayed.forwards[0].routes()
    assert torch.equal(first[:, :3].long(), routes[:, :3])
    assert torch.equal(first[:, 3:, 0], plain.forwards[0].routes()[:, 3:, 0])  # the first layer's input has not changed
    with replay_routes(model, torch.full_like(routes, NOT_RECORDED)), torch.no_grad():
        assert torch.equal(model(input_ids=ids, use_cache=False).logits, free)
    with replay_routes(model, None), torch.no_grad():
        assert torch.equal(model(input_ids=ids, use_cache=False).logits, free)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda r: r[:, :-1], "routes 14 tokens, but routes of 12 were given"),
        (lambda r: r[:, :, :1], "routes are of 1 layers; Qwen3MoeForCausalLM has 2 routers"),
        (lambda r: r[..., :1], "asked 0 times for the top 1 of 4 experts"),
        (lambda r: r + 3, "routes name expert 4; model.layers.0.mlp.gate has 4, numbered from 0"),
    ],
    ids=["length", "layers", "k", "expert"],
)
def test_routes_that_do_not_fit_the_forward(change, message):
    model, ids = references.tiny_moe(), references.tokens()
    routes = torch.arange(2).expand(*ids.shape, 2, 2)
    with pytest.raises(ValueError, match=message), replay_routes(model, change(routes)):
        model(input_ids=ids, use_cache=False)
    assert all("forward" not in router.__dict__ for router in routers(model).values())


def test_routes_that_do_not_fit_the_rollout(recorded):
    _, trainer, _, rollout, routed = recorded
    with pytest.raises(ValueError, match="these belong to another rollout"):
        trainer.score(dataclasses.replace(routed, routes=routed.routes[:, :-1]))
    holes = routed.routes.clone()
    holes[3, rollout.prompt_lengths[3]] = NOT_RECORDED
    assert rollout.lengths[3] - rollout.prompt_lengths[3] > 1
    with pytest.raises(ValueError, match="1 tokens have no recorded routes"):
        trainer.score(dataclasses.replace(routed, routes=holes))
    assert routes_at(rollout, torch.arange(2), torch.zeros(2, 1, dtype=torch.long)) is None


@pytest.fixture(scope="module")
def twins():
    """Two recorded rollouts of equal shape, with other tokens, and the trainer they are for."""
    engine, twins = NativeEngine(MODEL, ROLLOUT_ONLY), []
    for prompts in (["12+7=", "34+5="], ["91-2=", "48*6="]):
        with record_routes(engine.model) as recording:
            twins.append(engine.generate(prompts, SamplingParams(n=4, max_tokens=1), seed=0))
        twins[-1] = recording.add_to(twins[-1])
    a, b = twins
    assert (
        a.tokens.shape == b.tokens.shape and torch.equal(a.lengths, b.lengths) and not torch.equal(a.tokens, b.tokens)
    )
    return Trainer(MODEL, ROLLOUT_ONLY), a, b


@pytest.mark.parametrize(
    ("mix", "message"),
    [
        (lambda a, b: {"routes": b.routes}, r"first: row 0\) were not recorded for their tokens"),
        (lambda a, b: {"tokens": b.tokens}, "first: row 0"),
        (lambda a, b: {"routes": b.routes, "route_checksums": b.route_checksums}, "first: row 0"),
        (lambda a, b: {"routes": torch.cat([a.routes[:4], b.routes[4:]])}, "first: row 4"),
        (lambda a, b: {"routes": a.routes.roll(4, dims=0)}, "first: row 0"),
        (lambda a, b: {"routes": a.routes.roll(1, dims=2)}, "first: row 0"),
        (
            lambda a, b: {"route_checksums": None},
            "no checksums; put routes on a rollout with `rollout.with_routes",
        ),
        (lambda a, b: {"route_checksums": a.route_checksums[:4]}, "4 checksums for 8 rows"),
    ],
    ids=["routes", "tokens", "both", "half", "order", "layers", "unchecked", "cut"],
)
def test_routes_of_other_tokens_are_refused_where_they_are_used(twins, mix, message):
    trainer, a, b = twins
    wrong = dataclasses.replace(a, **mix(a, b))
    with pytest.raises(ValueError, match=message):
        trainer.score(wrong)
    with pytest.raises(ValueError, match=message):
        trainer.step(wrong, torch.arange(8) % 2)


def test_with_routes_wants_the_tokens_they_were_recorded_for(twins):
    trainer, a, b = twins
    plain = dataclasses.replace(a, routes=None, route_checksums=None)
    again = plain.with_routes(a.routes, a.tokens)
    assert torch.equal(again.route_checksums, a.route_checksums) and again.routes.dtype == torch.int16
    assert torch.equal(trainer.score(again), trainer.score(a))
    with pytest.raises(ValueError, match=r"recorded for other tokens: \d+ of \d+ differ"):
        plain.with_routes(b.routes, b.tokens)
    with pytest.raises(ValueError, match="they must be .B, T, layers, k. and .B, T."):
        plain.with_routes(a.routes[:4], a.tokens[:4])
    changed = plain.with_routes(a.routes.roll(1, dims=2), a.tokens)  # asked for: another layer's experts
    assert not torch.equal(trainer.score(changed), trainer.score(a))


def test_rows_and_padding_keep_their_checksums(twins):
    """Whole groups taken out, and columns of padding added, as gathering over processes does."""
    trainer, a, _ = twins
    fields = ("tokens", "logprobs", "mask", "prompt_lengths", "lengths", "finished", "routes", "route_checksums")
    part = dataclasses.replace(a, completions=a.completions[4:], **{name: getattr(a, name)[4:] for name in fields})
    wide = {name: torch.nn.functional.pad(getattr(part, name), (0, 3)) for name in ("tokens", "logprobs", "mask")}
    routes = torch.nn.functional.pad(part.routes, (0, 0, 0, 0, 0, 3), value=NOT_RECORDED)
    padded = dataclasses.replace(part, **wide, routes=routes)
    torch.testing.assert_close(trainer.score(padded)[:, :-3], trainer.score(part), rtol=0, atol=1e-6)
    torch.testing.assert_close(trainer.score(part), trainer.score(a)[4:], rtol=0, atol=1e-6)
