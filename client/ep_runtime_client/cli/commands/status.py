"""`ep-runtime status`: the daemon on one screen, with the nodes of its cluster.

`--quiet` only sets the exit code, and is about this daemon alone: what probes it must not restart
it because another node is away.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from ep_runtime_client import cli
from ep_runtime_client.cli import render
from ep_runtime_client.cli.daemon import reading

if TYPE_CHECKING:
    from ep_runtime_client.cli.daemon import nodes

_POOLS = (
    render.Column("device", "DEVICE"),
    render.Column("limit_bytes", "LIMIT", "bytes"),
    render.Column("leased_bytes", "LEASED", "bytes"),
    render.Column("retained_bytes", "RETAINED", "bytes"),
    render.Column("quarantined_bytes", "QUARANTINED", "bytes"),
    render.Column("num_buffers", "BUFFERS", "count"),
)


_USERS = (
    render.Column("uid", "USER"),
    render.Column("num_sessions", "SESSIONS", "count"),
    render.Column("num_groups", "GROUPS", "count"),
    render.Column("num_layers", "LAYERS", "count"),
    render.Column("host_bytes", "HOST", "bytes"),
    render.Column("gpu_bytes", "GPUS", "bytes"),
    render.Column("num_fds", "DESCRIPTORS", "count"),
    render.Column("journal_bytes", "JOURNAL", "bytes"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--quiet", "-q", action="store_true", help="print nothing: the exit code is the answer"
    )
    reading.add_output_arguments(parser)
    reading.add_daemon_arguments(parser)


def run(args: argparse.Namespace) -> int:
    from ep_runtime_client.cli.daemon import nodes, source
    from ep_runtime_client.cli.machine import gpus

    with source.open_source(args.address, timeout_s=args.timeout) as daemon:

        def once() -> int:
            status = daemon.status()
            ill = (status["journal"] or {}).get("error") or status["failing_tasks"]
            healthy = status["state"] == "SERVING" and not ill
            code = cli.OK if healthy else cli.PARTIAL
            if args.quiet:
                return code
            found = gpus.told(gpus.held_by_gpu(status))
            others = nodes.table(daemon, status) if status["cluster"] else nodes.Found([], [])
            if args.output == "json":
                document = {**status, "gpus": found, "nodes": others.rows}
                render.write_json("status", document, compact=bool(args.watch))
            else:
                _write(status, found)
                _write_cluster(status["cluster"], others)
            return cli.PARTIAL if others.missing else code

        return reading.repeat(args, once)


def _write(status: dict[str, Any], found: dict[str, Any]) -> None:
    render.write_pairs(
        [
            ("daemon", f"{status['state']}, version {status['server_version']}"),
            ("pid", f"{status['pid']}, up {render.cell(status['uptime_s'], 'seconds')}"),
            ("address", f"unix://{status['directory']}"),
            ("incarnation", status["incarnation"]),
            ("sessions", str(status["num_sessions"])),
            ("groups", str(status["num_groups"])),
            ("layers", f"{status['num_layers']}, handles {status['num_handles']}"),
            ("descriptors", f"{status['num_fds']} of {status['max_fds']}"),
            ("memory", f"{render.cell(status['rss_bytes'], 'bytes')} without windows"),
            ("loop lag", _loop_lag(status)),
            *_failing(status),
            *_restarts(status),
        ]
    )
    render.out("")
    render.write_table(_POOLS, status["pools"], wide=False, empty="no memory pools")
    _write_users(status)
    _write_gpus(status, found)
    for rank in status["late_ranks"]:
        render.out(f"LATE: {rank['message']}")


def _write_users(status: dict[str, Any]) -> None:
    """What each user holds, and what each may hold at most."""
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
    render.write_table(_USERS, [*status["users"], most], wide=False, empty="")


def _write_cluster(cluster: dict[str, Any] | None, found: nodes.Found) -> None:
    """The daemon's place in its cluster, and every node with what it has."""
    from ep_runtime_client.cli.daemon import nodes

    if cluster is None:
        return
    render.out("")
    since = render.cell(cluster["since_s"], "seconds")
    place = {
        "COORDINATOR": f"coordinates for {since}",
        "JOINING": f"has not reached the coordinator at {cluster['coordinator']} for {since}",
        "JOINED": f"joined the coordinator at {cluster['coordinator']} {since} ago",
        "LOST": f"LOST the coordinator at {cluster['coordinator']} {since} ago; "
        "what runs goes on, nothing new forms across nodes",
        "REFUSED": f"is REFUSED by the coordinator at {cluster['coordinator']} for {since}",
    }.get(cluster["link"], cluster["link"])
    plain = ", over PLAIN TCP" if cluster["insecure"] else ""
    render.out(f"node {cluster['node']} {place}{plain}, epoch {cluster['epoch']}")
    if cluster["error"]:
        render.out(f"  {cluster['error']}")
    render.write_table(nodes.COLUMNS, found.rows, wide=False, empty="no nodes")


def _write_gpus(status: dict[str, Any], found: dict[str, Any]) -> None:
    """The machine's GPUs; where NVML tells none, the reason matters to who has windows on some."""
    from ep_runtime_client.cli.machine import gpus

    if found["items"]:
        render.out("")
        render.out(f"NVIDIA driver {found['driver']}")
        render.write_table(gpus.COLUMNS, found["items"], wide=False, empty="")
    elif gpus.held_by_gpu(status):
        render.out(f"memory and links of the GPUs are not told: {found['reason']}")


def _loop_lag(status: dict[str, Any]) -> str:
    """How late the daemon's event loop was; an older daemon tells one figure only."""
    p99, minute, worst = (
        f"{(status.get(name) or 0) * 1e3:.1f} ms"
        for name in ("loop_lag_p99_s", "loop_lag_s", "loop_lag_worst_s")
    )
    return f"p99 {p99}, worst {minute} in a minute, {worst} since the start"


def _failing(status: dict[str, Any]) -> list[tuple[str, str]]:
    names = ", ".join(status["failing_tasks"])
    return [("FAILING", f"{names}: see the daemon's log")] if names else []


def _restarts(status: dict[str, Any]) -> list[tuple[str, str]]:
    """What lets a restarted daemon go on, and what this one found at its start."""
    journal, found = status["journal"], status["recovery"]
    rows = []
    if journal is not None:
        text = journal["error"] or f"{render.cell(journal['bytes'], 'bytes')}"
        rows.append(("journal", f"CANNOT BE WRITTEN: {text}" if journal["error"] else text))
    if found is not None:
        text = f"{render.cell(found['adopted_bytes'], 'bytes')} of before are back"
        if found["under_way"]:
            text += (
                f", {found['num_awaited']} of {found['num_sessions']} sessions are awaited for "
                f"{render.cell(found['left_s'], 'seconds')}"
            )
        if found["lost_bytes"]:
            text += f", {render.cell(found['lost_bytes'], 'bytes')} are lost"
        rows.append(("restarted", text))
    return rows
