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
from ep_runtime_client.ops.partitioning import regions
from ep_runtime_client.ops.partitioning import rule as partitioning_rule
from ep_runtime_client.ops.partitioning.resolved import Resolved
from ep_runtime_client.ops.partitioning.roles import Entries, Roles, flat, say_once
from ep_runtime_client.ops.tracing.batching import batched_over
from ep_runtime_client.ops.tracing.scopes import label


@dataclasses.dataclass(frozen=True)
class _Watch:
    """tokens [..., H] -> the same. Hashable.

    Attributes:
        where: whose tokens they are.
        ndim: of the tokens.
    """

    where: regions.Where
    ndim: int

    name: ClassVar[str] = "dispatch"

    def roles(
        self, sizes: tuple[tuple[str, int], ...], arrived: Sequence[Entries], shapes: Any
    ) -> Roles:
        raise AssertionError("the roles of axes come with the layer")

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
        dims = " ".join(f"t{dim}" for dim in range(self.ndim))
        return [dims], [dims]


def watched(call: Call, tokens: jax.Array) -> jax.Array:
    """`tokens`, looked at where the program is partitioned, if nothing tells before."""
    group, layer = call.group, call.layer
    roles = Roles(group.mesh_axes, group.outer_axes, group.ep_axis, f"layer {layer.name!r}")
    others = {*roles.real(axis for axis, _ in group.mesh_axes)} - {*group.token_axes}
    told = call.manual or group.partitioning == "shard_map" or regions.explicit((tokens,))
    if told or not others or not isinstance(tokens, jax.core.Tracer):
        return tokens
    where = regions.Where(
        "rule",
        roles,
        call.mesh,
        ruled=group.partitioning == "rule",
        label=label(layer),
        identity=layer.fingerprint,
    )
    seen: jax.Array = _watch(_Watch(where, tokens.ndim), tokens)
    return seen


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _watch(op: _Watch, tokens: jax.Array) -> jax.Array:
    (tokens,) = batched_over(op.where.outside, tokens, never=op.where.never_batched)
    return partitioning_rule.run(op, lambda tokens, *, vmapped=(): (tokens,), tokens)[0]


@_watch.defjvp
def _same_tangent(op: _Watch, tokens: Any, tangents: Any) -> Any:
    return _watch(op, *tokens), tangents[0]
