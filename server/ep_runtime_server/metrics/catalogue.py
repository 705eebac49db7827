"""Every metric that the endpoint exports: the table that code, docs and dashboards agree on.

Names end in their unit, counters in `_total`. A counter is a number of a group's board, so it
starts again at 0 under a new generation of the group, as one does when a process starts again.
"""

from __future__ import annotations

import dataclasses

PREFIX = "ep_runtime_"

NODE = ("node",)
GROUP = (*NODE, "uid", "job", "group")  # who owns a group, as the daemon tells groups apart
LAYER = (*GROUP, "layer")
RANK = (*GROUP, "rank")

OP = (*GROUP, "op")

COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"


@dataclasses.dataclass(frozen=True)
class Metric:
    """Args:
    name: without the prefix that all have.
    kind: COUNTER, GAUGE or HISTOGRAM.
    labels: in the order of their values.
    help: what it is, with what is special about it.
    detail: exported with `serve --metrics-detail` alone.
    """

    name: str
    kind: str
    labels: tuple[str, ...]
    help: str
    detail: bool = False

    @property
    def full_name(self) -> str:
        """As it is exported."""
        return PREFIX + self.name


def _gauge(name: str, labels: tuple[str, ...], text: str) -> Metric:
    return Metric(name, GAUGE, labels, text)


def _counter(name: str, labels: tuple[str, ...], text: str, *, detail: bool = False) -> Metric:
    return Metric(name, COUNTER, labels, text, detail)


def _histogram(name: str, labels: tuple[str, ...], text: str) -> Metric:
    return Metric(name, HISTOGRAM, labels, text)


_OF_DAEMON = (
    _gauge("build_info", (*NODE, "version", "python"), "Always 1: versions of the daemon"),
    _gauge("healthy", NODE, "1 where the health service says SERVING"),
    _gauge("state", (*NODE, "state"), "1 for the state that the daemon is in"),
    _gauge("failing_tasks", NODE, "Background tasks of the daemon that fail now"),
    _gauge("loop_lag_max_seconds", NODE, "Longest delay of the event loop in the last minute"),
    _gauge("loop_lag_p99_seconds", NODE, "99 of 100 delays of the last minute were not longer"),
    _gauge("loop_lag_worst_seconds", NODE, "Longest delay of the loop since the daemon started"),
    _gauge("journal_bytes", NODE, "Size of the journal"),
    _gauge("journal_failing", NODE, "1 while the journal cannot be written"),
    _gauge("journal_free_bytes", NODE, "What the journal's file system has left"),
    _gauge("recovery_bytes", (*NODE, "outcome"), "Memory of before the last restart, by outcome"),
    _gauge("cluster_link", (*NODE, "state"), "1 for how the daemon stands with its coordinator"),
    _gauge("cluster_nodes", (*NODE, "state"), "Nodes by state, as this daemon sees them"),
    _gauge(
        "certificate_seconds", (*NODE, "path"), "Time until the certificate ends; negative after"
    ),
    _gauge("user_used", (*NODE, "uid", "what"), "What the user holds: bytes, or a number"),
    _gauge("user_limit", (*NODE, "what"), "Most that a user may hold of it"),
    _gauge("sessions", (*NODE, "state"), "Processes by the state of their session"),
    _gauge("groups", (*NODE, "state"), "Groups by state"),
    _gauge("layers", NODE, "Registered layers, those of stacks counted one by one"),
    _gauge("handles", NODE, "Handles of all layers"),
    _gauge("windows_bytes", (*NODE, "device", "state"), "Windows and boards on a device, by state"),
    _gauge("windows_limit_bytes", (*NODE, "device"), "Most that windows may take on a device"),
    _gauge("metrics_collection_seconds", NODE, "How long it took to collect this answer"),
    _gauge("metrics_left_out", (*NODE, "kind"), "Groups and layers without series: too many"),
)

_OF_GROUP = (
    _gauge(
        "group_info",
        (*GROUP, "transport", "on_overflow", "workspace", "nccl"),
        "Always 1: settings of create_group, and the version of NCCL where it is used",
    ),
    _gauge("group_state", (*GROUP, "state"), "1 for the state that the group is in"),
    _gauge("group_generation", GROUP, "Grows whenever the group is formed again: a restart"),
    _gauge("group_ranks", GROUP, "World ranks"),
    _gauge("group_ranks_missing", GROUP, "World ranks that no process claims"),
    _gauge("group_ranks_lost", GROUP, "World ranks whose process died"),
    _gauge("group_experts", GROUP, "Experts of one EP group"),
    _gauge("group_capacity_rows", GROUP, "Rows that one slab receives at most"),
    _gauge("group_row_bytes", GROUP, "Bytes of the widest row that the group takes"),
    _gauge("group_windows_bytes", GROUP, "Its windows and board on this node"),
    _gauge("group_retained_seconds", GROUP, "Time left to a group without processes; 0 otherwise"),
    _counter("group_failed_runs_total", GROUP, "Failed runs that processes told each other of"),
    _gauge("group_handles", (*GROUP, "state"), "Handles by state"),
    _gauge("group_load_max_mean_ratio", GROUP, "Rows received: the fullest rank over the mean"),
)

_OF_OP = (
    _histogram("op_seconds", OP, "Time of a rank's call, of all ranks of this node together"),
    _histogram("op_wait_seconds", OP, "What of that time the call waited for peers"),
)

_OF_LAYER = (
    _counter("tokens_total", LAYER, "Tokens that ranks of this node sent to the layer's experts"),
    _gauge(
        "layer_expert_load_max_mean_ratio", LAYER, "Rows of experts here: the fullest over the mean"
    ),
    _counter("calls_total", LAYER, "Calls on the layer's handles, each counted once on a node"),
    _counter("rows_total", LAYER, "Rows that the layer's dispatches brought to ranks of this node"),
    _counter("dropped_rows_total", LAYER, "Rows that did not fit their rank's capacity"),
    _counter("rounds_total", LAYER, "Parts that calls ran beyond one: the workspace was too small"),
    _gauge(
        "layer_load_max_mean_ratio", LAYER, "As group_load_max_mean_ratio; of groups on GPUs alone"
    ),
    _gauge("layer_last_call_seconds", LAYER, "Time since the layer's last call"),
)

_OF_RANK = (
    _gauge(
        "rank_gpu_info",
        (*RANK, "device", "gpu"),
        "Always 1: UUID and index of the rank's GPU, as DCGM's labels UUID and gpu",
    ),
    _counter("rank_calls_total", RANK, "Calls that the rank has finished"),
    _counter("rank_rows_total", RANK, "Rows that dispatches brought to the rank"),
    _counter("rank_dropped_rows_total", RANK, "Rows that did not fit the rank's capacity"),
    _gauge("rank_state", (*RANK, "state", "op"), "1 for what the rank does now; others are absent"),
    _gauge("rank_open_calls", RANK, "Calls that the rank has begun and not finished"),
    _gauge("rank_last_call_seconds", RANK, "Time since the rank finished a call"),
    _gauge("rank_wait_seconds", RANK, "How long the rank has waited now; 0 where it does not"),
    _counter("rank_waited_seconds_total", RANK, "Time that the rank's calls waited for peers"),
    _counter(
        "peer_waited_seconds_total", RANK, "Time that calls of other ranks waited for this one"
    ),
    _gauge("peer_wait_seconds", RANK, "How long others have waited for this rank; 0 where none do"),
    _gauge("peer_waiters", RANK, "Ranks that wait for this one, by way of others too"),
    _gauge(
        "late_rank_seconds",
        (*RANK, "layer", "op"),
        "As peer_wait_seconds with what the first waits in; after 10 s alone",
    ),
)

_OF_RANK_AND_LAYER = (
    _counter(
        "layer_rank_rows_total",
        (*LAYER, "rank"),
        "Rows that dispatches of the layer brought to the rank; of groups on GPUs alone",
        detail=True,
    ),
    _counter(
        "layer_rank_dropped_rows_total",
        (*LAYER, "rank"),
        "Rows of the layer that did not fit the rank's capacity; of groups on GPUs alone",
        detail=True,
    ),
)

_OF_EXPERT = (
    _counter(
        "expert_rows_total",
        (*LAYER, "expert"),
        "Rows of the layer that the expert got, of experts of this node's ranks",
        detail=True,
    ),
)

METRICS = {
    metric.name: metric
    for metric in (
        *_OF_DAEMON,
        *_OF_GROUP,
        *_OF_OP,
        *_OF_LAYER,
        *_OF_RANK,
        *_OF_RANK_AND_LAYER,
        *_OF_EXPERT,
    )
}
