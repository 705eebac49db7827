"""`ep-runtime groups`: expert-parallel groups of every user and job."""

from __future__ import annotations

import argparse

from ep_runtime_client.cli.daemon import reading
from ep_runtime_client.cli.render import Column

VIEW = reading.View(
    kind="groups",
    columns=(
        Column("name", "GROUP"),
        Column("job", "JOB"),
        Column("state", "STATE"),
        Column("generation", "GENERATION", "count"),
        Column("world_size", "RANKS", "count"),
        Column("ep_size", "EP", "count"),
        Column("num_layers", "LAYERS", "count"),
        Column("num_handles", "HANDLES", "count"),
        Column("total_bytes", "BYTES", "bytes"),
        Column("pids", "PIDS"),
        Column("age_s", "AGE", "seconds"),
        Column("epoch", "EPOCH", "count", wide=True),
        Column("attempt", "ATTEMPT", "count", wide=True),
        Column("transport", "TRANSPORT", wide=True),
        Column("node_size", "NODE-SIZE", "count", wide=True),
        Column("nccl_version", "NCCL", wide=True),
        Column("nccl_state", "NCCL-STATE", wide=True),
        Column("retain_s", "RETAIN", "seconds", wide=True),
        Column("retained_left_s", "LEFT", "seconds", wide=True),
        Column("recv_capacity_per_rank", "CAPACITY", "count", wide=True),
        Column("num_experts", "EXPERTS", "count", wide=True),
        Column("num_sms", "SMS", "count", wide=True),
        Column("workspace", "WORKSPACE", wide=True),
        Column("uid", "UID", wide=True),
        Column("poison_reason", "POISON", wide=True),
    ),
    fetch=lambda daemon, args: list(daemon.groups()),
    keys=("name",),
    empty="no groups",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    reading.add_arguments(parser, "group")


def run(args: argparse.Namespace) -> int:
    return reading.run(args, VIEW)
