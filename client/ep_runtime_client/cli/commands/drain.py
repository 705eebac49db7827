"""`ep-runtime drain`: rejects new sessions and groups; with --shutdown the daemon ends."""

from __future__ import annotations

import argparse
import collections
import math
import time
from typing import TYPE_CHECKING, Any

from ep_runtime.allowed_names import shown
from ep_runtime.errors import RuntimeUnavailableError
from ep_runtime_client import cli
from ep_runtime_client.cli import render
from ep_runtime_client.cli.daemon import ordering, reading, watching

if TYPE_CHECKING:
    from ep_runtime_client.cli.daemon import source

_CHECK_EVERY_S = 0.5
_SHUTDOWN_S = 30.0
# States of sessions that a drain waits for; it does not wait for fenced ones.
_LIVE = ("CONNECTED", "ACTIVE", "SUSPECT")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shutdown", action="store_true", help="end the daemon afterwards")
    parser.add_argument(
        "--wait",
        action="store_true",
        help="stay until the last session has ended, with --shutdown the daemon too; Ctrl-C only "
        "ends the waiting",
    )
    parser.add_argument(
        "--deadline",
        type=reading.positive,
        metavar="S",
        help=f"with --shutdown: end after S seconds even if sessions are left (default "
        f"{_SHUTDOWN_S:g}); with --wait alone: give up then, with exit code 3",
    )
    ordering.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    from ep_runtime_client.cli.daemon import source

    with source.open_source(source.exact(args.address), timeout_s=args.timeout) as daemon:
        ordering.confirm(args, _consequences(args, daemon.status()))
        answer = daemon.drain(args.deadline or _SHUTDOWN_S, shutdown=args.shutdown)
        if args.wait:
            return _wait(args, daemon)
    text = f"draining; {answer['num_sessions']} sessions are still there"
    if not args.shutdown:
        text += "; `ep-runtime undrain` admits new ones again"
    return ordering.report(args, "drain", answer, text)


def _consequences(args: argparse.Namespace, status: dict[str, Any]) -> list[str]:
    if not args.shutdown:
        return [
            "new sessions and groups will be refused, over restarts of the daemon too, until "
            "`ep-runtime undrain`; what runs goes on"
        ]
    return [
        "new sessions and groups will be refused",
        f"the daemon (pid {status['pid']}) ends when its {status['num_sessions']} sessions "
        f"are gone, or after {args.deadline or _SHUTDOWN_S:g} s; the memory of "
        f"{status['num_groups']} groups goes with it",
    ]


def _wait(args: argparse.Namespace, daemon: source.Source) -> int:
    """Waits until the drain is over; reports the remaining sessions whenever they change."""
    give_up_s = math.inf if args.shutdown else time.monotonic() + (args.deadline or math.inf)
    told = ""
    try:
        with watching.interrupted() as stopped:
            while text := _left(args, daemon):
                if text != told:
                    render.err(f"draining: {text}")
                if time.monotonic() >= give_up_s:
                    render.err(f"ep-runtime drain: not over after {args.deadline:g} s, and goes on")
                    return cli.PARTIAL
                told = text
                if stopped.wait(_CHECK_EVERY_S):
                    raise KeyboardInterrupt
    except KeyboardInterrupt:
        back = "`ep-runtime undrain` takes that back"
        render.err(f"\nep-runtime drain: waits no longer; the daemon drains on, and {back}")
        return cli.PARTIAL
    ended = "the daemon has ended" if args.shutdown else "no session is left"
    return ordering.report(args, "drain", {"num_sessions": 0}, ended)


def _left(args: argparse.Namespace, daemon: source.Source) -> str:
    """Returns a text about the remaining sessions; "" if the drain is over."""
    try:
        jobs = [row["job"] for row in daemon.sessions() if row["state"] in _LIVE]
    except RuntimeUnavailableError:
        if args.shutdown:
            return ""
        raise
    counts = collections.Counter(shown(job) if job else "without a job" for job in jobs)
    parts = [f"{job} {count}" for job, count in sorted(counts.items())]
    if parts:
        return f"{len(jobs)} sessions left ({', '.join(parts)})"
    return "no session left, the daemon ends" if args.shutdown else ""
