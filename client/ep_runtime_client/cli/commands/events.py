"""`ep-runtime events`: lists state changes, oldest first; --follow adds new ones."""

from __future__ import annotations

import argparse
import datetime
import fnmatch
from typing import TYPE_CHECKING, Any

from ep_runtime_client.cli import render
from ep_runtime_client.cli.daemon import choosing, reading, watching
from ep_runtime_client.cli.tables import IDENTITY, STATE, Column

if TYPE_CHECKING:
    from ep_runtime_client.cli.daemon import source

COLUMNS = (
    Column("sequence", "SEQ", "count", priority=IDENTITY, about="number of the event, for --after"),
    Column("time", "TIME", "time", priority=STATE, about="time, by this machine's clock"),
    Column("kind", "KIND", priority=STATE, about="THING.CHANGE, for --type"),
    Column("session_id", "SESSION", priority=4, about="session it concerns"),
    Column("group", "GROUP", "name", priority=3, about="group it concerns"),
    Column("message", "MESSAGE", "prose", priority=STATE, about="what happened, in one line"),
    Column("fields_json", "FIELDS", "prose", wide=True, about="names and numbers"),
)

_LONGEST_S = 1e9  # 30 years, so that the start is a valid datetime


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("name", nargs="?", metavar="NAME", help="show events of this group or session only")
    add("--after", type=int, default=0, metavar="SEQ", help="show events after this number only")
    add(
        "--since",
        type=reading.span,
        metavar="SPAN",
        help="show events of the last 90s, 10m or 1h30m only",
    )
    add(
        "--type",
        action="append",
        default=[],
        metavar="KIND",
        help="show this kind only: group, group.ready, '*.denied'; may be given several times",
    )
    add(
        *("-f", "--follow", "-w", "--changes"),
        action="store_true",
        help="continue with new events; asks every second",
    )
    reading.add_node_argument(parser, "the daemon itself; numbers are a node's own")
    reading.add_output_arguments(parser)
    reading.add_list_arguments(parser)
    reading.add_daemon_arguments(parser)
    reading.explain(parser, {"columns": COLUMNS})


def run(args: argparse.Namespace) -> int:
    from ep_runtime_client.cli.daemon import source

    after, first = args.after, True
    if args.follow:
        args.watch = args.watch or watching.EVERY_S
    wanted = choosing.conditions(args.label)
    start = _started(args.since)
    wide = args.output == "wide"
    lines = watching.Lines(COLUMNS, wide=wide, headers=not args.no_headers)
    with source.open_source(args.address, timeout_s=args.timeout) as asked:
        daemon = asked.of_node(args.node) if args.node else asked
        if args.name is not None:
            _check_name(daemon, args.name)

        def once() -> int:
            nonlocal after, first
            rows = daemon.events(after)
            after = max([after, *(row["sequence"] for row in rows)])
            rows = [row for row in rows if _asked_for(row, args, start)]
            rows = choosing.ordered(choosing.filtered(rows, wanted, COLUMNS), args.sort_by, COLUMNS)
            if args.output == "json":
                if rows or first or not args.follow:
                    render.write_json("events", {"items": rows}, compact=bool(args.watch))
            elif args.watch and rows:
                lines.write(rows)
            elif first:
                headers = not args.no_headers
                empty = "no events" if headers else ""
                render.write_table(COLUMNS, rows, wide=wide, empty=empty, headers=headers)
            first = False
            return 0

        return watching.repeat(args, once, clear=False)


def _check_name(daemon: source.Source, name: str) -> None:
    """Raises InvalidArgumentError if no group, no session and no event has the name.

    Events may be kept after their object is gone, and an old object may have no events left.
    """
    known = {row[key] for row in daemon.events() for key in ("group", "session_id")} - {""}
    known |= {row["name"] for row in daemon.groups()}
    known |= {row["session_id"] for row in daemon.sessions()}
    choosing.select("group or session", ("name",), [{"name": one} for one in known], name)


def _started(since_s: float | None) -> datetime.datetime | None:
    if since_s is None:
        return None
    return datetime.datetime.now(datetime.UTC) - datetime.timedelta(
        seconds=min(since_s, _LONGEST_S)
    )


def _asked_for(
    row: dict[str, Any], args: argparse.Namespace, start: datetime.datetime | None
) -> bool:
    if args.name is not None and args.name not in (row["session_id"], row["group"]):
        return False
    if start is not None and datetime.datetime.fromisoformat(row["time"]) < start:
        return False
    return not args.type or any(_is_kind(row["kind"], kind) for kind in args.type)


def _is_kind(kind: str, wanted: str) -> bool:
    """Whether `wanted` selects `kind`: an exact kind, a prefix ("group"), or a pattern."""
    return kind == wanted or kind.startswith(f"{wanted}.") or fnmatch.fnmatchcase(kind, wanted)
