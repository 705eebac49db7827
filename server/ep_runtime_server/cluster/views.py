"""The coordinator's state of one group that forms across nodes: claims, view and outcome.

Claims and views are converted to protobuf messages, and back.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import enum
import functools
from collections.abc import Iterable, Sequence

from ep_runtime import wire
from ep_runtime.allowed_names import check_name
from ep_runtime.board_abi import MAX_WORLD_RANKS
from ep_runtime.errors import EpRuntimeError, InvalidArgumentError
from ep_runtime.specs import GroupSpec
from ep_runtime.text import printable
from ep_runtime.v1 import node_service_pb2 as pb
from ep_runtime_server.base import limits
from ep_runtime_server.base.clock import Changes
from ep_runtime_server.memory.windows import Owner
from ep_runtime_server.nodes.config import check_node_name

_MOST_WHY = 400  # limit of characters of another daemon's text


@dataclasses.dataclass(frozen=True)
class NodeClaim:
    """A process on a node, and the world ranks that it claims."""

    session_id: str
    pid: int
    ranks: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class NodeReport:
    """A node's world ranks in a view whose processes ended or left, and who ended those."""

    node: str
    lost_ranks: tuple[int, ...]
    left_ranks: tuple[int, ...]
    why: str = ""


@dataclasses.dataclass(frozen=True)
class ViewMember:
    """One world rank of a view, and the process that has it."""

    rank: int
    node: str
    session_id: str
    pid: int


@dataclasses.dataclass(frozen=True)
class GroupView:
    """The processes and nodes that form a group; `members` are by world rank."""

    epoch: int
    attempt: int
    members: tuple[ViewMember, ...]

    @functools.cached_property
    def nodes(self) -> frozenset[str]:
        return frozenset(self.of_node)

    @functools.cached_property
    def of_node(self) -> dict[str, set[tuple[int, str]]]:
        """Returns the (rank, session id) pairs of all members, by node."""
        found: dict[str, set[tuple[int, str]]] = {}
        for member in self.members:
            found.setdefault(member.node, set()).add((member.rank, member.session_id))
        return found

    def ranks_of(self, node: str) -> set[int]:
        return {rank for rank, _ in self.of_node.get(node, ())}


class Outcome(enum.Enum):
    """The decision on a view; the values are the protocol's names."""

    UNSPECIFIED = "UNSPECIFIED"
    COMMITTED = "COMMITTED"
    ABORTED = "ABORTED"


@dataclasses.dataclass(eq=False)
class NodePart:
    """One node's claims in a forming group, as its last call sent them."""

    node: str
    spec: GroupSpec
    claims: tuple[NodeClaim, ...]
    generation: int = 0  # the group's generation on the node
    waits: bool = True  # whether the node's call still waits
    until_s: float = 0.0  # when the claims expire after the call
    refused_s: float = 0.0
    view: GroupView | None = None
    error: EpRuntimeError | None = None

    @functools.cached_property
    def ranks(self) -> dict[int, NodeClaim]:
        return {rank: claim for claim in self.claims for rank in claim.ranks}

    @functools.cached_property
    def sessions(self) -> frozenset[str]:
        return frozenset(claim.session_id for claim in self.claims)


@dataclasses.dataclass(eq=False)
class Proposal:
    """A view that all its nodes get, and its outcome."""

    view: GroupView
    spec: GroupSpec
    until_s: float
    delivered: set[str] = dataclasses.field(default_factory=set)
    attached: set[str] = dataclasses.field(default_factory=set)
    ended: set[int] = dataclasses.field(default_factory=set)  # ranks whose processes ended or left
    outcome: Outcome = Outcome.UNSPECIFIED
    reason: str = ""

    @property
    def open(self) -> bool:
        return self.outcome is Outcome.UNSPECIFIED

    @property
    def lives(self) -> bool:
        """Returns whether the view is committed and not all its processes have ended."""
        everybody = {member.rank for member in self.view.members}
        return self.outcome is Outcome.COMMITTED and self.ended != everybody

    def holder(self, rank: int) -> ViewMember | None:
        """Returns the member that holds a rank, which other nodes cannot claim; None if free."""
        members = self.view.members  # one per rank, in order
        if self.outcome is Outcome.ABORTED or rank in self.ended or rank >= len(members):
            return None
        return members[rank]

    def awaits(self, part: NodePart) -> bool:
        """Returns whether the node's next call, with unchanged claims, should get this view."""
        if not self.open or part.node in self.delivered:
            return False
        theirs = {(rank, claim.session_id) for rank, claim in part.ranks.items()}
        same = self.view.of_node.get(part.node, set()) == theirs
        return same and self.spec.difference(part.spec) is None


class Assembly:
    """The current claims of one group that forms across nodes, and its last view.

    Attributes:
        parts: claims by node; only `put`, `drop` and `clear` change them.
        missing: unclaimed ranks in ascending order; empty if there are no claims.
        claimed: (node, pid) of claimed ranks, by rank.
        refused: lately refused parts by node, the newest last. They refuse repeated claims, and
            claims of other nodes that arrive later.
    """

    def __init__(self) -> None:
        self.parts: dict[str, NodePart] = {}
        self.refused: dict[str, collections.deque[NodePart]] = {}
        self.claimed: dict[int, tuple[str, int]] = {}
        self.missing: list[int] = []
        self.proposal: Proposal | None = None
        self.attempts = 0  # views given up since the last committed one
        # Apart from decisions, because claims change `missing` often, and few need to know that.
        self.decided, self.gathered = Changes(), Changes()

    def put(self, part: NodePart) -> None:
        """Adds a part, or replaces the node's earlier part, whose call ends."""
        before = self.parts.get(part.node)
        waits = before is not None and before.waits
        if before is not None:
            before.waits = False
            self._unclaim(before)
        self.parts[part.node] = part
        self.claimed.update({rank: (part.node, c.pid) for rank, c in part.ranks.items()})
        self._count()
        if waits:
            self.notify()

    def drop(self, part: NodePart) -> None:
        if self.parts.get(part.node) is part:
            del self.parts[part.node]
            self._unclaim(part)
            self._count()
            self.notify()

    def refuse(self, part: NodePart, error: EpRuntimeError, now_s: float) -> None:
        """Ends the part's call, and later calls for the same group, with the error."""
        part.error = error
        self.drop(part)
        self.note_refused(part, now_s)

    def note_refused(self, part: NodePart, now_s: float) -> None:
        part.refused_s, part.until_s = now_s, now_s + limits.NODE_REFUSAL_LIFE_S
        of_node = self.refused.setdefault(part.node, collections.deque(maxlen=limits.MAX_REFUSED))
        of_node.append(part)

    def forget_refused(self, now_s: float) -> None:
        for node, parts in list(self.refused.items()):
            if all(part.until_s <= now_s for part in parts):
                del self.refused[node]

    def hear(self, part: NodePart) -> None:
        """Raises the error with which this generation of the node's group was refused, if any."""
        for before in self.refused.get(part.node, ()):
            if before.error is not None and before.generation == part.generation:
                raise before.error

    def differing(self, part: NodePart, now_s: float) -> NodePart | None:
        """Finds another node's lately refused part with a different spec and still unclaimed ranks.

        None if the part's processes were lately refused too, because they know and try again. Also
        None if their node was lately refused, but with other specs than the part's.
        """
        known = (p for parts in self.refused.values() for p in parts)
        late = [p for p in known if now_s - p.refused_s < limits.NODE_DIFFERS_S]
        knows = part.sessions <= {session for p in late for session in p.sessions}
        before = [p.spec.difference(part.spec) for p in late if p.node == part.node]
        if knows or (before and None not in before):
            return None
        gone = (p for p in late if p.node != part.node and p.node not in self.parts)
        free = (p for p in gone if self.unclaimed_elsewhere(p))
        return next((p for p in free if p.spec.difference(part.spec) is not None), None)

    def others(self, part: NodePart) -> list[NodePart]:
        """Returns the parts of other nodes, which all have the same spec."""
        return [other for other in self.parts.values() if other.node != part.node]

    def unclaimed_elsewhere(self, part: NodePart) -> bool:
        """Returns whether a process of the part claims only ranks that no other node claims."""

        def free(rank: int) -> bool:
            holder = self.claimed.get(rank)
            return holder is None or holder[0] == part.node

        return any(all(map(free, claim.ranks)) for claim in part.claims)

    def clear(self) -> None:
        """Forgets all claims, because a view has them now."""
        self.parts, self.claimed, self.missing = {}, {}, []

    def _unclaim(self, part: NodePart) -> None:
        for rank in part.ranks:
            self.claimed.pop(rank, None)

    def _count(self) -> None:
        part = next(iter(self.parts.values()), None)
        ranks = range(part.spec.world_size if part is not None else 0)
        missing = [rank for rank in ranks if rank not in self.claimed]
        if missing != self.missing:
            self.missing = missing
            self.gathered.tell()

    def notify(self) -> None:
        """Wakes all waiters: after a view, a decision, an error, or a node's newer call."""
        self.decided.tell()
        self.gathered.tell()


async def view_or_news(
    assembly: Assembly, part: NodePart, known_missing: list[int], wait_s: float
) -> None:
    """Waits until the part has a view, an error or a successor, or `missing` has changed.

    The more nodes wait, the later a change of `missing` ends the wait, because otherwise each claim
    would end the calls of all nodes.
    """

    def over() -> bool:
        replaced = assembly.parts.get(part.node) is not part
        return part.view is not None or part.error is not None or replaced

    def news() -> bool:
        return over() or assembly.missing != known_missing

    loop = asyncio.get_running_loop()
    deadline = loop.time() + wait_s
    await assembly.gathered.until(news, wait_s)
    left_s = max(0.0, deadline - loop.time())
    pause_s = limits.NODE_NEWS_EACH_S * len(assembly.parts)
    await assembly.decided.until(over, min(left_s, pause_s))


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


def report_from_proto(message: pb.TellGroupRequest | pb.NodeReport) -> NodeReport:
    """Converts a report. Raises InvalidArgumentError as `ranks_from_proto`."""
    lost, left = map(ranks_from_proto, (message.lost_ranks, message.left_ranks))
    return NodeReport(message.node, lost, left, printable(message.why[:_MOST_WHY]))


def report_to_proto(
    owner: Owner, epoch: int, report: NodeReport, others: Iterable[str] = ()
) -> pb.TellGroupRequest:
    key = key_to_proto(owner)
    return wire.filled(pb.TellGroupRequest, report, key=key, epoch=epoch, others=others)


def passed_on(
    node: str, owner: Owner, epoch: int, reports: Iterable[NodeReport]
) -> pb.TellGroupRequest:
    """Makes the request by which the coordinator `node` passes reports on."""
    passed = [wire.filled(pb.NodeReport, report) for report in reports]
    return pb.TellGroupRequest(node=node, key=key_to_proto(owner), epoch=epoch, reports=passed)


def view_to_proto(view: GroupView) -> pb.GroupView:
    members = [wire.filled(pb.ViewMember, m, world_rank=m.rank) for m in view.members]
    return wire.filled(pb.GroupView, view, members=members)


def view_from_proto(message: pb.GroupView) -> GroupView:
    """Converts a view. Raises InvalidArgumentError for an invalid node name."""
    members = tuple(
        ViewMember(member.world_rank, member.node, member.session_id, member.pid)
        for member in message.members
    )
    view = GroupView(message.epoch, message.attempt, members)
    for node in view.nodes:
        check_node_name(node, "node")
    return view
