"""Compares `ep.convert` with transformers' files and arrays in memory, for tiny models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="needs the extra families")

import jax
import numpy as np
import torch
import transformers

import ep_runtime as ep

pytestmark = pytest.mark.transformers

SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts_per_tok": 2,
    "eos_token_id": None,
    "pad_token_id": None,
}
MLA = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8}
MLA |= {"v_head_dim": 8}
INNER = {"moe_intermediate_size": 24}
V3 = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 0, **INNER}
LINEAR = {"layer_types": ["linear_attention", "full_attention"], "mlp_layer_types": ["sparse"] * 2}
# By family: the prefix of transformers' classes, and values of the config.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {"num_local_experts": 4}),
    "minimax_m2": ("MiniMaxM2", {"num_local_experts": 4}),
    "phimoe": ("Phimoe", {"num_local_experts": 4}),
    "granitemoe": ("GraniteMoe", {"num_local_experts": 4}),
    "qwen2_moe": ("Qwen2Moe", {"num_experts": 4, "shared_expert_intermediate_size": 8, **INNER}),
    "qwen3_moe": ("Qwen3Moe", {"num_experts": 4, **INNER}),
    "olmoe": ("Olmoe", {"num_experts": 4}),
    "hunyuan_v1_moe": ("HunYuanMoEV1", {"num_experts": 4, "moe_topk": 2}),
    "deepseek_v2": ("DeepseekV2", MLA | V3),
    "deepseek_v3": ("DeepseekV3", MLA | V3),
    "glm4_moe": ("Glm4Moe", V3),
    "dots1": ("Dots1", {**V3, "n_shared_experts": 1}),
    "mimo_v2_flash": ("MiMoV2Flash", {**V3, "mlp_layer_types": ["sparse"] * 2}),
    "kimi_linear": ("KimiLinear", {**MLA, **LINEAR, "num_local_experts": 4, **INNER}),
    "lfm2_moe": (
        "Lfm2Moe",
        {"num_experts": 4, "num_dense_layers": 0, "layer_types": ["full_attention"] * 2, **INNER},
    ),
    "ernie4_5_moe": (
        "Ernie4_5_Moe",
        {"moe_num_experts": 4, "moe_k": 2, "moe_layer_start_index": 0, **INNER},
    ),
    "longcat_flash": (
        "LongcatFlash",
        {**MLA, "n_routed_experts": 4, "zero_expert_num": 2, "moe_topk": 2}
        | {"expert_ffn_hidden_size": 24, "ffn_hidden_size": 24, "num_hidden_layers": 4},
    ),
    "llama4_text": (
        "Llama4",
        {"num_local_experts": 4, "interleave_moe_layer_step": 1, "intermediate_size_mlp": 24},
    ),
    "gemma4_text": (
        "Gemma4",
        {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, **INNER},
    ),
    "gpt_oss": ("GptOss", {"num_local_experts": 4}),
}
LAYER = 1


BIASES = ("e_score_correction_bias", ".expert_bias")
# Other weights of a model's block, which convert leaves to the caller.
OTHERS = ("shared", "router.scale", "router.per_expert_scale")
# transformers saves weights of LongCat's idle experts, which no release has.
OTHERS += (".experts.4.", ".experts.5.")


def is_of_the_block(name: str) -> bool:
    parts = (".experts.", ".router.", ".gate.", ".block_sparse_moe.", *BIASES)
    inside = any(part in name for part in parts) and not any(part in name for part in OTHERS)
    return f".layers.{LAYER}." in name and inside


@pytest.mark.parametrize("family", MODELS)
def test_names_and_values_are_those_of_saved_models(family: str, tmp_path: Path) -> None:
    prefix, values = MODELS[family]
    whole, text = f"{prefix}Config", f"{prefix}TextConfig"
    kind = getattr(transformers, text if hasattr(transformers, text) else whole)
    config = kind(**{**SIZES, **values})
    model: Any = getattr(transformers, f"{prefix}ForCausalLM")(config).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    saved = ep.convert.open_files(tmp_path)
    params = ep.convert.from_hf(family, saved, layer=LAYER)
    in_memory = ep.convert.from_hf(family, model.state_dict(), layer=LAYER)
    jax.tree.map(np.testing.assert_array_equal, params, in_memory)
    mine = {name for name in saved if is_of_the_block(name)}
    has_bias = any(name.endswith(BIASES) for name in mine)
    bias = ep.convert.expert_bias(family, saved, LAYER) if has_bias else None
    back = ep.convert.to_hf(family, params, LAYER, expert_bias=bias)
    assert {*back} == mine
    for name, array in back.items():
        np.testing.assert_array_equal(array.view(np.uint8), saved[name].view(np.uint8))
