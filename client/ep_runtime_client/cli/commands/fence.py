"""`ep-runtime fence SESSION`: voids a session's token and poisons its groups."""

from __future__ import annotations

import argparse

from ep_runtime import allowed_names
from ep_runtime.errors import InvalidArgumentError
from ep_runtime_client.cli import users
from ep_runtime_client.cli.daemon import ordering


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "session", metavar="SESSION", help="session to cut off, as `ep-runtime sessions` names it"
    )
    parser.add_argument(
        "--reason", default="", help="reason for the message of the session's error"
    )
    ordering.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    from ep_runtime_client.cli.daemon import source

    with source.open_source(source.exact(args.address), timeout_s=args.timeout) as daemon:
        living = (row for row in daemon.sessions() if row["since_end_s"] is None)
        rows = {row["session_id"]: row for row in living}
        found = rows.get(args.session)
        if found is None:
            raise InvalidArgumentError(
                f"no session {args.session!r}; there are: {allowed_names.listed(rows) or 'none'}"
                + allowed_names.hint(args.session, rows),
                argument="SESSION",
            )
        groups = ", ".join(map(allowed_names.shown, found["groups"])) or "none"
        job, user = allowed_names.shown(found["job"]), users.name(found["uid"])
        ordering.confirm(
            args,
            [
                f"session {args.session} (pid {found['pid']}, job {job}, user {user}) will be cut "
                "off",
                f"steps under way in its groups fail: {groups}",
                "its memory stays charged until its process ends",
            ],
        )
        answer = daemon.fence(args.session, args.reason)
        poisoned = ", ".join(map(allowed_names.shown, answer["groups"])) or "none"
        return ordering.report(args, "fence", answer, f"fenced; groups poisoned: {poisoned}")
