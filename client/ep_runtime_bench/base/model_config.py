"""Reads a model's MoE layer from its Hugging Face config.json, for `bench moe --config`.

Imports no JAX.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ep_runtime.errors import InvalidArgumentError
from ep_runtime_bench.base.moe_cases import Case
from ep_runtime_client.ops.routing import families

# Names of each size in configs; the first name in a config is used.
_NAMES: Mapping[str, tuple[str, ...]] = {
    "hidden": ("hidden_size", "d_model"),
    "inner": (
        *("moe_intermediate_size", "expert_intermediate_size", "expert_ffn_hidden_size"),
        *("ffn_hidden_size", "intermediate_size"),
    ),
    "num_experts": ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    "top_k": (
        *("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "moe_top_k"),
        "top_k_experts",
    ),
}


def read(path: str) -> dict[str, Any]:
    """Returns the options of a config.json about experts, with the file's model_type.

    Raises:
        InvalidArgumentError: not a JSON object, or a router that `ep.Router.from_hf` does not
            support.
    """
    try:
        config = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _wrong(f"must be a readable config.json, got {path}: {error}") from error
    if not isinstance(config, dict):
        raise _wrong(f"must be a JSON object, got a {type(config).__name__} in {path}")
    families.arguments_of(config)
    whole = {**config, **families.part_with_experts(config), "model_type": config["model_type"]}
    activation_of(whole)
    return whole


def layer_of(config: Mapping[str, Any], tokens: int) -> Case:
    """Returns the sizes of its MoE layers.

    Raises:
        InvalidArgumentError: a size is missing, or differs between layers.
    """
    return Case(tokens=tokens, **{name: _size(config, names) for name, names in _NAMES.items()})


def activation_of(config: Mapping[str, Any]) -> str:
    """Returns the activation of its experts, by its name in `ep.moe`.

    Raises:
        InvalidArgumentError: `ep.moe` does not have the activation.
    """
    names = ("hidden_act", "hidden_activation", "ffn_act_fn")
    found = next((config[name] for name in names if config.get(name) is not None), "silu")
    found = found["name"] if isinstance(found, Mapping) else found  # DBRX has a dict
    known = {"silu": "silu", "swish": "silu", "relu": "relu"}
    known |= dict.fromkeys(("gelu", "gelu_new", "gelu_pytorch_tanh"), "gelu")
    if found not in known:
        raise _wrong(f"must have an activation of {', '.join(known)}, got {found!r}")
    return known[found]


def _size(config: Mapping[str, Any], names: tuple[str, ...]) -> int:
    found = next((name for name in names if config.get(name) is not None), None)
    if found is None:
        raise _wrong(f"must have one of {', '.join(names)}, got none of them")
    value = config[found]
    sizes = set(value) if isinstance(value, list) else {value}  # Hunyuan lists every layer's
    size = sizes.pop() if len(sizes) == 1 else None
    if not isinstance(size, int) or size < 1:
        raise _wrong(f"must have one whole number as {found}, got {value}")
    return size


def _wrong(message: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"--config {message}", argument="config")
