"""Answers of a daemon's admin service that are always the same, and hard to show: a cluster of two
nodes, long names, many processes, GPUs, a late rank. For tests of what the commands write."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from google.protobuf import timestamp_pb2

from ep_runtime import wire
from ep_runtime.allowed_names import quoted
from ep_runtime.v1 import admin_service_pb2 as pb
from ep_runtime.v1 import node_service_pb2, types_pb2
from ep_runtime.wire import duration as seconds
from ep_runtime_client.cli.daemon import source

GROUP = "pretrain-mixture-of-experts"
JOB = "coordinator.cluster.local:12345"
LAYER = "decoder/block17/moe"
SESSION = "s-0123456789ab"
GPU = "GPU-6f1c2a3b-1111-2222-3333-444455556666"
NODES = ("dgx-h200-rack17-node03", "dgx-h200-rack17-node04")
LATE_TEXT = (
    f"ranks 0, 1, 2 of group {quoted(GROUP)} wait for rank 3 (process 4003, index 3) in dispatch "
    f"of layer {quoted(LAYER)} for 17 s"
)
GIB = 1 << 30


def _whose() -> dict[str, Any]:
    return {"group": GROUP, "job": JOB, "uid": 1000, "generation": 7}


def _late() -> pb.LateRank:
    return pb.LateRank(
        **_whose(),
        world_rank=3,
        pid=4003,
        process_index=3,
        since=seconds(17.3),
        waiting_ranks=[0, 1, 2],
        layer=LAYER,
        op="DISPATCH",
        handle=0,
        message=LATE_TEXT,
    )


def _node(name: str, *, coordinates: bool) -> node_service_pb2.NodeInfo:
    identity = node_service_pb2.NodeIdentity(
        node=name, address="10.17.3.103:7700", host_name=f"{name}.cluster.local"
    )
    return node_service_pb2.NodeInfo(
        identity=identity, state="NODE_STATE_JOINED", coordinator=coordinates, since=seconds(90000)
    )


def _status() -> pb.GetStatusResponse:
    pools = [
        pb.PoolStatus(
            device=device,
            limit_bytes=141 * GIB,
            leased_bytes=97 * GIB,
            retained_bytes=11 * GIB,
            quarantined_bytes=3 * GIB,
            num_buffers=129,
        )
        for device in ("host", GPU)
    ]
    cluster = pb.ClusterStatus(
        node=NODES[0],
        coordinator="10.17.3.103:7700",
        link="CLUSTER_LINK_COORDINATOR",
        since=seconds(90000),
        epoch=41,
        nodes=[_node(name, coordinates=name == NODES[0]) for name in NODES],
        certificates=[
            pb.CertificateStatus(path="/etc/ep-runtime/node03.pem", left=seconds(29 * 86400)),
            pb.CertificateStatus(path="/etc/ep-runtime/ca.pem", left=seconds(31 * 86400)),
        ],
    )
    return pb.GetStatusResponse(
        server_version="0.2.0",
        incarnation="0f" * 16,
        pid=977,
        directory="/run/ep-runtime",
        uptime=seconds(90000),
        state="SERVER_STATE_SERVING",
        num_sessions=64,
        num_groups=2,
        num_layers=122,
        num_handles=244,
        pools=pools,
        num_fds=4117,
        max_fds=524288,
        rss_bytes=171 << 20,
        loop_lag=seconds(0.004),
        loop_lag_p99=seconds(0.001),
        loop_lag_worst=seconds(0.02),
        late_ranks=[_late()],
        silent_processes=[
            pb.SilentProcess(
                session_id=SESSION,
                job=JOB,
                uid=1000,
                pid=4002,
                process_index=2,
                since=seconds(11),
                process_state="D",
            )
        ],
        cluster=cluster,
        users=[
            pb.UserUsage(
                uid=1000,
                num_sessions=64,
                num_groups=2,
                num_layers=122,
                host_bytes=97 * GIB,
                num_fds=4100,
                journal_bytes=1 << 20,
                gpu_bytes=776 * GIB,
            )
        ],
        user_limits=pb.UserLimits(
            max_sessions=1024,
            max_groups=4096,
            max_layers=65536,
            max_host_bytes=512 * GIB,
            max_fds=262144,
            max_journal_bytes=64 << 20,
            max_gpu_bytes=0,
        ),
        journal=pb.JournalStatus(bytes=1 << 20),
    )


def _groups() -> pb.ListGroupsResponse:
    spec = types_pb2.GroupSpec(
        name=GROUP,
        mesh_axes=[types_pb2.MeshAxis(name="dp", size=8), types_pb2.MeshAxis(name="ep", size=8)],
        ep_axis=["ep"],
        outer_axes=["dp"],
        num_experts=256,
        hidden_size=7168,
        spare_experts=2,
    )
    members = [
        types_pb2.GroupMember(world_rank=rank, session_id=SESSION, pid=4000 + rank, attached=True)
        for rank in range(64)
    ]
    group = types_pb2.Group(
        spec=spec,
        job=JOB,
        uid=1000,
        generation=7,
        state="GROUP_STATE_READY",
        window_bytes=12 * GIB,
        members=members,
    )
    row = pb.GroupInfo(
        group=group,
        num_layers=61,
        num_handles=122,
        total_bytes=768 * GIB,
        age=seconds(90000),
        late_ranks=[_late()],
        nccl_version="2.28.9",
        nccl_state="ready, 64 ranks",
        gpus=[pb.RankGpu(world_rank=3, device=GPU, gpu_index=5)],
    )
    return pb.ListGroupsResponse(groups=[row])


def _layers() -> pb.AdminServiceListLayersResponse:
    spec = types_pb2.LayerSpec(name=LAYER, top_k=8, alignment=128, in_flight=2)
    layer = types_pb2.RegisteredLayer(spec=spec, base_id=17, handle_base=34)
    row = pb.LayerInfo(layer=layer, **_whose())
    return pb.AdminServiceListLayersResponse(layers=[row])


def _handles() -> pb.ListHandlesResponse:
    row = pb.HandleInfo(
        layer=LAYER,
        handle=1,
        index=35,
        **_whose(),
        pids=range(4000, 4064),
        state="BUSY",
        last_op="COMBINE_BACKWARD",
        epoch=123456,
        lane=1,
        calls=123456,
        rows=1 << 40,
        dropped_rows=17,
        age=seconds(0.2),
    )
    return pb.ListHandlesResponse(handles=[row])


def _buffers() -> pb.ListBuffersResponse:
    row = pb.BufferInfo(
        buffer_id="b-1234",
        bytes=12 * GIB,
        device=GPU,
        kind="WINDOW_KIND_WINDOW",
        state="BUFFER_STATE_QUARANTINED",
        **_whose(),
        world_rank=3,
        mapped_by=range(4000, 4064),
        age=seconds(90000),
        gpu_index=5,
    )
    return pb.ListBuffersResponse(buffers=[row])


def _sessions() -> pb.ListSessionsResponse:
    living = pb.SessionInfo(
        session_id=SESSION,
        state="SESSION_STATE_SUSPECT",
        uid=1000,
        pid=4003,
        job=JOB,
        labels={"team": "nlp", "run": "2026-11-22T22-15-58"},
        client_version="0.2.0",
        groups=[GROUP, f"{GROUP}-2"],
        age=seconds(90000),
        since_heartbeat=seconds(11),
        progress=123456,
    )
    ended = pb.SessionInfo()
    ended.CopyFrom(living)
    ended.session_id, ended.pid = "s-ba9876543210", 3999
    ended.state, ended.labels["team"] = pb.SESSION_STATE_DEAD, "vision"
    ended.since_end.CopyFrom(seconds(75))
    return pb.ListSessionsResponse(sessions=[living, ended])


def _ranks() -> pb.ListRanksResponse:
    rows = [
        pb.RankInfo(
            **_whose(),
            world_rank=rank,
            pid=4000 + rank,
            state="WAITING" if rank < 3 else "RUNNING",
            op="DISPATCH",
            layer=LAYER,
            handle=0,
            epoch=123456,
            waiting_for=3 if rank < 3 else -1,
            since=seconds(17.3),
            silent=seconds(11) if rank == 2 else None,
        )
        for rank in range(4)
    ]
    return pb.ListRanksResponse(ranks=rows)


_reads = itertools.count(10_000_000)  # one per ms, for some hours


def _tallies(age_s: float = 0.0) -> pb.ListTalliesResponse:
    """Tallies of four ranks on two layers, which grow at every read; the others wait for rank 3."""
    reads = next(_reads) - int(1000 * age_s)
    rows = [_tally(now, reads) for now in _ranks().ranks]
    return pb.ListTalliesResponse(ranks=rows)


def _tally(now: pb.RankInfo, reads: int) -> pb.RankTally:
    wait_ns = reads * 400_000 if now.world_rank != 3 else 0
    times = {"calls": reads, "time_ns": reads * 700_000, "wait_ns": wait_ns}
    peers = [
        pb.PeerTally(
            world_rank=peer,
            arrival_ns=wait_ns if peer == 3 else 0,
            wait_ns=wait_ns if peer == 3 else 0,
        )
        for peer in range(4)
    ]
    experts = [reads * (1 + (expert % 7)) for expert in range(64)]
    return pb.RankTally(
        **_whose(),
        world_rank=now.world_rank,
        read=seconds(1000 + reads / 1000),
        now=now,
        calls=2 * reads,
        rows=reads * 8192,
        dropped_rows=reads,
        row_bytes=14336,
        device=GPU,
        first_expert=64 * now.world_rank,
        ops=[pb.OpTally(op=op, peers=peers, **times) for op in ("DISPATCH", "COMBINE_BWD")],
        layers=[
            pb.LoadTally(layer=layer, tokens=reads * 1024, rows=experts, **times)
            for layer in (LAYER, "decoder/block18/moe")
        ],
    )


def _events() -> pb.ListEventsResponse:
    kinds = ("session.hello", "group.ready", "rank.late")
    rows = [
        pb.EventInfo(
            sequence=1000 + number,
            time=timestamp_pb2.Timestamp(seconds=1_770_000_000 + number),
            kind=kind,
            session_id=SESSION,
            group=GROUP,
            message=LATE_TEXT,
            fields_json='{"uid": 1000, "client_pid": 4003, "world_rank": 3, "late_s": 17.3}',
        )
        for number, kind in enumerate(kinds)
    ]
    return pb.ListEventsResponse(events=rows)


ANSWERS = {
    "GetStatus": _status,
    "ListSessions": _sessions,
    "ListGroups": _groups,
    "ListLayers": _layers,
    "ListHandles": _handles,
    "ListBuffers": _buffers,
    "ListRanks": _ranks,
    "ListEvents": _events,
    "Drain": lambda: pb.DrainResponse(num_sessions=64),
    "Undrain": lambda: pb.UndrainResponse(was_drained=True),
    "Fence": lambda: pb.FenceResponse(groups=[GROUP]),
    "Reclaim": lambda: pb.ReclaimResponse(
        groups=[GROUP], freed_bytes=GIB, quarantined_bytes=767 * GIB
    ),
}


class FixedDaemon(source.Source):
    """Answers RPCs without a socket; every node gives the same answers."""

    def __init__(self, node: str = "") -> None:
        self.directory = Path("/run/ep-runtime")
        self._node = node
        self._timeout_s = 5.0

    def of_node(self, node: str) -> FixedDaemon:
        return FixedDaemon(node)

    def _send(self, method: str, request: Any, timeout_s: float) -> Any:
        if method == "ListTallies":
            return _tallies(wire.seconds(request.age))
        return ANSWERS[method]()


@contextlib.contextmanager
def open_source(address: str | None, *, timeout_s: float) -> Iterator[source.Source]:
    """Replaces `source.open_source`."""
    yield FixedDaemon()
