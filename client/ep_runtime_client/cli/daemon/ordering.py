"""Shared parts of the commands that break something: they print what, and need --yes."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from ep_runtime.errors import InvalidArgumentError
from ep_runtime_client.cli import render
from ep_runtime_client.cli.daemon import reading


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of a command that breaks something."""
    parser.add_argument(
        "--yes", action="store_true", help="do it; without --yes only say what would happen"
    )
    add_output_argument(parser)
    reading.add_daemon_arguments(parser)


def add_output_argument(parser: argparse.ArgumentParser) -> None:
    """Adds the option for the output format of an order's result."""
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table")


def confirm(args: argparse.Namespace, consequences: Sequence[str]) -> None:
    """Prints what the command breaks.

    Raises:
        InvalidArgumentError: --yes is missing.
    """
    for line in consequences:
        render.err(line)
    if not args.yes:
        raise InvalidArgumentError("nothing was done; add --yes to do it", argument="--yes")


def report(args: argparse.Namespace, kind: str, answer: dict[str, Any], text: str) -> int:
    """Writes the result of an order."""
    if args.output == "json":
        render.write_json(kind, answer)
    else:
        render.write_text(text)
    return 0
