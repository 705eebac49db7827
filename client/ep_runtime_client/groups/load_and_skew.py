"""Load and skew of one group, as dataclasses of arrays."""

from __future__ import annotations

import dataclasses
import threading
import time
from typing import TYPE_CHECKING, Any

from ep_runtime import specs
from ep_runtime_client.daemons.client import DaemonClient

if TYPE_CHECKING:
    import numpy as np

    from ep_runtime_client.readers import tallies


@dataclasses.dataclass(frozen=True, eq=False)
class LayerLoad:
    """The rows that one layer's experts received since the group was formed.

    Attributes:
        rows: rows of all experts.
        experts: int64 [E], rows by expert; empty in a group over several nodes, which does not
            count by expert.
        ranks: int64 [world size], rows by world rank.
        max_mean: rows of the fullest expert over the mean; None without rows by expert.
        jain: Jain's index, 1 if even and 1 / E if one expert has all rows; None as above.
        fullest: the expert with the most rows; None as above.
        dropped: rows over capacity.
        extra_chunks: chunks of its calls after each call's first chunk.
    """

    rows: int
    experts: np.ndarray
    ranks: np.ndarray
    max_mean: float | None
    jain: float | None
    fullest: int | None
    dropped: int
    extra_chunks: int


@dataclasses.dataclass(frozen=True, eq=False)
class GroupLoad:
    """How evenly the experts of a group are loaded; `Group.load` returns it.

    Attributes:
        layers: by name, "stack[i]" for a layer of a stack; only layers that were called.
        computed: int64 [world size], rows that each rank computed, over all layers. They differ
            from the layers' `ranks` if experts have copies (`spare_experts`).
        missing: nodes that did not answer, whose ranks are not counted.
    """

    layers: dict[str, LayerLoad]
    computed: np.ndarray
    missing: tuple[str, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class OpSkew:
    """Which ranks wait in one op, and for which rank. W is the world size.

    Attributes:
        calls_s: calls of a rank per second.
        mean_ms: milliseconds per call; None without a call.
        wait_share: share of the time that ranks waited in the op, on average.
        peer: the rank that others waited for most; None if no rank waited.
        peer_share: share of the time that a rank waited for `peer`, on average.
        late_ms: milliseconds that `peer` arrived later, per call.
        waits: f64 [W, W], share of the time that a rank (row) waited for a peer (column).
        arrivals_ms: f64 [W, W], by how much a peer came later than a rank, per call.
    """

    calls_s: float
    mean_ms: float | None
    wait_share: float
    peer: int | None
    peer_share: float | None
    late_ms: float | None
    waits: np.ndarray
    arrivals_ms: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class GroupSkew:
    """Which rank the others of a group wait for; `Group.skew` returns it.

    Attributes:
        elapsed_s: the measured time; all shares are shares of it.
        slow: the world rank that holds the others up for more than 2% of the time; or None.
        message: who is slow, by how much and where; "" if nobody is.
        holds_share: f64 [world size], share of the time that others waited for each rank.
        ops: by name, such as "DISPATCH"; only ops that were called.
        missing: nodes that did not answer, whose ranks are left out.
    """

    elapsed_s: float
    slow: int | None
    message: str
    holds_share: np.ndarray
    ops: dict[str, OpSkew]
    missing: tuple[str, ...]


class LoadAndSkew:
    """Reads load and skew of one group from its boards."""

    def __init__(self, client: DaemonClient, spec: specs.GroupSpec, generation: int) -> None:
        self._client, self._spec, self._generation = client, spec, generation
        self._formed_s = time.monotonic()
        self._lock = threading.Lock()
        self._before: tallies.BoardSample | None = None

    def _sample(self) -> tallies.BoardSample:
        from ep_runtime_client.readers import admin_service, tallies

        if self._spec.transport == "xla":
            raise NotImplementedError(
                f"group {self._spec.name!r} has transport='xla', whose calls no board counts; "
                "return_stats=True of ep.moe counts its rows"
            )
        place, timeout_s, name = self._client.place, self._client.timeout_s, self._spec.name

        def read(control: Any) -> tallies.BoardSample:
            told = control.metadata
            daemon = admin_service.Source(
                place.directory, control.channel, timeout_s, metadata=told
            )
            return tallies.sample_boards(daemon, name, None)

        found = self._client.run(read)
        ours = {key: row for key, row in found.ranks.items() if self._is_ours(row)}
        return dataclasses.replace(found, ranks=ours)

    def _is_ours(self, row: tallies.Row) -> bool:
        return bool((row["job"], row["generation"]) == (self._client.job, self._generation))

    def load(self) -> GroupLoad:
        """Like `Group.load`."""
        import numpy as np

        from ep_runtime_client.readers import figures, tallies

        seen = self._sample()
        ranks = [*seen.ranks.values()]
        key = tallies.group_of(ranks[0]) if ranks else tallies.GroupName(-1, "", "")
        counted = ("rows", "dropped_rows", "rounds")
        grown = {what: tallies.growth([], seen.handles, key, what) for what in counted}
        layers = {}
        for name in dict.fromkeys(name for row in ranks for name in tallies.layer_names(row)):
            found = figures.load_of(ranks, name, grown["rows"].get(name, 0))
            by_rank = np.zeros(self._spec.world_size, np.int64)
            for row in ranks:
                by_rank[row["world_rank"]] = sum(tallies.layer_rows([row], name).values())
            layers[name] = LayerLoad(
                experts=np.array(found["experts"], np.int64),
                ranks=by_rank,
                dropped=grown["dropped_rows"].get(name, 0),
                extra_chunks=grown["rounds"].get(name, 0),
                **{each: found[each] for each in ("rows", "max_mean", "jain", "fullest")},
            )
        computed = np.zeros(self._spec.world_size, np.int64)
        for row in ranks:
            computed[row["world_rank"]] = row["rows"]
        return GroupLoad(layers, computed, _missing(seen))

    def skew(self) -> GroupSkew:
        """Like `Group.skew`."""
        from ep_runtime_client.readers import figures, tallies

        with self._lock:
            seen = self._sample()
            before, self._before = self._before or self._at_start(seen), seen
        group = tallies.between(before, seen)
        slow, holds = tallies.slow_rank(group), tallies.held_up(group)
        ops = {}
        for op in figures.ops(group, None):
            found = figures.skew_of(group, op)
            del found["op"]
            for what in ("waits", "arrivals_ms"):
                found[what] = self._square(figures.matrix(group, op, what))
            ops[op] = OpSkew(**found)
        return GroupSkew(
            elapsed_s=max((one.elapsed_s for one in group), default=0.0),
            slow=None if slow is None else slow.world_rank,
            message="" if slow is None else slow.message,
            holds_share=self._square({0: holds})[0],
            ops=ops,
            missing=_missing(seen),
        )

    def _at_start(self, seen: tallies.BoardSample) -> tallies.BoardSample:
        """Returns counters as of when the group formed, on the clock of the node that counts."""
        elapsed_s = time.monotonic() - self._formed_s
        nothing = {"calls": 0, "rows": 0, "dropped_rows": 0, "ops": (), "layers": ()}
        still = {"state": "", "waiting_for": -1, "since_s": 0.0}
        ranks: dict[tuple[Any, ...], tallies.Row] = {
            key: {**row, **nothing, "now": still, "read_s": row["read_s"] - elapsed_s}
            for key, row in seen.ranks.items()
        }
        return dataclasses.replace(seen, ranks=ranks)

    def _square(self, cells: dict[int, dict[int, float]]) -> np.ndarray:
        """Returns a matrix [W, W] by rank and peer; 0 for missing cells."""
        import numpy as np

        found = np.zeros((self._spec.world_size, self._spec.world_size))
        for rank, of_peers in cells.items():
            for peer, value in of_peers.items():
                found[rank, peer] = value
        return found


def _missing(seen: tallies.BoardSample) -> tuple[str, ...]:
    return tuple(str(node["node"]) for node in seen.missing)
