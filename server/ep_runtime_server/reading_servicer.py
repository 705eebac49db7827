"""AdminService as other nodes' daemons may use it."""

from __future__ import annotations

from typing import Any

import grpc

from ep_runtime.errors import PermissionDeniedError
from ep_runtime.v1 import admin_service_pb2
from ep_runtime_server.admin_servicer import AdminServicer

Context = grpc.aio.ServicerContext


class ReadingServicer(AdminServicer):
    """They read, and order nothing; nothing is asked on of a third node."""

    may_forward = False

    async def Drain(  # noqa: N802
        self, request: admin_service_pb2.DrainRequest, context: Context[Any, Any]
    ) -> admin_service_pb2.DrainResponse:
        raise _only_reads("Drain")

    async def Fence(  # noqa: N802
        self, request: admin_service_pb2.FenceRequest, context: Context[Any, Any]
    ) -> admin_service_pb2.FenceResponse:
        raise _only_reads("Fence")

    async def Reclaim(  # noqa: N802
        self, request: admin_service_pb2.ReclaimRequest, context: Context[Any, Any]
    ) -> admin_service_pb2.ReclaimResponse:
        raise _only_reads("Reclaim")


def _only_reads(method: str) -> PermissionDeniedError:
    return PermissionDeniedError(f"{method} is for the node's own admin.sock", method=method)
