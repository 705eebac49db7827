"""Recovers after a restart: rebuilds state from the journal, and waits for its processes.

Restored window sets have no descriptors yet, but count against the limits, so that no other set
gets their bytes. Their descriptors come back from their holders (`rejoin.py`) or from systemd's
store. A set is lost once it has no holder left to give them back.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from ep_runtime import board_abi
from ep_runtime.errors import EpRuntimeError
from ep_runtime.files import boot_id
from ep_runtime.text import iec
from ep_runtime_server.base.clock import Changes, Clock
from ep_runtime_server.base.events import EventLog
from ep_runtime_server.callers.sessions import SessionRecord, Sessions, SessionState
from ep_runtime_server.groups.formation import Groups
from ep_runtime_server.groups.fsm import State
from ep_runtime_server.groups.record import GroupRecord
from ep_runtime_server.journal import records, shapes
from ep_runtime_server.journal.file import under
from ep_runtime_server.journal.recorder import (
    BOOT,
    GENERATION,
    GROUP,
    LAYERS,
    SESSION,
    WINDOWS,
    WORD_COUNTS_UNTIL,
)
from ep_runtime_server.journal.shapes import Shape
from ep_runtime_server.memory.windows import Owner, WindowPool, WindowSet, WindowState

_Item = TypeVar("_Item")

# Errors that a complete record with impossible values may raise.
_ODD = (EpRuntimeError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


class Recovery:
    """The recovery of one daemon: what it restored, and what it still waits for.

    Attributes:
        found_any: whether the journal named sessions, groups or memory.
        under_way: whether the daemon still waits for earlier processes, and admits nothing new.
        num_sessions: the number of the journal's sessions whose processes still run.
        adopted_bytes: bytes of windows and boards that came back.
        lost_bytes: bytes of windows and boards that are lost.
    """

    def __init__(
        self,
        sessions: Sessions,
        groups: Groups,
        pool: WindowPool,
        events: EventLog,
        clock: Clock,
        window_s: float,
    ) -> None:
        self._sessions = sessions
        self._groups = groups
        self._pool = pool
        self._events = events
        self._clock = clock
        self._until_s = clock.monotonic_s() + window_s
        self._incomplete_journal = False
        self._begun = False
        self._dead: list[SessionRecord] = []
        self._restored: list[GroupRecord] = []
        self._changes = Changes()
        self.found_any = self.under_way = False
        self.num_sessions = 0
        self.adopted_bytes = 0
        self.lost_bytes = 0

    @property
    def left_s(self) -> float:
        return max(0.0, self._until_s - self._clock.monotonic_s())

    @property
    def takes_word(self) -> bool:
        """Returns whether a process may report a group that the journal lacks."""
        return self._incomplete_journal and self.left_s > 0

    @property
    def word_counts_until_s(self) -> float | None:
        """Returns until when `takes_word` is true, which a next daemon reads in the journal."""
        return self._until_s if self.takes_word else None

    @property
    def awaited_bytes(self) -> int:
        return sum(_missing_bytes(windows) for windows in self._pool.sets)

    @property
    def num_awaited(self) -> int:
        return sum(session.awaited for session in self._sessions.not_over())

    # At the start

    def restore(self, facts: Mapping[str, Any], *, incomplete: bool) -> None:
        """Builds sessions, sets and groups. `incomplete`: the journal is new or its end was cut."""
        self._incomplete_journal = incomplete
        until_s = self._plain(facts, WORD_COUNTS_UNTIL, shapes.seconds, 0.0)
        if until_s > self._clock.monotonic_s():
            self._incomplete_journal = True
        self._groups.skip_to(self._plain(facts, GENERATION, shapes.generation, 0))
        if facts.get(BOOT) != boot_id():
            return
        sessions = self._readable(under(facts, SESSION), records.to_session)
        self._dead = [x for x in sessions.values() if not self._sessions.restore(x)]
        self.num_sessions = len(sessions) - len(self._dead)
        sets = self._readable(under(facts, WINDOWS), records.to_windows)
        for windows in sets.values():
            self._pool.add(windows)

        def to_group(group_id: str, value: Mapping[str, Any]) -> GroupRecord:
            group = records.to_group(group_id, value, sessions, sets)
            for part in _layer_parts(facts, group_id):
                group.layers.restore([records.to_layer(item) for item in part])
            if group.layers.num_handles > board_abi.MAX_HANDLES:
                raise ValueError(f"{group.layers.num_handles} handles are more than a board has")
            return group

        for group in self._readable(under(facts, GROUP), to_group).values():
            self._restore_group(group)
        self.found_any = bool(sessions or sets or self._groups.all())

    def _plain(self, facts: Mapping[str, Any], key: str, shape: Shape, default: _Item) -> _Item:
        """Returns the value of a fact; the default if the fact is missing or malformed."""
        value: _Item = facts.get(key, default)
        if shape(value):
            return value
        self._unreadable(key, f"it cannot be {str(value)[:80]}")
        return default

    def _unreadable(self, key: str, why: str) -> None:
        self._incomplete_journal = True
        self._events.add("journal.unreadable", f"{key[:200]}: {why}", level=logging.WARNING)

    def _readable(
        self, values: Mapping[str, Any], make: Callable[[str, Any], _Item]
    ) -> dict[str, _Item]:
        """Converts the records of one kind, and leaves out and reports unreadable ones."""
        found = {}
        for key, value in values.items():
            try:
                found[key] = make(key, value)
            except _ODD as error:
                self._unreadable(key, f"{type(error).__name__}: {str(error)[:500]}")
        return found

    def _restore_group(self, group: GroupRecord) -> None:
        """Restores a group. A group that was still forming ends, because its callers ask again.

        If the journal's end was cut, a group also ends if the journal shows that no process had
        fetched its memory. A process that fetched memory later reports the group (`rejoin.py`).
        """
        self._restored.append(group)
        fetched = group.windows is None or group.windows.holders
        if self._incomplete_journal and group.members and not fetched and not group.spans:
            group.formed = False
        if not group.formed:
            group.members = {}
            if group.windows is None and not group.previous and not len(group.layers):
                return
            group.state = State.BROKEN if group.previous else State.RETAINED
            if group.state is State.RETAINED:
                group.retained_until_s = self._clock.monotonic_s() + group.spec.retain_s
        elif self._incomplete_journal and group.missing_ranks and not group.spans:
            group.restoring = True  # other members were in the journal's lost end
        self._groups.add(group)

    def take_restored(self) -> list[GroupRecord]:
        """Returns the journal's groups once, including groups without remaining processes."""
        found, self._restored = self._restored, []
        return found

    def begin(self) -> None:
        """Ends sessions of ended processes, and starts to wait for the others.

        Call this after systemd's descriptors were adopted.
        """
        for session in self._dead:
            session.state = SessionState.DEAD
            self._groups.session_ended(session)
        used = {group.windows for group in self._groups.all()}
        known = {session.session_id for session in self._sessions.not_over()}
        for windows in self._pool.sets:
            for holder in windows.holders - known:
                self._pool.drop_holder(holder, windows)
            if windows not in used and windows.state is not WindowState.RELEASING:
                self._pool.release(windows)
        self._dead = []
        self._begun = True
        self.drop_lost()
        self.under_way = self.awaited_bytes > 0
        if self.found_any:
            self._events.add(
                "server.recovering" if self.under_way else "server.recovered",
                f"the journal named {self.num_sessions} live sessions and "
                f"{len(self._groups.all())} groups; {iec(self.awaited_bytes)} are awaited",
                generation=self._groups.generation,
                sessions=self.num_sessions,
                awaited_bytes=self.awaited_bytes,
                lost_bytes=self.lost_bytes,
            )

    # While it lasts

    def adopted(self, size_bytes: int) -> None:
        """Notes that descriptors of `size_bytes` of memory came back."""
        self.adopted_bytes += size_bytes
        self.settle()

    def holds_nothing(self, session: SessionRecord, owner: Owner) -> None:
        """Notes that a process has no windows of a group to give back.

        A process that creates a group instead of restoring it had not received its windows yet
        when the daemon was killed.
        """
        for windows in self._pool.sets:
            if windows.owner == owner and windows.wanted_ranks:
                self._pool.drop_holder(session.session_id, windows)
        self.settle()

    def drop_lost(self) -> None:
        """Gives up memory that has no holder left to give it back."""
        if not self._begun:  # systemd's store may still have the memory
            return
        by_set = {group.windows: group for group in self._groups.all() if group.windows}
        for windows in self._pool.sets:
            missing = _missing_bytes(windows)
            if not missing or windows.holders or windows.state is WindowState.RELEASING:
                continue
            group = by_set.get(windows)
            if group is None or group.formed:  # else no process had received the memory
                self.lost_bytes += missing
                self._events.add(
                    "windows.lost",
                    f"{iec(missing)} of {windows.owner}: nobody is left to give them back",
                    **windows.fields,
                )
            if group is not None:
                self._groups.memory_lost(group)
            else:
                self._pool.release(windows)

    def settle(self) -> None:
        """Ends the recovery once nothing is awaited or its time has passed."""
        self.drop_lost()
        over = not self.left_s
        for group in self._groups.all():
            if group.restoring and (over or group.state is not State.FORMING):
                group.restoring = False
                if group.state is State.FORMING:
                    self._groups.give_up(group)
        if self.under_way and (over or not self.awaited_bytes):
            self.under_way = False
            self._events.add(
                "server.recovered",
                f"{iec(self.adopted_bytes)} came back, {iec(self.awaited_bytes)} are still "
                f"awaited, {iec(self.lost_bytes)} are lost",
                adopted_bytes=self.adopted_bytes,
                awaited_bytes=self.awaited_bytes,
                lost_bytes=self.lost_bytes,
            )
        self._changes.tell()

    async def wait_over(self, owner: Owner, wait_s: float) -> bool:
        """Waits until recovery ends and `owner`'s group is restored; returns whether in time."""

        def over() -> bool:
            group = self._groups.find(owner)
            return not self.under_way and (group is None or not group.restoring)

        return await self._changes.until(over, wait_s)


def _missing_bytes(windows: WindowSet) -> int:
    if windows.state is WindowState.RELEASING:
        return 0
    return sum(buffer.size_bytes for buffer in windows.buffers if buffer.allocation is None)


def _layer_parts(facts: Mapping[str, Any], group_id: str) -> list[list[Any]]:
    parts = under(facts, f"{LAYERS}{group_id}/")
    if not all(isinstance(part, list) for part in parts.values()):
        raise TypeError("its layers are not lists")
    return [parts[start] for start in sorted(parts, key=int)]
