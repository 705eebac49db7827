"""Nodes and sessions that are callers alone: many of them in one event loop."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from pathlib import Path
from typing import Any

import grpc
from raw_client import hello

import ep_runtime
from ep_runtime import wire
from ep_runtime.v1 import node_service_pb2 as pb
from ep_runtime.v1 import session_service_pb2, session_service_pb2_grpc
from ep_runtime_server.base import limits
from ep_runtime_server.base.clock import SystemClock
from ep_runtime_server.nodes.peers import Peers
from ep_runtime_server.nodes.seal import Seal

CALL_S = 60.0


class SimulatedNode:
    """What a node's daemon says to the coordinator, without a daemon.

    Attributes:
        calls: that it made, by method.
        tells: those that it would make to other nodes, which are not there.
    """

    def __init__(self, number: int, coordinator: str, seal: Seal) -> None:
        self.name = f"node{number}"
        self.calls: Counter[str] = Counter()
        self.tells = 0
        self._number = number
        self._coordinator = coordinator
        self._peers = Peers(None, SystemClock(), seal)
        self._lease = ""
        self._version = 0

    async def _ask(self, method: str, request: Any) -> Any:
        self.calls[method] += 1
        return await self._peers.ask("", self._coordinator, method, request, within_s=CALL_S)

    async def join(self) -> None:
        identity = pb.NodeIdentity(
            node=self.name,
            node_id=f"{self._number:016x}",
            incarnation=f"{self._number:016x}",
            boot_id=f"boot{self._number}",
            host_name=self.name,
            uid=0,
            pid=1000 + self._number,
            address=f"10.{self._number // 256}.{self._number % 256}.1:7700",
            server_version=ep_runtime.__version__,
            api_versions=[wire.API_VERSION],
        )
        answer = await self._ask("JoinCluster", pb.JoinClusterRequest(identity=identity))
        self._lease, self._version = answer.lease_id, answer.nodes_version

    async def report(self) -> None:
        """Until cancelled, as a daemon does."""
        while True:
            await asyncio.sleep(limits.NODE_REPORT_INTERVAL_S)
            request = pb.ReportNodeRequest(**self._who(), nodes_version=self._version)
            self._version = (await self._ask("ReportNode", request)).nodes_version

    def _who(self) -> dict[str, str]:
        return {"node": self.name, "lease_id": self._lease}

    async def form(self, name: str, spec: Any, ranks: range, life: int) -> int:
        """Claims the ranks, a process each, until the group is committed; its epoch."""
        claims = [
            pb.NodeClaim(world_ranks=[rank], session_id=f"s-{rank}-{life}", pid=rank + 2)
            for rank in ranks
        ]
        key = pb.GroupKey(uid=1, job="job", name=name)
        known: list[int] = []
        while True:
            request = pb.JoinGroupRequest(
                **self._who(), key=key, spec=spec, claims=claims, generation=1
            )
            request.missing_ranks.extend(known)
            request.wait.CopyFrom(wire.duration(limits.NODE_POLL_S))
            answer = await self._ask("JoinGroup", request)
            known = list(answer.missing_ranks)
            if not answer.HasField("view"):
                continue
            epoch = answer.view.epoch
            await self._ask("ReportInit", pb.ReportInitRequest(**self._who(), key=key, epoch=epoch))
            if await self._committed(key, epoch):
                return epoch
            known = []

    async def _committed(self, key: pb.GroupKey, epoch: int) -> bool:
        while True:
            request = pb.AwaitGroupRequest(**self._who(), key=key, epoch=epoch)
            request.wait.CopyFrom(wire.duration(limits.NODE_POLL_S))
            answer = await self._ask("AwaitGroup", request)
            if answer.outcome != pb.VIEW_OUTCOME_UNSPECIFIED:
                return bool(answer.outcome == pb.VIEW_OUTCOME_COMMITTED)

    async def lose(self, name: str, epoch: int, rank: int, nodes: int) -> None:
        """A process ended: told to the coordinator, and to every other node of the view."""
        key = pb.GroupKey(uid=1, job="job", name=name)
        request = pb.TellGroupRequest(node=self.name, key=key, epoch=epoch, lost_ranks=[rank])
        self.tells += nodes - 1
        await self._ask("TellGroup", request)

    async def close(self) -> None:
        await self._peers.close()


class SimulatedSession:
    """One session and its heartbeats.

    Attributes:
        taken_s: of each of its calls.
    """

    def __init__(self, directory: Path) -> None:
        self._token = hello(directory).session_token
        self._metadata = ((wire.TOKEN_KEY, self._token),)
        self._channel = grpc.aio.insecure_channel(
            f"unix:{directory}/{wire.API_SOCKET}", options=wire.channel_options()
        )
        self._stub: Any = session_service_pb2_grpc.SessionServiceStub(self._channel)
        self._events: Any = None
        self.taken_s: list[float] = []

    async def open(self, job: str) -> None:
        await self._call(self._stub.OpenSession, session_service_pb2.OpenSessionRequest(job=job))
        watch = session_service_pb2.WatchSessionRequest()
        self._events = self._stub.WatchSession(watch, metadata=self._metadata)
        await self._events.read()

    async def _call(self, method: Any, request: Any) -> None:
        started = time.perf_counter()
        await method(request, timeout=CALL_S, metadata=self._metadata)
        self.taken_s.append(time.perf_counter() - started)

    async def beat(self, first_after_s: float) -> None:
        """Until cancelled, every HEARTBEAT_INTERVAL_S."""
        loop = asyncio.get_running_loop()
        due_s = loop.time() + first_after_s
        request = session_service_pb2.HeartbeatRequest(progress=1)
        while True:
            await asyncio.sleep(max(0.0, due_s - loop.time()))
            due_s += limits.HEARTBEAT_INTERVAL_S
            await self._call(self._stub.Heartbeat, request)

    async def close(self) -> None:
        if self._events is not None:
            self._events.cancel()
        await self._channel.close()
