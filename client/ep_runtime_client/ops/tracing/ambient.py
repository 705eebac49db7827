"""Finds the layer of a call, and the shard_map and mesh around it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ep_runtime.errors import InvalidArgumentError
from ep_runtime.specs import GroupSpec
from ep_runtime_client.base.jax_internals import under_tracing
from ep_runtime_client.base.layers import EpLayer, TracedLayer, live_groups, resolve
from ep_runtime_client.ops.tracing.varying import Axes


def open_layer(layer: EpLayer | TracedLayer) -> tuple[EpLayer, jax.Array, Mesh]:
    """Returns (static layer, layer index int32 [1], mesh) of a live layer.

    Raises:
        InvalidArgumentError: `layer` is not a layer.
        StaleHandleError: the layer's group is closed, reclaimed, or was replaced by another spec.
    """
    static, index = resolve(layer)
    mesh = live_groups.of(static).group.mesh
    if isinstance(index, int):
        return static, constant(np.full(1, index, np.int32), mesh), mesh
    return static, jnp.asarray(index, jnp.int32).reshape(1), mesh


def constant(value: Any, mesh: Mesh) -> jax.Array:
    """Converts a NumPy array to a JAX array; if eager, on every device.

    `jax.transfer_guard` does not apply, because users guard only their own values.
    """
    if under_tracing():
        return jnp.asarray(value)
    everywhere = NamedSharding(mesh, PartitionSpec())
    with jax.transfer_guard_host_to_device("allow"):
        return jax.make_array_from_callback(value.shape, everywhere, lambda _: value)


def manual_axes(group: GroupSpec) -> Axes:
    """Returns the group's mesh axes that are manual in an enclosing shard_map, in mesh order.

    Raises:
        InvalidArgumentError: that shard_map has another mesh than the group.
    """
    ambient = jax.sharding.get_abstract_mesh()
    taken = frozenset(ambient.manual_axes)
    wanted = dict(group.mesh_axes)
    if taken and dict(ambient.shape) != wanted:
        raise InvalidArgumentError(
            f"group {group.name!r} is used under a mesh with the axes {dict(ambient.shape)}, "
            f"but its own mesh has {wanted}",
            argument="mesh",
        )
    return tuple(axis for axis, _ in group.mesh_axes if axis in taken)


def check_devices(group: GroupSpec, mesh: Mesh, name: str, array: Any) -> None:
    """Raises InvalidArgumentError if `array` is sharded over devices of another mesh.

    For a traced array only the number of devices can be compared.
    """
    if isinstance(array, jax.core.Tracer):
        there = getattr(getattr(jax.typeof(array), "sharding", None), "mesh", None)
    else:
        there = getattr(getattr(array, "sharding", None), "mesh", None)
    if there is None or there.size <= 1:
        return
    found = f"{there.size} devices {dict(there.shape)}"
    if there.size == mesh.size:
        if not isinstance(there, Mesh):
            return
        devices = zip(there.devices.flat, mesh.devices.flat, strict=True)
        other = next(((theirs, ours) for theirs, ours in devices if theirs != ours), None)
        if other is None:
            return
        found = f"{found} with device {other[0].id} where the group has {other[1].id}"
    raise InvalidArgumentError(
        f"{name} must be on the mesh of group {group.name!r}, {mesh.size} devices "
        f"{dict(group.mesh_axes)}, got a mesh of {found}; move it there by "
        f"jax.device_put({name}, NamedSharding(group.mesh, spec))",
        argument=name,
    )
