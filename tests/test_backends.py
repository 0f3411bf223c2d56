"""Backends: what each can run and why not, and the operands of `scaled_mm` against torch's own checks.

No GPU is needed, and nothing here shows that one works. `scaled_mm` is replaced by a function that first hands the very
arguments' shapes, strides and dtypes to torch's meta kernel, which has the CUDA kernel's checks, and then multiplies
what the documented layouts say the operands are, decoded by ml_dtypes, in float64.
"""

import dataclasses
import os
import pickle
import re
import subprocess
import sys
import types
from contextlib import contextmanager

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fp8lab import backends, scaled_mm, te_linear
from fp8lab.conversion import convert, restore
from fp8lab.linear import Float8Linear, real_tokens
from fp8lab.operands import BF16_HEAD, BF16_LINEAR, LinearPrecision
from fp8lab.precision import PrecisionPlan
from fp8lab.quantizers import SCALE_RULES, BlockQuantizer
from fp8lab.scaled_mm import ScaledMMLinear, token_operand, weight_operand
from fp8lab.te_linear import TransformerEngineLinear

from . import references

REAL_SCALED_MM, REAL_MM = F.scaled_mm, torch.mm
WIDE = LinearPrecision(output="float32")


pytestmark = pytest.mark.usefixtures("one_thread")


def meta(t):
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")


def scales_of(scale, recipe, rows, length):
    """One scale per element (rows, length), read out of a tensor laid out for `recipe`."""
    i, k = np.arange(rows)[:, None], np.arange(length)[None, :] // 128
    scale = scale.numpy().astype(np.float64)
    return scale[i, k] if recipe == F.ScalingType.BlockWise1x128 else scale[k, i // 128]


def documented_scaled_mm(a, b, scale_a, recipe_a, scale_b, recipe_b, *, output_dtype):
    """torch's checks for a CUDA device, then the product by the layouts' documentation."""
    checked = REAL_SCALED_MM(
        meta(a), meta(b), meta(scale_a), recipe_a, meta(scale_b), recipe_b, output_dtype=output_dtype
    )
    sides = []
    for t, scale, recipe in ((a, scale_a, recipe_a), (b.t(), scale_b, recipe_b)):
        codes = t.view(torch.uint8).numpy()
        sides.append(references.decode(codes, "e4m3").astype(np.float64) * scales_of(scale, recipe, *codes.shape))
    out = torch.from_numpy(sides[0] @ sides[1].T).float().to(output_dtype)
    assert out.shape == checked.shape and out.dtype == checked.dtype
    CALLS.append((recipe_a.name, recipe_b.name, output_dtype))
    return out


def documented_mm(a, b, *, out_dtype):
    assert a.dtype == b.dtype == torch.bfloat16
    assert REAL_MM(meta(a), meta(b), out_dtype=out_dtype).dtype == out_dtype
    return REAL_MM(a.float(), b.float()).to(out_dtype)


CALLS = []


@pytest.fixture
def hardware(monkeypatch):
    """scaled_mm and mm(out_dtype=) as documented, on the CPU."""
    CALLS.clear()
    monkeypatch.setattr(F, "scaled_mm", documented_scaled_mm)
    monkeypatch.setattr(torch, "mm", documented_mm)


def pair(precision, n=256, k=384, bias=False, seed=0):
    """The same layer on scaled_mm and emulated; no two blocks of its weight have the same scale."""
    torch.manual_seed(seed)
    linear = nn.Linear(k, n, bias=bias)
    with torch.no_grad():
        linear.weight.copy_(torch.randn(n, k) * torch.randn(n, 1).exp() * torch.randn(k).exp() * 0.02)
    return ScaledMMLinear.from_linear(linear, precision), Float8Linear.from_linear(linear, precision)


def gemms(layer, x, g, mask=None):
    layer.zero_grad(set_to_none=True)
    x = x.clone().requires_grad_()
    with real_tokens(mask) if mask is not None else torch.enable_grad():
        y = layer(x)
        y.backward(g)
    return [y.detach(), x.grad, layer.weight.grad] + ([] if layer.bias is None else [layer.bias.grad])


# ---- scaled_mm ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["default", "pow2", "transformer_engine"])
@pytest.mark.parametrize(("tokens", "n", "k"), [(150, 256, 384), (1, 128, 128), (128, 640, 512), (300, 128, 1152)])
def test_the_three_gemms_take_what_torch_checks_and_equal_the_emulation(hardware, tokens, n, k, rule):
    ours, emulated = pair(dataclasses.replace(WIDE, rule=rule), n, k)
    r = torch.Generator().manual_seed(1)
    x, g = torch.randn(tokens, k, generator=r) * 3, torch.randn(tokens, n, generator=r) * 1e-3
    x[:, 0] *= 40
    found, want = gemms(ours, x, g), gemms(emulated, x, g)
    for a, b in zip(found, want, strict=True):
        assert a.dtype == torch.float32 and a.shape == b.shape
        assert (a - b).abs().max() <= 2e-6 * b.abs().max()
    one, square = "BlockWise1x128", "BlockWise128x128"
    assert CALLS == [(one, square, torch.float32), (one, square, torch.float32), (one, one, torch.float32)]
    assert ours.quantized.packed.same_bytes(emulated.quantized.packed)


def test_bf16_output_bias_padding_and_leading_shapes(hardware):
    ours, emulated = pair(LinearPrecision(), bias=True)
    r = torch.Generator().manual_seed(2)
    x, g = torch.randn(2, 70, 384, generator=r), torch.randn(2, 70, 256, generator=r)
    mask = torch.arange(70) < torch.tensor([70, 41])[:, None]
    g = torch.where(mask[..., None], g, 0.0)
    found, want = gemms(ours, x, g, mask), gemms(emulated, x, g, mask)
    for a, b in zip(found[:2], want[:2], strict=True):
        assert torch.equal(a, a.bfloat16().float())
        assert (a - b).abs().max() <= 2**-7 * b.abs().max() and (a != b).float().mean() < 0.01  # a last bit, rarely
    assert (found[2] - want[2]).abs().max() <= 2e-6 * want[2].abs().max()
    assert torch.equal(found[3], want[3])
    assert [dtype for *_, dtype in CALLS[:2]] == [torch.float32, torch.bfloat16]  # a bias is added before rounding
    none = gemms(ours, x, g, mask & False)[2]
    assert torch.equal(none, torch.zeros_like(none))
    assert ours(torch.zeros(0, 384)).shape == (0, 256)


@pytest.mark.parametrize("precision", [BF16_LINEAR, BF16_HEAD], ids=["bf16", "head"])
def test_bf16_layers_multiply_in_bf16(hardware, precision):
    ours, emulated = pair(precision, n=50, k=72)  # any shape
    x, g = torch.randn(9, 72), torch.randn(9, 50)
    for a, b in zip(gemms(ours, x, g), gemms(emulated, x, g), strict=True):
        assert (a - b).abs().max() <= 2**-7 * b.abs().max()
    assert not CALLS


def test_torchs_checks_notice_a_wrong_layout(hardware):
    """The checks can fail: scales as the quantizer returns them are refused, and so is a row-major second operand."""
    x, w = torch.randn(256, 640), torch.randn(384, 640)
    a, b = token_operand(x, "e4m3", WIDE), weight_operand(BlockQuantizer((128, 128)).quantize(w))
    call = dict(output_dtype=torch.float32)
    F.scaled_mm(a.codes, b.codes.t(), a.scale, a.recipe, b.scale, b.recipe, **call)
    plain_a, plain_b = BlockQuantizer().quantize(x).scale, BlockQuantizer((128, 128)).quantize(w).scale
    for scale_a, scale_b in ((plain_a, b.scale), (a.scale, plain_b), (a.scale, plain_b.t())):
        with pytest.raises((RuntimeError, TypeError), match="blockwise scaling|must have shape"):
            F.scaled_mm(a.codes, b.codes.t(), scale_a, a.recipe, scale_b, b.recipe, **call)
    with pytest.raises(RuntimeError, match="col_major"):
        F.scaled_mm(a.codes, b.codes.t().contiguous(), a.scale, a.recipe, b.scale, b.recipe, **call)


def test_a_wrong_scale_would_show(hardware, monkeypatch):
    ours, emulated = pair(WIDE)
    x, g = torch.randn(130, 384), torch.randn(130, 256)
    want = gemms(emulated, x, g)
    turned = weight_operand(ours.quantized.packed.transpose())
    swapped = turned._replace(scale=turned.scale.flip(1))
    monkeypatch.setattr(ours, "_cache", ours.quantized._replace(turned=swapped))
    found = gemms(ours, x, g)
    assert (found[0] - want[0]).abs().max() <= 2e-6 * want[0].abs().max()
    assert (found[1] - want[1]).abs().max() > 1e-3 * want[1].abs().max()


@pytest.mark.parametrize(
    ("changes", "shape", "message"),
    [
        ({"gradient": "e5m2"}, (128, 128), "e4m3, e5m2; allowed: all e4m3, or all bf16"),
        ({"activation": "bf16"}, (128, 128), "bf16, e4m3; allowed"),
        ({"weight_block": (64, 64)}, (128, 128), "blocks are 64x64 and 1x128; allowed"),
        ({"group": 32}, (128, 128), "128x128 and 1x32; allowed"),
        ({}, (128, 130), "its weight is 128 x 130; both must be multiples of 128"),
        ({}, (48, 128), "48 x 128"),
    ],
)
def test_what_scaled_mm_refuses(changes, shape, message):
    assert message in scaled_mm.refusal(dataclasses.replace(LinearPrecision(), **changes), *shape)
    assert scaled_mm.refusal(LinearPrecision(), 256, 128) is scaled_mm.refusal(BF16_HEAD, 61, 48) is None


class Divisors(TorchDispatchMode):
    """Collects the divisors that are Python numbers."""

    def __init__(self):
        super().__init__()
        self.numbers, self.divisions = [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket is torch.ops.aten.div:
            self.divisions += 1
            if not isinstance(args[1], torch.Tensor) or (args[1].ndim == 0 and args[0].ndim > 0):
                self.numbers.append(args[1])
        assert func.overloadpacket not in (torch.ops.aten.ldexp, torch.ops.aten.pow), func  # a GPU's pow may be inexact
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("rule", sorted(SCALE_RULES))
def test_the_reference_divides_as_ieee_on_a_gpu_too(rule):
    """torch on CUDA turns x / number into x * (1 / number), which has another last bit: no rule may do that."""
    with Divisors() as seen:
        BlockQuantizer((1, 128), rule=rule).reference(torch.randn(3, 256))
        BlockQuantizer((128, 128), rule=rule).reference(torch.randn(130, 256))
    assert seen.divisions > 0 and not seen.numbers


# ---- choosing -----------------------------------------------------------------------------------------

SIZES = dict(hidden_size=128, intermediate_size=256, num_attention_heads=2, num_key_value_heads=2)
E2E = PrecisionPlan.preset("fp8-e2e")


@pytest.fixture
def hopper(monkeypatch, hardware):
    """A machine that says it has a Hopper GPU, while weights stay on the CPU."""
    monkeypatch.setattr(backends, "_hopper", lambda: None)
    monkeypatch.setattr(
        backends.ScaledMM,
        "refusal",
        lambda self, precision, linear, side: scaled_mm.refusal(precision, *linear.weight.shape),
    )


def test_support_says_why_not():
    found = backends.support()
    assert list(found) == ["emulated", "scaled_mm", "transformer_engine", "vllm"]
    assert found["emulated"][0]
    if not torch.cuda.is_available():
        assert found["scaled_mm"] == (False, "no CUDA GPU (needs compute capability 9.0, CUDA >= 12.9)")
        assert not found["transformer_engine"][0] and te_linear.INSTALL in found["transformer_engine"][1]
    assert all(backend.does for backend in backends.BACKENDS.values())


@pytest.mark.parametrize(
    ("capability", "cuda", "message"),
    [
        ((8, 9), "13.0", "8.9 .needs 9.0"),
        ((10, 0), "13.0", "10.0 .needs 9.0"),
        ((9, 0), "12.8", "12.8"),
    ],
)
def test_other_gpus_are_refused(monkeypatch, capability, cuda, message):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(torch.version, "cuda", cuda)
    model = references.tiny_llama(**SIZES)
    with pytest.raises(RuntimeError, match=f"scaled_mm cannot run here: .*{message}.*; use backend='emulated'"):
        convert(model, E2E, side="trainer", backend="scaled_mm")
    assert not any(isinstance(m, Float8Linear) for m in model.modules())


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA GPU is present")
def test_auto_reports_and_a_named_backend_raises():
    model = references.tiny_llama(**SIZES)
    result = convert(model, E2E, side="trainer")
    assert result.backend == "emulated" and "scaled_mm cannot run here: no CUDA GPU" in result.backend_reason
    restore(model)
    for name, why in (("scaled_mm", "no CUDA GPU"), ("transformer_engine", "to install it: pip install torch")):
        with pytest.raises(RuntimeError, match=f"{name} cannot run here: .*{why}.*use backend='emulated'"):
            convert(model, E2E, side="trainer", backend=name)
    with pytest.raises(ValueError, match="engine of its own: use fp8lab.rollout.VLLMEngine"):
        convert(model, E2E, side="rollout", backend="vllm")
    with pytest.raises(ValueError, match="'cuda'; allowed: auto, emulated, scaled_mm, transformer_engine"):
        convert(model, E2E, side="rollout", backend="cuda")
    assert not any(isinstance(m, Float8Linear) for m in model.modules())
    assert convert(model, E2E, side="trainer", backend="emulated").backend_reason.startswith("rounds operands")


def test_a_whole_model_on_scaled_mm(hopper):
    model, ids = references.tiny_llama(**SIZES), references.tokens(shape=(2, 7))
    grads = {}
    for backend in ("emulated", "auto"):
        result = convert(model, E2E, side="trainer", backend=backend)
        model.zero_grad(set_to_none=True)
        with real_tokens(torch.ones_like(ids, dtype=torch.bool)):
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        grads[result.backend] = [p.grad for p in model.parameters()]
    assert set(grads) == {"emulated", "scaled_mm"} and repr(result).startswith("Conversion(trainer, scaled_mm: ")
    assert "backend=scaled_mm" in repr(model.model.layers[0].mlp.up_proj)
    assert len(CALLS) == 3 * 14  # two layers of seven FP8 linears, three GEMMs each
    for a, b in zip(*grads.values(), strict=True):
        assert (a - b).norm() < 0.02 * b.norm()  # BF16 outputs that differ in a last bit flip a few codes


def test_auto_falls_back_and_a_named_backend_names_the_layer(hopper):
    model = references.tiny_llama(**{**SIZES, "intermediate_size": 200})
    result = convert(model, E2E, side="rollout")
    assert result.backend == "emulated"
    assert result.backend_reason == (
        "scaled_mm cannot run model.layers.0.mlp.gate_proj (and 5 more layers): its weight is 200 x 128; "
        "both must be multiples of 128"
    )
    with pytest.raises(ValueError, match="gate_proj .and 5 more layers.: its weight is 200 x 128.*backend='emulated'"):
        convert(model, E2E, side="rollout", backend="scaled_mm")
    with pytest.raises(ValueError, match="kernels='other' is a setting of the emulated backend"):
        convert(references.tiny_llama(**SIZES), E2E, side="rollout", backend="scaled_mm", kernels="other")
    assert convert(references.tiny_llama(**SIZES), E2E, side="rollout", kernels="other").backend == "emulated"


# ---- Transformer Engine ---------------------------------------------------------------------------------


@pytest.fixture
def environment(monkeypatch):
    for name in (te_linear.FP32_SCALES, te_linear.BACKWARD_OVERRIDE):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.delitem(sys.modules, "transformer_engine.common.recipe", raising=False)
    return monkeypatch


@pytest.mark.parametrize(("rule", "value"), [("default", "1"), ("transformer_engine", "1"), ("pow2", "0")])
def test_scale_setting_follows_the_plan(environment, rule, value):
    te_linear.settle_environment(rule)
    assert os.environ[te_linear.FP32_SCALES] == value
    te_linear.settle_environment(rule)


@pytest.mark.parametrize(("rule", "value"), [("default", "0"), ("pow2", "1"), ("transformer_engine+pow2", "1")])
def test_a_contradicting_scale_setting_is_refused(environment, rule, value):
    environment.setenv(te_linear.FP32_SCALES, value)
    with pytest.raises(ValueError, match=f"SCALES={value} gives .*plan's rule .{re.escape(rule)}. means"):
        te_linear.settle_environment(rule)
    assert os.environ[te_linear.FP32_SCALES] == value


def test_a_backward_override_is_refused(environment):
    environment.setenv(te_linear.BACKWARD_OVERRIDE, "high_precision")
    with pytest.raises(ValueError, match="NVTE_BACKWARD_OVERRIDE=high_precision takes .*unset it"):
        te_linear.settle_environment("default")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"activation": "e5m2"}, "activation e5m2"),
        ({"gradient": "bf16"}, "gradient bf16"),
        ({"rule": "vllm"}, "scale rule is 'vllm'; allowed: default, pow2, transformer_engine"),
        ({"group": 32}, "1x32"),
    ],
)
def test_what_transformer_engine_refuses(changes, message):
    assert message in te_linear.refusal(dataclasses.replace(LinearPrecision(), **changes), 128, 128)
    assert te_linear.refusal(dataclasses.replace(LinearPrecision(), gradient="e5m2"), 256, 128) is None
    assert "both must be multiples of 128" in te_linear.refusal(LinearPrecision(), 256, 100)
    te, linear = backends.BACKENDS["transformer_engine"], nn.Linear(128, 128)
    assert "trainer side only" in te.refusal(LinearPrecision(), linear, "rollout")
    assert "move the model to the GPU" in te.refusal(LinearPrecision(), linear, "trainer")


RECIPE = """
import dataclasses, os, sys
from fp8lab.operands import LinearPrecision
from fp8lab.te_linear import block_scaling, settle_environment

rule = sys.argv[1]
settle_environment(rule)
plain = LinearPrecision(rule=rule)
recipe = block_scaling(plain)
assert recipe.float8_block_scaling() and recipe.fp8_format.name == "E4M3"
assert block_scaling(dataclasses.replace(plain, gradient="e5m2")).fp8_format.name == "HYBRID"
for q in (recipe.fp8_quant_fwd_inp, recipe.fp8_quant_fwd_weight, recipe.fp8_quant_bwd_grad):
    assert q.power_2_scale == (rule == "pow2") and q.amax_epsilon == 0
assert (recipe.x_block_scaling_dim, recipe.w_block_scaling_dim, recipe.grad_block_scaling_dim) == (1, 2, 1)
other = "default" if rule == "pow2" else "pow2"
del os.environ["NVTE_FP8_BLOCK_SCALING_FP32_SCALES"]
try:
    settle_environment(other)
except ValueError as error:
    assert "start a new process" in str(error), error
    print("settled")
"""


def test_transformer_engines_own_recipe_class():
    """Its dataclasses only: NVTE_PROJECT_BUILDING=1, a build flag, lets them import without a GPU library.

    The package must not lie in the environment itself: without its GPU part it makes `import peft` fail.
    """
    folder = os.environ.get("FP8LAB_REFERENCES")
    if not folder:
        pytest.skip(
            "transformer-engine==2.20.2 is not at hand: `make test` puts it there on Linux, or set FP8LAB_REFERENCES"
        )
    env = {**os.environ, "NVTE_PROJECT_BUILDING": "1", "PYTHONPATH": folder}
    env.pop(te_linear.FP32_SCALES, None)
    done = subprocess.run([sys.executable, "-c", RECIPE, "default"], env=env, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.strip() == "settled", done.stderr


def test_our_side_of_the_calls_into_transformer_engine(environment):
    """A stand-in for te.pytorch, so only our side is tested: what it is given, and where gradients and keys go."""
    seen = {"recipes": [], "weights": []}

    class Linear(nn.Linear):
        def __init__(self, k, n, *, bias, params_dtype, device):
            super().__init__(k, n, bias=bias, dtype=params_dtype, device=device)

        def forward(self, x):
            seen["weights"].append(self.weight)
            assert len(x) % 128 == 0 and torch.get_autocast_dtype("cpu") == torch.bfloat16
            return super().forward(x)

    @contextmanager
    def autocast(*, enabled, recipe):
        seen["recipes"].append((enabled, recipe))
        yield

    module = types.SimpleNamespace(Linear=Linear, autocast=autocast)
    environment.setitem(sys.modules, "transformer_engine", types.SimpleNamespace(pytorch=module))
    environment.setitem(sys.modules, "transformer_engine.pytorch", module)
    environment.setattr(te_linear, "block_scaling", lambda precision: f"recipe for {precision}")
    linear = nn.Linear(256, 128)
    layer = TransformerEngineLinear.from_linear(linear, LinearPrecision())
    assert list(layer.state_dict()) == ["weight", "bias"] and layer.weight is linear.weight
    x, g = torch.randn(3, 5, 256, requires_grad=True), torch.randn(3, 5, 128)
    y = layer(x)
    y.backward(g)
    source = linear.weight.detach().bfloat16().float()
    assert torch.equal(seen["weights"][0], source)  # weight_source = bf16
    assert y.dtype == torch.float32 and (y - F.linear(x, source, linear.bias)).abs().max() < 0.05
    assert layer.weight.grad.shape == (128, 256) and layer.bias.grad is not None and x.grad.shape == x.shape
    want = g.view(15, 128).t() @ x.detach().view(15, 256)
    assert (layer.weight.grad - want).norm() < 0.01 * want.norm()
    assert seen["recipes"] == [(True, f"recipe for {layer.precision}")]
    assert "backend=transformer_engine" in repr(layer)
    assert len(list(layer.modules())) == 1 and pickle.loads(pickle.dumps(layer))._cache is None
    emulated = Float8Linear.from_linear(linear, LinearPrecision())
    assert layer.quantized.packed.same_bytes(emulated.quantized.packed)
