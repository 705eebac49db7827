"""Reads rows of every node of the daemon's cluster, and lists nodes without an answer."""

from __future__ import annotations

import concurrent.futures
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ep_runtime.errors import EpRuntimeError, RuntimeUnavailableError

if TYPE_CHECKING:
    from ep_runtime_client.readers.admin_service import Source

_ASKED_AT_ONCE = 16
_LONGEST_S = 1e9

Rows = Sequence[Mapping[str, Any]]


@dataclasses.dataclass
class Found:
    """The rows of all nodes that answered, and the nodes that did not.

    Attributes:
        rows: rows with the name of their `node`; "" without a cluster.
        missing: node, address, state (UNREACHABLE: no answer, FAILED: an error or not a list),
            since_s of UNREACHABLE nodes (None: just now), certificate (the expired one, if that may
            be the reason), error.
    """

    rows: list[dict[str, Any]]
    missing: list[dict[str, Any]]


def everywhere(daemon: Source, read: Callable[[Source], Rows], only: str | None = None) -> Found:
    """Calls `read` for every node that joined, or for node `only`, and collects the rows.

    Raises:
        InvalidArgumentError: the cluster has no node `only`.
        RuntimeUnavailableError: the daemon, or the node `only`, does not answer.
    """
    cluster = daemon.status()["cluster"]
    if only is not None:
        return Found(_named(only, read(daemon.of_node(only))), [])
    if cluster is None:
        return Found(_named("", read(daemon)), [])
    found = Found([], [])
    names = {node["identity"]["node"]: node for node in cluster["nodes"]}
    if "" in names:  # a coordinator that never answered
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

    if cluster["node"] not in asked:  # it answers even before it has joined
        asked.append(cluster["node"])
    pool = concurrent.futures.ThreadPoolExecutor(_ASKED_AT_ONCE)
    try:
        for name, answer in zip(asked, pool.map(ask, asked), strict=True):
            if isinstance(answer, EpRuntimeError):
                found.missing.append(_missing(name, names.get(name), answer))
            else:
                found.rows += _named(name, answer)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # closing the connection ends running calls
    return found


def _named(name: str, rows: Rows) -> list[dict[str, Any]]:
    return [{"node": name, **row} for row in rows]


def _missing(name: str, node: Mapping[str, Any] | None, error: EpRuntimeError) -> dict[str, Any]:
    """Describes a node without an answer; `node` is None if its cluster does not list it yet."""
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
        "certificate": str(error.fields.get("certificate", "")),
        "error": str(error),
    }
