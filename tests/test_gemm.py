"""The reference GEMM against mmaemu (a model fitted to an H100), bit for bit, and against exact products."""

import dataclasses

import mmaemu
import pytest
import torch

from fp8lab.formats import E4M3, E5M2
from fp8lab.gemm import ACCUMULATE, exponent, power_of_two, reference_gemm, tensor_core_chain, tensor_core_step
from fp8lab.linear import matmul
from fp8lab.quantizers import WHOLE, BlockQuantizer, QuantizedTensor

ACTIVATION, WEIGHT, WHOLE_MATRIX = (1, 128), (128, 128), (WHOLE, WHOLE)
DTYPE = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


pytestmark = pytest.mark.usefixtures("one_thread")


def unscaled(codes, fmt="e4m3"):
    """Codes with scale 1: what is multiplied is what is in them."""
    return QuantizedTensor(codes=codes, scale=torch.ones(1, 1), block=WHOLE_MATRIX, format=fmt, rule="default")


def codes_of(kind, shape, seed, fmt="e4m3"):
    """uint8 codes of one kind of data; none is NaN or infinite."""
    r = torch.Generator().manual_seed(seed)
    known = {"e4m3": E4M3, "e5m2": E5M2}[fmt]
    if kind == "any code":  # every exponent and sign, evenly: the huge spread
        finite = torch.arange(256)[known.values().isfinite()].to(torch.uint8)
        return finite[torch.randint(0, len(finite), shape, generator=r)]
    x = torch.randn(shape, generator=r)
    values = {
        "random": x,
        "positive": x.abs(),
        "near the top": known.max * (1 - 0.3 * torch.rand(shape, generator=r)),
        "subnormal": x * known.min_normal / 4,
        "sparse": x * (torch.rand(shape, generator=r) < 0.05),
        "zero": x * 0,
        "spread": x * torch.exp2(torch.randint(-8, 7, shape, generator=r).float()),
        "cancelling": x.abs() * torch.tensor([1.0, -1.0]).repeat(shape[1] // 2 + 1)[: shape[1]],
    }[kind]
    return known.encode(values)


def emulate(a, b, fast, formats=("e4m3", "e4m3")):
    left, right = (t.contiguous().view(DTYPE[f]) for t, f in zip((a, b), formats, strict=True))
    return mmaemu.accumulate(left, right, use_fast_accum=fast, splitk=1, profile="hopper")


def equal_bits(a, b):
    """Equal bit for bit, signs of zeros too; NaN equals NaN."""
    same = a.view(torch.int32) == b.view(torch.int32)
    return bool((same | (a.isnan() & b.isnan())).all())


# ---- the tensor core, bit for bit -------------------------------------------------------------------

KINDS = ["random", "positive", "near the top", "subnormal", "sparse", "zero", "spread", "any code", "cancelling"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [32, 100, 128, 640, 1000])
def test_hopper_and_fast_equal_mmaemu(kind, k):
    for seed in range(3):
        a, b = codes_of(kind, (17, k), seed), codes_of(kind, (20, k), 100 + seed)
        for mode, fast in (("hopper", False), ("fast", True)):
            ours = reference_gemm(unscaled(a), unscaled(b), accumulate=mode)
            assert ours.dtype == torch.float32 and equal_bits(ours, emulate(a, b, fast))


@pytest.mark.parametrize("formats", [("e4m3", "e5m2"), ("e5m2", "e4m3")], ids=" x ".join)
def test_mixed_formats_equal_mmaemu(formats):
    for kind in ("random", "positive", "subnormal", "any code"):
        a, b = codes_of(kind, (16, 300), 0, formats[0]), codes_of(kind, (16, 300), 1, formats[1])
        for mode, fast in (("hopper", False), ("fast", True)):
            ours = reference_gemm(unscaled(a, formats[0]), unscaled(b, formats[1]), accumulate=mode)
            assert equal_bits(ours, emulate(a, b, fast, formats))


def test_a_large_term_pushes_the_small_ones_out():
    """Beside 448 * 448 (exponent 16) the quantum is 2^(16 - 13) = 8, so 63 products of 1 are cut to nothing."""
    a = torch.ones(1, 64)
    a[0, 0] = 448
    operands = unscaled(E4M3.encode(a)), unscaled(E4M3.encode(a))
    assert reference_gemm(*operands, accumulate="fast").item() == 448 * 448
    assert reference_gemm(*operands, accumulate="promote128").item() == 448 * 448 + 63


def test_the_step_by_hand():
    """1.75 * 1.75 = 3.0625 has the exponent of its factors, 0, so terms are cut at 2^-13 and the sum again at 2^-12."""
    for small, kept in (
        ([2.0**-13, 2.0**-13], 2.0**-12),  # with the exponent of 3.0625 itself, 1, both would have been lost
        ([2.0**-13, 0.0], 0.0),  # survives beside the product, but not in a sum above 2
        ([2.0**-14, 2.0**-14], 0.0),  # each is cut before they meet
        ([-(2.0**-14), 0.0], 0.0),  # towards zero, not down
    ):
        products = torch.tensor([3.0625, *small], dtype=torch.float64)
        out = tensor_core_step(products, exponent(products).clamp(max=0), torch.zeros((), dtype=torch.float64))
        assert out.item() == 3.0625 + kept


def test_exponents_and_powers():
    x = torch.tensor([0.0, 1.0, -1.75, 2.0, 2**-9, 448.0, float("nan"), float("inf")])
    assert exponent(x).tolist() == [-200, 0, 0, 1, -9, 8, -200, -200]
    assert exponent(x, E4M3).tolist() == [-200, 0, 0, 1, -6, 8, -200, -200]  # subnormals are not normalized
    n = torch.arange(-1022, 1024)
    assert power_of_two(n).tolist() == [2.0**i for i in n.tolist()]


# ---- scales and blocks --------------------------------------------------------------------------------


def data(m=24, n=150, k=512, seed=0):
    r = torch.Generator().manual_seed(seed)
    a, b = torch.randn(m, k, generator=r), torch.randn(n, k, generator=r) * 0.02
    a[:, :7] *= 40
    return a, b


def quantized(block_a=ACTIVATION, block_b=WEIGHT, **sizes):
    a, b = data(**sizes)
    return BlockQuantizer(block_a).quantize(a), BlockQuantizer(block_b).quantize(b)


def exact(a, b):
    return a.dequantize().double() @ b.dequantize().double().t()


@pytest.mark.parametrize(
    "blocks",
    [(ACTIVATION, WEIGHT), (ACTIVATION, ACTIVATION), ((1, 64), WEIGHT), ((1, 32), (128, 32)), ((1, 256), WEIGHT)],
)
@pytest.mark.parametrize("k", [128, 512, 600])
def test_promote128_equals_fp32(blocks, k):
    a, b = quantized(*blocks, k=k)
    fp32, promoted = (reference_gemm(a, b, accumulate=mode) for mode in ("fp32", "promote128"))
    assert (promoted - fp32).norm() <= 1e-6 * fp32.norm()
    assert (promoted.double() - exact(a, b)).abs().max() <= 1e-6 * exact(a, b).abs().max()
    assert torch.equal(fp32, matmul(a.dequantize(), b.dequantize()))  # what Float8Linear multiplies


@pytest.mark.parametrize("block_b", [WEIGHT, ACTIVATION])
def test_hopper_promotes_mmaemu_s_blocks_with_both_scales(block_b):
    """N = 150 spans two weight blocks and K = 600 ends in a ragged one."""
    a, b = quantized(block_b=block_b, k=600)
    total = torch.zeros(24, 150)
    rows = torch.arange(150) // block_b[0]
    for j in range(5):
        here = slice(128 * j, 128 * (j + 1))
        scale = a.scale[:, j, None] * b.scale[rows, j][None, :]
        partial = emulate(a.codes[:, here], b.codes[:, here], fast=True)  # one chain: no promotion inside a block
        total = (total.double() + scale.double() * partial.double()).float()
    assert torch.equal(reference_gemm(a, b, accumulate="hopper"), total)


def test_power_of_two_scales_pass_through_exactly():
    """A scale of 2^n shifts every partial sum, so it can be applied before or after."""
    a, b = (dataclasses.replace(t, scale=torch.ones_like(t.scale)) for t in quantized())
    for mode in ("promote128", "hopper"):
        scaled = dataclasses.replace(a, scale=a.scale * 2.0**-5), dataclasses.replace(b, scale=b.scale * 2.0**3)
        assert torch.equal(reference_gemm(*scaled, accumulate=mode), reference_gemm(a, b, accumulate=mode) * 2.0**-2)


def test_sliced_rows_keep_their_scales():
    a, b = quantized(n=300)
    part = b.slice(slice(100, 210), slice(None))
    assert part.offset == (100, 0)
    for mode in ("promote128", "hopper"):
        whole, ours = reference_gemm(a, b, accumulate=mode), reference_gemm(a, part, accumulate=mode)
        assert torch.equal(ours, whole[:, 100:210])
    rows = BlockQuantizer((64, WHOLE)).quantize(data(n=300)[1])
    whole = BlockQuantizer((1, WHOLE)).quantize(data()[0])
    ours = reference_gemm(whole, rows.slice(slice(50, 140), slice(None)), accumulate="fast")
    assert torch.equal(ours, reference_gemm(whole, rows, accumulate="fast")[:, 50:140])


def test_empty_sides():
    a, b = quantized()
    for mode in ("fp32", "promote128", "hopper"):
        assert reference_gemm(a.slice(slice(0, 1), slice(None)), b, accumulate=mode).shape == (1, 150)
        nothing = dataclasses.replace(a, codes=a.codes[:0], scale=a.scale[:0])
        assert reference_gemm(nothing, b, accumulate=mode).shape == (0, 150)


# ---- how wrong is it? -----------------------------------------------------------------------------------


def bias(mode, k, kind):
    """(relative error, relative mean shift) of 32x32 outputs, tensorwise scales as on an H100."""
    r = torch.Generator().manual_seed(k)
    a, b = (torch.randn(32, k, generator=r) for _ in range(2))
    if kind == "positive":
        a, b = a.abs(), b.abs()
    a, b = BlockQuantizer(WHOLE_MATRIX).quantize(a), BlockQuantizer(WHOLE_MATRIX).quantize(b)
    off = reference_gemm(a, b, accumulate=mode).double() - exact(a, b)
    return (off.norm() / exact(a, b).norm()).item(), (off.sum() / exact(a, b).abs().sum()).item()


@pytest.mark.parametrize(
    ("k", "kind", "fast", "slow"),
    [
        (512, "random", 3.2e-4, 1.2e-4),
        (512, "positive", 6.0e-3, 6.6e-4),
        (2048, "random", 8.5e-4, 1.2e-4),
        (2048, "positive", 3.3e-2, 6.3e-4),
        (4096, "random", 1.3e-3, 1.2e-4),
        (4096, "positive", 7.1e-2, 6.6e-4),
    ],
)
def test_measured_errors(k, kind, fast, slow):
    """The table of shared research (numerics, section 3), measured with mmaemu itself."""
    for mode, want in (("fast", fast), ("hopper", slow)):
        error, shift = bias(mode, k, kind)
        assert want / 1.4 < error < want * 1.4
        if kind == "positive":  # cut towards zero: all of it is bias
            assert -1.01 * error < shift < -0.95 * error
    for mode in ("fp32", "promote128"):
        assert bias(mode, k, kind)[0] < 1e-6


def test_quantization_hides_promoted_accumulation_but_not_fast():
    """Why fp8lab multiplies in float32: rounding the operands costs 3.4e-2, the tensor core with promotion 3e-4."""
    a, b = data()
    qa, qb = BlockQuantizer(ACTIVATION).quantize(a), BlockQuantizer(WEIGHT).quantize(b)
    true = a.double() @ b.double().t()
    rounding = (exact(qa, qb) - true).norm() / true.norm()
    accumulation = (reference_gemm(qa, qb, accumulate="hopper") - exact(qa, qb)).norm() / true.norm()
    assert 2e-2 < rounding < 5e-2 and accumulation < rounding / 50
    assert bias("fast", 4096, "positive")[0] > 5e-2


# ---- special values -----------------------------------------------------------------------------------


def test_nan_makes_its_row_and_column_nan():
    a, b = codes_of("random", (8, 160), 0), codes_of("random", (9, 160), 1)
    a[3, 150], b[5, 0] = 0x7F, 0xFF
    b[7] = 0  # NaN * 0 is NaN
    for mode in ACCUMULATE:
        ours = reference_gemm(unscaled(a), unscaled(b), accumulate=mode)
        want = torch.zeros(8, 9, dtype=torch.bool)
        want[3], want[:, 5] = True, True
        assert torch.equal(ours.isnan(), want)
    for mode, fast in (("hopper", False), ("fast", True)):
        assert equal_bits(reference_gemm(unscaled(a), unscaled(b), accumulate=mode), emulate(a, b, fast))


def test_infinity_codes_follow_ieee():
    a, b = codes_of("random", (6, 200), 0, "e5m2"), codes_of("random", (7, 200), 1)
    a[1, 10], a[2, 150], a[4, 20], a[4, 140] = 0x7C, 0xFC, 0x7C, 0xFC  # +inf, -inf, both
    b[3, 10] = 0  # inf * 0
    for mode, fast in (("hopper", False), ("fast", True)):
        ours = reference_gemm(unscaled(a, "e5m2"), unscaled(b), accumulate=mode)
        assert equal_bits(ours, emulate(a, b, fast, ("e5m2", "e4m3")))
    assert ours.isinf().any() and ours.isnan().any()


def test_zeros_are_positive():
    a, b = codes_of("random", (4, 64), 0), torch.full((4, 64), 0x80, dtype=torch.uint8)  # -0 everywhere
    for mode in ("hopper", "fast"):
        ours = reference_gemm(unscaled(a), unscaled(b), accumulate=mode)
        assert torch.equal(ours, torch.zeros(4, 4)) and not ours.signbit().any()


# ---- refusals -------------------------------------------------------------------------------------------


def test_refusals_say_what_is_allowed():
    a, b = quantized()
    with pytest.raises(ValueError, match="'bf16'.*fp32, promote128, hopper, fast"):
        reference_gemm(a, b, accumulate="bf16")
    with pytest.raises(ValueError, match="a has K = 512 and b has K = 256"):
        reference_gemm(a, quantized(k=256)[1])
    with pytest.raises(ValueError, match=r"shape \(2, 3, 128\).*matrices"):
        reference_gemm(BlockQuantizer().quantize(torch.randn(2, 3, 128)), b)
    e5m2 = [dataclasses.replace(t, format="e5m2") for t in (a, b)]
    with pytest.raises(ValueError, match="both e5m2.*e4m3 x e5m2"):
        reference_gemm(*e5m2)
    with pytest.raises(ValueError, match="format is 'fp4'"):
        reference_gemm(dataclasses.replace(a, format="fp4"), b)


@pytest.mark.parametrize("mode", ["promote128", "hopper"])
def test_blocks_must_line_up_with_the_promotion(mode):
    for length in (16, 48, 96, 100, 192, 200):
        a, b = quantized(block_a=(1, length))
        with pytest.raises(ValueError, match=f"a has blocks of {length} along K.*32, 64, a multiple of 128"):
            reference_gemm(a, b, accumulate=mode)
        assert (reference_gemm(a, b) - exact(a, b)).norm() < 1e-6 * exact(a, b).norm()  # fp32 takes any block
    a, b = quantized()
    cut = [t.slice(slice(None), slice(64, 320)) for t in (a, b)]
    with pytest.raises(ValueError, match="cut at column 64 of a block"):
        reference_gemm(*cut, accumulate=mode)


def test_fast_needs_one_scale_per_row():
    a, b = quantized()
    with pytest.raises(ValueError, match="a has scales that change along K.*block"):
        reference_gemm(a, b, accumulate="fast")
    with pytest.raises(ValueError, match="b has scales that change along K"):
        reference_gemm(BlockQuantizer((1, WHOLE)).quantize(data()[0]), b, accumulate="fast")
    ones = [dataclasses.replace(t, scale=torch.ones_like(t.scale)) for t in (a, b)]  # equal scales are one scale
    assert equal_bits(reference_gemm(*ones, accumulate="fast"), emulate(a.codes, b.codes, fast=True))
    a, b = quantized((1, WHOLE), (1, WHOLE))
    chain = tensor_core_chain(a.codes, b.codes, "e4m3", "e4m3")
    assert torch.equal(reference_gemm(a, b, accumulate="fast"), chain * (a.scale * b.scale.t()))
