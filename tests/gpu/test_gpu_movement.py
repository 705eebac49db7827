"""dispatch and combine on GPUs, over NVLink, against the reference: values, plans, gradients."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import cases
import jax
import jax.numpy as jnp
import movement
import numpy as np
import pytest
from gpu.jobs.layouts import TRANSPORT, TRIAL
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import ep_runtime as ep

# A token's rows are summed in the reference's order; XLA's tanh differs between platforms.
TOLERANCE = {"float32": 2e-5, "bfloat16": 4e-2, "float16": 8e-3}


def fitted(case: cases.Case, devices: int) -> cases.Case:
    """The case on fewer devices, with rows of a multiple of 16 bytes."""
    return dataclasses.replace(cases.fitted(case, devices), hidden=-(-case.hidden // 16) * 16)


def group_of(session: ep.Session, case: cases.Case, gpus: list[Any], **more: Any) -> ep.Group:
    settings = case.group_settings | more
    axes = settings.pop("axes")
    used = np.array(gpus[: math.prod(axes.values())]).reshape([*axes.values()])
    name = settings.pop("name", "g")
    return session.create_group(
        name, Mesh(used, [*axes]), transport=TRANSPORT, op_timeout_s=60.0, replace=True, **settings
    )


@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.name)
def test_movement_on_gpus_equals_the_reference(
    session: ep.Session, gpus: list[Any], case: cases.Case
) -> None:
    case = fitted(case, len(gpus))
    group = group_of(session, case, gpus)
    movement.run_case(case, group, TOLERANCE)
    group.check()


def test_a_smaller_group_leaves_a_larger_one_its_shared_memory(
    session: ep.Session, gpus: list[Any]
) -> None:
    """All threads share a kernel's memory limit; the program of one device has its own thread."""
    large = fitted(cases.Case("large", num_experts=512), len(gpus))
    small = fitted(cases.Case("small", axes=(("ep", 1),), num_experts=4), 1)
    runs = []
    for case in (large, small):
        group = group_of(session, case, gpus, name=case.name)
        layer = group.register_layer("moe", top_k=case.top_k)
        inputs = movement.inputs_of(case, group.spec, movement.capacity_of(case, layer))
        runs.append((layer, case, movement.placed(inputs, case, group)))
    first = movement.run_ops(*runs[0])
    movement.run_ops(*runs[1])
    again = movement.run_ops(*runs[0])
    np.testing.assert_array_equal(again["out"], first["out"])


def training_step(layer: Any, group: ep.Group) -> Any:
    """A jitted function of (tokens, topk_idx, weights): dispatch, work, combine, and a psum."""
    spec = PartitionSpec(group.spec.token_axes)

    def loss(tokens: Any, topk_idx: Any, weights: Any) -> Any:
        sent = ep.dispatch(layer, tokens, topk_idx, weights)
        out = ep.combine(layer, sent, jnp.tanh(sent.tokens), weights=sent.weights)
        return (out * out).sum() + tokens.sum()

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 2))), NamedSharding(group.mesh, spec)


def test_a_thousand_steps_are_bit_identical_beside_an_all_reduce(
    session: ep.Session, gpus: list[Any]
) -> None:
    case = fitted(cases.Case("soak", tokens=64, hidden=256, top_k=4), len(gpus))
    group = group_of(session, case, gpus)
    step, sharding = training_step(group.register_layer("moe", top_k=4), group)
    rng = np.random.default_rng(0)
    count = case.tokens * group.spec.num_slabs
    tokens = jax.device_put(rng.standard_normal((count, 256)).astype(np.float32), sharding)
    idx = rng.permuted(np.tile(np.arange(16), (count, 1)), axis=1)[:, :4].astype(np.int32)
    topk_idx, weights = (
        jax.device_put(x, sharding) for x in (idx, rng.random((count, 4), np.float32))
    )
    first = jax.block_until_ready(step(tokens, topk_idx, weights))
    for _ in range(50 if TRIAL else 1000):
        again = step(tokens, topk_idx, weights)
    jax.tree.map(np.testing.assert_array_equal, first, jax.block_until_ready(again))
    group.check()


def test_overflow_in_error_mode_fails_the_step_and_the_next_group_works(
    session: ep.Session, gpus: list[Any]
) -> None:
    case = fitted(cases.Case("overflow", routing="one", tokens=32, num_experts=8), len(gpus))
    group = group_of(session, case, gpus, on_overflow="error", recv_capacity_per_rank=8)
    layer = group.register_layer("moe", top_k=case.top_k)
    inputs = movement.placed(movement.inputs_of(case, group.spec, 8), case, group)
    for _ in range(3):
        with pytest.raises(ep.CapacityOverflowError), ep.translate_errors():
            jax.block_until_ready(movement.run_ops(layer, case, inputs)["out"])
    group.close()
    test_movement_on_gpus_equals_the_reference(session, gpus, cases.CASES[0])


def test_a_program_of_a_closed_group_is_refused(session: ep.Session, gpus: list[Any]) -> None:
    case = fitted(cases.CASES[0], len(gpus))
    group = group_of(session, case, gpus)
    step, sharding = training_step(group.register_layer("moe", top_k=2), group)
    count = case.tokens * group.spec.num_slabs
    tokens = jax.device_put(jnp.ones((count, case.hidden)), sharding)
    topk_idx = jax.device_put(jnp.zeros((count, 2), jnp.int32), sharding)
    weights = jax.device_put(jnp.ones((count, 2)), sharding)
    jax.block_until_ready(step(tokens, topk_idx, weights))
    group.close()
    with pytest.raises(ep.StaleHandleError), ep.translate_errors():
        jax.block_until_ready(step(tokens, topk_idx, weights))
