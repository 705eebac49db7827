"""Checks the deadline, token and request of each RPC, and makes errors structured.

The checks identify a caller before any byte of its message is read. So all methods are registered
as streams of requests, because gRPC calls such handlers once the metadata is there. On the wire a
single message is a stream of one.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc._cython import cygrpc  # type: ignore[attr-defined]

from ep_runtime import wire
from ep_runtime.errors import (
    EpRuntimeError,
    InvalidArgumentError,
    RuntimeUnavailableError,
    SessionFencedError,
)
from ep_runtime_server.base import open_files
from ep_runtime_server.base.failpoints import LostError
from ep_runtime_server.callers.admission import Admission, AdmittedCall
from ep_runtime_server.callers.sessions import SessionRecord, Sessions, SessionState
from ep_runtime_server.nodes.seal import Seal

_SERVICE = "/ep_runtime.v1."
_NO_TOKEN = f"{_SERVICE}SessionService/GetServerInfo"
_CLOSE = f"{_SERVICE}SessionService/CloseSession"
_NEEDS_JOB = tuple(f"{_SERVICE}{name}Service/" for name in ("Group", "Layer", "Nccl"))
# Methods whose requests may be long, because they have layers, ranks or nodes.
_LONG = ("/CreateGroup", "/RestoreGroup", "/RegisterLayers", "/JoinGroup", "/TellGroup")
MAX_SHORT_BYTES = 64 << 10
# Time limit for a caller to send its request after the metadata.
READ_S = 10.0
MAX_HEALTH_BYTES = 1024
# Longer requests are parsed one per turn, because parsing 1 MB of empty messages takes 50 ms.
PARSED_AT_ONCE_BYTES = 32 << 10
Context = grpc.aio.ServicerContext[Any, Any]
_current: contextvars.ContextVar[SessionRecord] = contextvars.ContextVar("session")
_waits: contextvars.ContextVar[Callable[[], str]] = contextvars.ContextVar("waits")


def current_session() -> SessionRecord:
    """Returns the session of the current RPC on api.sock."""
    return _current.get()


def says_when_ended(text: Callable[[], str]) -> None:
    """Sets how "the daemon ended ..." continues in the error if it ends during this RPC."""
    _waits.set(text)


class RpcPolicy(grpc.aio.ServerInterceptor):
    """Checks each call before its handler runs, and converts errors after it.

    Calls need a session token only if `sessions` is set; the mode of admin.sock guards it instead.
    Health calls need no token either, and have their own limit.
    """

    def __init__(
        self,
        sessions: Sessions | None,
        before_answer: Callable[[str], Awaitable[None]],
        admission: Admission,
        uid_of: Callable[[str], int | None] = lambda peer: None,
        seal: Seal | None = None,
        before_work: Callable[[], None] = lambda: None,
    ) -> None:
        """Sets the checks.

        Args:
            sessions: authenticates callers; None if no token is needed.
            before_answer: called after a unary call's work; may raise to refuse.
            admission: counts and limits calls.
            uid_of: returns the user of a connection of sessions, as the kernel reports it.
            seal: checks the seal of each request, if set.
            before_work: called before a unary call; may raise to refuse.
        """
        self._sessions = sessions
        self._before_answer = before_answer
        self._admission = admission
        self._parsing = asyncio.Lock()  # parse one long request at a time
        self._uid_of = uid_of
        self._seal = seal
        self._before_work = before_work
        self._under_way: set[asyncio.Task[Any]] = set()
        self._ending = False

    def end(self) -> None:
        """Ends running calls with RuntimeUnavailableError, before the server is stopped."""
        self._ending = True
        for task in self._under_way:
            task.cancel()

    async def _handled(self, method: str, work: Awaitable[Any]) -> Any:
        """Awaits `work`; raises RuntimeUnavailableError if the daemon ends first."""
        task = asyncio.current_task()
        assert task is not None
        self._under_way.add(task)
        try:
            return await work
        except asyncio.CancelledError:
            if not self._ending:  # cancelled because the caller disconnected
                raise
            task.uncancel()
            text = _waits.get(lambda: f"before it answered {method.rpartition('/')[2]}")()
            # The error has no fields, so that clients treat the daemon as ended and look for the
            # next one.
            raise RuntimeUnavailableError(f"the daemon ended {text}") from None
        finally:
            self._under_way.discard(task)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None:
            return handler
        metadata = dict(handler_call_details.invocation_metadata)
        if handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(
                self._streaming(handler, method, metadata),
                response_serializer=handler.response_serializer,
            )
        return grpc.stream_unary_rpc_method_handler(self._unary(handler, method, metadata))

    def _unary(self, handler: Any, method: str, metadata: dict[str, Any]) -> Any:
        async def answered(requests: AsyncIterator[bytes], context: Context) -> Any:
            try:
                counted = self._counted(context, method)
                if not method.startswith(_SERVICE):  # Health.Check
                    found = await handler.unary_unary(await _read(requests, handler), context)
                    return handler.response_serializer(found)
                if context.time_remaining() is None:
                    raise InvalidArgumentError(f"{method} needs a deadline", argument="deadline")
                self._before_work()
                admitted = self._admitted(counted, requests, context, handler, method, metadata)
                async with admitted as request:
                    found = await self._handled(method, handler.unary_unary(request, context))
                    await self._before_answer(method)
                    another_nodes = isinstance(found, bytes)
                    answer = found if another_nodes else handler.response_serializer(found)
                    counted.answer(len(answer))
                    return answer
            except Exception as error:  # noqa: BLE001 - all errors become statuses here
                return _failure_of(method, error)

        async def call(requests: AsyncIterator[bytes], context: Context) -> Any:
            # gRPC keeps the frame that aborts until a garbage collection, so that frame must not
            # hold the request.
            answer = await answered(requests, context)
            return await _abort(context, answer) if isinstance(answer, wire.RpcFailure) else answer

        return call

    def _streaming(self, handler: Any, method: str, metadata: dict[str, Any]) -> Any:
        async def call(requests: AsyncIterator[bytes], context: Context) -> AsyncIterator[Any]:
            try:
                counted = self._counted(context, method)
                if not method.startswith(_SERVICE):  # Health.Watch
                    request = await _read(requests, handler)
                    async for response in handler.unary_stream(request, context):
                        yield response
                    return
                admitted = self._admitted(counted, requests, context, handler, method, metadata)
                async with admitted as request:
                    async for response in handler.unary_stream(request, context):
                        yield response
                return
            except Exception as error:  # noqa: BLE001 - all errors become statuses here
                failure = _failure_of(method, error)
            request = None  # gRPC keeps this frame until a garbage collection
            await _abort(context, failure)

        return call

    def _counted(self, context: Context, method: str) -> AdmittedCall:
        """Counts a call until the caller has its answer or ends. Raises PoolExhaustedError."""
        peer = context.peer()
        uid = self._uid_of(peer)
        # Without a uid the caller is a host of the cluster, or a user who may give orders.
        user = f"uid {uid}" if uid is not None else peer.rpartition(":")[0]
        if method.startswith(_SERVICE):
            call = self._admission.call(user)
        else:
            call = self._admission.health_call(user, method)
        over: Any = lambda _: call.end()  # noqa: E731 - for the stubs' type
        context.add_done_callback(over)
        return call

    @contextlib.asynccontextmanager
    async def _admitted(
        self,
        call: AdmittedCall,
        requests: AsyncIterator[bytes],
        context: Context,
        handler: Any,
        method: str,
        metadata: dict[str, Any],
    ) -> AsyncIterator[Any]:
        """Authenticates the caller, waits for room, and reads the request."""
        if self._sessions is not None and method == _NO_TOKEN:
            yield handler.request_deserializer(b"")  # has no fields, so do not read it
            return
        session = None
        if self._sessions is not None:
            session = self._authenticate(self._sessions, method, metadata)
            self._sessions.check_user(session, self._uid_of(context.peer()))
            _current.set(session)
        if self._seal is not None:
            self._seal.check_sender(method, metadata)
        held = wire.MAX_REQUEST_BYTES
        await call.room.take(held)
        try:
            data = await _next(requests)
            call.room.give(held - len(data))
            held = len(data)
            if held > MAX_SHORT_BYTES and not method.endswith(_LONG):
                raise InvalidArgumentError(
                    f"a request of {method} is at most {MAX_SHORT_BYTES} bytes, got {held}"
                )
            if self._seal is not None:
                self._seal.check_request(method, metadata, data)
            if len(data) > PARSED_AT_ONCE_BYTES:
                async with self._parsing:
                    await asyncio.sleep(0)
                    request = _parsed(method, handler, data)
            else:
                request = _parsed(method, handler, data)
            if session is not None and method != _CLOSE:
                session.check_live()  # may have ended while we read the request
            yield request
        finally:
            call.room.give(held)

    def _authenticate(
        self, sessions: Sessions, method: str, metadata: dict[str, Any]
    ) -> SessionRecord:
        token = metadata.get(wire.TOKEN_KEY)
        if not isinstance(token, str):
            raise SessionFencedError(f"{method} needs {wire.TOKEN_KEY}; say hello on fd.sock first")
        pid_text = metadata.get(wire.PID_KEY)
        if pid_text is not None and not (str(pid_text).isdecimal() and len(pid_text) < 12):
            raise InvalidArgumentError(f"{wire.PID_KEY} must be a pid", argument=wire.PID_KEY)
        pid = int(pid_text) if pid_text is not None else None
        if method == _CLOSE:
            return sessions.authenticate(token, pid)
        session = sessions.authenticate_live(token, pid)
        if method.startswith(_NEEDS_JOB) and session.state is SessionState.CONNECTED:
            raise InvalidArgumentError(f"{method}: call OpenSession first", argument="session")
        return session


async def _next(requests: AsyncIterator[bytes]) -> bytes:
    """Reads the single message of a call. Raises InvalidArgumentError if none arrives in time."""
    try:
        async with asyncio.timeout(READ_S):
            return await anext(aiter(requests))
    except StopAsyncIteration:
        raise InvalidArgumentError("the call ended without a request") from None
    except TimeoutError:
        raise InvalidArgumentError(f"no request came within {READ_S:g} s") from None


def _parsed(method: str, handler: Any, data: bytes) -> Any:
    try:
        return handler.request_deserializer(data)
    except DecodeError as error:
        raise InvalidArgumentError(f"{method}: the request is not a message of its type") from error


async def _read(requests: AsyncIterator[bytes], handler: Any) -> Any:
    """Reads and parses a request of the health service, from any caller."""
    data = await _next(requests)
    if len(data) > MAX_HEALTH_BYTES:
        raise InvalidArgumentError(f"a health request is at most {MAX_HEALTH_BYTES} bytes")
    return _parsed("health", handler, data)


def _failure_of(method: str, error: Exception) -> wire.RpcFailure:
    """Converts an error to a status; raises the error if the call has already ended."""
    if isinstance(error, (grpc.aio.AbortError, grpc.aio.InternalError)):
        raise error
    # A method of a gRPC service that we do not implement, such as in a newer health service.
    if isinstance(error, NotImplementedError):
        return wire.RpcFailure(grpc.StatusCode.UNIMPLEMENTED, f"{method} is not served", ())
    if isinstance(error, LostError):
        return wire.RpcFailure(grpc.StatusCode.UNAVAILABLE, str(error), ())
    if isinstance(error, OSError) and open_files.is_shortage(error):
        error = open_files.exhausted(method, error)
    if not isinstance(error, EpRuntimeError):
        logging.getLogger(__name__).error("%s failed", method, exc_info=error)
        ours = EpRuntimeError(f"{method} failed inside the daemon: {type(error).__name__}")
        failure = wire.error_to_status(ours)
    else:
        failure = wire.error_to_status(error)
    # Drop the error's frames, which hold the request in cycles until a garbage collection.
    error.__traceback__ = error.__cause__ = error.__context__ = None
    return failure


async def _abort(context: Context, failure: wire.RpcFailure) -> None:
    """Sends a failure to the caller; does not log if the caller has disconnected."""
    if context.done():
        raise asyncio.CancelledError
    await context.abort(*failure)


class _Calls(cygrpc.AioServer):  # type: ignore[misc]
    """gRPC's server, which refuses calls of unregistered methods at once.

    In grpc.aio a single task accepts all calls, and decodes the paths of unregistered methods. A
    path that cannot be decoded ends this task, so one request without a token would stop the
    server. All our methods are registered.
    """

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
