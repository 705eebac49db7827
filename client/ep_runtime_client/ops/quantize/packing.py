"""Packs operands of a matmul op into flat leaves, which partitioners and collectives handle.

8-bit data and e8m0 scales become uint8, because XLA on CPU widens an all-gather of them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from ep_runtime_client.ops.partitioning.roles import Entries
from ep_runtime_client.ops.quantize.formats.recipes import Recipe
from ep_runtime_client.ops.quantize.formats.table import format_of
from ep_runtime_client.ops.quantize.formats.tiles import bits, from_bits
from ep_runtime_client.ops.quantize.pair import Pair, of_both, of_each
from ep_runtime_client.ops.quantize.quantized_tensor import QuantizedTensor

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
        found = dict.fromkeys(("", *FIELDS), of_each(whole) if self.paired else whole)
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
