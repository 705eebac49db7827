"""Says where tokens lie over a mesh axis that the group does not count among theirs.

Such an axis replicates tokens: they are gathered over it, and every device along it does the same
work. Under plain jit the partitioner alone knows how tokens lie, so a rule looks at them there.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, ClassVar

import jax

from ep_runtime_client.ops.calls.call import Call
from ep_runtime_client.ops.partitioning import on_mesh, regions
from ep_runtime_client.ops.partitioning.on_mesh import LayerOp
from ep_runtime_client.ops.partitioning.resolved import Resolved
from ep_runtime_client.ops.partitioning.roles import Entries, Roles, flat, say_once


@dataclasses.dataclass(frozen=True)
class _Watch(LayerOp):
    """tokens [..., H] -> the same. Hashable.

    Attributes:
        where: whose tokens they are.
        ndim: of the tokens.
    """

    where: regions.Partitioning
    ndim: int

    name: ClassVar[str] = "dispatch"

    def resolve(
        self,
        roles: Roles,
        arrived: Sequence[Entries],
        shapes: Sequence[tuple[int, ...]],
        wanted: Sequence[Entries] | None,
    ) -> Resolved:
        others = [axis for axis in roles.real(flat(arrived[0])) if axis not in roles.slab]
        if others:
            say_once(
                f"tokens of {roles.owner} lie over {roles.named(others)}, which its group does not "
                f"count among their axes (outer_axes and ep_axis: {roles.named(roles.slab)}): they "
                f"are gathered, and every device along {', '.join(others)} does the same work"
            )
        return Resolved((arrived[0],), (arrived[0],), lambda tokens: (tokens,))

    def factors(self) -> tuple[list[str], list[str]]:
        dims = " ".join(f"w{dim}" for dim in range(self.ndim))  # of its own: held to nothing
        return [dims], [dims]


def watched(call: Call, tokens: jax.Array) -> jax.Array:
    """`tokens`, looked at where the program is partitioned, if nothing tells before."""
    group, where = call.group, call.where
    others = any(size > 1 and axis not in group.token_axes for axis, size in group.mesh_axes)
    told = where.manual or group.partitioning == "shard_map" or regions.explicit((tokens,))
    if told or not others or not isinstance(tokens, jax.core.Tracer):
        return tokens
    op = _Watch(dataclasses.replace(where, mode="rule"), tokens.ndim)
    seen: jax.Array = _watch(op, tokens)
    return seen


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _watch(op: _Watch, tokens: jax.Array) -> jax.Array:
    (tokens,) = op.where.unbatched(tokens)
    return on_mesh.ask(op, lambda tokens, *, vmapped=(): (tokens,), tokens)[0]


@_watch.defjvp
def _same_tangent(op: _Watch, tokens: Any, tangents: Any) -> Any:
    return _watch(op, *tokens), tangents[0]
