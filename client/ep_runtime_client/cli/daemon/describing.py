"""Writes one object: a line per value, then a table for each list."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ep_runtime_client.cli import render, tables
from ep_runtime_client.cli.tables import IDENTITY, STATE, Column

Row = Mapping[str, Any]

RANKS = (
    Column("world_rank", "RANK", "count", priority=IDENTITY, about="world rank"),
    Column("state", "STATE", priority=STATE, about="what it does, from the board"),
    Column("node", "NODE", about="node it runs on"),
    Column("pid", "PID", about="process id"),
    Column("gpu_index", "GPU", "count", priority=4, about="its GPU's index in NVML's order"),
    Column("op", "OP", about="op it is in"),
    Column("layer", "LAYER", "name", about="layer of that op"),
    Column("waiting_for", "WAITS", "lane", about="rank it waits for"),
    Column("since_s", "SINCE", "seconds", about="time in that state"),
    Column(
        "silent_s",
        "SILENT",
        "seconds",
        priority=STATE,
        about="time that its process sends no heartbeat",
    ),
    Column("session_id", "SESSION", priority=4, about="session of its process"),
    Column("attached", "ATTACHED", priority=5, about="whether it has mapped its windows"),
)

LATE_RANKS = (
    Column("world_rank", "RANK", "count", priority=IDENTITY, about="rank that is late"),
    Column("since_s", "SINCE", "seconds", about="how long the first of the others has waited"),
    Column("waiting_ranks", "WAITING", "list", about="ranks that wait for it"),
    Column("message", "MESSAGE", "prose", priority=STATE, about="what happened, in one line"),
)

_TABLES: Mapping[str, Sequence[Column]] = {"members": RANKS, "late_ranks": LATE_RANKS}


def write(
    row: Row, columns: Sequence[Column], parts: Mapping[str, Sequence[Column]] = _TABLES
) -> None:
    """Writes an object: its values first, then its lists of objects as tables.

    Args:
        columns: columns of the list that has the object.
        parts: columns of lists in the row, by key.
    """
    kinds = {column.key: column.kind for column in columns}
    nested = {key: value for key, value in row.items() if _is_table(value)}
    render.write_pairs(
        [
            (key, tables.cell(value, kinds.get(key, tables.kind_of(key))))
            for key, value in row.items()
            if key not in nested
        ]
    )
    for key, items in nested.items():
        write_part(key, items, {**_TABLES, **parts}.get(key))


def write_part(title: str, rows: Sequence[Row], columns: Sequence[Column] | None = None) -> None:
    """Writes a table under a title; without `columns` the rows' keys are its columns."""
    render.out(f"\n{title}:")
    if columns is None:
        columns = [Column(key, key.upper(), tables.kind_of(key)) for key in (rows or [{}])[0]]
    used = [column for column in columns if any(row.get(column.key) for row in rows)]
    kept = [column for column in columns if column in used or column.priority == IDENTITY]
    render.write_table(kept, rows, wide=False, empty="none")


def _is_table(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict)
