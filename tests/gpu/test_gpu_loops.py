"""Microbatches in the orders of trainers, and the stages of a pipeline, on GPUs."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import microbatches
import numpy as np
import pytest
from gpu.jobs.layouts import TRANSPORT
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import ep_runtime as ep

COUNT, TOKENS, HIDDEN, WIDTH = 4, 256, 128, 64
_AGAIN = 20


def group_of(session: ep.Session, name: str, mesh: Mesh) -> ep.Group:
    return session.create_group(
        name,
        mesh,
        ep_axis="ep",
        transport=TRANSPORT,
        num_experts=8,
        hidden_size=HIDDEN,
        max_tokens_per_rank=COUNT * TOKENS,
        max_top_k=2,
        max_token_dtype="float32",
        op_timeout_s=60.0,
    )


def assert_close(got: Any, want: Any) -> None:
    for mine, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        mine, theirs = (np.asarray(each, np.float64) for each in (mine, theirs))
        scale = max(np.abs(theirs).max(), 1e-30)
        np.testing.assert_allclose(mine / scale, theirs / scale, rtol=0, atol=1e-4)


@pytest.mark.parametrize("schedule", microbatches.SCHEDULES, ids=lambda each: each.__name__)
def test_microbatches_add_up_to_the_batch(
    session: ep.Session, gpus: list[Any], schedule: microbatches.Schedule
) -> None:
    group = group_of(session, "microbatches", Mesh(np.array(gpus), ("ep",)))
    layers = [group.register_layer(f"layer{i}", top_k=2, in_flight=2) for i in range(2)]
    params = [ep.init_moe_params(jax.random.key(i), x, WIDTH) for i, x in enumerate(layers)]
    batches = jax.random.normal(jax.random.key(7), (COUNT, TOKENS, HIDDEN))
    batches = jax.device_put(batches, NamedSharding(group.mesh, PartitionSpec(None, "ep")))
    with jax.default_matmul_precision("highest"):
        want = jax.jit(functools.partial(microbatches.at_once, layers))(params, batches)
        run = jax.jit(functools.partial(schedule, layers))
        got = jax.block_until_ready(run(params, batches))
        for _ in range(_AGAIN):
            again = run(params, batches)
    assert_close(got, want)
    jax.tree.map(np.testing.assert_array_equal, jax.block_until_ready(again), got)


@pytest.mark.usefixtures("several_gpus")
def test_stages_give_what_each_gives_alone(session: ep.Session, gpus: list[Any]) -> None:
    devices = np.array(gpus).reshape(2, -1)
    group = group_of(session, "stages", Mesh(devices, ("stage", "ep")))
    stack = group.register_layer_stack("moe", 2, top_k=2)
    each = [ep.init_moe_params(key, stack[0], WIDTH) for key in jax.random.split(jax.random.key(0))]
    params = jax.tree.map(lambda *leaves: jnp.stack(leaves), *each)
    x = jax.random.normal(jax.random.key(1), (2, TOKENS, HIDDEN))
    x = jax.device_put(x, NamedSharding(group.mesh, PartitionSpec("stage", "ep")))

    def stage(i: Any, x: Any, own: Any) -> Any:
        y, pull = jax.vjp(lambda x, own: ep.moe(stack[i], x, own)[0], x, own)
        return y, pull(jnp.cos(y))

    numbers = jnp.arange(2, dtype=jnp.int32)
    stages = jax.jit(jax.vmap(stage, spmd_axis_name="stage"))
    with jax.default_matmul_precision("highest"):
        got = jax.block_until_ready(stages(numbers, x, params))
        for _ in range(_AGAIN):
            again = stages(numbers, x, params)
        alone = jax.jit(stage)
        apart = [alone(numbers[i], x[i], each[i]) for i in range(2)]
    assert_close(got, jax.tree.map(lambda *leaves: jnp.stack(leaves), *map(jax.device_get, apart)))
    jax.tree.map(np.testing.assert_array_equal, jax.block_until_ready(again), got)
