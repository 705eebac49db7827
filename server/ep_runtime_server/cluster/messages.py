"""Converts claims and views of groups that form across nodes to protobuf messages, and back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ep_runtime import wire
from ep_runtime.allowed_names import check_name
from ep_runtime.board_abi import MAX_WORLD_RANKS
from ep_runtime.errors import InvalidArgumentError
from ep_runtime.specs import GroupSpec
from ep_runtime.v1 import node_service_pb2 as pb
from ep_runtime_server.cluster.views import GroupView, NodeClaim, ViewMember
from ep_runtime_server.memory.windows import Owner
from ep_runtime_server.nodes.config import check_node_name


def key_to_proto(owner: Owner) -> pb.GroupKey:
    return wire.filled(pb.GroupKey, owner)


def key_from_proto(message: pb.GroupKey) -> Owner:
    """Converts a group's key. Raises InvalidArgumentError for an invalid name."""
    check_name("group", message.name)
    check_name("job", message.job)
    return Owner(message.uid, message.job, message.name)


def claims_to_proto(claims: Iterable[NodeClaim]) -> list[pb.NodeClaim]:
    return [wire.filled(pb.NodeClaim, claim, world_ranks=claim.ranks) for claim in claims]


def ranks_from_proto(ranks: Sequence[int]) -> tuple[int, ...]:
    """Converts world ranks. Raises InvalidArgumentError if there are too many for any group."""
    if len(ranks) > MAX_WORLD_RANKS:
        raise InvalidArgumentError(
            f"a list must have at most {MAX_WORLD_RANKS} world ranks, got {len(ranks)}",
            argument="world_ranks",
        )
    return tuple(ranks)


def claims_from_proto(messages: Sequence[pb.NodeClaim], spec: GroupSpec) -> tuple[NodeClaim, ...]:
    """Converts claims. Raises InvalidArgumentError unless they are distinct ranks of the group."""
    claims = tuple(
        NodeClaim(message.session_id, message.pid, ranks_from_proto(message.world_ranks))
        for message in messages[: spec.world_size + 1]  # one claim too many suffices to refuse
    )
    ranks = [rank for claim in claims for rank in claim.ranks]
    within = all(0 <= rank < spec.world_size for rank in ranks)
    if not ranks or not within or len(set(ranks)) != len(ranks):
        raise InvalidArgumentError(
            f"claims must be distinct ranks in 0..{spec.world_size - 1}, got {ranks[:16]}",
            argument="claims",
        )
    return claims


def view_to_proto(view: GroupView) -> pb.GroupView:
    members = [wire.filled(pb.ViewMember, m, world_rank=m.rank) for m in view.members]
    return wire.filled(pb.GroupView, view, members=members)


def view_from_proto(message: pb.GroupView) -> GroupView:
    """Converts a view. Raises InvalidArgumentError for an invalid node name."""
    members = tuple(
        ViewMember(
            member.world_rank, check_node_name(member.node, "node"), member.session_id, member.pid
        )
        for member in message.members
    )
    return GroupView(message.epoch, message.attempt, members)
