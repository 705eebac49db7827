"""gRPC's server, such that no path of a request ends it.

grpc.aio decodes the path of a call that no registered method takes in the one task that takes all
calls. Where it is no text, that task ends, and nobody is answered any more: one request of any
caller, before it shows a token, a seal or anything else. Here such calls never reach that task:
every method of ours is a registered one, and all others are refused without a look at their names.
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
    # Raised by the abort itself, or because the caller is gone.
    with contextlib.suppress(grpc.aio.BaseError):
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")


def make_server(
    interceptors: Sequence[grpc.aio.ServerInterceptor], options: Sequence[tuple[str, Any]]
) -> grpc.aio.Server:
    """Makes a `grpc.aio.server` for registered methods, as `services.add_to_server` adds them."""
    stock = cygrpc.AioServer
    if not hasattr(stock, "_request_registered_call"):  # releases where all calls use _request_call
        return grpc.aio.server(interceptors=interceptors, options=options)
    cygrpc.AioServer = _Calls  # gRPC's releases derive their servers from different classes
    try:
        return grpc.aio.server(interceptors=interceptors, options=options)
    finally:
        cygrpc.AioServer = stock
