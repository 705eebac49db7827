"""Invariants of every schedule: checked all the time, and at the end."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from ep_runtime_server.groups.fsm import State
from ep_runtime_server.groups.record import GroupRecord
from ep_runtime_server.memory.windows import WindowState
from schedules.cluster import CALM_AFTER_S, MISMATCH_S, TOLD_S, SimulatedCluster
from schedules.daemons import COORDINATOR, Life

LOOKS_EACH_S = 0.2
# A group forms at most this long after all its ranks are claimed.
FORMS_S = 2.0


class Checks:
    """Call `look` again and again, and `at_end` once nothing should be left."""

    def __init__(self, cluster: SimulatedCluster) -> None:
        self._cluster = cluster
        self._since: dict[Any, float] = {}
        self._told: set[Any] = set()
        self._views: dict[int, tuple[Any, dict[int, tuple[str, str]]]] = {}
        self._attempts: dict[int, int] = {}

    def look(self) -> None:
        now = self._cluster.loop.time()
        if self._cluster.fails:
            self._cluster.disturb()
        elif now - self._cluster.disturbed_s > CALM_AFTER_S:
            for life in self._cluster.lives():
                for wrong in {*_wrong_groups(life), *self._freed_early(life)} - self._told:
                    self._told.add(wrong)
                    self._cluster.fault(f"on {life.name}: {wrong}")
        found = {key: bound for key, bound in self._wrong()}
        self._since = {key: self._since.get(key, now) for key in found}
        for key, since_s in self._since.items():
            began_s = max(since_s, self._cluster.disturbed_s + CALM_AFTER_S)
            if now - began_s > found[key] and key not in self._told:
                self._told.add(key)
                self._cluster.fault(f"for {found[key]:g} s: {' '.join(map(str, key))}")

    def _wrong(self) -> Iterator[tuple[Any, float]]:
        """Yields states that may last only for a moment, and for how long."""
        claims = self._cluster.claims
        for claim, other in self._cluster.doomed:
            agree = any(
                c.spec == claim.spec
                and (
                    c.process.node == other.node or not set(c.process.ranks).isdisjoint(other.ranks)
                )
                for c in claims
            )
            if claim in claims and not agree:
                yield ("not told of another spec:", claim.process, "of", other), MISMATCH_S
        for one, other in itertools.combinations(claims, 2):
            if one.spec.difference(other.spec) is not None:
                yield ("two specs wait:", one.process, "and", other.process), MISMATCH_S
        for spec in {claim.spec for claim in claims}:
            waiting = [claim.process for claim in claims if claim.spec == spec]
            ranks = sorted(rank for process in waiting for rank in process.ranks)
            if ranks == list(range(spec.world_size)):
                yield ("every rank waits:", *waiting), FORMS_S
        for life in self._cluster.lives():
            for group in life.runtime.groups.all():
                if group.committed and group.state is State.READY:
                    self.note(life, group)
                    yield from self._untold(life, group)

    def _freed_early(self, life: Life) -> Iterator[str]:
        """Yields memory that a process has mapped but the daemon does not keep for it."""
        kept = {(w.generation, who) for w in life.runtime.pool.sets for who in w.holders}
        for process in self._cluster.living():
            mapped = (held := process.held) and held.fds and process.life is life
            if mapped and (held.generation, process.session_id) not in kept:
                yield f"memory of generation {held.generation} is mapped by {process}, not held"

    def note(self, life: Life, group: GroupRecord) -> None:
        """Notes a committed group: all members of an epoch must see the same view."""
        ours = {r: (life.name, m.session.session_id) for r, m in group.claims.items()}
        theirs = {r: (m.node, m.session_id) for r, m in group.remote.items()}
        members = {**ours, **theirs}
        key = group.owner, group.spec
        known_key, known = self._views.setdefault(group.epoch, (key, {}))
        other = [r for r in members.keys() & known.keys() if members[r] != known[r]]
        if other or known_key != key:
            self._cluster.fault(f"epoch {group.epoch} has two views: {known} and {members}")
        known.update(members)
        if group.attempt:
            attempt = self._attempts.setdefault(group.epoch, group.attempt)
            if attempt != group.attempt:
                self._cluster.fault(f"epoch {group.epoch} is attempt {attempt}, {group.attempt}")

    def _untold(self, life: Life, group: GroupRecord) -> Iterator[tuple[Any, float]]:
        """Yields members on other nodes that have left the group."""
        for rank, member in group.remote.items():
            if rank in group.lost or member.session_id in group.left:
                continue
            other = self._cluster.life(member.node)
            if other is None:
                continue
            there = other.runtime.groups.find(group.owner)
            if there is None or not _has(there, group.epoch, member.session_id, group.left):
                said = "gone" if there is None else f"{there.state.value}, epoch {there.epoch}"
                what = f"{life.name} has epoch {group.epoch} READY, rank {rank} on {member.node}:"
                yield (what, said), TOLD_S

    def at_end(self) -> None:
        """Checks that nothing is left of any group, and that no work failed."""
        for life in self._cluster.lives():
            for what, left in _left(life):
                if left:
                    self._cluster.fault(f"left on {life.name}: {what} {left}")
        for life in self._cluster.ever:
            failed = [e.message for e in life.runtime.events.after(0) if e.kind == "task.failed"]
            for message in failed if life.alive else ():
                self._cluster.fault(f"work failed on {life.name}: {message}")


def _wrong_groups(life: Life) -> Iterator[str]:
    """Yields groups whose members, state and memory do not agree."""
    groups = life.runtime.groups.all()
    if len({group.generation for group in groups}) < len(groups):
        yield "two groups of one generation"
    for group in groups:
        owners = [*group.members.values(), *group.previous.values()]
        ranks = [rank for member in owners for rank in member.ranks]
        retained = group.state is State.RETAINED
        still = group.formation is None or group.formation.done()
        wrong = {
            "is closed": group.state is State.CLOSED,
            "has a rank twice": len(set(ranks)) < len(ranks),
            "has a member that ended": not all(member.session.live for member in owners),
            "is READY, not attached": group.state is State.READY
            and not group.left
            and bool(group.unattached_ranks),
            "is RETAINED for somebody": retained and (bool(owners) or not group.retained_until_s),
            "has memory in another state": group.windows is not None
            and still
            and group.windows.state
            is not (WindowState.RETAINED if retained else WindowState.LEASED),
        }
        yield from (f"{group.owner.name} {what}" for what, found in wrong.items() if found)


def _has(group: GroupRecord, epoch: int, session_id: str, left: set[str]) -> bool:
    """Whether the process is still in the group. After somebody left, a member that continues in a
    new group need not report: all others know that this group ends.
    """
    if left and session_id in (*group.members, *group.previous):
        return True
    same = group.epoch == epoch and group.state in (State.READY, State.BROKEN)
    return same and session_id in group.members


def _left(life: Life) -> Iterator[tuple[str, Any]]:
    runtime, spanning = life.runtime, life.spanning
    yield "sessions", runtime.sessions.not_over()
    yield "groups", [group.owner for group in runtime.groups.all()]
    yield "windows", [windows.owner for windows in runtime.pool.sets]
    yield "operations", runtime.operations._of_session
    yield "drivers", spanning._drivers
    yield "calls to other nodes", spanning.tasks.running
    yield "words owed", life.cluster.facts.owed
    if life.name == COORDINATOR:
        assemblies = life.cluster.assemblies._all.values()
        # The result of a view is known for this long.
        yield "claims", [a.parts or a.refused for a in assemblies if a.parts or a.refused]
        proposals = [a.proposal for a in assemblies if a.proposal is not None]
        yield "views", [p.view for p in proposals if p.open or p.lives]
        yield "unique ids", life.cluster.view_ids._made
