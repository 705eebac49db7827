"""`ep-runtime layers`: lists registered layers; a stack is one row."""

from __future__ import annotations

import argparse

from ep_runtime_client.cli.daemon import reading
from ep_runtime_client.cli.tables import IDENTITY, Column

VIEW = reading.View(
    kind="layers",
    columns=(
        Column("name", "LAYER", "name", priority=IDENTITY, about="its name, or the stack's"),
        Column("group", "GROUP", "name", priority=IDENTITY, about="group it is registered with"),
        Column("job", "JOB", "name", about="the group's job"),
        Column("uid", "USER", "user", about="the group's user"),
        Column("top_k", "TOP-K", "count", about="experts per token"),
        Column(
            "alignment",
            "ALIGN",
            "count",
            priority=3,
            about="multiple that an expert's rows are padded to",
        ),
        Column(
            "in_flight", "HANDLES", "count", priority=3, about="dispatches that may be open at once"
        ),
        Column("num_layers", "STACK", "count", priority=4, about="layers of the stack, or 1"),
        Column("generation", "GEN", "count", priority=5, about="generation of the group"),
        Column("base_id", "ID", wide=True, about="number in records of the board"),
        Column("handle_base", "FIRST", "count", wide=True, about="record of its first handle"),
    ),
    fetch=lambda daemon, args: list(daemon.layers()),
    keys=("name",),
    identity=("uid", "job", "group", "name"),
    empty="no layers",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    reading.add_arguments(parser, VIEW, "layer")


def run(args: argparse.Namespace) -> int:
    return reading.run(args, VIEW)
