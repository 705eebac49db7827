"""Answers grpc.health.v1: whether the daemon admits sessions, for probes without a token.

Does not use the servicer of grpcio-health-checking, in which a watcher that does not read holds the
lock that each change of state needs.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ep_runtime_server.base.clock import Changes

SERVICES = ("", "ep_runtime.v1.SessionService", "ep_runtime.v1.GroupService")

_Answer = health_pb2.HealthCheckResponse


class HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """The health service, which reports NOT_SERVING until `set(True)`."""

    def __init__(self) -> None:
        self._serving = False
        self._changes = Changes()

    def set(self, serving: bool) -> None:
        """Sets the state and notifies all watchers without waiting."""
        if serving != self._serving:
            self._serving = serving
            self._changes.tell()

    def _status(self, service: str) -> Any:
        if service not in SERVICES:
            return _Answer.SERVICE_UNKNOWN
        return _Answer.SERVING if self._serving else _Answer.NOT_SERVING

    async def Check(self, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        if request.service not in SERVICES:
            await context.abort(grpc.StatusCode.NOT_FOUND)
        return _Answer(status=self._status(request.service))

    async def Watch(
        self, request: Any, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[Any]:
        while True:
            changed = self._changes.next
            yield _Answer(status=self._status(request.service))
            await changed.wait()
