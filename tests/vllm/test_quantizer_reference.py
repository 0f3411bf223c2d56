"""The rules `vllm_native` and `deepgemm` against vLLM's own functions: QuantFP8's native path, and its weight cast."""

import pytest
import torch

from fp8lab.quantizers import BlockQuantizer

pytestmark = pytest.mark.vllm

FACTORS = {"ordinary": 1.0, "small": 1e-3, "1e-6": 1e-6, "1e-12": 1e-12, "huge": 1e30, "zero": 0.0}


def sample(kind, dtype=torch.float32):
    x = torch.randn((256, 384), generator=torch.Generator().manual_seed(1))
    x[:, :7] *= 30
    return (x * FACTORS[kind]).to(dtype)


@pytest.fixture(scope="module")
def activation_quantizer():
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8
    from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape

    with set_current_vllm_config(VllmConfig()):
        return {pow2: QuantFP8(static=False, group_shape=GroupShape(1, 128), use_ue8m0=pow2) for pow2 in (False, True)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("rule", "kind"),
    # vLLM raises scales to 4.4e-6, which `default` does not: it is the same for larger ones only
    [(rule, kind) for rule in ("vllm_native", "vllm_native+pow2") for kind in FACTORS]
    + [("default", "ordinary"), ("default", "huge")],
)
def test_activations(activation_quantizer, kind, rule, dtype):
    x = sample(kind, dtype)
    codes, scale = activation_quantizer[rule.endswith("pow2")].forward_native(x)
    ours = BlockQuantizer((1, 128), rule=rule).quantize(x)
    assert torch.equal(ours.scale, scale.float())
    assert torch.equal(ours.codes, codes.view(torch.uint8))


@pytest.mark.parametrize("pow2", [False, True])
@pytest.mark.parametrize("shape", [(256, 384), (200, 300)])
@pytest.mark.parametrize("kind", FACTORS)
def test_weights(kind, shape, pow2):
    from vllm.utils.deep_gemm import per_block_cast_to_fp8

    w = sample(kind)[: shape[0], : shape[1]].contiguous()
    with torch.compiler.set_stance("force_eager"):
        codes, scale = per_block_cast_to_fp8(w, [128, 128], use_ue8m0=pow2)
    ours = BlockQuantizer((128, 128), rule="deepgemm+pow2" if pow2 else "deepgemm").quantize(w)
    assert torch.equal(ours.scale, scale)
    assert torch.equal(ours.codes, codes.view(torch.uint8))
