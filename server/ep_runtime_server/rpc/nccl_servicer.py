"""Answers the RPCs of NcclService: converts requests, calls the runtime, converts answers."""

from __future__ import annotations

from typing import Any

import grpc

from ep_runtime.text import check_printable, printable
from ep_runtime.v1 import nccl_service_pb2 as pb
from ep_runtime_server.base import limits
from ep_runtime_server.groups.fsm import State
from ep_runtime_server.rpc.interceptor import current_session
from ep_runtime_server.runtime import Runtime

Context = grpc.aio.ServicerContext[Any, Any]


class NcclServicer:
    """Implements NcclService; see nccl_service.proto."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    async def GetUniqueIds(
        self, request: pb.GetUniqueIdsRequest, context: Context
    ) -> pb.GetUniqueIdsResponse:
        session = current_session()
        group = self._runtime.groups.get(session, request.name)
        made = await self._runtime.unique_ids.of(session, group, request.generation)
        return pb.GetUniqueIdsResponse(unique_ids=made.ids, nccl_version=made.version)

    async def ReportCommunicators(
        self, request: pb.ReportCommunicatorsRequest, context: Context
    ) -> pb.ReportCommunicatorsResponse:
        session, runtime = current_session(), self._runtime
        group = runtime.groups.get(session, request.name)
        version, error = request.nccl_version, printable(request.error)
        check_printable("nccl_version", version, limits.MAX_VERSION_BYTES)
        runtime.unique_ids.report(session, group, request.generation, version, error)
        # Groups with transport="nvlink" work without communicators: windows carry their rows.
        if error and group.spec.transport != "nvlink" and group.state is State.READY:
            runtime.groups.disconnected(group, session, error)
        return pb.ReportCommunicatorsResponse()
