"""Data of `bench train`: words, and experts if no router chooses them. Imports no JAX."""

from __future__ import annotations

from typing import Any

import numpy as np

from ep_runtime_bench.base import routing
from ep_runtime_bench.base.train_cases import Model

BATCHES = 4  # used again in the same order


def batches(model: Model, groups: int) -> list[Any]:
    """Returns batches int32 [sequences, S + 1] of few words, so that a model can learn."""
    rng, shape = np.random.default_rng(0), (groups * model.batch, model.sequence + 1)
    words = min(256, model.vocabulary)
    return [rng.integers(0, words, shape).astype(np.int32) for _ in range(BATCHES)]


def expert_ids(model: Model, name: str, ranks: int, groups: int) -> Any:
    """Returns experts int32 [sequences, S, K] of that routing; None if the router chooses them.

    "double": the first rank's experts get twice their even share of the slots.

    Args:
        ranks: number of ranks of the EP group.
        groups: number of devices with different tokens.
    """
    if name == "router":
        return None
    tokens = model.case.tokens * groups
    if name == "double":
        share = np.ones(model.num_experts)
        share[: model.num_experts // ranks] = 2 * (ranks - 1) / max(ranks - 2, 0.1)
        idx = routing.drawn(np.random.default_rng(0), share, tokens, model.top_k)
    else:
        idx = routing.topk_idx(name, tokens, model.num_experts, model.top_k)
    return idx.reshape(groups * model.batch, model.sequence, model.top_k)
