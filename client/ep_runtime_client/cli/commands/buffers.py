"""`ep-runtime buffers`: lists windows and boards, which count against a limit."""

from __future__ import annotations

import argparse

from ep_runtime_client.cli.daemon import reading
from ep_runtime_client.cli.tables import IDENTITY, STATE, Column

VIEW = reading.View(
    kind="buffers",
    columns=(
        Column("buffer_id", "BUFFER", priority=IDENTITY, about="name, until the daemon restarts"),
        Column("bytes", "BYTES", "bytes", about="size"),
        Column("device", "DEVICE", "device", priority=4, about="host, or a GPU's UUID"),
        Column("kind", "KIND", priority=3, about="BOARD (of a group) or WINDOW (of a rank)"),
        Column(
            "state",
            "STATE",
            priority=STATE,
            about="LEASED, RETAINED (waits for its job), QUARANTINED (a process may map it, "
            "or it is being freed)",
        ),
        Column("owner", "OWNER", "name", about="job/group, as `describe group` takes it"),
        Column("uid", "USER", "user", about="user of the group"),
        Column("mapped_by", "MAPPED", "list", priority=3, about="pids that map it"),
        Column("world_rank", "RANK", "count", wide=True, about="world rank; -1: the board"),
        Column("generation", "GEN", "count", wide=True, about="generation of the group"),
        Column("age_s", "AGE", "seconds", wide=True, about="time since it was allocated"),
    ),
    fetch=lambda daemon, args: list(daemon.buffers()),
    keys=("buffer_id", "group", "owner"),
    identity=("buffer_id",),
    empty="no buffers",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    reading.add_arguments(parser, VIEW, "buffer")


def run(args: argparse.Namespace) -> int:
    return reading.run(args, VIEW)
