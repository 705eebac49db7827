"""Quantized tensors, which grouped_quantize returns and grouped_gemm accepts in place of arrays."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ep_runtime.errors import InvalidArgumentError
from ep_runtime_client.base import stored
from ep_runtime_client.ops.quantize.formats.recipes import Recipe
from ep_runtime_client.ops.quantize.formats.table import FORMATS, format_of
from ep_runtime_client.ops.quantize.formats.tiles import row_scales, spread_tiles, widen
from ep_runtime_client.ops.tracing import slack


@stored.pytree(*FORMATS)
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantizedTensor:
    """A quantized array, as 8-bit data and the scales to multiply it by.

    It holds rows, which have group_sizes, or kernels. Rows past sum(group_sizes) are zeros with
    scales of 1, or undefined if they come from `dispatch`. Shapes of the scales, in which *mid are
    the middle dims of a row or kernel:

    | recipe | rows [R, C, *mid, K'] | kernels [E, K', *mid, N'] |
    |---|---|---|
    | BF16 | None | None |
    | TensorScaling | f32 [R, L] | f32 [E] |
    | BlockScaling | f32 [R, C, *mid, ceil(K'/128)] | f32 [E, ceil(K'/128), *mid, ceil(N'/128)] |
    | MXFP8 | e8m0 [R, C, *mid, K'/32] | e8m0 [E, K'/32, *mid, N'] |
    | MXFP8, scale_columns | e8m0 [R, C/32, *mid, K'] | e8m0 [E, K', *mid, N'/32] |

    Rows may also be [rows, *mid, K'] with group_sizes [E]; then leave out R in the table.

    Attributes:
        data: the values, 1 byte each (bf16 with BF16), in the shape of the array they are from.
        scale: the scales, as in the table.
        amax: f32 like scale with TensorScaling, else None. The largest finite absolute values.
        data_columns: MXFP8 only: the values quantized with scale_columns, for the GEMM that
            contracts the other dim.
        scale_columns: the scales of data_columns, as in the table.
        group_sizes: int32 [R, L] or [E] for rows, None for kernels.
        origin: the array that was quantized, or the pair (gate, up); gradients go to it. None in a
            tensor without gradients. Compiled programs that do not use it spend no memory on it.
        recipe: the recipe; static.
        transposed: kernels only, [E, *mid, N', K']: `data` transposed, as Hopper GPUs multiply it
            forward; else None.
    """

    data: jax.Array
    scale: jax.Array | None
    amax: jax.Array | None
    data_columns: jax.Array | None
    scale_columns: jax.Array | None
    group_sizes: jax.Array | None
    origin: jax.Array | tuple[jax.Array, jax.Array] | None
    recipe: Recipe = dataclasses.field(metadata={"static": True})
    transposed: jax.Array | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the values."""
        return tuple(self.data.shape)

    @property
    def ndim(self) -> int:
        """Number of dims of the values."""
        return len(self.data.shape)

    @property
    def dtype(self) -> Any:
        """Dtype of the data."""
        return self.data.dtype

    @property
    def is_rows(self) -> bool:
        """True for rows of groups, False for kernels."""
        return self.group_sizes is not None

    def detached(self) -> QuantizedTensor:
        """Returns the data and scales without `origin`, so that no gradient flows through them."""
        return dataclasses.replace(self, origin=None)

    def dequantize(self, dtype: Any = jnp.float32, *, columns: bool = False) -> jax.Array:
        """Returns the values: data * scale, multiplied in f32.

        Args:
            dtype: dtype of the result.
            columns: MXFP8 only: use the column-wise copy.

        Returns:
            An array like data; rows past sum(group_sizes) are zeros. Its gradient goes to `origin`
            as if nothing had been rounded.

        Raises:
            InvalidArgumentError: columns=True, and the tensor has no column-wise copy.

        Cost: one pass over the data.
        """
        data = self.data_columns if columns else self.data
        scale = self.scale_columns if columns else self.scale
        if data is None:
            raise InvalidArgumentError(
                f"columns must be False: {self.recipe} has no column-wise copy", argument="columns"
            )
        values = widen(data)
        if scale is not None:
            values = values * self._spread(scale, columns)
        values = self._cleared(values.astype(dtype))
        if self.origin is None:
            return values
        origin = self.origin
        if isinstance(origin, tuple):
            origin = jnp.stack(origin, -2)
        return straight_through(_laid_as(origin, values), values, self.group_sizes)

    def _cleared(self, values: jax.Array) -> jax.Array:
        """Zeroes the rows past those of all groups, which dispatch leaves undefined."""
        if self.group_sizes is None:
            return values
        return slack.zeroed(values, self.group_sizes)

    def _spread(self, scale: jax.Array, columns: bool) -> jax.Array:
        """Returns `scale` in f32, with a shape that broadcasts to the data's."""
        scale, sizes = scale.astype(jnp.float32), self.group_sizes
        form = format_of(self.recipe)
        if form.per_group:
            if sizes is None:
                return scale.reshape(-1, *([1] * (self.ndim - 1)))
            scale = row_scales(self.shape[sizes.ndim - 1], sizes, scale)
            return scale.reshape(*scale.shape, *([1] * (self.ndim - scale.ndim)))
        lead = None if sizes is None else sizes.ndim
        for axis, tile in form.tiles(self.ndim, lead, columns=columns).items():
            scale = spread_tiles(scale, axis, tile, self.shape[axis])
        return scale


def _laid_as(x: jax.Array, other: jax.Array) -> jax.Array:
    """Returns `x` with the sharding in the type of `other`, if types have shardings."""
    wanted = jax.typeof(other).sharding
    explicit = jax.sharding.AxisType.Explicit in tuple(wanted.mesh.axis_types)
    if not explicit or jax.typeof(x).sharding == wanted:
        return x
    return jax.sharding.reshard(x, wanted)


@jax.custom_vjp
def straight_through(
    origin: jax.Array, values: jax.Array, group_sizes: jax.Array | None = None
) -> jax.Array:
    """Returns `values` whose gradient goes to `origin` unchanged; zeros past all groups' rows."""
    return values


def _straight_through_fwd(
    origin: jax.Array, values: jax.Array, group_sizes: jax.Array | None
) -> Any:
    return values, (jnp.zeros((), origin.dtype), group_sizes)


def _straight_through_bwd(kept: Any, grad: jax.Array) -> Any:
    like, group_sizes = kept
    if group_sizes is not None:
        grad = slack.zeroed(grad, group_sizes)
    return grad.astype(like.dtype), None, None


straight_through.defvjp(_straight_through_fwd, _straight_through_bwd)
