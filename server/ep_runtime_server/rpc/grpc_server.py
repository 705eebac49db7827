"""Makes gRPC servers that an invalid request path cannot stop.

In grpc.aio a single task accepts all calls, and decodes the paths of unregistered methods. A path
that cannot be decoded ends this task, so one request without any token would stop the server. So
all our methods are registered with gRPC, and all other calls are refused without decoding paths.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any

import grpc
from grpc._cython import cygrpc  # type: ignore[attr-defined]


class _Calls(cygrpc.AioServer):  # type: ignore[misc]
    """gRPC's server, which refuses calls of unregistered methods at once."""

    async def _request_call(self) -> Any:
        refusals: set[asyncio.Task[None]] = set()
        while True:
            refusal = asyncio.create_task(_refuse(await super()._request_call()))
            refusals.add(refusal)
            refusal.add_done_callback(refusals.discard)


async def _refuse(call: Any) -> None:
    context = cygrpc._ServicerContext(call, None, None, asyncio.get_running_loop())
    # Raised by the abort itself, or because the caller has disconnected.
    with contextlib.suppress(grpc.aio.BaseError):
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")


def make_server(
    interceptors: Sequence[grpc.aio.ServerInterceptor], options: Sequence[tuple[str, Any]]
) -> grpc.aio.Server:
    """Makes a `grpc.aio.server` for registered methods, as `services.add_to_server` adds them."""
    stock = cygrpc.AioServer
    if not hasattr(stock, "_request_registered_call"):  # older gRPC: all calls use _request_call
        return grpc.aio.server(interceptors=interceptors, options=options)
    cygrpc.AioServer = _Calls  # `grpc.aio.server` makes the server from this class
    try:
        return grpc.aio.server(interceptors=interceptors, options=options)
    finally:
        cygrpc.AioServer = stock
