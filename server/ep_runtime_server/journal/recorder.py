"""Writes the daemon's changes of state to the journal, before an RPC that made them is answered.

Compacts the journal when it is long or a write failed.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import logging
from collections.abc import Callable, Iterator
from typing import Any

from ep_runtime.errors import PoolExhaustedError
from ep_runtime.files import boot_id
from ep_runtime_server.base.clock import Clock
from ep_runtime_server.base.events import EventLog
from ep_runtime_server.callers.sessions import SessionRecord, Sessions
from ep_runtime_server.groups.fsm import State
from ep_runtime_server.groups.record import GroupBook, GroupRecord
from ep_runtime_server.journal import records
from ep_runtime_server.journal.file import Encoded, Journal, Record, encoded
from ep_runtime_server.memory.windows import WindowPool, WindowSet

BOOT, GENERATION, WORD_COUNTS_UNTIL = "boot", "generation", "word_counts_until_s"
DRAIN = "drain"
SESSION, GROUP, LAYERS, WINDOWS = "session/", "group/", "layers/", "windows/"
RETRY_S = 1.0
MAX_LAYERS_PER_RECORD = 512

_Item = SessionRecord | GroupRecord | WindowSet


def _key(item: _Item) -> str:
    """Returns the key of an item's record."""
    if isinstance(item, SessionRecord):
        return f"{SESSION}{item.session_id}"
    if isinstance(item, WindowSet):
        return f"{WINDOWS}{item.set_id}"
    return f"{GROUP}{item.group_id}"


@dataclasses.dataclass
class _LayerParts:
    """A group's layers as encoded for the journal, so that compaction does not encode again."""

    version: int  # version of the group's layer history
    texts: dict[int, Encoded] = dataclasses.field(default_factory=dict)  # by first layer's index
    ends: dict[int, int] = dataclasses.field(default_factory=dict)  # end index, by first index
    num_layers: int = 0
    num_written: int = 0
    num_bytes: int = 0


class Recorder:
    """Records changes of sessions, groups and memory. Use it on the event loop's thread only."""

    def __init__(
        self,
        journal: Journal,
        sessions: Sessions,
        groups: GroupBook,
        pool: WindowPool,
        events: EventLog,
        clock: Clock,
    ) -> None:
        self._journal = journal
        self._sessions = sessions
        self._groups = groups
        self._pool = pool
        self._events = events
        self._clock = clock
        self._changed: dict[str, _Item] = {}
        self._unwritten: dict[str, Any] = {}  # records not in the file yet, by key
        # Each item's encoded record by key, so that compaction does not encode again.
        self._texts: dict[str, Encoded] = {}
        # Each item's (uid, bytes of its record) by key; a group's layers have one key.
        self._bytes: dict[str, tuple[int, int]] = {}
        self._bytes_by: collections.Counter[int] = collections.Counter()  # by uid
        self._layers: dict[str, _LayerParts] = {}  # by group id
        self._generation_written = 0
        self._drain: dict[str, Any] | None = None
        self._flush_scheduled = False
        self._failed = False
        self._tried_s = 0.0
        self._stopped = False
        self._word_counts_until_s: Callable[[], float | None] = lambda: None

    def listen(
        self,
        windows_changed: Callable[[WindowSet], None],
        word_counts_until_s: Callable[[], float | None],
    ) -> None:
        """Starts to write each change; also calls `windows_changed` if a window set changes."""
        self._word_counts_until_s = word_counts_until_s

        def both(windows: WindowSet) -> None:
            self._mark(windows)
            windows_changed(windows)

        self._sessions.on_change = self._groups.on_change = self._mark
        self._groups.on_generation = self.generation
        self._pool.on_change = both
        for group in self._groups.all():
            group.on_change = self._mark
        for windows in self._pool.sets:
            windows.on_change = both
            both(windows)

    def _mark(self, item: _Item) -> None:
        self._changed[_key(item)] = item
        if not self._flush_scheduled:
            self._flush_scheduled = True
            # Flush soon, because no RPC waits for some changes, such as the end of a process.
            asyncio.get_running_loop().call_soon(self.flush)

    def generation(self, generation: int) -> None:
        """Writes a new generation before a group gets it. Raises PoolExhaustedError."""
        self.admit()
        if self._journal.append([(GENERATION, generation)]):
            self._generation_written = generation
        self.admit()

    def keep_drain(self, record: dict[str, Any] | None) -> None:
        """Writes the drain order that a restarted daemon follows; None for none."""
        if record != self._drain:
            self._drain = self._unwritten[DRAIN] = record
            self.flush()

    def admit(self, more_bytes: int = 0) -> None:
        """Raises PoolExhaustedError if `more_bytes` of new records could not be written."""
        try:
            self._journal.admit(more_bytes)
        finally:
            self._tell()

    def flush(self) -> bool:
        """Writes all changes; returns whether the journal has them."""
        self._flush_scheduled = False
        if not (self._changed or self._unwritten) or self._stopped:
            return not self._journal.error
        self._collect()
        done = self._journal.append(self._unwritten.items())
        if done:
            self._unwritten = {}
        self._tell()
        return done

    def _collect(self) -> None:
        changed, self._changed = self._changed, {}
        for key, item in changed.items():
            self._unwritten.update(self._records(key, item))

    def bytes_of(self, uid: int) -> int:
        """Returns the size of a user's records in bytes."""
        return self._bytes_by[uid]

    def _count(self, key: str, uid: int, size_bytes: int) -> None:
        before_uid, before = self._bytes.pop(key, (uid, 0))
        self._bytes_by[before_uid] -= before
        if size_bytes:
            self._bytes[key] = uid, size_bytes
            self._bytes_by[uid] += size_bytes
        elif not self._bytes_by[uid]:
            del self._bytes_by[uid]

    def _records(self, key: str, item: _Item) -> Iterator[Record]:
        if isinstance(item, SessionRecord):
            uid, value = item.uid, encoded(records.of_session(item))
        elif isinstance(item, WindowSet):
            uid, value = item.owner.uid, encoded(records.of_windows(item))
        else:
            uid, value = item.owner.uid, encoded(records.of_group(item))
        yield key, value
        if value is not None:
            self._texts[key] = value
        else:
            self._texts.pop(key, None)
        self._count(key, uid, len(value.text) if value is not None else 0)
        if isinstance(item, GroupRecord):
            yield from self._layer_records(item, gone=value is None)

    def _layer_records(self, group: GroupRecord, *, gone: bool) -> Iterator[Record]:
        """Yields records of layers that are not in the file yet, so that each is written once."""
        key = f"{LAYERS}{group.group_id}/"
        if gone:
            self._layers.pop(group.group_id, None)
            self._count(key, group.owner.uid, 0)
            return
        layers = group.layers
        parts = self._layers.get(group.group_id)
        if parts is None or parts.version != layers.history_version:
            for first in parts.texts if parts is not None else ():
                yield f"{key}{first}", None
            parts = self._layers[group.group_id] = _LayerParts(layers.history_version)
        while parts.num_layers < len(layers.history):
            self._encode_layers(group, parts)
        while parts.num_written < parts.num_layers:
            yield f"{key}{parts.num_written}", parts.texts[parts.num_written]
            parts.num_written = parts.ends[parts.num_written]

    def _encode_layers(self, group: GroupRecord, parts: _LayerParts) -> None:
        """Encodes the next layers that are not encoded yet, at most MAX_LAYERS_PER_RECORD."""
        first = parts.num_layers
        part = group.layers.history[first : first + MAX_LAYERS_PER_RECORD]
        value = encoded([records.of_layer(layer) for layer in part])
        assert value is not None
        parts.texts[first] = value
        parts.num_layers = parts.ends[first] = first + len(part)
        parts.num_bytes += len(value.text)
        key = f"{LAYERS}{group.group_id}/"
        self._count(key, group.owner.uid, parts.num_bytes)

    async def prepare(self, group: GroupRecord) -> None:
        """Encodes many new layers in turns, so that the next flush only has to write them."""
        parts = self._layers.get(group.group_id)
        while (
            parts is not None
            and parts.version == group.layers.history_version
            and parts.num_layers < len(group.layers.history)
            and group.state is not State.CLOSED
        ):
            self._encode_layers(group, parts)
            await asyncio.sleep(0)

    def tick(self) -> None:
        """Retries failed writes, and compacts the journal if due; at most every RETRY_S."""
        now = self._clock.monotonic_s()
        if self._journal.wants_compaction and now - self._tried_s >= RETRY_S:
            self._tried_s = now
            if not (self._journal.error and self._journal.try_again() and self.flush()):
                self.compact()
            self._tell()

    def compact(self) -> None:
        """Replaces the journal with a file of only the current state.

        If that fails, keeps using the old file as long as it accepts records.
        """
        self._collect()
        for parts in self._layers.values():
            parts.num_written = 0
        if self._journal.compact(dict(self._facts())):
            self._unwritten = {}
        elif self._journal.try_again():
            self.flush()
        self._tell()

    def _facts(self) -> Iterator[tuple[str, Any]]:
        yield BOOT, boot_id()
        yield GENERATION, max(self._groups.generation, self._generation_written)
        until_s = self._word_counts_until_s()
        if until_s is not None:
            yield WORD_COUNTS_UNTIL, until_s
        if self._drain is not None:
            yield DRAIN, self._drain
        items: list[_Item] = [*self._sessions.not_over(), *self._pool.sets, *self._groups.all()]
        for item in items:
            key = _key(item)
            if key not in self._texts:
                yield from (record for record in self._records(key, item) if record[1] is not None)
                continue
            yield key, self._texts[key]
            if isinstance(item, GroupRecord):
                yield from self._layer_records(item, gone=False)

    def _tell(self) -> None:
        """Adds an event when writes begin to fail, and one when they succeed again."""
        failed = bool(self._journal.error)
        if failed == self._failed:
            return
        self._failed = failed
        if failed:
            self._tried_s = self._clock.monotonic_s()
            self._events.add(
                "journal.failed",
                f"the journal cannot be written: {self._journal.error}; nothing new is admitted",
                level=logging.ERROR,
            )
        else:
            self._events.add("journal.written", "the journal is written again")

    def stop(self) -> None:
        """Stops writing, because groups that close with the daemon must stay in the journal."""
        self._stopped = True

    def require(self, *, all_of_it: bool) -> None:
        """Writes all changes; raises PoolExhaustedError if the latest ones could not be written.

        With `all_of_it` it also raises if earlier changes are still not written.
        """
        new = bool(self._changed)
        if not self.flush() and (new or all_of_it):
            raise PoolExhaustedError(
                f"done, but the daemon cannot write its journal: {self._journal.error}; retry",
                reason=self._journal.error,
            )
