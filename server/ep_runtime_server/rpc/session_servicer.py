"""Answers the RPCs of SessionService: converts requests, calls the runtime, converts answers."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from typing import Any

import grpc

import ep_runtime
from ep_runtime import wire
from ep_runtime.errors import (
    EpRuntimeError,
    InvalidArgumentError,
    PermissionDeniedError,
    RuntimeUnavailableError,
    SessionFencedError,
)
from ep_runtime.text import printable
from ep_runtime.v1 import session_service_pb2 as pb
from ep_runtime_server.base import limits
from ep_runtime_server.callers.credentials import MAX_REASON, Caller, GivenOrder
from ep_runtime_server.callers.sessions import SessionState
from ep_runtime_server.groups.lateness import late_in
from ep_runtime_server.rpc.interceptor import current_session
from ep_runtime_server.runtime import Runtime

Context = grpc.aio.ServicerContext[Any, Any]


class NewerStreamError(EpRuntimeError):
    """Ends a stream because the session has a newer one; clients see only the gRPC code."""

    grpc_code = "ABORTED"


class SessionServicer:
    """Implements SessionService; see session_service.proto."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    async def GetServerInfo(
        self, request: pb.GetServerInfoRequest, context: Context
    ) -> pb.GetServerInfoResponse:
        return pb.GetServerInfoResponse(
            server_version=ep_runtime.__version__,
            incarnation=self._runtime.incarnation,
            api_versions=[wire.API_VERSION],
            features=["memfd", "xla", *([wire.CLUSTER] if self._runtime.cluster else [])],
            state=self._runtime.server_state,
            pid=os.getpid(),
        )

    async def OpenSession(
        self, request: pb.OpenSessionRequest, context: Context
    ) -> pb.OpenSessionResponse:
        session = current_session()
        self._runtime.open_session(session, request.job, request.labels, request.process_index)
        interval = wire.duration(limits.HEARTBEAT_INTERVAL_S)
        return wire.filled(pb.OpenSessionResponse, session, heartbeat_interval=interval)

    async def Heartbeat(
        self, request: pb.HeartbeatRequest, context: Context
    ) -> pb.HeartbeatResponse:
        self._runtime.sessions.beat(current_session(), request.progress)
        return pb.HeartbeatResponse(
            state=self._runtime.server_state, incarnation=self._runtime.incarnation
        )

    async def WatchSession(
        self, request: pb.WatchSessionRequest, context: Context
    ) -> AsyncIterator[pb.WatchSessionResponse]:
        session = current_session()
        queue: asyncio.Queue[Any] = asyncio.Queue()
        if session.watcher is not None:
            session.watcher.put_nowait(None)  # ends the older stream
        session.watcher = queue
        try:
            yield pb.WatchSessionResponse()
            while (event := await queue.get()) is not None:
                yield event
        finally:
            if session.watcher is queue:
                session.watcher = None
        if session.state is SessionState.FENCED:
            raise SessionFencedError(
                f"session {session.session_id} was fenced {session.fence_reason}; connect again"
            )
        if session.watcher is not None:
            raise NewerStreamError("a newer stream watches this session")
        if session.live:
            raise RuntimeUnavailableError("the daemon ends")

    async def CloseSession(
        self, request: pb.CloseSessionRequest, context: Context
    ) -> pb.CloseSessionResponse:
        self._runtime.sessions.close(current_session(), failed=request.failed)
        return pb.CloseSessionResponse()

    async def EndPeer(self, request: pb.EndPeerRequest, context: Context) -> pb.EndPeerResponse:
        ours, runtime, session_id = current_session(), self._runtime, request.session_id
        peer = runtime.sessions.get(session_id)
        if peer is None or peer.over:
            return pb.EndPeerResponse()
        if (peer.uid, peer.job) != (ours.uid, ours.job):
            raise PermissionDeniedError(
                f"session {session_id} is not of job {ours.job!r} of uid {ours.uid}",
                session=session_id,
            )
        if peer.pid == ours.pid:
            raise InvalidArgumentError(
                "a session cannot end its own process", argument="session_id"
            )
        now_s, groups = runtime.clock.monotonic_s(), runtime.groups.of_session(peer)
        late = [rank for group in groups for rank in late_in(group, now_s, after_s=0.0)]
        awaited = next((rank.message for rank in late if rank.pid == peer.pid), "")
        reason = printable(request.reason[:MAX_REASON]) + (f"; {awaited}" if awaited else "")
        caller = Caller(ours.uid, ours.pid)
        runtime.sessions.fence(peer, GivenOrder(caller, "ep.distributed", reason))
        killed = runtime.sessions.kill(peer)
        return pb.EndPeerResponse(pid=peer.pid, killed=killed, awaited=awaited)
