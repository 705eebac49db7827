"""One group: its claims, its state, its memory. `formation.py` drives it; nothing here awaits."""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
from collections.abc import Callable

from ep_runtime import layout
from ep_runtime.board import PoisonReason
from ep_runtime.errors import (
    EpRuntimeError,
    GroupBusyError,
    PermissionDeniedError,
    StaleHandleError,
)
from ep_runtime.specs import NODE_TRANSPORTS, STATE, GroupSpec
from ep_runtime.v1 import session_service_pb2, types_pb2
from ep_runtime_server.callers.credentials import GivenOrder
from ep_runtime_server.callers.sessions import SessionRecord
from ep_runtime_server.groups.fsm import State, Trigger, next_state
from ep_runtime_server.groups.layers import LayerTable
from ep_runtime_server.memory.windows import Owner, WindowSet


@dataclasses.dataclass(eq=False)
class GroupMember:
    """A process in a group under its current generation."""

    session: SessionRecord
    ranks: tuple[int, ...]
    attached: bool = False


@dataclasses.dataclass
class Answered:
    """This node's sessions, by world rank, until their ends are reported to other nodes. None
    stands for a process that ended while no daemon ran."""

    epoch: int
    nodes: frozenset[str]
    sessions: dict[int, SessionRecord | None]


@dataclasses.dataclass(frozen=True)
class RemoteMember:
    """A process of another node, from the view of the group's epoch."""

    node: str
    session_id: str
    pid: int


def _nobody(group: GroupRecord) -> None:
    """A listener that does nothing, without a journal."""


class GroupRecord:
    """A group of one owner, formed once every rank is claimed and its memory allocated.

    Attributes:
        group_id: its name in the journal; never used again.
        spec: what its creators ask for.
        node_size: ranks that share windows since the memory of this generation is there; 0: all of
            an EP group.
        on_change: called after every change.
        restoring: made of what processes say of it, because the daemon lost its journal.
    """

    def __init__(self, owner: Owner, spec: GroupSpec, generation: int) -> None:
        self.group_id = f"g-{secrets.token_hex(6)}"
        self.on_change: Callable[[GroupRecord], None] = _nobody
        self.restoring = False
        self.owner = owner
        self.spec = spec
        self.node_size = 0
        self.generation = generation
        self.state = State.FORMING
        self.layers = LayerTable(spec)
        self.members: dict[str, GroupMember] = {}
        # Members of the older generation that neither claimed again nor went away: their ranks
        # cannot be claimed by others.
        self.previous: dict[str, GroupMember] = {}
        self.left: set[str] = set()  # processes that closed the group while others go on
        self.windows: WindowSet | None = None
        self.uuids: dict[int, str] = {}  # by world rank: its GPU; empty on the host
        self.formed = False
        self.reattached = False
        self.formation: asyncio.Task[None] | None = None
        self.failure: EpRuntimeError | None = None
        self.namesakes: set[str] = set()  # other jobs in which a group of the name formed meanwhile
        self.lost: dict[
            int, SessionRecord | RemoteMember
        ] = {}  # by world rank: ranks with a dead process
        # For a group across nodes: the view of its epoch, and whether it is committed.
        self.remote: dict[int, RemoteMember] = {}  # by world rank
        self.epoch = self.attempt = 0
        self.committed = False
        # Also of an earlier view, while its processes live.
        self.answered: Answered | None = None
        # A view that was undecided when the previous daemon ended: epoch, other nodes, this node's
        # world ranks.
        self.undecided: tuple[int, tuple[str, ...], tuple[int, ...]] | None = None
        self.spans = False  # had a view in this generation, so missing ranks are on other nodes
        self.elsewhere: frozenset[int] = frozenset()  # claimed on other nodes, without a view yet
        self.last_event: Trigger | None = None
        self.last_reason = ""  # why the state changed, for people
        self.retained_until_s: float | None = None  # means something in RETAINED only
        self.created_s = 0.0
        self.created_wall_s = 0.0
        self._changed = asyncio.Event()

    @property
    def lost_ranks(self) -> list[int]:
        return list(self.lost)

    @property
    def has_windows(self) -> bool:
        return self.spec.transport != "xla"

    @property
    def resolved(self) -> GroupSpec:
        """The spec that the group's memory and programs have."""
        return dataclasses.replace(self.spec, node_size=self.node_size)

    @property
    def local_ranks(self) -> list[int]:
        """World ranks that no other node has."""
        return [rank for rank in range(self.spec.world_size) if rank not in self.remote]

    @property
    def node_size_of_view(self) -> int:
        """Returns `node_size` once every rank is claimed; equal on every node."""
        remote, spec = self.remote, self.spec
        if spec.transport == "nccl" and not remote:
            return 1  # NCCL was requested, because these GPUs may not reach each other
        if not remote or spec.transport not in NODE_TRANSPORTS:
            return 0
        nodes = [remote[r].node if r in remote else "" for r in range(spec.world_size)]
        size = layout.node_size(nodes, spec.ep_size)
        # Verdicts go to every slab of the group, so they cannot stay in windows.
        return 0 if size == spec.ep_size and spec.on_overflow != "error" else size

    @property
    def claims(self) -> dict[int, GroupMember]:
        return {rank: member for member in self.members.values() for rank in member.ranks}

    def member_of(self, rank: int) -> GroupMember | None:
        """Returns the member that claims a world rank."""
        return next((m for m in self.members.values() if rank in m.ranks), None)

    @property
    def missing_ranks(self) -> list[int]:
        claimed = self.claims
        return [
            rank
            for rank in range(self.spec.world_size)
            if rank not in claimed and rank not in self.remote
        ]

    @property
    def unattached_ranks(self) -> list[int]:
        claimed = self.claims
        return [
            rank
            for rank in range(self.spec.world_size)
            if (not self.committed if rank in self.remote else True)
            and (rank not in claimed or not claimed[rank].attached)
        ]

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
        """Whether processes of other nodes closed it, so that creating it again makes a new one."""
        return any(member.session_id in self.left for member in self.remote.values())

    @property
    def can_form_again(self) -> bool:
        """Whether a claim starts a new generation."""
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
        self._changed.set()
        self._changed = asyncio.Event()
        self.on_change(self)

    @property
    def changed(self) -> asyncio.Event:
        """Set at the next change; take it before looking at what may change."""
        return self._changed

    def check_free(self, session: SessionRecord, ranks: tuple[int, ...]) -> None:
        """Raises GroupBusyError if another live process has one of the ranks.

        Processes of other nodes have theirs for as long as this node goes by their view.
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
        """Makes the session a member under the current generation; `uuids` of the ranks' GPUs."""
        self.previous.pop(session.session_id, None)
        self.uuids.update(zip(ranks, uuids, strict=False))
        self.members[session.session_id] = GroupMember(session, ranks)
        self.notify()

    def start_over(self, generation: int) -> None:
        """Starts a new generation with the memory of the old one. Its members claim again."""
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
        """Forgets the view, because its epoch is over for this node."""
        self.remote = {}
        self.epoch = self.attempt = 0
        self.committed = False
        self.elsewhere = frozenset()

    def member(self, session: SessionRecord, generation: int) -> GroupMember:
        """Raises StaleHandleError for another generation, PermissionDeniedError for a stranger."""
        self.check_generation(generation)
        member = self.members.get(session.session_id)
        if member is None:
            raise PermissionDeniedError(
                f"process {session.pid} claims no rank of group {self.owner.name!r}",
                group=self.owner.name,
            )
        return member

    def check_reader(self, session: SessionRecord, generation: int) -> None:
        """Checks that the session may have the memory: every process of the job may read its state,
        because a process may be gone or new. Raises as `member`."""
        if self.spec.transport == STATE:
            self.check_generation(generation)
        else:
            self.member(session, generation)

    def check_generation(self, generation: int) -> None:
        """Raises StaleHandleError naming both generations."""
        if generation != self.generation:
            raise StaleHandleError(
                f"group {self.owner.name!r} is at generation {self.generation}, "
                f"the call is for {generation}; create the group again",
                group=self.owner.name,
                generation=self.generation,
                asked=generation,
            )

    def poison(self, reason: PoisonReason, rank: int = -1, by: GivenOrder | None = None) -> None:
        # Before it formed no client knows the generation, and the board still has the older one.
        if self.windows is not None and self.formed:
            self.windows.poison(reason, rank, by)


async def wait_until(group: GroupRecord, done: Callable[[], bool], wait_s: float) -> bool:
    """Waits for `done`, looked at whenever the group changes; False at the deadline."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + wait_s
    while not done():
        changed = group.changed
        try:
            # Not wait_for: before Python 3.12 that loses a cancellation that comes with a change.
            async with asyncio.timeout_at(deadline):
                await changed.wait()
        except TimeoutError:
            return done()
    return True
