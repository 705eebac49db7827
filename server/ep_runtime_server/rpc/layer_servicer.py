"""LayerService: convert, call, convert."""

from __future__ import annotations

from typing import Any

import grpc

from ep_runtime import wire
from ep_runtime.v1 import layer_service_pb2 as pb
from ep_runtime.v1 import layer_service_pb2_grpc as pb_grpc
from ep_runtime.v1 import types_pb2
from ep_runtime_server.base.pacing import paced
from ep_runtime_server.groups.claims import check_layer_count
from ep_runtime_server.rpc import registration
from ep_runtime_server.rpc.interceptor import current_session
from ep_runtime_server.rpc.paging import page
from ep_runtime_server.runtime import Runtime

Context = grpc.aio.ServicerContext


class LayerServicer(pb_grpc.LayerServiceServicer):
    """See layer_service.proto."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    async def RegisterLayers(  # noqa: N802
        self,
        request: pb.RegisterLayersRequest,
        context: Context[Any, Any],
    ) -> pb.RegisterLayersResponse:
        session = current_session()
        check_layer_count(len(request.layers) + len(request.stacks))

        async def work() -> pb.RegisterLayersResponse:
            runtime, size = self._runtime, request.ByteSize()
            group = runtime.groups.get(session, request.group)
            registration.admit(runtime, session, group, request.generation, size)
            layers, stacks = await registration.register(
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

        answer: pb.RegisterLayersResponse = await self._runtime.operations.run(
            session.session_id, request.op_id, request, work
        )
        return answer

    async def GetLayer(  # noqa: N802
        self, request: pb.GetLayerRequest, context: Context[Any, Any]
    ) -> pb.GetLayerResponse:
        group = self._runtime.groups.get(current_session(), request.group)
        layer: types_pb2.RegisteredLayer = wire.registered_to_proto(group.layers.get(request.name))
        return pb.GetLayerResponse(layer=layer)

    async def ListLayers(  # noqa: N802
        self, request: pb.ListLayersRequest, context: Context[Any, Any]
    ) -> pb.ListLayersResponse:
        group = self._runtime.groups.get(current_session(), request.group)
        found, token = await page(
            group.layers.all(), request.page_size, request.page_token, wire.registered_to_proto
        )
        return pb.ListLayersResponse(layers=found, next_page_token=token)
