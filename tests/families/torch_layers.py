"""MoE blocks of transformers with the weights of `random_block.py`; needs the extra `families`."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import transformers
from random_block import EXPERTS, HIDDEN, INNER

Array = Any


@dataclasses.dataclass(frozen=True)
class Layer:
    """Names the module of transformers that has a model's block.

    Attributes:
        module: of transformers.models.
        block: class of the block, or what it is made of.
        config: class of the config.
        experts, inner: what the config calls E and M.
        more: other values of the config.
        arguments: of the block, behind the config.
    """

    module: str
    block: str
    config: str
    experts: str = "num_local_experts"
    inner: str = "moe_intermediate_size"
    more: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    arguments: tuple[Any, ...] = ()


V3 = {"experts": "n_routed_experts"}
V4_SIZES = {"num_hidden_layers": 2, "vocab_size": 8, "num_hash_layers": 1}
V4 = Layer(
    "deepseek_v4",
    "DeepseekV4SparseMoeBlock",
    "DeepseekV4Config",
    more={**V4_SIZES, "mlp_layer_types": ["hash_moe", "moe"]},
    **V3,
)

LAYERS: dict[str, Layer] = {
    "Mixtral": Layer(
        "mixtral", "MixtralSparseMoeBlock", "MixtralConfig", inner="intermediate_size"
    ),
    "Granite-MoE": Layer(
        "granitemoe", "GraniteMoeMoE", "GraniteMoeConfig", inner="intermediate_size"
    ),
    "Hunyuan": Layer(
        "hunyuan_v1_moe",
        "HunYuanMoEV1Moe",
        "HunYuanMoEV1Config",
        "num_experts",
        "intermediate_size",
    ),
    "Qwen2-MoE": Layer("qwen2_moe", "Qwen2MoeSparseMoeBlock", "Qwen2MoeConfig", "num_experts"),
    "Qwen3-MoE": Layer("qwen3_moe", "Qwen3MoeSparseMoeBlock", "Qwen3MoeConfig", "num_experts"),
    "OLMoE": Layer(
        "olmoe", "OlmoeSparseMoeBlock", "OlmoeConfig", "num_experts", "intermediate_size"
    ),
    "DBRX": Layer("dbrx", "DbrxFFN", "DbrxConfig"),
    "gpt-oss": Layer("gpt_oss", "GptOssMLP", "GptOssConfig", inner="intermediate_size"),
    "DeepSeek-V2": Layer("deepseek_v2", "DeepseekV2Moe", "DeepseekV2Config", **V3),
    "DeepSeek-V3": Layer("deepseek_v3", "DeepseekV3MoE", "DeepseekV3Config", **V3),
    "Kimi-K2": Layer("deepseek_v3", "DeepseekV3MoE", "DeepseekV3Config", **V3),
    "Kimi-Linear": Layer("kimi_linear", "KimiLinearMoE", "KimiLinearConfig"),
    "GLM-4.5": Layer("glm4_moe", "Glm4MoeMoE", "Glm4MoeConfig", **V3),
    "MiMo-V2": Layer("mimo_v2_flash", "MiMoV2FlashMoE", "MiMoV2FlashConfig", **V3),
    "dots1": Layer("dots1", "Dots1MoE", "Dots1Config", more={"n_shared_experts": 1}, **V3),
    "DeepSeek-V4": dataclasses.replace(V4, arguments=(1,)),
    "DeepSeek-V4's hashed layers": dataclasses.replace(V4, arguments=(0,)),
    "MiniMax-M2": Layer(
        "minimax_m2", "MiniMaxM2SparseMoeBlock", "MiniMaxM2Config", inner="intermediate_size"
    ),
    "LFM2": Layer("lfm2_moe", "Lfm2MoeSparseMoeBlock", "Lfm2MoeConfig", "num_experts"),
    "Ernie-4.5": Layer(
        "ernie4_5_moe", "Ernie4_5_MoeSparseMoeBlock", "Ernie4_5_MoeConfig", "moe_num_experts"
    ),
    "Llama-4": Layer("llama4", "Llama4TextMoe", "Llama4TextConfig", inner="intermediate_size"),
    "Phi-3.5": Layer("phimoe", "PhimoeSparseMoeBlock", "PhimoeConfig", inner="intermediate_size"),
    "LongCat": Layer(
        "longcat_flash",
        "LongcatFlashMoE",
        "LongcatFlashConfig",
        "n_routed_experts",
        "expert_ffn_hidden_size",
    ),
    "Gemma-4": Layer(
        "gemma4", "Gemma4TextRouter, Gemma4TextExperts", "Gemma4TextConfig", "num_experts"
    ),
}


def config_of(layer: Layer, values: Mapping[str, Any]) -> Any:
    """Returns the model's config; for DBRX the config of its block."""
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    sizes = {"hidden_size": HIDDEN, layer.experts: EXPERTS, layer.inner: INNER}
    if layer.module == "dbrx":
        ffn = {"hidden_size": HIDDEN, "moe_num_experts": EXPERTS, "ffn_hidden_size": INNER}
        return transformers.DbrxConfig(d_model=HIDDEN, ffn_config={**ffn, **values})
    config = getattr(transformers, layer.config)(**{**heads, **sizes, **layer.more, **values})
    config._experts_implementation = "eager"
    return config


def block_of(layer: Layer, config: Any, w: SimpleNamespace) -> torch.nn.Module:
    """The block in evaluation with the weights `w`, and zeros in its shared experts."""
    module = importlib.import_module(f"transformers.models.{layer.module}.modeling_{layer.module}")
    made = GemmaBlock if layer.module == "gemma4" else getattr(module, layer.block)
    block = made(config, *layer.arguments).float().eval()
    arrays = of_gpt_oss(w) if layer.module == "gpt_oss" else of_most(w)
    if layer.module == "llama4":  # [in, out]
        arrays |= {name: arrays[name].swapaxes(1, 2) for name in STACKED}
    with torch.no_grad():
        for name, tensor in [*block.named_parameters(), *block.named_buffers()]:
            if "shared" in name:
                tensor.zero_()
                continue
            array = arrays[name]
            if name == "experts.gate_up_proj" and len(tensor) > len(array):
                tensor[len(array) :] = 0  # LongCat's experts without weights
                tensor = tensor[: len(array)]
            tensor.copy_(torch.from_numpy(np.ascontiguousarray(array)).reshape(tensor.shape))
    return block


STACKED = ("experts.gate_up_proj", "experts.down_proj")
ROUTERS = (
    *("gate.weight", "gate.wg.weight", "router.weight", "router.layer.weight"),
    *("router.classifier.weight", "router.proj.weight"),
)
BIASES = (
    *("expert_bias", "e_score_correction_bias", "gate.e_score_correction_bias"),
    *("gate.moe_statics.e_score_correction_bias", "router.e_score_correction_bias"),
)


def of_most(w: SimpleNamespace) -> dict[str, Array]:
    """Returns arrays by names of parameters and buffers; `linear` keeps [out, in]."""
    return {
        "experts.gate_up_proj": np.concatenate([w.gate, w.up], axis=-1).swapaxes(1, 2),
        "experts.down_proj": w.down.swapaxes(1, 2),
        **dict.fromkeys(ROUTERS, w.router.T),
        **dict.fromkeys(BIASES, w.expert_bias),
        "gate.tid2eid": w.tid2eid,
        "experts.mlp.w1": w.gate.swapaxes(1, 2),
        "experts.mlp.v1": w.up.swapaxes(1, 2),
        "experts.mlp.w2": w.down,
        "router.scale": w.scale,
        "router.per_expert_scale": w.per_expert_scale,
    }


def of_gpt_oss(w: SimpleNamespace) -> dict[str, Array]:
    """Interleaves the columns of gate and up."""
    return {
        "router.weight": w.router.T,
        "router.bias": w.router_bias,
        "experts.gate_up_proj": np.stack([w.gate, w.up], -1).reshape(EXPERTS, HIDDEN, -1),
        "experts.gate_up_proj_bias": np.stack([w.gate_bias, w.up_bias], -1),
        "experts.down_proj": w.down,
        "experts.down_proj_bias": w.down_bias,
    }


class GemmaBlock(torch.nn.Module):
    """Runs router and experts as Gemma-4's decoder layer does."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        from transformers.models.gemma4 import modeling_gemma4

        self.router = modeling_gemma4.Gemma4TextRouter(config)
        self.experts = modeling_gemma4.Gemma4TextExperts(config)

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        _, weights, index = self.router(residual[0])
        return self.experts(x[0], index, weights)


def run(name: str, block: torch.nn.Module, w: SimpleNamespace) -> Array:
    """Returns y [T, H] of w.x as one sequence."""
    more = {
        "DeepSeek-V4's hashed layers": lambda: [torch.from_numpy(w.input_ids)[None]],
        "Gemma-4": lambda: [torch.from_numpy(w.residual)[None]],
    }
    with torch.no_grad():
        y = block(torch.from_numpy(w.x)[None], *more.get(name, list)())
    return (y[0] if isinstance(y, tuple) else y).reshape(w.x.shape).numpy()
