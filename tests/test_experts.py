"""Fused experts: bytes and GEMMs expert by expert against the NumPy reference, and the life of the quantized copies."""

import copy
import dataclasses
import json
import pickle

import numpy as np
import pytest
import torch

from fp8lab import models
from fp8lab.conversion import convert, restore
from fp8lab.experiment import ExperimentConfig
from fp8lab.experiment import run as run_experiment
from fp8lab.experts import ExpertWeights, attach, detach
from fp8lab.grpo import GRPOConfig
from fp8lab.linear import Float8Linear, float8_layers, real_tokens, refresh
from fp8lab.operands import LinearPrecision
from fp8lab.precision import PrecisionPlan
from fp8lab.rollout import NativeEngine
from fp8lab.trainer import Trainer

from . import references

E2E, BF16 = PrecisionPlan.preset("fp8-e2e"), PrecisionPlan.preset("bf16")
FP8 = LinearPrecision(output="float32")
FORMATS = {
    "e4m3": {},
    "pow2": {"rule": "pow2"},
    "e5m2 gradients": {"gradient": "e5m2"},
    "bf16": {"weight": "bf16", "activation": "bf16", "gradient": "bf16"},
    "bf16 gradients": {"gradient": "bf16"},
}
E, K = 4, 200
COUNTS = [150, 0, 1, 130]


pytestmark = pytest.mark.usefixtures("one_thread")


def experts_module(hidden=K, intermediate=72, seed=0):
    """A transformers experts module: gate_up_proj (E, 2 * 72, 200), down_proj (E, 200, 72), nothing a multiple of
    128."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    sizes = dict(hidden_size=hidden, moe_intermediate_size=intermediate, num_experts=E, num_experts_per_tok=2)
    experts = Qwen3MoeExperts(Qwen3MoeConfig(**sizes))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in experts.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.05)
        experts.gate_up_proj[:, intermediate:] *= 20  # gate and up differ in size: a shared scale would show
    experts.config._experts_implementation = "eager"
    return experts


def converted(experts, precision=FP8, kernels="default"):
    for tensor in ("gate_up_proj", "down_proj"):
        attach(experts, tensor, precision, kernels)
    return experts


def routed(tokens=90, seed=1, hidden=K):
    """hidden states (T, H), two different experts a token (never expert 1), their weights, and a gradient."""
    r = torch.Generator().manual_seed(seed)
    x, g = torch.randn(tokens, hidden, generator=r), torch.randn(tokens, hidden, generator=r) * 1e-3
    x[:, :5] *= 30
    index = torch.tensor([0, 2, 3])[torch.rand(tokens, 3, generator=r).topk(2).indices]
    return x, index, torch.rand(tokens, 2, generator=r), g


def run(experts, x, index, weights, g):
    """(output, grad of x, of the router's weights, of gate_up_proj, of down_proj)."""
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    experts.zero_grad(set_to_none=True)
    y = experts(x, index, weights)
    y.backward(g)
    return y.detach(), x.grad, weights.grad, experts.gate_up_proj.grad, experts.down_proj.grad


# ---- bytes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("pow2", [False, True])
def test_each_expert_is_quantized_alone_and_gate_apart_from_up(pow2):
    experts = converted(experts_module(intermediate=136), dataclasses.replace(FP8, rule="pow2" if pow2 else "default"))
    with torch.no_grad():
        experts.gate_up_proj[2] *= 1000
    refresh(experts)
    halves = experts.gate_up_proj.detach().view(E, 2, 136, K)
    for tensor, parts in (("gate_up_proj", halves), ("down_proj", experts.down_proj.detach()[:, None])):
        copied = getattr(experts, f"float8_{tensor}").quantized
        for index in np.ndindex(*parts.shape[:2]):
            codes, scale, values = references.quantize(references.bf16(parts[index].numpy()), (128, 128), pow2=pow2)
            assert np.array_equal(copied.packed.codes[index].numpy(), codes)
            assert np.array_equal(copied.packed.scale[index].numpy(), scale)
            assert np.array_equal(copied.values.view(parts.shape)[index].numpy(), values)


def test_transformers_own_quantizer_gives_these_bytes_for_whole_blocks():
    """transformers multiplies by 448 / amax instead of dividing by amax / 448: scales may differ in the last bit, and
    with them a code that lies on the edge."""
    from types import SimpleNamespace

    from transformers.integrations.finegrained_fp8 import Fp8Quantize

    experts = converted(experts_module(256, 128), dataclasses.replace(FP8, weight_source="fp32"))
    settings = SimpleNamespace(weight_block_size=(128, 128), scale_fmt="float")
    quantizer = Fp8Quantize(SimpleNamespace(quantization_config=settings))
    for tensor in ("gate_up_proj", "down_proj"):
        theirs = quantizer._quantize_one(tensor, getattr(experts, tensor).detach())
        ours = getattr(experts, f"float8_{tensor}").quantized.packed
        scale = ours.scale.flatten(1, 2)
        torch.testing.assert_close(scale, theirs[f"{tensor}_scale_inv"], rtol=2e-7, atol=0)
        differ = ours.codes.view(theirs[tensor].shape) != theirs[tensor].view(torch.uint8)
        assert differ.float().mean() < 1e-4


def test_an_all_zero_expert_stays_finite_and_disturbs_no_other():
    experts = converted(experts_module())
    before = run(experts, *routed())
    with torch.no_grad():
        experts.gate_up_proj[1] = 0
        experts.down_proj[1] = 0
    refresh(experts)
    assert all(torch.equal(a, b) for a, b in zip(run(experts, *routed()), before, strict=True))
    assert not experts.float8_down_proj.quantized.packed.codes[1].any()
    assert (experts.float8_down_proj.quantized.packed.scale[1] == 1).all()
    x, index, weights, g = routed()
    zero = run(experts, x, torch.ones_like(index[:, :1]), weights[:, :1], g)
    assert all(t.isfinite().all() for t in zero) and not zero[0].any()


# ---- the GEMMs --------------------------------------------------------------------------------------


@pytest.mark.parametrize("masked", [False, True], ids=["all", "masked"])
@pytest.mark.parametrize("name", FORMATS)
def test_gemms_equal_the_float64_reference_expert_by_expert(name, masked):
    experts = converted(experts_module(), dataclasses.replace(FP8, **FORMATS[name]))
    r = torch.Generator().manual_seed(3)
    x = torch.randn(sum(COUNTS), K, generator=r).requires_grad_()
    g = torch.randn(sum(COUNTS), 144, generator=r) * torch.randn(sum(COUNTS), 144, generator=r).exp() * 1e-3
    mask = torch.rand(sum(COUNTS), generator=r) < 0.7 if masked else torch.ones(sum(COUNTS), dtype=torch.bool)
    g[~mask] = 0
    y = experts.float8_gate_up_proj(x, mask if masked else None, COUNTS)
    y.backward(g)
    formats = {k: v for k, v in FORMATS[name].items() if k != "rule"}
    start = 0
    for e, count in enumerate(COUNTS):
        rows = slice(start, start + count)
        start += count
        real = mask[rows].numpy()
        if not real.any():
            continue
        whole = [
            references.rounded(references.bf16(w), formats.get("weight", "e4m3"), (128, 128), name == "pow2")
            for w in experts.gate_up_proj[e].detach().view(2, 72, K).numpy()
        ]
        rounded_g = references.rounded(g[rows].numpy(), formats.get("gradient", "e4m3"), (1, 128), name == "pow2")
        grad_input = rounded_g @ np.concatenate(whole)
        np.testing.assert_allclose(x.grad[rows].numpy(), grad_input, rtol=0, atol=2e-6 * np.abs(grad_input).max())
        for half in (slice(0, 72), slice(72, 144)):  # no scale of an output row depends on another row's block
            w = experts.gate_up_proj[e, half].detach().numpy()
            a = x[rows].detach().numpy(), w, g[rows, half].numpy()
            want = references.linear(*a, pow2=name == "pow2", **formats)
            packed = references.linear(a[0][real], w, a[2][real], pow2=name == "pow2", **formats)[2]
            close = dict(rtol=0, atol=2e-6 * np.abs(want[0]).max())
            np.testing.assert_allclose(y[rows, half].detach().numpy(), want[0], **close)
            close["atol"] = 2e-6 * np.abs(packed).max()
            np.testing.assert_allclose(experts.gate_up_proj.grad[e, half].numpy(), packed, **close)
    assert not experts.gate_up_proj.grad[1].any()  # an expert without tokens


@pytest.mark.parametrize("name", ["e4m3", "bf16"])
def test_the_layer_equals_one_float8_linear_per_expert_under_transformers_own_loop(name):
    """The `eager` loop of transformers, its F.linear replaced by the Float8Linear of each expert."""
    precision = dataclasses.replace(LinearPrecision(), **FORMATS[name])
    experts, (x, index, weights, g) = experts_module(256, 128), routed(hidden=256)
    ours = run(converted(copy.deepcopy(experts), precision), x, index, weights, g)

    def single(weight):
        linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        linear.weight = torch.nn.Parameter(weight.detach().clone())
        return Float8Linear.from_linear(linear, precision)

    up, down = ([single(w) for w in tensor] for tensor in (experts.gate_up_proj, experts.down_proj))
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    total = torch.zeros_like(x)
    for e in range(E):
        token, slot = torch.where(index == e)
        gate, value = up[e](x[token]).chunk(2, dim=-1)
        y = down[e](torch.nn.functional.silu(gate) * value) * weights[token, slot, None]
        total = total.index_add(0, token, y)
    total.backward(g)
    grads = [
        torch.stack([torch.zeros_like(m.weight) if m.weight.grad is None else m.weight.grad for m in ms])
        for ms in (up, down)
    ]
    for a, b in zip(ours, (total.detach(), x.grad, weights.grad, *grads), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6 * b.abs().max().item())
    assert not ours[3][1].any() and not ours[4][1].any() and ours[3][0].any()


def test_unrounded_it_is_transformers_forward():
    """What is left with BF16 operands is their rounding: 40 dB and more; FP8 loses another 20."""
    experts, data = experts_module(), routed()
    exact = run(experts, *data)
    bf16 = run(converted(copy.deepcopy(experts), dataclasses.replace(FP8, **FORMATS["bf16"])), *data)
    fp8 = run(converted(copy.deepcopy(experts)), *data)
    for a, b, c in zip(exact, bf16, fp8, strict=True):
        assert references.sqnr(a, b) > 40 and 15 < references.sqnr(a, c) < references.sqnr(a, b) - 12


def test_padding_never_changes_grad_weight():
    experts, (x, index, weights, g) = converted(experts_module()), routed(60)
    plain = run(experts, x, index, weights, g)
    keep = torch.ones(120, dtype=torch.bool).view(2, 60)
    keep[0, ::2], keep[1, 1::2] = False, False
    place = keep.flatten().nonzero().squeeze(1)
    big = [torch.full((120, *t.shape[1:]), 2, dtype=t.dtype).index_copy(0, place, t) for t in (x, index, weights)]
    padded_g = torch.zeros(120, K).index_copy(0, place, g)
    with real_tokens(keep):
        padded = run(experts, *big, padded_g)
    for a, b in zip(plain[3:], padded[3:], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6 * a.abs().max().item())
    unmasked = run(experts, *big, padded_g)
    assert references.sqnr(plain[3], unmasked[3]) < 45


def test_other_kernels_differ_in_last_bits_only():
    experts, data = experts_module(256, 256), routed(hidden=256)
    a, b = (run(converted(copy.deepcopy(experts), FP8, kernels), *data)[0] for kernels in ("default", "other"))
    assert not torch.equal(a, b) and references.sqnr(a, b) > 60
    with pytest.raises(ValueError, match="kernels is 'x'; allowed: default, other"):
        attach(experts, "down_proj", FP8, "x")


# ---- in a model ---------------------------------------------------------------------------------------


def logits(model, seed=1):
    with torch.no_grad():
        return model(input_ids=references.tokens(seed), use_cache=False).logits


def test_in_place_reversible_and_the_latest_plan_counts():
    model = references.tiny_moe()
    parameters, before = dict(model.named_parameters()), logits(model)
    keys, text, config = list(model.state_dict()), repr(model), model.config.to_dict()
    kinds = {type(m) for m in model.modules()}
    convert(model, E2E, side="trainer")
    fp8 = logits(model)
    assert model.model.layers[0].mlp.experts.gate_up_proj is parameters["model.layers.0.mlp.experts.gate_up_proj"]
    assert list(model.state_dict()) == keys and model.config.to_dict() == config
    assert "float8_down_proj): ExpertWeights(down_proj, e4m3[128x128] x e4m3[1x128], backend=emulated)" in repr(model)
    convert(model, E2E, side="trainer")
    assert torch.equal(logits(model), fp8)
    convert(model, BF16, side="trainer")
    bf16 = logits(model)
    assert references.sqnr(before, fp8) + 12 < references.sqnr(before, bf16)
    convert(model, E2E.with_bf16(modules=["mlp.experts"]), side="trainer")
    only_experts_bf16 = logits(model)
    assert not torch.equal(only_experts_bf16, fp8) and not torch.equal(only_experts_bf16, bf16)
    restore(model)
    assert repr(model) == text and {type(m) for m in model.modules()} == kinds
    assert all(model.get_parameter(name) is p for name, p in parameters.items())
    assert all(m.config is model.config for name, m in model.named_modules() if name.endswith(".experts"))
    assert torch.equal(logits(model), before)


def test_what_is_reported():
    result = convert(
        references.tiny_moe(), E2E.with_bf16(modules=["experts.down_proj"], side="rollout"), side="rollout"
    )
    assert {n for n in result.fp8 if "experts" in n} == {f"model.layers.{i}.mlp.experts.gate_up_proj" for i in (0, 1)}
    assert result.untouched == tuple(f"model.layers.{i}.mlp.gate.weight" for i in (0, 1))  # routers, in float32
    assert repr(result).endswith("3 x bf16; 2 tensors untouched (float32))")


def test_one_half_in_fp8_is_both_halves_in_fp8_less_the_other():
    model = references.tiny_moe()
    names = {"gate_up_proj": "down_proj", "down_proj": "gate_up_proj"}
    for fp8, kept in names.items():
        convert(model, E2E.with_bf16(modules=[f"experts.{kept}"]), side="trainer")
        precisions = {n.rsplit(".", 1)[-1]: m.precision for n, m in float8_layers(model) if ".experts." in n}
        assert precisions[fp8].is_fp8 and not precisions[kept].is_fp8


def test_only_refresh_requantizes_and_an_optimizer_made_before_stays_valid():
    model = references.tiny_moe()
    optimizer = torch.optim.SGD(model.parameters(), lr=5.0)
    convert(model, E2E, side="trainer")
    before, ids = logits(model), references.tokens()
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if ".experts." not in name:
                p.grad = None  # only experts learn
    assert all(p.grad.any() for n, p in model.named_parameters() if ".experts." in n)
    optimizer.step()
    assert torch.equal(logits(model), before)
    refresh(model)
    assert not torch.equal(logits(model), before)


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "load_state_dict", "to"])
def test_copies_loads_and_moves_drop_the_quantized_copy(how):
    model = references.tiny_moe()
    convert(model, E2E, side="trainer")
    fp8, other = logits(model), references.tiny_moe(seed=5)
    copies = [layer for name, layer in float8_layers(model) if ".experts." in name]
    assert all(isinstance(layer, ExpertWeights) and layer._cache is not None for layer in copies)
    if how in ("deepcopy", "pickle"):
        model = copy.deepcopy(model) if how == "deepcopy" else pickle.loads(pickle.dumps(model))
        experts = model.model.layers[0].mlp.experts
        assert experts.float8_down_proj.experts is experts and experts.float8_down_proj._cache is None
        assert experts.float8_down_proj.weight is experts.down_proj
        assert torch.equal(logits(model), fp8)
        restore(model)
        assert torch.equal(logits(model), logits(references.tiny_moe()))
    elif how == "load_state_dict":
        model.load_state_dict(other.state_dict())
        assert all(layer._cache is None for layer in copies)
        convert(other, E2E, side="trainer")
        assert torch.equal(logits(model), logits(other))
    else:
        model.to(torch.float64).to(torch.float32)
        assert all(layer._cache is None for layer in copies)
        assert torch.equal(logits(model), fp8)


def test_a_pickle_opens_where_nothing_was_converted_before():
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    model = references.tiny_moe()
    convert(model, E2E, side="trainer")
    stored, before = pickle.dumps(model), logits(model)
    del ALL_EXPERTS_FUNCTIONS._global_mapping["fp8lab"]  # as in a new process
    assert torch.equal(logits(pickle.loads(stored)), before)


def test_save_pretrained_writes_the_bytes_of_the_plain_model(tmp_path):
    model = references.tiny_moe()
    model.save_pretrained(tmp_path / "plain")
    convert(model, E2E, side="trainer")
    model.save_pretrained(tmp_path / "converted")
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "plain" / name).read_bytes() == (tmp_path / "converted" / name).read_bytes()
    loaded = models.load_model(tmp_path / "converted")
    convert(loaded, E2E, side="trainer")
    assert torch.equal(logits(loaded), logits(model))


def test_a_refit_proves_equal_bytes_and_a_flipped_one_is_named():
    plan = PrecisionPlan.preset("fp8-e2e")
    engine, trainer = NativeEngine("tiny-qwen3-moe", plan), Trainer("tiny-qwen3-moe", plan)
    with torch.no_grad():
        for p in trainer.model.parameters():
            p.mul_(1.01)
    refresh(trainer.model)
    assert {n for n in engine.check_same_bytes(trainer) if "experts" in n} == {
        f"model.layers.{i}.mlp.experts.{tensor}" for i in range(4) for tensor in ("gate_up_proj", "down_proj")
    }
    engine.refit(trainer)
    assert engine.check_same_bytes(trainer) == {}
    engine.model.model.layers[2].mlp.experts.float8_down_proj.quantized.packed.codes[5, 0, 7, 9] ^= 1
    assert engine.check_same_bytes(trainer) == {"model.layers.2.mlp.experts.down_proj": "1 codes and 0 scales differ"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bf16", "fp8-rollout", "fp8-e2e"])
def test_three_arms_of_the_loop(name, tmp_path):
    config = ExperimentConfig(
        name=name,
        model="tiny-qwen3-moe",
        plan=PrecisionPlan.preset(name),
        grpo=GRPOConfig(learning_rate=1e-4, importance_sampling="tis"),
        steps=2,
        prompts_per_step=16,
        eval_every=2,
        eval_prompts=8,
        rollout_kernels="other",
    )
    run_experiment(config, tmp_path / name)
    steps = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
    errors = [step["token_mult_prob_error"] for step in steps if "token_mult_prob_error" in step]
    assert len(errors) == 2
    assert all(1.01 < e < 1.2 for e in errors) if name == "fp8-rollout" else all(1 <= e < 1.005 for e in errors)


def test_two_models_of_one_config_are_apart():
    a = references.tiny_moe()
    b = type(a)(a.config)
    b.load_state_dict(a.state_dict())
    before = logits(b.eval())
    convert(a, E2E, side="trainer")
    assert torch.equal(logits(b), before) and not torch.equal(logits(a), before)


def test_meta_device():
    with torch.device("meta"):
        model = references.tiny_moe()
    result = convert(model, E2E, side="trainer")
    assert sum(".experts." in name for name in result.fp8) == 4
    assert all(layer._cache is None for _, layer in float8_layers(model))


def test_layouts_that_are_not_emulated_are_refused_if_planned_in_fp8():
    from transformers import GptOssConfig, GptOssForCausalLM

    sizes = {**references.SIZES, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 12}
    model = GptOssForCausalLM(GptOssConfig(**sizes, layer_types=["full_attention"] * 2)).eval()
    before = repr(model)
    with pytest.raises(
        ValueError, match=r"gate_up_proj is planned in FP8, but GptOssExperts has is_transposed=True.*with_bf16"
    ):
        convert(model, E2E, side="trainer")
    assert repr(model) == before
    result = convert(model, E2E.with_bf16(modules=["mlp.experts"]), side="trainer")
    assert any(".experts." in name for name in result.untouched) and not any(".experts." in n for n in result.fp8)
    assert logits(model).isfinite().all()


def test_detach_without_attach_does_nothing():
    experts = experts_module()
    before = repr(experts)
    detach(experts)
    assert repr(experts) == before
