"""Rows of every node of the daemon's cluster, and the nodes that gave none."""

from __future__ import annotations

import concurrent.futures
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ep_runtime.errors import EpRuntimeError, RuntimeUnavailableError
from ep_runtime.units import duration
from ep_runtime_client.cli import render
from ep_runtime_client.cli.tables import IDENTITY, STATE, Column

if TYPE_CHECKING:
    from ep_runtime_client.cli.daemon import source

_ASKED_AT_ONCE = 16
_LONGEST_S = 1e9

COLUMN = Column("node", "NODE", priority=IDENTITY, about="node's name in the cluster")

COLUMNS = (
    COLUMN,
    Column(
        "state",
        "STATE",
        priority=STATE,
        about="JOINED, ABSENT, UNREACHABLE (no answer) or FAILED (answers with an error)",
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
    Column("num_layers", "LAYERS", "count", priority=3, about="layers, each of a stack counted"),
)

Rows = Sequence[Mapping[str, Any]]


@dataclasses.dataclass
class Found:
    """Args:
    rows: each with its `node`; "" where the daemon belongs to no cluster.
    missing: nodes without rows: node, address, state (UNREACHABLE: no answer, FAILED: an error
        or not a list), since_s of the UNREACHABLE (None: just now), error.
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
        found.missing.append(_missing("", names[""], unknown))
    asked = [name for name, node in names.items() if name and node["state"] != "ABSENT"]

    def ask(name: str) -> Rows | EpRuntimeError:
        own = name == cluster["node"]
        try:
            return read(daemon if own else daemon.of_node(name))
        except EpRuntimeError as error:
            if own and isinstance(error, RuntimeUnavailableError):
                raise
            return error

    if cluster["node"] not in asked:  # not joined yet, and there all the same
        asked.append(cluster["node"])
    pool = concurrent.futures.ThreadPoolExecutor(_ASKED_AT_ONCE)
    try:
        for name, answer in zip(asked, pool.map(ask, asked), strict=True):
            if isinstance(answer, EpRuntimeError):
                found.missing.append(_missing(name, names.get(name), answer))
            else:
                found.rows += _named(name, answer)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # calls end with the connection
    return found


def _named(name: str, rows: Rows) -> list[dict[str, Any]]:
    return [{"node": name, **row} for row in rows]


def _missing(name: str, node: Mapping[str, Any] | None, error: EpRuntimeError) -> dict[str, Any]:
    """`node` as its cluster has it; None where it is not in there yet."""
    unreachable = isinstance(error, RuntimeUnavailableError)
    since_s = None
    if unreachable and node is not None and node["state"] == "UNREACHABLE":
        since_s = node["since_s"]
    elif unreachable and isinstance(told := error.fields.get("since_s"), int | float):
        since_s = told if 0 <= told < _LONGEST_S else None
    return {
        "node": name,
        "address": node["identity"]["address"] if node is not None else "",
        "state": "UNREACHABLE" if unreachable else "FAILED",
        "since_s": since_s,
        "error": str(error),
    }


def tell_missing(missing: Rows) -> None:
    """One line each on standard error: a list that lacks something must not look whole."""
    for node in missing:
        render.err(f"{reason(node)}: what it has is not listed")


def reason(missing: Mapping[str, Any]) -> str:
    """Why a node has no rows."""
    where = f"node {missing['node'] or '?'} at {missing['address']}"
    if missing["state"] == "FAILED":
        return f"{where} failed ({missing['error']})"
    since = f" for {duration(missing['since_s'])}" if missing["since_s"] else ""
    return f"{where} is unreachable{since}"


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
                "num_sessions": row.get("num_sessions"),
                "num_groups": row.get("num_groups"),
                "num_layers": row.get("num_layers"),
                "error": without["error"] if without else "",
            }
        )
    return Found(rows, found.missing)
