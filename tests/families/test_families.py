"""Compares every function of docs/families.md with its model's formula in plain NumPy."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fakes
import models
import pytest
import random_block

import ep_runtime as ep

TOLERANCE = 1e-5  # f32 against f64
SHARES = ep.Router(use_pre_softmax=True, normalize_weights=False)
NORMALIZED = ep.Router(use_pre_softmax=True, normalize_weights=True)
# Routers of released models: the file holds the experts' part of their config.json.
RELEASED = {
    "Mixtral-8x7B": ep.Router(),
    "Qwen1.5-MoE": SHARES,
    "Qwen3-30B-A3B": NORMALIZED,
    "OLMoE-1B-7B": SHARES,
    "dbrx": NORMALIZED,
    "gpt-oss-120b": ep.Router(),
    "DeepSeek-V2": ep.Router("softmax", True, 8, 3, 1, None, 16.0),
    "DeepSeek-V3": ep.Router("sigmoid", False, 8, 4, 2, True, 2.5),
    "Kimi-K2": ep.Router("sigmoid", False, 1, 1, 2, True, 2.827),
    "GLM-4.5": ep.Router("sigmoid", False, 1, 1, 2, True, 2.5),
    "MiniMax-M2": ep.Router("sigmoid", normalize_weights=True),
    "Ernie-4.5": NORMALIZED,
    "Llama-4-Scout": ep.Router("sigmoid", normalize_weights=False),
    "granite-3.1-3b-a800m": ep.Router(),
}


def test_configs_of_released_models_are_taken_whole() -> None:
    configs = json.loads(Path(__file__).with_name("released.json").read_text(encoding="utf-8"))
    assert {name: ep.Router.from_hf(config) for name, config in configs.items()} == RELEASED


def test_the_page_lists_every_model(functions: dict[str, Callable[..., Any]]) -> None:
    assert [*functions] == [*models.MODELS]


@pytest.mark.parametrize(("name", "number"), models.CASES)
def test_a_model_equals_its_formula(
    group: fakes.LocalGroup, functions: dict[str, Callable[..., Any]], name: str, number: int
) -> None:
    values = models.MODELS[name].configs[number]
    config = SimpleNamespace(model_type=models.rows_of_the_page()[name][0], **values)
    case = models.Case(name, functions[name], config)
    assert random_block.error(case.run(group), case.oracle()) < TOLERANCE


def test_as_many_experts_and_choices_as_public_models_have(
    functions: dict[str, Callable[..., Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(random_block, "EXPERTS", 896)
    (values,) = models.grouped((1, 1, 16), scale=2.827)
    case = models.Case(
        "Kimi-K2", functions["Kimi-K2"], SimpleNamespace(model_type="kimi_k2", **values)
    )
    group = fakes.local_group(
        {"ep": 4},
        transport="memfd",
        num_experts=896,
        hidden_size=random_block.HIDDEN,
        max_tokens_per_rank=random_block.TOKENS // 4,
        max_top_k=16,
        max_token_dtype="float32",
    )
    try:
        assert random_block.error(case.run(group), case.oracle()) < TOLERANCE
    finally:
        group.close()


def test_a_router_is_made_from_objects_files_and_parts() -> None:
    v3 = ep.Router("sigmoid", False, 8, 4, 2, True, 2.5)
    assert ep.Router.from_hf({"model_type": "deepseek_v3"}) == v3
    kimi = {"moe_renormalize": True, "num_expert_group": 1, "topk_group": 1}
    kimi |= {"moe_router_activation_func": "sigmoid", "routed_scaling_factor": 2.446}
    got = ep.Router.from_hf(SimpleNamespace(model_type="kimi_linear", **kimi))
    assert got == ep.Router("sigmoid", False, 1, 1, 2, True, 2.446)
    whole = {"model_type": "dbrx", "ffn_config": {"moe_normalize_expert_weights": None}}
    assert ep.Router.from_hf(whole) == ep.Router(use_pre_softmax=True, normalize_weights=False)
    text = SimpleNamespace(model_type="llama4", text_config={"model_type": "llama4_text"})
    assert ep.Router.from_hf(text) == ep.Router("sigmoid", normalize_weights=False)


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({}, "with a model_type, got dict without one"),
        ({"model_type": "mixtrol"}, "model type 'mixtrol'; did you mean 'mixtral'"),
        ({"model_type": "mixtral", "scoring_func": "sigmoid"}, "scoring_func='sigmoid' of 'mix"),
        ({"model_type": "mixtral", "n_group": 8}, "n_group=8 of 'mixtral'"),
        ({"model_type": "deepseek_v3", "scoring_func": "tanh"}, "'tanh' .*, only 'sigmoid'"),
        ({"model_type": "deepseek_v2", "topk_method": "noaux_tc"}, "topk_method='noaux_tc'"),
        ({"model_type": "ernie4_5_moe", "moe_norm_min": 0.1}, "moe_norm_min=0.1"),
        ({"model_type": "phimoe"}, "route by your own code"),
    ],
)
def test_what_a_family_does_not_have_is_named(config: Any, text: str) -> None:
    with pytest.raises(ep.InvalidArgumentError, match=text):
        ep.Router.from_hf(config)
