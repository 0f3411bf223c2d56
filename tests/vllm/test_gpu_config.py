"""The GPU's quantization config against vLLM's own reading of it; no GPU is needed for that."""

import pytest

from fp8lab.precision import PrecisionPlan
from fp8lab.rollout.vllm import skeleton
from fp8lab.rollout.vllm_gpu import fp8_config

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("model", ["tiny-llama", "tiny-qwen3-moe"])
def test_vllm_skips_exactly_the_layers_that_the_plan_keeps_in_bf16(model):
    from vllm.model_executor.layers.quantization.fp8 import Fp8Config
    from vllm.model_executor.layers.quantization.utils.quant_utils import is_layer_skipped

    plan = PrecisionPlan.preset("fp8-e2e").with_bf16(layers=[1])
    config = Fp8Config.from_config(fp8_config(plan.coverage(skeleton(model))))
    assert config.weight_block_size == [128, 128] and config.is_checkpoint_fp8_serialized
    fused = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
    mlp = ["mlp.experts"] if "moe" in model else ["mlp.gate_up_proj", "mlp.down_proj"]
    for layer in range(4):
        for name in ["self_attn.qkv_proj", "self_attn.o_proj", *mlp]:
            prefix = f"model.layers.{layer}.{name}"
            skipped = is_layer_skipped(prefix, config.ignored_layers, fused, match_mode="exact")
            assert skipped == (layer == 1), prefix
