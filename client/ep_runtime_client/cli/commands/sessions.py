"""`ep-runtime sessions`: client processes, living and lately ended."""

from __future__ import annotations

import argparse

from ep_runtime_client.cli.daemon import reading
from ep_runtime_client.cli.render import Column

VIEW = reading.View(
    kind="sessions",
    columns=(
        Column("session_id", "SESSION"),
        Column("state", "STATE"),
        Column("job", "JOB"),
        Column("uid", "UID"),
        Column("pid", "PID"),
        Column("groups", "GROUPS"),
        Column("age_s", "AGE", "seconds"),
        Column("since_heartbeat_s", "BEAT", "seconds"),
        Column("process_index", "PROCESS", wide=True),
        Column("client_version", "CLIENT", wide=True),
        Column("progress", "PROGRESS", "count", wide=True),
        Column("labels", "LABELS", wide=True),
    ),
    fetch=lambda daemon, args: list(daemon.sessions()),
    keys=(
        "session_id",
        "pid",
        "job",
    ),
    empty="no sessions",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    reading.add_arguments(parser, "session")


def run(args: argparse.Namespace) -> int:
    return reading.run(args, VIEW)
