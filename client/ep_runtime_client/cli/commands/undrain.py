"""`ep-runtime undrain`: admits sessions and groups again after `drain`."""

from __future__ import annotations

import argparse

from ep_runtime_client.cli.daemon import ordering, reading


def add_arguments(parser: argparse.ArgumentParser) -> None:
    ordering.add_output_argument(parser)
    reading.add_daemon_arguments(parser)


def run(args: argparse.Namespace) -> int:
    from ep_runtime_client.cli.daemon import source

    with source.open_source(source.exact(args.address), timeout_s=args.timeout) as daemon:
        answer = daemon.undrain()
    text = "sessions and groups are admitted again" if answer["was_drained"] else "was not drained"
    return ordering.report(args, "undrain", answer, text)
