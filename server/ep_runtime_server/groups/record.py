"""One group's claims, state and memory, which `formation.py` changes, and the table of groups."""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
from collections.abc import Callable, Set
from typing import Any

from ep_runtime import layout
from ep_runtime.board_abi import PoisonReason
from ep_runtime.errors import (
    EpRuntimeError,
    GroupBusyError,
    PermissionDeniedError,
    StaleHandleError,
)
from ep_runtime.specs import NODE_TRANSPORTS, STATE, GroupSpec
from ep_runtime.v1 import session_service_pb2, types_pb2
from ep_runtime_server.base.clock import Changes, paced
from ep_runtime_server.callers.credentials import GivenOrder
from ep_runtime_server.callers.sessions import SessionRecord
from ep_runtime_server.groups.fsm import State, Trigger, next_state
from ep_runtime_server.groups.layers import LayerTable
from ep_runtime_server.memory.windows import Owner, WindowSet


@dataclasses.dataclass(eq=False)
class GroupMember:
    """A process that claims ranks of a group's current generation."""

    session: SessionRecord
    ranks: tuple[int, ...]
    attached: bool = False


@dataclasses.dataclass
class Answered:
    """This node's sessions in a view, whose ends other nodes must still learn.

    Sessions are by world rank; None is a process that ended while no daemon ran.
    """

    epoch: int
    nodes: frozenset[str]
    sessions: dict[int, SessionRecord | None]


@dataclasses.dataclass(frozen=True)
class RemoteMember:
    """A process on another node, known from the view of the group's epoch."""

    node: str
    session_id: str
    pid: int


class GroupRecord:
    """A group of one owner, formed once every rank is claimed and its memory allocated.

    Attributes:
        group_id: the group's unique name in the journal.
        spec: the spec that its creators asked for.
        node_size: how many ranks share windows, set once the generation has memory; 0 for all
            ranks of an EP group.
        on_change: called after every change.
        restoring: being rebuilt from its processes' reports, because the journal lacks parts.
    """

    def __init__(self, owner: Owner, spec: GroupSpec, generation: int) -> None:
        self.group_id = f"g-{secrets.token_hex(6)}"
        self.on_change: Callable[[GroupRecord], None] = lambda group: None
        self.restoring = False
        self.owner = owner
        self.spec = spec
        self.node_size = 0
        self.generation = generation
        self.state = State.FORMING
        self.layers = LayerTable(spec)
        self.members: dict[str, GroupMember] = {}
        # Members of the older generation that have neither claimed again nor left. Other processes
        # cannot claim their ranks.
        self.previous: dict[str, GroupMember] = {}
        self.left: set[str] = set()  # session ids that closed the group while others use it
        self.windows: WindowSet | None = None
        self.uuids: dict[int, str] = {}  # GPU by world rank; empty on the host
        self.formed = False
        self.reattached = False
        self.formation: asyncio.Task[None] | None = None
        self.failure: EpRuntimeError | None = None
        self.namesakes: set[str] = set()  # other jobs in which a group of this name forms too
        self.lost: dict[int, SessionRecord | RemoteMember] = {}  # ended processes by world rank
        # For a group across nodes: the view of its epoch, and whether it is committed.
        self.remote: dict[int, RemoteMember] = {}  # by world rank
        self.epoch = self.attempt = 0
        self.committed = False
        # May be of an earlier view while that view's processes run.
        self.answered: Answered | None = None
        # A view that was undecided when the previous daemon ended: (epoch, other nodes, world ranks
        # of this node).
        self.undecided: tuple[int, tuple[str, ...], tuple[int, ...]] | None = None
        self.spans = False  # a view existed in this generation, so missing ranks are elsewhere
        self.elsewhere: frozenset[int] = frozenset()  # ranks claimed on other nodes, before a view
        self.last_event: Trigger | None = None
        self.last_reason = ""  # why the state changed, for people
        self.retained_until_s: float | None = None  # only used in RETAINED
        self.created_s = 0.0
        self.created_wall_s = 0.0
        self.changes = Changes()

    @property
    def fields(self) -> dict[str, Any]:
        """Returns the fields of events and messages that name the group and its generation."""
        return {**self.owner.fields, "generation": self.generation}

    @property
    def lost_ranks(self) -> list[int]:
        return list(self.lost)

    @property
    def has_windows(self) -> bool:
        return self.spec.transport != "xla"

    @property
    def resolved(self) -> GroupSpec:
        """Returns the spec with the `node_size` that the group's memory and programs use."""
        return dataclasses.replace(self.spec, node_size=self.node_size)

    @property
    def local_ranks(self) -> list[int]:
        """Returns the world ranks that are not on another node."""
        return [rank for rank in range(self.spec.world_size) if rank not in self.remote]

    @property
    def node_size_of_view(self) -> int:
        """Computes `node_size` from the view of a fully claimed group; equal on every node."""
        remote, spec = self.remote, self.spec
        if spec.transport == "nccl" and not remote:
            return 1  # NCCL was requested, because these GPUs may not reach each other
        if not remote or spec.transport not in NODE_TRANSPORTS:
            return 0
        nodes = [remote[r].node if r in remote else "" for r in range(spec.world_size)]
        size = layout.node_size(nodes, spec.ep_size)
        # With on_overflow="error", verdicts go to slabs on all nodes, so windows cannot carry them.
        return 0 if size == spec.ep_size and spec.on_overflow != "error" else size

    @property
    def claims(self) -> dict[int, GroupMember]:
        return {rank: member for member in self.members.values() for rank in member.ranks}

    def member_of(self, rank: int) -> GroupMember | None:
        """Returns the member that claims a world rank; None if there is none."""
        return next((m for m in self.members.values() if rank in m.ranks), None)

    @property
    def missing_ranks(self) -> list[int]:
        return self._others(self.claims.keys() | self.remote.keys())

    @property
    def unattached_ranks(self) -> list[int]:
        attached = {rank for rank, member in self.claims.items() if member.attached}
        return self._others(attached | self.remote.keys() if self.committed else attached)

    def _others(self, ranks: Set[int]) -> list[int]:
        return sorted({*range(self.spec.world_size)} - ranks)

    @property
    def awaited(self) -> tuple[str, list[int]]:
        """Returns why the group is not READY, and which world ranks are missing."""
        size = self.spec.world_size
        if self.formed:
            unattached = self.unattached_ranks
            return f"ranks {unattached} of {size} did not attach", unattached
        missing = [rank for rank in self.missing_ranks if rank not in self.elsewhere]
        if missing:
            return f"ranks {missing} of {size} were not claimed", missing
        return "its memory was not there", []

    @property
    def others_left(self) -> bool:
        """Returns whether processes of other nodes closed the group; a claim then renews it."""
        return any(member.session_id in self.left for member in self.remote.values())

    @property
    def can_form_again(self) -> bool:
        """Returns whether a claim starts a new generation."""
        return self.state in (State.BROKEN, State.RETAINED) or bool(
            self.state is State.READY and self.left
        )

    def advance(self, event: Trigger, reason: str = "") -> None:
        """Applies the transition, wakes waiters and notifies members."""
        before, self.state = self.state, next_state(self.state, event)
        self.last_event, self.last_reason = event, reason or event.value
        if self.state is not before:
            self._tell(self.last_reason)
        self.notify()

    def _tell(self, reason: str) -> None:
        message = session_service_pb2.GroupEvent(
            group=self.owner.name,
            generation=self.generation,
            state=f"GROUP_STATE_{self.state.value}",
            reason=reason,
            lost_ranks=self.lost_ranks,
            lost_members=[
                types_pb2.GroupMember(world_rank=rank, session_id=gone.session_id, pid=gone.pid)
                for rank, gone in self.lost.items()
            ],
        )
        for member in self.members.values():
            member.session.tell(session_service_pb2.WatchSessionResponse(group=message))

    def notify(self) -> None:
        self.changes.tell()
        self.on_change(self)

    def check_free(self, session: SessionRecord, ranks: tuple[int, ...]) -> None:
        """Raises GroupBusyError if another live process has one of the ranks.

        Processes of other nodes keep their ranks while this node uses their view.
        """
        for member in (*self.members.values(), *self.previous.values()):
            taken = sorted(set(member.ranks).intersection(ranks))
            if taken and member.session is not session:
                raise GroupBusyError(
                    f"rank {taken[0]} of group {self.owner.name!r} is claimed by process "
                    f"{member.session.pid}, which is still alive",
                    group=self.owner.name,
                    rank=taken[0],
                    pid=member.session.pid,
                )
        for rank in ranks if not self.can_form_again else ():
            other = self.remote.get(rank)
            if other and rank not in self.lost and other.session_id not in self.left:
                raise GroupBusyError(
                    f"rank {rank} of group {self.owner.name!r} is claimed by process {other.pid} "
                    f"on node {other.node!r}, which is still alive",
                    group=self.owner.name,
                    rank=rank,
                    pid=other.pid,
                    node=other.node,
                )

    def claim(
        self, session: SessionRecord, ranks: tuple[int, ...], uuids: tuple[str, ...] = ()
    ) -> None:
        """Makes the session a member of the current generation; `uuids` are the ranks' GPUs."""
        self.previous.pop(session.session_id, None)
        self.uuids.update(zip(ranks, uuids, strict=False))
        self.members[session.session_id] = GroupMember(session, ranks)
        self.notify()

    def start_over(self, generation: int) -> None:
        """Starts a new generation, which uses the old memory and whose members must claim again."""
        self.advance(Trigger.CLAIMED_AGAIN)
        self.generation = generation
        self.previous.update(self.members)
        self.members = {}
        self.left = set()
        self.formed = self.reattached = False
        self.lost = {}
        self.spans = False
        self.leave_view()

    def leave_view(self) -> None:
        """Forgets the view, because its epoch has ended for this node."""
        self.remote = {}
        self.epoch = self.attempt = 0
        self.committed = False
        self.elsewhere = frozenset()

    def member(self, session: SessionRecord, generation: int) -> GroupMember:
        """Returns the session's membership in a generation.

        Raises StaleHandleError for another generation, PermissionDeniedError for a non-member.
        """
        self.check_generation(generation)
        member = self.members.get(session.session_id)
        if member is None:
            raise PermissionDeniedError(
                f"process {session.pid} claims no rank of group {self.owner.name!r}",
                group=self.owner.name,
            )
        return member

    def check_reader(self, session: SessionRecord, generation: int) -> None:
        """Checks that the session may read the group's memory. Raises as `member`.

        Each process of the job may, because a member may have ended or been replaced.
        """
        if self.spec.transport == STATE:
            self.check_generation(generation)
        else:
            self.member(session, generation)

    def check_generation(self, generation: int) -> None:
        """Raises StaleHandleError, naming both generations, if `generation` is not current."""
        if generation != self.generation:
            raise StaleHandleError(
                f"group {self.owner.name!r} is at generation {self.generation}, "
                f"the call is for {generation}; create the group again",
                group=self.owner.name,
                generation=self.generation,
                asked=generation,
            )

    def poison(self, reason: PoisonReason, rank: int = -1, by: GivenOrder | None = None) -> None:
        # Before the group has formed, its board still has the older generation, and no client
        # uses the new one.
        if self.windows is not None and self.formed:
            self.windows.poison(reason, rank, by)


class GroupBook:
    """Finds groups; the subclass `Groups` changes them. For the event loop's thread only."""

    def __init__(self) -> None:
        self.on_change: Callable[[GroupRecord], None] = lambda group: None
        # Called with a new generation before a group gets it; raises to refuse it.
        self.on_generation: Callable[[int], None] = lambda generation: None
        self._groups: dict[Owner, GroupRecord] = {}
        self.generation = 0  # the latest that a group got

    def skip_to(self, generation: int) -> None:
        """Makes all later generations larger than `generation`."""
        self.generation = max(self.generation, generation)

    def _next_generation(self) -> int:
        self.on_generation(self.generation + 1)
        self.generation += 1
        return self.generation

    def add(self, group: GroupRecord) -> None:
        """Adds a group, new or restored."""
        self._groups[group.owner] = group
        self.skip_to(group.generation)
        group.on_change = self.on_change
        self.on_change(group)

    def _forget(self, group: GroupRecord) -> None:
        if self._groups.get(group.owner) is group:
            del self._groups[group.owner]

    def find(self, owner: Owner) -> GroupRecord | None:
        return self._groups.get(owner)

    def all(self) -> list[GroupRecord]:
        return list(self._groups.values())

    def of_user(self, uid: int) -> list[GroupRecord]:
        return [group for group in self._groups.values() if group.owner.uid == uid]

    def get(self, session: SessionRecord, name: str) -> GroupRecord:
        """Finds a group by name in the session's (uid, job). Raises StaleHandleError."""
        group = self._groups.get(Owner(session.uid, session.job, name))
        if group is None:
            raise StaleHandleError(
                f"no group {name!r} in job {session.job!r} of uid {session.uid}; create it",
                group=name,
                job=session.job,
            )
        return group

    def of_session(self, session: SessionRecord) -> list[GroupRecord]:
        """Returns groups of which the session is a member, now or in the previous generation."""
        key = session.session_id
        return [g for g in self._groups.values() if key in g.members or key in g.previous]

    async def by_session(self) -> dict[str, list[str]]:
        """Returns the names of each session's groups by session id, as `of_session` finds them."""
        found: dict[str, list[str]] = {}
        async for group in paced(self.all()):
            for session_id in group.members.keys() | group.previous.keys():
                found.setdefault(session_id, []).append(group.owner.name)
        return found
