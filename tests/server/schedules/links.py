"""Links between daemons: calls are delayed, delivered, answered, lost either way, or cut."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any, Protocol

import grpc

from ep_runtime import wire
from ep_runtime_server.nodes.peers import Peers

_USUAL_S, _LATE_S, _VERY_LATE_S = 0.002, 0.05, 1.0


class Server(Protocol):
    """A daemon as its peers call it."""

    name: str
    alive: bool

    def serve(self, method: str, data: bytes, within_s: float) -> asyncio.Task[bytes]: ...


class Links:
    """All links of the cluster.

    Attributes:
        cut: (from, to) over which nothing comes.
        stopped_until_s: by node: nothing comes or goes before.
        loss: of how many calls the connection breaks, before or after the work was done.
        very_late_until_s: when the message arrives that takes longer than any should.
        fifo: whether what follows on a link comes after what went before.
    """

    def __init__(self, seed: int, find: Callable[[str], Server | None]) -> None:
        self._random = random.Random(seed)
        self._find = find
        self._last_s: dict[tuple[str, str], float] = {}
        self.cut: set[tuple[str, str]] = set()
        self.stopped_until_s: dict[str, float] = {}
        self.loss = 0.0
        self.very_late_until_s = 0.0
        self.fifo = self._random.random() < 0.5
        self.late = self._random.choice([0.0, 0.02, 0.2])
        self.num_calls = 0

    def _arrives_in(self, source: str, target: str) -> float:
        now = asyncio.get_running_loop().time()
        chance = self._random.random()
        most = _VERY_LATE_S if chance < self.late / 10 else _LATE_S if chance < self.late else 0.0
        at = now + self._random.uniform(0.0, most or _USUAL_S)
        if most == _VERY_LATE_S:
            self.very_late_until_s = at
        at = max(at, *(self.stopped_until_s.get(name, 0.0) for name in (source, target)))
        if self.fifo:
            at = max(at, self._last_s.get((source, target), 0.0))
        self._last_s[source, target] = at
        return at - now

    async def _travel(self, source: str, target: str) -> None:
        await asyncio.sleep(self._arrives_in(source, target))
        if (source, target) in self.cut:
            await asyncio.get_running_loop().create_future()  # until the caller's deadline

    async def call(
        self, source: Server, target: str, method: str, data: bytes, within_s: float
    ) -> bytes:
        """Makes one unary call. Raises grpc.aio.AioRpcError as gRPC does."""
        self.num_calls += 1
        breaks = None
        if self._random.random() < self.loss:
            breaks = self._random.choice([0.0, 0.004, 0.1, within_s / 2])
        try:
            async with asyncio.timeout(within_s if breaks is None else breaks):
                return await self._carry(source, target, method, data, within_s)
        except TimeoutError:
            if breaks is None:
                raise _failure(grpc.StatusCode.DEADLINE_EXCEEDED, "no answer in time") from None
            raise _failure(grpc.StatusCode.UNAVAILABLE, "connection reset") from None

    async def _carry(
        self, source: Server, target: str, method: str, data: bytes, within_s: float
    ) -> bytes:
        await self._travel(source.name, target)
        server = self._find(target)
        if server is None or not server.alive:
            await self._travel(target, source.name)
            raise _failure(grpc.StatusCode.UNAVAILABLE, "connection refused")
        work = server.serve(method, data, within_s)
        work.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            await asyncio.wait({work})
        except asyncio.CancelledError:
            self._cancel(source.name, target, work)
            raise
        if not server.alive:
            await self._travel(target, source.name)
            raise _failure(grpc.StatusCode.UNAVAILABLE, "socket closed")
        await self._travel(target, source.name)
        if work.cancelled():
            raise _failure(grpc.StatusCode.CANCELLED, "cancelled there")
        return work.result()

    def _cancel(self, source: str, target: str, work: asyncio.Task[bytes]) -> None:
        """Cancels the call at the callee, unless the link is cut; then its deadline
        ends the work.
        """
        if (source, target) not in self.cut:
            loop = asyncio.get_running_loop()
            loop.call_later(self._arrives_in(source, target), work.cancel)


def _failure(code: grpc.StatusCode, text: str) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), text)


def failure_of(error: Any) -> grpc.aio.AioRpcError:
    """Converts one of our errors to the one that gRPC raises at the caller."""
    told = wire.error_to_status(error)
    trailing = grpc.aio.Metadata(*told.trailing_metadata)
    return grpc.aio.AioRpcError(told.code, grpc.aio.Metadata(), trailing, told.message)


class LinkedPeers(Peers):
    """Sends calls over `Links`; inherits everything else from the daemon."""

    def __init__(self, source: Server, links: Links, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._source = source
        self._links = links

    def _channel(self, name: str, address: str) -> Any:
        return _Channel(self._source, self._links, address.partition(":")[0])


class _Channel:
    def __init__(self, source: Server, links: Links, target: str) -> None:
        self._source, self._links, self._target = source, links, target

    def unary_unary(self, path: str) -> Any:
        async def call(data: bytes, timeout: float, metadata: Any) -> bytes:
            method = path.rpartition("/")[2]
            return await self._links.call(self._source, self._target, method, data, timeout)

        return call
