"""Samples boards repeatedly, and computes the groups' activity between two samples."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from ep_runtime.allowed_names import shown
from ep_runtime.errors import InvalidArgumentError
from ep_runtime.text import duration
from ep_runtime_client import cli
from ep_runtime_client.cli import render, users
from ep_runtime_client.cli.daemon import choosing, nodes, reading
from ep_runtime_client.cli.ranks import rows
from ep_runtime_client.cli.tables import Column
from ep_runtime_client.readers import tallies

if TYPE_CHECKING:
    from ep_runtime_client.cli.daemon import source

T = TypeVar("T")
_ENDLESS = sys.maxsize


class _Watch(argparse.Action):
    """Implements --watch as in other reading commands."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option: Any = None) -> None:
        namespace.interval = values
        if namespace.samples is not None or not sys.stdout.isatty():  # else a screen is endless
            namespace.samples = _ENDLESS


def add_arguments(
    parser: argparse.ArgumentParser,
    interval: str,
    since: str,
    *,
    interval_s: float | None = None,
    samples: int | None = 1,
    wide: str = "every column",
) -> None:
    """Adds the options that `top`, `load` and `skew` share: group, time and output.

    Args:
        interval: help text of --interval.
        since: start of the help text of --since.
        interval_s, samples: defaults.
        wide: help text of `-o wide`.
    """
    add = parser.add_argument
    add("group", nargs="?", metavar="GROUP", help="show this group only")
    over = parser.add_mutually_exclusive_group()
    over.add_argument(
        "--interval", type=reading.positive, default=interval_s, metavar="S", help=interval
    )
    about = f"{since} of the last 90s, 10m or 1h30m; daemons remember two hours"
    every = "print a sample every S seconds until Ctrl-C"
    over.add_argument("--watch", type=reading.positive, metavar="S", action=_Watch, help=every)
    over.add_argument("--since", type=reading.span, metavar="SPAN", help=about)
    about = "print N samples and end; with --since, cut SPAN into N; JSON has one per line"
    add("--samples", type=reading.count, default=samples, metavar="N", help=about)
    add("-o", "--output", choices=render.OUTPUTS, default="table", help=f"wide has {wide}")
    reading.add_node_argument(parser, "every node of the daemon's cluster")
    reading.add_daemon_arguments(parser)


# Explains --since at the end of --help.
ABOUT_SINCE = (
    "A daemon copies its boards every 10 s. It keeps all copies for two minutes, then one a minute "
    "for two hours, 64 MiB at most. --since compares with the copy of that age. If there is none, "
    "it compares with the oldest since the group formed or the daemon started."
)


def begin(args: argparse.Namespace, daemon: source.Source) -> BoardSamples:
    """Takes the first sample, as the options of `add_arguments` ask."""
    if args.since is not None:
        return PastSamples(daemon, args.group, args.node, args.since, args.samples or 1)
    return BoardSamples(daemon, args.group, args.node, args.interval or 0.0)


def title(group: tallies.GroupName) -> str:
    """Returns a group's name for people."""
    job, user = shown(group.job), users.name(group.uid)
    return f"group {shown(group.group)} of job {job}, user {user}"


class BoardSamples:
    """The last two samples of the boards, and the activity between them."""

    def __init__(
        self, daemon: source.Source, group: str | None, node: str | None, interval_s: float
    ) -> None:
        """Takes the first sample; `group` and `node` None for all, `interval_s` 0.0 for the time
        since groups formed."""
        self._daemon, self._where, self.interval_s = daemon, (group, node), interval_s
        self._after = self._before = tallies.sample_boards(daemon, group, node)
        if group is not None and not self._after.ranks:
            known = nodes.everywhere(daemon, lambda one: one.groups(), node).rows
            choosing.select("groups", ("name",), known, group)
        self._missing_told: set[str] = set()
        self._tell_missing()
        self.groups: dict[tallies.GroupName, list[tallies.Interval]] = {}
        self._written = False

    @property
    def missing(self) -> list[dict[str, Any]]:
        """Returns the nodes that are missing in either sample."""
        both = (*self._before.missing, *self._after.missing)
        return [*{node["node"]: node for node in both}.values()]

    def _tell_missing(self) -> None:
        """Reports missing nodes that were not reported before."""
        fresh = [node for node in self.missing if node["node"] not in self._missing_told]
        self._missing_told = {node["node"] for node in self.missing}
        nodes.tell_missing(fresh)

    def again(self) -> None:
        """Takes another sample."""
        self._compare(self._after, tallies.sample_boards(self._daemon, *self._where))

    def _compare(self, before: tallies.BoardSample, after: tallies.BoardSample) -> None:
        self._before, self._after = before, after
        self.groups = tallies.by_group(tallies.between(self._before, self._after))

    def wait(self) -> None:
        """Takes another sample after the interval."""
        time.sleep(self.interval_s)
        self.again()
        self._tell_missing()

    def when(self, group: tallies.GroupName) -> str:
        """Returns a text with the time that the samples cover."""
        return f"in the last {self.interval_s:g} s" if self.interval_s else "since it formed"

    def about(self, group: tallies.GroupName) -> dict[str, Any]:
        """Returns the group and duration of a sample for JSON."""
        elapsed_s = self._elapsed_s(group) if group in self.groups else None
        return {**group._asdict(), "elapsed_s": elapsed_s}

    def _elapsed_s(self, group: tallies.GroupName) -> float:
        return max(one.elapsed_s for one in self.groups[group])

    def heading(self, group: tallies.GroupName) -> Iterator[str]:
        """Yields heading lines: the group, a slow rank, silent processes."""
        yield f"{title(group)}: {len(self.groups[group])} ranks"
        slow = tallies.slow_rank(self.groups[group])
        if slow is not None:
            yield f"SLOW: {slow.message}"
        for text in tallies.silences(self.groups[group]):
            yield f"SILENT: {text}"

    def ranks(self, group: tallies.GroupName, links: rows.Links) -> rows.Rows:
        """Returns the rows of table rows.RANKS."""
        extra_chunks = sum(self.grown(group, "rounds").values())
        return rows.ranks(self.groups[group], extra_chunks, links)

    def layers(self, group: tallies.GroupName) -> rows.Rows:
        """Returns the rows of table rows.LAYERS."""
        extra_chunks, dropped = self.grown(group, "rounds"), self.grown(group, "dropped_rows")
        return rows.layers(self.groups[group], extra_chunks, dropped)

    def sums(self) -> dict[tallies.GroupName, list[tallies.Row]]:
        """Returns sums of each group's ranks since it formed, as ListTallies reports them."""
        found: dict[tallies.GroupName, list[tallies.Row]] = {}
        for row in self._after.ranks.values():
            found.setdefault(tallies.group_of(row), []).append(row)
        return found

    def slow(self, group: tallies.GroupName) -> dict[str, Any] | None:
        """Returns the slow rank as JSON documents have it."""
        found = tallies.slow_rank(self.groups[group])
        return vars(found) if found is not None else None

    def write_json(self, kind: str, groups: Iterable[Mapping[str, Any]], *, compact: bool) -> None:
        """Writes a sample as one JSON document; `interval_s` null means since groups formed."""
        interval_s = self.interval_s or None
        body = {"interval_s": interval_s, **self._told(), "groups": [*groups]}
        render.write_json(kind, {**body, "unreachable": self.missing}, compact=compact)

    def _told(self) -> dict[str, Any]:
        return {}

    def apart(self, groups: Mapping[tallies.GroupName, T]) -> Iterator[tuple[tallies.GroupName, T]]:
        """Yields groups, and writes an empty line between the tables of two.

        The first of the two may belong to an earlier sample.
        """
        for key, group in groups.items():
            if self._written:
                render.out("")
            self._written = True
            yield key, group

    @property
    def exit_code(self) -> int:
        return cli.PARTIAL if self.missing else cli.OK

    def grown(
        self, group: tallies.GroupName, key: str, *, from_start: bool = False
    ) -> dict[str, int]:
        """Returns by layer how much a number of its handles grew since the last sample."""
        before = [] if from_start else self._before.handles
        return tallies.growth(before, self._after.handles, group, key)


class PastSamples(BoardSamples):
    """Samples that daemons have stored, the oldest first."""

    def __init__(
        self, daemon: source.Source, group: str | None, node: str | None, since_s: float, parts: int
    ) -> None:
        """Samples the present and the past, as far back as daemons remember.

        `parts`: number of times that `wait` is called.

        Raises:
            InvalidArgumentError: there is no copy yet.
        """
        self._first = tallies.sample_boards(daemon, group, node, age_s=since_s)
        super().__init__(daemon, group, node, 0.0)
        whole = tallies.between(self._first, self._after)
        if self._after.ranks and not whole:
            raise InvalidArgumentError(
                "--since: the daemon has no copy of these boards yet, it takes one every 10 s",
                argument="--since",
            )
        since_s = min(since_s, max((one.elapsed_s for one in whole), default=since_s))
        self.interval_s = since_s / parts
        self._last = self._after
        self._ages_s = [self.interval_s * number for number in range(1, parts)]
        self._age_s = since_s
        self._after = self._first

    def wait(self) -> None:
        """Continues with the next part."""
        if not self._ages_s:
            self._age_s = 0.0
            self._compare(self._after, self._last)
            return
        self._age_s = self._ages_s.pop()
        self._compare(
            self._after, tallies.sample_boards(self._daemon, *self._where, age_s=self._age_s)
        )

    def whole(self) -> None:
        """Compares the first and the last sample, over all parts."""
        self._compare(self._first, self._last)

    def when(self, group: tallies.GroupName) -> str:
        over = duration(self._elapsed_s(group))
        ago = f"that ended {duration(self._age_s)} ago"
        return f"in {over} {ago}" if self._age_s else f"in the last {over}"

    def heading(self, group: tallies.GroupName) -> Iterator[str]:
        first, *more = super().heading(group)
        yield f"{first} {self.when(group)}"
        yield from more

    def _told(self) -> dict[str, Any]:
        return {"age_s": self._age_s}


def columns(found: rows.Rows, of: Sequence[Column]) -> Sequence[Column]:
    """Adds the node's column if there are several nodes."""
    return (nodes.COLUMN, *of) if any(row["node"] for row in found) else of
