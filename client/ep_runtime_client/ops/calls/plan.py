"""Plans and dispatched rows, which live between the calls of one step.

A plan is the result of one prepare, as ordinary arrays. It holds both sides: where each slot's row
goes (source), and which rows each staged row fills (receiver). Later calls, backward passes
included, need nothing else.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax

from ep_runtime.device_layout import count_columns
from ep_runtime.errors import InvalidArgumentError
from ep_runtime.layer_specs import LayerSpec
from ep_runtime.layout import packed_columns
from ep_runtime.specs import GroupSpec
from ep_runtime_client.base import stored
from ep_runtime_client.base.layers import EpLayer
from ep_runtime_client.ops.calls.call import Call, PlanMeta
from ep_runtime_client.ops.calls.token_layout import TokenLayout


@stored.pytree()
class PlanArrays(NamedTuple):
    """The nine arrays of a plan, in the order of the custom calls.

    Each has a leading slab dim R over (*outer, ep); the shapes below are of one slab. T is the
    tokens of one rank. All int32.
    """

    dst_rank: jax.Array  # [T, K] ep rank that holds the slot's row; -1 unused or dropped
    dst_row: jax.Array  # [T, K] row in that rank's slab; -1 unused or dropped
    # [N, 4] per source: staged rows, entries, staged rows of the first half, 0. If rows are packed
    # into a lane [N, 4 + 2 * N]: then also per rank the staged rows, and those of the first half.
    recv_count: jax.Array
    staged_start: jax.Array  # [N*T+1] first entry of each staged row, source-major; tail = total
    staged_row: jax.Array  # [C] row that an entry fills; tail -1
    staged_slot: jax.Array  # [C] slot that an entry came from; tail -1
    kept: jax.Array  # [L] rows kept per local expert
    group_sizes: jax.Array  # [L] the same, aligned
    num_recv: jax.Array  # [1] aligned rows demanded, before any drop


@stored.pytree()
class NodePlanArrays(NamedTuple):
    """The arrays of a plan between nodes (`nodes.py`).

    The first nine are as in PlanArrays, but the receiver's four cover only ranks of its node.

    Local rank s stages *virtual tokens* for its node: D blocks of T. Block m lists, in order, the
    tokens of ep rank m * G + s that keep a row on the node; the rest is -1.
    """

    dst_rank: jax.Array  # [T, K]
    dst_row: jax.Array  # [T, K]
    # [G, 4], with the slots dropped here as last value of the first row. If rows are packed into a
    # lane [G, 4 + 2 * G + D * 2 * G]: then as in PlanArrays, and the same for each node's tokens.
    recv_count: jax.Array
    staged_start: jax.Array  # [G*D*T+1]
    staged_row: jax.Array  # [C]
    staged_slot: jax.Array  # [C]
    kept: jax.Array  # [L]
    group_sizes: jax.Array  # [L]
    num_recv: jax.Array  # [1]
    virtual_rank: jax.Array  # [D*T, K] local rank that holds the row of a virtual token's slot
    virtual_row: jax.Array  # [D*T, K] row in that rank's slab
    chunks: jax.Array  # [1] number of chunks in which rows cross the network, equal on all ranks

    @property
    def inside(self) -> PlanArrays:
        """The plan inside the node: its ranks form a separate EP group, on virtual tokens."""
        ranks, columns = self.recv_count.shape[-2:]
        counts = self.recv_count[..., : packed_columns(ranks) if columns > 4 else 4]
        return PlanArrays(self.virtual_rank, self.virtual_row, counts, *self[3:9])


AnyArrays = PlanArrays | NodePlanArrays


def arrays_type(group: GroupSpec) -> type[PlanArrays] | type[NodePlanArrays]:
    """Returns which of the two types the group's plans have."""
    return NodePlanArrays if group.node_size else PlanArrays


def plan_shapes(call: Call, tokens: int, top_k: int) -> list[tuple[int, ...]]:
    """Returns dims of the arrays of a plan for `tokens` tokens a rank, without the slab dim."""
    group = call.group
    ranks, virtual, local = group.ranks_per_node, group.num_nodes * tokens, group.experts_per_rank
    columns = count_columns(group, virtual)
    slots, rows, experts = (tokens, top_k), (call.capacity,), (local,)
    staged = ((ranks, columns), (ranks * virtual + 1,), rows, rows)
    shapes = [slots, slots, *staged, experts, experts, (1,)]
    return [*shapes, (virtual, top_k), (virtual, top_k), (1,)] if group.node_size else shapes


def inside_shapes(call: Call, tokens: int, top_k: int) -> list[tuple[int, ...]]:
    """Returns dims of a plan for `tokens` tokens of each rank that shares windows."""
    dims = plan_shapes(call, tokens // call.group.num_nodes, top_k)
    return [(tokens, top_k)] * 2 + dims[2:9]


@stored.pytree(PlanMeta, TokenLayout, EpLayer, GroupSpec, LayerSpec)
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Plan:
    """A routing decision that `prepare` makes for `dispatch`, `combine` and their gradients.

    It is a pytree, safe under jit, remat, scan, donation and relocation.

    Attributes:
        arrays: nine arrays with leading dim R; some more in a group over nodes.
        meta: layer, layout, capacity and handle; static.
    """

    arrays: AnyArrays
    meta: PlanMeta = dataclasses.field(metadata={"static": True})

    @property
    def capacity(self) -> int:
        """C, the number of rows per slab in the calls that use this plan."""
        return self.meta.capacity

    @property
    def handle(self) -> int:
        """Number of the handle that separates this plan's calls from other calls of the layer."""
        return self.meta.handle


@stored.pytree()
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Dispatched:
    """The rows that the experts of each rank received, as `dispatch` returns them.

    Attributes:
        tokens: [R, C, H]. Expert-major; each non-empty expert's rows start at an aligned offset.
            Padding rows inside a zone are zero, rows past the last zone are undefined. An array,
            or a QuantizedTensor if `dispatch` got a recipe or quantized tokens.
        weights: [R, C] f32. Weight of each row, 0 in padding.
        group_sizes: [R, L] int32. Aligned rows per local expert.
        num_recv: [R] int32. Aligned rows that the routing needs, before drops; compare with C.
        plan: the Plan, for `combine` and backward.
    """

    tokens: Any
    weights: jax.Array
    group_sizes: jax.Array
    num_recv: jax.Array
    plan: Plan


def check_plan(plan: Plan, layer: EpLayer) -> PlanMeta:
    """Checks that a plan is for a layer; returns its meta.

    Raises:
        InvalidArgumentError: not a plan, or made for another layer.
    """
    if not isinstance(plan, Plan):
        raise InvalidArgumentError(
            f"plan must be a result of ep.prepare, got {type(plan).__name__}", argument="plan"
        )
    made_for = plan.meta.layer
    if made_for != layer:
        raise InvalidArgumentError(
            f"the plan was made for layer {made_for.name!r} of group {made_for.group_spec.name!r} "
            f"(top_k={made_for.top_k}, alignment={made_for.alignment}), the call is for layer "
            f"{layer.name!r} of group {layer.group_spec.name!r} (top_k={layer.top_k}, "
            f"alignment={layer.alignment})",
            argument="plan",
        )
    return plan.meta
