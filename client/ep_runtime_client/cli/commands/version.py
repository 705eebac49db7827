"""`ep-runtime version`: shows the versions of client and daemon."""

from __future__ import annotations

import argparse
import platform
from typing import Any

import ep_runtime
from ep_runtime import env
from ep_runtime.errors import RuntimeUnavailableError
from ep_runtime_client import cli
from ep_runtime_client.cli import render
from ep_runtime_client.cli.daemon import reading, watching


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--client", action="store_true", help="do not ask a daemon")
    reading.add_output_arguments(parser)
    reading.add_daemon_arguments(parser)


def run(args: argparse.Namespace) -> int:
    return watching.repeat(args, lambda: _once(args))


def _once(args: argparse.Namespace) -> int:
    daemon, unavailable = (None, None) if args.client else _daemon_version(args)
    versions: dict[str, Any] = {
        "client_version": ep_runtime.__version__,
        "python_version": platform.python_version(),
        "server_version": daemon,
    }
    if args.output == "json":
        render.write_json("version", versions, compact=bool(args.watch))
    else:
        render.write_pairs(
            [
                ("client", f"{versions['client_version']} (Python {versions['python_version']})"),
                ("daemon", versions["server_version"] or "none asked or none there"),
            ]
        )
    named = args.address or env.address()
    if named and unavailable is not None and "address" in unavailable.fields:
        raise unavailable
    return cli.OK


def _daemon_version(
    args: argparse.Namespace,
) -> tuple[str | None, RuntimeUnavailableError | None]:
    """Returns the daemon's version, or the error if there is none."""
    from ep_runtime_client.cli.daemon import source

    try:
        with source.open_source(args.address, timeout_s=args.timeout) as daemon:
            return str(daemon.status()["server_version"]), None
    except RuntimeUnavailableError as error:
        return None, error
