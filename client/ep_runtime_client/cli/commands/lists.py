"""The commands that list sessions, groups, layers, handles and buffers; a stack is one layer."""

from __future__ import annotations

import argparse
from typing import Any

from ep_runtime_client.cli.daemon.reading import View
from ep_runtime_client.cli.tables import IDENTITY, STATE, Column

LATELY_S = 60.0


def _is_session_shown(row: dict[str, Any], args: argparse.Namespace) -> bool:
    """Whether a session lives or ended lately; any is shown with --all or a name."""
    return args.all or args.name is not None or (row["since_end_s"] or 0.0) < LATELY_S


def _add_all(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--all",
        action="store_true",
        help=f"also show sessions that ended up to ten minutes ago; default {LATELY_S:g} s",
    )


SESSIONS = View(
    kind="sessions",
    noun="session",
    columns=(
        Column("session_id", "SESSION", priority=IDENTITY, about="name, as `fence` takes it"),
        Column(
            "state",
            "STATE",
            priority=STATE,
            about="CONNECTED, ACTIVE, SUSPECT (silent for 10 s), FENCED, CLOSED, "
            "DEAD (ended without goodbye)",
        ),
        Column("job", "JOB", "name", about="job, in which group names are unique"),
        Column("uid", "USER", "user", about="user of the process"),
        Column("pid", "PID", about="process id, in the daemon's pid namespace"),
        Column("groups", "GROUPS", "names", priority=3, about="groups that it has ranks in"),
        Column("age_s", "AGE", "seconds", priority=3, about="time since it connected"),
        Column(
            "since_heartbeat_s",
            "BEAT",
            "seconds",
            priority=4,
            about="time since its last heartbeat",
        ),
        Column("since_end_s", "ENDED", "seconds", wide=True, about="time since it ended"),
        Column("process_index", "PROCESS", wide=True, about="jax.process_index"),
        Column("client_version", "CLIENT", wide=True, about="version of its ep-runtime"),
        Column("progress", "PROGRESS", "count", wide=True, about="last progress number it sent"),
        Column("labels", "LABELS", "names", wide=True, about="labels that connect() was given"),
    ),
    shows=_is_session_shown,
    add_own_arguments=_add_all,
    keys=("session_id", "pid", "job"),
    identity=("session_id",),
)
GROUPS = View(
    kind="groups",
    noun="group",
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
            "num_layers", "LAYERS", "count", priority=3, about="layers, counting all in a stack"
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
        Column(
            "devices", "GPUS", "device", wide=True, about="NVML's index and UUID of its ranks' GPUs"
        ),
        Column("retain_s", "RETAIN", "seconds", wide=True, about="time it waits without processes"),
        Column("retained_left_s", "LEFT", "seconds", wide=True, about="time left of RETAIN"),
        Column("recv_capacity_per_rank", "CAPACITY", "count", wide=True, about="rows of a slab"),
        Column("num_experts", "EXPERTS", "count", wide=True, about="experts"),
        Column("num_sms", "SMS", "count", wide=True, about="SMs for its kernels; 0: the default"),
        Column("overlap", "OVERLAP", wide=True, about="whether exchanges overlap matmuls"),
        Column("workspace", "WORKSPACE", wide=True, about="memory for rows of block calls"),
        Column("poison_reason", "POISON", wide=True, about="error that ends its waits"),
    ),
    keys=("name", "job/name"),
    identity=("uid", "job", "name"),
)
LAYERS = View(
    kind="layers",
    noun="layer",
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
    keys=("name",),
    identity=("uid", "job", "group", "name"),
)
HANDLES = View(
    kind="handles",
    noun="layer",
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
    keys=("layer",),
    identity=("uid", "job", "group", "layer", "handle"),
)
BUFFERS = View(
    kind="buffers",
    noun="buffer",
    columns=(
        Column("buffer_id", "BUFFER", priority=IDENTITY, about="name, until the daemon restarts"),
        Column("bytes", "BYTES", "bytes", about="size"),
        Column("device", "DEVICE", "device", priority=4, about="host, or a GPU's UUID"),
        Column("gpu_index", "GPU", "count", priority=4, about="that GPU's index in NVML's order"),
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
    keys=("buffer_id", "group", "owner"),
    identity=("buffer_id",),
)

VIEWS = {view.kind: view for view in (SESSIONS, GROUPS, LAYERS, HANDLES, BUFFERS)}
