"""Runs the ops of a call on the mesh: finds the shard_map, and each device's function.

Users never write a shard_map: the mesh and the specs come from the layer. Inside a user's shard_map
the op nests another one, over exactly the axes that are not manual yet; if all are manual, the
per-device function is called directly.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ep_runtime_client.ops.calls.call import Call, world_rank
from ep_runtime_client.ops.calls.plan import AnyArrays
from ep_runtime_client.ops.calls.token_layout import say_reshard
from ep_runtime_client.ops.partitioning import on_mesh, regions
from ep_runtime_client.ops.partitioning.roles import (
    Arrived,
    Resolved,
    Roles,
    Shapes,
    Wanted,
    entry_axes,
    explicit_axes,
    flat,
    known_spec,
    placed,
    say_once,
)
from ep_runtime_client.ops.tracing.ambient import check_devices
from ep_runtime_client.ops.tracing.varying import spread_over
from ep_runtime_client.ops.transports.protocol import DeviceCall


class Rows(NamedTuple):
    """The operands of an op that moves rows, or their gradients.

    Attributes:
        layer_index: int32 [1], of the layer in its stack.
        values: tokens [..., H], or slabs [R, C, H].
        weights: f32 of each slot [..., K], or of each row [R, C]; None for ones.
        plan: arrays of the plan.
    """

    layer_index: jax.Array
    values: Any
    weights: jax.Array | None
    plan: AnyArrays


def run(
    call: Call,
    name: str,
    body: Callable[..., Any],
    layer_index: jax.Array,
    tokens: tuple[Any, ...],
    slabs: tuple[Any, ...],
    results: int,
    *,
    to_tokens: bool = False,
    variant: str = "",
) -> tuple[jax.Array, ...]:
    """Runs `body` once per device on the local blocks of arrays, each of which may be None.

    Args:
        call: the static side of the call.
        name: of the op, in scopes.
        body: (DeviceCall, *tokens, *slabs) -> arrays; collectives over mesh axes work in it.
        layer_index: int32 [1], of the layer in its stack.
        tokens: arrays [..., X] laid out like tokens; the body gets [T, X].
        slabs: arrays [R, ...]; the body gets one slab.
        results: number of resulting arrays.
        to_tokens: the results are rows [T, X] of tokens, not slabs.
        variant: what else `body` depends on, besides the call and the operands' types.
    """
    meta, lead, slab = call.meta, call.layout.entries(), call.group.token_axes
    of_tokens, of_slabs = (jax.tree.leaves(each) for each in (tokens, slabs))
    tree = jax.tree.structure((tokens, slabs))

    def local(layer_index: jax.Array, *blocks: jax.Array) -> tuple[jax.Array, ...]:
        count = len(of_tokens)
        rows = [x.reshape(-1, x.shape[-1]) for x in blocks[:count]]
        tokens, slabs = jax.tree.unflatten(tree, [*rows, *(x[0] for x in blocks[count:])])
        at = DeviceCall(call, world_rank(call.group), layer_index)
        made = jax.tree.leaves(body(at, *tokens, *slabs))
        if to_tokens:
            return tuple(x.reshape(*call.layout.local, -1) for x in made)
        return tuple(x[None] for x in made)

    given = (((),), *[lead] * len(of_tokens), *((slab, *[()] * (x.ndim - 1)) for x in of_slabs))
    made = (lead if to_tokens else (slab,),) * results
    settings = repr((meta.layout, meta.capacity, meta.handle, meta.layer.base_id, variant))
    op = on_mesh.Pinned(call.where, name, settings, given, made, local)
    return on_mesh.run_on_mesh(op, op.operands, layer_index, *of_tokens, *of_slabs)


def place(call: Call, name: str, array: jax.Array, spec: PartitionSpec | None = None) -> jax.Array:
    """Casts `array` to the type of the call's operands, and moves it to `spec` (default: the
    tokens').

    Logs once, with both specs, if an array of known sharding is moved.

    In Auto mode the partitioner reshards a tracer at the op. The transpose of the cast sums the
    gradient of an operand that was replicated, so the cast comes before the op and not inside it.
    """
    if call.where.manual:
        return spread_over(array, call.where.varying)
    group, mesh = call.group, call.where.mesh
    assert isinstance(mesh, Mesh)
    check_devices(group, mesh, name, array)
    known, traced = known_spec(array), isinstance(array, jax.core.Tracer)
    if traced and known is None:
        return array
    spec = call.layout.spec() if spec is None else spec
    if traced:
        named = explicit_axes(jax.typeof(array).sharding.mesh)
        spec = PartitionSpec(*(tuple(a for a in entry_axes(e) if a in named) for e in spec))
    if known is not None and not _same(known, spec, call):
        say_reshard(name, call.layer.name, str(known), str(spec))
    if traced or not isinstance(array, jax.Array):
        return array
    devices = set(mesh.devices.flat)
    if array.sharding.device_set == devices or not array.committed:
        return array
    return jax.device_put(array, NamedSharding(mesh, spec))


def _same(known: PartitionSpec, wanted: PartitionSpec, call: Call) -> bool:
    """Whether two specs agree on every axis larger than 1."""
    sizes = call.group.axis_sizes
    named = {axis for spec in (known, wanted) for entry in spec for axis in entry_axes(entry)}
    axes = {axis for axis in named if sizes.get(axis, 2) > 1}
    return placed(known, axes) == placed(wanted, axes)


@dataclasses.dataclass(frozen=True)
class _Watch(on_mesh.LayerOp):
    """An op that returns tokens [..., H] unchanged and looks at their sharding. Hashable.

    An axis that the group does not count replicates tokens: they are gathered over it, and every
    device along it does the same work. Under plain jit only the partitioner knows how tokens are
    sharded, so a partitioning rule looks at them there.

    Attributes:
        where: the partitioning of the call with these tokens.
        ndim: of the tokens.
    """

    where: regions.Partitioning
    ndim: int

    name: ClassVar[str] = "dispatch"

    def resolve(self, roles: Roles, arrived: Arrived, shapes: Shapes, wanted: Wanted) -> Resolved:
        others = [axis for axis in roles.real(flat(arrived[0])) if axis not in roles.slab]
        if others:
            say_once(
                f"tokens of {roles.owner} lie over {roles.named(others)}, which its group does not "
                f"count among their axes (outer_axes and ep_axis: {roles.named(roles.slab)}): they "
                f"are gathered, and every device along {', '.join(others)} does the same work"
            )
        return Resolved((arrived[0],), (arrived[0],), lambda tokens: (tokens,))

    def factors(self) -> tuple[list[str], list[str]]:
        dims = " ".join(f"w{dim}" for dim in range(self.ndim))  # not constrained
        return [dims], [dims]


def place_tokens(call: Call, tokens: jax.Array) -> jax.Array:
    """Places tokens as `place` does.

    If neither a type nor a shard_map tells how they are sharded over axes other than the group's
    token axes, the program's partitioner decides.
    """
    tokens = place(call, "tokens", tokens)
    group, where = call.group, call.where
    others = any(size > 1 and axis not in group.token_axes for axis, size in group.mesh_axes)
    told = where.manual or group.partitioning == "shard_map" or regions.explicit((tokens,))
    if told or not others or not isinstance(tokens, jax.core.Tracer):
        return tokens
    op = _Watch(dataclasses.replace(where, mode="rule"), tokens.ndim)
    return _watch(op, tokens)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _watch(op: _Watch, tokens: jax.Array) -> jax.Array:
    (tokens,) = op.where.unbatched(tokens)
    return on_mesh.ask(op, lambda tokens, *, vmapped=(): (tokens,), tokens)[0]


@_watch.defjvp
def _same_tangent(op: _Watch, tokens: Any, tangents: Any) -> Any:
    return _watch(op, *tokens), tangents[0]
