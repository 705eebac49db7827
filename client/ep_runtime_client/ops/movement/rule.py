"""The rule of prepare, dispatch and combine: custom_partitioning in place of their shard_map.

Where their operands lie is the group's to say, so nothing propagates: operands and results are
pinned, every dim has a factor of its own, and the callback answers with the same specs and the
same per-device function that the shard_map takes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

import ep_runtime
from ep_runtime import specs
from ep_runtime_client.ops.calls.call import Call
from ep_runtime_client.ops.partitioning import partitioned
from ep_runtime_client.ops.tracing import scopes
from ep_runtime_client.ops.transports.xla_overflow import calls_host


def serves(call: Call, mesh: Any) -> bool:
    """Whether a call whose group asks for the rule gets it.

    Inside a shard_map of the user the rule ends the process, so does a host callback in it, which
    nobody keeps, and types of Explicit axes are the shard_map's; there, and on one device, the
    shard_map runs.
    """
    wanted = call.group.partitioning == "rule" and not (call.manual or calls_host(call.group))
    return wanted and isinstance(call.mesh, Mesh) and call.mesh.size > 1 and not _typed(mesh)


def _typed(mesh: Any) -> bool:
    return jax.sharding.AxisType.Explicit in tuple(mesh.axis_types)


def per_device(
    call: Call,
    op: str,
    body: Callable[..., Any],
    mapped: Callable[..., Any],
    operands: Sequence[jax.Array],
    in_specs: Sequence[PartitionSpec],
    out_specs: Any,
    variant: str = "",
) -> Any:
    """`body` once per device on the local blocks of `operands`.

    Args:
        call: gives the mesh.
        op: its name in scopes.
        body: takes as many arrays as there are operands.
        mapped: the shard_map of `body`: gives the results' shapes.
        operands: global arrays.
        in_specs: one per operand.
        out_specs: a prefix of what `body` returns.
        variant: what `body` depends on beside the call and the operands' types.
    """
    mesh = Mesh(call.mesh.devices, call.mesh.axis_names)
    shapes = jax.eval_shape(mapped, *operands)
    leaves, tree = jax.tree.flatten(shapes)
    spread = jax.tree.leaves(
        jax.tree.map(
            lambda spec, part: [spec] * len(jax.tree.leaves(part)),
            out_specs,
            shapes,
            is_leaf=lambda x: isinstance(x, PartitionSpec),
        ),
        is_leaf=lambda x: isinstance(x, PartitionSpec),
    )
    given = [NamedSharding(mesh, spec) for spec in in_specs]
    made = [NamedSharding(mesh, spec) for spec in spread]

    def whole(*operands: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(jax.tree.leaves(mapped(*operands)))

    def partition(mesh_: Any, operands: Any, results: Any) -> Any:
        def lower(*blocks: jax.Array) -> tuple[jax.Array, ...]:
            with (
                jax.sharding.use_abstract_mesh(AbstractMesh((), ())),
                scopes.scope(op, call.layer),
            ):
                return tuple(jax.tree.leaves(body(*blocks)))

        return mesh, lower, tuple(made), tuple(given)

    partitioned_op = custom_partitioning(whole)
    partitioned_op.def_partition(partition, sharding_rule=_factors(operands, leaves))
    identity = _identity(call, op + variant, (*in_specs, *spread))
    pinned = [
        lax.with_sharding_constraint(x, sharding)
        for x, sharding in zip(operands, given, strict=True)
    ]
    results = [
        lax.with_sharding_constraint(x, sharding)
        for x, sharding in zip(
            partitioned.run(partitioned_op, whole, identity, *pinned), made, strict=True
        )
    ]
    return jax.tree.unflatten(tree, results)


def _identity(call: Call, op: str, lies: Sequence[PartitionSpec]) -> int:
    """Of everything that `body` depends on."""
    meta, layer = call.meta, call.layer
    parts = (meta.layout, meta.capacity, meta.handle, layer.base_id, layer.fingerprint)
    named = (ep_runtime.__version__, op, repr(parts), repr(tuple(lies)))
    return specs.stable_id("movement", *named)


def _factors(operands: Sequence[Any], results: Sequence[Any]) -> str:
    """A Shardy rule in which every dim goes its own way."""
    count = iter(range(1 << 20))

    def side(arrays: Sequence[Any]) -> str:
        return ", ".join(" ".join(f"d{next(count)}" for _ in x.shape) for x in arrays)

    return f"{side(operands)} -> {side(results)}"
