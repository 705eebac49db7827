"""Where the ops of a call run, and their functions of one device's blocks.

Users never write a shard_map: the mesh and the specs come from the layer. Inside a shard_map of the
user an op's is nested, over exactly the axes that are not manual yet; where none is missing, the
per-device function is called as it is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ep_runtime_client.ops.calls.call import Call, PlanMeta
from ep_runtime_client.ops.calls.token_layout import say_reshard
from ep_runtime_client.ops.partitioning import on_mesh, regions
from ep_runtime_client.ops.partitioning.on_mesh import Pinned
from ep_runtime_client.ops.partitioning.roles import Entries
from ep_runtime_client.ops.partitioning.specs import entry_axes, explicit_axes, known_spec, placed
from ep_runtime_client.ops.tracing.ambient import check_devices
from ep_runtime_client.ops.tracing.varying import spread_over
from ep_runtime_client.ops.transports.xla_overflow import calls_host


def call_on(meta: PlanMeta, mesh: Mesh, operands: Sequence[Any] = ()) -> Call:
    """The call that a plan stands for in the region where it is used, on these operands.

    The layer says how they are sharded, so only a group with partitioning="rule" asks for the rule.
    A host callback in it ends the process, so there, and on one device, the shard_map runs.
    """
    where = regions.of_opened(meta.layer, mesh, operands, known=True)
    if where.mode == "rule" and (mesh.size == 1 or calls_host(meta.group)):
        where = dataclasses.replace(where, mode="shard_map")
    return Call(meta, where)


def run(
    call: Call,
    name: str,
    body: Callable[..., tuple[jax.Array, ...]],
    operands: Sequence[jax.Array],
    given: Sequence[Entries],
    made: Sequence[Entries],
    variant: str = "",
) -> tuple[jax.Array, ...]:
    """Runs `body` once per device on the local blocks of `operands`.

    Args:
        call: says where.
        name: of the op in scopes.
        body: takes as many arrays as there are operands; collectives over mesh axes work in it.
        operands: arrays that are global but for the manual axes.
        given: entries of each operand.
        made: entries of each result.
        variant: what `body` depends on beside the call and the operands' types.
    """
    meta = call.meta
    settings = repr((meta.layout, meta.capacity, meta.handle, meta.layer.base_id, variant))
    op = Pinned(call.where, name, settings, tuple(given), tuple(made), body)
    return on_mesh.run_on_mesh(op, op.operands, *operands)


def slabs(call: Call, *arrays: Any) -> list[Entries]:
    """Entries of arrays with the slab dim R in front."""
    return [(call.group.token_axes, *[()] * (x.ndim - 1)) for x in arrays]


def place(call: Call, name: str, array: jax.Array, spec: PartitionSpec) -> jax.Array:
    """`array` typed as the call's operands are, and moved to `spec` where it is known to lie
    elsewhere; said once with both specs.

    A tracer in Auto mode is left to the partitioner, which reshards it at the op. The transpose of
    the cast sums the gradient of an operand that was replicated, so it comes before the op and not
    inside it.
    """
    if call.where.manual:
        return spread_over(array, call.where.varying)
    group, mesh = call.group, call.where.mesh
    assert isinstance(mesh, Mesh)
    check_devices(group, mesh, name, array)
    known = known_spec(array)
    if isinstance(array, jax.core.Tracer) and known is not None:
        named = explicit_axes(jax.typeof(array).sharding.mesh)
        spec = PartitionSpec(*(tuple(a for a in entry_axes(e) if a in named) for e in spec))
    if known is not None and not _same(known, spec, call):
        say_reshard(name, call.layer.name, str(known), str(spec))
    if isinstance(array, jax.core.Tracer) or not isinstance(array, jax.Array):
        return array
    devices = set(mesh.devices.flat)
    if array.sharding.device_set == devices or not array.committed:
        return array
    moved: jax.Array = jax.device_put(array, NamedSharding(mesh, spec))
    return moved


def _same(known: PartitionSpec, wanted: PartitionSpec, call: Call) -> bool:
    """Whether two specs agree on every axis that divides anything."""
    sizes = call.group.axis_sizes
    named = {axis for spec in (known, wanted) for entry in spec for axis in entry_axes(entry)}
    axes = {axis for axis in named if sizes.get(axis, 2) > 1}
    return placed(known, axes) == placed(wanted, axes)
