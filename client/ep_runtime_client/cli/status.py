"""`ep-runtime status`: the daemon on one screen; `--quiet` only sets the exit code."""

from __future__ import annotations

import argparse
from typing import Any

from ep_runtime_client import cli
from ep_runtime_client.cli import reading, render

# A rank that others have waited for this long is shown as late.
LATE_AFTER_S = 10.0

_POOLS = (
    render.Column("device", "DEVICE"),
    render.Column("limit_bytes", "LIMIT", "bytes"),
    render.Column("leased_bytes", "LEASED", "bytes"),
    render.Column("retained_bytes", "RETAINED", "bytes"),
    render.Column("quarantined_bytes", "QUARANTINED", "bytes"),
    render.Column("num_buffers", "BUFFERS", "count"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--quiet", "-q", action="store_true", help="print nothing: the exit code is the answer"
    )
    reading.add_output_arguments(parser)
    reading.add_daemon_arguments(parser)


def run(args: argparse.Namespace) -> int:
    from ep_runtime_client.cli import source

    with source.open_source(args.address, timeout_s=args.timeout) as daemon:

        def once() -> int:
            status = daemon.status()
            code = cli.OK if status["state"] == "SERVING" else cli.PARTIAL
            if args.quiet:
                return code
            status["late_ranks"] = late_ranks(daemon.ranks())
            if args.output == "json":
                render.write_json("status", status, compact=bool(args.watch))
            else:
                _write(status)
            return code

        return reading.repeat(args, once)


def late_ranks(ranks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Whom others have waited for more than ten seconds, with how many wait."""
    waits: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in ranks:
        if row["waiting_for"] >= 0 and (row["since_s"] or 0) > LATE_AFTER_S:
            key = (row["uid"], row["job"], row["group"], row["waiting_for"])
            waits.setdefault(key, []).append(row)
    pids = {(r["uid"], r["job"], r["group"], r["world_rank"]): r["pid"] for r in ranks}
    return [
        {
            "group": key[2],
            "job": key[1],
            "world_rank": key[3],
            "pid": pids.get(key, 0),
            "waiting_ranks": [row["world_rank"] for row in rows],
            "waited_s": max(row["since_s"] for row in rows),
            "layer": rows[0]["layer"],
            "op": rows[0]["op"],
        }
        for key, rows in sorted(waits.items())
    ]


def _write(status: dict[str, Any]) -> None:
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
            ("loop lag", f"{(status['loop_lag_s'] or 0) * 1e3:.1f} ms at most in a minute"),
        ]
    )
    render.out("")
    render.write_table(_POOLS, status["pools"], wide=False, empty="no memory pools")
    for rank in status["late_ranks"]:
        render.out(
            f"LATE: rank {rank['world_rank']} of group {rank['group']} (pid {rank['pid']}); "
            f"{len(rank['waiting_ranks'])} ranks have waited for it for "
            f"{render.cell(rank['waited_s'], 'seconds')} in {rank['op']} of layer {rank['layer']}"
        )
