"""Computes rates, shares of time and slow ranks from two samples of the boards.

A board has running sums, so every value here is a difference of two samples. The sums do not
include waits that still last, so each rank's current state is added: this shows a job that hangs.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ep_runtime.allowed_names import shown
from ep_runtime.text import duration
from ep_runtime_client.readers import nodes

if TYPE_CHECKING:
    from ep_runtime_client.readers.admin_service import Source

Row = Mapping[str, Any]


class GroupName(NamedTuple):
    """The full name of a group, with the keys of JSON output."""

    uid: int
    job: str
    group: str


# A rank is slow if others waited for it for this share of the time, and for every other rank less
# than half as long. Without a slow rank waits are short and spread over all ranks.
SLOW_SHARE = 0.02
_NEXT_SHARE = 0.5
_WAITS = ("MEETING", "WAITING")


@dataclasses.dataclass(frozen=True)
class BoardSample:
    """The sums of every rank and handle at one time; `missing` as in nodes.Found."""

    ranks: dict[tuple[Any, ...], Row]
    handles: list[dict[str, Any]]
    missing: list[dict[str, Any]]


def sample_boards(
    daemon: Source, group: str | None, node: str | None, *, age_s: float | None = None
) -> BoardSample:
    """Reads the boards' sums, now or `age_s` ago, of one group or all."""
    found = nodes.everywhere(daemon, lambda one: one.tallies(group or "", age_s=age_s), node)
    handles = nodes.everywhere(daemon, lambda one: one.handles(age_s=age_s), node)
    missing = {one["node"]: one for one in (*handles.missing, *found.missing)}
    ranks: dict[tuple[Any, ...], Row] = {
        (*group_of(row), row["generation"], row["world_rank"]): row
        for row in sorted(found.rows, key=lambda row: (group_of(row), row["world_rank"]))
    }
    return BoardSample(ranks, handles.rows, [*missing.values()])


def group_of(row: Row) -> GroupName:
    return GroupName(row["uid"], row["job"], row["group"])


@dataclasses.dataclass(frozen=True)
class Load:
    """One rank's calls on one layer between two samples. Times in seconds; rows per expert."""

    calls: int
    time_s: float
    wait_s: float
    tokens: int
    rows: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Interval:
    """Activity of one rank between two samples.

    Attributes:
        row: row of the later sample.
        elapsed_s: seconds between the two samples.
        waits_s: by (op, peer), seconds of waits that ended when the peer arrived last.
        arrivals_s: by (op, peer), seconds that the peer arrived later, summed over calls.
        ops: (calls, seconds) by op.
        layers: loads by layer name.
    """

    row: Row
    elapsed_s: float
    calls: int
    rows: int
    dropped_rows: int
    ops: dict[str, tuple[int, float]]
    waits_s: dict[tuple[str, int], float]
    arrivals_s: dict[tuple[str, int], float]
    layers: dict[str, Load]

    @property
    def world_rank(self) -> int:
        return int(self.row["world_rank"])

    @property
    def group(self) -> GroupName:
        return group_of(self.row)

    @property
    def wait_s(self) -> float:
        return sum(self.waits_s.values())

    def share(self, seconds: float) -> float:
        """Returns the share of the time between the samples, 0 to 1."""
        return min(1.0, max(0.0, seconds / self.elapsed_s))


def between(before: BoardSample, after: BoardSample) -> list[Interval]:
    """Returns the interval of every rank that both samples have in the same generation."""
    found = []
    for key, row in after.ranks.items():
        earlier = before.ranks.get(key)
        if earlier is not None and row["read_s"] > earlier["read_s"]:
            found.append(_interval(earlier, row))
    return found


def _interval(before: Row, after: Row) -> Interval:
    peers_before, peers_after = _by_peer(before), _by_peer(after)
    waits: dict[tuple[str, int], float] = collections.defaultdict(float)
    arrivals: dict[tuple[str, int], float] = {}
    for key, (arrival_ns, wait_ns) in peers_after.items():
        arrival_before, wait_before = peers_before.get(key, (0, 0))
        arrivals[key] = (arrival_ns - arrival_before) / 1e9
        waits[key] = (wait_ns - wait_before) / 1e9
    layers = _layers(before, after)
    for row, sign in ((after, 1), (before, -1)):
        now = row["now"]
        if now["state"] not in _WAITS or now["waiting_for"] < 0 or not now["since_s"]:
            continue
        waits[now["op"], now["waiting_for"]] += sign * now["since_s"]
        known = layers.get(now["layer"], Load(0, 0.0, 0.0, 0, ()))
        wait_s = known.wait_s + sign * now["since_s"]
        layers[now["layer"]] = dataclasses.replace(known, wait_s=wait_s)
    ops_before = {op["op"]: op for op in before["ops"]}
    ops = {}
    for op in after["ops"]:
        earlier = ops_before.get(op["op"], {"calls": 0, "time_ns": 0})
        calls, time_ns = op["calls"] - earlier["calls"], op["time_ns"] - earlier["time_ns"]
        ops[op["op"]] = (calls, time_ns / 1e9)
    return Interval(
        row=after,
        elapsed_s=after["read_s"] - before["read_s"],
        calls=sum(calls for calls, _ in ops.values()),
        rows=after["rows"] - before["rows"],
        dropped_rows=after["dropped_rows"] - before["dropped_rows"],
        ops=ops,
        waits_s={key: value for key, value in waits.items() if value > 0},
        arrivals_s={key: value for key, value in arrivals.items() if value > 0},
        layers=layers,
    )


def _by_peer(row: Row) -> dict[tuple[str, int], tuple[int, int]]:
    return {
        (op["op"], peer["world_rank"]): (peer["arrival_ns"], peer["wait_ns"])
        for op in row["ops"]
        for peer in op["peers"]
    }


def _layers(before: Row, after: Row) -> dict[str, Load]:
    earlier = {layer["layer"]: load_of(layer) for layer in before["layers"]}
    found = {}
    for layer in after["layers"]:
        now = load_of(layer)
        then = earlier.get(layer["layer"])
        if then is None or len(then.rows) != len(now.rows):
            then = Load(0, 0.0, 0.0, 0, (0,) * len(now.rows))
        found[layer["layer"]] = Load(
            now.calls - then.calls,
            now.time_s - then.time_s,
            now.wait_s - then.wait_s,
            now.tokens - then.tokens,
            tuple(a - b for a, b in zip(now.rows, then.rows, strict=True)),
        )
    return found


def load_of(layer: Row) -> Load:
    """Converts a layer's sums from ListTallies."""
    times = layer["time_ns"] / 1e9, layer["wait_ns"] / 1e9
    return Load(layer["calls"], *times, layer["tokens"], tuple(layer["rows"]))


def growth(
    before: Sequence[Row], after: Sequence[Row], group: GroupName, key: str
) -> dict[str, int]:
    """Returns by layer how much a number of the group's handles grew."""
    grown = collections.Counter[str]()
    for handles, sign in ((after, 1), (before, -1)):
        for handle in handles:
            if group_of(handle) == group:
                grown[handle["layer"]] += sign * int(handle[key])
    return {layer: max(0, count) for layer, count in grown.items()}


def by_group(intervals: Iterable[Interval]) -> dict[GroupName, list[Interval]]:
    """Groups intervals by group, in the order of the ranks."""
    found: dict[GroupName, list[Interval]] = {}
    for one in intervals:
        found.setdefault(one.group, []).append(one)
    return found


@dataclasses.dataclass(frozen=True)
class Slow:
    """The rank for which the others of a group waited.

    Attributes:
        share: share of the time, 0 to 1, that the others waited for it, on average.
        op, layer: where they waited longest.
    """

    world_rank: int
    share: float
    op: str
    layer: str

    @property
    def message(self) -> str:
        layer = f" of layer {shown(self.layer)}" if self.layer else ""
        return (
            f"rank {self.world_rank} holds the others up for {100 * self.share:.1f}% of the time, "
            f"most in {self.op.lower()}{layer}"
        )


def held_up(group: Sequence[Interval]) -> dict[int, float]:
    """Returns by rank the average share of time that other ranks waited for it."""
    waited: dict[int, float] = collections.defaultdict(float)
    ends = _ends(group)
    for one in group:
        for (op, peer), seconds in one.waits_s.items():
            charged = ends.get(one.world_rank, peer) if _goes_on(one, op, peer) else peer
            waited[charged] += one.share(seconds)
    others = max((len(op["peers"]) for one in group for op in one.row["ops"]), default=1) - 1
    return {rank: min(1.0, share / max(others, 1)) for rank, share in waited.items()}


def _goes_on(one: Interval, op: str, peer: int) -> bool:
    now = one.row["now"]
    return now["state"] in _WAITS and now["op"] == op and now["waiting_for"] == peer


def _ends(group: Sequence[Interval]) -> dict[int, int]:
    """Follows chains of waiting ranks to the last rank, for which all of them wait."""
    waits_for = {
        one.world_rank: one.row["now"]["waiting_for"]
        for one in group
        if one.row["now"]["state"] in _WAITS and one.row["now"]["waiting_for"] >= 0
    }
    ends = {}
    for rank, direct in waits_for.items():
        passed, end = {rank}, direct
        while end in waits_for and end not in passed:
            passed.add(end)
            end = waits_for[end]
        ends[rank] = direct if end in passed else end
    return ends


def slow_rank(group: Sequence[Interval]) -> Slow | None:
    """Returns the rank that held up its group more than any other; None if none stands out."""
    shares = held_up(group)
    if not shares:
        return None
    rank = max(shares, key=lambda one: shares[one])
    following = max((share for one, share in shares.items() if one != rank), default=0.0)
    if shares[rank] < SLOW_SHARE or following > _NEXT_SHARE * shares[rank]:
        return None
    ops: dict[str, float] = collections.defaultdict(float)
    layers: dict[str, float] = collections.defaultdict(float)
    for one in group:
        if one.world_rank == rank:
            continue
        for (op, _), seconds in one.waits_s.items():
            ops[op] += seconds
        for name, load in one.layers.items():
            layers[name] += load.wait_s
    return Slow(rank, shares[rank], _most(ops), _most(layers))


def silences(group: Sequence[Interval]) -> Iterator[str]:
    """Yields a line for each process that sends no heartbeats, with its ranks."""
    silent: dict[tuple[str, int], list[Interval]] = {}
    for one in group:
        if one.row["now"]["silent_s"] is not None:
            silent.setdefault((one.row["node"], one.row["now"]["pid"]), []).append(one)
    for (node, pid), ranks in silent.items():
        where = f" on node {node}" if node else ""
        numbers = ", ".join(str(one.world_rank) for one in ranks)
        since = duration(ranks[0].row["now"]["silent_s"])
        yield f"process {pid}{where} has sent no heartbeat for {since}: rank {numbers}"


def _most(seconds: Mapping[str, float]) -> str:
    return max(seconds, key=lambda name: seconds[name]) if seconds else ""


def layer_names(one: Row | Interval) -> list[str]:
    """Returns the layers that the rank has called."""
    if isinstance(one, Interval):
        return [name for name in one.layers if name]
    return [layer["layer"] for layer in one["layers"]]


def layer_rows(group: Iterable[Row | Interval], layer: str) -> dict[int, int]:
    """Returns rows by expert of one layer, summed over the ranks that have the expert."""
    rows = collections.Counter[int]()
    for one in group:
        if isinstance(one, Interval):
            load, first = one.layers.get(layer), one.row["first_expert"]
        else:
            named = [load_of(item) for item in one["layers"] if item["layer"] == layer]
            load, first = (named[0] if named else None), one["first_expert"]
        for expert, count in enumerate(load.rows if load is not None else ()):
            rows[first + expert] += count
    return dict(sorted(rows.items()))


def max_mean(rows: Sequence[int]) -> float | None:
    """Divides the largest by the mean: 1.0 if all are equal; None if all are 0."""
    total = sum(rows)
    return max(rows) * len(rows) / total if total else None


def jain(rows: Sequence[int]) -> float | None:
    """Computes Jain's index: 1.0 if all are equal, 1 / n if one has all rows."""
    squares = sum(count * count for count in rows)
    return sum(rows) ** 2 / (len(rows) * squares) if squares else None
