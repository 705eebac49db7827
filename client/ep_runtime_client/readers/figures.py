"""The numbers of `ep-runtime load` and `skew`, which `Group.load` and `Group.skew` return too."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

from ep_runtime_client.readers import tallies
from ep_runtime_client.readers.tallies import Interval


def load_of(ranks: Sequence[tallies.Row | Interval], name: str, rows: int) -> dict[str, Any]:
    """Computes how evenly a layer's experts are loaded, with the keys that `ep-runtime load` shows.

    `rows`: rows of the layer's handles, used if rows are not counted by expert.
    """
    by_expert = tallies.layer_rows(ranks, name)
    if rows and not any(by_expert.values()):
        by_expert = {}
    experts = [*by_expert.values()]
    by_rank = [sum(tallies.layer_rows([one], name).values()) for one in ranks]
    return {
        "layer": name,
        "rows": sum(experts) if experts else rows,
        "max_mean": tallies.max_mean(experts) if experts else None,
        "jain": tallies.jain(experts) if experts else None,
        "fullest": max(by_expert, key=lambda expert: by_expert[expert]) if sum(experts) else None,
        "ranks_max_mean": tallies.max_mean(by_rank),
        "unused": sum(not count for count in experts),
        "num_experts": len(experts),
        "experts": experts,
    }


def copies_of(ranks: Sequence[tallies.Row | Interval]) -> dict[str, Any] | None:
    """Computes how copies of experts evened out rows over ranks, with the keys of `load`'s JSON.

    It compares rows of each rank's own experts with rows that the rank computed, summed over calls
    and layers. None without rows by expert.
    """
    own = [
        sum(sum(tallies.layer_rows([one], name).values()) for name in tallies.layer_names(one))
        for one in ranks
    ]
    computed = [one.rows if isinstance(one, Interval) else one["rows"] for one in ranks]
    totals = sum(own), sum(computed)
    if not all(totals):
        return None
    shares = [(a / totals[0], b / totals[1]) for a, b in zip(own, computed, strict=True)]
    return {
        "own_max_mean": tallies.max_mean(own),
        "computed_max_mean": tallies.max_mean(computed),
        "moved_share": sum(abs(a - b) for a, b in shares) / 2,
    }


def ops(group: Sequence[Interval], wanted: str | None) -> list[str]:
    """Returns the ops that ranks called or wait in, in the order of a step."""
    found = dict.fromkeys(op for one in group for op, (calls, _) in one.ops.items() if calls)
    found |= dict.fromkeys(op for one in group for op, _ in one.waits_s)
    return [op for op in found if wanted in (None, op)]


def skew_of(group: Sequence[Interval], op: str) -> dict[str, Any]:
    """Returns waits and late arrivals of one op, with the keys of `ep-runtime skew`."""
    of_op = [one.ops.get(op, (0, 0.0)) for one in group]
    calls, seconds = sum(count for count, _ in of_op), sum(time_s for _, time_s in of_op)
    waits = matrix(group, op, "waits")
    by_peer: dict[int, float] = collections.defaultdict(float)
    for of_rank in waits.values():
        for rank, share in of_rank.items():
            by_peer[rank] += share
    others = max(len(group) - 1, 1)
    peer = max(by_peer, key=lambda rank: by_peer[rank], default=None)
    arrivals = matrix(group, op, "arrivals_ms").items()
    late = [] if peer is None else [of.get(peer, 0.0) for rank, of in arrivals if rank != peer]
    return {
        "op": op,
        "calls_s": sum(count / one.elapsed_s for one, (count, _) in zip(group, of_op, strict=True))
        / len(group),
        "mean_ms": 1000 * seconds / calls if calls else None,
        "wait_share": sum(sum(of_rank.values()) for of_rank in waits.values()) / len(group),
        "peer": peer,
        "peer_share": by_peer[peer] / others if peer is not None else None,
        "late_ms": sum(late) / len(late) if late else None,
    }


def matrix(group: Sequence[Interval], op: str | None, what: str) -> dict[int, dict[int, float]]:
    """Returns waits or arrivals by rank and peer; summed over all ops if `op` is None."""
    found: dict[int, dict[int, float]] = {}
    for one in group:
        seconds = one.waits_s if what == "waits" else one.arrivals_s
        cells: dict[int, float] = collections.defaultdict(float)
        for (of_op, peer), value in seconds.items():
            if op in (None, of_op):
                cells[peer] += value
        calls = sum(count for of_op, (count, _) in one.ops.items() if op in (None, of_op))
        found[one.world_rank] = {
            peer: one.share(value) if what == "waits" else 1000 * value / max(calls, 1)
            for peer, value in sorted(cells.items())
        }
    return found
