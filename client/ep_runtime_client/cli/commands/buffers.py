"""`ep-runtime buffers`: windows and boards that count against a limit."""

from __future__ import annotations

import argparse

from ep_runtime_client.cli.daemon import reading
from ep_runtime_client.cli.render import Column

VIEW = reading.View(
    kind="buffers",
    columns=(
        Column("buffer_id", "BUFFER"),
        Column("bytes", "BYTES", "bytes"),
        Column("device", "DEVICE"),
        Column("kind", "KIND"),
        Column("state", "STATE"),
        Column("owner", "OWNER"),
        Column("mapped_by", "MAPPED-BY"),
        Column("world_rank", "RANK", "count", wide=True),
        Column("generation", "GENERATION", "count", wide=True),
        Column("uid", "UID", wide=True),
        Column("age_s", "AGE", "seconds", wide=True),
    ),
    fetch=lambda daemon, args: list(daemon.buffers()),
    keys=(
        "buffer_id",
        "group",
        "owner",
    ),
    empty="no buffers",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    reading.add_arguments(parser, "buffer")


def run(args: argparse.Namespace) -> int:
    return reading.run(args, VIEW)
