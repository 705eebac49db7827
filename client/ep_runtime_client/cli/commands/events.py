"""`ep-runtime events`: state changes, oldest first; --watch goes on with new ones."""

from __future__ import annotations

import argparse

from ep_runtime_client.cli import render
from ep_runtime_client.cli.daemon import reading
from ep_runtime_client.cli.render import Column

COLUMNS = (
    Column("sequence", "SEQ", "count"),
    Column("time", "TIME"),
    Column("kind", "KIND"),
    Column("session_id", "SESSION"),
    Column("group", "GROUP"),
    Column("message", "MESSAGE"),
    Column("fields_json", "FIELDS", wide=True),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", metavar="NAME", help="only of this group or session")
    parser.add_argument(
        "--after", type=int, default=0, metavar="SEQ", help="only events after this number"
    )
    reading.add_node_argument(parser, "the daemon itself; numbers are a node's own")
    reading.add_output_arguments(parser)
    reading.add_daemon_arguments(parser)


def run(args: argparse.Namespace) -> int:
    from ep_runtime_client.cli.daemon import source

    after = args.after
    with source.open_source(args.address, timeout_s=args.timeout) as asked:
        daemon = asked.of_node(args.node) if args.node else asked

        def once() -> int:
            nonlocal after
            rows = daemon.events(after)
            first, after = after == args.after, max([after, *(row["sequence"] for row in rows)])
            if args.name is not None:
                rows = [row for row in rows if args.name in (row["session_id"], row["group"])]
            if args.output == "json":
                render.write_json("events", {"items": rows}, compact=bool(args.watch))
            elif rows or first:
                render.write_table(COLUMNS, rows, wide=args.output == "wide", empty="no events")
            return 0

        return reading.repeat(args, once, clear=False)
