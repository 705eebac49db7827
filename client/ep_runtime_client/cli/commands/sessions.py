"""`ep-runtime sessions`: lists client processes that live or ended lately."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from ep_runtime_client.cli.daemon import reading
from ep_runtime_client.cli.tables import IDENTITY, STATE, Column

if TYPE_CHECKING:
    from ep_runtime_client.cli.daemon import source

LATELY_S = 60.0


def _fetch(daemon: source.Source, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Those that live or ended lately; one that is named, and all with --all."""
    rows = daemon.sessions()
    if args.all or args.name is not None:
        return rows
    return [row for row in rows if (row["since_end_s"] or 0.0) < LATELY_S]


VIEW = reading.View(
    kind="sessions",
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
    fetch=_fetch,
    keys=("session_id", "pid", "job"),
    identity=("session_id",),
    empty="no sessions",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    reading.add_arguments(parser, VIEW, "session")
    parser.add_argument(
        "--all",
        action="store_true",
        help=f"also show sessions that ended up to ten minutes ago; default {LATELY_S:g} s",
    )


def run(args: argparse.Namespace) -> int:
    return reading.run(args, VIEW)
