"""The nodes of the daemon's cluster as a table, and lines about nodes without an answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ep_runtime.text import duration
from ep_runtime_client.cli import render
from ep_runtime_client.cli.tables import IDENTITY, STATE, Column
from ep_runtime_client.readers.nodes import Found as Found
from ep_runtime_client.readers.nodes import Rows
from ep_runtime_client.readers.nodes import everywhere as everywhere

if TYPE_CHECKING:
    from ep_runtime_client.cli.daemon import source

COLUMN = Column("node", "NODE", priority=IDENTITY, about="node's name in the cluster")

COLUMNS = (
    COLUMN,
    Column(
        "state",
        "STATE",
        priority=STATE,
        about="JOINED, ABSENT, REFUSED (`error` says why), UNREACHABLE (no answer) or FAILED "
        "(answers with an error)",
    ),
    Column("since_s", "SINCE", "seconds", about="time in that state"),
    Column("role", "ROLE", priority=3, about="whether it coordinates the cluster"),
    Column("address", "ADDRESS", priority=4, about="address at which other daemons reach it"),
    Column("server_version", "VERSION", priority=5, about="version of the node's daemon"),
    Column(
        "daemon",
        "DAEMON",
        priority=STATE,
        about="SERVING or DRAINING, reported by the node's daemon",
    ),
    Column("num_late", "LATE", "count", about="ranks on it that others wait for"),
    Column("num_silent", "SILENT", "count", about="processes on it without a heartbeat for 10 s"),
    Column("num_sessions", "SESSIONS", "count", priority=3, about="living sessions"),
    Column("num_groups", "GROUPS", "count", about="groups"),
    Column("num_layers", "LAYERS", "count", priority=3, about="layers, counting all in a stack"),
)


def tell_missing(missing: Rows) -> None:
    """Reports missing nodes on standard error, because a list without them looks complete."""
    for node in missing:
        render.err(f"{reason(node)}: what it has is not listed")


def reason(missing: Mapping[str, Any]) -> str:
    """Returns a text that tells why a node has no rows."""
    where = f"node {missing['node'] or '?'} at {missing['address']}"
    if missing["state"] == "FAILED":
        return f"{where} failed ({missing['error']})"
    since = f" for {duration(missing['since_s'])}" if missing["since_s"] else ""
    why = f" ({missing['certificate']})" if missing["certificate"] else ""
    return f"{where} is unreachable{since}{why}"


def table(daemon: source.Source, status: Mapping[str, Any]) -> Found:
    """Returns one row per node of the cluster, also for nodes that do not answer."""
    cluster = status["cluster"]
    found = everywhere(daemon, lambda node: [node.status()])
    told = {row["node"]: row for row in found.rows}
    missing = {node["node"]: node for node in found.missing}
    rows = []
    for node in cluster["nodes"]:
        identity, name = node["identity"], node["identity"]["node"]
        row = told.get(name, {})
        without = missing.get(name)
        rows.append(
            {
                "node": name,
                "state": without["state"] if without else node["state"],
                "since_s": without["since_s"] if without else node["since_s"],
                "role": "coordinator" if node["coordinator"] else "",
                "address": identity["address"],
                "host_name": identity["host_name"],
                "server_version": row.get("server_version", identity["server_version"]),
                "daemon": row.get("state"),
                "num_late": len(row["late_ranks"]) if row else None,
                "num_silent": len(row["silent_processes"]) if row else None,
                **{key: row.get(key) for key in ("num_sessions", "num_groups", "num_layers")},
                "error": without["error"] if without else node.get("why", ""),
            }
        )
    return Found(rows, found.missing)
