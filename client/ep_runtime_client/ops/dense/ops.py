"""The dense matmul, forward and backward, and its quantization, as ops on a mesh."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from math import prod
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from ep_runtime.errors import InvalidArgumentError
from ep_runtime_client.ops.gemm.plain import dot, wide
from ep_runtime_client.ops.partitioning.placement import Weight, fitting, whole_blocks
from ep_runtime_client.ops.partitioning.regions import Partitioning
from ep_runtime_client.ops.partitioning.roles import (
    Arrived,
    Entries,
    Resolved,
    Roles,
    Shapes,
    Sizes,
    Sums,
    Wanted,
    flat,
    padded,
    scatter,
)
from ep_runtime_client.ops.quantize import plain as quantize_plain
from ep_runtime_client.ops.quantize.formats.recipes import Recipe
from ep_runtime_client.ops.quantize.formats.table import format_of
from ep_runtime_client.ops.quantize.ops import raw_leaves
from ep_runtime_client.ops.quantize.quantized_tensor import Packing, QuantizedTensor, gather, unpack
from ep_runtime_client.ops.tracing.varying import Axes


def leaf_entries(packing: Packing, entries: Entries) -> list[Entries]:
    """Returns entries of every leaf: all rows are one group, so a tensor scale is one value."""
    one = _one_value(packing)
    return [((),) if name in one else entries for name in packing.names]


def _leaf_factors(packing: Packing, values: list[str], *, rows: bool = False) -> list[str]:
    """Returns factors of every leaf; `rows`: for x, which MXFP8 also scales along its rows."""
    named = dict.fromkeys(packing.names, values) | dict.fromkeys(_one_value(packing), ["one"])
    if rows:
        named["scale_columns"] = [*values[:-2], "c32", values[-1]]
    return [" ".join(named[name]) for name in packing.names]


def _one_value(packing: Packing) -> tuple[str, ...]:
    return ("scale", "amax") if format_of(packing.recipe).per_group else ()


def _lead(ndim: int) -> list[str]:
    return [f"b{i}" for i in range(ndim - 1)]


@dataclasses.dataclass(frozen=True)
class _DenseOp:
    """Base of the dense ops, in which every axis on x's leading dims shards rows."""

    where: Partitioning

    name: ClassVar[str] = "dense"

    @property
    def manual(self) -> Axes:
        """Manual axes that may split rows: those that operands vary over, or all if not tracked."""
        return self.where.varying or self.where.manual

    def roles(self, sizes: Sizes, arrived: Arrived, shapes: Shapes) -> Roles:
        return Roles(sizes)


@dataclasses.dataclass(frozen=True)
class QuantizeX(_DenseOp):
    """Quantizes x [..., K'] into leaves; all rows are one group."""

    recipe: Recipe
    packing: Packing

    def resolve(self, roles: Roles, arrived: Arrived, shapes: Shapes, wanted: Wanted) -> Resolved:
        lead = dividing(roles, arrived[0][:-1], shapes[0])
        last = tuple(axis for axis in roles.real(arrived[0][-1]) if axis not in sum(lead, ()))
        blocks = (1,) * (len(shapes[0]) - 1) + (self.packing.tile,)
        last, _ = fitting(roles, last, (), shapes[0][-1], blocks, len(shapes[0]) - 1)
        entries = (*lead, last)
        over = tuple(axis for axes in entries for axis in axes) + self.manual

        def local(x: jax.Array) -> tuple[jax.Array, ...]:
            return raw_leaves(quantize_rows(self.recipe, x, over))

        return Resolved((entries,), tuple(leaf_entries(self.packing, entries)), local)

    def factors(self) -> tuple[list[str], list[str]]:
        values = [*_lead(self.packing.ndim), "k"]
        return [" ".join(values)], _leaf_factors(self.packing, values, rows=True)


def quantize_rows(
    recipe: Recipe, x: jax.Array, over: Axes, *, gradient: bool = False
) -> QuantizedTensor:
    """Quantizes all local rows of x [..., K'] as one group; leaves have x's leading dims."""
    form = format_of(recipe)
    if form.columns and x.shape[-2] % form.tile:
        raise InvalidArgumentError(
            f"x must have a multiple of {form.tile} rows on every device for "
            f"{type(recipe).__name__}, got {x.shape[-2]} of {list(x.shape)}",
            argument="x",
        )
    rows = prod(x.shape[:-1])
    sizes = jnp.full((1,), rows, jnp.int32)
    flat = x.reshape(rows, x.shape[-1])
    q = quantize_plain.quantize_rows(recipe, flat, sizes, over, gradient=gradient)

    def leaf(name: str) -> Any:
        values = getattr(q, name)
        if values is None or values.ndim == 1:
            return values
        length = x.shape[-2] * values.shape[0] // max(rows, 1)
        return values.reshape(*x.shape[:-2], length, values.shape[-1])

    names = ("data", "scale", "data_columns", "scale_columns")
    return dataclasses.replace(q, group_sizes=None, **{name: leaf(name) for name in names})


def _flat(x: jax.Array) -> jax.Array:
    """Reshapes to [rows, last dim], either of which may be 0."""
    return x.reshape(prod(x.shape[:-1]), x.shape[-1])


def widened(x: Any, *, rows: bool, columns: bool = False) -> jax.Array:
    """Returns an operand as an array [rows, K'] or [K', N']; a quantized one in f32."""
    if not isinstance(x, QuantizedTensor):
        return _flat(x) if rows else x
    columns = columns and x.data_columns is not None
    fields = {}
    for name in ("data", "scale", "data_columns", "scale_columns"):
        leaf = getattr(x, name)
        if leaf is not None and leaf.ndim > 1:
            leaf = _flat(leaf) if rows else leaf[None]
        fields[name] = leaf
    count = fields["data"].shape[0]
    sizes = jnp.full((1,), count, jnp.int32) if rows else None
    full = dataclasses.replace(x, group_sizes=sizes, **fields)
    values = full.dequantize(jnp.float32, columns=columns)
    return values if rows else values[0]


@dataclasses.dataclass(frozen=True)
class QuantizeW(_DenseOp):
    """Quantizes a kernel [K', N'] into leaves."""

    recipe: Recipe
    packing: Packing

    def resolve(self, roles: Roles, arrived: Arrived, shapes: Shapes, wanted: Wanted) -> Resolved:
        taken, before = [], []
        for dim, axes in enumerate(arrived[0]):
            blocks = (self.packing.tile,) * 2
            kept, _, lost = whole_blocks(roles, roles.real(axes), (), shapes[0][dim], blocks, dim)
            taken.append(kept)
            before.append(lost)
        weight = Weight(tuple(taken), ((), ()), tuple(before))
        entries, over = weight.entries, flat(weight.entries)

        def local(w: jax.Array) -> tuple[jax.Array, ...]:
            w = gather(w, weight.before)
            q = quantize_plain.quantize_kernel(self.recipe, w[None], over)
            return raw_leaves(jax.tree.map(lambda x: x if x.ndim == 1 else x[0], q))

        return Resolved((weight.sharding,), tuple(leaf_entries(self.packing, entries)), local)

    def factors(self) -> tuple[list[str], list[str]]:
        return ["k n"], _leaf_factors(self.packing, ["k", "n"])


@dataclasses.dataclass(frozen=True)
class _Matmul(_DenseOp):
    """Base of the forward and backward matmul ops.

    Attributes:
        x: leaves of x [..., K'].
        kernel: leaves of the kernel [K', N'].
        has_bias: whether a bias [N'] follows.
        dtype: of the resulting rows.
    """

    x: Packing
    kernel: Packing
    has_bias: bool
    dtype: Any

    def place(
        self,
        roles: Roles,
        arrived: Sequence[Entries],
        shapes: Shapes,
        wanted: Entries | None = None,
    ) -> Dense:
        first = len(self.x)
        lead = shapes[0][:-1]
        return place(
            roles,
            arrived[0],
            arrived[first],
            (shapes[first][0], shapes[first][1]),
            wanted=wanted,
            lead_shape=lead,
            blocks=(self.kernel.tile,) * 2,
        )

    def taken(self, place: Dense) -> list[Entries]:
        bias = [(place.columns,)] if self.has_bias else []
        slabs = leaf_entries(self.x, place.x)
        return [*slabs, *leaf_entries(self.kernel, place.kernel.entries), *bias]

    def opened(self, place: Dense, blocks: Sequence[jax.Array]) -> tuple[Any, Any, Any]:
        """Unpacks local blocks into (x, gathered kernel, bias)."""
        first, after = len(self.x), len(self.x) + len(self.kernel)
        leaves = [
            leaf if leaf.ndim == 1 else gather(leaf, place.kernel.gathered)
            for leaf in blocks[first:after]
        ]
        bias = blocks[after] if self.has_bias else None
        return unpack(self.x, blocks[:first]), unpack(self.kernel, leaves), bias

    def shared_factors(self) -> list[str]:
        # Give x's K' a factor of its own, because the kernel's would shard activations over fsdp.
        x = _leaf_factors(self.x, [*_lead(self.x.ndim), "j"], rows=True)
        kernel = _leaf_factors(self.kernel, ["k", "n"])
        return [*x, *kernel, *(["n"] if self.has_bias else [])]


@dataclasses.dataclass(frozen=True)
class DenseForward(_Matmul):
    """The forward op: x leaves, kernel leaves, bias -> (y [..., N'],)."""

    def resolve(self, roles: Roles, arrived: Arrived, shapes: Shapes, wanted: Wanted) -> Resolved:
        place = self.place(roles, arrived, shapes, None if wanted is None else wanted[0])
        sums = Sums(roles, self.where.manual)

        def local(*blocks: jax.Array) -> tuple[jax.Array, ...]:
            x, kernel, bias = self.opened(place, blocks)
            lead = blocks[0].shape[:-1]
            rows, matrix = widened(x, rows=True), widened(kernel, rows=False)
            y = dot(rows, matrix, (1, 0)).reshape(*lead, matrix.shape[1])
            if place.scatter is None:
                y = sums.total(y, place.contracted)
            else:
                y = scatter(y, place.contracted, place.scatter)
            if bias is not None:
                y = y + bias.astype(y.dtype)
            return (y.astype(self.dtype),)

        return Resolved(tuple(self.taken(place)), (place.out,), local)

    def factors(self) -> tuple[list[str], list[str]]:
        return self.shared_factors(), [" ".join([*_lead(self.x.ndim), "n"])]


@dataclasses.dataclass(frozen=True)
class DenseBackward(_Matmul):
    """The backward op: x leaves, kernel leaves, bias, grad [..., N'] -> d_x, d_kernel, d_bias.

    Attributes:
        recipe: how the gradient is quantized; None does not quantize.
        kernel_dtype: of d_kernel.
        bias_dtype: of d_bias.
    """

    recipe: Recipe | None
    kernel_dtype: Any
    bias_dtype: Any

    def resolve(self, roles: Roles, arrived: Arrived, shapes: Shapes, wanted: Wanted) -> Resolved:
        place = self.place(roles, arrived, shapes)
        sums = Sums(roles, self.where.manual)
        crossed = place.summed + place.columns + self.manual

        def local(*blocks: jax.Array) -> tuple[jax.Array, ...]:
            x, kernel, bias = self.opened(place, blocks)
            grad: Any = blocks[-1]
            flat = _flat(grad)
            d_bias = []
            if bias is not None:
                part = sums.total(flat.astype(wide(flat)).sum(0), place.summed)
                d_bias.append(part.astype(self.bias_dtype))
            if self.recipe is not None:
                grad = quantize_rows(self.recipe, grad, crossed, gradient=True)
            rows = widened(grad, rows=True)
            matrix = widened(kernel, rows=False, columns=True)
            d_x = sums.total(dot(rows, matrix, (1, 1)), place.columns)
            left = widened(x, rows=True, columns=True)
            right = widened(grad, rows=True, columns=True)
            d_kernel = sums.back(dot(left, right, (0, 0)), place.kernel.taken_off, place.summed)
            d_x = d_x.reshape(*blocks[-1].shape[:-1], d_x.shape[-1]).astype(self.dtype)
            return d_x, d_kernel.astype(self.kernel_dtype), *d_bias

        out = (*place.lead, place.columns)
        bias = [(place.columns,)] if self.has_bias else []
        results = (place.x, place.kernel.sharding, *bias)
        return Resolved((*self.taken(place), out), results, local)

    def factors(self) -> tuple[list[str], list[str]]:
        lead = _lead(self.x.ndim)
        made = [" ".join([*lead, "j"]), "k n", *(["n"] if self.has_bias else [])]
        return [*self.shared_factors(), " ".join([*lead, "n"])], made


@dataclasses.dataclass(frozen=True)
class Dense:
    """How operands and results of `dense` are sharded.

    Attributes:
        lead: axes on each leading dim of x and of the output.
        kernel: how the kernel [K', N'] is sharded.
        summed: axes that split the rows; the kernel's gradient is summed over them.
        scatter: leading dim of the output over which a reduce-scatter spreads the sum over the
            contracted axes. None is a plain sum.
    """

    lead: Entries
    kernel: Weight
    summed: Axes
    scatter: int | None = None

    @property
    def contracted(self) -> Axes:
        return self.kernel.kept[0]

    @property
    def columns(self) -> Axes:
        return self.kernel.kept[1]

    @property
    def x(self) -> Entries:
        return (*self.lead, self.contracted)

    @property
    def out(self) -> Entries:
        lead = [
            axes + (self.contracted if dim == self.scatter else ())
            for dim, axes in enumerate(self.lead)
        ]
        return (*lead, self.columns)


def place(
    roles: Roles,
    x: Sequence[Axes],
    kernel: Sequence[Axes],
    kernel_shape: tuple[int, int],
    *,
    wanted: Sequence[Axes] | None = None,
    lead_shape: Sequence[int] = (),
    blocks: tuple[int, ...] | None = None,
) -> Dense:
    """Decides how y = x @ kernel is sharded.

    Args:
        roles: the mesh's axes; outer and ep do not matter here.
        x: entries of x [..., K'] as it arrives.
        kernel: entries of the kernel [K', N'] as it arrives.
        kernel_shape: its global shape.
        wanted: entries of the output, if known.
        lead_shape: x's leading dims.
        blocks: per dim of the kernel, the number that must divide its local size.

    An axis that is on x's leading dims and on the kernel is gathered off the kernel, together with
    all minor axes of its tuple. Any other axis stays: on N', or on K' of both sides.
    """
    lead = dividing(roles, x[:-1], lead_shape)
    rows = set(flat(lead))
    on_k = tuple(axis for axis in roles.real(x[-1]) if axis not in rows)
    entries, gathered, before = [], [], []
    for dim, axes in enumerate(padded(kernel, 2)):
        free = tuple(axis for axis in roles.real(axes) if axis not in on_k)
        first = next((i for i, axis in enumerate(free) if axis in rows), len(free))
        kept, gone = (on_k if dim == 0 else ()) + free[:first], free[first:]
        kept, gone, lost = whole_blocks(roles, kept, gone, kernel_shape[dim], blocks, dim)
        entries.append(kept + gone)
        gathered.append(gone)
        before.append(lost)
    taken = Weight(tuple(entries), tuple(gathered), tuple(before))
    found = Dense(lead, taken, flat(lead))
    return dataclasses.replace(found, scatter=_scattered(roles, found, wanted, lead_shape))


def dividing(roles: Roles, lead: Sequence[Axes], shape: Sequence[int]) -> Entries:
    """Returns axes on leading dims, without axes that do not divide a dim evenly."""
    real = (roles.real(axes) for axes in lead)
    if not shape:
        return tuple(real)
    pairs = zip(real, shape, strict=False)
    return tuple(axes if size % roles.size(axes) == 0 else () for axes, size in pairs)


def _scattered(
    roles: Roles, found: Dense, wanted: Sequence[Axes] | None, lead_shape: Sequence[int]
) -> int | None:
    if wanted is None or not found.contracted:
        return None
    for dim, size in enumerate(lead_shape):
        over = found.lead[dim] + found.contracted
        if roles.real(wanted[dim]) == over and size % roles.size(over) == 0:
            return dim
    return None
