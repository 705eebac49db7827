"""`ep-runtime handles`: who holds which handle, and what it did last."""

from __future__ import annotations

import argparse

from ep_runtime_client.cli.daemon import reading
from ep_runtime_client.cli.render import Column

VIEW = reading.View(
    kind="handles",
    columns=(
        Column("layer", "LAYER"),
        Column("handle", "HANDLE", "count"),
        Column("lane", "LANE", "lane"),
        Column("generation", "GENERATION", "count"),
        Column("state", "STATE"),
        Column("job", "JOB"),
        Column("pids", "PID"),
        Column("age_s", "AGE", "seconds"),
        Column("last_op", "LAST-OP"),
        Column("epoch", "EPOCH", "count"),
        Column("group", "GROUP", wide=True),
        Column("index", "INDEX", "count", wide=True),
        Column("calls", "CALLS", "count", wide=True),
        Column("rows", "ROWS", "count", wide=True),
        Column("dropped_rows", "DROPPED", "count", wide=True),
        Column("rounds", "ROUNDS", "count", wide=True),
        Column("uid", "UID", wide=True),
    ),
    fetch=lambda daemon, args: list(daemon.handles()),
    keys=("layer",),
    empty="no handles",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    reading.add_arguments(parser, "layer")


def run(args: argparse.Namespace) -> int:
    return reading.run(args, VIEW)
