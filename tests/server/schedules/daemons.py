"""Lives of a daemon, one after another: the objects of a `Daemon` without its sockets."""

from __future__ import annotations

import asyncio
import contextvars
import shutil
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from ep_runtime.errors import EpRuntimeError
from ep_runtime_server.base.failpoints import Failpoints
from ep_runtime_server.callers.sessions import SessionRecord
from ep_runtime_server.cluster.cluster import Cluster
from ep_runtime_server.config import ServerConfig
from ep_runtime_server.journal.file import Journal
from ep_runtime_server.memory.fd_store import FdStore
from ep_runtime_server.nodes.config import ClusterConfig, Endpoint
from ep_runtime_server.rpc import interceptor
from ep_runtime_server.rpc.group_servicer import GroupServicer
from ep_runtime_server.rpc.nccl_servicer import NcclServicer
from ep_runtime_server.runtime import Runtime
from schedules.clock import VirtualLoop
from schedules.links import LinkedPeers, Links, failure_of

COORDINATOR = "a"
REAP_S = 1.0

life_of_task: contextvars.ContextVar[Life | None] = contextvars.ContextVar("life", default=None)


class GoneError(Exception):
    """The daemon ended during the call."""


class _Context:
    """The part of a gRPC context that the services use."""

    @staticmethod
    def auth_context() -> dict[str, Any]:
        return {}


class _Methods:
    """A server that only records the methods it serves."""

    def __init__(self) -> None:
        self.of: dict[str, Any] = {}

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        """Does nothing: the same handlers are registered by name."""

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        self.of.update(handlers)


class Life:
    """A daemon from its start to its end. `life_of_task` names the life of each task."""

    def __init__(
        self,
        name: str,
        directory: Path,
        loop: VirtualLoop,
        links: Links,
        fault: Callable[[str], None],
    ) -> None:
        """`fault(text)` is called for everything that no daemon may do."""
        self.name = name
        self.alive = True
        self.directory = directory
        self.tasks: set[asyncio.Task[Any]] = set()
        self._loop = loop
        self._fault = fault
        self._context = contextvars.copy_context()
        self._context.run(life_of_task.set, self)
        self._context.run(self._start, links)

    def _start(self, links: Links) -> None:
        other = None if self.name == COORDINATOR else Endpoint(COORDINATOR, 1)
        config = ClusterConfig(self.name, Endpoint(self.name, 1), other)
        settings = ServerConfig(self.directory, max_host_bytes=1 << 30, cluster=config)
        journal = Journal(self.directory / "journal", Failpoints())
        self.runtime = runtime = Runtime(settings, self._loop, journal)
        runtime.restore(FdStore(None, {}), {})
        self.cluster = cluster = Cluster(
            config,
            self.directory / "cluster",
            runtime.incarnation,
            self._loop,
            runtime.events,
            runtime.failpoints,
        )
        cluster.peers = LinkedPeers(self, links, None, self._loop, None, cluster.facts.durable)
        cluster.address = f"{self.name}:1"
        server: Any = _Methods()
        cluster.start(server, runtime.groups, runtime.recovery.take_restored())
        self._methods = server.of
        assert cluster.coordination is not None
        assert cluster.spanning is not None
        self.spanning = cluster.spanning
        runtime.unique_ids.of_view = cluster.coordination.unique_ids
        runtime.cluster = cluster
        self.groups = GroupServicer(runtime)
        self.nccl = NcclServicer(runtime)
        cluster.begin(runtime.supervisor)
        runtime.supervisor.keep("reaper", self._reap)

    async def _reap(self) -> None:
        while True:
            await asyncio.sleep(REAP_S)
            self.runtime.tick()

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        return self._loop.create_task(work, context=self._context.copy())

    def do(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """Runs an event that is not a call: a process that connects, or ends."""
        return self._context.copy().run(work, *arguments)

    def serve(self, method: str, data: bytes, within_s: float) -> asyncio.Task[bytes]:
        """Serves a call of another daemon."""
        return self.spawn(self._serve(method, data, within_s))

    async def _serve(self, method: str, data: bytes, within_s: float) -> bytes:
        handler = self._methods[method]
        try:
            async with asyncio.timeout(within_s):
                found = await handler.unary_unary(handler.request_deserializer(data), _Context())
                await self.cluster.answering(method)
            return handler.response_serializer(found)
        except EpRuntimeError as error:
            raise failure_of(error) from None
        except TimeoutError:
            raise asyncio.CancelledError from None
        except Exception as error:
            if self.alive:
                self._fault(f"{method} failed inside the daemon: {error!r}")
            raise

    async def ask(self, session: SessionRecord, method: Any, request: Any) -> Any:
        """Serves a call of a process. Raises GoneError if the daemon ends meanwhile."""

        async def answered() -> Any:
            interceptor._current.set(session)
            session.check_live()
            found = await method(request, _Context())
            await self.runtime.before_answer(f"/{type(request).__name__.removesuffix('Request')}")
            return found

        call = self.spawn(answered())
        try:
            await asyncio.wait({call})
        except asyncio.CancelledError:
            call.cancel()
            call.add_done_callback(lambda done: done.cancelled() or done.exception())
            raise
        if not self.alive:
            raise GoneError
        if call.cancelled():
            raise AssertionError("a call that nobody cancelled was cancelled")
        return call.result()

    async def leave(self) -> None:
        """Does the steps of a daemon that ends in good order."""
        await self.runtime.supervisor.stop()
        self.runtime.ending = True
        await self.cluster.stop()
        self.runtime.recorder.flush()

    def end(self, successor: Path | None) -> None:
        """Stops all of its tasks; the successor takes its files."""
        self.alive = False
        self.runtime.recorder._stopped = True
        if successor is not None:
            shutil.copytree(self.directory, successor)
        for task in list(self.tasks):
            task.cancel()
        self.runtime.sessions.shut_down()
        self.runtime.journal.close()
        self.cluster.facts.close()
        self.runtime.pool.close()
