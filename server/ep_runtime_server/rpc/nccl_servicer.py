"""NcclService: convert, call, convert."""

from __future__ import annotations

from typing import Any

import grpc

from ep_runtime.v1 import nccl_service_pb2 as pb
from ep_runtime_server.rpc.interceptor import current_session
from ep_runtime_server.runtime import Runtime

Context = grpc.aio.ServicerContext


class NcclServicer:
    """See nccl_service.proto."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    async def GetUniqueIds(  # noqa: N802
        self, request: pb.GetUniqueIdsRequest, context: Context[Any, Any]
    ) -> pb.GetUniqueIdsResponse:
        session = current_session()
        group = self._runtime.groups.get(session, request.name)
        made = await self._runtime.unique_ids.of(session, group, request.generation)
        return pb.GetUniqueIdsResponse(unique_ids=made.ids, nccl_version=made.version)

    async def ReportCommunicators(  # noqa: N802
        self, request: pb.ReportCommunicatorsRequest, context: Context[Any, Any]
    ) -> pb.ReportCommunicatorsResponse:
        session = current_session()
        group = self._runtime.groups.get(session, request.name)
        self._runtime.communicators_made(
            session, group, request.generation, request.nccl_version, request.error
        )
        return pb.ReportCommunicatorsResponse()
