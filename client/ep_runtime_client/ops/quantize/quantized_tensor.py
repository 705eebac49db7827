"""Quantized tensors, which grouped_quantize returns and grouped_gemm accepts in place of arrays.

Ops pack them into flat leaves, which partitioners and collectives handle. 8-bit data and e8m0
scales become uint8 there, because XLA on CPU widens an all-gather of them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from ep_runtime.errors import InvalidArgumentError
from ep_runtime_client.base import stored
from ep_runtime_client.ops.partitioning.roles import Entries, explicit_mesh
from ep_runtime_client.ops.quantize.formats.recipes import Recipe
from ep_runtime_client.ops.quantize.formats.table import FORMATS, format_of
from ep_runtime_client.ops.quantize.formats.tiles import (
    bits,
    from_bits,
    row_scales,
    spread_tiles,
    widen,
)
from ep_runtime_client.ops.quantize.pair import Pair, of_both, of_each
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
        values = values.astype(dtype)
        if self.group_sizes is not None:  # dispatch leaves rows past those of all groups undefined
            values = slack.zeroed(values, self.group_sizes)
        if self.origin is None:
            return values
        origin = self.origin
        if isinstance(origin, tuple):
            origin = jnp.stack(origin, -2)
        return straight_through(_laid_as(origin, values), values, self.group_sizes)

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
    if explicit_mesh(other) is None or jax.typeof(x).sharding == wanted:
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
Matrix = jax.Array | QuantizedTensor
Kernel = Matrix | Pair
Value = TypeVar("Value")
# Fields of a QuantizedTensor that quantization makes.
FIELDS = ("data", "scale", "amax", "data_columns", "scale_columns", "transposed")


def blocks_of(recipe: Recipe | None, ndim: int) -> tuple[int, ...]:
    """Returns, per dim of a kernel [E, K', *mid, N'], the number that must divide its shards."""
    tile = format_of(recipe).tile
    return tuple(tile if dim in (1, ndim - 1) else 1 for dim in range(ndim))


@dataclasses.dataclass(frozen=True)
class Packing:
    """Describes the leaf arrays that an operand is packed into. Hashable.

    Attributes:
        names: the QuantizedTensor's field of each leaf; one "" for a plain array, two for a pair.
        dtypes: of each leaf, before the cast to uint8.
        recipe: None for a plain array.
        ndim: number of dims of the values.
        rows: whether these are rows of groups, and not kernels.
        paired: whether the leaves are gate and up of a Pair.
    """

    names: tuple[str, ...]
    dtypes: tuple[Any, ...]
    recipe: Recipe | None
    ndim: int
    rows: bool
    paired: bool = False

    def __len__(self) -> int:
        return len(self.names)

    @functools.cached_property
    def tile(self) -> int:
        """Number of values that share a scale along a blocked dim; 1 without blocks."""
        return format_of(self.recipe).tile

    @functools.cached_property
    def blocks(self) -> tuple[int, ...]:
        """Per dim of a kernel [E, K', *mid, N'], the number that must divide its shards."""
        return blocks_of(self.recipe, self.ndim)

    @functools.cached_property
    def dims(self) -> Mapping[str, tuple[int, ...]]:
        """For each leaf, by name, the dims of the values that its own dims correspond to.

        Tensor scales have one value per group of rows, or per kernel.
        """
        whole = tuple(range(self.ndim))
        found = dict.fromkeys(("", *FIELDS), of_each(whole, self.paired))
        found["transposed"] = (0, *whole[2:], 1)
        if format_of(self.recipe).per_group:
            found["scale"] = found["amax"] = (0, 1) if self.rows else (0,)
        return found

    def spread(self, entries: Entries) -> list[Entries]:
        """Returns entries of every leaf from the entries of the values."""
        return [tuple(entries[dim] for dim in self.dims[name]) for name in self.names]

    def of_values(self, leaf: Sequence[Value], between: Value) -> tuple[Value, ...]:
        """Converts values per dim of the first leaf to values per dim of the operand; `between` is
        for the dim of gate and up."""
        return of_both(leaf, between) if self.paired else tuple(leaf)

    def factors(self, values: Sequence[str]) -> list[str]:
        """Returns Shardy factors of every leaf from the factors of the values."""
        found = []
        for name in self.names:
            leaf = [values[dim] for dim in self.dims[name]]
            if self.rows and len(leaf) == 2:
                leaf[1] = "l"  # rows have no dim for groups
            elif self.rows and name == "scale_columns":
                leaf[1] = "c32"
            found.append(" ".join(leaf))
        return found


def pack(x: Kernel, *, rows: bool, columns: bool = False) -> tuple[list[jax.Array], Packing]:
    """Returns the leaves that a forward or backward GEMM reads, and their packing.

    Args:
        x: an array, a Pair or a QuantizedTensor; dim 0 of rows is the slab.
        rows: whether these are rows of groups.
        columns: take MXFP8's column-wise copy, which backward reads, instead of the row-wise one.
    """
    if isinstance(x, Pair):
        leaves = [bits(x.gate), bits(x.up)]
        return leaves, Packing(("", ""), (x.dtype, x.dtype), None, x.ndim, rows, paired=True)
    if not isinstance(x, QuantizedTensor):
        return [bits(x)], Packing(("",), (x.dtype,), None, x.ndim, rows)
    names = ["data", "scale"]
    if columns and x.data_columns is not None:
        names = ["data_columns", "scale_columns"]
    if not columns:
        names.append("transposed")
    return pack_fields(x, names, rows=rows)


def pack_fields(
    x: QuantizedTensor, names: Sequence[str], *, rows: bool
) -> tuple[list[jax.Array], Packing]:
    """Returns the named leaves, except those that are None, and their packing."""
    leaves = {name: getattr(x, name) for name in names if getattr(x, name) is not None}
    dtypes = tuple(leaf.dtype for leaf in leaves.values())
    packing = Packing(tuple(leaves), dtypes, x.recipe, x.ndim, rows)
    return [bits(leaf) for leaf in leaves.values()], packing


def unpack(
    packing: Packing, leaves: Sequence[jax.Array], group_sizes: jax.Array | None = None
) -> Kernel:
    """Makes an operand from its leaves; rows get their group sizes."""
    raw = zip(leaves, packing.dtypes, strict=True)
    values = [from_bits(leaf, dtype) for leaf, dtype in raw]
    if packing.recipe is None:
        return Pair(*values) if packing.paired else values[0]
    fields: dict[str, Any] = dict.fromkeys((*FIELDS, "group_sizes", "origin"))
    fields |= dict(zip(packing.names, values, strict=True))
    if fields["data"] is None:  # backward reads only the column-wise copy, of the same shape
        fields["data"] = fields["data_columns"]
    if packing.rows:
        fields["group_sizes"] = group_sizes
    return QuantizedTensor(recipe=packing.recipe, **fields)


def gather(leaf: jax.Array, gathered: Entries) -> jax.Array:
    """Gathers `leaf` over the axes of each dim.

    2-byte floats travel as uint16: XLA on CPU widens an all-gather of them to f32.
    """
    dtype = leaf.dtype
    if not any(gathered[: leaf.ndim]):
        return leaf
    if dtype.itemsize == 2:
        leaf = lax.bitcast_convert_type(leaf, jnp.uint16)
    for dim, axes in enumerate(gathered[: leaf.ndim]):
        if axes:
            leaf = lax.all_gather(leaf, axes, axis=dim, tiled=True)
    return leaf if leaf.dtype == dtype else lax.bitcast_convert_type(leaf, dtype)
