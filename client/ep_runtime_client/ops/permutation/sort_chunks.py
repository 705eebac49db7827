"""sort_chunks: reorders whole chunks of rows, shard by shard."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ep_runtime.errors import InvalidArgumentError
from ep_runtime_client.ops.kernels.slots import exclusive_sum, rows_at
from ep_runtime_client.ops.permutation import batch_shards
from ep_runtime_client.ops.permutation.batch_shards import BatchShards, Spec
from ep_runtime_client.ops.permutation.rows import copied, gathered
from ep_runtime_client.ops.tracing import eager
from ep_runtime_client.ops.tracing.varying import like


@dataclasses.dataclass(frozen=True)
class _Sort:
    """The static side of one call. Hashable."""

    shards: BatchShards
    lists: int  # n, lists of sizes on this device
    inverse: bool = False


def sort_chunks(
    x: jax.Array, split_sizes: jax.Array, order: jax.Array, *, x_spec: Spec | None = None
) -> jax.Array:
    """Puts chunks of rows in a new order: chunk `order[j]` becomes the j-th.

    Args:
        x: [rows, ...] or, for n shards, [n * rows, ...], any dtype.
        split_sizes: [m] or [n, m] int, on the device: rows of each chunk of x, in order.
        order: [m] or [n, m] int, a permutation of 0 .. m-1; [m] is used for all shards.
        x_spec: PartitionSpec of x on the ambient mesh, or a NamedSharding; only dim 0 counts. None
            leaves it to the partitioner if x does not carry its sharding.

    Returns:
        Like x, with dim 0 sharded over the same axes. Rows past sum(split_sizes) of a shard are
        zero and get zero gradient. Differentiable in x.

    Raises:
        InvalidArgumentError: shapes or dtypes do not fit, or the shards of x do not divide n.

    With [n, m] sizes each of the n shards sorts its own chunks, without collectives. With [m] sizes
    the chunks span the whole x, which needs collectives if x is sharded.

    Cost: one gather of the rows; no host sync, no loop over chunks.

    Source: Transformer Engine's `moe_sort_chunks_by_index`.
    """
    x, split_sizes, order = jnp.asarray(x), jnp.asarray(split_sizes), jnp.asarray(order)
    _check(x, split_sizes, order)
    lists = 1 if split_sizes.ndim == 1 else split_sizes.shape[0]
    shards = BatchShards(((),)).here(x, split_sizes, order)
    if split_sizes.ndim == 2:
        shards = batch_shards.find_rows(x_spec, x, split_sizes)
    if lists % shards.num_shards:
        raise InvalidArgumentError(
            f"split_sizes must have a multiple of {shards.num_shards} lists, the shards of x over "
            f"{shards.batch_axes}, got {lists}",
            argument="split_sizes",
        )
    order = jnp.broadcast_to(order, (lists, order.shape[-1]))
    sizes = split_sizes.reshape(lists, split_sizes.shape[-1])
    with jax.named_scope("ep_sort_chunks"):
        specs = (shards.row_spec(trailing=x.ndim - 1), *[shards.row_spec()] * 2)
        operands = batch_shards.settled(shards, (x, sizes, order), specs)
        static = _Sort(shards, lists)
        result: jax.Array = eager.run(_sort_primal, static, *operands, traced=_sort)
    return result


def _check(x: jax.Array, split_sizes: jax.Array, order: jax.Array) -> None:
    for name, array in (("split_sizes", split_sizes), ("order", order)):
        if array.ndim not in (1, 2) or not jnp.issubdtype(array.dtype, jnp.integer):
            raise InvalidArgumentError(
                f"{name} must be [m] or [n, m] of an integer dtype, got {list(array.shape)} "
                f"{array.dtype}",
                argument=name,
            )
    if order.shape not in (split_sizes.shape, split_sizes.shape[-1:]):
        raise InvalidArgumentError(
            f"order must have the shape {list(split_sizes.shape)} of split_sizes, or "
            f"{list(split_sizes.shape[-1:])}, got {list(order.shape)}",
            argument="order",
        )
    lists = 1 if split_sizes.ndim == 1 else split_sizes.shape[0]
    if x.ndim < 1 or lists < 1 or x.shape[0] % lists:
        raise InvalidArgumentError(
            f"x must be [n * rows, ...] with n={lists} lists of split_sizes, got {list(x.shape)}",
            argument="x",
        )


def _sort_primal(static: _Sort, x: jax.Array, sizes: jax.Array, order: jax.Array) -> jax.Array:
    """Moves the chunks of x into `order`, or back if `static.inverse`."""
    shards = static.shards
    lists = static.lists // shards.num_shards
    inverse = static.inverse

    def body(x: jax.Array, sizes: jax.Array, order: jax.Array) -> jax.Array:
        blocks = x.reshape(lists, x.shape[0] // lists, *x.shape[1:])
        if lists == 1:
            return _one_list(copied, x, sizes[0], order[0], inverse=inverse)
        # With several lists the partitioner must find the shards, and it only splits XLA's own ops.
        one = jax.vmap(lambda *each: _one_list(gathered, *each, inverse=inverse))
        return one(blocks, sizes, order).reshape(x.shape)

    rows, per_list = shards.row_spec(trailing=x.ndim - 1), shards.row_spec()
    return batch_shards.per_shard(shards, body, (x, sizes, order), (rows, per_list, per_list), rows)


def _sort_fwd(static: _Sort, x: jax.Array, sizes: jax.Array, order: jax.Array) -> Any:
    return eager.run(_sort_primal, static, x, sizes, order), (sizes, order)


def _sort_bwd(static: _Sort, saved: Any, grad: jax.Array) -> Any:
    sizes, order = saved
    with jax.named_scope("ep_sort_chunks_bwd"):
        back = dataclasses.replace(static, inverse=True)
        return eager.run(_sort_primal, back, grad, sizes, order), None, None


_sort = jax.custom_vjp(_sort_primal, nondiff_argnums=(0,))
_sort.defvjp(_sort_fwd, _sort_bwd)


def _one_list(
    move: Callable[[jax.Array, jax.Array, int], jax.Array],
    x: jax.Array,
    sizes: jax.Array,
    order: jax.Array,
    *,
    inverse: bool,
) -> jax.Array:
    """Moves the chunks of x [rows, ...], with sizes [m], into `order` [m], or back if `inverse`."""
    rows, chunks = x.shape[0], sizes.shape[0]
    if not x.size or not chunks:
        return jnp.zeros_like(x)
    sizes, order = sizes.astype(jnp.int32), order.astype(jnp.int32)
    ordered = rows_at(sizes, order)
    # Start of each chunk in the source and in the result, numbered by the chunks of the result.
    if inverse:
        back = jnp.argsort(order)
        written, start = sizes, rows_at(exclusive_sum(ordered), back)
    else:
        written, start = ordered, rows_at(exclusive_sum(sizes), order)
    ends = jnp.cumsum(written, dtype=jnp.int32)
    row = like(jnp.arange(rows, dtype=jnp.int32), ends)
    chunk = jnp.minimum(jnp.searchsorted(ends, row, side="right"), chunks - 1)
    source = rows_at(start - (ends - written), chunk) + row
    # If the sizes add up to more than the rows, the last chunks are cut off.
    return move(x, jnp.where((row < ends[-1]) & (source < rows), source, -1), 1)
