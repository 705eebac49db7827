"""`ep.convert` against what transformers saves, and holds in memory, of tiny models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="needs the extra families")

import jax
import numpy as np
import torch
import transformers
from safetensors.torch import load_file

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
V3 = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 0}
MODELS = {
    "mixtral": ("Mixtral", {"num_local_experts": 4}),
    "qwen3_moe": ("Qwen3Moe", {"num_experts": 4, "moe_intermediate_size": 24}),
    "olmoe": ("Olmoe", {"num_experts": 4}),
    "deepseek_v3": ("DeepseekV3", MLA | V3 | {"v_head_dim": 8, "moe_intermediate_size": 24}),
    "gpt_oss": ("GptOss", {"num_local_experts": 4}),
}
LAYER = 1


def is_of_the_block(name: str) -> bool:
    inside = any(part in name for part in (".experts.", ".router.", ".gate."))
    return f".layers.{LAYER}." in name and inside


@pytest.mark.parametrize("family", MODELS)
def test_names_and_values_are_those_of_saved_models(family: str, tmp_path: Path) -> None:
    prefix, values = MODELS[family]
    config = getattr(transformers, f"{prefix}Config")(**SIZES, **values)
    model: Any = getattr(transformers, f"{prefix}ForCausalLM")(config).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    saved: dict[str, Any] = {}
    for path in tmp_path.glob("*.safetensors"):
        saved |= load_file(path)
    params = ep.convert.from_hf(family, saved, layer=LAYER)
    in_memory = ep.convert.from_hf(family, model.state_dict(), layer=LAYER)
    jax.tree.map(np.testing.assert_array_equal, params, in_memory)
    bias = ep.convert.expert_bias(family, saved, LAYER) if family == "deepseek_v3" else None
    back = ep.convert.to_hf(family, params, LAYER, expert_bias=bias)
    assert {*back} == {name for name in saved if is_of_the_block(name)}
    for name, array in back.items():
        np.testing.assert_array_equal(array.view(np.uint8), saved[name].view(torch.uint8).numpy())
