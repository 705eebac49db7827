"""The rows of `ep-runtime top`: ranks of a group, its layers, and the ranks in one layer."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

from ep_runtime_client.cli.machine import nvml
from ep_runtime_client.cli.tables import IDENTITY, STATE, Column
from ep_runtime_client.readers import tallies
from ep_runtime_client.readers.tallies import Interval, Load

_RANK = Column("world_rank", "RANK", "count", priority=IDENTITY, about="world rank")
_TOKENS = Column("tokens_s", "TOKENS/S", "rate", about="tokens that it sent to experts, per second")
_ROWS = Column("rows_s", "ROWS/S", "rate", about="rows it received by dispatch, per second")
_TIME = Column(
    "time_share", "TIME", "share", about="share of the time inside calls, which may overlap"
)
_WAIT = Column("wait_share", "WAIT", "share", about="share of the time that it waited for peers")
_MARK = Column(
    "mark",
    "MARK",
    priority=STATE,
    about="<<< marks the rank that the others wait for, silent one whose process sends no "
    "heartbeat",
)

RANKS = (
    _RANK,
    _MARK,
    _TOKENS,
    _ROWS,
    Column("gb_s", "GB/S", "ratio", about="those rows in 10^9 bytes per second, at most"),
    Column(
        "link_share",
        "LINK",
        "share",
        priority=3,
        about="share of the GPU's NVLink bandwidth, one way",
    ),
    _WAIT,
    Column("holds_share", "HOLDS", "share", about="share of the time that others waited for it"),
    Column("rounds", "ROUNDS", "count", priority=4, about="extra chunks of its group's calls"),
    Column("op", "OP", priority=3, about="op that it is in"),
    Column("layer", "LAYER", "name", priority=3, about="layer of that op"),
    Column("waits", "BY OP", "prose", priority=4, about="WAIT of each op"),
    Column("calls_s", "CALLS/S", "rate", wide=True, about="finished calls per second"),
    Column("time_share", "TIME", "share", wide=True, about=_TIME.about),
    Column(
        "dropped_s", "DROPS/S", "rate", wide=True, about="rows dropped over capacity, per second"
    ),
    Column("state", "STATE", wide=True, about="RUNNING, IDLE, MEETING or WAITING (both for peers)"),
    Column("waiting_for", "WAITS-FOR", "lane", wide=True, about="rank that it waits for now"),
    Column("pid", "PID", "count", wide=True, about="process id"),
)
LAYERS = (
    Column("layer", "LAYER", "name", priority=IDENTITY, about="layer; NAME[i] in a stack"),
    _TOKENS,
    _ROWS,
    Column("calls_s", "CALLS/S", "rate", about="calls of all ranks, per second"),
    _TIME,
    _WAIT,
    Column("max_mean", "MAX/MEAN", "ratio", about="rows of the fullest expert over the mean"),
    Column("rounds", "ROUNDS", "count", about="extra chunks of its calls"),
    Column("dropped", "DROPPED", "count", about="rows dropped, over capacity"),
)
RANKS_OF_LAYER = (
    _RANK,
    _MARK,
    _TOKENS,
    _ROWS,
    Column("calls_s", "CALLS/S", "rate", about="calls per second"),
    _TIME,
    _WAIT,
    Column("max_mean", "MAX/MEAN", "ratio", about="rows of its fullest expert over their mean"),
)

Rows = list[dict[str, Any]]


class Links:
    """Bandwidth of GPU links in one direction, only for this machine's GPUs."""

    def __init__(self, gb_s: float | None = None) -> None:
        """`gb_s` replaces NVML's figure."""
        self._wanted = gb_s
        self._told: dict[str, float] | None = None

    def gb_s(self, device: str) -> float | None:
        """Returns a GPU's bandwidth by UUID; None for the host or if unknown."""
        if self._wanted is not None or device == "host":
            return self._wanted
        if self._told is None:
            self._told = {gpu.uuid: _gb_s(gpu) for gpu in nvml.probe().gpus}
        return self._told.get(device) or None


def _gb_s(gpu: nvml.Gpu) -> float:
    counts = [link.removeprefix("NV") for link in gpu.links.values() if link.startswith("NV")]
    links = max((int(count) for count in counts if count.isdecimal()), default=0)
    return links * (gpu.link_mb_s or 0) / 1000


def ranks(group: Sequence[Interval], extra_chunks: int, links: Links) -> Rows:
    """Makes one row for each rank."""
    slow, holds = tallies.slow_rank(group), tallies.held_up(group)
    return [
        {
            "node": one.row["node"],
            "world_rank": one.world_rank,
            "mark": _mark(one, slow),
            # A step calls every layer once, so the layer with the most tokens has the step's
            # tokens.
            "tokens_s": _tokens_s(one),
            **_moved(one, links),
            "wait_share": one.share(one.wait_s),
            "holds_share": holds.get(one.world_rank, 0.0),
            "rounds": extra_chunks,
            "op": one.row["now"]["op"],
            "layer": one.row["now"]["layer"],
            "waits": _waits(one),
            "wait_share_by_op": _by_op(one),
            "calls_s": one.calls / one.elapsed_s,
            "time_share": sum(time_s for _, time_s in one.ops.values()) / one.elapsed_s,
            "dropped_s": one.dropped_rows / one.elapsed_s,
            "state": one.row["now"]["state"],
            "waiting_for": one.row["now"]["waiting_for"],
            "pid": one.row["now"]["pid"],
            "silent_s": one.row["now"]["silent_s"],
        }
        for one in group
    ]


def _mark(one: Interval, slow: tallies.Slow | None) -> str:
    if one.row["now"]["silent_s"] is not None:
        return "silent"
    return "<<<" if slow is not None and one.world_rank == slow.world_rank else ""


def _moved(one: Interval, links: Links) -> dict[str, float | None]:
    rows_s = one.rows / one.elapsed_s
    gb_s, link = rows_s * one.row["row_bytes"] / 1e9, links.gb_s(one.row["device"])
    return {"rows_s": rows_s, "gb_s": gb_s, "link_share": gb_s / link if link else None}


def _tokens_s(one: Interval) -> float | None:
    """Returns tokens per second; None if only rows are counted, as in a group over nodes."""
    most = max((load.tokens for load in one.layers.values()), default=0)
    return most / one.elapsed_s if most or not one.rows else None


def _by_op(one: Interval) -> dict[str, float]:
    seconds: dict[str, float] = collections.defaultdict(float)
    for (op, _), wait_s in one.waits_s.items():
        seconds[op] += wait_s
    longest = sorted(seconds, key=lambda op: -seconds[op])
    return {op: one.share(seconds[op]) for op in longest}


def _waits(one: Interval) -> str:
    return ", ".join(f"{op.lower()} {100 * share:.1f}%" for op, share in _by_op(one).items())


def layers(
    group: Sequence[Interval], extra_chunks: dict[str, int], dropped: dict[str, int]
) -> Rows:
    """Makes one row for each layer that was called: sums over ranks, and means of their shares."""
    names = dict.fromkeys(name for one in group for name in one.layers)
    return [_layer(group, name, extra_chunks, dropped) for name in names if name]


def _layer(
    group: Sequence[Interval], name: str, extra_chunks: dict[str, int], dropped: dict[str, int]
) -> dict[str, Any]:
    loads = [(one, one.layers[name]) for one in group if name in one.layers]
    experts = [*tallies.layer_rows(group, name).values()]
    return {
        "layer": name,
        "tokens_s": sum(load.tokens / one.elapsed_s for one, load in loads),
        "rows_s": sum(sum(load.rows) / one.elapsed_s for one, load in loads),
        "calls_s": sum(load.calls / one.elapsed_s for one, load in loads),
        "time_share": sum(load.time_s / one.elapsed_s for one, load in loads) / len(loads),
        "wait_share": sum(one.share(load.wait_s) for one, load in loads) / len(loads),
        "max_mean": tallies.max_mean(experts) if experts else None,
        "rounds": extra_chunks.get(name, 0),
        "dropped": dropped.get(name, 0),
    }


def ranks_of_layer(group: Sequence[Interval], name: str) -> Rows:
    """Makes one row for each rank, about that layer only."""
    slow = tallies.slow_rank(group)
    rows = []
    for one in group:
        load = one.layers.get(name, Load(0, 0.0, 0.0, 0, ()))
        rows.append(
            {
                "node": one.row["node"],
                "world_rank": one.world_rank,
                "mark": _mark(one, slow),
                "tokens_s": load.tokens / one.elapsed_s,
                "rows_s": sum(load.rows) / one.elapsed_s,
                "calls_s": load.calls / one.elapsed_s,
                "time_share": load.time_s / one.elapsed_s,
                "wait_share": one.share(load.wait_s),
                "max_mean": tallies.max_mean(load.rows) if load.rows else None,
            }
        )
    return rows
