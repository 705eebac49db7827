"""Answers the RPCs of AdminService: converts requests, calls the runtime, converts answers."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import grpc

import ep_runtime
from ep_runtime import wire
from ep_runtime.board_abi import PoisonReason
from ep_runtime.errors import InvalidArgumentError, PermissionDeniedError
from ep_runtime.text import printable
from ep_runtime.v1 import admin_service_pb2 as pb
from ep_runtime_server.base import limits, open_files
from ep_runtime_server.base.clock import Clock, paced
from ep_runtime_server.callers.credentials import MAX_REASON, Caller, GivenOrder
from ep_runtime_server.callers.sessions import SessionRecord
from ep_runtime_server.groups.fsm import State
from ep_runtime_server.groups.record import GroupRecord
from ep_runtime_server.memory import host_memory
from ep_runtime_server.memory.windows import WindowState
from ep_runtime_server.rpc import views
from ep_runtime_server.rpc.interceptor import current_session
from ep_runtime_server.rpc.paging import page
from ep_runtime_server.runtime import Runtime

Context = grpc.aio.ServicerContext[Any, Any]
Reading = Callable[[Any, Any, Any], Coroutine[Any, Any, Any]]
T = TypeVar("T")
Row = TypeVar("Row")


# RPCs that only read, which `of_any_node` decorates; all other RPCs are orders.
READINGS: set[str] = set()


def of_any_node(method: Reading) -> Reading:
    """Wraps a read-only RPC, and forwards requests that name another node to its daemon."""
    READINGS.add(method.__name__)

    @functools.wraps(method)
    async def call(self: AdminServicer, request: Any, context: Context) -> Any:
        cluster, node = self._runtime.cluster, request.node
        if not node or (cluster is not None and node == cluster.settings.node):
            return await method(self, request, context)
        if cluster is None or not self.may_forward:
            raise InvalidArgumentError(
                f"node: this daemon belongs to no cluster, asked of node {node!r}"
                if cluster is None
                else f"node: this is node {cluster.settings.node!r}, asked of node {node!r}",
                argument="node",
            )
        left_s = context.time_remaining()
        return await cluster.ask_node(
            node, method.__name__, request, limits.NODE_READ_S if left_s is None else left_s
        )

    return call


class AdminServicer:
    """Implements AdminService; see admin_service.proto."""

    may_forward = True

    def __init__(
        self, runtime: Runtime, caller_of: Callable[[str], Caller | None] = lambda peer: None
    ) -> None:
        """`caller_of(peer)` returns the process that gives an order, as the kernel reports it."""
        self._runtime = runtime
        self._caller_of = caller_of

    def _order(
        self, context: Context, command: str, *, reason: str = "", **about: Any
    ) -> GivenOrder:
        """Makes an order of the caller, and writes it to the audit file with details `about`."""
        caller = self._caller_of(context.peer())
        if caller is None:
            raise PermissionDeniedError(f"{command}: the connection that asked for it has ended")
        order = GivenOrder(caller, f"ep-runtime {command}", printable(reason[:MAX_REASON]))
        self._runtime.audit.note(order, self._runtime.clock.wall_s(), about)
        return order

    def _sees(self, uid: int | None) -> bool:
        """Returns whether the caller may see objects of a user; `uid` None is for no user."""
        return True

    def _sessions(self) -> list[SessionRecord]:
        return [s for s in self._runtime.sessions.all() if self._sees(s.uid)]

    def _groups(self, name: str) -> list[GroupRecord]:
        return [
            group
            for group in self._runtime.groups.all()
            if self._sees(group.owner.uid) and name in ("", group.owner.name)
        ]

    @of_any_node
    async def GetStatus(
        self, request: pb.GetStatusRequest, context: Context
    ) -> pb.GetStatusResponse:
        runtime = self._runtime
        groups = self._groups("")
        return pb.GetStatusResponse(
            server_version=ep_runtime.__version__,
            incarnation=runtime.incarnation,
            pid=os.getpid(),
            directory=str(runtime.settings.directory),
            uptime=wire.duration(runtime.clock.monotonic_s() - runtime.started_s),
            state=runtime.server_state,
            num_sessions=sum(not session.over for session in self._sessions()),
            num_groups=len(groups),
            num_layers=sum(group.layers.num_layers for group in groups),
            num_handles=sum(group.layers.num_handles for group in groups),
            pools=self._pools(),
            num_fds=open_files.num_open(),
            max_fds=open_files.most_open(),
            rss_bytes=host_memory.own_rss_bytes(),
            loop_lag=wire.duration(runtime.loop_lag.recent_worst_s),
            loop_lag_p99=wire.duration(runtime.loop_lag.p99_s),
            loop_lag_worst=wire.duration(runtime.loop_lag.worst_s),
            failing_tasks=runtime.supervisor.failing,
            users=[
                views.usage(uid, runtime.usage(uid))
                async for uid in paced(runtime.users())
                if self._sees(uid)
            ],
            user_limits=views.user_limits(runtime.quotas.limits),
            journal=views.journal(runtime.journal),
            drain=views.drain(runtime.drain_order, runtime.clock),
            recovery=(views.recovery(runtime.recovery) if runtime.recovery.found_any else None),
            late_ranks=[
                views.late_rank(late)
                for late in await runtime.late_ranks.now()
                if self._sees(late.group.owner.uid)
            ],
            silent_processes=[
                views.silent_process(session, silent_s)
                for session, silent_s in runtime.sessions.silent()
                if self._sees(session.uid)
            ],
            cluster=(
                runtime.cluster.status()
                if runtime.cluster is not None and self._sees(None)
                else None
            ),
        )

    def _pools(self) -> list[pb.PoolStatus]:
        pool, state = self._runtime.pool, WindowState
        return [
            pb.PoolStatus(
                device=device.name,
                limit_bytes=device.limit_bytes,
                leased_bytes=pool.used_bytes(device.name, state.LEASED),
                retained_bytes=pool.used_bytes(device.name, state.RETAINED),
                quarantined_bytes=pool.used_bytes(device.name, state.QUARANTINED, state.RELEASING),
                num_buffers=sum(
                    buffer.device == device.name for s in pool.sets for buffer in s.buffers
                ),
            )
            for device in pool.devices()
        ]

    @of_any_node
    async def ListSessions(
        self, request: pb.ListSessionsRequest, context: Context
    ) -> pb.ListSessionsResponse:
        runtime = self._runtime
        by_session = await runtime.groups.by_session()

        def row(session: SessionRecord) -> pb.SessionInfo:
            return views.session(session, by_session.get(session.session_id, ()), runtime.clock)

        return await page(pb.ListSessionsResponse, "sessions", self._sessions(), request, row)

    @of_any_node
    async def ListGroups(
        self, request: pb.ListGroupsRequest, context: Context
    ) -> pb.ListGroupsResponse:
        runtime = self._runtime

        def row(group: GroupRecord) -> pb.GroupInfo:
            nccl = runtime.unique_ids.state_of(group)
            return views.group_info(group, runtime.clock, nccl, runtime.pool.gpu_index)

        return await page(pb.ListGroupsResponse, "groups", self._groups(request.name), request, row)

    @of_any_node
    async def ListLayers(
        self, request: pb.AdminServiceListLayersRequest, context: Context
    ) -> pb.AdminServiceListLayersResponse:
        groups = self._groups(request.group)
        rows = [(group, layer) for group in groups for layer in group.layers.all()]
        return await page(
            pb.AdminServiceListLayersResponse, "layers", rows, request, views.layer_info
        )

    @of_any_node
    async def ListHandles(
        self, request: pb.ListHandlesRequest, context: Context
    ) -> pb.ListHandlesResponse:
        rows = views.handles(self._groups(request.group), request.layer)
        row = self._at_its_time(request, views.handle_info)
        return await page(pb.ListHandlesResponse, "handles", rows, request, row)

    @of_any_node
    async def ListBuffers(
        self, request: pb.ListBuffersRequest, context: Context
    ) -> pb.ListBuffersResponse:
        rows = [
            (windows, buffer)
            for windows in self._runtime.pool.sets
            if self._sees(windows.owner.uid) and request.group in ("", windows.owner.name)
            for buffer in windows.buffers
        ]
        row = functools.partial(views.buffer_info, runtime=self._runtime)
        return await page(pb.ListBuffersResponse, "buffers", rows, request, row)

    @of_any_node
    async def ListEvents(
        self, request: pb.ListEventsRequest, context: Context
    ) -> pb.ListEventsResponse:
        await self._runtime.events.written()  # a restart must not lose listed events
        rows = [
            event
            for event in self._runtime.events.after(request.after_sequence)
            if self._sees(event.fields.get("uid"))
        ]
        return await page(pb.ListEventsResponse, "events", rows, request, views.event)

    @of_any_node
    async def ListRanks(
        self, request: pb.ListRanksRequest, context: Context
    ) -> pb.ListRanksResponse:
        row = functools.partial(views.rank_info, clock=self._runtime.clock)
        rows = views.ranks(self._groups(request.group))
        return await page(pb.ListRanksResponse, "ranks", rows, request, row)

    @of_any_node
    async def ListTallies(
        self, request: pb.ListTalliesRequest, context: Context
    ) -> pb.ListTalliesResponse:
        groups = [group for group in self._groups(request.group) if group.has_windows]
        row = self._at_its_time(request, views.rank_tally)
        return await page(pb.ListTalliesResponse, "ranks", views.ranks(groups), request, row)

    def _at_its_time(
        self, request: Any, view: Callable[[tuple[GroupRecord, T], Clock], Row]
    ) -> Callable[[tuple[GroupRecord, T]], Row | None]:
        """Returns a converter of rows to messages, of the current state or the state `age` ago."""
        runtime = self._runtime
        if not request.HasField("age"):
            return lambda row: view(row, runtime.clock)
        back = runtime.history.back(wire.seconds(request.age))

        def viewed(row: tuple[GroupRecord, T]) -> Row | None:
            past = back(row[0])
            return view((past[0], row[1]), past[1]) if past is not None else None

        return viewed

    async def Drain(self, request: pb.DrainRequest, context: Context) -> pb.DrainResponse:
        has_deadline = request.HasField("deadline")
        deadline_s = wire.seconds(request.deadline) if has_deadline else limits.DEFAULT_DRAIN_S
        shutdown = request.shutdown
        about: dict[str, Any] = {"deadline_s": deadline_s} if shutdown else {}
        order = self._order(context, "drain", shutdown=shutdown, **about)
        self._runtime.drain(deadline_s, shutdown=shutdown, order=order)
        return pb.DrainResponse(num_sessions=len(self._runtime.sessions.not_over()))

    async def Undrain(self, request: pb.UndrainRequest, context: Context) -> pb.UndrainResponse:
        return pb.UndrainResponse(
            was_drained=self._runtime.undrain(self._order(context, "undrain"))
        )

    async def Fence(self, request: pb.FenceRequest, context: Context) -> pb.FenceResponse:
        session_id, runtime = request.session_id, self._runtime
        order = self._order(context, "fence", reason=request.reason, session=session_id)
        session = runtime.sessions.get(session_id)
        if session is None:
            raise InvalidArgumentError(f"no session {session_id!r}", argument="session_id")
        names = [group.owner.name for group in runtime.groups.of_session(session)]
        runtime.sessions.fence(session, order)
        return pb.FenceResponse(groups=names)

    async def Reclaim(self, request: pb.ReclaimRequest, context: Context) -> pb.ReclaimResponse:
        name, job, runtime = request.name, request.job, self._runtime
        uid = request.uid if request.HasField("uid") else None
        about: dict[str, Any] = {"group": name, "job": job, "uid": uid}
        if request.all_retained:
            about = {"all_retained": True}
        order = self._order(context, "reclaim", **about)
        if request.all_retained == bool(name):
            raise InvalidArgumentError("give a name or all_retained, not both", argument="name")
        groups = runtime.groups.all()
        if request.all_retained:
            groups = [group for group in groups if group.state is State.RETAINED]
        else:
            groups = [group for group in groups if group.owner.name == name]
            groups = [group for group in groups if not job or group.owner.job == job]
            groups = [group for group in groups if uid is None or group.owner.uid == uid]
            if len(groups) != 1:
                more = "; give job and uid" if groups else ""
                raise InvalidArgumentError(
                    f"{len(groups)} groups are named {name!r}{more}", argument="name"
                )
        freed = held = 0
        for group in groups:
            held += group.windows.size_bytes if group.windows is not None else 0
            freed += runtime.groups.take_away(group, PoisonReason.RECLAIMED, "was reclaimed", order)
        return pb.ReclaimResponse(
            groups=[group.owner.name for group in groups],
            freed_bytes=freed,
            quarantined_bytes=held - freed,
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
