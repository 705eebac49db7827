"""Writes tables for people and JSON for programs. No other module prints."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TextIO

from ep_runtime import env
from ep_runtime.text import printable
from ep_runtime_client.cli import tables

# Increases if a JSON key changes its meaning or is removed; new keys do not count.
SCHEMA_VERSION = 1
OUTPUTS = ("table", "json", "wide")


def out(text: str, *, stream: TextIO | None = None) -> None:
    """Writes a line to standard output; escapes control characters of others' texts."""
    stream = stream or sys.stdout
    stream.write(printable(text) + "\n")
    stream.flush()


def err(text: str) -> None:
    """Writes to standard error, in lines that fit the terminal."""
    room = width(sys.stderr)
    for line in printable(text).split("\n"):
        for part in [line] if room is None else tables.fold(line, room) or [""]:
            sys.stderr.write(part + "\n")
    sys.stderr.flush()


def width(stream: TextIO | None = None) -> int | None:
    """Returns the number of columns of the terminal.

    None if the stream, by default standard output, is not a terminal: then lines may have any
    length.
    """
    if not (stream or sys.stdout).isatty():
        return None
    import shutil

    return shutil.get_terminal_size().columns


def document(kind: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """Makes the JSON document of a command: version and kind first."""
    return {"schema_version": SCHEMA_VERSION, "kind": kind, **body}


def write_json(kind: str, body: Mapping[str, Any], *, compact: bool = False) -> None:
    """Writes one JSON document, on one line if `compact`."""
    indent = None if compact else 2
    text = json.dumps(document(kind, body), indent=indent, ensure_ascii=False)
    if printable(text) != text:  # only inside strings, so JSON escapes work
        text = "".join(c if c == "\n" or c.isprintable() else json.dumps(c)[1:-1] for c in text)
    out(text)


def write_table(
    columns: Sequence[tables.Column],
    rows: Iterable[Mapping[str, Any]],
    *,
    wide: bool,
    empty: str,
    whole: bool = False,
    headers: bool = True,
) -> None:
    """Writes rows under headings, or the line `empty` if there are none.

    Args:
        wide: also the columns of `-o wide`, with values in full; leaves no column out.
        whole: leaves no column out.
        headers: whether to write the titles.
    """
    shown = [column for column in columns if wide or not column.wide]
    cells = [tables.cells(shown, row, wide=wide) for row in rows]
    if not cells:
        if empty:
            out(empty)
        return
    for number, block in enumerate(tables.place(shown, cells, width(), whole=wide or whole)):
        if number:
            out("")
        if headers:
            write_heading(block)
        for row in cells:
            write_row(block, row)


def write_heading(block: tables.Block) -> None:
    """Writes the titles, in bold on a terminal."""
    bold = sys.stdout.isatty() and not env.no_color()
    for line in tables.heading(block):
        sys.stdout.write(f"\x1b[1m{line}\x1b[0m\n" if bold else f"{line}\n")
    sys.stdout.flush()


def write_row(block: tables.Block, cells: Sequence[str]) -> None:
    """Writes one row, in as many lines as folding needs."""
    for line in tables.draw(block, cells):
        out(line)


def write_pairs(pairs: Sequence[tuple[str, str]]) -> None:
    """Writes `name  value` lines, values in one column."""
    wide = max((len(name) for name, _ in pairs), default=0)
    for name, value in pairs:
        write_text(value, start=f"{name:<{wide}}  ", then=" " * (wide + 2))


def write_text(text: str, *, start: str = "", then: str = "") -> None:
    """Writes a text after `start`; folds it to the terminal, with `then` before later lines."""
    text = printable(text.replace("\n", " "))
    room = width()
    lines = [text] if room is None else tables.fold(text, max(room - len(start), 20))
    for line in lines or [""]:
        out((start + line).rstrip())
        start = then


def clear_screen() -> None:
    """Moves a terminal to its top left corner and clears it."""
    if sys.stdout.isatty():
        sys.stdout.write("\x1b[H\x1b[2J")
