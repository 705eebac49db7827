"""A read-only AdminService, for other nodes' daemons and for sessions."""

from __future__ import annotations

import os
from typing import Any

from ep_runtime.errors import PermissionDeniedError
from ep_runtime.v1 import admin_service_pb2 as pb
from ep_runtime_server.callers.sessions import SessionRecord
from ep_runtime_server.rpc.admin_servicer import AdminServicer
from ep_runtime_server.rpc.interceptor import current_session

# RPCs that only read; all other RPCs are orders.
READINGS = frozenset(
    {
        "GetStatus",
        "ListSessions",
        "ListGroups",
        "ListLayers",
        "ListHandles",
        "ListBuffers",
        "ListEvents",
        "ListRanks",
        "ListTallies",
    }
)


class ReadingServicer(AdminServicer):
    """AdminService for other nodes' daemons: refuses orders, and does not forward requests."""

    may_forward = False


class SessionReadingServicer(ReadingServicer):
    """AdminService on api.sock: users see only their own objects.

    Root and the daemon's user see all of them.
    """

    @property
    def may_forward(self) -> bool:  # type: ignore[override]
        return self._reads_all

    @property
    def _reads_all(self) -> bool:
        return current_session().uid in (0, os.geteuid())

    def _sees(self, uid: int | None) -> bool:
        return self._reads_all or uid == current_session().uid

    def _sessions(self) -> list[SessionRecord]:
        """Returns all sessions except the session of this call, which exists only for the call."""
        return [session for session in super()._sessions() if session is not current_session()]


def refuse_orders(servicer: type[AdminServicer]) -> None:
    """Makes all RPCs of the service raise PermissionDeniedError, except READINGS."""
    for method in pb.DESCRIPTOR.services_by_name["AdminService"].methods:
        if method.name not in READINGS:
            setattr(servicer, method.name, _refused(method.name))


def _refused(method: str) -> Any:
    async def call(self: AdminServicer, request: Any, context: Any) -> Any:
        raise PermissionDeniedError(
            f"{method} is an order, and only the daemon's user and root give orders: over the "
            "node's own admin.sock",
            method=method,
        )

    return call


refuse_orders(ReadingServicer)
