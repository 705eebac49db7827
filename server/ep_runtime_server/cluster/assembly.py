"""The coordinator's part in forming groups across nodes: collects claims, gives views, decides.

A view is prepared, then committed: every node gets the same one under an epoch that was written
before, every node says that its processes attached, and the decision is written before anybody
hears of it. An epoch without a written decision is given up, also by a coordinator that starts
again. Knows no socket; lives on the event loop's thread.
"""

from __future__ import annotations

import asyncio
import dataclasses
import enum
from collections.abc import Callable, Iterable

from ep_runtime.errors import (
    EpRuntimeError,
    GroupBusyError,
    PoolExhaustedError,
    SpecMismatchError,
)
from ep_runtime.specs import GroupSpec
from ep_runtime_server.base import limits
from ep_runtime_server.base.clock import Clock
from ep_runtime_server.base.events import EventLog
from ep_runtime_server.memory.windows import Owner
from ep_runtime_server.nodes.facts import ClusterFacts


@dataclasses.dataclass(frozen=True)
class NodeClaim:
    """A process of a node and the world ranks that it claims."""

    session_id: str
    pid: int
    ranks: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class ViewMember:
    """One world rank of a view."""

    rank: int
    node: str
    session_id: str
    pid: int


@dataclasses.dataclass(frozen=True)
class GroupView:
    """Who makes up a group; members by world rank."""

    epoch: int
    attempt: int
    members: tuple[ViewMember, ...]

    @property
    def nodes(self) -> frozenset[str]:
        return frozenset(member.node for member in self.members)


class Outcome(enum.Enum):
    """Values are the names on the wire."""

    UNSPECIFIED = "UNSPECIFIED"
    COMMITTED = "COMMITTED"
    ABORTED = "ABORTED"


@dataclasses.dataclass(eq=False)
class _Part:
    """One node's claims on a group that forms."""

    node: str
    spec: GroupSpec
    claims: tuple[NodeClaim, ...]
    waits: bool = True
    until_s: float = 0.0  # once nobody waits
    view: GroupView | None = None
    error: EpRuntimeError | None = None

    @property
    def ranks(self) -> dict[int, NodeClaim]:
        return {rank: claim for claim in self.claims for rank in claim.ranks}


@dataclasses.dataclass(eq=False)
class _Proposal:
    """A view that every node was given, and what became of it."""

    view: GroupView
    until_s: float
    delivered: set[str] = dataclasses.field(default_factory=set)
    attached: set[str] = dataclasses.field(default_factory=set)
    ended: set[int] = dataclasses.field(default_factory=set)  # ranks whose processes are gone
    outcome: Outcome = Outcome.UNSPECIFIED
    reason: str = ""

    @property
    def open(self) -> bool:
        return self.outcome is Outcome.UNSPECIFIED

    @property
    def lives(self) -> bool:
        """It is committed, and processes of it are there."""
        everybody = {member.rank for member in self.view.members}
        return self.outcome is Outcome.COMMITTED and self.ended != everybody

    def held(self) -> dict[int, ViewMember]:
        """Ranks that a process has, by rank: what nobody else may claim."""
        if self.outcome is Outcome.ABORTED:
            return {}
        return {m.rank: m for m in self.view.members if m.rank not in self.ended}

    def awaits(self, node: str, claims: tuple[NodeClaim, ...]) -> bool:
        """Made between two calls of that node, which still claims what it claimed."""
        ours = {(m.rank, m.session_id) for m in self.view.members if m.node == node}
        theirs = {(rank, claim.session_id) for claim in claims for rank in claim.ranks}
        return self.open and node not in self.delivered and ours == theirs


class _Assembly:
    """One group on its way to a view, and its last view."""

    def __init__(self) -> None:
        self.parts: dict[str, _Part] = {}
        self.proposal: _Proposal | None = None
        self.attempts = 0  # given up since the last one that was committed
        self._changed = asyncio.Event()

    @property
    def missing(self) -> list[int]:
        if not self.parts:
            return []
        claimed = {rank for part in self.parts.values() for rank in part.ranks}
        spec = next(iter(self.parts.values())).spec
        return [rank for rank in range(spec.world_size) if rank not in claimed]

    def notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait(self, done: Callable[[], bool], wait_s: float) -> None:
        """Until `done`, looked at after every change, or the time is over."""
        try:
            async with asyncio.timeout(wait_s):
                while not done():
                    await self._changed.wait()
        except TimeoutError:
            return


class Assemblies:
    """Every group that forms across nodes, by owner."""

    def __init__(self, facts: ClusterFacts, clock: Clock, events: EventLog) -> None:
        self._facts = facts
        self._clock = clock
        self._events = events
        self._all: dict[Owner, _Assembly] = {}

    async def join(
        self,
        node: str,
        owner: Owner,
        spec: GroupSpec,
        claims: tuple[NodeClaim, ...],
        *,
        known_missing: list[int],
        wait_s: float,
    ) -> tuple[GroupView | None, list[int]]:
        """The view, or the ranks that are missing once these are others than the known ones.

        Raises:
            SpecMismatchError: another node's differs; that node's call ends with it too.
            GroupBusyError: a rank is claimed on another node.
            PoolExhaustedError: too many groups form, or the epoch cannot be written.
        """
        assembly = self._all.get(owner) or self._new(owner)
        proposal = assembly.proposal
        if proposal is not None and proposal.awaits(node, claims):
            proposal.delivered.add(node)
            return proposal.view, []
        self._give_up_view_of(assembly, owner, node)
        part = _Part(node, spec, claims)
        self._check(assembly, owner, part)
        before = assembly.parts.get(node)
        if before is not None:
            before.waits = False
        assembly.parts[node] = part
        try:
            self._propose(assembly, owner)
            if part.view is None:
                assembly.notify()

            def done() -> bool:
                over = part.view is not None or part.error is not None
                replaced = assembly.parts.get(node) is not part
                return over or replaced or assembly.missing != known_missing

            await assembly.wait(done, wait_s)
        except BaseException:  # the node is gone, or wants something else
            self._drop(assembly, part)
            raise
        if part.error is not None:
            raise part.error
        part.waits = False
        part.until_s = self._clock.monotonic_s() + limits.NODE_CLAIM_LIFE_S
        if part.view is not None and assembly.proposal is not None:
            assembly.proposal.delivered.add(node)
        return part.view, assembly.missing

    def _new(self, owner: Owner) -> _Assembly:
        if len(self._all) >= limits.MAX_ASSEMBLIES:
            raise PoolExhaustedError(
                f"at most {limits.MAX_ASSEMBLIES} groups form across nodes at once; retry"
            )
        return self._all.setdefault(owner, _Assembly())

    def _drop(self, assembly: _Assembly, part: _Part) -> None:
        if assembly.parts.get(part.node) is part:
            del assembly.parts[part.node]
            assembly.notify()

    def _check(self, assembly: _Assembly, owner: Owner, part: _Part) -> None:
        taken: dict[int, tuple[str, int]] = {}
        if assembly.proposal is not None:
            held = assembly.proposal.held().items()  # a node knows its own processes better
            taken = {rank: (m.node, m.pid) for rank, m in held if m.node != part.node}
        for other in assembly.parts.values():
            if other.node == part.node:
                continue
            difference = other.spec.difference(part.spec)
            if difference is not None:
                field, theirs, ours = difference
                if set(part.ranks).issubset(assembly.missing):  # nobody else has them
                    other.error = _mismatch(owner, field, part.node, ours, other.node, theirs)
                    del assembly.parts[other.node]
                    assembly.notify()
                raise _mismatch(owner, field, other.node, theirs, part.node, ours)
            taken.update({rank: (other.node, c.pid) for rank, c in other.ranks.items()})
        for rank in sorted(part.ranks):
            if rank in taken:
                node, pid = taken[rank]
                raise GroupBusyError(
                    f"rank {rank} of group {owner.name!r} is claimed by process {pid} on node "
                    f"{node!r}, which lives; node {part.node!r} claims it too",
                    group=owner.name,
                    rank=rank,
                    pid=pid,
                    node=node,
                )

    def _propose(self, assembly: _Assembly, owner: Owner) -> None:
        """Gives every node the view, once no rank is missing."""
        if assembly.missing:
            return
        epoch = self._facts.next_epoch()
        members = [
            ViewMember(rank, part.node, claim.session_id, claim.pid)
            for part in assembly.parts.values()
            for rank, claim in part.ranks.items()
        ]
        members.sort(key=lambda member: member.rank)
        view = GroupView(epoch, assembly.attempts + 1, tuple(members))
        until_s = self._clock.monotonic_s() + limits.NODE_INIT_S
        assembly.proposal = _Proposal(view, until_s)
        for part in assembly.parts.values():
            part.view = view
        assembly.parts = {}
        self._log("cluster.view", owner, view, f"{len(view.nodes)} nodes have every rank")
        assembly.notify()

    # Decisions

    def _proposal(self, owner: Owner, epoch: int) -> tuple[_Assembly, _Proposal] | None:
        assembly = self._all.get(owner)
        if assembly is None or assembly.proposal is None:
            return None
        if assembly.proposal.view.epoch != epoch:
            return None
        return assembly, assembly.proposal

    def report(self, node: str, owner: Owner, epoch: int, error: str) -> None:
        """A node's word on a view; nothing where it is decided, or not known.

        Raises:
            PoolExhaustedError: the decision cannot be written; the node says it again.
        """
        found = self._proposal(owner, epoch)
        if found is None:
            return
        assembly, proposal = found
        if not proposal.open or node not in proposal.view.nodes:
            return
        if error:
            self._give_up(assembly, owner, f"node {node!r}: {error}")
            return
        proposal.attached.add(node)
        if proposal.attached == proposal.view.nodes:
            self._facts.commit(_fact_name(owner), epoch)
            proposal.outcome = Outcome.COMMITTED
            assembly.attempts = 0
            self._log("cluster.committed", owner, proposal.view, "every node attached")
            assembly.notify()

    def ended(self, node: str, owner: Owner, epoch: int, ranks: Iterable[int]) -> None:
        """Processes of the node ended, or left the group: their ranks can be claimed anywhere."""
        found = self._proposal(owner, epoch)
        if found is not None:
            _, proposal = found
            own = {member.rank for member in proposal.view.members if member.node == node}
            proposal.ended |= own.intersection(ranks)

    async def outcome(self, owner: Owner, epoch: int, wait_s: float) -> tuple[Outcome, str]:
        """What became of a view, and why."""
        found = self._proposal(owner, epoch)
        if found is not None:
            assembly, proposal = found
            await assembly.wait(lambda: not proposal.open, wait_s)
            return proposal.outcome, proposal.reason
        if self._facts.committed_epoch(_fact_name(owner)) == epoch:
            return Outcome.COMMITTED, ""
        return Outcome.ABORTED, f"the coordinator does not know epoch {epoch} any more"

    def _give_up(self, assembly: _Assembly, owner: Owner, reason: str) -> None:
        proposal = assembly.proposal
        if proposal is None or not proposal.open:
            return
        proposal.outcome, proposal.reason = Outcome.ABORTED, reason[:500]
        assembly.attempts += 1
        self._log("cluster.given_up", owner, proposal.view, reason)
        assembly.notify()

    def _give_up_view_of(self, assembly: _Assembly, owner: Owner, node: str) -> None:
        """A node that joins again has not got the view, or cannot use it."""
        proposal = assembly.proposal
        if proposal is not None and node in proposal.view.nodes:
            self._give_up(assembly, owner, f"node {node!r} joins again")

    def node_gone(self, node: str) -> None:
        """It left, was not heard of for a lease's time, or started again."""
        for owner, assembly in list(self._all.items()):
            part = assembly.parts.get(node)
            if part is not None:
                self._drop(assembly, part)
            proposal = assembly.proposal
            if proposal is not None and node in proposal.view.nodes:
                self._give_up(assembly, owner, f"node {node!r} is gone")
                # Its processes may live; where they do not, the job must be able to go elsewhere.
                proposal.ended |= {m.rank for m in proposal.view.members if m.node == node}

    def tick(self) -> None:
        """Drops claims that nobody renewed, and views that nobody decided."""
        now = self._clock.monotonic_s()
        for owner, assembly in list(self._all.items()):
            for part in list(assembly.parts.values()):
                if not part.waits and part.until_s <= now:
                    self._drop(assembly, part)
            proposal = assembly.proposal
            if proposal is not None and proposal.until_s <= now and not proposal.lives:
                if proposal.open:
                    waited = sorted(proposal.view.nodes - proposal.attached)
                    self._give_up(assembly, owner, f"nodes {waited} said nothing")
                    proposal.until_s = now + limits.NODE_INIT_S  # who asks hears why
                else:
                    assembly.proposal = None
            if not assembly.parts and assembly.proposal is None:
                del self._all[owner]

    def _log(self, kind: str, owner: Owner, view: GroupView, message: str) -> None:
        self._events.add(
            kind,
            f"group {owner}, epoch {view.epoch}, attempt {view.attempt}: {message}",
            group=owner.name,
            epoch=view.epoch,
            attempt=view.attempt,
        )


def _fact_name(owner: Owner) -> str:
    return f"{owner.uid}/{owner.job}/{owner.name}"


def _mismatch(
    owner: Owner, field: str, node: str, theirs: object, our_node: str, ours: object
) -> SpecMismatchError:
    return SpecMismatchError(
        f"group {owner.name!r} has {field}={theirs} on node {node!r} and {field}={ours} on node "
        f"{our_node!r}; make them equal",
        object=owner.name,
        node=node,
        field=field,
        theirs=theirs,
        ours=ours,
    )
