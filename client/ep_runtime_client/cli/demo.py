"""`ep-runtime demo`: options here, the work in `ep_runtime_client.demo`."""

from __future__ import annotations

import argparse

from ep_runtime_client.demo import cli as demo


def add_arguments(parser: argparse.ArgumentParser) -> None:
    demo.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    return int(demo.run(args))
