"""The static side of one op call: what every device of the program agrees on."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from ep_runtime import layout as sizes
from ep_runtime.errors import InvalidArgumentError
from ep_runtime.specs import GroupSpec
from ep_runtime_client.layers import EpLayer, TracedLayer, resolve
from ep_runtime_client.ops.token_layout import TokenLayout


@dataclasses.dataclass(frozen=True)
class PlanMeta:
    """What a plan was made for. Hashable; the static part of the Plan pytree.

    Attributes:
        layer: the static layer (layer 0 of a stack).
        layout: how the tokens lie on the mesh.
        top_k: K.
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


@dataclasses.dataclass(frozen=True)
class Call:
    """One op call as its local function sees it. Hashable: a static argument of custom_vjp.

    Attributes:
        meta: what the plan was made for.
        mesh: the layer's mesh.
        manual: the call is inside a shard_map of the user; operands are local blocks.
    """

    meta: PlanMeta
    mesh: Mesh
    manual: bool

    @property
    def layer(self) -> EpLayer:
        return self.meta.layer

    @property
    def group(self) -> GroupSpec:
        return self.meta.layer.group_spec

    @property
    def capacity(self) -> int:
        return self.meta.capacity

    @property
    def num_slabs(self) -> int:
        """Slabs on dim 0 of arrays here: R, or 1 inside a shard_map of the user."""
        return 1 if self.manual else self.group.num_slabs

    @property
    def lead(self) -> tuple[int, ...]:
        """Leading dims of token arrays here."""
        return self.meta.layout.local if self.manual else self.meta.layout.lead


@dataclasses.dataclass(frozen=True)
class Region:
    """Where an op is traced: at top level, or inside a fully manual shard_map."""

    manual: bool


def open_layer(layer: EpLayer | TracedLayer) -> tuple[EpLayer, jax.Array, Mesh]:
    """(static layer, layer index int32 [1], mesh) of a live layer.

    Raises:
        InvalidArgumentError: not a layer.
        StaleHandleError: its group is closed, reclaimed, or was replaced by another spec.
    """
    static, index = resolve(layer)
    return static, jnp.asarray(index, jnp.int32).reshape(1), static.group.mesh


def find_region(group: GroupSpec) -> Region:
    """Whether the op is at top level or inside a shard_map that is manual over all token axes.

    Raises:
        NotImplementedError: some axes of the group are manual and some are not.
    """
    manual = frozenset(jax.sharding.get_abstract_mesh().manual_axes)
    sharded = {axis for axis, size in group.mesh_axes if size > 1}
    taken = sharded & manual
    if not taken:
        return Region(manual=bool(manual) and manual >= set(group.token_axes))
    if taken == sharded:
        return Region(manual=True)
    # The seam for a nested shard_map over exactly the missing axes.
    raise NotImplementedError(
        f"group {group.name!r} is used inside a shard_map that is manual over {sorted(taken)} "
        f"but not over {sorted(sharded - taken)}; make all of them manual, or none"
    )


def varying(x: jax.Array) -> jax.Array:
    """`x` typed as varying over every manual axis, where the shard_map around tracks that."""
    mesh = jax.sharding.get_abstract_mesh()
    tracked = getattr(jax.typeof(x), "manual_axis_type", None)
    known = tracked.varying if tracked is not None else frozenset()
    missing = tuple(axis for axis in mesh.manual_axes if axis not in known)
    return lax.pcast(x, missing, to="varying") if missing else x


def world_rank(group: GroupSpec) -> jax.Array:
    """World rank of this device, int32 [1]: domain * N + ep rank. Needs manual axes."""
    rank: Any = jnp.int32(0)
    for axis in group.domain_axes + group.ep_axis:
        rank = rank * group.axis_sizes[axis] + _axis_index(group, axis)
    flat: jax.Array = rank.reshape(1)
    return flat


def _axis_index(group: GroupSpec, axis: str) -> Any:
    return lax.axis_index(axis) if group.axis_sizes[axis] > 1 else 0


def resolve_capacity(layer: EpLayer, tokens_per_rank: int, capacity: int | None) -> int:
    """C of a call: the argument, or the smaller of the group's and this call's no-drop bound.

    Raises:
        InvalidArgumentError: the argument is below 1 or above the group's capacity.
    """
    group = layer.group_spec
    most = group.recv_capacity_per_rank
    if capacity is None:
        bound = sizes.recv_capacity(
            num_experts=group.num_experts,
            top_k=layer.top_k,
            max_tokens_per_rank=tokens_per_rank,
            ep_size=group.ep_size,
            alignment=layer.alignment,
        )
        return min(most, bound)
    if not 1 <= capacity <= most:
        raise InvalidArgumentError(
            f"capacity must be 1 to {most} (rows per rank of group {group.name!r}), got {capacity}",
            argument="capacity",
        )
    return int(capacity)


def check_handle(layer: EpLayer, handle: int) -> int:
    """Raises InvalidArgumentError unless `handle` is one of the layer's."""
    if not 0 <= handle < layer.in_flight:
        raise InvalidArgumentError(
            f"handle must be 0 to {layer.in_flight - 1} (in_flight of layer {layer.name!r}), "
            f"got {handle}",
            argument="handle",
        )
    return int(handle)
