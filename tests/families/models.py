"""Lists every model of docs/families.md with its oracle and values of its Hugging Face config.

The sizes that all share are those of `random_block.py`; a config holds what its router and experts
read.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
from collections.abc import Callable
from typing import Any

import doc_pages
import jax
import oracles
import random_block

PAGE = doc_pages.ROOT / "docs/families.md"
ZERO_EXPERTS = 8


@dataclasses.dataclass(frozen=True)
class Model:
    """One model.

    Attributes:
        oracle: of `oracles.py`.
        configs: values of the config, under its own names.
        top_k: the name of the one that is K.
        biases: whether router and experts have biases.
    """

    oracle: Callable[..., Any]
    configs: tuple[dict[str, Any], ...]
    top_k: str = "num_experts_per_tok"
    biases: bool = False


def softmax(norms: tuple[bool, ...] = (), **values: Any) -> tuple[dict[str, Any], ...]:
    """Returns a config per value of norm_topk_prob."""
    base = {"num_experts_per_tok": 4, **values}
    return tuple(base | {"norm_topk_prob": norm} for norm in norms) or (base,)


def grouped(*groups: tuple[int, int, int], norms: tuple[bool, ...] = (True,), scale: float) -> Any:
    """Returns configs of DeepSeek-V3's router by (n_group, topk_group, num_experts_per_tok)."""
    return tuple(
        {
            "n_group": n_group,
            "topk_group": topk_group,
            "num_experts_per_tok": top_k,
            "norm_topk_prob": norm,
            "routed_scaling_factor": scale,
        }
        for (n_group, topk_group, top_k), norm in itertools.product(groups, norms)
    )


V2 = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 16.0, "num_experts_per_tok": 6}
V4 = {"num_experts_per_tok": 6, "routed_scaling_factor": 1.5, "swiglu_limit": 10.0}
V4 |= {"scoring_func": "sqrtsoftplus"}
LFM2 = {"use_expert_bias": True, "routed_scaling_factor": 1.5}
ERNIE = {"moe_k": 6, "moe_norm_min": 1e-12}
LONGCAT = {"moe_topk": 6, "n_routed_experts": random_block.EXPERTS, "zero_expert_num": ZERO_EXPERTS}
GEMMA4 = {"top_k_experts": 4, "rms_norm_eps": 1e-6, "hidden_size": random_block.HIDDEN}

MODELS: dict[str, Model] = {
    "Mixtral": Model(oracles.mixtral, softmax(num_experts_per_tok=2)),
    "Granite-MoE": Model(oracles.granite, softmax()),
    "Hunyuan": Model(oracles.hunyuan, ({"moe_topk": 4},), "moe_topk"),
    "Qwen2-MoE": Model(oracles.qwen, softmax((False,))),
    "Qwen3-MoE": Model(oracles.qwen, softmax((True, False))),
    "OLMoE": Model(oracles.qwen, softmax((False, True))),
    "DBRX": Model(
        oracles.dbrx,
        tuple({"moe_top_k": 4, "moe_normalize_expert_weights": norm} for norm in (1.0, None)),
        "moe_top_k",
    ),
    "gpt-oss": Model(oracles.gpt_oss, softmax(swiglu_limit=7.0), biases=True),
    "DeepSeek-V2": Model(
        oracles.deepseek_v2,
        tuple(V2 | {"topk_method": name} for name in ("greedy", "group_limited_greedy")),
    ),
    "DeepSeek-V3": Model(
        oracles.deepseek_v3,
        # The released config, groups whose number does not divide K, and a single group of several.
        grouped((8, 4, 8), (8, 4, 6), (4, 1, 4), (1, 1, 4), norms=(True, False), scale=2.5),
    ),
    "Kimi-K2": Model(oracles.deepseek_v3, grouped((1, 1, 8), scale=2.827)),
    "Kimi-Linear": Model(oracles.deepseek_v3, grouped((1, 1, 8), scale=2.446)),
    "GLM-4.5": Model(oracles.deepseek_v3, grouped((1, 1, 8), scale=2.5)),
    "MiMo-V2": Model(oracles.deepseek_v3, grouped((1, 1, 8), scale=1.0)),
    "dots1": Model(oracles.deepseek_v3, grouped((1, 1, 6), scale=2.5)),
    "DeepSeek-V4": Model(oracles.deepseek_v4, (V4,)),
    "DeepSeek-V4's hashed layers": Model(oracles.deepseek_v4_hash, (V4,)),
    "MiniMax-M2": Model(oracles.minimax_m2, softmax()),
    "LFM2": Model(
        oracles.lfm2,
        (*softmax((True, False), **LFM2), *softmax((True,), **LFM2 | {"use_expert_bias": False})),
    ),
    "Ernie-4.5": Model(oracles.ernie, (ERNIE,), "moe_k"),
    "Llama-4": Model(oracles.llama4, (*softmax(num_experts_per_tok=1), *softmax())),
    "Phi-3.5": Model(
        oracles.phimoe,
        # The released config, and a jitter so large that several experts are near the best.
        tuple({"num_experts_per_tok": 2, "router_jitter_noise": noise} for noise in (0.01, 0.3)),
    ),
    "LongCat": Model(oracles.longcat, (LONGCAT | {"routed_scaling_factor": 6.0},), "moe_topk"),
    "Gemma-4": Model(oracles.gemma4, (GEMMA4,), "top_k_experts"),
}
_numbers = itertools.count()  # names of layers, because a name is registered once
CASES = [(name, number) for name, model in MODELS.items() for number in range(len(model.configs))]


def functions_of_the_page() -> dict[str, Callable[..., Any]]:
    """Returns the functions that the page's python blocks define, by the models of its table."""
    defined: dict[str, Any] = {}
    for block in doc_pages.blocks(PAGE):
        if block.language == "python" and block.runs:
            code = compile("\n" * (block.line - 1) + block.code, str(PAGE), "exec")
            exec(code, defined)
    return {name: defined[function] for name, (_, function) in rows_of_the_page().items()}


def rows_of_the_page() -> dict[str, tuple[str, str]]:
    """(model_type, function) of each model in its table."""
    rows = doc_pages.table(PAGE, "# Families of models")
    return {name: (kind.strip("`"), function.strip("`")) for name, kind, function in rows}


def lines_of(function: Callable[..., Any]) -> int:
    """Returns how many lines the function has on the page, below its first."""
    below = PAGE.read_text(encoding="utf-8").splitlines()[function.__code__.co_firstlineno :]
    return next(number for number, line in enumerate(below) if not line.startswith(" "))


class Case:
    """A model with one config, on random weights.

    Attributes:
        w: the weights.
    """

    def __init__(self, name: str, function: Callable[..., Any], config: Any) -> None:
        self._model, self._name, self._function, self._config = MODELS[name], name, function, config
        self._top_k = getattr(config, self._model.top_k)
        more = getattr(config, "zero_expert_num", 0)
        self.w = random_block.draw(self._top_k, extra_experts=more, biases=self._model.biases)

    def oracle(self) -> Any:
        """Computes y in plain NumPy."""
        w = random_block.wide(self.w)
        return self._model.oracle(w.x, w, self._config)

    def run(self, group: Any) -> Any:
        """Computes y with the page's function, which receives further inputs by name."""
        layer = group.register_layer(f"{self._name}/{next(_numbers)}", top_k=self._top_k)
        names = [*inspect.signature(self._function).parameters][4:]
        params = random_block.params(self.w, own_router="router" in names)

        @jax.jit
        def run(x: Any, params: Any, more: list[Any]) -> Any:
            return self._function(layer, x, params, self._config, *more)[0]

        return run(self.w.x, params, [getattr(self.w, name) for name in names])
