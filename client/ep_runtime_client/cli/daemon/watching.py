"""Repeats a command: draws the screen again, or writes a line for each change."""

from __future__ import annotations

import argparse
import contextlib
import signal
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

from ep_runtime_client.cli import render, tables

EVERY_S = 1.0

Row = Mapping[str, Any]

# The first column of rows from `Changes`.
CHANGE = tables.Column("change", "CHANGE", priority=tables.STATE)


def repeat(args: argparse.Namespace, once: Callable[[], int], *, clear: bool = True) -> int:
    """Calls `once`; with --watch every S seconds until Ctrl-C. Returns its last exit code."""
    with interrupted() as stopped:
        code = once()
        while args.watch:
            if stopped.wait(args.watch):
                raise KeyboardInterrupt
            if clear and args.output != "json":
                render.clear_screen()
            code = once()
    return code


@contextlib.contextmanager
def interrupted() -> Iterator[threading.Event]:
    """Yields an event that Ctrl-C sets; Ctrl-C also raises KeyboardInterrupt.

    The event is needed because an exception in one of gRPC's callbacks or in a finalizer is lost:
    Python only prints that it was ignored.
    """
    found = threading.Event()
    if threading.current_thread() is not threading.main_thread():  # it gets no signals
        yield found
        return

    def note(number: int, frame: FrameType | None) -> None:
        found.set()
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGINT, note)
    try:
        yield found
    finally:
        signal.signal(signal.SIGINT, previous)


class Lines:
    """Writes rows as they arrive under one heading, which it repeats only if widths change."""

    def __init__(self, columns: Sequence[tables.Column], *, wide: bool, headers: bool) -> None:
        self._columns = [column for column in columns if wide or not column.wide]
        self._wide = wide
        self._headers = headers
        self._block: tables.Block = ()
        # Reserve the width of CHANGED, because most rows are ADDED before the first change.
        self._widest = ["CHANGED" if column is CHANGE else "" for column in self._columns]

    def write(self, rows: Sequence[Row]) -> None:
        """Writes more rows below earlier ones."""
        cells = [tables.cells(self._columns, row, wide=self._wide) for row in rows]
        if not cells:
            return
        for row in cells:
            self._widest = [
                max(pair, key=tables.cell_len) for pair in zip(self._widest, row, strict=True)
            ]
        (block,) = tables.place(self._columns, [self._widest], render.width(), whole=False)
        if self._headers and block != self._block:
            render.write_heading(block)
        self._block = block
        for row in cells:
            render.write_row(block, row)


class Changes:
    """Compares the rows of a list with the rows of the previous call."""

    def __init__(self, columns: Sequence[tables.Column], identity: Sequence[str]) -> None:
        """`identity`: keys whose values together name a row of one node."""
        self._told = [column for column in columns if column.kind != "seconds"]
        self._identity = ("node", *identity)
        self._known: dict[tuple[str, ...], Row] = {}

    def since(self, rows: Sequence[Row], away: Collection[str] = ()) -> list[dict[str, Any]]:
        """Returns rows with their `change`: ADDED, CHANGED, or GONE with the last values.

        A new age is not a change, and rows of nodes that are `away` are not gone.
        """
        found = {tuple(str(row.get(key)) for key in self._identity): row for row in rows}
        kept = {name: row for name, row in self._known.items() if row.get("node") in away}
        found = {**kept, **found}
        changed = []
        for name, row in found.items():
            before = self._known.get(name)
            if before is None or self._cells(row) != self._cells(before):
                changed.append({"change": "ADDED" if before is None else "CHANGED", **row})
        gone = [row for name, row in self._known.items() if name not in found]
        self._known = found
        return changed + [{"change": "GONE", **row} for row in gone]

    def _cells(self, row: Row) -> list[str]:
        return tables.cells(self._told, row, wide=True)
