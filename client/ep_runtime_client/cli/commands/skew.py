"""`ep-runtime skew`: finds the rank that arrives late, and the ranks that wait for it."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from ep_runtime_client import cli
from ep_runtime_client.cli import render
from ep_runtime_client.cli.daemon import reading
from ep_runtime_client.cli.ranks import board_samples
from ep_runtime_client.cli.tables import IDENTITY, STATE, USUAL, Column
from ep_runtime_client.readers import figures, tallies
from ep_runtime_client.readers.tallies import Interval

COLUMNS = (
    Column("op", "OP", priority=IDENTITY, about="op, such as dispatch"),
    Column("calls_s", "CALLS/S", "rate", about="calls of a rank, per second"),
    Column("mean_ms", "MS/CALL", "ratio", about="milliseconds per call"),
    Column("wait_share", "WAIT", "share", about="share of the time that ranks waited in that op"),
    Column("peer", "PEER", "count", priority=STATE, about="rank that the others waited for most"),
    Column(
        "peer_share",
        "FOR PEER",
        "share",
        about="share of the time that a rank waited for PEER, on average",
    ),
    Column("late_ms", "LATE MS", "ratio", about="milliseconds that PEER came later, per call"),
)
_MATRICES = {
    "waits": ("share", "share of the time that a rank (row) waited for a peer (column)"),
    "arrivals_ms": ("ratio", "by how much a peer (column) came later than a rank (row), ms a call"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--op",
        help="show the rank-by-rank matrices of one op, such as dispatch; `-o wide` shows all",
    )
    since = "instead of the next seconds show the waits"
    board_samples.add_arguments(
        parser, "seconds to look at", since, interval_s=5.0, wide="every peer"
    )
    about = (
        f"Names a rank if the others wait for it more than {100 * tallies.SLOW_SHARE:g}% of the "
        f"time; the exit code is then {cli.LATE}. "
        f"{board_samples.ABOUT_SINCE}"
    )
    reading.explain(parser, {"columns": COLUMNS}, about)


def run(args: argparse.Namespace) -> int:
    from ep_runtime_client.cli.daemon import source

    args.op = args.op.upper() if args.op else None
    with source.open_source(args.address, timeout_s=args.timeout) as daemon:
        seen = board_samples.begin(args, daemon)
        for _ in range(args.samples):
            seen.wait()
            if args.output == "json":
                _write_json(args, seen)
            else:
                _write_tables(args, seen)
        slow = any(tallies.slow_rank(group) is not None for group in seen.groups.values())
        return cli.LATE if slow and not seen.missing else seen.exit_code


def _write_json(args: argparse.Namespace, seen: board_samples.BoardSamples) -> None:
    groups = []
    for key, group in seen.groups.items():
        ops = [
            {
                **figures.skew_of(group, op),
                **{what: figures.matrix(group, op, what) for what in _MATRICES},
            }
            for op in figures.ops(group, args.op)
        ]
        held = tallies.held_up(group)
        about = {**seen.about(key), "slow": seen.slow(key)}
        groups.append({**about, "holds_share": held, "ops": ops})
    seen.write_json("skew", groups, compact=args.samples > 1)


def _write_tables(args: argparse.Namespace, seen: board_samples.BoardSamples) -> None:
    wide = args.output == "wide"
    if not seen.groups:
        render.out("no ranks")
    for key, group in seen.apart(seen.groups):
        for line in seen.heading(key):
            render.write_text(line)
        ops = figures.ops(group, args.op)
        rows = [figures.skew_of(group, op) for op in ops]
        render.write_table(COLUMNS, rows, wide=wide, empty="no calls in that time")
        if not (wide or args.op):
            _write_matrix(group, None, "waits", wide=False)
            continue
        for op in ops:
            for what in _MATRICES:
                _write_matrix(group, op, what, wide=wide)


def _write_matrix(group: Sequence[Interval], op: str | None, what: str, *, wide: bool) -> None:
    """Writes a matrix of ranks by peers; if not all fit, the peers with the longest waits."""
    kind, about = _MATRICES[what]
    matrix = figures.matrix(group, op, what)
    if not any(matrix.values()):
        return
    holds = tallies.held_up(group)
    by_weight = sorted(matrix, key=lambda rank: -holds.get(rank, 0.0))
    peers = [
        Column(str(rank), str(rank), kind, priority=USUAL + by_weight.index(rank))
        for rank in matrix
    ]
    columns = [Column("rank", "RANK", "count", priority=IDENTITY), *peers]
    rows: list[Mapping[str, Any]] = [
        {"rank": rank, **{str(peer): value for peer, value in cells.items()}}
        for rank, cells in matrix.items()
    ]
    render.out("")
    render.write_text(f"{op.lower() if op else 'all ops'}: {about}")
    render.write_table(columns, rows, wide=wide, empty="")
