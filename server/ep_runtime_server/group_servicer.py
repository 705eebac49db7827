"""GroupService and LayerService: convert, call, convert."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import grpc
from google.protobuf import duration_pb2

from ep_runtime import board, device_layout, wire
from ep_runtime.errors import InvalidArgumentError
from ep_runtime.specs import GroupSpec
from ep_runtime.text import check_printable
from ep_runtime.v1 import group_service_pb2 as pb
from ep_runtime.v1 import group_service_pb2_grpc as pb_grpc
from ep_runtime.v1 import layer_service_pb2, layer_service_pb2_grpc, types_pb2
from ep_runtime_server import attachment, config, views
from ep_runtime_server.interceptor import current_session
from ep_runtime_server.pacing import paced
from ep_runtime_server.paging import page
from ep_runtime_server.rejoin import Holding
from ep_runtime_server.runtime import Runtime

Context = grpc.aio.ServicerContext

SERVED_TRANSPORTS = ("memfd", "nvlink", "nccl", "xla")
MAX_LANES = 64
MAX_UUID_BYTES = 64
# A layer is some 40 bytes on the wire and some 160 in the journal.
_JOURNAL_GROWTH = 5
MAX_GROUP_BYTES = 1 << 60  # the wire's int64 must hold every sum


def _wait_s(message: Any) -> float:
    """The `wait` of a request. Raises InvalidArgumentError outside 0 to MAX_WAIT_S."""
    wait: duration_pb2.Duration = message.wait
    wait_s = wire.seconds(wait) if message.HasField("wait") else config.DEFAULT_WAIT_S
    if not 0 <= wait_s <= config.MAX_WAIT_S:
        raise InvalidArgumentError(
            f"wait must be 0 to {config.MAX_WAIT_S:.0f} s, got {wait_s}", argument="wait"
        )
    return wait_s


def check_spec(spec: GroupSpec) -> None:
    """What the daemon asks of a spec beyond `make_group_spec`. Raises InvalidArgumentError."""
    names = [name for name, _ in spec.mesh_axes]
    if len(set(names)) != len(names) or any(size < 1 for _, size in spec.mesh_axes):
        raise InvalidArgumentError(
            f"mesh_axes must have unique names and positive sizes, got {spec.mesh_axes}",
            argument="mesh_axes",
        )
    if spec.transport not in SERVED_TRANSPORTS:
        raise InvalidArgumentError(
            f"transport must be one of {SERVED_TRANSPORTS} on this daemon, got {spec.transport!r}",
            argument="transport",
        )
    if spec.lanes > MAX_LANES:
        raise InvalidArgumentError(
            f"lanes must be at most {MAX_LANES}, got {spec.lanes}", argument="lanes"
        )
    board.board_layout(spec)  # refuses a mesh of too many devices
    if spec.world_size * board.window_bytes(spec) > MAX_GROUP_BYTES:
        raise InvalidArgumentError(
            f"windows of {board.window_bytes(spec)} bytes on {spec.world_size} ranks are more than "
            f"any host has; lower max_tokens_per_rank={spec.max_tokens_per_rank} or lanes",
            argument="max_tokens_per_rank",
        )


def _check_count(layers: int) -> None:
    """Raises InvalidArgumentError where one call carries more layers and stacks than it may."""
    if layers > wire.MAX_LAYERS_PER_CALL:
        raise InvalidArgumentError(
            f"layers and stacks must be at most {wire.MAX_LAYERS_PER_CALL} per call, got {layers}",
            argument="layers",
        )


def _check_ranks(given: Sequence[int], spec: GroupSpec) -> tuple[int, ...]:
    ranks = tuple(given[: spec.world_size + 1])  # one too many is enough to refuse them
    wrong = [rank for rank in ranks if not 0 <= rank < spec.world_size]
    if not ranks or wrong or len(set(ranks)) != len(ranks):
        raise InvalidArgumentError(
            f"world_ranks must be distinct numbers in 0..{spec.world_size - 1}, "
            f"got {list(ranks[:16])}",
            argument="world_ranks",
        )
    return tuple(sorted(ranks))


def _check_windows(request: pb.RestoreGroupRequest, spec: GroupSpec) -> tuple[int, ...]:
    """World ranks, ascending, whose windows the caller holds; none: all."""
    return _check_ranks(request.window_ranks, spec) if request.window_ranks else ()


def _check_uuids(
    request: pb.CreateGroupRequest | pb.RestoreGroupRequest, spec: GroupSpec
) -> tuple[str, ...]:
    """The GPUs of the request's ranks, ranks ascending; none for windows on the host."""
    uuids, ranks = tuple(request.device_uuids), tuple(request.world_ranks)
    wanted = len(ranks) if device_layout.on_device(spec) else 0
    if len(uuids) != wanted:
        raise InvalidArgumentError(
            f"device_uuids must name {wanted} GPUs for {len(ranks)} ranks of a group of transport "
            f"{spec.transport!r}, got {len(uuids)}",
            argument="device_uuids",
        )
    for uuid in uuids:
        check_printable("device_uuids", uuid, MAX_UUID_BYTES)
    return tuple(uuid for _, uuid in sorted(zip(ranks, uuids, strict=False)))


class GroupServicer(pb_grpc.GroupServiceServicer):
    """See group_service.proto."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    async def CreateGroup(  # noqa: N802
        self, request: pb.CreateGroupRequest, context: Context[Any, Any]
    ) -> pb.CreateGroupResponse:
        session = current_session()
        self._runtime.check_serving()
        spec = wire.group_spec_from_proto(request.spec)
        check_spec(spec)
        if spec.node_size:
            raise InvalidArgumentError(
                f"node_size follows from where the ranks are; leave it 0, got {spec.node_size}",
                argument="node_size",
            )
        ranks = _check_ranks(request.world_ranks, spec)
        uuids = _check_uuids(request, spec)
        wait_s = _wait_s(request)
        self._check_retained(spec)
        self._runtime.quotas.check(session.uid, journal_bytes=request.ByteSize())

        async def work() -> pb.CreateGroupResponse:
            await self._runtime.claims_allowed(session, spec.name, wait_s)
            group = await self._runtime.groups.create(
                session, spec, ranks, uuids=uuids, replace=request.replace, wait_s=wait_s
            )
            message = views.group(group, self._runtime.clock)
            return pb.CreateGroupResponse(group=message, reattached=group.reattached)

        answer: pb.CreateGroupResponse = await self._runtime.operations.run(
            session.session_id, request.op_id, request, work
        )
        return answer

    def _check_retained(self, spec: GroupSpec) -> None:
        longest_s = self._runtime.quotas.limits.retain_s
        if spec.retain_s > longest_s:
            raise InvalidArgumentError(
                f"retain_s must be at most {longest_s:g} (serve --max-retain-s), got "
                f"{spec.retain_s:g}",
                argument="retain_s",
            )

    async def AcquireWindows(  # noqa: N802
        self, request: pb.AcquireWindowsRequest, context: Context[Any, Any]
    ) -> pb.AcquireWindowsResponse:
        session = current_session()
        group = self._runtime.groups.get(session, request.name)
        ticket, buffers = attachment.acquire(
            self._runtime.tickets, session, group, request.generation, tuple(request.world_ranks)
        )
        return pb.AcquireWindowsResponse(
            ticket=ticket,
            descriptors=[
                views.descriptor(buffer.world_rank, buffer.size_bytes, group.generation)
                for buffer in buffers
            ],
            time_to_live=wire.duration(config.TICKET_LIFE_S),
        )

    async def ReportAttached(  # noqa: N802
        self, request: pb.ReportAttachedRequest, context: Context[Any, Any]
    ) -> pb.ReportAttachedResponse:
        session = current_session()
        group = self._runtime.groups.get(session, request.name)
        await attachment.report_attached(session, group, request.generation, _wait_s(request))
        return pb.ReportAttachedResponse(group=views.group(group, self._runtime.clock))

    async def RestoreGroup(  # noqa: N802
        self, request: pb.RestoreGroupRequest, context: Context[Any, Any]
    ) -> pb.RestoreGroupResponse:
        _check_count(len(request.layers))
        spec = wire.group_spec_from_proto(request.spec)
        check_spec(spec)
        ranks = _check_ranks(request.world_ranks, spec)
        claim = Holding(
            spec=spec,
            generation=request.generation,
            ranks=ranks,
            layers=tuple([wire.registered_from_proto(x) async for x in paced(request.layers)]),
            uuids=_check_uuids(request, spec),
            windows=_check_windows(request, spec),
        )
        group, wanted = await self._runtime.rejoin.restore_group(current_session(), claim)
        return pb.RestoreGroupResponse(
            group=views.group(group, self._runtime.clock), wanted_ranks=wanted
        )

    async def CloseGroup(  # noqa: N802
        self, request: pb.CloseGroupRequest, context: Context[Any, Any]
    ) -> pb.CloseGroupResponse:
        session = current_session()
        freed = self._runtime.groups.close(session, request.name, request.generation)
        return pb.CloseGroupResponse(freed_bytes=freed)

    async def GetGroup(  # noqa: N802
        self, request: pb.GetGroupRequest, context: Context[Any, Any]
    ) -> pb.GetGroupResponse:
        group = self._runtime.groups.get(current_session(), request.name)
        return pb.GetGroupResponse(
            group=views.group(group, self._runtime.clock),
            layers=[wire.registered_to_proto(layer) async for layer in paced(group.layers.all())],
        )


class LayerServicer(layer_service_pb2_grpc.LayerServiceServicer):
    """See layer_service.proto."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    async def RegisterLayers(  # noqa: N802
        self,
        request: layer_service_pb2.RegisterLayersRequest,
        context: Context[Any, Any],
    ) -> layer_service_pb2.RegisterLayersResponse:
        session = current_session()
        _check_count(len(request.layers) + len(request.stacks))

        async def work() -> layer_service_pb2.RegisterLayersResponse:
            return await self._register(request)

        answer: layer_service_pb2.RegisterLayersResponse = await self._runtime.operations.run(
            session.session_id, request.op_id, request, work
        )
        return answer

    async def _register(
        self, request: layer_service_pb2.RegisterLayersRequest
    ) -> layer_service_pb2.RegisterLayersResponse:
        session = current_session()
        group = self._runtime.groups.get(session, request.group)
        group.member(session, request.generation)
        growth = _JOURNAL_GROWTH * request.ByteSize()
        self._runtime.recorder.admit(growth)
        self._runtime.quotas.check(session.uid, journal_bytes=growth)
        before = len(group.layers.history)
        layers, stacks = await group.layers.register(
            [wire.layer_spec_from_proto(layer) async for layer in paced(request.layers)],
            [wire.stack_spec_from_proto(stack) async for stack in paced(request.stacks)],
            lambda count: self._runtime.quotas.check(session.uid, layers=count),
            replace=request.replace,
        )
        added = len(group.layers.history) - before
        if added:
            await self._runtime.recorder.prepare(group)
            group.notify()
            self._runtime.events.add(
                "layers.registered",
                f"group {group.owner}: {added} layers and stacks registered",
                session_id=session.session_id,
                group=group.owner.name,
                added=added,
            )
        return layer_service_pb2.RegisterLayersResponse(
            layers=[wire.registered_to_proto(layer) async for layer in paced(layers)],
            stacks=[wire.registered_to_proto(stack) async for stack in paced(stacks)],
        )

    async def GetLayer(  # noqa: N802
        self, request: layer_service_pb2.GetLayerRequest, context: Context[Any, Any]
    ) -> layer_service_pb2.GetLayerResponse:
        group = self._runtime.groups.get(current_session(), request.group)
        layer: types_pb2.RegisteredLayer = wire.registered_to_proto(group.layers.get(request.name))
        return layer_service_pb2.GetLayerResponse(layer=layer)

    async def ListLayers(  # noqa: N802
        self, request: layer_service_pb2.ListLayersRequest, context: Context[Any, Any]
    ) -> layer_service_pb2.ListLayersResponse:
        group = self._runtime.groups.get(current_session(), request.group)
        found, token = await page(
            group.layers.all(), request.page_size, request.page_token, wire.registered_to_proto
        )
        return layer_service_pb2.ListLayersResponse(layers=found, next_page_token=token)
