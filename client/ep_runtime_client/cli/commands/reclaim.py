"""`ep-runtime reclaim NAME | --all-retained`: ends groups and frees their memory."""

from __future__ import annotations

import argparse
from typing import Any

from ep_runtime.allowed_names import shown
from ep_runtime.errors import InvalidArgumentError
from ep_runtime.text import iec
from ep_runtime_client.cli import users
from ep_runtime_client.cli.daemon import choosing, ordering


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", metavar="NAME", help="group to reclaim")
    parser.add_argument(
        "--all-retained", action="store_true", help="free every group that waits for its job"
    )
    parser.add_argument("--job", help="job of the group, if several jobs have a group of that name")
    parser.add_argument(
        *("--user", "--uid"),
        dest="uid",
        type=users.number,
        help="user of the job, if several users have a job of that name",
    )
    ordering.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    from ep_runtime_client.cli.daemon import source

    if (args.name is None) == (not args.all_retained):
        raise InvalidArgumentError("give NAME or --all-retained", argument="NAME")
    with source.open_source(source.exact(args.address), timeout_s=args.timeout) as daemon:
        affected = _affected(args, daemon.groups())
        ordering.confirm(args, [_consequence(row) for row in affected])
        whose: dict[str, Any] = {"name": None, "job": "", "uid": None}
        whose = whose if args.all_retained else affected[0]
        answer = daemon.reclaim(
            whose["name"], job=whose["job"], uid=whose["uid"], all_retained=args.all_retained
        )
        text = (
            f"reclaimed {len(answer['groups'])} groups: {iec(answer['freed_bytes'])} freed, "
            f"{iec(answer['quarantined_bytes'])} when the processes that map them end"
        )
        return ordering.report(args, "reclaim", answer, text)


def _affected(args: argparse.Namespace, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the groups that the order would end. Raises the order's InvalidArgumentError."""
    if args.all_retained:
        return [row for row in rows if row["state"] == "RETAINED"]
    named = choosing.select("group", ("name", "job/name"), rows, args.name)
    return choosing.of_one_owner("group", named, args.name, args.job, args.uid)


def _consequence(row: dict[str, Any]) -> str:
    pids = ", ".join(str(pid) for pid in row["pids"])
    ends = f"steps of pid {pids} fail" if pids else "no process uses it"
    return (
        f"group {shown(row['name'])} of job {shown(row['job'])}, user {users.name(row['uid'])} "
        f"({row['state']}, "
        f"{iec(row['total_bytes'])}, {row['num_layers']} layers) will be freed; {ends}"
    )
