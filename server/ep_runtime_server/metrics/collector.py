"""Collects series from the state that `ep-runtime status`, `groups` and `handles` show.

Runs on the event loop in short turns. Keeps no values between scrapes, so the series of a closed
group end with it, and all scrapers see the same values.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import platform
import socket
import time

import ep_runtime
from ep_runtime import board_records
from ep_runtime.specs import DTYPE_BYTES
from ep_runtime.v1 import session_service_pb2
from ep_runtime_server.base.clock import paced
from ep_runtime_server.callers.quotas import Usage
from ep_runtime_server.callers.sessions import SessionState
from ep_runtime_server.groups.fsm import State
from ep_runtime_server.groups.record import GroupRecord
from ep_runtime_server.memory.windows import WindowState
from ep_runtime_server.metrics import boards
from ep_runtime_server.metrics.catalogue import GROUP, METRICS, Sheet
from ep_runtime_server.nodes.membership import Standing
from ep_runtime_server.nodes.registry import NodeState
from ep_runtime_server.runtime import Runtime

# Limit of series of one user's groups and layers.
MAX_SERIES_PER_USER = 50_000

_DAEMON_STATES = ("SERVING", "DRAINING", "RECOVERING")
_GROUP_STATES = [state.value for state in State if state is not State.CLOSED]
_MEMORY_STATES = {
    "LEASED": (WindowState.LEASED,),
    "RETAINED": (WindowState.RETAINED,),
    "QUARANTINED": (WindowState.QUARANTINED, WindowState.RELEASING),
}
_SERIES_OF_GROUP = sum(metric.labels[: len(GROUP)] == GROUP for metric in METRICS.values()) + len(
    _GROUP_STATES
)


class Collector:
    """Collects the daemon's series; with `detail`, also of each layer's ranks and experts."""

    def __init__(self, runtime: Runtime, *, detail: bool) -> None:
        cluster = runtime.cluster
        self._runtime = runtime
        self._node = socket.gethostname() if cluster is None else cluster.settings.node
        self._detail = detail

    async def collect(self) -> Sheet:
        """Reads the current values of all series."""
        started_s = time.monotonic()
        answer = Sheet(0)
        self._put_daemon(answer)
        self._put_memory(answer)
        self._put_cluster(answer)
        await self._put_users(answer)
        by_user: dict[int, Sheet] = collections.defaultdict(lambda: Sheet(MAX_SERIES_PER_USER))
        left_out = {"groups": 0, "layers": 0}
        async for group in paced(self._runtime.groups.all()):
            sheet = by_user[group.owner.uid]
            ranks = len(group.local_ranks)
            of_group = _SERIES_OF_GROUP + boards.SERIES_OF_OPS
            if sheet.fits(of_group + boards.SERIES_OF_RANK * ranks):
                left_out["layers"] += await self._put_group(sheet, group)
            else:
                left_out["groups"] += 1
        for sheet in by_user.values():
            answer.take(sheet)
        for kind, count in left_out.items():
            answer.put("metrics_left_out", (self._node, kind), count)
        took_s = time.monotonic() - started_s
        answer.put("metrics_collection_seconds", (self._node,), took_s)
        return answer

    def _put_daemon(self, sheet: Sheet) -> None:
        runtime, node = self._runtime, (self._node,)
        groups, lag = runtime.groups.all(), runtime.loop_lag
        version = (ep_runtime.__version__, platform.python_version())
        sheet.put("build_info", (*node, *version), 1.0)
        sheet.put("healthy", node, float(not runtime.refusal))
        state = session_service_pb2.ServerState.Name(runtime.server_state)
        sheet.put_one_of("state", node, _DAEMON_STATES, state.removeprefix("SERVER_STATE_"))
        sheet.put("failing_tasks", node, len(runtime.supervisor.failing))
        sheet.put("loop_lag_max_seconds", node, lag.recent_worst_s)
        sheet.put("loop_lag_p99_seconds", node, lag.p99_s)
        sheet.put("loop_lag_worst_seconds", node, lag.worst_s)
        sheet.put("journal_bytes", node, runtime.journal.size_bytes)
        sheet.put("journal_failing", node, float(bool(runtime.journal.error)))
        with contextlib.suppress(OSError):
            sheet.put("journal_free_bytes", node, runtime.journal.free_bytes())
        for outcome in ("adopted", "awaited", "lost"):
            value = getattr(runtime.recovery, f"{outcome}_bytes")
            sheet.put("recovery_bytes", (*node, outcome), value)
        sessions = collections.Counter(session.state for session in runtime.sessions.all())
        for session_state in SessionState:
            sheet.put("sessions", (*node, session_state.value), sessions[session_state])
        states = collections.Counter(group.state.value for group in groups)
        for name in _GROUP_STATES:
            sheet.put("groups", (*node, name), states[name])
        sheet.put("layers", node, sum(group.layers.num_layers for group in groups))
        sheet.put("handles", node, sum(group.layers.num_handles for group in groups))

    def _put_cluster(self, sheet: Sheet) -> None:
        """Puts the series of the daemon's cluster, if it has one."""
        cluster, node = self._runtime.cluster, (self._node,)
        if cluster is None:
            return
        standings = [standing.value for standing in Standing]
        sheet.put_one_of("cluster_link", node, standings, cluster.link.value)
        states = collections.Counter(seen.state for seen in cluster.view())
        for state in NodeState:
            sheet.put("cluster_nodes", (*node, state.value), states[state])
        for path, left_s in cluster.certificates.left() if cluster.certificates else ():
            sheet.put("certificate_seconds", (*node, path), left_s)

    async def _put_users(self, sheet: Sheet) -> None:
        """Puts each user's use and limits, except of GPU memory, whose limit is per GPU."""
        most = dataclasses.asdict(self._runtime.quotas.limits)
        limited = [f.name for f in dataclasses.fields(Usage) if f.name != "gpu_bytes"]
        for what in limited:
            sheet.put("user_limit", (self._node, what), most[what])
        async for uid in paced(self._runtime.users()):
            used = dataclasses.asdict(self._runtime.usage(uid))
            for what in limited:
                sheet.put("user_used", (self._node, str(uid), what), used[what])

    def _put_memory(self, sheet: Sheet) -> None:
        pool = self._runtime.pool
        for device in pool.devices():
            where = (self._node, device.name)
            sheet.put("windows_limit_bytes", where, device.limit_bytes)
            for name, states in _MEMORY_STATES.items():
                sheet.put("windows_bytes", (*where, name), pool.used_bytes(device.name, *states))

    async def _put_group(self, sheet: Sheet, group: GroupRecord) -> int:
        """Puts a group's series; returns how many of its layers did not fit."""
        owner, now_s = group.owner, self._runtime.clock.monotonic_s()
        labels = (self._node, str(owner.uid), owner.job, owner.name)
        self._put_settings(sheet, group, labels)
        self._put_state(sheet, group, labels, now_s)
        await boards.put_ranks(sheet, group, labels, now_s)
        await boards.put_ops(sheet, group, labels)
        return await boards.put_layers(sheet, group, labels, now_s, detail=self._detail)

    def _put_settings(self, sheet: Sheet, group: GroupRecord, labels: boards.Labels) -> None:
        spec = group.spec
        nccl_version, _ = self._runtime.unique_ids.state_of(group)
        about = (spec.transport, spec.on_overflow, str(spec.workspace), nccl_version)
        sheet.put("group_info", (*labels, *about), 1.0)
        sheet.put("group_ranks", labels, spec.world_size)
        sheet.put("group_experts", labels, spec.num_experts)
        sheet.put("group_capacity_rows", labels, spec.recv_capacity_per_rank)
        row_bytes = spec.hidden_size * DTYPE_BYTES[spec.max_token_dtype]
        sheet.put("group_row_bytes", labels, row_bytes)
        for rank, uuid in group.uuids.items():
            index = self._runtime.pool.gpu_index(uuid)
            gpu = (uuid, "" if index is None else str(index))
            sheet.put("rank_gpu_info", (*labels, str(rank), *gpu), 1.0)

    def _put_state(
        self, sheet: Sheet, group: GroupRecord, labels: boards.Labels, now_s: float
    ) -> None:
        windows = group.windows
        sheet.put_one_of("group_state", labels, _GROUP_STATES, group.state.value)
        sheet.put("group_generation", labels, group.generation)
        sheet.put("group_ranks_missing", labels, len(group.missing_ranks))
        sheet.put("group_ranks_lost", labels, len(group.lost_ranks))
        held = windows.size_bytes if windows is not None else 0
        sheet.put("group_windows_bytes", labels, held)
        left_s = 0.0
        if group.state is State.RETAINED and group.retained_until_s is not None:
            left_s = max(0.0, group.retained_until_s - now_s)
        sheet.put("group_retained_seconds", labels, left_s)
        if windows is not None and windows.board is not None:
            failures = board_records.read_failures(windows.board)
            sheet.put("group_failed_runs_total", labels, failures)
