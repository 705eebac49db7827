"""`ep-runtime groups`: lists expert-parallel groups of every user and job."""

from __future__ import annotations

import argparse

from ep_runtime_client.cli.daemon import reading
from ep_runtime_client.cli.tables import IDENTITY, STATE, Column

VIEW = reading.View(
    kind="groups",
    columns=(
        Column("name", "GROUP", "name", priority=IDENTITY, about="name, unique in the job"),
        Column("job", "JOB", "name", about="job that created it"),
        Column("uid", "USER", "user", about="user who created it"),
        Column(
            "state",
            "STATE",
            priority=STATE,
            about="FORMING, READY, BROKEN (a process is gone) or RETAINED (waits for its job)",
        ),
        Column(
            "late_ranks",
            "LATE",
            "late",
            priority=STATE,
            about="a rank that others have waited for more than 10 s, and how many more",
        ),
        Column(
            "generation", "GEN", "count", priority=5, about="grows each time the group forms again"
        ),
        Column("world_size", "RANKS", "count", about="devices"),
        Column("ep_size", "EP", "count", priority=4, about="ranks that share one set of experts"),
        Column(
            "num_layers", "LAYERS", "count", priority=3, about="layers, each of a stack counted"
        ),
        Column("num_handles", "HANDLES", "count", priority=4, about="handles of its layers"),
        Column("total_bytes", "BYTES", "bytes", about="memory of its board and windows"),
        Column("pids", "PIDS", "list", priority=4, about="processes of its ranks"),
        Column("age_s", "AGE", "seconds", about="time since this generation began to form"),
        Column("epoch", "EPOCH", "count", wide=True, about="epoch of its view, in a cluster"),
        Column("attempt", "ATTEMPT", "count", wide=True, about="tries so far to form it"),
        Column("transport", "TRANSPORT", wide=True, about="how its rows travel"),
        Column("node_size", "NODESIZE", "count", wide=True, about="ranks that share windows"),
        Column("nccl_version", "NCCL", wide=True, about="version of libnccl in its processes"),
        Column("nccl_state", "NCCL-STATE", wide=True, about="state of its NCCL communicators"),
        Column("retain_s", "RETAIN", "seconds", wide=True, about="time it waits without processes"),
        Column("retained_left_s", "LEFT", "seconds", wide=True, about="time left of RETAIN"),
        Column("recv_capacity_per_rank", "CAPACITY", "count", wide=True, about="rows of a slab"),
        Column("num_experts", "EXPERTS", "count", wide=True, about="experts"),
        Column("num_sms", "SMS", "count", wide=True, about="SMs for its kernels; 0: the default"),
        Column("overlap", "OVERLAP", wide=True, about="whether exchanges overlap matmuls"),
        Column("workspace", "WORKSPACE", wide=True, about="memory of block calls for rows"),
        Column("poison_reason", "POISON", wide=True, about="error that ends its waits"),
    ),
    fetch=lambda daemon, args: list(daemon.groups()),
    keys=("name", "job/name"),
    identity=("uid", "job", "name"),
    empty="no groups",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    reading.add_arguments(parser, VIEW, "group")


def run(args: argparse.Namespace) -> int:
    return reading.run(args, VIEW)
