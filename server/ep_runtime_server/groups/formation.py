"""Forms groups from claims, and changes them on ends of sessions, timeouts and orders."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

from ep_runtime.allowed_names import check_new_name
from ep_runtime.board_abi import PoisonReason
from ep_runtime.errors import (
    EpRuntimeError,
    GroupNotReadyError,
    InvalidArgumentError,
    SpecMismatchError,
    StaleHandleError,
)
from ep_runtime.specs import GroupSpec
from ep_runtime_server.base.clock import Clock
from ep_runtime_server.base.events import EventLog
from ep_runtime_server.base.supervision import tell_failure
from ep_runtime_server.callers.credentials import Caller, GivenOrder
from ep_runtime_server.callers.quotas import Quotas
from ep_runtime_server.callers.sessions import SessionRecord, SessionState
from ep_runtime_server.groups.allocation import get_windows
from ep_runtime_server.groups.fsm import State, Trigger
from ep_runtime_server.groups.record import GroupBook, GroupMember, GroupRecord
from ep_runtime_server.memory.windows import Owner, WindowPool


class Groups(GroupBook):
    """The table of groups with the methods that change groups. Only forming a group awaits."""

    def __init__(
        self, pool: WindowPool, clock: Clock, events: EventLog, quotas: Quotas | None = None
    ) -> None:
        """Allows a user any number of groups if `quotas` is None."""
        super().__init__()
        # Called with processes that are refused because their spec differs from others' in a
        # group that forms or may form again.
        self.on_unequal: Callable[[Owner, GroupSpec, Iterable[GroupMember]], None]
        self.on_unequal = lambda owner, spec, members: None
        self._quotas = quotas
        self._pool = pool
        self._clock = clock
        self._events = events

    async def create(
        self,
        session: SessionRecord,
        spec: GroupSpec,
        ranks: tuple[int, ...],
        *,
        uuids: tuple[str, ...] = (),
        replace: bool,
        wait_s: float,
        waited_s: float = 0.0,
    ) -> GroupRecord:
        """Claims ranks for a session, and waits until the group has formed.

        Args:
            uuids: the GPUs of the ranks; empty for windows on the host.
            waited_s: how much of `wait_s` the caller has already waited.

        Raises:
            SpecMismatchError, GroupBusyError, InvalidArgumentError: the claim is refused at once.
            GroupNotReadyError: the group did not form in time; the claim is given up.
            PoolExhaustedError: there is not enough memory.
            StaleHandleError: the group was closed, replaced or reclaimed while it formed.
        """
        group = self._claim(session, spec, ranks, uuids, replace=replace)
        key, generation = session.session_id, group.generation
        left_s = max(0.0, wait_s - waited_s)
        await group.changes.until(lambda: group.formed or key not in group.members, left_s)
        if group.failure is not None:
            group.failure.raise_again()
        if key not in group.members or group.generation != generation:
            raise StaleHandleError(
                f"group {spec.name!r} was closed, replaced or reclaimed while it formed",
                group=spec.name,
            )
        if not group.formed:
            awaited, missing = group.awaited
            namesakes = _namesakes_of(group) if missing else ""
            self._depart(group, session, Trigger.CLAIMANT_LOST)
            raise GroupNotReadyError(
                f"group {spec.name!r}: {awaited} within {wait_s:g} s{namesakes}",
                group=spec.name,
                missing_ranks=missing,
            )
        return group

    def _claim(
        self,
        session: SessionRecord,
        spec: GroupSpec,
        ranks: tuple[int, ...],
        uuids: tuple[str, ...],
        *,
        replace: bool,
    ) -> GroupRecord:
        owner = Owner(session.uid, session.job, spec.name)
        group = self.find(owner)
        if group is None:
            check_new_name("group", spec.name)
        difference = group.spec.difference(spec) if group is not None else None
        if group is not None and difference is not None:
            if not replace:
                error = _mismatch(group, session, *difference)
                self._fail_unequal(group, session, spec, ranks, difference)
                raise error
            order = GivenOrder(Caller(session.uid, session.pid), "create_group(replace=True)")
            self.take_away(group, PoisonReason.CLOSED, "was replaced", order)
            group = None
        if group is None:
            if self._quotas is not None:
                self._quotas.check(owner.uid, groups=1)
            group = GroupRecord(owner, spec, self._next_generation())
            self.begin(group)
        member = group.members.get(session.session_id)
        if member is not None and group.state is not State.BROKEN and not group.others_left:
            if member.ranks != ranks:
                raise InvalidArgumentError(
                    f"this process claims the ranks {list(member.ranks)} of group {spec.name!r}, "
                    f"the call says {list(ranks)}; close the group first",
                    argument="world_ranks",
                )
            return group
        self._check_same_mesh(group, session, ranks)
        group.check_free(session, ranks)
        if group.can_form_again:
            group.start_over(self._next_generation())
            self._stamp(group)
        group.claim(session, ranks, uuids)
        self._note_namesakes(group)
        if group.windows is not None:
            self._pool.lease(group.windows)
            # By contract, a process that claims again has unmapped the older generation.
            self._pool.drop_holder(session.session_id, group.windows)
        self.complete(group)
        return group

    def complete(self, group: GroupRecord) -> None:
        """Starts to form a group if all its ranks are claimed."""
        if not group.missing_ranks and (group.formation is None or group.formation.done()):
            group.formation = asyncio.get_running_loop().create_task(self._form(group))
            group.formation.add_done_callback(lambda task: self._check_formed(group, task))

    def fail(self, group: GroupRecord, error: EpRuntimeError) -> None:
        """Ends the forming of a group; its callers' waits end with `error`."""
        group.failure = error
        self._close(group, Trigger.FAILED, str(error))

    def _fail_unequal(
        self,
        group: GroupRecord,
        session: SessionRecord,
        spec: GroupSpec,
        ranks: tuple[int, ...],
        difference: tuple[str, object, object],
    ) -> None:
        """Ends the forming of a group whose missing ranks are claimed with another spec.

        `difference` is (field, the group's value, the newcomer's value).
        """
        if group.state is not State.FORMING and not group.can_form_again:
            return
        self.on_unequal(group.owner, spec, [GroupMember(session, ranks)])
        if group.state is State.FORMING and group.members and set(ranks) <= {*group.missing_ranks}:
            field, ours, theirs = difference
            self.on_unequal(group.owner, group.spec, group.members.values())
            self.fail(group, _unequal(group.spec.name, session, field, theirs, ours))

    def _check_same_mesh(
        self, group: GroupRecord, session: SessionRecord, ranks: tuple[int, ...]
    ) -> None:
        """Raises SpecMismatchError if another process of the job claims one of the ranks.

        The two processes must have built different meshes, so forming the group fails too.
        """
        if group.state is not State.FORMING:
            return
        for member in group.members.values():
            other = member.session
            if other.process_index == session.process_index or not {*member.ranks} & {*ranks}:
                continue
            self.fail(group, _other_mesh(group.spec.name, session, ranks, member.ranks))
            raise _other_mesh(group.spec.name, other, member.ranks, ranks)

    def _note_namesakes(self, group: GroupRecord) -> None:
        """Notes groups of this name that form in the user's other jobs, for the error's hint.

        Processes of one job may have given different job names by mistake.
        """
        for other in self.of_user(group.owner.uid):
            alike = other.owner.name == group.owner.name and other is not group
            if alike and State.FORMING is group.state is other.state:
                group.namesakes.add(other.owner.job)
                other.namesakes.add(group.owner.job)

    def _check_formed(self, group: GroupRecord, task: asyncio.Task[None]) -> None:
        """Ends the waits of a group's callers if forming raised an unexpected error."""
        error = None if task.cancelled() else task.exception()
        if error is not None and group.state is not State.CLOSED:
            tell_failure(self._events, f"forming {group.owner}", error)
            group.failure = EpRuntimeError(f"the daemon could not form group {group.owner}")
            self.take_away(group, PoisonReason.CLOSED, "a fault of the daemon")

    def begin(self, group: GroupRecord) -> None:
        """Adds a new group, which has no claims yet."""
        self.add(group)
        self._stamp(group)

    def _stamp(self, group: GroupRecord) -> None:
        group.created_s = self._clock.monotonic_s()
        group.created_wall_s = self._clock.wall_s()
        self._log("group.forming", group, f"generation {group.generation} begins to form")

    async def _form(self, group: GroupRecord) -> None:
        """Allocates the memory of a fully claimed group; at most one such task runs per group."""
        try:
            while True:
                wanted = group.generation, group.epoch
                await get_windows(group, self._pool, self._events)
                if group.state is State.CLOSED or group.missing_ranks:
                    break
                if (group.generation, group.epoch) == wanted:
                    group.formed = True
                    self._log("group.formed", group, "every rank is claimed, the memory is there")
                    break
        except EpRuntimeError as error:
            group.failure = error
            if group.state is not State.CLOSED:
                event = Trigger.FAILED if group.state is State.FORMING else Trigger.TAKEN_AWAY
                self._close(group, event, str(error))
        finally:
            if group.windows is not None:
                if group.state is State.CLOSED:
                    self._pool.release(group.windows)
                    group.windows = None
                elif group.state is State.RETAINED:
                    self._pool.retain(group.windows)
            group.notify()

    # Ends

    def memory_lost(self, group: GroupRecord) -> None:
        """Breaks a formed group whose windows were lost in a restart of the daemon."""
        assert group.windows is not None
        self._pool.release(group.windows)
        group.windows = None
        if group.formed and group.members:  # else the next formation allocates new memory
            why = "its memory was lost when the daemon started again"
            group.advance(Trigger.MEMBER_LOST, why)
            self._log("group.broken", group, why)
        group.notify()

    def give_up(self, group: GroupRecord) -> None:
        """Breaks a group if some of its processes did not come back in time after a restart."""
        missing = group.missing_ranks or group.unattached_ranks or [-1]
        group.poison(PoisonReason.PEER_LOST, missing[0])
        why = f"ranks {missing} did not come back after the daemon started again"
        group.advance(Trigger.MEMBER_LOST, why)
        self._log("group.broken", group, why)

    def lost_elsewhere(self, group: GroupRecord, why: str) -> None:
        """Breaks a group that lost processes on other nodes, which `group.lost` has."""
        group.poison(PoisonReason.PEER_LOST, group.lost_ranks[0])
        group.advance(Trigger.MEMBER_LOST, why)

    def disconnected(self, group: GroupRecord, session: SessionRecord, why: str) -> None:
        """Breaks a READY group after a process reported that it cannot reach others.

        If one of those processes has ended, the daemon soon learns of it and poisons the board
        with its rank.
        """
        group.poison(PoisonReason.PEER_LOST)
        group.advance(Trigger.CONNECTION_LOST, f"process {session.pid}: {why}")
        self._log("group.broken", group, why)

    def leave(self, session: SessionRecord, group: GroupRecord) -> int:
        """Notes that the process unmapped the group and left; returns bytes being freed."""
        if group.windows is not None:
            self._pool.drop_holder(session.session_id, group.windows)
        return self._depart(group, session, Trigger.MEMBER_LEFT)

    def close(self, session: SessionRecord, name: str, generation: int) -> int:
        """Notes that the process unmapped a group's generation; returns bytes being freed.

        Does nothing for a group or generation that does not exist (any more).
        """
        owner = Owner(session.uid, session.job, name)
        group = self.find(owner)
        if group is not None and group.generation == generation:
            if session.session_id in group.members:
                return self.leave(session, group)
            held = group.windows  # of a process that only read the group's state
            return self._pool.drop_holder(session.session_id, held) if held is not None else 0
        freed = 0
        for windows in self._pool.sets:
            if windows.owner == owner and windows.generation == generation:
                freed += self._pool.drop_holder(session.session_id, windows)
        if group is not None and session.session_id in group.previous:
            freed += self.leave(session, group)
        return freed

    def session_ended(self, session: SessionRecord) -> None:
        """Handles a session's end: FENCED keeps memory charged, CLOSED and DEAD do not."""
        if session.over:
            self._pool.drop_all_of(session.session_id)
        left = session.state is SessionState.CLOSED
        for group in self.of_session(session):
            if session.state is SessionState.FENCED:
                self._fenced(group, session)
            else:
                self._depart(group, session, Trigger.MEMBER_LEFT if left else Trigger.MEMBER_LOST)

    def _fenced(self, group: GroupRecord, session: SessionRecord) -> None:
        member = group.members.get(session.session_id)
        rank = member.ranks[0] if member is not None else -1
        group.poison(PoisonReason.FENCED, rank, session.fenced_by)
        why = f"its session was fenced {session.fence_reason}"
        if len(group.members.keys() | group.previous.keys()) == 1:
            self.take_away(group, PoisonReason.FENCED, why, session.fenced_by)
        else:
            self._depart(group, session, Trigger.MEMBER_LOST, why)

    def _depart(
        self, group: GroupRecord, session: SessionRecord, event: Trigger, why: str = ""
    ) -> int:
        """Removes the session from the group; returns bytes being freed."""
        member = group.members.pop(session.session_id, None)
        group.previous.pop(session.session_id, None)
        alone = not group.members and not group.previous
        if member is not None and group.formed and event is Trigger.MEMBER_LOST:
            group.lost.update(dict.fromkeys(member.ranks, session))
            group.poison(PoisonReason.PEER_LOST, member.ranks[0])
        if alone:
            if event is Trigger.MEMBER_LEFT:
                return self._close(group, Trigger.EMPTIED_FOR_GOOD, "closed by its last process")
            return self._emptied(group)
        if member is None:
            group.notify()
        elif not group.formed:
            group.advance(Trigger.CLAIMANT_LOST)
        else:
            if event is Trigger.MEMBER_LEFT:
                group.left.add(session.session_id)
                if group.state is State.FORMING:
                    group.poison(PoisonReason.CLOSED)
            why = f"process {session.pid}: {why or event.value}"
            group.advance(event, why)
            self._log(f"group.{group.state.value.lower()}", group, why)
        return 0

    def _emptied(self, group: GroupRecord) -> int:
        forming = group.formation is not None and not group.formation.done()
        worth = group.windows is not None or forming or len(group.layers) > 0
        if group.spec.retain_s <= 0 or not worth:
            return self._close(group, Trigger.EMPTIED_FOR_GOOD, "no process is left")
        group.retained_until_s = self._clock.monotonic_s() + group.spec.retain_s
        if group.windows is not None:
            self._pool.retain(group.windows)
        group.advance(Trigger.EMPTIED)
        self._log("group.retained", group, f"retained for {group.spec.retain_s:g} s")
        return 0

    def take_away(
        self, group: GroupRecord, reason: PoisonReason, why: str, order: GivenOrder | None = None
    ) -> int:
        """Poisons and removes the group; returns bytes being freed."""
        group.poison(reason, by=order)
        fields: dict[str, Any] = order.fields if order is not None else {}
        if order is not None and str(order) not in why:
            why = f"{why} {order}"
        return self._close(group, Trigger.TAKEN_AWAY, why, **fields)

    def expire(self) -> None:
        """Frees retained groups whose time is over."""
        now = self._clock.monotonic_s()
        for group in self.all():
            until = group.retained_until_s
            if group.state is State.RETAINED and until is not None and until <= now:
                self._close(group, Trigger.EXPIRED, "the retained time is over")

    def _close(self, group: GroupRecord, event: Trigger, why: str, **fields: Any) -> int:
        group.poison(PoisonReason.CLOSED)
        group.advance(event, why)
        group.members = {}
        group.previous = {}
        self._forget(group)
        self._log("group.closed", group, why, **fields)
        freed = 0
        forming = group.formation is not None and not group.formation.done()
        if group.windows is not None and not forming:  # else the running formation releases them
            freed = self._pool.release(group.windows)
            group.windows = None
        group.notify()
        return freed

    def _log(self, kind: str, group: GroupRecord, message: str, **fields: Any) -> None:
        self._events.add(
            kind,
            f"group {group.owner}: {message}",
            **group.fields,
            state=group.state.value,
            **fields,
        )


def _mismatch(
    group: GroupRecord, session: SessionRecord, field: str, theirs: object, ours: object
) -> SpecMismatchError:
    """Makes the error for a session whose spec differs from the spec of the group."""
    name = group.spec.name
    others = [member.session for member in group.members.values() if member.session is not session]
    if group.state is State.FORMING and others:
        return _unequal(name, others[0], field, theirs, ours)
    return SpecMismatchError(
        f"group {name!r} exists with {field}={theirs}, this call says {ours}; "
        "make them equal, or pass replace=True to take its place",
        object=name,
        field=field,
        theirs=theirs,
        ours=ours,
    )


def _unequal(
    name: str, other: SessionRecord, field: str, theirs: object, ours: object
) -> SpecMismatchError:
    return SpecMismatchError(
        f"group {name!r} has {field}={theirs} in process {other.pid} (index "
        f"{other.process_index}) and {field}={ours} in this one; make them equal",
        object=name,
        field=field,
        theirs=theirs,
        ours=ours,
    )


def _other_mesh(
    name: str, other: SessionRecord, theirs: tuple[int, ...], ours: tuple[int, ...]
) -> SpecMismatchError:
    return SpecMismatchError(
        f"group {name!r}: the meshes of the processes differ: process {other.pid} (index "
        f"{other.process_index}) drives the ranks {list(theirs)}, and this one drives "
        f"{list(ours)}; build the mesh from the same devices in the same order in every process",
        object=name,
        field="mesh",
        theirs=list(theirs),
        ours=list(ours),
    )


def _namesakes_of(group: GroupRecord) -> str:
    """Returns a hint for the error of missing ranks if the group forms in another job too."""
    if not group.namesakes:
        return ""
    return (
        f"; a group of that name forms in job {sorted(group.namesakes)[0]!r} of this user too, "
        f"this one in job {group.owner.job!r}: give all processes of a job one name (job=, "
        "EP_RUNTIME_JOB)"
    )
