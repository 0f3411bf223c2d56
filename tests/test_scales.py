"""Scale rules against the systems they stand for: compressed-tensors itself, and the others' formulas in NumPy float32.

The formulas are written again from shared/research/numerics.md (which read the systems' sources), not from scales.py.
"""

import ast
import os
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch

from fp8lab.formats import E4M3
from fp8lab.quantizers import SCALE_RULES, BlockQuantizer, QuantizedTensor, ScaleRule, block_sqnr, rule_differences

F = np.float32
BLOCK = (128, 128)


def blocks_of(kind: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn((256, 384), generator=generator)
    factor = {"ordinary": 1.0, "small": 1e-3, "1e-6": 1e-6, "1e-12": 1e-12, "1e-30": 1e-30, "huge": 1e30, "zero": 0.0}
    return x * factor[kind]


KINDS = ["ordinary", "small", "1e-6", "1e-12", "1e-30", "huge", "zero"]


def formulas(amax: np.float32) -> dict[str, tuple[np.float32, str, np.float32]]:
    """rule -> (scale, how x becomes a ratio, by what), for one block, in float32 steps."""
    with np.errstate(all="ignore"):
        floored = {floor: max(amax, F(floor)) for floor in (1e-10, 1e-4, 1e-12)}
        s_vllm = floored[1e-10] / F(448)
        s_native = max(amax / F(448), F(1 / (448 * 512)))
        s_deep = floored[1e-4] / F(448)
        encode = F(1) if amax == 0 else min(F(448) / amax, np.finfo(F).max)
        twice = F(1) if amax == 0 else min(F(448) * (F(1) / amax), np.finfo(F).max)  # torch's `448 / amax`
        encode_ao = F(np.float64(448) / np.float64(floored[1e-12]))
        s_ct = np.finfo(F).eps if amax == 0 else amax / F(448)
        up = F(2.0) ** np.ceil(np.log2(max(s_vllm, F(1e-10)).astype(np.float64))).astype(F)
    return {
        "vllm": (s_vllm, "/", s_vllm),
        "vllm_native": (s_native, "/", s_native),
        "deepgemm": (s_deep, "*", F(1) / s_deep),
        "transformer_engine": (F(1) / encode, "*", encode),
        "torchao": (F(1) / encode_ao, "*", encode_ao),
        "compressed_tensors": (s_ct, "/", s_ct),
        "nemo_rl": (F(1) / twice, "*", twice),
        "vllm+pow2": (up, "/", up),
    }


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rule", sorted(formulas(F(1))))
def test_presets_equal_their_systems_formula(rule, kind):
    x = blocks_of(kind)
    found = BlockQuantizer(BLOCK, rule=rule).quantize(x)
    for i in range(2):
        for j in range(3):
            block = x[128 * i : 128 * (i + 1), 128 * j : 128 * (j + 1)].numpy()
            scale, how, by = formulas(np.abs(block).max())[rule]
            assert found.scale[i, j].item() == scale
            with np.errstate(all="ignore"):
                ratio = block / by if how == "/" else block * by
            codes = np.clip(ratio, F(-448), F(448)).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
            assert np.array_equal(found.codes[128 * i : 128 * (i + 1), 128 * j : 128 * (j + 1)].numpy(), codes)


@pytest.mark.parametrize("rule", sorted(SCALE_RULES))
@pytest.mark.parametrize("kind", [*KINDS, "ragged", "nan", "inf", "denormal", "bf16"])
def test_kernel_equals_reference_for_every_rule(rule, kind):
    special = {
        "ragged": torch.randn(130, 200),
        "nan": torch.randn(130, 200).index_fill_(0, torch.tensor([3]), float("nan")),
        "inf": torch.randn(130, 200).index_fill_(1, torch.tensor([150]), float("inf")),
        "denormal": torch.randn(64, 256) * 1e-41,
        "bf16": torch.randn(64, 256).bfloat16(),
    }
    x = special[kind] if kind in special else blocks_of(kind)
    for block in ((1, 128), (128, 128)):
        quantizer = BlockQuantizer(block, rule=rule)
        found, values = quantizer.quantize_both(x)
        reference, reference_values = quantizer.reference(x)
        assert found.same_bytes(reference) and found.nonfinite == reference.nonfinite
        assert torch.equal(values.nan_to_num(7.0), reference_values.nan_to_num(7.0))
        if x.isfinite().all():
            assert not values.isnan().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compressed_tensors_itself(dtype):
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import quantize
    from compressed_tensors.quantization.utils import calculate_qparams

    arguments = QuantizationArgs(num_bits=8, type="float", strategy="group", group_size=128, symmetric=True)
    for kind in ("ordinary", "small", "zero"):
        x = blocks_of(kind).to(dtype)
        groups = x.unflatten(1, (-1, 128))
        scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), arguments)
        codes = quantize(x, scale, zero, arguments, dtype=torch.float8_e4m3fn)
        found = BlockQuantizer((1, 128), rule="compressed_tensors").quantize(x)
        assert torch.equal(found.scale, scale.float())
        unsigned_zero = torch.where(found.codes == 128, 0, found.codes)  # it adds a zero point: -0 becomes +0
        theirs = codes.view(torch.uint8)
        assert torch.equal(unsigned_zero, torch.where(theirs == 128, 0, theirs).to(torch.uint8))


def test_powers_of_two_are_exact_where_a_float_log2_is_not():
    for k in range(-100, 101):
        amax = torch.tensor([448 * 2.0**k, np.nextafter(F(448 * 2.0**k), F(np.inf))])
        assert ScaleRule.preset("pow2").scale(amax, E4M3)[0].tolist() == [2.0**k, 2.0 ** (k + 1)]


def test_nemo_rl_pads_with_the_last_element_and_we_do_not():
    x = torch.ones(130, 130)
    x[-1, -1] = 100.0
    ours, theirs = (BlockQuantizer(BLOCK, rule=rule).quantize(x) for rule in ("transformer_engine", "nemo_rl"))
    assert ours.scale[0, 1] == 1 / (torch.tensor(448.0) / 1.0)  # the top right block holds ones
    assert theirs.scale[0, 1] == theirs.scale[1, 1] == 1 / (torch.tensor(448.0) / 100.0)
    assert theirs.scale[0, 0] == ours.scale[0, 0]


def test_vllm_and_transformer_engine_agree_on_powers_of_two():
    x = blocks_of("ordinary")
    a, b = (BlockQuantizer((1, 128), rule=rule).quantize(x) for rule in ("vllm+pow2", "transformer_engine+pow2"))
    assert a.same_bytes(b)


def test_the_table_of_differences():
    rows = {row["rule"]: row for row in rule_differences()}
    assert set(rows) == set(SCALE_RULES)
    assert rows["default"]["other codes"] == 0 and rows["vllm"]["other codes"] == 0
    assert 0 < rows["transformer_engine"]["other codes"] < 0.002 and rows["pow2"]["other codes"] > 0.5
    assert rows["compressed_tensors"]["other codes"] > 0.02  # BF16 scales and quotients
    assert rows["vllm"]["empty"] == pytest.approx(1e-10 / 448) and rows["default"]["empty"] == 1
    assert rows["vllm_native"]["empty"] == pytest.approx(4.36e-6, rel=1e-3)


def test_stochastic_rounding_is_right_on_average():
    x = torch.full((1, 128), 1.03)
    x[0, 0] = 448.0  # scale 1: neighbours of 1.03 are 1 and 1.125
    generator = torch.Generator().manual_seed(0)
    draws = torch.stack([BlockQuantizer().quantize(x, generator=generator).dequantize() for _ in range(200)])
    assert set(draws[:, 0, 1:].unique().tolist()) == {1.0, 1.125}
    assert draws[:, 0, 1:].mean() == pytest.approx(1.03, abs=0.002)
    assert (draws[:, 0, 0] == 448).all()
    again = torch.Generator().manual_seed(0)
    assert torch.equal(BlockQuantizer().quantize(x, generator=again).dequantize(), draws[0])


@pytest.mark.parametrize("block", [(128, 128), (1, 128), (1, -1), (-1, -1), (7, 13)])
def test_slicing_and_dequantizing_can_be_swapped(block):
    x = torch.randn(300, 400, generator=torch.Generator().manual_seed(2))
    t = BlockQuantizer(block).quantize(x)
    whole = t.dequantize()
    for rows, cols in [
        (slice(0, 128), slice(128, 256)),
        (slice(5, 299), slice(127, 129)),
        (slice(130, 131), slice(390, 400)),
        (slice(None), slice(-3, None)),
    ]:
        part = t.slice(rows, cols)
        assert torch.equal(part.dequantize(), whole[rows, cols])
        inner = part.slice(slice(0, 1), slice(1, None))
        assert torch.equal(inner.dequantize(), whole[rows, cols][0:1, 1:])
        assert torch.equal(part.transpose().dequantize(), whole[rows, cols].t())
    for bad in (slice(0, 300, 2), slice(5, 5)):
        with pytest.raises(ValueError, match="step 1"):
            t.slice(bad, slice(None))
    with pytest.raises(ValueError, match="matrix"):
        BlockQuantizer().quantize(torch.randn(2, 3, 4)).slice(slice(1), slice(1))


def test_save_and_load(tmp_path):
    t = BlockQuantizer((128, 128), rule="vllm").quantize(torch.randn(130, 200)).slice(slice(3, 130), slice(100, 200))
    t.save(tmp_path / "t.safetensors")
    back = QuantizedTensor.load(tmp_path / "t.safetensors")
    assert back.same_bytes(t) and back.block == t.block and back.offset == t.offset and back.rule == "vllm"
    assert torch.equal(back.dequantize(), t.dequantize())
    assert [p.name for p in tmp_path.iterdir()] == ["t.safetensors"]
    from safetensors.torch import save_file

    save_file({"codes": t.codes.contiguous()}, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match="was not written by"):
        QuantizedTensor.load(tmp_path / "other.safetensors")


def test_block_sqnr_equals_each_blocks_own():
    x = torch.randn(200, 300, generator=torch.Generator().manual_seed(3))
    t = BlockQuantizer((128, 128)).quantize(x)
    found = block_sqnr(x, t)
    exact, rounded = x[128:, 256:].double(), t.dequantize()[128:, 256:].double()
    expected = 10 * (exact.square().sum() / (exact - rounded).square().sum()).log10()
    assert found.shape == (2, 3) and found[1, 2].item() == pytest.approx(expected.item())


@pytest.mark.parametrize("field", ["form", "apply", "pow2", "nonfinite", "edge"])
def test_bad_rules_are_refused(field):
    with pytest.raises(ValueError, match=f"{field} is 'nope'; allowed"):
        ScaleRule(**{field: "nope"})


# ---- systems' own code ------------------------------------------------------------------------------------


def ulps(a: torch.Tensor, b: torch.Tensor) -> int:
    """The largest distance of two positive float32 tensors, in last bits."""
    return int((a.contiguous().view(torch.int32).long() - b.contiguous().view(torch.int32)).abs().max())


def differing_codes(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Share of codes that differ; none may differ by more than one step."""
    a, b = ours.to(torch.int16), theirs.contiguous().view(torch.uint8).to(torch.int16)
    assert (a - b).abs().max() <= 1
    return (a != b).float().mean().item()


def hold_against(rule: str, found: QuantizedTensor, codes: torch.Tensor, scale: torch.Tensor) -> None:
    """`rule` is the system's own and gives its bytes; `default` differs in a last bit of scales and few codes."""
    if rule == "default":
        assert ulps(found.scale, scale) <= 2 and differing_codes(found.codes, codes) <= 1e-3
    else:
        assert torch.equal(found.scale, scale) and differing_codes(found.codes, codes) == 0


@pytest.mark.parametrize("rule", ["nemo_rl", "default"])
@pytest.mark.parametrize("kind", ["ordinary", "small", "1e-12", "huge", "zero", "bf16"])
def test_transformers_finegrained_fp8_itself(rule, kind):
    """transformers' Fp8Quantize, which makes FP8 checkpoints; its formula, where blocks are whole, is NeMo RL's."""
    from transformers import FineGrainedFP8Config
    from transformers.integrations.finegrained_fp8 import Fp8Quantize

    class Quantizer:
        quantization_config = FineGrainedFP8Config(weight_block_size=BLOCK)

    w = blocks_of("ordinary").bfloat16() if kind == "bf16" else blocks_of(kind)
    theirs = Fp8Quantize(Quantizer())._quantize_one("a.weight", w)
    ours = BlockQuantizer(BLOCK, rule=rule).quantize(w)
    hold_against(rule, ours, theirs["a.weight"], theirs["a.weight_scale_inv"])


def torchao_function(name: str):
    """A pure torch reference out of torchao's kernels.py, whose module needs triton to be imported."""
    folder = os.environ.get("FP8LAB_REFERENCES")
    if not folder:
        pytest.skip("torchao==0.18.0 is not at hand: `make test` puts it there on Linux, or set FP8LAB_REFERENCES")
    source = Path(folder, "torchao/prototype/blockwise_fp8_training/kernels.py").read_text()
    wanted = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef) and node.name == name]
    scope = {"torch": torch, "e4m3_dtype": torch.float8_e4m3fn, "EPS": 1e-12}
    exec(compile(ast.Module(body=wanted, type_ignores=[]), "torchao", "exec"), scope)
    return scope[name]


@pytest.mark.parametrize("rule", ["torchao", "default"])
@pytest.mark.parametrize("kind", ["ordinary", "small", "1e-6", "huge", "bf16"])
def test_torchaos_references_themselves(rule, kind):
    x = blocks_of("ordinary").bfloat16() if kind == "bf16" else blocks_of(kind)
    for name, block in (("act_quant_lhs", (1, 128)), ("weight_quant", (128, 128))):
        codes, scale = torchao_function(f"torch_blockwise_scale_{name}")(x)
        hold_against(rule, BlockQuantizer(block, rule=rule).quantize(x), codes, scale)
