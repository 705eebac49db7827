"""What the reading commands share: options, the watch loop, one object by name."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

from ep_runtime.errors import InvalidArgumentError
from ep_runtime_client.cli import render

if TYPE_CHECKING:
    from ep_runtime_client.cli.daemon import source

Row = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class View:
    """A listing command.

    Attributes:
        kind: plural noun; `kind` of the JSON document.
        columns: of the table.
        fetch: the rows, each a dict of plain values.
        keys: keys of a row that the optional NAME is compared with.
        empty: what a table says where there is no row.
    """

    kind: str
    columns: Sequence[render.Column]
    fetch: Callable[[source.Source, argparse.Namespace], list[Row]]
    keys: tuple[str, ...]
    empty: str


def positive(text: str) -> float:
    """argparse type: a number above zero."""
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"must be above 0, got {text}")
    return value


def add_daemon_arguments(parser: argparse.ArgumentParser) -> None:
    """Which daemon to ask, and for how long."""
    parser.add_argument(
        "--address",
        metavar="unix:///DIR",
        help="the daemon's socket directory; default $EP_RUNTIME_ADDRESS, else the node's daemon",
    )
    parser.add_argument(
        "--timeout", type=positive, default=5.0, metavar="S", help="seconds to wait for an answer"
    )


def add_output_arguments(parser: argparse.ArgumentParser) -> None:
    """How to write the answer."""
    parser.add_argument("-o", "--output", choices=render.OUTPUTS, default="table")
    parser.add_argument("--watch", type=positive, metavar="S", help="repeat every S seconds")


def add_arguments(parser: argparse.ArgumentParser, noun: str) -> None:
    """Options of a listing command."""
    parser.add_argument("name", nargs="?", metavar="NAME", help=f"describe this {noun} only")
    add_node_argument(parser, "every node of the daemon's cluster")
    add_output_arguments(parser)
    add_daemon_arguments(parser)


def add_node_argument(parser: argparse.ArgumentParser, default: str) -> None:
    """Whose rows to show."""
    parser.add_argument("--node", metavar="NODE", help=f"ask this node only (default: {default})")


def repeat(args: argparse.Namespace, once: Callable[[], int], *, clear: bool = True) -> int:
    """Calls `once`; with --watch every S seconds until Ctrl-C. Returns its last exit code."""
    with _interrupted() as interrupted:
        code = once()
        while args.watch:
            if interrupted.wait(args.watch):
                raise KeyboardInterrupt
            if clear and args.output != "json":
                render.clear_screen()
            code = once()
    return code


@contextlib.contextmanager
def _interrupted() -> Iterator[threading.Event]:
    """Set by Ctrl-C, which raises KeyboardInterrupt as well.

    The exception is lost where it is raised in one of gRPC's callbacks or in a finalizer: those
    only say that they ignored it.
    """
    found = threading.Event()
    if threading.current_thread() is not threading.main_thread():  # signals never come here
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


def run(args: argparse.Namespace, view: View) -> int:
    """Runs a listing command."""
    from ep_runtime_client import cli
    from ep_runtime_client.cli.daemon import nodes, source

    with source.open_source(args.address, timeout_s=args.timeout) as daemon:

        def once() -> int:
            found = nodes.everywhere(daemon, lambda node: view.fetch(node, args), args.node)
            nodes.tell_missing(found.missing)
            write(args, view, select(view, found.rows, args.name), found.missing)
            return cli.PARTIAL if found.missing else cli.OK

        return repeat(args, once)


def select(view: View, rows: Sequence[Row], name: str | None) -> Sequence[Row]:
    """The rows whose key is `name`, or all without one.

    Raises:
        InvalidArgumentError: no row has that name; says which there are.
    """
    if name is None:
        return rows
    found = [row for row in rows if name in (str(row.get(key, "")) for key in view.keys)]
    if not found:
        known = sorted({str(row.get(view.keys[0], "")) for row in rows})
        listed = ", ".join(known[:20]) + (", ..." if len(known) > 20 else "")
        raise InvalidArgumentError(
            f"no {view.kind} named {name!r}; there {'are: ' + listed if known else 'is none'}",
            argument="NAME",
        )
    return found


def write(
    args: argparse.Namespace, view: View, rows: Sequence[Row], missing: Sequence[Row]
) -> None:
    """Writes rows as the options say; a single named object as one line per value."""
    from ep_runtime_client.cli.daemon import nodes

    if args.output == "json":
        body = {"items": rows, "unreachable": missing}
        render.write_json(view.kind, body, compact=bool(args.watch))
    elif args.name is not None and len(rows) == 1:
        titles = {column.key: column for column in view.columns}
        render.write_pairs(
            [
                (key, render.cell(value, titles[key].kind if key in titles else "text"))
                for key, value in rows[0].items()
            ]
        )
    else:
        several = any(row["node"] for row in rows)
        columns = (nodes.COLUMN, *view.columns) if several else view.columns
        render.write_table(columns, rows, wide=args.output == "wide", empty=view.empty)
