"""sort_chunks against the reference, on one shard and on many."""

from __future__ import annotations

from typing import Any

import fakes
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from references import permutation as reference

import ep_runtime as ep

ROWS = 10
CASES = {
    "plain": ([3, 1, 4, 2], [2, 0, 3, 1]),
    "as they are": ([3, 1, 4, 2], [0, 1, 2, 3]),
    "empty chunks": ([0, 5, 0, 5], [3, 2, 1, 0]),
    "rows past the last": ([2, 0, 3, 1], [1, 3, 0, 2]),
    "nothing": ([0, 0, 0, 0], [3, 1, 0, 2]),
    "more than there are": ([4, 3, 2, 5], [3, 0, 2, 1]),
}
SHARDED = {"dp": 2, "fsdp": 2, "tp": 2}
BATCH = PartitionSpec(("dp", "fsdp"))


def lists(shards: int) -> tuple[Any, Any]:
    """Returns sizes and orders [n, 4] for n shards, all different."""
    picked = [list(CASES.values())[i % len(CASES)] for i in range(shards)]
    return tuple(np.array(part, np.int32) for part in zip(*picked, strict=True))


def draw(shards: int, *trailing: int) -> Any:
    shape = (shards * ROWS, *trailing)
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def wanted(x: Any, sizes: Any, order: Any) -> Any:
    blocks = x.reshape(len(sizes), ROWS, *x.shape[1:])
    each = [reference.sort_chunks(*args) for args in zip(blocks, sizes, order, strict=True)]
    return jnp.concatenate(each)


def loss(x: Any, sizes: Any, order: Any, factors: Any, **options: Any) -> Any:
    out = ep.sort_chunks(x, sizes, order, **options)
    return (jnp.sin(out) * factors).sum(), out


step = jax.jit(jax.grad(loss, has_aux=True))


@pytest.mark.parametrize("name", CASES)
def test_chunks_lie_in_the_order_and_gradients_go_back(name: str) -> None:
    sizes, order = (np.array(part, np.int32) for part in CASES[name])
    x, factors = draw(1, 3), np.arange(30.0).reshape(10, 3)
    d_x, out = step(x, sizes, order, factors)
    np.testing.assert_array_equal(out, reference.sort_chunks(x, sizes, order))
    np.testing.assert_array_equal(out, ep.sort_chunks(x, sizes, order))
    meant = jax.grad(lambda x: (jnp.sin(reference.sort_chunks(x, sizes, order)) * factors).sum())
    np.testing.assert_allclose(d_x, meant(x), rtol=1e-6)


def test_rows_past_the_chunks_are_zero_and_reach_nothing() -> None:
    sizes, order = (np.array(part, np.int32) for part in CASES["rows past the last"])
    x = draw(1, 2)
    x[6:] = np.nan
    factors = np.ones((10, 2))
    factors[6:] = np.nan
    d_x, out = step(x, sizes, order, factors)
    np.testing.assert_array_equal(np.isnan(out), False)
    np.testing.assert_array_equal(out[6:], 0)
    np.testing.assert_array_equal(np.isnan(d_x), False)
    np.testing.assert_array_equal(d_x[6:], 0)
    x[1] = np.nan
    assert np.isnan(ep.sort_chunks(x, sizes, order)).any(1).sum() == 1


@pytest.mark.parametrize("dtype", ["uint8", "float8_e4m3fn", "bfloat16"])
def test_any_dtype_and_any_trailing_dims(dtype: str) -> None:
    x = jnp.arange(40).reshape(10, 2, 2).astype(dtype)
    out = ep.sort_chunks(x, np.array([4, 6]), np.array([1, 0]))
    assert out.dtype == x.dtype
    np.testing.assert_array_equal(np.asarray(out), np.asarray(x)[[*range(4, 10), *range(4)]])
    flat = ep.sort_chunks(x[:, 0, 0], np.array([4, 6]), np.array([1, 0]))
    np.testing.assert_array_equal(np.asarray(flat), np.asarray(out[:, 0, 0]))


def test_nothing_to_sort() -> None:
    assert ep.sort_chunks(np.ones((0, 3)), np.zeros(2, int), np.arange(2)).shape == (0, 3)
    np.testing.assert_array_equal(ep.sort_chunks(np.ones(3), np.zeros(0, int), np.zeros(0, int)), 0)


@pytest.mark.parametrize("mode", ["auto", "explicit", "told", "not told"])
def test_every_shard_has_its_own_sizes(mode: str) -> None:
    mesh = fakes.mesh_of(SHARDED, explicit=mode == "explicit")
    rows = NamedSharding(mesh, BATCH)
    sizes, order = lists(8)
    x, factors = draw(8, 3), draw(8, 3)
    placed = [jax.device_put(a, rows) for a in (x, sizes, order, factors)]
    options = {"x_spec": rows} if mode == "told" else {}
    program = jax.jit(jax.grad(lambda *args: loss(*args, **options), has_aux=True))
    compiled = program.lower(*placed).compile()
    for kind in ("all-", "collective-", "reduce-scatter"):
        assert f" {kind}" not in compiled.as_text()
    d_x, out = program(*placed)
    np.testing.assert_array_equal(out, wanted(x, sizes, order))
    meant = jax.grad(lambda x: (jnp.sin(wanted(x, sizes, order)) * factors).sum())(x)
    np.testing.assert_allclose(d_x, meant, rtol=1e-6)
    for result in (d_x, out):
        assert result.sharding.is_equivalent_to(NamedSharding(mesh, BATCH), 2)
    eager = ep.sort_chunks(*placed[:3])
    np.testing.assert_array_equal(eager, out)
    assert eager.sharding.is_equivalent_to(NamedSharding(mesh, BATCH), 2)


def test_one_order_serves_all_shards_and_a_shard_may_have_many_lists() -> None:
    mesh = fakes.mesh_of({"dp": 2, "fsdp": 2})
    sizes, order = lists(8)
    x = draw(8)
    placed = jax.device_put(x, NamedSharding(mesh, BATCH))
    same = np.broadcast_to(order[0], order.shape)
    np.testing.assert_array_equal(ep.sort_chunks(placed, sizes, order[0]), wanted(x, sizes, same))


@pytest.mark.parametrize("check", [True, False])
def test_inside_a_shard_map_of_the_user(check: bool) -> None:
    mesh = fakes.mesh_of(SHARDED)
    sizes, order = lists(4)
    x = draw(4, 2)

    def local(x: Any, sizes: Any, order: Any) -> Any:
        return ep.sort_chunks(x, sizes[0], order[0])

    mapped = jax.shard_map(
        local, mesh=mesh, in_specs=(BATCH, BATCH, BATCH), out_specs=BATCH, check_vma=check
    )
    grad, out = jax.jit(
        jax.grad(lambda x: (jnp.sin(y := mapped(x, sizes, order)).sum(), y), has_aux=True)
    )(x)
    np.testing.assert_array_equal(out, wanted(x, sizes, order))
    meant = jax.grad(lambda x: jnp.sin(wanted(x, sizes, order)).sum())(x)
    np.testing.assert_allclose(grad, meant, rtol=1e-6)


def test_programs_do_not_grow_with_the_chunks() -> None:
    def size_of(chunks: int) -> int:
        sizes, order = np.ones(chunks, np.int32), np.arange(chunks)[::-1].copy()
        text = step.lower(np.ones((300, 2)), sizes, order, np.ones((300, 2))).as_text()
        return sum("stablehlo" in line for line in text.splitlines())

    assert size_of(8) == size_of(256)


@pytest.mark.parametrize(
    ("x", "sizes", "order", "text"),
    [
        (np.ones(4), np.ones(2), np.arange(2), r"split_sizes must be \[m\] or \[n, m\]"),
        (np.ones(4), np.ones(2, int), np.arange(3), r"order must have the shape \[2\]"),
        (np.ones(5), np.ones((2, 2), int), np.arange(2), "n=2"),
    ],
)
def test_arguments_that_do_not_fit(x: Any, sizes: Any, order: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        ep.sort_chunks(x, sizes, order)


def test_more_shards_than_lists() -> None:
    mesh = fakes.mesh_of({"dp": 8})
    x = jax.device_put(draw(8), NamedSharding(mesh, PartitionSpec("dp")))
    with pytest.raises(ValueError, match="a multiple of 8 lists, the shards of x over .*, got 2"):
        ep.sort_chunks(x, np.ones((2, 4), int), np.arange(4))
    sizes = np.array([40, 30, 4, 6])
    np.testing.assert_array_equal(
        ep.sort_chunks(x, sizes, np.array([1, 0, 3, 2])),
        reference.sort_chunks(np.asarray(x), sizes, [1, 0, 3, 2]),
    )
