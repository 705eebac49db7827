"""`ep-runtime bench`: options here, the work in `ep_runtime_bench`."""

from __future__ import annotations

import argparse

from ep_runtime_bench import cli as bench


def add_arguments(parser: argparse.ArgumentParser) -> None:
    bench.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    return int(bench.run(args))
