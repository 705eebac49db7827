"""Rows of every node of the daemon's cluster, and the nodes that gave none."""

from __future__ import annotations

import concurrent.futures
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ep_runtime.errors import RuntimeUnavailableError
from ep_runtime.units import duration
from ep_runtime_client.cli import render
from ep_runtime_client.cli.tables import IDENTITY, STATE, Column

if TYPE_CHECKING:
    from ep_runtime_client.cli.daemon import source

_ASKED_AT_ONCE = 16

COLUMN = Column("node", "NODE", priority=IDENTITY, about="its name in the cluster")

COLUMNS = (
    COLUMN,
    Column(
        "state",
        "STATE",
        priority=STATE,
        about="as the coordinator has it: JOINED, ABSENT; UNREACHABLE: it gave no answer",
    ),
    Column("since_s", "SINCE", "seconds", about="in that state"),
    Column("role", "ROLE", priority=3, about="which one coordinates"),
    Column("address", "ADDRESS", priority=4, about="where other daemons reach it"),
    Column("server_version", "VERSION", priority=5, about="version of its daemon"),
    Column("daemon", "DAEMON", priority=STATE, about="what its daemon says: SERVING, DRAINING"),
    Column("num_late", "LATE", "count", about="ranks for which others wait there"),
    Column("num_sessions", "SESSIONS", "count", priority=3, about="sessions that live"),
    Column("num_groups", "GROUPS", "count", about="groups"),
    Column("num_layers", "LAYERS", "count", priority=3, about="layers, each of a stack counted"),
)

Rows = Sequence[Mapping[str, Any]]


@dataclasses.dataclass
class Found:
    """Args:
    rows: each with its `node`; "" where the daemon belongs to no cluster.
    missing: nodes that did not answer: node, address, since_s (None: just now), error.
    """

    rows: list[dict[str, Any]]
    missing: list[dict[str, Any]]


def everywhere(
    daemon: source.Source, read: Callable[[source.Source], Rows], only: str | None = None
) -> Found:
    """What `read` finds on every node that joined, or on the node `only`.

    Raises:
        InvalidArgumentError: no node `only`.
        RuntimeUnavailableError: the daemon, or the node `only`, does not answer.
    """
    cluster = daemon.status()["cluster"]
    if only is not None:
        return Found(_named(only, read(daemon.of_node(only))), [])
    if cluster is None:
        return Found(_named("", read(daemon)), [])
    found = Found([], [])
    names = {node["identity"]["node"]: node for node in cluster["nodes"]}
    if "" in names:  # the coordinator, which never answered
        unknown = RuntimeUnavailableError(cluster["error"] or "it did not answer yet")
        found.missing.append(_missing(names[""], unknown))
    asked = [name for name, node in names.items() if name and node["state"] != "ABSENT"]

    def ask(name: str) -> Rows | RuntimeUnavailableError:
        try:
            return read(daemon if name == cluster["node"] else daemon.of_node(name))
        except RuntimeUnavailableError as error:
            if name == cluster["node"]:
                raise
            return error

    if cluster["node"] not in asked:  # not joined yet, and there all the same
        asked.append(cluster["node"])
    with concurrent.futures.ThreadPoolExecutor(_ASKED_AT_ONCE) as pool:
        for name, answer in zip(asked, pool.map(ask, asked), strict=True):
            if isinstance(answer, RuntimeUnavailableError):
                found.missing.append(_missing(names[name], answer))
            else:
                found.rows += _named(name, answer)
    return found


def _named(name: str, rows: Rows) -> list[dict[str, Any]]:
    return [{"node": name, **row} for row in rows]


def _missing(node: Mapping[str, Any], error: RuntimeUnavailableError) -> dict[str, Any]:
    since_s = node["since_s"] if node["state"] == "UNREACHABLE" else error.fields.get("since_s")
    return {
        "node": node["identity"]["node"],
        "address": node["identity"]["address"],
        "since_s": since_s,
        "error": str(error),
    }


def tell_missing(missing: Rows) -> None:
    """One line each on standard error: a list that lacks something must not look whole."""
    for node in missing:
        since = f" for {duration(node['since_s'])}" if node["since_s"] else ""
        render.err(
            f"node {node['node'] or '?'} at {node['address']} is unreachable{since}: "
            "what it has is not listed"
        )


def table(daemon: source.Source, status: Mapping[str, Any]) -> Found:
    """One row per node of the cluster of `status`; a missing one has a row too."""
    cluster = status["cluster"]
    found = everywhere(daemon, lambda node: [node.status()])
    told = {row["node"]: row for row in found.rows}
    missing = {node["node"]: node for node in found.missing}
    rows = []
    for node in cluster["nodes"]:
        identity, name = node["identity"], node["identity"]["node"]
        row = told.get(name, {})
        gone = name in missing
        since_s = missing[name]["since_s"] if name in missing else node["since_s"]
        rows.append(
            {
                "node": name,
                "state": "UNREACHABLE" if gone else node["state"],
                "since_s": since_s,
                "role": "coordinator" if node["coordinator"] else "",
                "address": identity["address"],
                "host_name": identity["host_name"],
                "server_version": row.get("server_version", identity["server_version"]),
                "daemon": row.get("state"),
                "num_late": len(row["late_ranks"]) if row else None,
                "num_sessions": row.get("num_sessions"),
                "num_groups": row.get("num_groups"),
                "num_layers": row.get("num_layers"),
                "error": missing[name]["error"] if name in missing else "",
            }
        )
    return Found(rows, found.missing)
