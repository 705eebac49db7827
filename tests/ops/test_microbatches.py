"""A batch in microbatches, in every order that trainers run them, equals the batch at once."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import fakes
import jax
import microbatches
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import ep_runtime as ep

COUNT, TOKENS, HIDDEN = 3, 32, 16


@pytest.fixture(scope="module")
def plain() -> Iterator[tuple[Any, Any, Any]]:
    """(layers, operands, what the batch at once gives)."""
    group = fakes.local_group(
        {"ep": 4},
        transport="memfd",
        debug=True,
        num_experts=8,
        hidden_size=HIDDEN,
        max_tokens_per_rank=COUNT * TOKENS // 4,
        max_top_k=2,
    )
    layers = [group.register_layer(f"layer{i}", top_k=2, in_flight=2) for i in range(2)]
    params = [ep.init_moe_params(jax.random.key(i), each, 8) for i, each in enumerate(layers)]
    batches = jax.random.normal(jax.random.key(7), (COUNT, TOKENS, HIDDEN))
    batches = jax.device_put(batches, NamedSharding(group.mesh, PartitionSpec(None, "ep")))
    want = jax.jit(functools.partial(microbatches.at_once, layers))(params, batches)
    yield layers, (params, batches), jax.device_get(want)
    group.close()


@pytest.mark.parametrize("schedule", microbatches.SCHEDULES, ids=lambda each: each.__name__)
def test_microbatches_add_up_to_the_batch(
    plain: tuple[Any, Any, Any], schedule: microbatches.Schedule
) -> None:
    layers, operands, want = plain
    run = jax.jit(functools.partial(schedule, layers))
    got = jax.device_get(run(*operands))
    for mine, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-6, atol=1e-6)
    for _ in range(5):
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(run(*operands)), got)


def test_two_microbatches_in_flight_take_both_handles(plain: tuple[Any, Any, Any]) -> None:
    layers, operands, _ = plain
    run = functools.partial(microbatches.one_forward_one_backward, layers)
    text = jax.jit(run).lower(*operands).as_text()
    handles = [f"handle = {number} : i64" in text for number in (0, 1, 2)]
    assert handles == [True, True, False]
