"""`ep-runtime status`: shows the daemon on one screen, with the nodes of its cluster.

`--live` and `--ready` concern only this daemon; `probe.py` implements them.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from ep_runtime.text import duration, iec
from ep_runtime_client import cli
from ep_runtime_client.cli import render
from ep_runtime_client.cli.daemon import attention, probe, reading, watching
from ep_runtime_client.cli.tables import IDENTITY, Column

if TYPE_CHECKING:
    from ep_runtime_client.cli.daemon import nodes, source

_POOLS = (
    Column("device", "DEVICE", "device", priority=IDENTITY, about="host, or a GPU's UUID"),
    Column("limit_bytes", "LIMIT", "bytes", about="most that groups may hold together"),
    Column("leased_bytes", "LEASED", "bytes", about="memory of groups that form or have processes"),
    Column("retained_bytes", "RETAINED", "bytes", about="memory of groups that wait for their job"),
    Column("quarantined_bytes", "QUARANT.", "bytes", about="memory that a process may still map"),
    Column("num_buffers", "BUFFERS", "count", priority=3, about="windows and boards"),
)

_USERS = (
    Column(
        "uid",
        "USER",
        "user",
        priority=IDENTITY,
        about="user; the row `limit` has the limits of each user",
    ),
    Column("num_sessions", "SESSIONS", "count", about="living sessions"),
    Column("num_groups", "GROUPS", "count", about="groups"),
    Column("num_layers", "LAYERS", "count", about="layers and stacks"),
    Column("host_bytes", "HOST", "bytes", about="windows and boards in host memory"),
    Column("gpu_bytes", "GPUS", "bytes", about="windows on all GPUs"),
    Column("num_fds", "FDS", "count", priority=3, about="descriptors of the daemon"),
    Column("journal_bytes", "JOURNAL", "bytes", priority=3, about="journal records"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from ep_runtime_client.cli.daemon import nodes
    from ep_runtime_client.cli.machine import nvml

    probe.add_probes(parser)
    reading.add_node_argument(parser, "the daemon itself, with all nodes of its cluster")
    reading.add_output_arguments(parser)
    reading.add_daemon_arguments(parser)
    shown = {"memory": _POOLS, "users": _USERS, "GPUs": nvml.COLUMNS, "nodes": nodes.COLUMNS}
    reading.explain(parser, shown)


def run(args: argparse.Namespace) -> int:
    from ep_runtime_client.cli.daemon import source

    if args.live or args.ready:  # abbreviated, or with other options
        return probe.run(args)
    with source.open_source(args.address, timeout_s=args.timeout) as asked:
        daemon = asked.of_node(args.node) if args.node else asked
        return watching.repeat(args, lambda: _once(args, daemon))


def _once(args: argparse.Namespace, daemon: source.Source) -> int:
    from ep_runtime_client.cli.daemon import nodes
    from ep_runtime_client.cli.machine import nvml

    status = daemon.status()
    ill = (status["journal"] or {}).get("error") or status["failing_tasks"]
    healthy = status["state"] == "SERVING" and not ill
    code = cli.OK if healthy else cli.PARTIAL
    # Another node's GPUs are not on this machine.
    found = nvml.NONE if args.node else nvml.told(nvml.held_by_gpu(status))
    alone = args.node or not status["cluster"]
    others = nodes.Found([], []) if alone else nodes.table(daemon, status)
    nodes.tell_missing(others.missing)
    if args.output == "json":
        document = {**status, "gpus": found, "nodes": others.rows}
        render.write_json("status", document, compact=bool(args.watch))
    else:
        wide = args.output == "wide"
        _write(status, found, wide=wide)
        _write_cluster(status["cluster"], others, wide=wide)
        attention.write(status, others.rows)
    if code == cli.OK and not others.missing and attention.wanted(status, others.rows):
        return cli.LATE
    return cli.PARTIAL if others.missing else code


def _write(status: dict[str, Any], found: dict[str, Any], *, wide: bool) -> None:
    render.write_pairs(
        [
            ("daemon", f"{status['state']}, version {status['server_version']}"),
            *_drain(status["drain"]),
            ("pid", f"{status['pid']}, up {duration(status['uptime_s'])}"),
            ("address", f"unix://{status['directory']}"),
            ("incarnation", status["incarnation"]),
            ("sessions", str(status["num_sessions"])),
            ("groups", str(status["num_groups"])),
            ("layers", f"{status['num_layers']}, handles {status['num_handles']}"),
            ("descriptors", _descriptors(status)),
            ("memory", f"{iec(status['rss_bytes'])} without windows"),
            ("loop lag", _loop_lag(status)),
            *_failing(status),
            *_restarts(status),
        ]
    )
    render.out("")
    render.write_table(_POOLS, status["pools"], wide=wide, empty="no memory pools")
    _write_users(status, wide=wide)
    _write_gpus(status, found, wide=wide)


def _descriptors(status: dict[str, Any]) -> str:
    limits = status.get("user_limits") or {}
    most = limits.get("max_fds_of_all")  # an older daemon sends none
    held = sum(user["num_fds"] for user in status["users"])
    users = f"; users hold {held} of {most}" if most else ""
    return f"{status['num_fds']} of {status['max_fds']}{users}"


def _write_users(status: dict[str, Any], *, wide: bool) -> None:
    """Writes what each user has, and the limits of each user."""
    limits = status.get("user_limits")
    if not status["users"] or limits is None:
        return
    most = {
        "uid": "limit",
        "num_sessions": limits["max_sessions"],
        "num_groups": limits["max_groups"],
        "num_layers": limits["max_layers"],
        "host_bytes": limits["max_host_bytes"],
        "num_fds": limits["max_fds"],
        "journal_bytes": limits["max_journal_bytes"],
    }
    render.out("")
    render.write_table(_USERS, [*status["users"], most], wide=wide, empty="")


def _write_cluster(cluster: dict[str, Any] | None, found: nodes.Found, *, wide: bool) -> None:
    """Writes the daemon's role in its cluster, and a table of the nodes."""
    from ep_runtime_client.cli.daemon import nodes

    if cluster is None:
        return
    render.out("")
    since = duration(cluster["since_s"])
    place = {
        "COORDINATOR": f"coordinates for {since}",
        "JOINING": f"has not reached the coordinator at {cluster['coordinator']} for {since}",
        "JOINED": f"joined the coordinator at {cluster['coordinator']} {since} ago",
        "LOST": f"LOST the coordinator at {cluster['coordinator']} {since} ago; "
        "what runs goes on, nothing new forms across nodes",
        "REFUSED": f"is REFUSED by the coordinator at {cluster['coordinator']} for {since}",
    }.get(cluster["link"], cluster["link"])
    plain = ", over PLAIN TCP" if cluster["insecure"] else ""
    render.write_text(f"node {cluster['node']} {place}{plain}, epoch {cluster['epoch']}", then="  ")
    if cluster["error"]:
        render.write_text(cluster["error"], start="  ", then="  ")
    for text in attention.certificates({"cluster": cluster}):
        render.write_text(text, start="CERTIFICATE: ", then="  ")
    for row in found.rows:
        if row["state"] == "REFUSED" and row["node"] != cluster["node"]:
            render.write_text(f"node {row['node']} is REFUSED: {row['error']}", then="  ")
    render.write_table(nodes.COLUMNS, found.rows, wide=wide, empty="")


def _write_gpus(status: dict[str, Any], found: dict[str, Any], *, wide: bool) -> None:
    """Writes the machine's GPUs, or why NVML finds none although the daemon uses some."""
    from ep_runtime_client.cli.machine import nvml

    if found["items"]:
        render.out("")
        render.out(f"NVIDIA driver {found['driver']}")
        render.write_table(nvml.COLUMNS, found["items"], wide=wide, empty="")
    elif found["reason"] and nvml.held_by_gpu(status):
        render.write_text(f"memory and links of the GPUs are not told: {found['reason']}")


def _loop_lag(status: dict[str, Any]) -> str:
    """Returns how late the daemon's event loop was; an older daemon reports only one figure."""
    p99, minute, worst = (
        f"{(status.get(name) or 0) * 1e3:.1f} ms"
        for name in ("loop_lag_p99_s", "loop_lag_s", "loop_lag_worst_s")
    )
    return f"p99 {p99}, worst {minute} in a minute, {worst} since the start"


def _failing(status: dict[str, Any]) -> list[tuple[str, str]]:
    names = ", ".join(status["failing_tasks"])
    return [("FAILING", f"{names}: see the daemon's log")] if names else []


def _drain(drain: dict[str, Any] | None) -> list[tuple[str, str]]:
    """Makes a row that names who drained the daemon, and how the drain ends."""
    if drain is None:
        return []
    left_s = drain["ends_in_s"]
    end = "`ep-runtime undrain` admits again"
    if left_s is not None:
        end = f"ends with its last session, in {duration(left_s)} at the latest"
    return [("drained", f"{duration(drain['since_s'])} ago {drain['by']}; {end}")]


def _restarts(status: dict[str, Any]) -> list[tuple[str, str]]:
    """Makes rows about the journal, and about its contents at this daemon's start."""
    journal, found = status["journal"], status["recovery"]
    rows = []
    if journal is not None:
        text = journal["error"] or iec(journal["bytes"])
        rows.append(("journal", f"CANNOT BE WRITTEN: {text}" if journal["error"] else text))
        if journal["cut_bytes"]:
            cut = f"{journal['cut_bytes']} bytes at its end were no whole record at the start"
            rows.append(("journal CUT", f"{cut}: what they said is lost"))
    if found is not None:
        text = f"{iec(found['adopted_bytes'])} of before are back"
        if found["under_way"]:
            text += (
                f", {found['num_awaited']} of {found['num_sessions']} sessions are awaited for "
                f"{duration(found['left_s'])}"
            )
        if found["lost_bytes"]:
            text += f", {iec(found['lost_bytes'])} are lost"
        rows.append(("restarted", text))
    return rows
