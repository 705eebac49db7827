"""Answers the RPCs of LayerService, and checks a user's limits before layers are registered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import grpc

from ep_runtime import wire
from ep_runtime.layer_specs import LayerSpec
from ep_runtime.v1 import layer_service_pb2 as pb
from ep_runtime.v1 import types_pb2
from ep_runtime_server.base.clock import paced
from ep_runtime_server.callers.sessions import SessionRecord
from ep_runtime_server.groups.claims import check_layer_count
from ep_runtime_server.groups.record import GroupRecord
from ep_runtime_server.rpc.interceptor import current_session
from ep_runtime_server.rpc.paging import page
from ep_runtime_server.runtime import Runtime

Context = grpc.aio.ServicerContext[Any, Any]
# A layer has about 40 bytes in a request and about 160 in the journal.
_JOURNAL_GROWTH = 5


class LayerServicer:
    """Implements LayerService; see layer_service.proto."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    async def RegisterLayers(
        self,
        request: pb.RegisterLayersRequest,
        context: Context,
    ) -> pb.RegisterLayersResponse:
        session = current_session()
        check_layer_count(len(request.layers) + len(request.stacks))

        async def work() -> pb.RegisterLayersResponse:
            runtime, size = self._runtime, request.ByteSize()
            group = runtime.groups.get(session, request.group)
            _admit(runtime, session, group, request.generation, size)
            layers, stacks = await _register(
                runtime,
                session,
                group,
                [wire.layer_spec_from_proto(layer) async for layer in paced(request.layers)],
                [wire.stack_spec_from_proto(stack) async for stack in paced(request.stacks)],
                replace=request.replace,
            )
            return pb.RegisterLayersResponse(
                layers=[wire.registered_to_proto(layer) async for layer in paced(layers)],
                stacks=[wire.registered_to_proto(stack) async for stack in paced(stacks)],
            )

        return await self._runtime.operations.run(session.session_id, request.op_id, request, work)

    async def GetLayer(self, request: pb.GetLayerRequest, context: Context) -> pb.GetLayerResponse:
        group = self._runtime.groups.get(current_session(), request.group)
        layer: types_pb2.RegisteredLayer = wire.registered_to_proto(group.layers.get(request.name))
        return pb.GetLayerResponse(layer=layer)

    async def ListLayers(
        self, request: pb.ListLayersRequest, context: Context
    ) -> pb.ListLayersResponse:
        group = self._runtime.groups.get(current_session(), request.group)
        found, token = await page(group.layers.all(), request, wire.registered_to_proto)
        return pb.ListLayersResponse(layers=found, next_page_token=token)


def _admit(
    runtime: Runtime,
    session: SessionRecord,
    group: GroupRecord,
    generation: int,
    request_bytes: int,
) -> None:
    """Checks that the session may register the layers of a request of `request_bytes`.

    Raises:
        StaleHandleError, PermissionDeniedError: see GroupRecord.member.
        PoolExhaustedError: over the user's limit, or the journal has no space.
    """
    group.member(session, generation)
    growth = _JOURNAL_GROWTH * request_bytes
    runtime.recorder.admit(growth)
    runtime.quotas.check(session.uid, journal_bytes=growth)


async def _register(
    runtime: Runtime,
    session: SessionRecord,
    group: GroupRecord,
    layers: Sequence[LayerSpec],
    stacks: Sequence[wire.LayerStackSpec],
    *,
    replace: bool,
) -> tuple[list[wire.RegisteredLayer], list[wire.RegisteredLayer]]:
    """Registers layers as `LayerTable.register`, and adds them to the journal and the events.

    Raises:
        PoolExhaustedError: over the user's limit, or the board has too few handles left.
        InvalidArgumentError, SpecMismatchError: see `LayerTable.register`.
    """
    before = len(group.layers.history)
    answer = await group.layers.register(
        layers,
        stacks,
        lambda count: runtime.quotas.check(session.uid, layers=count),
        replace=replace,
    )
    added = len(group.layers.history) - before
    if added:
        await runtime.recorder.prepare(group)
        group.notify()
        runtime.events.add(
            "layers.registered",
            f"group {group.owner}: {added} layers and stacks registered",
            session_id=session.session_id,
            **group.owner.fields,
            added=added,
        )
    return answer
