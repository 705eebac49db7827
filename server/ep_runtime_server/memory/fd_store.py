"""Stores descriptors of windows with systemd, so that their memory outlives the daemon.

The store does nothing without systemd, or if the unit does not set FileDescriptorStoreMax.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping

from ep_runtime.errors import RuntimeUnavailableError
from ep_runtime_server.base import systemd
from ep_runtime_server.memory.windows import WindowSet, WindowState

_PREFIX = "ep-"
_BOARD = "board"


def stored_name(set_id: str, world_rank: int) -> str:
    """Returns the name of a buffer's descriptor in the store."""
    return f"{_PREFIX}{set_id}-{_BOARD if world_rank < 0 else world_rank}"


def by_set(stored: Mapping[str, int]) -> dict[str, dict[int, int]]:
    """Sorts descriptors by name into {set id: {world rank: fd}}; ignores other names."""
    found: dict[str, dict[int, int]] = {}
    for name, fd in stored.items():
        set_id, _, rank = name.removeprefix(_PREFIX).rpartition("-")
        if name.startswith(_PREFIX) and (rank == _BOARD or rank.isdecimal()):
            found.setdefault(set_id, {})[-1 if rank == _BOARD else int(rank)] = fd
    return found


class FdStore:
    """Keeps the descriptors of all current window sets in systemd's store."""

    def __init__(self, address: str | None, stored: Mapping[str, int]) -> None:
        """`address` is systemd's socket or None; `stored` are its descriptors at the start."""
        self._address = address
        self._stored = set(stored)

    def windows_changed(self, windows: WindowSet) -> None:
        """Adds new descriptors of a set to systemd's store; removes them if the set is freed."""
        if self._address is None:
            return
        gone = windows.state is WindowState.RELEASING
        for buffer in windows.buffers:
            name = stored_name(windows.set_id, buffer.world_rank)
            if gone and name in self._stored:
                self.remove(name)
            elif not gone and name not in self._stored and buffer.allocation is not None:
                try:
                    self._add(name, buffer.allocation.export_fd())
                except (OSError, RuntimeUnavailableError) as error:  # clients can return it too
                    logging.getLogger(__name__).warning("%s is not stored: %s", name, error)

    def _add(self, name: str, fd: int) -> None:
        try:
            # FDPOLL=0, because systemd otherwise refuses a memfd, which cannot be polled.
            systemd.notify(self._address, "FDSTORE=1", f"FDNAME={name}", "FDPOLL=0", fds=[fd])
            self._stored.add(name)
        finally:
            os.close(fd)

    def remove(self, name: str) -> None:
        """Removes one descriptor from the store."""
        systemd.notify(self._address, "FDSTOREREMOVE=1", f"FDNAME={name}")
        self._stored.discard(name)
