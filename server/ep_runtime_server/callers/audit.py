"""Records operators' orders in a file that the daemon never deletes, one JSON line each.

If the file cannot be written, the daemon logs an error and still carries out the order.
"""

from __future__ import annotations

import datetime
import functools
import json
import logging
import os
from pathlib import Path
from typing import Any

from ep_runtime import files
from ep_runtime_server.base.beside import SideThread
from ep_runtime_server.callers.credentials import GivenOrder

MAX_WAITING = 1000  # lines

_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW


class Audit:
    """Appends to the audit file, and opens it for each line so that it may be rotated."""

    def __init__(self, path: Path | None) -> None:
        """Writes nothing if `path` is None."""
        self._path = path
        self._beside = SideThread("audit", MAX_WAITING) if path is not None else None

    def note(self, order: GivenOrder, wall_s: float, about: dict[str, Any]) -> None:
        """Queues a line for an order with details `about`, without waiting."""
        if self._path is None or self._beside is None:
            return
        time = datetime.datetime.fromtimestamp(wall_s, datetime.UTC)
        values = {"time": time.isoformat(timespec="milliseconds"), **order.fields, **about}
        line = json.dumps(values, ensure_ascii=False).encode() + b"\n"
        if not self._beside.put(functools.partial(_write, self._path, line)):
            logging.getLogger(__name__).error("no room for another line of %s", self._path)

    def close(self) -> None:
        """Writes the queued lines, as far as the disk is fast enough."""
        if self._beside is not None:
            self._beside.end()


def _write(path: Path, line: bytes) -> None:
    try:
        fd = files.open_regular(path, _FLAGS)
        try:
            os.write(fd, line)
        finally:
            os.close(fd)
    except OSError as error:
        logging.getLogger(__name__).error("cannot write %s: %s", path, error.strerror)
