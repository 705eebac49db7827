"""Answers the RPCs of GroupService: converts requests, calls the runtime, converts answers."""

from __future__ import annotations

from typing import Any

import grpc

from ep_runtime import wire
from ep_runtime.v1 import group_service_pb2 as pb
from ep_runtime_server.base import limits
from ep_runtime_server.base.clock import paced
from ep_runtime_server.callers.sessions import SessionRecord
from ep_runtime_server.groups import attachment
from ep_runtime_server.groups.claims import (
    check_layer_count,
    check_new_spec,
    check_spec,
    checked_ranks,
    checked_uuids,
    checked_wait,
)
from ep_runtime_server.journal.rejoin import Holding
from ep_runtime_server.memory.windows import Owner
from ep_runtime_server.rpc import views
from ep_runtime_server.rpc.interceptor import current_session, says_when_ended
from ep_runtime_server.runtime import Runtime

Context = grpc.aio.ServicerContext[Any, Any]


def _wait_s(message: pb.CreateGroupRequest | pb.ReportAttachedRequest) -> float:
    given = message.HasField("wait")
    return checked_wait(wire.seconds(message.wait) if given else limits.DEFAULT_WAIT_S)


class GroupServicer:
    """Implements GroupService; see group_service.proto."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def _says_what_forms(self, session: SessionRecord, name: str) -> None:
        def text() -> str:
            group = self._runtime.groups.find(Owner(session.uid, session.job, name))
            missing = f": {group.awaited[0]}" if group is not None else ""
            return f"while group {name!r} formed{missing}"

        says_when_ended(text)

    async def CreateGroup(
        self, request: pb.CreateGroupRequest, context: Context
    ) -> pb.CreateGroupResponse:
        session = current_session()
        self._runtime.check_serving()
        spec = wire.group_spec_from_proto(request.spec)
        check_new_spec(spec)
        ranks = checked_ranks(request.world_ranks, spec)
        uuids = checked_uuids(request.device_uuids, request.world_ranks, spec)
        wait_s = _wait_s(request)
        self._runtime.quotas.check_retained(spec.retain_s)
        self._runtime.quotas.check(session.uid, journal_bytes=request.ByteSize())
        self._says_what_forms(session, spec.name)

        async def work() -> pb.CreateGroupResponse:
            waited_s = await self._runtime.claims_allowed(session, spec.name, wait_s)
            group = await self._runtime.groups.create(
                session,
                spec,
                ranks,
                uuids=uuids,
                replace=request.replace,
                wait_s=wait_s,
                waited_s=waited_s,
            )
            message = views.group(group, self._runtime.clock)
            return pb.CreateGroupResponse(group=message, reattached=group.reattached)

        return await self._runtime.operations.run(session.session_id, request.op_id, request, work)

    async def AcquireWindows(
        self, request: pb.AcquireWindowsRequest, context: Context
    ) -> pb.AcquireWindowsResponse:
        session = current_session()
        group = self._runtime.groups.get(session, request.name)
        tokens, ranks = self._runtime.attach_tokens, tuple(request.world_ranks)
        token, buffers = attachment.acquire(tokens, session, group, request.generation, ranks)
        return pb.AcquireWindowsResponse(
            ticket=token,
            descriptors=[views.descriptor(buffer, group.generation) for buffer in buffers],
            time_to_live=wire.duration(limits.ATTACH_TOKEN_LIFE_S),
        )

    async def ReportAttached(
        self, request: pb.ReportAttachedRequest, context: Context
    ) -> pb.ReportAttachedResponse:
        session = current_session()
        group = self._runtime.groups.get(session, request.name)
        self._says_what_forms(session, request.name)
        await attachment.report_attached(session, group, request.generation, _wait_s(request))
        return pb.ReportAttachedResponse(group=views.group(group, self._runtime.clock))

    async def RestoreGroup(
        self, request: pb.RestoreGroupRequest, context: Context
    ) -> pb.RestoreGroupResponse:
        check_layer_count(len(request.layers))
        spec = wire.group_spec_from_proto(request.spec)
        check_spec(spec)
        ranks = checked_ranks(request.world_ranks, spec)
        claim = Holding(
            spec=spec,
            generation=request.generation,
            ranks=ranks,
            layers=tuple([wire.registered_from_proto(x) async for x in paced(request.layers)]),
            uuids=checked_uuids(request.device_uuids, request.world_ranks, spec),
            windows=checked_ranks(request.window_ranks, spec) if request.window_ranks else (),
        )
        group, wanted = await self._runtime.rejoin.restore_group(current_session(), claim)
        return pb.RestoreGroupResponse(
            group=views.group(group, self._runtime.clock), wanted_ranks=wanted
        )

    async def CloseGroup(
        self, request: pb.CloseGroupRequest, context: Context
    ) -> pb.CloseGroupResponse:
        session = current_session()
        freed = self._runtime.groups.close(session, request.name, request.generation)
        return pb.CloseGroupResponse(freed_bytes=freed)

    async def GetGroup(self, request: pb.GetGroupRequest, context: Context) -> pb.GetGroupResponse:
        group = self._runtime.groups.get(current_session(), request.name)
        return pb.GetGroupResponse(
            group=views.group(group, self._runtime.clock),
            layers=[wire.registered_to_proto(layer) async for layer in paced(group.layers.all())],
        )
