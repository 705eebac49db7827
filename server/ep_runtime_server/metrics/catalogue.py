"""The table of all exported metrics, which code, docs and dashboards must match, and a scrape's
values of them.

Names end in their unit, or in `_total` for counters. A counter is read from a group's board, so it
restarts at 0 in a new generation of the group, as counters do when a process restarts.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable

from ep_runtime.board_records import BUCKET_BOUNDS_S

PREFIX = "ep_runtime_"
NODE = ("node",)
GROUP = (*NODE, "uid", "job", "group")  # identifies a group at the daemon
LAYER = (*GROUP, "layer")
RANK = (*GROUP, "rank")
OP = (*GROUP, "op")
COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"


@dataclasses.dataclass(frozen=True)
class Metric:
    """One metric of the catalogue.

    Args:
        name: the name without PREFIX.
        kind: COUNTER, GAUGE or HISTOGRAM.
        labels: names of the labels, in the order of their values.
        help: a description for users.
        detail: exported only with `serve --metrics-detail`.
    """

    name: str
    kind: str
    labels: tuple[str, ...]
    help: str
    detail: bool = False

    @property
    def full_name(self) -> str:
        """Returns the exported name."""
        return PREFIX + self.name


def _gauge(name: str, labels: tuple[str, ...], text: str) -> Metric:
    return Metric(name, GAUGE, labels, text)


def _counter(name: str, labels: tuple[str, ...], text: str, *, detail: bool = False) -> Metric:
    return Metric(name, COUNTER, labels, text, detail)


def _histogram(name: str, labels: tuple[str, ...], text: str) -> Metric:
    return Metric(name, HISTOGRAM, labels, text)


_ALL = (
    # Of the daemon
    _gauge("build_info", (*NODE, "version", "python"), "Always 1: versions of the daemon"),
    _gauge("healthy", NODE, "1 if the health service answers SERVING"),
    _gauge("state", (*NODE, "state"), "1 for the daemon's current state"),
    _gauge("failing_tasks", NODE, "The daemon's background tasks that fail now"),
    _gauge("loop_lag_max_seconds", NODE, "Longest delay of the event loop in the last minute"),
    _gauge("loop_lag_p99_seconds", NODE, "99th percentile of delays in the last minute"),
    _gauge("loop_lag_worst_seconds", NODE, "Longest delay of the loop since the daemon started"),
    _gauge("journal_bytes", NODE, "Size of the journal"),
    _gauge("journal_failing", NODE, "1 while the journal cannot be written"),
    _gauge("journal_free_bytes", NODE, "Free bytes of the journal's file system"),
    _gauge("recovery_bytes", (*NODE, "outcome"), "Memory from before the last restart, by outcome"),
    _gauge("cluster_link", (*NODE, "state"), "1 for the state of the link to the coordinator"),
    _gauge("cluster_nodes", (*NODE, "state"), "Nodes by state, as this daemon sees them"),
    _gauge(
        "certificate_seconds", (*NODE, "path"), "Time until the certificate expires; negative after"
    ),
    _gauge("user_used", (*NODE, "uid", "what"), "The user's use of a resource: bytes, or a count"),
    _gauge("user_limit", (*NODE, "what"), "Limit of the resource for each user"),
    _gauge("sessions", (*NODE, "state"), "Processes by the state of their session"),
    _gauge("groups", (*NODE, "state"), "Groups by state"),
    _gauge("layers", NODE, "Registered layers, each layer of a stack counted"),
    _gauge("handles", NODE, "Handles of all layers"),
    _gauge("windows_bytes", (*NODE, "device", "state"), "Windows and boards on a device, by state"),
    _gauge("windows_limit_bytes", (*NODE, "device"), "Limit of windows on a device"),
    _gauge("metrics_collection_seconds", NODE, "Time to collect these metrics"),
    _gauge(
        "metrics_left_out", (*NODE, "kind"), "Groups and layers left out because there are too many"
    ),
    # Of each group
    _gauge(
        "group_info",
        (*GROUP, "transport", "on_overflow", "workspace", "nccl"),
        "Always 1: settings of create_group, and NCCL's version if used",
    ),
    _gauge("group_state", (*GROUP, "state"), "1 for the group's current state"),
    _gauge("group_generation", GROUP, "Grows whenever the group forms again"),
    _gauge("group_ranks", GROUP, "World ranks"),
    _gauge("group_ranks_missing", GROUP, "World ranks that no process claims"),
    _gauge("group_ranks_lost", GROUP, "World ranks whose process died"),
    _gauge("group_experts", GROUP, "Experts of one EP group"),
    _gauge("group_capacity_rows", GROUP, "Rows that one slab holds"),
    _gauge("group_row_bytes", GROUP, "Bytes of the group's widest row"),
    _gauge("group_windows_bytes", GROUP, "The group's windows and board on this node"),
    _gauge(
        "group_retained_seconds", GROUP, "Time until a group without processes is freed; else 0"
    ),
    _counter("group_failed_runs_total", GROUP, "Failed runs that processes reported to each other"),
    _gauge("group_handles", (*GROUP, "state"), "Handles by state"),
    _gauge("group_load_max_mean_ratio", GROUP, "Rows received: fullest rank divided by the mean"),
    # Of each op
    _histogram("op_seconds", OP, "Time of each call, over all ranks of this node"),
    _histogram("op_wait_seconds", OP, "Part of that time spent waiting for peers"),
    # Of each layer
    _counter("tokens_total", LAYER, "Tokens that ranks of this node sent to the layer's experts"),
    _gauge(
        "layer_expert_load_max_mean_ratio",
        LAYER,
        "Rows of this node's experts: fullest divided by the mean",
    ),
    _counter("calls_total", LAYER, "Calls on the layer's handles, each counted once on a node"),
    _counter("rows_total", LAYER, "Rows that the layer's dispatches brought to this node's ranks"),
    _counter("dropped_rows_total", LAYER, "Rows that did not fit their rank's capacity"),
    _counter("rounds_total", LAYER, "Chunks beyond a call's first: the workspace was too small"),
    _gauge(
        "layer_load_max_mean_ratio", LAYER, "As group_load_max_mean_ratio; only for groups on GPUs"
    ),
    _gauge("layer_last_call_seconds", LAYER, "Time since the layer's last call"),
    # Of each rank
    _gauge(
        "rank_gpu_info",
        (*RANK, "device", "gpu"),
        "Always 1: UUID and index of the rank's GPU, as DCGM's labels UUID and gpu",
    ),
    _counter("rank_calls_total", RANK, "Calls that the rank has finished"),
    _counter("rank_rows_total", RANK, "Rows that dispatches brought to the rank"),
    _counter("rank_dropped_rows_total", RANK, "Rows that did not fit the rank's capacity"),
    _gauge(
        "rank_state", (*RANK, "state", "op"), "1 for the rank's current state; others are absent"
    ),
    _gauge("rank_open_calls", RANK, "Calls that the rank has begun and not finished"),
    _gauge("rank_last_call_seconds", RANK, "Time since the rank finished a call"),
    _gauge("rank_wait_seconds", RANK, "How long the rank has been waiting; 0 if it is not"),
    _counter("rank_waited_seconds_total", RANK, "Time that the rank's calls waited for peers"),
    _counter(
        "peer_waited_seconds_total", RANK, "Time that calls of other ranks waited for this one"
    ),
    _gauge("peer_wait_seconds", RANK, "How long others have waited for this rank; 0 if none do"),
    _gauge("peer_waiters", RANK, "Ranks that wait for this one, also through other ranks"),
    _gauge(
        "late_rank_seconds",
        (*RANK, "layer", "op"),
        "peer_wait_seconds with the waiters' layer and op; only after 10 s",
    ),
    # Of each rank, by layer
    _counter(
        "layer_rank_rows_total",
        (*LAYER, "rank"),
        "Rows that the layer's dispatches brought to the rank; only for groups on GPUs",
        detail=True,
    ),
    _counter(
        "layer_rank_dropped_rows_total",
        (*LAYER, "rank"),
        "The layer's rows that did not fit the rank's capacity; only for groups on GPUs",
        detail=True,
    ),
    # Of each expert
    _counter(
        "expert_rows_total",
        (*LAYER, "expert"),
        "The layer's rows for the expert, for experts of this node's ranks",
        detail=True,
    ),
)
METRICS = {metric.name: metric for metric in _ALL}
# Bounds of histograms: every other bound of the board; the last bucket has no bound.
BOUNDS_S = BUCKET_BOUNDS_S[::2]
SERIES_OF_HISTOGRAM = len(BOUNDS_S) + 3  # plus the bucket without a bound, sum and count


@dataclasses.dataclass(frozen=True)
class Histogram:
    """A histogram's series.

    `counts` has the number of values up to each of BOUNDS_S, then of all values; `sum_s` is the
    sum of the values.
    """

    counts: tuple[int, ...]
    sum_s: float


Row = tuple[tuple[str, ...], float | Histogram]


class Sheet:
    """Series by metric. Callers must ask `fits` to stay below `limit` series."""

    def __init__(self, limit: int) -> None:
        self.rows: dict[str, list[Row]] = {}
        self.size = 0
        self._limit = limit

    def fits(self, more: int) -> bool:
        """Returns whether `more` series stay within the limit."""
        return self.size + more <= self._limit

    def put(self, name: str, labels: tuple[str, ...], value: float) -> None:
        """Adds one series; `labels` must be in the catalogue's order."""
        assert len(labels) == len(METRICS[name].labels), name
        self.rows.setdefault(name, []).append((labels, value))
        self.size += 1

    def put_histogram(
        self, name: str, labels: tuple[str, ...], counts: Iterable[int], sum_s: float
    ) -> None:
        """Adds one histogram; `counts` are of the board's buckets."""
        assert len(labels) == len(METRICS[name].labels), name
        up_to = [*itertools.accumulate(counts)]
        row = Histogram((*up_to[: len(BUCKET_BOUNDS_S) : 2], up_to[-1]), sum_s)
        self.rows.setdefault(name, []).append((labels, row))
        self.size += SERIES_OF_HISTOGRAM

    def put_one_of(
        self, name: str, labels: tuple[str, ...], states: Iterable[str], now: str
    ) -> None:
        """Adds one series per state: 1 for the current state `now`, 0 for the others."""
        for state in states:
            self.put(name, (*labels, state), float(state == now))

    def take(self, other: Sheet) -> None:
        """Adds the series of another sheet, without checking the limit."""
        for name, rows in other.rows.items():
            self.rows.setdefault(name, []).extend(rows)
        self.size += other.size
