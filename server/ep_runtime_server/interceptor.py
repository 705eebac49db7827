"""What holds for every RPC: a deadline, a token, a well-formed request, structured errors."""

from __future__ import annotations

import contextvars
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from ep_runtime import wire
from ep_runtime.errors import (
    EpRuntimeError,
    InvalidArgumentError,
    PermissionDeniedError,
    SessionFencedError,
)
from ep_runtime_server.sessions import Session, Sessions, SessionState

_SERVICE = "/ep_runtime.v1."
_NO_TOKEN = f"{_SERVICE}SessionService/GetServerInfo"
_CLOSE = f"{_SERVICE}SessionService/CloseSession"
_NEEDS_JOB = tuple(f"{_SERVICE}{name}Service/" for name in ("Group", "Layer", "Nccl"))
_ADMIN = f"{_SERVICE}AdminService/"

_current: contextvars.ContextVar[Session] = contextvars.ContextVar("session")


def current_session() -> Session:
    """The session of the RPC being handled on api.sock."""
    return _current.get()


class _Malformed:
    """Stands for a request that is no message of its type."""


class RpcPolicy(grpc.aio.ServerInterceptor):
    """Health and other foreign services pass through untouched.

    With `sessions` None (admin.sock, guarded by its mode) no token is asked for.
    """

    def __init__(self, sessions: Sessions | None, before_answer: Callable[[str], None]) -> None:
        """`before_answer(method)` runs when a unary call did its work; it may still refuse."""
        self._sessions = sessions
        self._before_answer = before_answer

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or not method.startswith(_SERVICE):
            return handler
        metadata = dict(handler_call_details.invocation_metadata)
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(
                self._streaming(handler.unary_stream, method, metadata),
                request_deserializer=_tolerant(handler.request_deserializer),
                response_serializer=handler.response_serializer,
            )
        return grpc.unary_unary_rpc_method_handler(
            self._unary(handler.unary_unary, method, metadata),
            request_deserializer=_tolerant(handler.request_deserializer),
            response_serializer=handler.response_serializer,
        )

    def _unary(self, inner: Any, method: str, metadata: dict[str, Any]) -> Any:
        async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            try:
                if context.time_remaining() is None:
                    raise InvalidArgumentError(f"{method} needs a deadline", argument="deadline")
                self._check(method, metadata, request)
                answer = await inner(request, context)
                self._before_answer(method)
                return answer
            except Exception as error:  # noqa: BLE001 - the one place where errors become statuses
                return await _abort(context, method, error)

        return call

    def _streaming(self, inner: Any, method: str, metadata: dict[str, Any]) -> Any:
        async def call(
            request: Any, context: grpc.aio.ServicerContext[Any, Any]
        ) -> AsyncIterator[Any]:
            try:
                self._check(method, metadata, request)
                async for response in inner(request, context):
                    yield response
            except Exception as error:  # noqa: BLE001 - the one place where errors become statuses
                await _abort(context, method, error)

        return call

    def _check(self, method: str, metadata: dict[str, Any], request: Any) -> None:
        if self._sessions is not None and method != _NO_TOKEN:
            session = self._authenticate(self._sessions, method, metadata)
            _current.set(session)
        if isinstance(request, _Malformed):
            raise InvalidArgumentError(f"{method}: the request is not a message of its type")

    def _authenticate(self, sessions: Sessions, method: str, metadata: dict[str, Any]) -> Session:
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
        if method.startswith(_ADMIN) and session.uid not in (0, os.geteuid()):
            raise PermissionDeniedError(
                f"uid {session.uid} may not administer the daemon of uid {os.geteuid()}",
                uid=session.uid,
            )
        return session


def _tolerant(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """gRPC would answer UNKNOWN, as for a crash of ours."""

    def call(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError:
            return _Malformed()

    return call


async def _abort(
    context: grpc.aio.ServicerContext[Any, Any], method: str, error: Exception
) -> None:
    if isinstance(error, grpc.aio.AbortError):
        raise error
    if not isinstance(error, EpRuntimeError):
        logging.getLogger(__name__).error("%s failed", method, exc_info=error)
        error = EpRuntimeError(f"{method} failed inside the daemon: {type(error).__name__}")
    failure = wire.error_to_status(error)
    await context.abort(failure.code, failure.message, failure.trailing_metadata)
