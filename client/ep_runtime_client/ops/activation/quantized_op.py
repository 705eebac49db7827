"""The experts' activation as what the matmul behind it takes: quantized rows, over slabs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from ep_runtime_client.base.layers import EpLayer, TracedLayer
from ep_runtime_client.ops.activation import op as activation_op
from ep_runtime_client.ops.activation import plain as activation_plain
from ep_runtime_client.ops.activation import quantized_kernels, quantized_plain
from ep_runtime_client.ops.activation.function import Activation
from ep_runtime_client.ops.activation.op import ActivationOp
from ep_runtime_client.ops.activation.quantized_plain import QuantizedActivation
from ep_runtime_client.ops.partitioning import regions, spread
from ep_runtime_client.ops.partitioning.resolved import Resolved
from ep_runtime_client.ops.partitioning.roles import Entries, Roles
from ep_runtime_client.ops.quantize import ops as quantize_ops
from ep_runtime_client.ops.quantize.formats.recipes import Recipe
from ep_runtime_client.ops.quantize.formats.table import format_of
from ep_runtime_client.ops.quantize.packing import Packing, unpack
from ep_runtime_client.ops.quantize.quantized_tensor import QuantizedTensor
from ep_runtime_client.ops.tracing import eager
from ep_runtime_client.ops.tracing.varying import Axes


@dataclasses.dataclass(frozen=True)
class _Op:
    """hidden, group_sizes [R, L], *row_weights -> group_sizes again, after the leaves of the
    quantized rows [R, C, M], and those. Hashable.

    Attributes:
        plain: the activation itself.
        recipe: how its rows are quantized.
        num_experts: E.
    """

    plain: ActivationOp
    recipe: Recipe
    num_experts: int

    name: ClassVar[str] = "activation"

    @property
    def where(self) -> regions.Where:
        return self.plain.where

    @property
    def packing(self) -> Packing:
        return quantize_ops.packing_of(self.recipe, 3, rows=True)

    def roles(
        self, sizes: tuple[tuple[str, int], ...], arrived: Sequence[Entries], shapes: Any
    ) -> Roles:
        return self.plain.roles(sizes, arrived, shapes)

    def resolve(
        self,
        roles: Roles,
        arrived: Sequence[Entries],
        shapes: Sequence[tuple[int, ...]],
        wanted: Sequence[Entries] | None,
    ) -> Resolved:
        inner = self.plain.inner(roles, arrived, shapes, format_of(self.recipe).tile)
        operands, (rows, slab) = self.plain.entries(roles, inner)
        over = tuple(dict.fromkeys(roles.real(roles.outer) + inner))
        experts = self.num_experts // roles.size(roles.ep)
        static = QuantizedActivation(self.plain.activation, self.recipe, experts, over)

        def local(hidden: jax.Array, sizes: jax.Array, *weights: jax.Array) -> tuple[Any, ...]:
            given = weights[0] if weights else None
            q = quantized_plain.forward(static, hidden, given, sizes)
            leaves = quantize_ops.raw_leaves(q)
            return activation_plain.after(sizes, leaves[0]), *leaves

        return Resolved(operands, (slab, *self.packing.spread(rows)), local)

    def factors(self) -> tuple[list[str], list[str]]:
        leaves = self.packing.factors(quantize_ops.row_factors(3, "m"))
        return self.plain.factors()[0], ["r l", *leaves]


def takes(static: Activation, recipe: Recipe | None, hidden: jax.Array) -> bool:
    """Whether `activate` saves a pass in programs for this process's GPUs."""
    return quantized_kernels.takes(static, recipe, hidden)


def activate(
    layer: EpLayer | TracedLayer,
    static: Activation,
    recipe: Recipe,
    hidden: jax.Array,
    row_weights: jax.Array | None,
    group_sizes: jax.Array,
    *,
    inner_axes: Axes | None = None,
) -> QuantizedTensor:
    """`activation.activate`, quantized as `multiply` with this recipe quantizes rows.

    Args:
        layer, static, hidden, row_weights, group_sizes, inner_axes: as `activation.activate` takes
            them.
        recipe: one that `takes` says yes to.

    Returns:
        Rows [R, C, M] whose `origin` are the activated ones. A compiled program computes those
        where something reads them, and the matmul's gradient goes to them alone.
    """
    plain, arrived, operands = activation_op.call_of(
        layer, static, hidden, row_weights, group_sizes, inner_axes
    )
    op = _Op(plain, recipe, regions.num_experts_of(layer))
    operands = tuple(lax.stop_gradient(x) for x in operands)
    sizes, leaves = eager.run(_run, (op, arrived), *operands)
    kept = quantize_ops.raw(dataclasses.replace(leaves, amax=None))
    sizes, kept = jax.tree.map(lambda leaf: checkpoint_name(leaf, "ep_q_x"), (sizes, kept))
    rows = activation_op.activate(
        layer, static, hidden, row_weights, sizes, inner_axes=inner_axes, ordered=False
    )
    made = quantize_ops.from_raw(kept, rows=True)
    assert isinstance(made, QuantizedTensor)
    return dataclasses.replace(made, group_sizes=group_sizes, origin=rows)


def _run(call: Any, *operands: jax.Array) -> tuple[jax.Array, QuantizedTensor]:
    op, inner = call
    roles = op.where.roles
    arrived = op.plain.entries(roles, inner)[0] if roles is not None else ()
    sizes, *leaves = spread.run(op, arrived, *operands)
    made = unpack(op.packing, leaves)
    assert isinstance(made, QuantizedTensor)
    return sizes, made
