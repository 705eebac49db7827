"""NcclService: convert, call, convert."""

from __future__ import annotations

from typing import Any

import grpc

from ep_runtime.text import check_printable, printable
from ep_runtime.v1 import nccl_service_pb2 as pb
from ep_runtime.v1 import nccl_service_pb2_grpc as pb_grpc
from ep_runtime_server import config
from ep_runtime_server.group_fsm import State
from ep_runtime_server.interceptor import current_session
from ep_runtime_server.runtime import Runtime

Context = grpc.aio.ServicerContext


class NcclServicer(pb_grpc.NcclServiceServicer):
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
        check_printable("nccl_version", request.nccl_version, config.MAX_VERSION_BYTES)
        error = printable(request.error)
        self._runtime.unique_ids.report(
            session, group, request.generation, request.nccl_version, error
        )
        # Where windows carry the rows, as with transport nvlink, the group goes on.
        carried = group.spec.transport != "nvlink"
        if error and carried and group.state is State.READY:
            self._runtime.groups.disconnected(group, session, error)
        return pb.ReportCommunicatorsResponse()
