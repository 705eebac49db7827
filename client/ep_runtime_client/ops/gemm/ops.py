"""Grouped GEMM, forward and backward, as ops that run on a mesh in either partitioning mode."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from ep_runtime_client.ops.gemm import plain
from ep_runtime_client.ops.gemm.plain import Gemm, wide
from ep_runtime_client.ops.partitioning.placement import Grouped, expert_weight, grouped
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
)
from ep_runtime_client.ops.quantize import plain as quantize_plain
from ep_runtime_client.ops.quantize.formats.recipes import Recipe
from ep_runtime_client.ops.quantize.ops import kernel_factors, row_factors, rows_roles
from ep_runtime_client.ops.quantize.pair import of_both, of_each
from ep_runtime_client.ops.quantize.quantized_tensor import Packing, gather, unpack
from ep_runtime_client.ops.tracing import slack


@dataclasses.dataclass(frozen=True)
class _GemmOp:
    """Base of the forward and backward ops. Hashable.

    Attributes:
        where: the mesh axes and the mode in which the op runs.
        lhs: leaves of the rows [R, C, K'].
        rhs: leaves of the weight [E, K', *N'].
        has_bias: whether a bias [E, *N'] follows them; group_sizes [R, L] always do.
        gemm: static side of the GEMM on one device.
    """

    where: Partitioning
    lhs: Packing
    rhs: Packing
    has_bias: bool
    gemm: Gemm

    name: ClassVar[str] = "grouped_gemm"

    @property
    def _weight(self) -> int:
        """Position of the weight's first leaf among the operands."""
        return len(self.lhs)

    def roles(self, sizes: Sizes, arrived: Arrived, shapes: Shapes) -> Roles:
        groups = shapes[len(self.lhs) + len(self.rhs) + int(self.has_bias)]
        experts = shapes[self._weight][0]
        return rows_roles(sizes, arrived[0], groups, experts)

    def place(self, roles: Roles, arrived: Arrived, shapes: Shapes) -> Grouped:
        first, after = self._weight, self._weight + len(self.rhs)
        return grouped(
            roles,
            arrived[0],
            self.rhs.of_values(arrived[first], ()),
            self.rhs.of_values(shapes[first], 2),
            bias=arrived[after] if self.has_bias else (),
            blocks=self.rhs.blocks,
            ruled=self.where.mode == "rule",
        )

    def taken(self, place: Grouped) -> tuple[Entries, ...]:
        """Entries of the operands before group_sizes, as the op wants them."""
        bias = [place.bias.entries] if self.has_bias else []
        slabs = self.lhs.spread(place.lhs)
        return (*slabs, *self.rhs.spread(place.weight.entries), *bias, place.sizes)

    def opened(self, place: Grouped, blocks: Sequence[jax.Array]) -> tuple[Any, Any, Any, Any]:
        """Unpacks local blocks into (lhs, rhs, bias, group_sizes), with the weight gathered."""
        first, last = self._weight, self._weight + len(self.rhs)
        sizes = blocks[last + int(self.has_bias)]
        gathered = self.rhs.spread(place.weight.gathered)
        leaves = [gather(*each) for each in zip(blocks[first:last], gathered, strict=True)]
        bias = gather(blocks[last], place.bias.gathered) if self.has_bias else None
        return unpack(self.lhs, blocks[:first], sizes), unpack(self.rhs, leaves), bias, sizes

    def shared_factors(self) -> list[str]:
        """Returns the Shardy factors of the operands up to group_sizes."""
        kernel = kernel_factors(self.rhs.ndim)
        bias = [" ".join([kernel[0], *kernel[2:]])] if self.has_bias else []
        # Plain rows keep their sharding, which a type may give. Quantized rows are split over the
        # weight's axes, so that no two devices quantize the same rows. Without a layer nothing
        # constrains either to the slabs' sharding.
        own = self.where.roles is None or self.lhs.recipe is None
        rows = self.lhs.factors(row_factors(3, "j" if own else "k"))
        return [*rows, *self.rhs.factors(kernel), *bias, "r l"]

    @property
    def out_factors(self) -> str:
        return " ".join(["r", "c", *kernel_factors(self.rhs.ndim)[2:]])


@dataclasses.dataclass(frozen=True)
class GemmForward(_GemmOp):
    """The forward op: lhs leaves, rhs leaves, bias, group_sizes -> (out [R, C, *N'],)."""

    def resolve(self, roles: Roles, arrived: Arrived, shapes: Shapes, wanted: Wanted) -> Resolved:
        place = self.place(roles, arrived, shapes)
        sums = Sums(roles, self.where.manual)
        split = sums.free(place.contracted)
        parts = roles.real(place.contracted)  # the caller's shard_map sums over manual axes

        def local(*blocks: jax.Array) -> tuple[jax.Array, ...]:
            lhs, rhs, bias, sizes = self.opened(place, blocks)
            gemm = self.gemm
            if split:
                gemm = dataclasses.replace(gemm, out_dtype=wide(lhs, rhs))  # partial sums stay wide
            if parts and bias is not None:
                bias = of_first(parts, bias)
            out = slack.cleared(plain.forward(gemm, lhs, rhs, bias, sizes), sizes)
            return (sums.total(out, split).astype(self.gemm.out_dtype),)

        return Resolved(self.taken(place), (place.out,), local)

    def factors(self) -> tuple[list[str], list[str]]:
        return self.shared_factors(), [self.out_factors]


@dataclasses.dataclass(frozen=True)
class GemmBackward(_GemmOp):
    """The backward op: lhs and rhs leaves, bias, group_sizes, grad [R, C, *N'], rhs -> d_lhs,
    d_rhs, d_bias; a pair has two arrays for rhs and d_rhs.

    Attributes:
        recipe: how the gradient is quantized; None does not quantize.
        has_rhs: whether the weight itself is an operand, because its leaves are sharded otherwise
            and its gradient must be sharded like the weight. Its values are not read.
        weight_dtype: of d_rhs.
        bias_dtype: of d_bias.
        paired: whether the weight is a pair; a quantized pair has the leaves of one array.
    """

    recipe: Recipe | None
    weight_dtype: Any
    bias_dtype: Any
    has_rhs: bool = False
    paired: bool = False

    def resolve(self, roles: Roles, arrived: Arrived, shapes: Shapes, wanted: Wanted) -> Resolved:
        place = self.place(roles, arrived, shapes)
        sums = Sums(roles, self.where.manual)
        summed = sums.free(place.columns)
        crossed = tuple(dict.fromkeys(roles.real(roles.outer) + place.columns))
        shared = roles.real(roles.outer)  # axes over which the weight's gradient is summed
        weight, given = place.weight, len(self.taken(place))
        if self.has_rhs:
            own, shape = arrived[-1], shapes[-1]
            if self.paired:
                own, shape = of_both(own, ()), of_both(shape, 2)
            weight = expert_weight(roles, own, shape, blocks=self.rhs.blocks)

        def local(*blocks: jax.Array) -> tuple[jax.Array, ...]:
            lhs, rhs, bias, sizes = self.opened(place, blocks)
            # The bias first, because its gradient sums `grad` before `grad` is quantized.
            experts, d_bias = rhs.shape[0], []
            grad: Any = blocks[given]
            if bias is not None:
                summed_rows = plain.bias_grad(self.gemm, grad, sizes, experts)
                part = sums.back(summed_rows, place.bias.gathered, shared)
                outside = tuple(a for a in roles.real(place.contracted) if a in self.where.manual)
                part = of_first(outside, part) if outside else part
                d_bias.append(part.astype(self.bias_dtype))
            if self.recipe is not None:
                options: dict[str, Any] = {"num_experts": experts, "clear_slack": False}
                grad = quantize_plain.quantize_rows(
                    self.recipe, grad, sizes, crossed, gradient=True, **options
                )
            gemm = self.gemm
            if summed:
                gemm = dataclasses.replace(gemm, out_dtype=wide(grad, rhs))
            # Values that are summed over devices stay wide.
            dtype = None if shared else self.weight_dtype
            d_lhs, d_rhs = plain.pullback(gemm, lhs, rhs, grad, sizes, dtype, paired=self.paired)
            d_lhs = sums.total(slack.cleared(d_lhs, sizes), summed)
            taken_off = of_each(weight.taken_off, self.paired)
            d_weights = [sums.back(each, taken_off, shared) for each in jax.tree.leaves(d_rhs)]
            d_weights = [each.astype(self.weight_dtype) for each in d_weights]
            return d_lhs.astype(self.gemm.out_dtype), *d_weights, *d_bias

        sharding = [of_each(weight.sharding, self.paired)] * (1 + int(self.paired))
        operands = (*self.taken(place), place.out, *(sharding if self.has_rhs else []))
        bias = (place.bias.entries,) if self.has_bias else ()
        return Resolved(operands, (place.lhs, *sharding, *bias), local)

    def factors(self) -> tuple[list[str], list[str]]:
        kernel = kernel_factors(self.rhs.ndim)
        count = 1 + int(self.paired)
        named = [kernel[0], *(f"{factor}_own" for factor in kernel[1:])] if self.has_rhs else kernel
        own = [" ".join(of_each(named, self.paired))] * count
        # Without a layer nothing constrains rows to the slabs' layout, and a factor shared with the
        # weight's K' would shard their gradient over fsdp.
        rows = row_factors(3, "j" if self.where.roles is None else "k")
        made = [" ".join(rows), *own]
        if self.has_bias:
            made.append(" ".join([kernel[0], *kernel[2:]]))
        itself = own if self.has_rhs else []
        return [*self.shared_factors(), self.out_factors, *itself], made


def of_first(axes: tuple[str, ...], bias: jax.Array) -> jax.Array:
    """Returns a bias or its gradient on the first device along `axes`; zeros on the others."""
    return jnp.where(lax.axis_index(axes) == 0, bias, jnp.zeros_like(bias))
