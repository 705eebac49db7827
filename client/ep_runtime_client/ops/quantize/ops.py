"""Quantization of rows and of kernels, as ops that run on a mesh in either partitioning mode."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
from jax.ad_checkpoint import checkpoint_name

from ep_runtime_client.ops.kernels import serve as kernels_serve
from ep_runtime_client.ops.partitioning import on_mesh
from ep_runtime_client.ops.partitioning.placement import expert_weight
from ep_runtime_client.ops.partitioning.regions import Partitioning
from ep_runtime_client.ops.partitioning.roles import (
    Arrived,
    Entries,
    Resolved,
    Roles,
    Shapes,
    Sizes,
    Wanted,
    flat,
    padded,
    read_off,
    say_once,
)
from ep_runtime_client.ops.quantize import plain
from ep_runtime_client.ops.quantize.formats.recipes import Recipe
from ep_runtime_client.ops.quantize.formats.table import format_of
from ep_runtime_client.ops.quantize.formats.tiles import bits, from_bits
from ep_runtime_client.ops.quantize.kernels import PRODUCT_MULTIPLE
from ep_runtime_client.ops.quantize.pair import Pair, of_both, of_each
from ep_runtime_client.ops.quantize.quantized_tensor import (
    FIELDS,
    Kernel,
    Packing,
    QuantizedTensor,
    gather,
    pack_fields,
    unpack,
)


@dataclasses.dataclass(frozen=True)
class QuantizeRows:
    """Quantizes x [R, C, K'] with group_sizes [R, L], and f32 scale [R, L] if given, into leaves.

    Attributes:
        where: the mesh axes and the mode in which the op runs.
        recipe: how to quantize.
        ndim: dims of x.
        num_experts: E, if known: slabs of one device share the amax of an expert.
        scaled: whether the scale is given (delayed scaling).
        clear_slack: a caller may read rows past the last group; see `plain`.
    """

    where: Partitioning
    recipe: Recipe
    ndim: int
    num_experts: int | None = None
    scaled: bool = False
    clear_slack: bool = True

    name: ClassVar[str] = "grouped_quantize"

    @property
    def packing(self) -> Packing:
        return packing_of(self.recipe, self.ndim, rows=True)

    def roles(self, sizes: Sizes, arrived: Arrived, shapes: Shapes) -> Roles:
        return rows_roles(sizes, arrived[0], shapes[1], self.num_experts)

    def resolve(self, roles: Roles, arrived: Arrived, shapes: Shapes, wanted: Wanted) -> Resolved:
        entries = self._entries(roles, arrived[0], shapes[0])
        over = tuple(dict.fromkeys(roles.real(roles.outer) + flat(entries[2:])))
        experts = None if self.num_experts is None else self.num_experts // roles.size(roles.ep)

        def local(x: jax.Array, sizes: jax.Array, *scale: jax.Array) -> tuple[jax.Array, ...]:
            options: dict[str, Any] = {"num_experts": experts, "clear_slack": self.clear_slack}
            given = scale[0] if scale else None
            q = plain.quantize_rows(self.recipe, x, sizes, over, scale=given, **options)
            return raw_leaves(q)

        groups = entries[:1] + ((),)
        operands = (entries, groups, *([groups] if self.scaled else []))
        return Resolved(operands, tuple(self.packing.spread(entries)), local)

    def _entries(self, roles: Roles, arrived: Entries, shape: tuple[int, ...]) -> Entries:
        last = tuple(axis for axis in roles.real(arrived[-1]) if axis not in roles.slab)
        unit = self.packing.tile
        if last and shape[-1] % (roles.size(last) * unit):
            say_once(
                f"x: K'={shape[-1]} over {roles.named(last)} does not leave multiples of {unit} "
                f"on every shard: {roles.named(last)} is gathered before the op"
            )
            last = ()
        return (*padded((roles.slab,), self.ndim - 1), last)

    def factors(self) -> tuple[list[str], list[str]]:
        values = row_factors(self.ndim)
        groups = ["r l"] * (2 if self.scaled else 1)
        return [" ".join(values), *groups], self.packing.factors(values)


@dataclasses.dataclass(frozen=True)
class QuantizeKernel:
    """Quantizes w [E, K', *N'], or gate and up [E, K', M], with f32 scale [E] if given, into
    leaves.

    Attributes:
        where: the mesh axes and the mode in which the op runs.
        recipe: how to quantize.
        shape: of w; for a pair [E, K', 2, M].
        scaled: whether the scale is given (delayed scaling).
        transposed: whether to make also a copy with K' contiguous in memory.
        paired: whether gate and up are two operands; the leaves are those of one array.
    """

    where: Partitioning
    recipe: Recipe
    shape: tuple[int, ...]
    scaled: bool = False
    transposed: bool = False
    paired: bool = False

    name: ClassVar[str] = "grouped_quantize"

    @property
    def packing(self) -> Packing:
        packing = packing_of(self.recipe, len(self.shape), rows=False)
        if not self.transposed:
            return packing
        dtypes = (*packing.dtypes, packing.dtypes[0])
        return dataclasses.replace(packing, names=(*packing.names, "transposed"), dtypes=dtypes)

    def roles(self, sizes: Sizes, arrived: Arrived, shapes: Shapes) -> Roles:
        return Roles(sizes, (), arrived[0][0])

    def resolve(self, roles: Roles, arrived: Arrived, shapes: Shapes, wanted: Wanted) -> Resolved:
        given, shape = arrived[0], shapes[0]
        if self.paired:
            given, shape = of_both(given, ()), of_both(shape, 2)
        weight = expert_weight(roles, given, shape, blocks=self.packing.blocks)
        over, count = weight.amax_axes(), 1 + int(self.paired)
        before, sharding = (of_each(x, self.paired) for x in (weight.before, weight.sharding))

        def local(*blocks: jax.Array) -> tuple[jax.Array, ...]:
            arrays = [gather(block, before) for block in blocks[:count]]
            w, scale = Pair(*arrays) if self.paired else arrays[0], blocks[count:]
            given = scale[0] if scale else None
            made = self.transposed
            q = plain.quantize_kernel(self.recipe, w, over, transposed=made, scale=given)
            return raw_leaves(q)

        scales = [weight.entries[:1]] if self.scaled else []
        operands = (*[sharding] * count, *scales)
        return Resolved(operands, tuple(self.packing.spread(weight.entries)), local)

    def factors(self) -> tuple[list[str], list[str]]:
        values = kernel_factors(len(self.shape))
        whole = uneven(self.where, self.shape, self.packing.blocks)
        made = [f"{factor}_whole" if dim in whole else factor for dim, factor in enumerate(values)]
        given = [" ".join(of_each(values, self.paired))] * (1 + int(self.paired))
        return [*given, *(["e"] if self.scaled else [])], self.packing.factors(made)


@dataclasses.dataclass(frozen=True)
class QuantizeStack:
    """Quantizes w [*stack, E, K', *N'], or gate and up, into leaves that keep the stack's dims.

    Attributes:
        kernel: the op for one layer.
        dims: number of dims of the stack.
    """

    kernel: QuantizeKernel
    dims: int

    name: ClassVar[str] = "grouped_quantize"

    @property
    def where(self) -> Partitioning:
        return self.kernel.where

    @property
    def packing(self) -> Packing:
        """Packing of one layer's leaves."""
        return self.kernel.packing

    def roles(self, sizes: Sizes, arrived: Arrived, shapes: Shapes) -> Roles:
        return Roles(sizes, (), arrived[0][self.dims])

    def resolve(self, roles: Roles, arrived: Arrived, shapes: Shapes, wanted: Wanted) -> Resolved:
        dims = self.dims
        each = self.kernel.resolve(
            roles, [x[dims:] for x in arrived], [x[dims:] for x in shapes], None
        )
        taken = {*flat(each.operands[0])}
        lead = tuple(
            axes if not {*axes} & taken and size % roles.size(axes) == 0 else ()
            for axes, size in zip(map(roles.real, arrived[0][:dims]), shapes[0], strict=False)
        )

        def local(*blocks: jax.Array) -> tuple[jax.Array, ...]:
            layers = blocks[0].shape[:dims]
            experts = blocks[0].shape[dims]
            count = math.prod(layers) * experts
            made = each.local(*(x.reshape(count, *x.shape[dims + 1 :]) for x in blocks))
            return tuple(x.reshape(*layers, experts, *x.shape[1:]) for x in made)

        operands = tuple((*lead, *x) for x in each.operands)
        return Resolved(operands, tuple((*lead, *x) for x in each.results), local)

    def factors(self) -> tuple[list[str], list[str]]:
        lead = " ".join(f"s{i}" for i in range(self.dims))
        given, made = self.kernel.factors()
        return [f"{lead} {x}" for x in given], [f"{lead} {x}" for x in made]


def transposes(recipe: Recipe, shape: Sequence[int]) -> bool:
    """Whether forward matmuls of kernels [E, K', *N'] want the quantizer to write `transposed`.

    The quantizing GPU kernel then makes both layouts in one read.
    """
    on_gpu = format_of(recipe).on_gpu
    if on_gpu is None or not on_gpu.rows:
        return False
    widths = (shape[1], math.prod(shape[2:]))
    return not any(width % PRODUCT_MULTIPLE for width in widths) and kernels_serve.multiplying()


def uneven(where: Partitioning, shape: tuple[int, ...], blocks: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the dims of a kernel that some mesh axis would split into incomplete blocks.

    Quantization changes the sharding of these dims.
    """
    sizes = (
        [] if where.roles is None else [n for a, n in where.roles.sizes if a not in where.roles.ep]
    )
    return tuple(
        dim
        for dim, unit in enumerate(blocks)
        if unit > 1 and any(shape[dim] % (unit * size) for size in sizes)
    )


def rows(
    call: tuple[QuantizeRows, Entries], x: jax.Array, sizes: jax.Array, *scale: jax.Array
) -> QuantizedTensor:
    """Runs the op that quantizes rows, which arrive with these entries."""
    op, arrived = call
    groups = padded((arrived[0],), 2)
    leaves = on_mesh.run_on_mesh(op, (arrived, groups, *([groups] * len(scale))), x, sizes, *scale)
    result = unpack(op.packing, leaves, sizes)
    assert isinstance(result, QuantizedTensor)
    return result


def kernel(
    call: tuple[QuantizeKernel, Entries], w: jax.Array | Pair, *scale: jax.Array
) -> QuantizedTensor:
    """Runs the op that quantizes kernels, which arrive with these entries per dim of its shape."""
    op, arrived = call
    arrays = jax.tree.leaves(w)
    given = (*[of_each(arrived, op.paired)] * len(arrays), *[arrived[:1]] * len(scale))
    leaves = on_mesh.run_on_mesh(op, given, *arrays, *scale)
    result = unpack(op.packing, leaves)
    assert isinstance(result, QuantizedTensor)
    return result


def weight(
    where: Partitioning,
    recipe: Recipe,
    arrived: Entries,
    w: jax.Array | Pair,
    *scale: jax.Array,
) -> tuple[QuantizedTensor, jax.Array | None]:
    """Quantizes kernels for a call's matmuls; returns them as `tagged` does, and their amax."""
    shape, scaled = w.shape, bool(scale)
    op = QuantizeKernel(
        where, recipe, shape, scaled, transposes(recipe, shape), isinstance(w, Pair)
    )
    q = kernel((op, arrived), w, *scale)
    return tagged(q, "ep_q_w"), q.amax


def packing_of(recipe: Recipe, ndim: int, *, rows: bool) -> Packing:
    """Describes the leaves that quantization makes."""
    leaves = format_of(recipe).leaves(recipe)
    return Packing(tuple(leaves), tuple(leaves.values()), recipe, ndim, rows)


def row_factors(ndim: int, last: str = "k") -> list[str]:
    """Returns Shardy factors of rows [R, C, *mid, K']."""
    return ["r", "c", *(f"m{i}" for i in range(ndim - 3)), last]


def kernel_factors(ndim: int) -> list[str]:
    """Returns Shardy factors of kernels [E, K', *mid, N']."""
    return ["e", "k", *(f"m{i}" for i in range(ndim - 3)), "n"]


def rows_roles(
    sizes: tuple[tuple[str, int], ...],
    entries: Entries,
    groups: Sequence[int],
    num_experts: int | None,
) -> Roles:
    """Infers roles from rows; without num_experts every group of every slab is its own expert."""
    num_slabs, num_groups = groups
    return read_off(
        sizes,
        entries[0],
        num_slabs=num_slabs,
        num_groups=num_groups,
        num_experts=num_slabs * num_groups if num_experts is None else num_experts,
    )


def raw_leaves(q: QuantizedTensor) -> tuple[jax.Array, ...]:
    """Returns the leaves of a quantized operand, 8-bit floats as uint8."""
    leaves, _ = pack_fields(q, FIELDS, rows=q.is_rows)
    return tuple(leaves)


def tagged(q: Kernel, name: str) -> QuantizedTensor:
    """Tags the leaves of `q` that backward reads with `checkpoint_name`; 8-bit floats as uint8."""
    assert isinstance(q, QuantizedTensor)
    bare = dataclasses.replace(q, amax=None, group_sizes=None)
    return jax.tree.map(lambda leaf: checkpoint_name(bits(leaf), name), bare)


def from_raw(x: Kernel, *, rows: bool) -> Kernel:
    """Undoes `tagged` for a tensor that this package quantized; returns anything else unchanged."""
    if not isinstance(x, QuantizedTensor) or x.data.dtype != jax.numpy.uint8:
        return x
    packing = packing_of(x.recipe, x.ndim, rows=rows)
    given = [
        (name, dtype, getattr(x, name))
        for name, dtype in zip(packing.names, packing.dtypes, strict=True)
    ]
    leaves: dict[str, Any] = {
        name: from_bits(leaf, dtype) for name, dtype, leaf in given if leaf is not None
    }
    if x.transposed is not None:
        leaves["transposed"] = from_bits(x.transposed, packing.dtypes[0])
    return dataclasses.replace(x, **leaves)
