"""Connects one `Runtime` to sockets, servers, timers and signals."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import select
import signal
import socket
from collections.abc import Callable, Mapping

import grpc
from grpc_health.v1 import health_pb2

from ep_runtime import env, services, trust, wire
from ep_runtime.errors import PermissionDeniedError
from ep_runtime.v1 import (
    admin_service_pb2,
    group_service_pb2,
    layer_service_pb2,
    nccl_service_pb2,
    session_service_pb2,
)
from ep_runtime_server.base import limits, open_files, systemd
from ep_runtime_server.base.clock import Clock, SystemClock
from ep_runtime_server.base.events import EventLog
from ep_runtime_server.base.failpoints import Failpoints
from ep_runtime_server.callers import credentials
from ep_runtime_server.callers.admission import Admission
from ep_runtime_server.callers.audit import Audit
from ep_runtime_server.callers.turns import Turns
from ep_runtime_server.cluster.cluster import Cluster
from ep_runtime_server.config import ServerConfig
from ep_runtime_server.journal.file import Journal
from ep_runtime_server.memory.cuda_device import Gpus
from ep_runtime_server.memory.fd_store import FdStore
from ep_runtime_server.metrics.endpoint import MetricsEndpoint
from ep_runtime_server.rpc.admin_servicer import (
    AdminServicer,
    ReadingServicer,
    SessionReadingServicer,
)
from ep_runtime_server.rpc.group_servicer import GroupServicer
from ep_runtime_server.rpc.health_servicer import HealthServicer
from ep_runtime_server.rpc.interceptor import RpcPolicy, make_server
from ep_runtime_server.rpc.layer_servicer import LayerServicer
from ep_runtime_server.rpc.nccl_servicer import NcclServicer
from ep_runtime_server.rpc.session_servicer import SessionServicer
from ep_runtime_server.runtime import Runtime
from ep_runtime_server.sockets.directory import (
    AUDIT_FILE,
    CLUSTER_FILE,
    EVENTS_FILE,
    JOURNAL_FILE,
    ORDERS_SOCKET,
    RPC_SOCKET,
    SocketDirectory,
)
from ep_runtime_server.sockets.disposal import Disposal
from ep_runtime_server.sockets.fd_server import FdServer
from ep_runtime_server.sockets.front import Front, OrdersFront

# How long callers of a stopped server have to read their last event or error.
STOP_GRACE_S = 0.5

SERVER_OPTIONS = [
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    # keepalive_timeout_ms alone does nothing in current gRPC; the ping timeout decides.
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # The C macro is GRPC_ARG_HTTP2_MIN_RECV_PING_...; gRPC silently ignores a wrong key.
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.server_handshake_timeout_ms", 2_000),
    ("grpc.max_receive_message_length", wire.MAX_REQUEST_BYTES),
    ("grpc.max_send_message_length", wire.MAX_MESSAGE_BYTES),
    ("grpc.max_concurrent_streams", 256),
    ("grpc.so_reuseport", 0),
]


class Daemon:
    """A daemon on one socket directory: call `start`, `run_until_stopped`, `stop`."""

    def __init__(
        self,
        settings: ServerConfig,
        *,
        clock: Clock | None = None,
        peer_of: Callable[..., credentials.Peer] = credentials.peer_of,
        stored_fds: Mapping[str, int] | None = None,
        gpus: Gpus | None = None,
    ) -> None:
        """`stored_fds` has systemd's descriptors by name. Tests set `clock`, `peer_of`, `gpus`."""
        self._gpus = gpus
        self._stored_fds = stored_fds or {}
        self._settings = settings
        self._clock = clock or SystemClock()
        self._peer_of = peer_of
        self._stop_now = asyncio.Event()
        self._signals: list[int] = []
        self._policies: list[RpcPolicy] = []

    async def start(self) -> None:
        """Locks the directory and answers on every socket.

        Raises:
            DirectoryBusyError, PermissionDeniedError, InvalidArgumentError: see SocketDirectory.
        """
        settings = self._settings
        self._directory = SocketDirectory(
            settings.directory, open_to_others=settings.open_to_others
        )
        journal = Journal(self._directory.path / JOURNAL_FILE, Failpoints(settings.testing))
        # A private daemon ends with its client, so no later daemon needs its events.
        kept = self._directory.path / EVENTS_FILE if settings.parent_pidfd is None else None
        log = EventLog(self._clock, kept)
        audit = Audit(kept and self._directory.path / AUDIT_FILE)
        self.runtime = Runtime(settings, self._clock, journal, self._gpus, log, audit)
        self.runtime.restore(FdStore(env.notify_socket(), self._stored_fds), self._stored_fds)
        await self.runtime.pool.load_gpus()
        self.runtime.failpoints.hit("recovery.restored")
        self._node_server = self._make_node_server()
        listen, detail = settings.metrics, settings.metrics_detail
        self.metrics = MetricsEndpoint(self.runtime, listen, detail=detail) if listen else None
        self._health = HealthServicer()
        self._api = self._server(self.runtime, sessions_guard=True)
        self._admin = self._server(self.runtime, sessions_guard=False)
        self._open_doors()
        self._api.add_insecure_port(self._directory.address(RPC_SOCKET))
        self._admin.add_insecure_port(self._directory.address(ORDERS_SOCKET))
        self._directory.sockets_bound()
        await self._api.start()
        await self._admin.start()
        if self._node_server is not None and self.runtime.cluster is not None:
            await self._node_server.start()
            self.runtime.cluster.begin(self.runtime.supervisor)
        self.runtime.on_health = self._tell_health
        self._tell_health()
        self.runtime.supervisor.keep("reaper", self._reap)
        self.runtime.supervisor.keep("look for late ranks", self.runtime.late_ranks.watch)
        self.runtime.supervisor.keep("look for chunked calls", self.runtime.chunked_calls.watch)
        self.runtime.supervisor.keep("copy boards", self.runtime.history.watch)
        self.runtime.supervisor.keep("watchdog", self._feed_watchdog)
        self.runtime.supervisor.keep("loop lag", self.runtime.loop_lag.measure)
        if self.metrics is not None:
            await self.metrics.start()
        self._warn_of_parents()
        if settings.testing:
            logging.getLogger(__name__).warning("testing switches: %s", sorted(settings.testing))
        self.runtime.events.add(
            "server.serving",
            f"serving {settings.directory}",
            incarnation=self.runtime.incarnation,
            max_host_bytes=settings.max_host_bytes,
        )

    def _open_doors(self) -> None:
        """Opens fd.sock, api.sock and admin.sock; the last two forward to gRPC."""
        directory, kind = self._directory, socket.SOCK_SEQPACKET
        self._disposal = Disposal()
        turns = Turns(asyncio.get_running_loop())
        self._fd_server = FdServer(
            self.runtime,
            directory.bind(wire.FD_SOCKET, kind),
            self._disposal,
            turns,
            peer_of=self._peer_of,
        )
        self._front = Front(
            self.runtime,
            directory.bind(wire.API_SOCKET, socket.SOCK_STREAM),
            str(directory.path / RPC_SOCKET),
            self._disposal,
            turns,
            peer_of=self._peer_of,
        )
        self._orders = OrdersFront(
            self.runtime,
            directory.bind(wire.ADMIN_SOCKET, socket.SOCK_STREAM),
            str(directory.path / ORDERS_SOCKET),
            self._disposal,
            turns,
        )

    def _warn_of_parents(self) -> None:
        try:
            trust.check_parents(self._directory.path, {0, os.geteuid()})
        except PermissionDeniedError as error:
            self.runtime.events.add(
                "server.directory_unsafe",
                f"{error}; clients refuse this directory unless their address names our user: "
                f"unix://{self._directory.path}?uid={os.geteuid()}",
                level=logging.WARNING,
            )

    def _make_node_server(self) -> grpc.aio.Server | None:
        """Starts the server for other nodes' daemons; None without a cluster.

        Raises what Cluster raises.
        """
        runtime = self.runtime
        if self._settings.cluster is None:
            return None
        cluster = Cluster(
            self._settings.cluster,
            self._directory.path / CLUSTER_FILE,
            runtime.incarnation,
            runtime.clock,
            runtime.events,
            runtime.failpoints,
        )
        self._node_policy = RpcPolicy(None, cluster.answering, Admission(), seal=cluster.seal)
        most = ("grpc.max_allowed_incoming_connections", open_files.most_of_nodes())
        server = make_server([self._node_policy], [*SERVER_OPTIONS, most])
        cluster.listen(server)
        cluster.start(server, runtime.groups, runtime.recovery.take_restored())
        assert cluster.coordination is not None  # set by `start`
        runtime.unique_ids.of_view = cluster.coordination.unique_ids
        services.add_to_server(server, admin_service_pb2.DESCRIPTOR, ReadingServicer(runtime))
        runtime.cluster = cluster
        return server

    def _server(self, runtime: Runtime, *, sessions_guard: bool) -> grpc.aio.Server:
        sessions = runtime.sessions if sessions_guard else None
        policy = RpcPolicy(
            sessions,
            runtime.before_answer,
            Admission(),
            self._uid_of,
            before_work=lambda: runtime.failpoints.hit("rpc.request") if sessions_guard else None,
        )
        self._policies.append(policy)
        server = make_server([policy], SERVER_OPTIONS)
        add = functools.partial(services.add_to_server, server)
        if sessions_guard:
            add(session_service_pb2.DESCRIPTOR, SessionServicer(runtime))
            add(group_service_pb2.DESCRIPTOR, GroupServicer(runtime))
            add(layer_service_pb2.DESCRIPTOR, LayerServicer(runtime))
            add(nccl_service_pb2.DESCRIPTOR, NcclServicer(runtime))
        admin: AdminServicer = (
            SessionReadingServicer(runtime)
            if sessions_guard
            else AdminServicer(runtime, lambda peer: self._orders.caller_of(peer))
        )
        add(admin_service_pb2.DESCRIPTOR, admin)
        add(health_pb2.DESCRIPTOR, self._health)
        return server

    def _uid_of(self, peer: str) -> int | None:
        """Returns the uid of a caller of api.sock; None if its connection has ended."""
        caller = self._front.caller_of(peer)
        return caller.uid if caller is not None else None

    def _tell_health(self) -> None:
        self._health.set(not self.runtime.refusal)

    def handle_signals(self) -> None:
        """Makes SIGTERM and SIGINT drain the daemon; a second one ends it at once."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled)
            self._signals.append(number)

    def _signalled(self) -> None:
        drain = self.runtime.drain_order
        if drain is not None and drain.ends_at_s is not None:
            self._stop_now.set()
        else:
            self.runtime.drain(self.runtime.settings.drain_s, shutdown=True)

    async def _reap(self) -> None:
        while True:
            await asyncio.sleep(limits.REAPER_INTERVAL_S)
            self.runtime.tick()
            self._tell_health()  # a recovery may have run out of time
            gone = self._parent_is_gone()
            if gone:
                self.runtime.events.add("server.parent_gone", "the process that started us is gone")
            if gone or self.runtime.should_stop:
                self._stop_now.set()

    async def _feed_watchdog(self) -> None:
        """Pings systemd, which kills a daemon whose event loop hangs (WatchdogSec)."""
        watchdog_s = env.watchdog_s()
        while watchdog_s is not None:
            systemd.notify(env.notify_socket(), "WATCHDOG=1")
            await asyncio.sleep(watchdog_s / 3)

    def _parent_is_gone(self) -> bool:
        """Returns whether the parent has ended; its private daemon must then end too."""
        if self._settings.parent_pidfd is None:
            return False
        poll = select.poll()
        poll.register(self._settings.parent_pidfd, select.POLLIN)
        return bool(poll.poll(0))

    async def run_until_stopped(self) -> None:
        """Waits until the daemon must end: a signal, drained, idle, or its parent has ended."""
        await self._stop_now.wait()

    async def stop(self) -> None:
        """Ends every server. Clients keep their mapped memory, and boards stay unchanged, so that
        an upgrade of the daemon does not disturb a running step."""
        loop = asyncio.get_running_loop()
        for number in self._signals:
            loop.remove_signal_handler(number)
        await self.runtime.supervisor.stop()
        self.runtime.ending = True
        self._tell_health()
        if self.metrics is not None:
            await self.metrics.stop()
        await self._fd_server.close()
        if self._node_server is not None and self.runtime.cluster is not None:
            await self.runtime.cluster.stop()
            self._node_policy.end()
            await self._node_server.stop(STOP_GRACE_S)
        for policy in self._policies:
            policy.end()
        for session in self.runtime.sessions.all():
            session.tell(None)
        await asyncio.gather(self._api.stop(STOP_GRACE_S), self._admin.stop(STOP_GRACE_S))
        self._front.close()
        self._orders.close()
        await self._disposal.close()
        self.runtime.recorder.flush()
        self.runtime.recorder.stop()
        self.runtime.sessions.shut_down()
        await self.runtime.unique_ids.close()
        await self.runtime.pool.settle()
        self.runtime.pool.close()
        self.runtime.journal.close()
        self.runtime.events.add("server.stopped", f"pid {os.getpid()} ends")
        self.runtime.events.close()
        self.runtime.audit.close()
        self._directory.close(remove=self._settings.parent_pidfd is not None)
