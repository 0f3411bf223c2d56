"""Sizes of the published models that the recipes name, so that a plan can be looked at without the hub.

    plan.report("Qwen/Qwen3-8B-Base")        no download: the config is here, the model is built on the meta device

Each entry is what transformers' config needs: the fields of the model's public config.json that decide shapes, nothing
else, as of its repository on the hub. Parameter counts that follow are tested against the published ones
(tests/test_coverage.py). Qwen3.5 is the whole model, with its vision tower, as vLLM loads it.
"""

from __future__ import annotations

from typing import Any

LLAMA = {"model_type": "llama", "vocab_size": 128_256, "num_key_value_heads": 8, "max_position_embeddings": 131_072}
QWEN3 = {"vocab_size": 151_936, "head_dim": 128, "max_position_embeddings": 40_960, "tie_word_embeddings": False}
QWEN3_MOE = {**QWEN3, "model_type": "qwen3_moe", "num_experts": 128, "num_experts_per_tok": 8, "num_key_value_heads": 4}
DEEPSEEK = {
    "model_type": "deepseek_v3",
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "tie_word_embeddings": False,
}
QWEN3_5 = {"vocab_size": 248_320, "num_attention_heads": 16, "head_dim": 256, "max_position_embeddings": 262_144}
QWEN3_5 |= {"linear_num_key_heads": 16, "linear_num_value_heads": 32, "tie_word_embeddings": False}
QWEN3_5_VISION = {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16}

LLAMA_8B = {**LLAMA, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32}
LLAMA_8B |= {"num_attention_heads": 32}
LLAMA_70B = {**LLAMA, "hidden_size": 8192, "intermediate_size": 28_672, "num_hidden_layers": 80}
LLAMA_70B |= {"num_attention_heads": 64}
QWEN3_8B = {**QWEN3, "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36}
QWEN3_8B |= {"num_attention_heads": 32, "num_key_value_heads": 8}
QWEN3_32B = {**QWEN3, "model_type": "qwen3", "hidden_size": 5120, "intermediate_size": 25_600, "num_hidden_layers": 64}
QWEN3_32B |= {"num_attention_heads": 64, "num_key_value_heads": 8}
QWEN3_30B = {**QWEN3_MOE, "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768}
QWEN3_30B |= {"num_hidden_layers": 48, "num_attention_heads": 32}
QWEN3_235B = {**QWEN3_MOE, "hidden_size": 4096, "intermediate_size": 12_288, "moe_intermediate_size": 1536}
QWEN3_235B |= {"num_hidden_layers": 94, "num_attention_heads": 64}
MOONLIGHT = {**DEEPSEEK, "vocab_size": 163_840, "hidden_size": 2048, "intermediate_size": 11_264}
MOONLIGHT |= {"moe_intermediate_size": 1408, "num_hidden_layers": 27, "first_k_dense_replace": 1, "q_lora_rank": None}
MOONLIGHT |= {"num_attention_heads": 16, "num_key_value_heads": 16, "n_shared_experts": 2, "n_routed_experts": 64}
MOONLIGHT |= {"num_experts_per_tok": 6, "n_group": 1, "topk_group": 1, "max_position_embeddings": 8192}
DEEPSEEK_V3 = {**DEEPSEEK, "vocab_size": 129_280, "hidden_size": 7168, "intermediate_size": 18_432}
DEEPSEEK_V3 |= {"moe_intermediate_size": 2048, "num_hidden_layers": 61, "first_k_dense_replace": 3, "q_lora_rank": 1536}
DEEPSEEK_V3 |= {"num_attention_heads": 128, "num_key_value_heads": 128, "n_shared_experts": 1, "n_routed_experts": 256}
DEEPSEEK_V3 |= {"num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "max_position_embeddings": 163_840}
QWEN3_5_9B = {**QWEN3_5, "hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 32}
QWEN3_5_9B |= {"num_key_value_heads": 4}
QWEN3_5_35B = {**QWEN3_5, "hidden_size": 2048, "num_hidden_layers": 40, "num_key_value_heads": 2, "num_experts": 256}
QWEN3_5_35B |= {"num_experts_per_tok": 8, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}


def _with_vision(model_type: str, architecture: str, text: dict[str, Any]) -> dict[str, Any]:
    vision = {**QWEN3_5_VISION, "out_hidden_size": text["hidden_size"]}
    return {
        "model_type": model_type,
        "architectures": [architecture],
        "text_config": text,
        "vision_config": vision,
        "tie_word_embeddings": False,
    }


ARCHITECTURES: dict[str, dict[str, Any]] = {
    "meta-llama/Llama-3.1-8B-Instruct": LLAMA_8B,
    "meta-llama/Llama-3.3-70B-Instruct": LLAMA_70B,
    "Qwen/Qwen3-8B": QWEN3_8B,
    "Qwen/Qwen3-8B-Base": {**QWEN3_8B, "max_position_embeddings": 32_768},
    "Qwen/Qwen3-32B": QWEN3_32B,
    "Qwen/Qwen3-30B-A3B": QWEN3_30B,
    "Qwen/Qwen3-235B-A22B": QWEN3_235B,
    "moonshotai/Moonlight-16B-A3B-Instruct": MOONLIGHT,
    "deepseek-ai/DeepSeek-V3": DEEPSEEK_V3,
    "Qwen/Qwen3.5-9B-Base": _with_vision("qwen3_5", "Qwen3_5ForConditionalGeneration", QWEN3_5_9B),
    "Qwen/Qwen3.5-35B-A3B-Base": _with_vision("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration", QWEN3_5_35B),
}
"""Hub name -> arguments of transformers' AutoConfig.for_model."""
