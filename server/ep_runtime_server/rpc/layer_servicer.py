"""Answers the RPCs of LayerService, and checks a user's limits before layers are registered."""

from __future__ import annotations

from typing import Any

import grpc

from ep_runtime import wire
from ep_runtime.v1 import layer_service_pb2 as pb
from ep_runtime.v1 import types_pb2
from ep_runtime_server.base.clock import paced
from ep_runtime_server.groups.claims import check_layer_count
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
        self, request: pb.RegisterLayersRequest, context: Context
    ) -> pb.RegisterLayersResponse:
        session = current_session()
        check_layer_count(len(request.layers) + len(request.stacks))

        async def work() -> pb.RegisterLayersResponse:
            runtime = self._runtime
            group = runtime.groups.get(session, request.group)
            group.member(session, request.generation)
            growth = _JOURNAL_GROWTH * request.ByteSize()
            runtime.recorder.admit(growth)
            runtime.quotas.check(session.uid, journal_bytes=growth)
            asked = [wire.layer_spec_from_proto(layer) async for layer in paced(request.layers)]
            of_stacks = [wire.stack_spec_from_proto(stack) async for stack in paced(request.stacks)]
            before = len(group.layers.history)
            layers, stacks = await group.layers.register(
                asked,
                of_stacks,
                lambda count: runtime.quotas.check(session.uid, layers=count),
                replace=request.replace,
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
        return await page(
            pb.ListLayersResponse, "layers", group.layers.all(), request, wire.registered_to_proto
        )
