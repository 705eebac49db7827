"""Options of the listing commands, and the rows of every node that they select."""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ep_runtime import allowed_names
from ep_runtime_client.cli import render, tables
from ep_runtime_client.cli.daemon import choosing, watching
from ep_runtime_client.cli.tables import IDENTITY, STATE, Column

if TYPE_CHECKING:
    from ep_runtime_client.cli.daemon import nodes, source


Row = Mapping[str, Any]
# Lists can also be written as names only, for scripts and completion.
LIST_OUTPUTS = (*render.OUTPUTS, "name")
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_SPAN = re.compile(r"(?:\d+(?:\.\d+)?[smhd])+")
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


def write_object(
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


@dataclasses.dataclass(frozen=True)
class View:
    """A listing command.

    Attributes:
        kind: plural noun; the command's name, Source's method, and `kind` of the JSON document.
        noun: singular noun for the object called NAME.
        columns: columns of the table.
        keys: keys of a row that the optional NAME is compared with; the first is its name.
        identity: keys whose values together name one row of a node.
        shows: whether the options ask for a row.
        add_own_arguments: adds options that only this command has.
    """

    kind: str
    noun: str
    columns: Sequence[tables.Column]
    keys: tuple[str, ...]
    identity: tuple[str, ...]
    shows: Callable[[dict[str, Any], argparse.Namespace], bool] = lambda row, args: True
    add_own_arguments: Callable[[argparse.ArgumentParser], None] = lambda parser: None

    def fetch(self, daemon: source.Source, args: argparse.Namespace) -> list[dict[str, Any]]:
        """Returns the rows, each a dict of plain values."""
        return [row for row in getattr(daemon, self.kind)() if self.shows(row, args)]

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "name", nargs="?", metavar="NAME", help=f"describe this {self.noun} only"
        )
        add_node_argument(parser, "every node of the daemon's cluster")
        add_output_arguments(parser, LIST_OUTPUTS)
        add_list_arguments(parser)
        parser.add_argument(
            "-w",
            "--changes",
            action="store_true",
            help="continue with a line for every row that is new, changed or gone; asks every "
            "second, or every S seconds with --watch",
        )
        add_daemon_arguments(parser)
        explain(parser, {"columns": self.columns})
        self.add_own_arguments(parser)

    def run(self, args: argparse.Namespace) -> int:
        from ep_runtime_client import cli
        from ep_runtime_client.cli.daemon import nodes, source

        wanted = choosing.conditions(args.label)
        with source.open_source(args.address, timeout_s=args.timeout) as daemon:
            write = _write_changes(args, self) if args.changes else _write_list(args, self)
            must = True

            def once() -> int:
                nonlocal must
                found = nodes.everywhere(daemon, lambda node: self.fetch(node, args), args.node)
                nodes.tell_missing(found.missing)
                rows = choosing.select(self.kind, self.keys, found.rows, args.name, must=must)
                rows = choosing.filtered(rows, wanted, self.columns)
                write(
                    nodes.Found(choosing.ordered(rows, args.sort_by, self.columns), found.missing)
                )
                must = not args.changes  # with --changes a missing row is a change
                return cli.PARTIAL if found.missing else cli.OK

            if args.changes:
                args.watch = args.watch or watching.EVERY_S
            return watching.repeat(args, once, clear=not args.changes)


def positive(text: str) -> float:
    """Parses an argparse value: a number above zero."""
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"must be above 0, got {text}")
    return value


def count(text: str) -> int:
    """Parses an argparse value: 1, 2, ..."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, got {text}")
    return value


def span(text: str) -> float:
    """Parses an argparse value, 90s, 10m, 1h30m, 2d or a number of seconds, to seconds."""
    if _SPAN.fullmatch(text):
        parts = re.findall(r"([\d.]+)([smhd])", text)
        return sum(float(number) * _UNITS[unit] for number, unit in parts)
    try:
        return positive(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be like 90s, 10m or 1h30m, got {text!r}") from None


def add_daemon_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options that choose the daemon to ask, and the timeout."""
    parser.add_argument(
        "--address",
        metavar="unix:///DIR",
        help="socket directory of the daemon to ask; default $EP_RUNTIME_ADDRESS, else the "
        "node's daemon, else (for commands that only read) your only private daemon",
    )
    parser.add_argument(
        "--timeout", type=positive, default=5.0, metavar="S", help="seconds to wait for an answer"
    )


def add_output_arguments(
    parser: argparse.ArgumentParser, outputs: Sequence[str] = render.OUTPUTS
) -> None:
    """Adds the options that choose the output format."""
    parser.add_argument(
        "-o",
        "--output",
        choices=outputs,
        default="table",
        help="table: the columns that fit the terminal; wide: all columns",
    )
    parser.add_argument("--watch", type=positive, metavar="S", help="repeat every S seconds")


def add_list_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options that choose the rows to show, and their order."""
    add = parser.add_argument
    add(
        "-l",
        "--label",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="show rows whose label of connect() or column has this value; KEY!=VALUE shows the "
        "others; separate several with commas",
    )
    add(
        "--sort-by",
        metavar="COLUMN",
        help="sort, smallest first; --sort-by=-COLUMN sorts largest first",
    )
    add("--no-headers", action="store_true", help="leave out the column titles")


def add_node_argument(parser: argparse.ArgumentParser, default: str) -> None:
    """Adds --node."""
    parser.add_argument("--node", metavar="NODE", help=f"ask this node only (default: {default})")


def explain(
    parser: argparse.ArgumentParser,
    columns: Mapping[str, Sequence[tables.Column]],
    about: str = "",
) -> None:
    """Adds `about` and a description of every column to --help."""
    lines = tables.fold(about, render.width() or 100) if about else []
    for title, shown in columns.items():
        room = max(len(column.title) for column in shown) + 4
        lines += [*([""] if lines else []), f"{title}:"]
        for column in shown:
            text = f"{column.about} (wide)" if column.wide else column.about
            first, *more = tables.fold(text, max((render.width() or 100) - room, 20))
            lines.append(f"  {column.title:<{room - 4}}  {first}")
            lines += [" " * room + part for part in more]
    parser.epilog = "\n".join(lines)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter


def _write_list(args: argparse.Namespace, view: View) -> Callable[[nodes.Found], None]:
    """Returns a writer of rows as the options say; a single named object has one line per value."""

    def write(found: nodes.Found) -> None:
        if args.output == "json":
            body = {"items": found.rows, "unreachable": found.missing}
            render.write_json(view.kind, body, compact=bool(args.watch))
        elif args.output == "name":
            for name in dict.fromkeys(str(row[view.keys[0]]) for row in found.rows):
                # Programs get the raw name, a terminal the quoted one that can be pasted.
                render.out(allowed_names.shown(name) if sys.stdout.isatty() else name)
        elif args.name is not None and len(found.rows) == 1:
            write_object(found.rows[0], view.columns)
        else:
            render.write_table(
                _with_node(view, found.rows),
                found.rows,
                wide=args.output == "wide",
                empty="" if args.no_headers else f"no {view.kind}",
                headers=not args.no_headers,
            )

    return write


def _write_changes(args: argparse.Namespace, view: View) -> Callable[[nodes.Found], None]:
    """Returns a writer of the rows that changed since its previous call."""
    shown = [column for column in view.columns if not column.wide or args.output == "wide"]
    changes = watching.Changes(shown, view.identity)
    lines: list[watching.Lines] = []

    def write(found: nodes.Found) -> None:
        changed = changes.since(found.rows, {node["node"] for node in found.missing})
        if args.output == "json":
            for row in changed:
                change = row.pop("change")
                render.write_json(view.kind, {"change": change, "item": row}, compact=True)
            return
        if not lines and changed:
            columns = [watching.CHANGE, *_with_node(view, changed)]
            wide = args.output == "wide"
            lines.append(watching.Lines(columns, wide=wide, headers=not args.no_headers))
        for one in lines:
            one.write(changed)

    return write


def _with_node(view: View, rows: Sequence[Row]) -> Sequence[tables.Column]:
    from ep_runtime_client.cli.daemon import nodes

    several = any(row["node"] for row in rows)
    return (nodes.COLUMN, *view.columns) if several else view.columns
