"""`ep-runtime coordination`: JAX's coordination service for a job that continues after deaths."""

from __future__ import annotations

import argparse

from ep_runtime_client import cli
from ep_runtime_client.cli import render
from ep_runtime_client.cli.daemon import reading
from ep_runtime_client.daemons import coordination


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text = "processes of the whole job, on all nodes"
    parser.add_argument("--processes", type=reading.count, required=True, metavar="P", help=text)
    text = "address to listen at, which every process of the job gets; port 0 takes a free one. "
    text += "Whoever reaches it can end the job: bind it to the job's own network"
    parser.add_argument("--bind", default="127.0.0.1:0", metavar="HOST:PORT", help=text)
    text = "a process on another host, or one that hangs, is dead after S seconds without a "
    text += f"heartbeat; default {coordination.HEARTBEAT_TIMEOUT_S}"
    parser.add_argument(
        "--heartbeat-timeout",
        type=reading.count,
        default=coordination.HEARTBEAT_TIMEOUT_S,
        metavar="S",
        help=text,
    )
    text = "end after the last process of this host that registered, not on SIGTERM and Ctrl-C only"
    parser.add_argument("--until-left", action="store_true", help=text)


def run(args: argparse.Namespace) -> int:
    coordination.serve(
        args.bind,
        args.processes,
        heartbeat_timeout_s=args.heartbeat_timeout,
        until_left=args.until_left,
        ready=lambda address: render.out(f"coordination service is ready at {address}"),
    )
    return cli.OK
