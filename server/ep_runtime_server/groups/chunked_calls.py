"""Reports layers whose calls run in chunks, which is slower but gives the same results."""

from __future__ import annotations

import asyncio
import dataclasses
import logging

from ep_runtime import board_records
from ep_runtime.allowed_names import quoted
from ep_runtime_server.base.clock import paced
from ep_runtime_server.base.events import EventLog
from ep_runtime_server.groups.record import GroupBook, GroupRecord

CHECK_EVERY_S = 1.0
MAX_NAMED_LAYERS = 8


@dataclasses.dataclass(frozen=True)
class _Seen:
    """Handle indices that had run in chunks at the last check, and the reported layers."""

    handles: frozenset[int] = frozenset()
    layers: frozenset[str] = frozenset()


class ChunkedCalls:
    """Reports each layer once after one of its calls ran in chunks."""

    def __init__(self, groups: GroupBook, events: EventLog) -> None:
        self._groups = groups
        self._events = events
        self._seen: dict[tuple[str, int], _Seen] = {}

    async def watch(self) -> None:
        """Checks every CHECK_EVERY_S until cancelled."""
        while True:
            await self.check()
            await asyncio.sleep(CHECK_EVERY_S)

    async def check(self) -> None:
        """Adds an event for each layer that ran in chunks for the first time."""
        seen = {}
        async for group in paced(self._groups.all()):
            key = (group.group_id, group.generation)
            seen[key] = self._check_group(group, self._seen.get(key, _Seen()))
        self._seen = seen

    def _check_group(self, group: GroupRecord, before: _Seen) -> _Seen:
        windows = group.windows
        if windows is None or windows.board is None:
            return before
        counts = board_records.read_extra_chunks(
            windows.board, windows.layout, group.layers.num_handles
        )
        if counts.keys() <= before.handles:
            return before
        found = (handle.layer for handle in group.layers.handles() if handle.index in counts)
        new = [layer for layer in dict.fromkeys(found) if layer not in before.layers]
        if new:
            self._say(group, new)
        return _Seen(before.handles | counts.keys(), before.layers.union(new))

    def _say(self, group: GroupRecord, layers: list[str]) -> None:
        named = ", ".join(map(quoted, layers[:MAX_NAMED_LAYERS]))
        more = len(layers) - MAX_NAMED_LAYERS
        self._events.add(
            "layer.rounds",
            f"calls of group {quoted(group.owner.name)} ran in chunks, which costs time: a rank "
            f"received more rows than workspace={group.spec.workspace!r} holds; layers {named}"
            + (f" and {more} more" if more > 0 else ""),
            **group.fields,
            level=logging.WARNING,
            layers=layers[:MAX_NAMED_LAYERS],
        )
