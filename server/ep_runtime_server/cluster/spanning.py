"""This node's part in forming groups across nodes: joins, installs a view, and commits it.

While ranks of a group are not claimed on this node, one task sends the group's claims to the
coordinator. If all ranks are claimed on this node before there is a view, the task ends and other
nodes take no part. Each node has the windows of its own ranks; windows across nodes are not
supported.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from ep_runtime.errors import EpRuntimeError, InvalidArgumentError
from ep_runtime.specs import NODE_TRANSPORTS, GroupSpec
from ep_runtime_server.base import limits
from ep_runtime_server.base.events import EventLog
from ep_runtime_server.base.supervision import Tasks
from ep_runtime_server.cluster.coordination import TRY_AGAIN, Coordination
from ep_runtime_server.cluster.ends import Ends, until_heard
from ep_runtime_server.cluster.relay import Teller
from ep_runtime_server.cluster.views import GroupView, NodeClaim, NodePart, NodeReport, Outcome
from ep_runtime_server.groups.formation import Groups
from ep_runtime_server.groups.fsm import State, Trigger
from ep_runtime_server.groups.record import GroupMember, GroupRecord, RemoteMember
from ep_runtime_server.memory.windows import Owner
from ep_runtime_server.nodes.facts import ClusterFacts

_SPANNING = (*NODE_TRANSPORTS, "xla")


def _cannot_span(group: GroupRecord, view: GroupView) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"transport={group.spec.transport!r} serves the ranks of one node, and the ranks of "
        f"group {group.owner.name!r} are on the nodes {sorted(view.nodes)}; choose "
        'transport="nccl" or transport="xla"',
        argument="transport",
    )


def _claims(group: GroupRecord) -> tuple[NodeClaim, ...]:
    return _claims_of(group.members.values())


def _claims_of(members: Iterable[GroupMember]) -> tuple[NodeClaim, ...]:
    return tuple(
        NodeClaim(member.session.session_id, member.session.pid, member.ranks) for member in members
    )


async def _done_or_changed(call: asyncio.Future[Any], group: GroupRecord) -> None:
    """Waits until the call is done or the group has changed."""
    change = asyncio.ensure_future(group.changes.next.wait())
    try:
        await asyncio.wait({call, change}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        change.cancel()


async def _end(call: asyncio.Future[Any]) -> None:
    """Cancels a task. Reads the error of an ended task, which asyncio would log otherwise."""
    call.cancel()
    with contextlib.suppress(asyncio.CancelledError, EpRuntimeError):
        await call


def _wants_others(group: GroupRecord) -> bool:
    """Returns whether the group is forming and needs processes of other nodes."""
    open_view = bool(group.remote) and not group.committed
    return (
        group.state is State.FORMING
        and bool(group.members)
        and not group.restoring
        and (open_view or bool(group.missing_ranks))
    )


class Spanning:
    """Forms groups across nodes, on the event loop. Call `changed` after each change of a group."""

    def __init__(
        self,
        node: str,
        coordination: Coordination,
        groups: Groups,
        tell: Teller,
        facts: ClusterFacts,
        events: EventLog,
    ) -> None:
        self._facts = facts
        self._node = node
        self._coordination = coordination
        self._groups = groups
        self._events = events
        self._drivers: dict[str, asyncio.Task[None]] = {}  # by group id
        self.tasks = Tasks(events, "forming across nodes")
        self._start = self.tasks.start
        self.ends = Ends(node, coordination, groups, tell, self._start, facts, events)
        groups.on_unequal = self._unequal

    def changed(self, group: GroupRecord) -> None:
        if _wants_others(group) and group.group_id not in self._drivers:
            self._drivers[group.group_id] = self._start(self._drive(group))
        self.ends.changed(group)

    # Forming

    def _unequal(self, owner: Owner, spec: GroupSpec, members: Iterable[GroupMember]) -> None:
        """Reports processes that this node refused for their spec, to end waits on other nodes."""
        self._start(self._differ(owner, NodePart(self._node, spec, _claims_of(members))))

    async def _differ(self, owner: Owner, part: NodePart) -> None:
        """Reports refused claims within NODE_DIFFERS_S, unless this node joins the group again."""

        async def say() -> None:
            if not self._claims(owner):
                await self._coordination.differ(owner, part)

        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limits.NODE_DIFFERS_S):
                await until_heard(say, owner)

    def _claims(self, owner: Owner) -> bool:
        group = self._groups.find(owner)
        return group is not None and group.group_id in self._drivers

    def _claim_nothing(self, owner: Owner) -> None:
        """Withdraws this node's last claims, which the coordinator would still keep for a while."""

        async def say() -> None:
            if not self._claims(owner):  # a new claim replaces the old one anyway
                await self._coordination.ended(owner, 0, NodeReport(self._node, (), ()))

        self._start(until_heard(say, owner))

    async def _drive(self, group: GroupRecord) -> None:
        """Joins until the group is committed, or no longer needs processes of other nodes."""
        try:
            await self._join(group)
        except Exception:  # a bug, which `tasks` reports; end the callers' wait now
            if group.state is State.FORMING:
                error = EpRuntimeError(f"the daemon could not form group {group.owner}")
                self._groups.fail(group, error)
            raise
        finally:
            self._drivers.pop(group.group_id, None)
        if not group.committed:
            self._claim_nothing(group.owner)

    async def _join(self, group: GroupRecord) -> None:
        pause_s = limits.NODE_RETRY_FIRST_S
        known: list[int] = []
        while _wants_others(group):
            generation = group.generation
            try:
                claims = _claims(group)
                part = NodePart(self._node, group.spec, claims, generation)
                join = self._coordination.join(group.owner, part, known)
                answer = await self._while_same(group, join)
                if answer is None:
                    known = []
                    continue
                view, known = answer
                pause_s = limits.NODE_RETRY_FIRST_S
                group.elsewhere = frozenset(group.missing_ranks).difference(known)
                if view is not None:
                    known = []
                    self._facts.heard(view.epoch)  # for a coordinator that may lose its own file
                    await self._facts.durable()
                    await self._attempt(group, generation, claims, view)
            except TRY_AGAIN as error:
                self._events.add(
                    "cluster.join_waits",
                    f"group {group.owner}: {error}",
                    **group.owner.fields,
                    level=logging.DEBUG,
                )
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, limits.NODE_RETRY_MOST_S)
            except EpRuntimeError as error:
                if group.state is State.FORMING and group.generation == generation:
                    self._groups.fail(group, error)

    async def _while_same(self, group: GroupRecord, call: Coroutine[Any, Any, Any]) -> Any:
        """Returns the call's answer, or cancels the call and returns None if claims change."""
        before = group.generation, _claims(group)
        task = asyncio.ensure_future(call)
        try:
            while not task.done():
                await _done_or_changed(task, group)
                if (group.generation, _claims(group)) != before or not _wants_others(group):
                    return None
            return task.result()
        finally:
            await _end(task)

    async def _attempt(
        self, group: GroupRecord, generation: int, claims: tuple[NodeClaim, ...], view: GroupView
    ) -> None:
        """Installs a view, reports the result, and carries out the coordinator's decision.

        Raises:
            InvalidArgumentError: the group's transport works within one node only.
        """
        if group.spec.transport not in _SPANNING:
            error = _cannot_span(group, view)
            await self._coordination.report(group.owner, view.epoch, str(error))
            raise error
        if not self._install(group, view):
            await self._coordination.report(group.owner, view.epoch, "its claims changed")
            return

        def holds() -> bool:
            same = group.generation == generation and group.epoch == view.epoch
            return same and _claims(group) == claims and group.state is State.FORMING

        outcome, reason = await self._decision(group, view, holds)
        if outcome is Outcome.COMMITTED and holds():
            group.committed = True
            group.advance(Trigger.ALL_ATTACHED)
            if group.lost:  # reported by a node that learned of the commit earlier
                self._groups.lost_elsewhere(group, "a process of another node is gone")
            return
        if outcome is Outcome.COMMITTED:  # a process of this node ended in the meantime
            self._withdraw(group.owner, view)
        if group.epoch == view.epoch and not group.committed:
            self._log("cluster.attempt_over", group, reason or "given up here")
            if group.state is State.FORMING:
                group.lost = {}
                group.leave_view()
                group.notify()

    def _install(self, group: GroupRecord, view: GroupView) -> bool:
        """Installs the view if it matches this node's claims; returns whether it did."""
        theirs = {m.rank: m.session_id for m in view.members if m.node == self._node}
        ours = {rank: member.session.session_id for rank, member in group.claims.items()}
        whole = [member.rank for member in view.members] == list(range(group.spec.world_size))
        if ours != theirs or not whole or not _wants_others(group):
            return False
        group.remote = {
            m.rank: RemoteMember(m.node, m.session_id, m.pid)
            for m in view.members
            if m.node != self._node
        }
        group.epoch, group.attempt, group.elsewhere = view.epoch, view.attempt, frozenset()
        group.spans = True
        self._log("cluster.attempt", group, f"{len(view.nodes)} nodes, attempt {view.attempt}")
        group.notify()
        self._groups.complete(group)
        return True

    async def _decision(
        self, group: GroupRecord, view: GroupView, holds: Callable[[], bool]
    ) -> tuple[Outcome, str]:
        """Reports once that this node's processes attached, and waits for the decision.

        Keeps waiting while the coordinator is unreachable, because only it knows the decision.
        """
        reported, pause_s = False, limits.NODE_RETRY_FIRST_S
        while True:
            try:
                if not holds():
                    return self._withdraw(group.owner, view)
                attached = group.formed and all(m.attached for m in group.members.values())
                if attached and not reported:
                    await self._coordination.report(group.owner, view.epoch, "")
                    reported = True
                outcome, reason = await self._next_word(group, view)
                if outcome is not Outcome.UNSPECIFIED:
                    return outcome, reason
                pause_s = limits.NODE_RETRY_FIRST_S
            except TRY_AGAIN:
                if not holds():
                    return self._withdraw(group.owner, view)
                reported = False
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, limits.NODE_RETRY_MOST_S)

    def _withdraw(self, owner: Owner, view: GroupView) -> tuple[Outcome, str]:
        """Tells the other nodes that this node can no longer use the view.

        The coordinator may have committed the view already, or may commit it while unreachable.
        """
        why = f"a process of node {self._node!r} ended"
        report = self._coordination.report
        self._start(until_heard(lambda: report(owner, view.epoch, why), owner))
        ours = [member.rank for member in view.members if member.node == self._node]
        self.ends.tell(owner, view.epoch, view.nodes - {self._node}, ours, [])
        return Outcome.ABORTED, why

    async def _next_word(self, group: GroupRecord, view: GroupView) -> tuple[Outcome, str]:
        """Returns the coordinator's decision; UNSPECIFIED if there is none or the group changed."""
        call = asyncio.ensure_future(self._coordination.outcome(group.owner, view.epoch))
        try:
            await _done_or_changed(call, group)
            return call.result() if call.done() else (Outcome.UNSPECIFIED, "")
        finally:
            await _end(call)

    def _log(self, kind: str, group: GroupRecord, message: str) -> None:
        self._events.add(
            kind,
            f"group {group.owner}, epoch {group.epoch}: {message}",
            **group.fields,
            epoch=group.epoch,
        )
