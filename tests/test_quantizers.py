"""Block quantization against the NumPy reference and compressed-tensors: codes and scales, bit for bit."""

import threading

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fp8lab import kernels
from fp8lab.formats import get_format
from fp8lab.quantizers import SCALE_RULES, WHOLE, BlockQuantizer, ScaleRule, quantization_error

from . import references

BLOCKS = [(1, 128), (128, 128), (1, WHOLE), (WHOLE, WHOLE), (WHOLE, 32), (3, 5), (128, 1)]


def check(x, block=(1, 128), fmt="e4m3", rule="default"):
    """quantize, fake_quantize and the torch reference of x against NumPy, bit for bit; returns the quantized tensor."""
    quantizer = BlockQuantizer(block, fmt, rule)
    codes, scale, values = references.quantize(x.detach().float().numpy(), block, fmt, rule == "pow2")
    if x.ndim < 2 and block[0] == 1:
        scale = scale.reshape(-1)
    both, both_values = quantizer.quantize_both(x)
    reference, reference_values = quantizer.reference(x)
    for t in (quantizer.quantize(x), both, reference):
        assert t.codes.dtype == torch.uint8 and t.codes.shape == t.shape == x.shape
        assert t.scale.dtype == torch.float32 and t.scale.shape == scale.shape
        assert np.array_equal(t.scale.numpy(), scale)
        assert np.array_equal(t.codes.numpy(), codes)
        assert t.nonfinite == int((~x.float().isfinite()).sum())
    for v in (quantizer.fake_quantize(x), both_values, reference_values, both.dequantize()):
        assert v.dtype == torch.float32 and v.shape == x.shape
        assert np.array_equal(v.numpy(), values, equal_nan=True)
        real = ~np.isnan(values)
        assert np.array_equal(np.signbit(v.numpy())[real], np.signbit(values)[real])
    return both


def sample(kind, shape, seed=0):
    """Random, zero, denormal, huge... float32 data."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=g)
    if kind == "bf16":
        return x.bfloat16().float()
    if kind == "lognormal":
        return x.mul(6).exp() * torch.randn(shape, generator=g).sign()
    if kind == "nonfinite":
        bad = torch.rand(shape, generator=g)
        x = torch.where(bad < 0.01, float("nan"), x)
        return torch.where(bad > 0.99, float("inf") * x.sign(), x)
    if kind == "zero blocks":
        return torch.where(torch.arange(shape[-1]) % 256 < 128, 0.0, x)
    return x * {"random": 1.0, "zero": 0.0, "small": 1e-30, "denormal": 1e-41, "tiny": 2e-45, "huge": 7e37}[kind]


pytestmark = pytest.mark.usefixtures("one_thread")


KINDS = ["random", "bf16", "lognormal", "nonfinite", "zero blocks", "zero", "small", "denormal", "tiny", "huge"]

# ---- codes and scales -----------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["default", "pow2"])
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
@pytest.mark.parametrize("kind", KINDS)
def test_codes_and_scales_equal_the_numpy_reference(kind, fmt, rule):
    for block in BLOCKS[:4]:
        check(sample(kind, (150, 300)), block, fmt, rule)


@settings(max_examples=60)
@given(
    shape=st.lists(st.integers(0, 9), max_size=4),
    block=st.sampled_from(BLOCKS) | st.tuples(st.integers(1, 4), st.integers(1, 4)),
    kind=st.sampled_from(KINDS[:4] + KINDS[5:]),
    fmt=st.sampled_from(["e4m3", "e5m2"]),
    rule=st.sampled_from(["default", "pow2"]),
    seed=st.integers(0, 99),
)
@example(shape=[], block=(1, 128), kind="random", fmt="e4m3", rule="default", seed=0)
@example(shape=[3, 4, 7], block=(3, 5), kind="random", fmt="e4m3", rule="default", seed=0)
@example(shape=[7], block=(1, 3), kind="random", fmt="e4m3", rule="default", seed=0)
@example(shape=[0, 5], block=(128, 128), kind="random", fmt="e4m3", rule="default", seed=0)
@example(shape=[2, 3, 0], block=(1, WHOLE), kind="random", fmt="e4m3", rule="pow2", seed=0)
def test_any_shape(shape, block, kind, fmt, rule, seed):
    x = sample(kind, shape, seed)
    if x.numel():
        check(x, block, fmt, rule)
    else:
        quantizer = BlockQuantizer(block, fmt, rule)
        t = quantizer.quantize(x)
        assert t.dequantize().shape == quantizer.fake_quantize(x).shape == t.shape == x.shape and t.nonfinite == 0


@settings(max_examples=60)
@given(
    bits=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=12),
    fmt=st.sampled_from(["e4m3", "e5m2"]),
    rule=st.sampled_from(["default", "pow2"]),
)
@example(bits=[0x7F7FFFFF, 0xFF7FFFFF, 1, 0x80000001, 0x80000000], fmt="e4m3", rule="default")
def test_any_bit_pattern_and_no_finite_input_gives_nan(bits, fmt, rule):
    x = torch.from_numpy(np.array(bits, np.uint32).view(np.float32))
    values = check(x, (1, 4), fmt, rule).dequantize()
    assert torch.equal(values.isnan(), ~x.isfinite())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes_are_read_as_float32(dtype):
    x = (torch.randn(40, 200, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)
    for block in BLOCKS[:2]:
        t = check(x, block)
        assert t.same_bytes(BlockQuantizer(block).quantize(x.float()))
        assert t.dequantize(torch.bfloat16).dtype == torch.bfloat16


def test_non_contiguous_and_gradient_carrying_inputs():
    x = sample("random", (3, 70, 300))
    for view in (x.transpose(1, 2), x[:, ::2, 5:290:3], x[0].t(), x.expand(2, 3, 70, 300)[:, :, 1:9], x[..., 0]):
        assert not view.is_contiguous()
        for block in BLOCKS[:2]:
            check(view, block)
    leaf = x[0].clone().requires_grad_()
    assert not BlockQuantizer().fake_quantize(leaf).requires_grad
    assert torch.equal(leaf, x[0])  # and the input is left alone


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
def test_power_of_two_scales_next_to_exact_powers(fmt):
    """A float32 ceil(log2(amax / 448)) goes wrong here."""
    powers = np.arange(-100, 101)
    exact = (float(references.MAX[fmt]) * 2.0**powers).astype(np.float32)
    keep = np.isfinite(exact)
    exact, want = exact[keep], (2.0**powers).astype(np.float32)[keep]
    below, above = np.nextafter(exact, np.float32(0)), np.nextafter(exact, np.float32(np.inf))
    for amax, scale in ((exact, want), (below, want), (above, 2 * want)):
        x = torch.from_numpy(amax)[:, None] * torch.tensor([1.0, -0.4])
        assert np.array_equal(check(x, (1, 2), fmt, "pow2").scale[:, 0].numpy(), scale)
    values = torch.from_numpy(exact)[:, None]
    assert torch.equal(BlockQuantizer((1, 1), fmt, "pow2").fake_quantize(values), values)
    assert np.array_equal(BlockQuantizer((1, 1), fmt).quantize(values).scale[:, 0].numpy(), want)


def test_nan_and_infinity_are_marked_counted_and_leave_their_block_alone():
    clean = sample("random", (4, 256))
    dirty = clean.clone()
    dirty[0, 3], dirty[0, 200], dirty[2, 5], dirty[2, 6] = float("nan"), float("inf"), -float("inf"), -float("nan")
    for block in BLOCKS[:2]:
        with_zeros = torch.where(dirty.isfinite(), clean, 0.0)
        a, b = BlockQuantizer(block).quantize(dirty), BlockQuantizer(block).quantize(with_zeros)
        bad = ~dirty.isfinite()
        assert a.nonfinite == 4 and torch.equal(a.scale, b.scale)
        assert (a.codes[bad] == 0x7F).all() and torch.equal(a.codes[~bad], b.codes[~bad])
        assert torch.equal(a.dequantize().isnan(), bad)
    everything = BlockQuantizer().quantize(torch.full((2, 130), float("nan")))
    assert everything.nonfinite == 260 and torch.equal(everything.scale, torch.ones(2, 2))


def test_ragged_edges_use_real_elements_only():
    x = sample("random", (130, 200))
    x[128:] *= 1e-3
    x[:, 128:] *= 1e-3
    t = check(x, (128, 128))
    assert t.scale.shape == (2, 2)
    assert t.scale[1, 1] == BlockQuantizer((128, 128)).quantize(x[128:, 128:].clone()).scale
    padded = BlockQuantizer((128, 128)).quantize(torch.nn.functional.pad(x, (0, 56, 0, 126)))
    assert torch.equal(padded.scale, t.scale) and torch.equal(padded.codes[:130, :200], t.codes)


def test_square_blocks_serve_both_directions():
    w = sample("lognormal", (300, 200))
    for rule in SCALE_RULES:
        quantizer = BlockQuantizer((128, 128), "e4m3", rule)
        forward, transposed = quantizer.quantize(w), quantizer.quantize(w.t())
        assert torch.equal(transposed.codes, forward.codes.t()) and torch.equal(transposed.scale, forward.scale.t())
        again = quantizer.quantize(forward.dequantize())
        if rule in ("default", "pow2"):  # systems that go through 448 / amax find another last bit the second time
            assert torch.equal(again.dequantize(), forward.dequantize())


def test_two_threads_at_once():
    """Both above the size at which the kernel splits its work over its own pool."""
    x = [sample("random", (4100, 257), seed) for seed in range(4)]
    quantizer = BlockQuantizer((128, 128))
    want = [quantizer.quantize(m) for m in x]
    errors, start = [], threading.Barrier(4)

    def work(i):
        try:
            start.wait()
            for _ in range(5):
                assert quantizer.quantize(x[i]).same_bytes(want[i])
        except BaseException as error:
            errors.append(error)

    try:
        torch.set_num_threads(2)
        assert x[0].numel() > kernels._SPLIT_ABOVE
        workers = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    finally:
        torch.set_num_threads(1)
    assert not errors


def test_a_pool_that_is_busy_changes_nothing():
    """The caller then does all of the work itself, and waits for nobody."""
    x = sample("random", (4100, 257), 0)
    x[0, 0], x[2050, 3], x[-1, -1] = float("nan"), float("inf"), float("nan")
    want = BlockQuantizer((128, 128)).reference(x)[0]
    free = threading.Event()
    blockers = [kernels._threads().submit(free.wait, 60) for _ in range(kernels._threads()._max_workers)]
    try:
        torch.set_num_threads(2)
        found = BlockQuantizer((128, 128)).quantize(x)
        assert not any(job.done() for job in blockers)
    finally:
        free.set()
        torch.set_num_threads(1)
    assert found.same_bytes(want) and found.nonfinite == want.nonfinite == 3


# ---- peers ------------------------------------------------------------------------------------------


def peer(strategy, **settings):
    from compressed_tensors.quantization import QuantizationArgs

    return QuantizationArgs(num_bits=8, type="float", symmetric=True, strategy=strategy, **settings)


@pytest.mark.parametrize("kind", ["random", "bf16", "lognormal", "small"])
def test_compressed_tensors_group(kind):
    from compressed_tensors.quantization.lifecycle.forward import quantize
    from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp

    x, args = sample(kind, (60, 384)), peer("group", group_size=128)
    scale, zero = compute_dynamic_scales_and_zp(x, args, torch.nn.Module())
    codes = quantize(x, scale, zero, args, dtype=torch.float8_e4m3fn)
    ours = BlockQuantizer((1, 128)).quantize(x)
    assert torch.equal(ours.scale, scale) and torch.equal(ours.codes, codes.view(torch.uint8))


@pytest.mark.parametrize("kind", ["random", "bf16", "lognormal", "small"])
def test_compressed_tensors_block(kind):
    from compressed_tensors.quantization.lifecycle.forward import quantize
    from compressed_tensors.quantization.utils import calculate_qparams

    w, args = sample(kind, (256, 384)), peer("block", block_structure=[128, 128])
    tiles = w.unflatten(1, (-1, 128)).unflatten(0, (-1, 128))
    scale, zero = calculate_qparams(tiles.amin((1, 3)), tiles.amax((1, 3)), args)
    codes = quantize(w, scale, zero, args, dtype=torch.float8_e4m3fn)
    ours = BlockQuantizer((128, 128)).quantize(w)
    assert torch.equal(ours.scale, scale) and torch.equal(ours.codes, codes.view(torch.uint8))


# ---- errors, records and measures -------------------------------------------------------------------


@pytest.mark.parametrize("block", [(0, 128), (1, -2), (128,), (1, 2, 3), [1, 128], (1.0, 128), 128, None, (True, 128)])
def test_bad_blocks(block):
    with pytest.raises(ValueError, match="block is .*positive"):
        BlockQuantizer(block)


def test_bad_formats_rules_and_dtypes():
    with pytest.raises(ValueError, match="'e3m4'.*allowed: e4m3, e5m2"):
        BlockQuantizer(format="e3m4")
    with pytest.raises(ValueError, match="'nearest'.*allowed: default, pow2"):
        BlockQuantizer(rule="nearest")
    for x in (torch.arange(4), torch.ones(4, dtype=torch.bool), torch.zeros(4, dtype=torch.complex64)):
        for call in (BlockQuantizer().quantize, BlockQuantizer().fake_quantize, BlockQuantizer().quantize_both):
            with pytest.raises(TypeError, match="floating-point"):
                call(x)


def test_rules_may_be_given_as_objects():
    x = sample("random", (2, 128))
    a = BlockQuantizer(rule=ScaleRule(name="mine", pow2="bits")).quantize(x)
    assert a.rule == "mine" and a.same_bytes(BlockQuantizer(rule="pow2").quantize(x))
    assert BlockQuantizer(rule="pow2") == BlockQuantizer(rule="pow2") != BlockQuantizer()
    amax = torch.tensor([0.0, 1e-45, 448.0, 449.0])
    assert ScaleRule.preset("pow2").scale(amax, get_format("e4m3"))[0].tolist() == [1, 1, 1, 2]


def test_quantized_tensor():
    t = BlockQuantizer((128, 128)).quantize(sample("random", (130, 200)))
    assert t.nbytes == 130 * 200 + 4 * 4
    assert repr(t) == "QuantizedTensor(130x200 e4m3, block=(128, 128), rule=default, 26016 bytes)"
    other = BlockQuantizer((128, 128)).quantize(sample("random", (130, 200)))
    assert t.same_bytes(other)
    other.codes[3, 4] ^= 1
    assert not t.same_bytes(other) and not t.same_bytes(BlockQuantizer().quantize(torch.zeros(2, 3)))
    other.codes[3, 4] ^= 1
    other.scale[0, 0] = torch.nextafter(other.scale[0, 0], torch.tensor(9.0))
    assert not t.same_bytes(other)


@pytest.mark.parametrize("block", [(1, 128), (128, 128)])
@pytest.mark.parametrize("fmt, low, high", [("e4m3", 31, 32.5), ("e5m2", 25, 26.5)])
def test_sqnr_of_gaussian_data(block, fmt, low, high):
    x = sample("random", (512, 512))
    for rule in SCALE_RULES:
        t = BlockQuantizer(block, fmt, rule).quantize(x)
        error = quantization_error(x, t)
        assert low < error["sqnr_db"] < high
        assert error["sqnr_db"] == pytest.approx(references.sqnr(x, t.dequantize()), abs=1e-9)
        assert error["relative"] == pytest.approx(10 ** (-error["sqnr_db"] / 20), rel=1e-9)


def test_quantization_error_by_hand():
    x = torch.tensor([[448.0, 17.0, 1e-4, 0.0, float("nan")]])
    error = quantization_error(x, BlockQuantizer().quantize(x))  # scale 1: 17 becomes 16, 1e-4 becomes 0
    noise, signal = 1 + 1e-8, 448**2 + 17**2 + 1e-8
    assert error["sqnr_db"] == pytest.approx(10 * np.log10(signal / noise), rel=1e-6)
    assert error["max_abs"] == 1 and error["flushed"] == pytest.approx(1 / 3)
    assert error["saturated"] == pytest.approx(1 / 5)
    values = BlockQuantizer().fake_quantize(x)
    assert quantization_error(values, values)["sqnr_db"] == float("inf")
    assert np.isnan(quantization_error(x, values)["saturated"])
    assert quantization_error(torch.zeros(0, 3), torch.zeros(0, 3))["max_abs"] == 0
