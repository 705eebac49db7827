"""`ep-runtime handles`: lists who holds which handle, and what it did last."""

from __future__ import annotations

import argparse

from ep_runtime_client.cli.daemon import reading
from ep_runtime_client.cli.tables import IDENTITY, STATE, Column

VIEW = reading.View(
    kind="handles",
    columns=(
        Column("layer", "LAYER", "name", priority=IDENTITY, about="layer; NAME[i] in a stack"),
        Column(
            "handle", "HANDLE", "count", priority=IDENTITY, about="number among the layer's handles"
        ),
        Column("lane", "LANE", "lane", priority=3, about="lane that its last call used"),
        Column("generation", "GEN", "count", priority=5, about="generation of the group"),
        Column("state", "STATE", priority=STATE, about="IDLE, BUSY and others, from the board"),
        Column("job", "JOB", "name", about="the group's job"),
        Column("uid", "USER", "user", about="user of the group"),
        Column("pids", "PIDS", "list", priority=4, about="processes that may use it"),
        Column("age_s", "AGE", "seconds", about="time since its record changed"),
        Column("last_op", "LAST-OP", about="op that it ran last"),
        Column("epoch", "EPOCH", "count", priority=4, about="epoch in which that op ran"),
        Column("group", "GROUP", "name", wide=True, about="the layer's group"),
        Column("index", "INDEX", "count", wide=True, about="its record on the board"),
        Column("calls", "CALLS", "count", wide=True, about="ops run since the group formed"),
        Column("rows", "ROWS", "count", wide=True, about="rows received"),
        Column("dropped_rows", "DROPPED", "count", wide=True, about="rows dropped, over capacity"),
        Column("rounds", "ROUNDS", "count", wide=True, about="extra chunks of its calls"),
    ),
    fetch=lambda daemon, args: list(daemon.handles()),
    keys=("layer",),
    identity=("uid", "job", "group", "layer", "handle"),
    empty="no handles",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    reading.add_arguments(parser, VIEW, "layer")


def run(args: argparse.Namespace) -> int:
    return reading.run(args, VIEW)
