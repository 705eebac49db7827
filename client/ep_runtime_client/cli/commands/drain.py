"""`ep-runtime drain`: refuses new sessions and groups; with --shutdown the daemon ends."""

from __future__ import annotations

import argparse

from ep_runtime_client.cli.daemon import ordering, reading


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shutdown", action="store_true", help="end the daemon afterwards")
    parser.add_argument(
        "--deadline",
        type=reading.positive,
        default=30.0,
        metavar="S",
        help="with --shutdown: end after S seconds even if sessions are left",
    )
    ordering.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    from ep_runtime_client.cli.daemon import source

    with source.open_source(source.exact(args.address), timeout_s=args.timeout) as daemon:
        status = daemon.status()
        lines = ["new sessions and groups will be refused until the daemon is started again"]
        if args.shutdown:
            lines.append(
                f"the daemon (pid {status['pid']}) ends when its {status['num_sessions']} sessions "
                f"are gone, or after {args.deadline:g} s; the memory of {status['num_groups']} "
                "groups goes with it"
            )
        ordering.confirm(args, lines)
        answer = daemon.drain(args.deadline, shutdown=args.shutdown)
        text = f"draining; {answer['num_sessions']} sessions are still there"
        return ordering.report(args, "drain", answer, text)
