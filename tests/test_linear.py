"""Float8Linear's three GEMMs against a float64 reference that quantizes by NumPy, and the life of its weight cache."""

import copy
import dataclasses
import pickle
import shutil

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from fp8lab import linear
from fp8lab.linear import Float8Linear, float8_layers, matmul, real_tokens, refresh
from fp8lab.precision import BF16_HEAD, BF16_LINEAR, LinearPrecision

from . import references

M, K, N = 150, 200, 140  # no multiple of 128 anywhere
FP8 = LinearPrecision(output="float32")
FORMATS = {
    "e4m3": {},
    "pow2": {"rule": "pow2"},
    "e5m2 gradients": {"gradient": "e5m2"},
    "bf16": {"weight": "bf16", "activation": "bf16", "gradient": "bf16"},
    "bf16 gradients": {"gradient": "bf16"},
    "bf16 activations": {"activation": "bf16"},
    "bf16 weights": {"weight": "bf16"},
}


pytestmark = pytest.mark.usefixtures("one_thread")


def data(seed=0, m=M, k=K, n=N):
    """x (M, K) with outlier channels, w (N, K), g (M, N) with a heavy tail, bias (N,)."""
    r = torch.Generator().manual_seed(seed)
    x, w, g = (torch.randn(s, generator=r) for s in ((m, k), (n, k), (m, n)))
    x[:, :5] *= 30
    return x, w * 0.02, g * torch.randn(m, n, generator=r).exp() * 1e-3, torch.randn(n, generator=r)


def layer_of(w, precision, bias=None, **options):
    linear = nn.Linear(w.shape[1], w.shape[0], bias=bias is not None)
    with torch.no_grad():
        linear.weight.copy_(w)
        if bias is not None:
            linear.bias.copy_(bias)
    return Float8Linear.from_linear(linear, precision, **options)


def gemms(layer, x, g, mask=None):
    """(output, grad_input, grad_weight, grad_bias) of one forward and backward."""
    x = x.detach().requires_grad_()
    layer.zero_grad(set_to_none=True)
    with real_tokens(mask) if mask is not None else torch.enable_grad():
        y = layer(x)
        y.backward(g)
    return y.detach(), x.grad, layer.weight.grad, None if layer.bias is None else layer.bias.grad


# ---- the GEMMs ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
def test_gemms_equal_the_float64_reference(name):
    x, w, g, bias = data()
    changes = FORMATS[name]
    ours = gemms(layer_of(w, dataclasses.replace(FP8, **changes), bias), x, g)
    formats = {k: v for k, v in changes.items() if k != "rule"}
    want = list(references.linear(x.numpy(), w.numpy(), g.numpy(), pow2=name == "pow2", **formats))
    want[0] = want[0] + bias.double().numpy()
    for a, b in zip(ours, want, strict=True):
        # only the float32 accumulation is left: far below the 3e-2 of a wrong format, block or direction
        assert np.abs(a.numpy() - b).max() <= 2e-6 * np.abs(b).max()


def test_bf16_output_is_the_float32_one_rounded():
    x, w, g, bias = data()
    wide = gemms(layer_of(w, FP8, bias), x, g)
    narrow = gemms(layer_of(w, LinearPrecision(), bias), x, g)
    assert np.array_equal(narrow[0].numpy(), references.bf16(wide[0].numpy()))
    assert np.array_equal(narrow[1].numpy(), references.bf16(wide[1].numpy()))
    assert torch.equal(narrow[2], wide[2]) and torch.equal(narrow[3], wide[3])  # master gradients stay float32
    assert all(t.dtype == torch.float32 for t in narrow)


def test_each_direction_has_its_own_blocks():
    """The reference can tell: grad_weight from x quantized along channels is off by far more than the tolerance."""
    x, w, g, _ = data()
    right = references.linear(x.numpy(), w.numpy(), g.numpy())[2]
    wrong = references.rounded(g.numpy(), "e4m3", (1, 128)).T @ references.rounded(x.numpy(), "e4m3", (1, 128))
    twice = references.rounded(references.rounded(x.numpy(), "e4m3", (1, 128)).astype(np.float32).T, "e4m3", (1, 128))
    assert np.abs(wrong - right).max() > 1e-3 * np.abs(right).max()
    ours = gemms(layer_of(w, FP8), x, g)[2].numpy()
    requantized = references.rounded(g.T.numpy(), "e4m3", (1, 128)) @ twice.T
    assert references.sqnr(right, ours) > 100 > 45 > references.sqnr(right, requantized)


def test_sqnr_of_each_gemm():
    """Two E4M3 operands at 31-32 dB each leave 28-31 dB in a product of random data; one leaves 31-33."""
    r = torch.Generator().manual_seed(0)
    x, w, g = (torch.randn(s, generator=r) for s in ((256, 256), (256, 256), (256, 256)))
    exact = (x.double() @ w.double().T, g.double() @ w.double(), g.double().T @ x.double())
    for formats, low, high in (({}, 28, 31), ({"activation": "bf16", "gradient": "bf16"}, 31, 60)):
        ours = gemms(layer_of(w, dataclasses.replace(FP8, **formats)), x, g)
        for i in range(3):
            assert low < references.sqnr(exact[i].numpy(), ours[i].numpy()) < high


def test_weight_source():
    x, w, g, _ = data()
    from_bf16, from_fp32 = (layer_of(w, dataclasses.replace(FP8, weight_source=s)) for s in ("bf16", "fp32"))
    for layer, source in ((from_bf16, references.bf16(w.numpy())), (from_fp32, w.numpy())):
        codes, scale, values = references.quantize(source, (128, 128))
        assert np.array_equal(layer.quantized.packed.codes.numpy(), codes)
        assert np.array_equal(layer.quantized.packed.scale.numpy(), scale)
        assert np.array_equal(layer.quantized.values.numpy(), values)
    assert not from_bf16.quantized.packed.same_bytes(from_fp32.quantized.packed)
    assert layer_of(w, BF16_LINEAR).quantized.packed is None


def test_any_leading_shape_and_frozen_parts():
    x, w, g, bias = data(m=24)
    layer = layer_of(w, LinearPrecision(), bias)
    flat = gemms(layer, x, g)
    deep = gemms(layer, x.view(2, 3, 4, K), g.view(2, 3, 4, N))
    assert torch.equal(deep[0].view(24, N), flat[0]) and torch.equal(deep[1].view(24, K), flat[1])
    assert torch.equal(deep[2], flat[2])
    assert layer(torch.zeros(0, K)).shape == (0, N)  # an expert without tokens
    assert layer(x[0]).shape == (N,)
    layer.weight.requires_grad_(False)
    assert gemms(layer, x, g)[2] is None
    layer.weight.requires_grad_(True)
    layer(x).sum().backward()  # x needs no gradient
    assert layer.weight.grad.isfinite().all()


def test_other_kernels_differ_in_last_bits_only():
    x, w, g, _ = data(k=512)
    for formats in ({}, FORMATS["bf16"]):
        precision = dataclasses.replace(FP8, **formats)
        a, b = (gemms(layer_of(w, precision, kernels=k), x, g) for k in ("default", "other"))
        for i in range(3):
            assert not torch.equal(a[i], b[i])
            assert (a[i] - b[i]).norm() < 1e-5 * a[i].norm() and (a[i] - b[i]).abs().max() < 1e-5 * a[i].abs().max()
    assert torch.allclose(matmul(x, w, "other"), x @ w.T, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="'fast'.*default, other"):
        layer_of(w, FP8, kernels="fast")


# ---- padding --------------------------------------------------------------------------------------


def test_padding_never_changes_grad_weight():
    x, w, g, _ = data(m=200)
    lengths = (90, 37, 73)  # 200 real tokens in 3 rows of 100
    mask = torch.arange(100) < torch.tensor(lengths)[:, None]
    rows = torch.Generator().manual_seed(9)
    padded_x, padded_g = torch.randn(3, 100, K, generator=rows) * 50, torch.zeros(3, 100, N)
    padded_x[mask], padded_g[mask] = x, g
    layer = layer_of(w, LinearPrecision())
    want = gemms(layer, x, g)
    ours = gemms(layer, padded_x, padded_g, mask)
    assert torch.equal(ours[2], want[2])
    assert torch.allclose(ours[0][mask], want[0], rtol=2**-7) and torch.allclose(ours[1][mask], want[1], rtol=2**-7)
    unpacked = gemms(layer, padded_x, padded_g)[2]  # what it is for: the blocks move
    assert (unpacked - want[2]).norm() > 5e-3 * want[2].norm()
    other = gemms(layer, padded_x, padded_g, mask & False)[2]
    assert torch.equal(other, torch.zeros_like(other))


def test_bf16_needs_no_packing():
    x, w, g, _ = data(m=20)
    mask = torch.arange(30) < 20
    padded = [torch.nn.functional.pad(t, (0, 0, 0, 10)) for t in (x, g)]
    for precision in (BF16_LINEAR, BF16_HEAD):
        layer = layer_of(w, precision)
        want, ours = gemms(layer, x, g)[2], gemms(layer, *padded, mask)[2]
        assert (want - ours).abs().max() < 1e-6 * want.abs().max()


def test_real_tokens_ends_with_its_block_and_ignores_other_shapes():
    x, w, g, _ = data(m=20)
    layer = layer_of(w, LinearPrecision())
    want = gemms(layer, x, g)[2]
    assert torch.equal(gemms(layer, x, g, torch.zeros(21, dtype=torch.bool))[2], want)  # not x's leading shape
    with pytest.raises(RuntimeError, match="inside"), real_tokens(torch.zeros(20, dtype=torch.bool)):
        raise RuntimeError("inside")
    assert torch.equal(gemms(layer, x, g)[2], want)


def test_zero_rows_at_the_end_change_nothing():
    x, w, g, bias = data()
    layer = layer_of(w, FP8, bias)
    want = gemms(layer, x, g)
    ours = gemms(layer, *(torch.nn.functional.pad(t, (0, 0, 0, 106)) for t in (x, g)))
    for a, b in zip((ours[0][:M], ours[1][:M], *ours[2:]), want, strict=True):
        assert (a - b).abs().max() <= 1e-6 * b.abs().max()
    assert torch.equal(ours[1][M:], torch.zeros(106, K))


# ---- autograd -------------------------------------------------------------------------------------


def test_no_grad_and_checkpointing_change_nothing():
    x, w, g, bias = data(m=40)
    layer = layer_of(w, LinearPrecision(), bias)
    want = gemms(layer, x.view(4, 10, K), g.view(4, 10, N))
    with torch.no_grad():
        assert torch.equal(layer(x.view(4, 10, K)), want[0])
    mask = torch.arange(10) < torch.tensor([10, 3, 7, 10])[:, None]
    masked_g = torch.where(mask[..., None], g.view(4, 10, N), 0.0)
    for reentrant in (False, True):
        for m, grad in ((None, g.view(4, 10, N)), (mask, masked_g)):
            want = gemms(layer, x.view(4, 10, K), grad, m)
            wrapped = copy.copy(layer)
            wrapped.forward = lambda t, r=reentrant: checkpoint(layer.forward, t, use_reentrant=r)
            ours = gemms(wrapped, x.view(4, 10, K), grad, m)
            assert all(torch.equal(a, b) for a, b in zip(ours, want, strict=True))


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated")
def test_checkpointing_a_whole_model():
    from fp8lab.conversion import convert
    from fp8lab.precision import PrecisionPlan

    ids, grads = references.tokens(), []
    for use in (False, True):
        model = references.tiny_llama().train()
        convert(model, PrecisionPlan.preset("fp8-e2e"), side="trainer")
        if use:
            model.gradient_checkpointing_enable()
        with real_tokens(torch.ones_like(ids, dtype=torch.bool)):
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        grads.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


# ---- the weight cache -------------------------------------------------------------------------------


def test_only_refresh_requantizes():
    x, w, g, _ = data(m=10)
    layer = layer_of(w, LinearPrecision())
    stale = layer(x).detach()
    with torch.no_grad():
        layer.weight.mul_(3).add_(0.01)
    assert torch.equal(layer(x), stale)  # stale until told
    refresh(nn.Sequential(layer))
    fresh = layer(x).detach()
    assert not torch.equal(fresh, stale)
    assert torch.equal(fresh, layer_of(layer.weight.detach(), LinearPrecision())(x))
    with torch.no_grad():
        layer.weight.copy_(w)
    layer.refresh()
    assert torch.equal(layer(x), stale)


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "load_state_dict", "to", "double"])
def test_copies_loads_and_moves_drop_the_cache(how):
    x, w, _, bias = data(m=10)
    layer = layer_of(w, LinearPrecision(), bias)
    layer(x)
    assert layer._cache is not None
    with torch.no_grad():
        layer.weight.mul_(2)  # the cache is now stale, and a copy must not inherit it
    want = layer_of(w * 2, LinearPrecision(), bias)(x)
    if how in ("deepcopy", "pickle"):
        new = copy.deepcopy(layer) if how == "deepcopy" else pickle.loads(pickle.dumps(layer))
        assert new.weight is not layer.weight and layer._cache is not None
        assert new.precision == layer.precision and new.kernels == layer.kernels
    elif how == "load_state_dict":
        new = layer
        new.load_state_dict({"weight": w * 2, "bias": bias})
    else:
        new = nn.Sequential(layer).to(torch.device("cpu"))[0] if how == "to" else layer.double().float()
    assert new._cache is None
    assert torch.equal(new(x), want)
    small = len(pickle.dumps(layer))
    assert small < 4 * (w.numel() + N) + 4000  # no second copy of the weight


def test_state_dict_parameters_and_repr():
    _, w, _, bias = data()
    linear = nn.Linear(K, N).eval()
    layer = Float8Linear.from_linear(linear, LinearPrecision(), kernels="other")
    assert isinstance(layer, nn.Linear) and not layer.training
    assert list(layer.state_dict()) == list(linear.state_dict()) == ["weight", "bias"]
    assert layer.weight is linear.weight and layer.bias is linear.bias
    assert repr(layer) == (
        "Float8Linear(in_features=200, out_features=140, bias=True, e4m3[128x128] x e4m3[1x128], backend=emulated, "
        "kernels=other)"
    )
    assert [name for name, _ in float8_layers(nn.ModuleDict({"a": layer, "b": linear}))] == ["a"]


def test_meta_device():
    with torch.device("meta"):
        linear = nn.Linear(K, N)
    layer = Float8Linear.from_linear(linear, LinearPrecision())
    layer.refresh()
    assert layer._cache is None


# ---- beside other tools: autocast, torch.compile, peft ------------------------------------------------


class MatmulDtypes(TorchDispatchMode):
    """Collects the dtypes of everything that is matrix-multiplied."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm):
            self.seen |= {t.dtype for t in args if isinstance(t, torch.Tensor)}
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kernels", ["default", "other"])
@pytest.mark.parametrize("precision", [LinearPrecision(), BF16_LINEAR, BF16_HEAD], ids=["fp8", "bf16", "head"])
def test_autocast_changes_nothing_and_multiplies_no_bf16(precision, kernels):
    x, w, g, bias = data(m=40)
    layer = layer_of(w, precision, bias, kernels=kernels)
    want = gemms(layer, x, g)
    with torch.autocast("cpu", dtype=torch.bfloat16), MatmulDtypes() as matmuls:
        ours = gemms(layer, x, g)
        assert torch.nn.functional.linear(x, w).dtype == torch.bfloat16  # autocast is on, and the watcher sees it
    assert matmuls.seen == {torch.float32, torch.bfloat16}
    assert all(torch.equal(a, b) and a.dtype == torch.float32 for a, b in zip(ours, want, strict=True))
    with torch.autocast("cpu", dtype=torch.bfloat16), MatmulDtypes() as matmuls:
        y = layer(x.requires_grad_())
    with matmuls:
        y.backward(g)  # outside, where PyTorch's documentation puts it
    assert matmuls.seen == {torch.float32}
    assert torch.equal(y, want[0]) and torch.equal(x.grad, want[1])


def test_bf16_input_is_read_as_float32():
    """What a layer gets from an autocast neighbour; its gradient goes back in BF16."""
    x, w, g, bias = data(m=40)
    layer, narrow = layer_of(w, LinearPrecision(), bias), x.bfloat16()
    want, ours = gemms(layer, narrow.float(), g), gemms(layer, narrow, g)
    assert [t.dtype for t in ours] == [torch.float32, torch.bfloat16, torch.float32, torch.float32]
    assert all(torch.equal(a.float(), b) for a, b in zip(ours, want, strict=True))


def converted_llama(**sizes):
    from fp8lab.conversion import convert
    from fp8lab.precision import PrecisionPlan

    model = references.tiny_llama(**sizes).train()
    convert(model, PrecisionPlan.preset("fp8-e2e"), side="trainer")
    return model


def logits_and_gradients(model, call):
    ids = references.tokens()
    model.zero_grad(set_to_none=True)
    result = call(input_ids=ids, labels=ids, use_cache=False)
    result.loss.backward()
    return result.logits.detach(), [p.grad for p in model.parameters()]


def test_autocast_of_a_whole_model():
    """Attention and RoPE follow autocast, the planned linears do not: close to float32, and trainable."""
    model = converted_llama()
    plain, gradients = logits_and_gradients(model, model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed, mixed_gradients = logits_and_gradients(model, model)
    assert mixed.dtype == torch.float32 and (mixed - plain).norm() < 0.05 * plain.norm()
    for ours, want in zip(mixed_gradients, gradients, strict=True):
        assert ours.dtype == torch.float32 and (ours - want).norm() <= 0.1 * want.norm()


def test_arguments_may_be_named():
    layer = Float8Linear.from_linear(torch.nn.Linear(128, 64), LinearPrecision())
    x = torch.randn(4, 128)
    assert torch.equal(layer(x=x), layer(x))


def test_compile_equals_eager():
    """Each linear is a graph break; around them aot_eager runs the same kernels. A refresh needs no new compilation."""
    torch._dynamo.reset()
    model = converted_llama()
    compiled = torch.compile(model, backend="aot_eager")
    for step in range(2):
        logits, gradients = logits_and_gradients(model, model)
        ours, our_gradients = logits_and_gradients(model, compiled)
        assert torch.equal(ours, logits)
        for a, b in zip(our_gradients, gradients, strict=True):
            assert (
                a - b
            ).norm() <= 1e-3 * b.norm()  # 7e-8 where measured: sums of gradients are taken in another order
        if step == 0:
            graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
            with torch.no_grad():
                model.model.layers[0].mlp.down_proj.weight.mul_(2)
            refresh(model)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs > 0
    torch._dynamo.reset()


@pytest.mark.slow
def test_inductor_is_close_to_eager():
    if not (shutil.which("g++") or shutil.which("clang++")):
        pytest.skip("no C++ compiler, which torch.compile's default backend needs on a CPU")
    torch._dynamo.reset()
    model = converted_llama(num_hidden_layers=1)
    with torch.no_grad():
        want = model(input_ids=references.tokens(), use_cache=False).logits
        ours = torch.compile(model)(input_ids=references.tokens(), use_cache=False).logits
    assert (ours - want).norm() < 1e-2 * want.norm()  # fused norms may round otherwise, which flips an FP8 code or two
    torch._dynamo.reset()


@pytest.fixture
def lora():
    """(an FP8 tiny Llama with adapters after five steps of SGD, its logits before, its base weights before, losses)."""
    peft = pytest.importorskip("peft")
    model = converted_llama()
    before = model(input_ids=references.tokens(), use_cache=False).logits.detach()
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"]))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    losses = []
    for _ in range(5):
        result = model(input_ids=references.tokens(), labels=references.tokens(), use_cache=False)
        if not losses:
            assert torch.equal(result.logits, before)  # lora_B starts at zero
        result.loss.backward()
        losses.append(result.loss.item())
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return model, before, weights, losses


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated")
class TestLora:
    def test_adapters_train_on_a_frozen_fp8_base(self, lora):
        model, _, weights, losses = lora
        attention = model.base_model.model.model.layers[0].self_attn
        assert isinstance(attention.q_proj.base_layer, Float8Linear) and isinstance(attention.k_proj, Float8Linear)
        assert len(list(float8_layers(model))) == 2 * 7 + 1
        assert losses[-1] < losses[0] - 0.1
        trained = [name for name, p in model.named_parameters() if p.grad is not None]
        assert len(trained) == 2 * 2 * 2 and all("lora_" in name for name in trained)
        for name, p in model.named_parameters():
            if "lora_" not in name:
                plain = name.removeprefix("base_model.model.").replace(".base_layer", "")
                assert not p.requires_grad and torch.equal(p, weights[plain])

    @pytest.mark.parametrize("safe_merge", [False, True])
    def test_a_merge_needs_a_refresh(self, lora, safe_merge):
        """peft writes to weight.data, which nothing can see: until `refresh` the model is the one without adapters."""
        model, before, weights, _ = lora
        ids = references.tokens()
        adapted = model(input_ids=ids, use_cache=False).logits.detach()
        merged = model.merge_and_unload(safe_merge=safe_merge)
        query = merged.model.layers[0].self_attn.q_proj
        assert type(query) is Float8Linear and list(merged.state_dict()) == list(converted_llama().state_dict())
        assert not torch.equal(query.weight, weights["model.layers.0.self_attn.q_proj.weight"])
        assert torch.equal(merged(input_ids=ids, use_cache=False).logits, before)  # the trap
        refresh(merged)
        logits = merged(input_ids=ids, use_cache=False).logits.detach()
        # close, not equal: base + adapter is now one weight, rounded to FP8 as a whole
        assert (logits - adapted).norm() < 0.1 * adapted.norm() < 0.2 * (adapted - before).norm()
        assert torch.equal(query.quantized.values, layer_of(query.weight.detach(), LinearPrecision()).quantized.values)


def test_layers_that_share_an_operand_round_it_once(monkeypatch):
    """As one after the other, bit for bit, gradients too; another operand, or a changed one, is rounded anew."""
    torch.manual_seed(0)
    plain = [nn.Linear(128, n, bias=False) for n in (64, 96)]
    x = torch.randn(200, 128)
    mask = torch.rand(200) < 0.7
    calls = []
    monkeypatch.setattr(linear, "round_operand", lambda *a, f=linear.round_operand: calls.append(1) or f(*a))

    def run(shared):
        layers, found = [Float8Linear.from_linear(copy.deepcopy(layer), LinearPrecision()) for layer in plain], []
        calls.clear()
        with linear.real_tokens(mask):
            for value in (x.clone().requires_grad_(), (2 * x).requires_grad_()):
                outputs = []
                for layer in layers:
                    if not shared:
                        linear._shared.last.clear()
                    outputs.append(layer(value))
                for output in outputs:
                    if not shared:
                        linear._shared.last.clear()
                    (output.square().sum(1) * mask).sum().backward()
                found += [*outputs, value.grad]
        return [*found, *(layer.weight.grad for layer in layers)], len(calls)

    (one, fewer), (other, more) = run(True), run(False)
    assert all(map(torch.equal, one, other))
    assert (fewer, more) == (12, 16)  # per value and layer x and x^T (shared: per value), g and g^T
    layer, changing = Float8Linear.from_linear(plain[0], LinearPrecision()), x.clone()
    with linear.real_tokens(mask), torch.no_grad():
        before = layer(changing)
        changing.mul_(-1)
        assert torch.equal(layer(changing), -before)
