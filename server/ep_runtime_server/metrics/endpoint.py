"""The HTTP endpoint of `serve --metrics`, which only answers GET /metrics.

The event loop collects values in short turns, and a thread encodes them. The endpoint answers one
scrape at a time, and limits requests and connections, because anybody may reach the address.
"""

from __future__ import annotations

import asyncio
import http
import logging
import socket

from ep_runtime.errors import InvalidArgumentError
from ep_runtime_server.base.supervision import Tasks
from ep_runtime_server.metrics.collector import Collector
from ep_runtime_server.nodes.config import Endpoint
from ep_runtime_server.runtime import Runtime

PATH = "/metrics"
MAX_REQUEST_BYTES = 8 << 10
MAX_CONNECTIONS = 16
REQUEST_S = 5.0  # time limit to send a request, and again to read the answer

# Errors that callers cause: they disconnect, are too slow, or send too long a request.
_CALLERS_OWN = (
    ConnectionError,
    TimeoutError,
    asyncio.IncompleteReadError,
    asyncio.LimitOverrunError,
)


class MetricsEndpoint:
    """Answers scrapes from `start` until `stop`; `address` has the port in use."""

    def __init__(self, runtime: Runtime, listen: Endpoint, *, detail: bool) -> None:
        """Binds the address. Needs the pip extra `metrics`.

        Raises:
            InvalidArgumentError: the address cannot be bound.
        """
        from ep_runtime_server.metrics import exposition

        self._encode = exposition.encode
        self._detail = detail
        self._runtime = runtime
        self._collector = Collector(runtime, detail=detail)
        self._socket = _bind(listen)
        self.address = Endpoint(listen.host, self._socket.getsockname()[1])
        self._scraping = asyncio.Lock()
        self._connections = Tasks(runtime.events, "metrics")
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Starts to answer, and adds an event with the address."""
        self._server = await asyncio.start_server(
            self._connected, sock=self._socket, limit=MAX_REQUEST_BYTES
        )
        where = f"http://{self.address}{PATH}"
        exposed = not self.address.is_loopback
        self._runtime.events.add(
            "server.metrics",
            f"metrics at {where}"
            + (", which names every user's jobs to whoever reaches it" if exposed else ""),
            level=logging.WARNING if exposed else logging.INFO,
            address=where,
        )

    async def stop(self) -> None:
        """Ends all connections and frees the port."""
        if self._server is not None:
            self._server.close()
        await self._connections.stop()
        self._socket.close()

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._connections.running) >= MAX_CONNECTIONS:
            writer.transport.abort()
            return
        self._connections.start(self._serve(reader, writer))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(REQUEST_S):
                request = await reader.readuntil(b"\r\n\r\n")
            writer.write(await self._answer(request))
            async with asyncio.timeout(REQUEST_S):
                writer.close()
                await writer.wait_closed()
        except _CALLERS_OWN:
            pass
        finally:
            writer.transport.abort()

    async def _answer(self, request: bytes) -> bytes:
        head, *lines = request.decode("latin-1").split("\r\n")
        method, _, rest = head.partition(" ")
        if method != "GET":
            return _response(http.HTTPStatus.METHOD_NOT_ALLOWED, b"GET only\n", "Allow: GET")
        if rest.partition(" ")[0].partition("?")[0] != PATH:
            return _response(http.HTTPStatus.NOT_FOUND, f"see {PATH}\n".encode())
        headers = dict(line.lower().split(":", 1) for line in lines if ":" in line)
        async with self._scraping:
            sheet = await self._collector.collect()
            body, kind = await asyncio.to_thread(
                self._encode, sheet, headers.get("accept", "").strip(), detail=self._detail
            )
        return _response(http.HTTPStatus.OK, body, f"Content-Type: {kind}")


def _response(status: http.HTTPStatus, body: bytes, header: str = "") -> bytes:
    head = [f"HTTP/1.1 {status.value} {status.phrase}", f"Content-Length: {len(body)}"]
    lines = [*head, "Connection: close", *filter(None, [header]), "", ""]
    return "\r\n".join(lines).encode() + body


def _bind(listen: Endpoint) -> socket.socket:
    family = socket.AF_INET6 if ":" in listen.host else socket.AF_INET
    try:
        return socket.create_server((listen.host, listen.port), family=family)
    except OSError as error:
        reason = error.strerror or str(error)
        raise InvalidArgumentError(
            f"--metrics cannot listen on {listen}: {reason}; port 0 takes a free one",
            argument="--metrics",
        ) from error
