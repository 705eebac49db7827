"""Rows over the capacity: which are dropped, the cost, and how drops are reported."""

from __future__ import annotations

import itertools
from typing import Any

import fakes
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import dispatch

import ep_runtime as ep
from ep_runtime import layout
from ep_runtime_client.ops.kernels import slots
from ep_runtime_client.programs.failures import error_of, translate_errors


def all_on_rank_zero(tokens: int) -> Any:
    """topk_idx [T, 2] of 8 experts on 4 ranks: both experts of rank 0, taking turns to be first."""
    first = np.arange(tokens) % 2
    return np.stack([first, 1 - first], axis=1).astype(np.int32)


@pytest.fixture
def group(make_group: fakes.MakeGroup, transport: str) -> fakes.LocalGroup:
    return make_group(transport=transport, axes={"ep": 4}, num_experts=8, max_top_k=2, alignment=4)


def round_trip(layer: Any, x: Any, idx: Any, weights: Any, capacity: int) -> Any:
    sent = ep.dispatch(layer, x, idx, weights, capacity=capacity)
    return ep.combine(layer, sent, sent.tokens, weights=sent.weights), sent


def test_full_to_the_last_row_and_one_block_too_few(group: fakes.LocalGroup) -> None:
    layer = group.register_layer("moe", top_k=2)
    tokens = 32  # 8 per rank, 32 rows for each expert of rank 0: zones of 64 rows
    x = np.random.default_rng(0).standard_normal((tokens, 16)).astype(np.float32)
    idx = all_on_rank_zero(tokens)
    weights = np.random.default_rng(1).uniform(0.5, 1, (tokens, 2)).astype(np.float32)

    def total(x: Any, weights: Any, capacity: int) -> Any:
        out, sent = round_trip(layer, x, idx, weights, capacity)
        return out.sum(), (out, sent)

    run = jax.jit(jax.value_and_grad(total, argnums=(0, 1), has_aux=True), static_argnums=2)
    (_, (out, sent)), _ = run(x, weights, 64)
    np.testing.assert_allclose(out, x * weights.sum(1, keepdims=True), rtol=1e-6)
    assert int(sent.num_recv[0]) == 64

    (_, (out, sent)), (d_x, d_weights) = run(x, weights, 63)
    arrays = sent.plan.arrays
    kept = layout.kept_rows([32, 32], 63, 4)
    np.testing.assert_array_equal(arrays.kept[0], kept)
    assert int(sent.num_recv[0]) == 64
    dropped = np.asarray(arrays.dst_row).reshape(tokens, 2) < 0
    assert dropped.sum() == 64 - sum(kept)
    # Every token lost at most one of its slots; its other slot is unchanged.
    assert dropped.sum(1).max() == 1
    assert dropped[:, 0].any()
    left = np.where(dropped, 0, weights)
    np.testing.assert_allclose(out, x * left.sum(1, keepdims=True), rtol=1e-6)
    np.testing.assert_allclose(d_x, np.repeat(left.sum(1, keepdims=True), 16, 1), rtol=1e-6)
    assert (np.asarray(d_weights)[dropped] == 0).all()
    np.testing.assert_allclose(
        np.asarray(d_weights)[~dropped],
        np.broadcast_to(x.sum(1, keepdims=True), (tokens, 2))[~dropped],
        rtol=1e-4,
        atol=1e-5,
    )


@pytest.mark.parametrize(
    ("capacity", "alignment"), [(0, 1), (5, 1), (20, 1), (8, 4), (12, 4), (16, 4)]
)
def test_rows_are_kept_as_plain_python_keeps_them(capacity: int, alignment: int) -> None:
    demands = list(itertools.product(range(11), repeat=3))
    wanted = [layout.kept_rows(list(demand), capacity, alignment) for demand in demands]
    kept = jax.jit(slots.kept_rows, static_argnums=(1, 2, 3))
    np.testing.assert_array_equal(kept(jnp.int32(demands), capacity, alignment, 10), wanted)


def test_capacity_of_a_call_follows_its_own_tokens(group: fakes.LocalGroup) -> None:
    layer = group.register_layer("moe", top_k=1)
    sizes = {"num_experts": 8, "ep_size": 4, "alignment": 4, "top_k": 1}
    for per_rank in (1, 3, 16):
        idx = jnp.zeros((per_rank * 4, 1), jnp.int32)
        plan = jax.eval_shape(lambda idx: ep.prepare(layer, idx), idx)
        wanted = layout.recv_capacity(max_tokens_per_rank=per_rank, **sizes)
        assert plan.arrays.staged_row.shape == (4, wanted)
    with pytest.raises(ValueError, match="capacity must be 1 to"):
        ep.prepare(layer, idx, capacity=group.spec.recv_capacity_per_rank + 1)


def test_a_factor_is_the_decimal_that_it_is_written_as() -> None:
    """In floats, 1.1 * 100 is slightly more than 110."""
    sizes = {"num_experts": 4, "top_k": 1, "max_tokens_per_rank": 100, "ep_size": 4}
    for factor in (1.1, np.float32(1.1)):
        assert layout.recv_capacity(alignment=1, capacity_factor=factor, **sizes) == 110


def overflow_group(make_group: fakes.MakeGroup, transport: str, partitioning: str = "auto") -> Any:
    group = make_group(
        transport=transport,
        axes={"dp": 2, "ep": 4},
        outer_axes="dp",
        num_experts=8,
        max_top_k=2,
        alignment=4,
        on_overflow="error",
        partitioning=partitioning,
    )
    return group, group.register_layer("moe", top_k=2)


def test_an_eager_call_raises_the_class_itself(make_group: fakes.MakeGroup, transport: str) -> None:
    _, layer = overflow_group(make_group, transport)
    x, idx = np.ones((64, 16), np.float32), all_on_rank_zero(64)
    with pytest.raises(ep.CapacityOverflowError) as caught:
        ep.dispatch(layer, x, idx, capacity=32)
    assert caught.value.fields["demand"] == 64
    sent = ep.dispatch(layer, x, idx)
    np.testing.assert_allclose(ep.combine(layer, sent, sent.tokens), 2 * x)
    dispatch.runtime_tokens.clear()  # JAX would print the failed host callback again at exit


@pytest.mark.parametrize("partitioning", ["auto", "rule"])
def test_overflow_in_error_mode_fails_the_step_and_nothing_else(
    make_group: fakes.MakeGroup, transport: str, partitioning: str
) -> None:
    _, layer = overflow_group(make_group, transport, partitioning)
    x = np.ones((64, 16), np.float32)
    spread = np.stack([np.arange(64) % 8, (np.arange(64) + 1) % 8], 1).astype(np.int32)
    crowded = spread.copy()
    crowded[32:] = all_on_rank_zero(32)  # only the second domain overflows

    @jax.jit
    def step(x: Any, idx: Any) -> Any:
        sent = ep.dispatch(layer, x, idx, capacity=32)
        out = ep.combine(layer, sent, sent.tokens)
        return out, out.sum()  # the sum is a psum over every device

    runs = 20 if transport == "memfd" else 3
    for _ in range(runs):
        with pytest.raises(ep.CapacityOverflowError) as caught, translate_errors():
            jax.block_until_ready(step(x, crowded))
        fields = caught.value.fields
        assert (fields["rank"], fields["demand"], fields["capacity"]) == (4, 64, 32)
        assert fields["layer"] == "moe"
        out, total = step(x, spread)
        np.testing.assert_allclose(out, 2 * x)
        np.testing.assert_allclose(total, 2 * x.sum())
    with pytest.raises(jax.errors.JaxRuntimeError) as raw:
        jax.block_until_ready(step(x, crowded))
    assert isinstance(error_of(raw.value), ep.CapacityOverflowError)
    dispatch.runtime_tokens.clear()  # JAX would print the failed host callback again at exit
