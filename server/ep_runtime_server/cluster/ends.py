"""Reports ended processes of groups across nodes to the other nodes, and takes their reports.

A node reports on its processes of a committed view until each has ended or left, even if the group
has a new generation on this node. Until then the coordinator does not give their ranks to other
processes, and processes of other nodes may still use the view.

A report goes to the coordinator, which passes it on. This node itself tells the nodes that the
coordinator does not reach. If the coordinator is away, this node tells all nodes, because running
groups must not need the coordinator.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Set
from typing import Any

from ep_runtime.errors import EpRuntimeError, PermissionDeniedError, PoolExhaustedError
from ep_runtime_server.base import limits
from ep_runtime_server.base.events import EventLog
from ep_runtime_server.callers.sessions import SessionRecord, SessionState
from ep_runtime_server.cluster.coordination import TRY_AGAIN, Coordination
from ep_runtime_server.cluster.relay import Teller
from ep_runtime_server.cluster.views import NodeReport, report_to_proto
from ep_runtime_server.groups.formation import Groups
from ep_runtime_server.groups.fsm import State, Trigger
from ep_runtime_server.groups.record import Answered, GroupRecord
from ep_runtime_server.memory.windows import Owner
from ep_runtime_server.nodes.facts import ClusterFacts

_COORDINATOR = ""  # stands for the coordinator; no node has this name


@dataclasses.dataclass(frozen=True)
class _Word:
    """One report: ranks of a view whose processes were lost or left.

    Attributes:
        key: key of the journal's fact that the report is still to be sent.
        unheard: nodes that have not received the report.
        asked: those of them that the coordinator has to tell.
    """

    key: str
    lost: list[int]
    left: list[int]
    why: str
    unheard: set[str]
    asked: set[str]


class Ends:
    """Sends and takes reports, on the event loop. Call `changed` after each change of a group."""

    def __init__(
        self,
        node: str,
        coordination: Coordination,
        groups: Groups,
        tell: Teller,
        start: Callable[[Coroutine[Any, Any, None]], object],
        facts: ClusterFacts,
        events: EventLog,
    ) -> None:
        """`start(work)` runs work as a task; `facts` keep unsent reports over a restart."""
        self._node = node
        self._facts = facts
        self._coordination = coordination
        self._groups = groups
        self._tell = tell
        self._start = start
        self._events = events
        self._unsent: dict[tuple[str, Owner, int], list[_Word]] = {}
        self._away = False  # whether the coordinator did not answer the last report

    def changed(self, group: GroupRecord) -> None:
        if group.state is not State.CLOSED:
            _answer_for(group)
        self._tell_gone(group)

    def restored(self, group: GroupRecord) -> None:
        """Reports the processes that a restored group has lost.

        If the group's view was undecided when the daemon ended, the group drops the view. Other
        nodes may have it, so this node's ranks are reported as lost.
        """
        if group.undecided is not None:
            epoch, nodes, ranks = group.undecided
            group.undecided = None
            self.tell(group.owner, epoch, nodes, list(ranks), [])
        _answer_for(group)
        self._tell_gone(group)

    def _tell_gone(self, group: GroupRecord) -> None:
        """Reports each process that ended or left to the other nodes, once."""
        ours = group.answered
        if ours is None:
            return
        members = (*group.members.values(), *group.previous.values())
        there = {(rank, member.session) for member in members for rank in member.ranks}
        gone = {r: session for r, session in ours.sessions.items() if (r, session) not in there}
        for rank in gone:
            del ours.sessions[rank]
        if gone:
            lost = [rank for rank, session in gone.items() if _is_lost(group, rank, session)]
            left = [rank for rank in gone if rank not in lost]
            why = group.last_reason if lost else ""
            self.tell(group.owner, ours.epoch, ours.nodes, sorted(lost), sorted(left), why)

    def tell(
        self,
        owner: Owner,
        epoch: int,
        nodes: Iterable[str],
        lost: list[int],
        left: list[int],
        why: str = "",
    ) -> None:
        """Sends a report to a view's other nodes, which update their groups, and the coordinator.

        `why` says who ended the lost processes; `facts` do not keep it for a restarted daemon.
        """
        key = f"{owner.path}/{epoch}/{min([*lost, *left], default=-1)}"
        fact = [owner.uid, owner.job, owner.name, epoch, sorted(nodes), lost, left]
        with contextlib.suppress(PoolExhaustedError):  # report even if the disk is full
            self._facts.owe(key, fact)
        self._tell_all(key, fact, why)

    def tell_owed(self) -> None:
        """Sends the reports that the previous daemon could not send before it ended."""
        for key, fact in self._facts.owed.items():
            self._tell_all(key, fact, "")

    def _tell_all(self, key: str, fact: list[Any], why: str) -> None:
        uid, job, name, epoch, nodes, lost, left = fact
        word = _Word(key, lost, left, why, {*nodes, _COORDINATOR}, {*nodes})
        self._queue(_COORDINATOR, Owner(uid, job, name), epoch, word)
        if self._away:
            self._tell_rest([word], {*nodes}, Owner(uid, job, name), epoch)

    def _queue(self, place: str, owner: Owner, epoch: int, word: _Word) -> None:
        unsent = self._unsent.setdefault((place, owner, epoch), [])
        unsent.append(word)
        if len(unsent) == 1:
            self._start(self._send(place, owner, epoch))

    def _tell_rest(self, words: list[_Word], unheard: Set[str], owner: Owner, epoch: int) -> None:
        """Queues reports for nodes the coordinator has not told, and stops asking it."""
        for word in words:
            word.unheard.difference_update(word.asked - unheard)
            for node in sorted(word.asked & unheard):
                self._queue(node, owner, epoch, word)
            word.asked.clear()

    async def _send(self, place: str, owner: Owner, epoch: int) -> None:
        """Sends one node its unsent reports of a view, several of them in one call."""
        unsent = self._unsent[place, owner, epoch]
        told: list[_Word] = []

        async def say() -> None:
            told[:] = unsent
            lost = {rank for word in told for rank in word.lost}
            left = {rank for word in told for rank in word.left} - lost
            why = "; ".join(dict.fromkeys(word.why for word in told if word.why))
            report = NodeReport(self._node, tuple(sorted(lost)), tuple(sorted(left)), why)
            if place != _COORDINATOR:
                await self._tell(place, report_to_proto(owner, epoch, report))
                return
            others = frozenset(node for word in told for node in word.asked)
            try:
                unheard = await self._coordination.ended(owner, epoch, report, others)
            except EpRuntimeError:
                self._away = True
                self._tell_rest(told, others, owner, epoch)
                raise
            self._away = False
            self._tell_rest(told, unheard, owner, epoch)

        try:
            while unsent:
                await until_heard(say, owner)
                del unsent[: len(told)]
                for word in told:
                    word.unheard.remove(place)
                    if not word.unheard:
                        self._facts.told(word.key)
        finally:  # so that the next report starts a task again
            del self._unsent[place, owner, epoch]

    def heard(self, owner: Owner, epoch: int, report: NodeReport) -> None:
        """Takes a node's report. Raises PermissionDeniedError for ranks of other nodes."""
        node, lost, left, why = report.node, report.lost_ranks, report.left_ranks, report.why
        group = self._groups.find(owner)
        if group is None or group.epoch != epoch:
            return
        for rank in (*lost, *left):
            if rank not in group.remote or group.remote[rank].node != node:
                raise PermissionDeniedError(
                    f"rank {rank} of group {owner.name!r} is not on node {node!r}", node=node
                )
        gone = [group.remote[rank].session_id for rank in left]
        # Ignore that a restarted daemon reports a process as lost that had left before.
        known = group.lost.keys() | {
            rank for rank in lost if group.remote[rank].session_id in group.left
        }
        fresh = [rank for rank in lost if rank not in known]
        if not fresh and group.left.issuperset(gone):
            return
        group.lost.update({rank: group.remote[rank] for rank in fresh})
        group.left.update(gone)
        if fresh and group.state in (State.READY, State.BROKEN):
            told = f": {why}" if why else ""
            self._groups.lost_elsewhere(
                group, f"processes of node {node} are gone: ranks {fresh}{told}"
            )
            self._events.add(
                "group.broken",
                f"group {owner}, epoch {epoch}: node {node!r} lost the processes of ranks "
                f"{fresh}{told}",
                **owner.fields,
                epoch=epoch,
                generation=group.generation,
            )
        else:
            group.notify()


def _answer_for(group: GroupRecord) -> None:
    """Starts to watch this node's processes of a view once the view is committed."""
    known, claims = group.answered, group.claims
    if group.committed and group.remote and (known is None or known.epoch != group.epoch):
        group.answered = Answered(
            group.epoch,
            frozenset(member.node for member in group.remote.values()),
            {r: claims[r].session if r in claims else None for r in group.local_ranks},
        )


def _is_lost(group: GroupRecord, rank: int, session: SessionRecord | None) -> bool:
    """Returns whether a rank's process ended without leaving, or lost its memory by an order."""
    taken = group.state is State.CLOSED and group.last_event is Trigger.TAKEN_AWAY
    dead = session is not None and session.state in (SessionState.DEAD, SessionState.FENCED)
    return taken or dead or rank in group.lost


async def until_heard(say: Callable[[], Awaitable[None]], owner: Owner) -> None:
    """Repeats a report for up to NODE_TELL_S, because the other daemon may be restarting."""
    loop = asyncio.get_running_loop()
    deadline, pause_s = loop.time() + limits.NODE_TELL_S, limits.NODE_RETRY_FIRST_S
    while loop.time() < deadline:
        try:
            await say()
            return
        except TRY_AGAIN:
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, limits.NODE_RETRY_MOST_S)
        except EpRuntimeError as error:
            logging.getLogger(__name__).warning("group %s: not heard: %s", owner, error)
            return
