"""`ep-runtime layers`: registered layers; a stack is one row."""

from __future__ import annotations

import argparse

from ep_runtime_client.cli.daemon import reading
from ep_runtime_client.cli.render import Column

VIEW = reading.View(
    kind="layers",
    columns=(
        Column("name", "LAYER"),
        Column("group", "GROUP"),
        Column("job", "JOB"),
        Column("top_k", "TOP-K", "count"),
        Column("alignment", "ALIGNMENT", "count"),
        Column("in_flight", "IN-FLIGHT", "count"),
        Column("num_layers", "STACK", "count"),
        Column("generation", "GENERATION", "count"),
        Column("base_id", "ID", wide=True),
        Column("handle_base", "HANDLES-AT", "count", wide=True),
        Column("uid", "UID", wide=True),
    ),
    fetch=lambda daemon, args: list(daemon.layers()),
    keys=("name",),
    empty="no layers",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    reading.add_arguments(parser, "layer")


def run(args: argparse.Namespace) -> int:
    return reading.run(args, VIEW)
