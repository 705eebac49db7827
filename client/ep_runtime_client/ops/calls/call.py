"""The static side of one op call, which is the same on every device of the program."""

from __future__ import annotations

import dataclasses
import functools
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ep_runtime.arguments import check_whole
from ep_runtime.errors import InvalidArgumentError
from ep_runtime.layer_specs import no_drop_rows
from ep_runtime.layout import spread_capacity
from ep_runtime.specs import GroupSpec, check_holds_rows
from ep_runtime_client.base.layers import EpLayer
from ep_runtime_client.ops.calls.token_layout import TokenLayout
from ep_runtime_client.ops.partitioning.regions import Partitioning, varied_over
from ep_runtime_client.ops.tracing.varying import settled


@dataclasses.dataclass(frozen=True)
class PlanMeta:
    """Settings for which a plan was made. Hashable; the static part of the Plan pytree.

    Attributes:
        layer: the static layer (layer 0 of a stack).
        layout: how the tokens are sharded over the mesh.
        capacity: C, rows of one slab in this call.
        handle: which of the layer's handles the call uses.
    """

    layer: EpLayer
    layout: TokenLayout
    capacity: int
    handle: int

    @property
    def group(self) -> GroupSpec:
        return self.layer.group_spec


def _follows() -> Any:
    """Declares a field that `__post_init__` computes from the others."""
    return dataclasses.field(init=False, repr=False, compare=False)


@dataclasses.dataclass(frozen=True)
class Call:
    """One op call as seen inside its local function. Hashable: a static argument of custom_vjp.

    Attributes:
        meta: the settings for which the plan was made.
        where: where the call's ops run; operands are local along its manual axes.
        clear_slack: a caller may read a gradient's rows past the last group; if False, a GPU leaves
            these rows as they are.
        own_alignment: rows to which zones are aligned if no caller sees them; 0: the layer's.
        spread: experts may have copies on other ranks: `group` and `capacity` are then for the
            physical experts (`moe/copies.py`).
        layer, group, capacity: from `meta`, unless `spread`.
        layout: how the tokens are sharded over the axes that are not manual.
        row_alignment: rows to which experts' zones in a slab or workspace are aligned. Drops and
            num_recv use the layer's alignment, which must be a multiple of this one.
    """

    meta: PlanMeta
    where: Partitioning
    clear_slack: bool = True
    own_alignment: int = 0
    spread: bool = False
    layer: EpLayer = _follows()
    group: GroupSpec = _follows()
    layout: TokenLayout = _follows()
    capacity: int = _follows()
    row_alignment: int = _follows()

    def __post_init__(self) -> None:
        layer, layout, manual = self.meta.layer, self.meta.layout, self.where.manual
        found = {
            "layer": layer,
            "group": layer.group_spec.physical if self.spread else layer.group_spec,
            "layout": layout.within(layer.group_spec, manual) if manual else layout,
            "capacity": _spread_capacity(self.meta) if self.spread else self.meta.capacity,
            "row_alignment": self.own_alignment or layer.alignment,
        }
        for name, value in found.items():
            object.__setattr__(self, name, value)

    @functools.cached_property
    def num_slabs(self) -> int:
        """Number of slabs on dim 0 of arrays here: R over the token axes that are not manual."""
        free = (axis for axis in self.group.token_axes if axis not in self.where.manual)
        return prod(self.group.axis_sizes[axis] for axis in free)

    def varied(self, *operands: Any) -> Call:
        """Returns the call with the manual axes that its operands and results vary over."""
        if not self.where.manual:
            return self
        varying = varied_over(self.group, self.where.manual, operands)
        return dataclasses.replace(self, where=dataclasses.replace(self.where, varying=varying))


def _spread_capacity(meta: PlanMeta) -> int:
    layer, group = meta.layer, meta.group
    return spread_capacity(
        meta.capacity,
        slots=meta.layout.tokens_per_rank * layer.top_k,
        experts=group.experts_per_rank,
        spare_experts=group.spare_experts,
        alignment=layer.alignment,
    )


def world_rank(group: GroupSpec) -> jax.Array:
    """Returns this device's world rank, int32 [1]: domain * N + ep rank. Needs manual axes."""
    rank: Any = jnp.int32(0)
    for axis in group.domain_axes + group.ep_axis:
        size = group.axis_sizes[axis]
        rank = rank * size + (lax.axis_index(axis) if size > 1 else 0)
    others = tuple(axis for axis in group.domain_axes if axis not in group.token_axes)
    return settled(rank.reshape(1), others)


def resolve_capacity(layer: EpLayer, tokens_per_rank: int, capacity: int | None) -> int:
    """Returns C: the argument, or the smaller of the group's and this call's no-drop bound.

    Raises:
        InvalidArgumentError: the argument is above the group's capacity, or too small for a row.
    """
    group = layer.group_spec
    most = group.recv_capacity_per_rank
    if capacity is None and tokens_per_rank == 0:
        return 0
    if capacity is None:
        bound = no_drop_rows(
            top_k=layer.top_k,
            alignment=layer.alignment,
            num_experts=group.num_experts,
            max_tokens_per_rank=tokens_per_rank,
            ep_size=group.ep_size,
        )
        return min(most, bound)
    if not 1 <= capacity <= most:
        raise InvalidArgumentError(
            f"capacity must be 1 to {most} (rows per rank of group {group.name!r}), got {capacity}",
            argument="capacity",
        )
    check_holds_rows("capacity", capacity, layer.alignment, f" of layer {layer.name!r}")
    return int(capacity)


def check_handle(layer: EpLayer, handle: int) -> int:
    """Returns `handle`; raises InvalidArgumentError unless the layer has it."""
    if not 0 <= check_whole("handle", handle, 0) < layer.in_flight:
        raise InvalidArgumentError(
            f"handle must be 0 to {layer.in_flight - 1} (in_flight of layer {layer.name!r}), "
            f"got {handle}",
            argument="handle",
        )
    return int(handle)
