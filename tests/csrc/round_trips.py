"""A small group of 8 ranks and the program that most tests run: every row goes and comes back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from native_group import NativeGroup

TOKENS, HIDDEN, TOP_K, EXPERTS = 8, 64, 2, 16


def open_group(**settings: Any) -> NativeGroup:
    values = {
        "num_experts": EXPERTS,
        "hidden_size": HIDDEN,
        "max_tokens_per_rank": TOKENS,
        "max_token_dtype": "float32",
        "top_k": TOP_K,
    }
    return NativeGroup({"ep": 8}, **(values | settings))


def host_inputs(world_size: int = 8, hidden: int = HIDDEN) -> tuple[Any, Any]:
    """topk_idx of distinct experts, and tokens whose sums are exact in fp32."""
    rng = np.random.default_rng(0)
    idx = np.argsort(rng.random((world_size, TOKENS, EXPERTS)), -1)[..., :TOP_K]
    x = rng.integers(-8, 8, (world_size, TOKENS, hidden)).astype(np.float32)
    return idx.astype(np.int32), x


def inputs(group: NativeGroup) -> tuple[jax.Array, jax.Array]:
    """Places `host_inputs` on the group's devices."""
    idx, x = host_inputs(group.spec.world_size, group.spec.hidden_size)
    return group.put(idx), group.put(x)


def round_trip(group: NativeGroup, idx: jax.Array, x: jax.Array, **options: Any) -> jax.Array:
    """Sends every slot's row and brings it back: x times TOP_K, scaled back to x."""
    plan = group.prepare(idx, **options)
    recv, _ = group.dispatch(x, None, plan, **options)
    return group.combine(recv, None, plan, **options) / TOP_K


@contextlib.contextmanager
def opened(**settings: Any) -> Iterator[tuple[NativeGroup, Any, jax.Array, jax.Array]]:
    """A group, the program of its `round_trip`, and inputs for it."""
    with open_group(**settings) as group:
        yield group, group.sharded(lambda idx, x: round_trip(group, idx, x)), *inputs(group)


def expect(got: jax.Array, want: Any) -> None:
    """Compares values on the devices that this process has."""
    want = np.asarray(want)
    for shard in got.addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), want[shard.index])
