"""`ep-runtime describe KIND NAME`: shows everything about one object and its parts."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ep_runtime import allowed_names
from ep_runtime.allowed_names import quoted, shown
from ep_runtime.errors import InvalidArgumentError
from ep_runtime_client import cli
from ep_runtime_client.cli import render, users
from ep_runtime_client.cli.commands import events, lists
from ep_runtime_client.cli.daemon import choosing, reading
from ep_runtime_client.cli.tables import Column

if TYPE_CHECKING:
    from ep_runtime_client.cli.daemon import nodes, source

Row = dict[str, Any]

VIEWS = {kind.removesuffix("s"): view for kind, view in lists.VIEWS.items()}
NODE = "node"
KINDS = (*VIEWS, NODE)
MOST_EVENTS = 10

# Columns with the same value in every row about one object are left out of its tables.
_OWNER = ("job", "uid")


def _without(columns: Sequence[Column], *keys: str) -> list[Column]:
    return [column for column in columns if column.key not in keys]


_EVENTS = (Column("node", "NODE", about="its node"), *events.COLUMNS)
_OF_SESSION = {
    "groups": _without(lists.GROUPS.columns, *_OWNER),
    "events": _without(_EVENTS, "session_id"),
}
_PARTS = {
    "group": {
        "layers": _without(lists.LAYERS.columns, "group", *_OWNER),
        "events": _without(_EVENTS, "group"),
    },
    "layer": {"handles": _without(lists.HANDLES.columns, *_OWNER)},
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("kind", type=_kind, metavar="KIND", help=f"one of {', '.join(KINDS)}")
    add("name", metavar="NAME", help="its name, from the first column of that kind's list")
    add("--job", help="job of the object, if several jobs have an object of that name")
    about = "its user by name or number, if several users have an object of that name"
    add("--user", dest="uid", type=users.number, help=about)
    reading.add_node_argument(parser, "every node of the daemon's cluster")
    add("-o", "--output", choices=("table", "json"), default="table")
    reading.add_daemon_arguments(parser)
    reading.explain(parser, {"members of a group": reading.RANKS})


def _kind(text: str) -> str:
    kind = text.lower().removesuffix("s")
    if kind not in KINDS:
        raise argparse.ArgumentTypeError(
            f"no kind {text!r}{allowed_names.hint(text, KINDS)}; one of {', '.join(KINDS)}"
        )
    return kind


def run(args: argparse.Namespace) -> int:
    from ep_runtime_client.cli.daemon import nodes, source

    args.all = True  # also sessions that ended
    with source.open_source(args.address, timeout_s=args.timeout) as daemon:
        if args.kind == NODE:
            found, kind = _nodes(daemon), "nodes"
            columns: Sequence[Column] = nodes.COLUMNS
            rows = choosing.select(kind, ("node",), found.rows, args.name)
        else:
            view = VIEWS[args.kind]
            kind, columns = view.kind, view.columns

            def read(node: source.Source) -> list[Row]:
                rows = view.fetch(node, args)
                chosen = choosing.select(kind, view.keys, rows, args.name, must=False)
                return [{**row, **_parts(args.kind, row, node)} for row in chosen] or rows

            found = nodes.everywhere(daemon, read, args.node)
            rows = choosing.select(kind, view.keys, found.rows, args.name)
            rows = choosing.of_one_owner(args.kind, rows, args.name, args.job, args.uid)
            for row in rows:
                for member in row.get("members", ()):
                    member["node"] = member["node"] or row["node"]
        nodes.tell_missing(found.missing)
        if args.output == "json":
            render.write_json(kind, {"items": rows, "unreachable": found.missing})
            return cli.PARTIAL if found.missing else cli.OK
        for number, row in enumerate(_together(rows) if args.kind == "group" else rows):
            if number:
                render.out("")
            reading.write_object(row, columns, _PARTS.get(args.kind, _OF_SESSION))
    return cli.PARTIAL if found.missing else cli.OK


def _together(rows: Sequence[Row]) -> list[Row]:
    """Merges the rows of one group: each member from its own node, and all nodes' events."""
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        found.setdefault((row["uid"], row["job"], row["name"], row["epoch"]), []).append(row)
    return [part for same in found.values() for part in (_merged(same) if len(same) > 1 else same)]


def _merged(rows: Sequence[Row]) -> list[Row]:
    first = rows[0]
    if not first["epoch"]:  # groups of one name, each on one node only
        return [*rows]
    told = {(row["node"], one["world_rank"]): one for row in rows for one in row["members"]}
    members = [told.get((one["node"], one["world_rank"]), one) for one in first["members"]]
    events = [{**event, "node": row["node"]} for row in rows for event in row["events"]]
    merged = {
        **first,
        "node": [row["node"] for row in rows],
        "total_bytes": sum(row["total_bytes"] for row in rows),
        "late_ranks": [late for row in rows for late in row["late_ranks"]],
        "members": members,
        "events": sorted(events, key=lambda event: event["time"])[-MOST_EVENTS:],
    }
    return [merged]


def _nodes(daemon: source.Source) -> nodes.Found:
    from ep_runtime_client.cli.daemon import nodes

    status = daemon.status()
    if status["cluster"] is None:
        raise InvalidArgumentError("this daemon belongs to no cluster", argument="KIND")
    return nodes.table(daemon, status)


def _parts(kind: str, row: Row, node: source.Source) -> Row:
    """Returns the rows of a node's list that belong to one object."""
    if kind == "group":
        mine = [one for one in node.layers() if _in_group(one, row)]
        return {
            "late_ranks": [_without_owner(late, row) for late in row["late_ranks"]],
            "members": _members(row, node),
            "layers": mine,
            "events": _events_of_group(node, row),
        }
    if kind == "session":
        owned = [
            one
            for one in node.groups()
            if one["name"] in row["groups"] and (one["uid"], one["job"]) == (row["uid"], row["job"])
        ]
        return {
            "groups": owned,
            "events": _events(node, "session_id", row["session_id"])[-MOST_EVENTS:],
        }
    if kind == "layer":
        stack = f"{row['name']}["
        mine = [
            one
            for one in node.handles()
            if one["layer"] == row["name"] or one["layer"].startswith(stack)
        ]
        group = {**row, "name": row["group"]}
        return {"handles": [one for one in mine if _in_group(one, group)]}
    return {}


def _in_group(one: Row, group: Row) -> bool:
    return (one["uid"], one["job"], one["group"]) == (group["uid"], group["job"], group["name"])


def _members(group: Row, node: source.Source) -> list[Row]:
    """Returns the group's ranks, with the board's progress for ranks of this node."""
    told = {one["world_rank"]: one for one in node.ranks() if _in_group(one, group)}
    progress = ("state", "op", "layer", "waiting_for", "since_s", "silent_s")
    return [
        {
            **member,
            **{key: told.get(member["world_rank"], {}).get(key) for key in progress},
        }
        for member in group["members"]
    ]


def _events(node: source.Source, key: str, name: str) -> list[Row]:
    return [event for event in node.events() if event[key] == name]


def _events_of_group(node: source.Source, group: Row) -> list[Row]:
    return [
        _without_owner(event, group)
        for event in _events(node, "group", group["name"])
        if _owner_of(event) in (None, (group["job"], group["uid"]))
    ][-MOST_EVENTS:]


def _without_owner(row: Row, group: Row) -> Row:
    """Removes the group's owner from a row's message, because the page shows it already."""
    whose = f"group {shown(group['name'])} (uid {group['uid']}, job {shown(group['job'])})"
    message = row["message"].removeprefix(whose).lstrip(":, ")
    return {**row, "message": message.replace(f" of group {quoted(group['name'])}", "", 1)}


def _owner_of(event: Row) -> tuple[Any, Any] | None:
    """Returns job and user of an event's group; None if an older daemon does not report them."""
    try:
        fields = json.loads(event["fields_json"])
        return fields["job"], fields["uid"]
    except (ValueError, KeyError, TypeError):
        return None
