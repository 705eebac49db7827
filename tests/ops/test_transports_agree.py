"""memfd and xla give the same bits in f32 with exact partials, gradients included."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import cases
import jax
import jax.numpy as jnp
import movement
import numpy as np
import pytest
from fakes import MakeGroup

from ep_runtime_client.moe.api import init_moe_params, moe
from ep_runtime_client.ops.movement.prepare import make_call, make_plan

pytestmark = pytest.mark.usefixtures("optimized")


EXACT = (
    cases.Case("many slots per rank", top_k=6, num_experts=8, hidden=33, tokens=12),
    cases.Case("drops", top_k=4, num_experts=8, capacity=24, hidden=19, **cases.DP_EP),
)


def _bits(tree: Any) -> list[Any]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


@pytest.mark.parametrize("case", EXACT, ids=lambda case: case.name)
def test_movement_is_bit_equal(make_group: MakeGroup, case: cases.Case) -> None:
    results = []
    for transport in ("memfd", "xla"):
        group = make_group(transport=transport, **case.group_settings)
        layer = group.register_layer("moe", top_k=case.top_k)
        inputs = movement.inputs_of(case, group.spec, movement.capacity_of(case, layer))
        got = movement.run_ops(layer, case, movement.placed(inputs, case, group))
        results.append({name: got[name] for name in ("plan", "out", "d_tokens", "d_weights")})
    for left, right in zip(_bits(results[0]), _bits(results[1]), strict=True):
        np.testing.assert_array_equal(left, right)


@pytest.mark.parametrize("row_alignment", [1, 4])
def test_rows_that_lie_closer_are_bit_equal(make_group: MakeGroup, row_alignment: int) -> None:
    """Drops and num_recv follow the layer's alignment."""
    idx = jax.random.randint(jax.random.key(1), (8 * 12, 4), -1, 8)
    plans = []
    for transport in ("memfd", "xla"):
        group = make_group(transport=transport, num_experts=8)
        layer = group.register_layer("moe", top_k=4)
        call = make_call(layer, group.mesh, idx.shape[:-1], (), handle=0, capacity=48)
        for own in (0, row_alignment):
            given = dataclasses.replace(call, own_alignment=own)
            prepare = jax.jit(functools.partial(make_plan, given, most=True))
            plan, most = prepare(jnp.zeros(1, jnp.int32), idx)
            np.testing.assert_array_equal(most[:, 0], plan.arrays.group_sizes.sum(1).max())
            plans.append(jax.device_get(plan.arrays))
    aligned, closer, *others = plans
    jax.tree.map(np.testing.assert_array_equal, others, [aligned, closer])
    for name in ("dst_rank", "kept", "num_recv", "recv_count"):
        np.testing.assert_array_equal(getattr(closer, name), getattr(aligned, name))
    assert aligned.kept.sum() < (idx >= 0).sum()
    zones = -(-closer.kept // row_alignment) * row_alignment
    np.testing.assert_array_equal(closer.group_sizes, zones)


def test_a_model_around_the_block_is_bit_equal(make_group: MakeGroup) -> None:
    """Elementwise code around the ops must not fuse differently: XLA would contract to FMA."""
    results = []
    for transport in ("memfd", "xla"):
        group = make_group(
            transport=transport,
            axes={"dp": 2, "ep": 4},
            outer_axes="dp",
            num_experts=4,
            combine_precision="exact",
        )
        layer = group.register_layer("moe", top_k=2)
        results.append(_train(layer))
    for left, right in zip(_bits(results[0]), _bits(results[1]), strict=True):
        np.testing.assert_array_equal(left, right)


def _train(layer: Any) -> Any:
    """Losses and weights of three steps of a block between norms and residuals."""
    rng = np.random.default_rng(0)

    def draw(shape: Any) -> Any:
        return rng.standard_normal(shape).astype(np.float32) / np.float32(4)

    shapes = jax.eval_shape(lambda: init_moe_params(jax.random.key(0), layer, 24))
    params = [jax.tree.map(lambda each: draw(each.shape), shapes)]
    x, gain = 4 * draw((64, 16)), 1 + 0.4 * draw((16,))

    def block(x: Any, gain: Any, p: Any) -> Any:
        normed = x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * gain
        y, aux = moe(layer, normed, p, aux_loss_coeff=0.01)
        return x * 0.7 + y * gain, aux

    def loss(weights: Any, x: Any) -> Any:
        params, gain = weights
        total = 0.0
        for p in params:
            x, aux = block(x, gain, p)
            total = total + aux
        return (jnp.sin(x) * x).mean() + total

    @jax.jit
    def step(weights: Any, x: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(weights, x)
        return value, jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads)

    weights, losses = (params, gain), []
    for _ in range(3):
        value, weights = step(weights, x)
        losses.append(value)
    return losses, weights
