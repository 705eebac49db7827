"""What the commands write: tables for people, JSON for programs. The only place that prints."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TextIO

from ep_runtime import env
from ep_runtime.text import printable
from ep_runtime.units import duration, iec

# Grows when a key of the JSON changes its meaning or goes away; new keys do not count.
SCHEMA_VERSION = 1
OUTPUTS = ("table", "json", "wide")


@dataclasses.dataclass(frozen=True)
class Column:
    """One column of a table.

    Attributes:
        key: key of the row's dict.
        title: heading.
        kind: "text", "bytes" (IEC units in tables), "seconds" (an age), "count", "lane" (-1: none).
        wide: shown by `-o wide` only.
    """

    key: str
    title: str
    kind: str = "text"
    wide: bool = False


def out(text: str, *, stream: TextIO | None = None) -> None:
    """Writes a line to standard output; what others put into it orders the terminal nothing."""
    stream = stream or sys.stdout
    stream.write(printable(text) + "\n")
    stream.flush()


def err(text: str) -> None:
    """Writes one line to standard error."""
    sys.stderr.write(printable(text) + "\n")
    sys.stderr.flush()


def document(kind: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON document of a command: version and kind first."""
    return {"schema_version": SCHEMA_VERSION, "kind": kind, **body}


def write_json(kind: str, body: Mapping[str, Any], *, compact: bool = False) -> None:
    """Writes one JSON document; one line of it where `compact`."""
    indent = None if compact else 2
    text = json.dumps(document(kind, body), indent=indent, ensure_ascii=False)
    if printable(text) != text:  # all in strings, so JSON's own escapes will do
        text = "".join(c if c == "\n" or c.isprintable() else json.dumps(c)[1:-1] for c in text)
    out(text)


def write_table(
    columns: Sequence[Column], rows: Iterable[Mapping[str, Any]], *, wide: bool, empty: str
) -> None:
    """Writes rows under headings, or the line `empty` where there is none."""
    shown = [column for column in columns if wide or not column.wide]
    cells = [[cell(row.get(column.key), column.kind) for column in shown] for row in rows]
    if not cells:
        out(empty)
        return
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold", show_edge=False)
    for column in shown:
        right = column.kind in ("bytes", "count", "seconds")
        table.add_column(column.title, justify="right" if right else "left", no_wrap=True)
    for line in cells:
        table.add_row(*line)
    write_rich(table)


def write_pairs(pairs: Sequence[tuple[str, str]]) -> None:
    """Writes `name  value` lines, values in one column."""
    width = max((len(name) for name, _ in pairs), default=0)
    for name, value in pairs:
        out(f"{name:<{width}}  {_line(value)}".rstrip())


def write_rich(renderable: Any) -> None:
    """Writes a rich object; plain text of full width where standard output is no terminal."""
    from rich.console import Console

    tty = sys.stdout.isatty()
    console = Console(
        no_color=env.no_color() or not tty,
        width=None if tty else 1000,
        highlight=False,
        markup=False,
        emoji=False,
        soft_wrap=not tty,
    )
    if tty:
        console.print(renderable)
        return
    # Rich pads every line to the last column's width; that only costs bytes in a file.
    with console.capture() as captured:
        console.print(renderable)
    out("\n".join(line.rstrip() for line in captured.get().splitlines()))


def clear_screen() -> None:
    """Moves a terminal to its top left corner and clears it."""
    if sys.stdout.isatty():
        sys.stdout.write("\x1b[H\x1b[2J")


def _line(text: str) -> str:
    return printable(text.replace("\n", " "))


def cell(value: Any, kind: str) -> str:
    """One value as a table shows it."""
    return _line(_cell(value, kind))


def _cell(value: Any, kind: str) -> str:
    if value is None or value == "":
        return "-"
    if kind == "bytes":
        return iec(int(value))
    if kind == "seconds":
        return duration(float(value))
    if kind == "lane":
        return str(value) if value >= 0 else "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ",".join(f"{key}={item}" for key, item in value.items()) or "-"
    if isinstance(value, list | tuple):
        return ",".join(str(item) for item in value) or "-"
    return str(value)
