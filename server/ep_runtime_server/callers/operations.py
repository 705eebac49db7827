"""Stores results of mutations by op id, so that a retry of a call gets the same answer."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import hashlib
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from google.protobuf.message import Message

from ep_runtime.errors import EpRuntimeError, InvalidArgumentError, SessionFencedError
from ep_runtime_server.base.clock import Clock
from ep_runtime_server.base.limits import OPERATION_LIFE_S

MAX_OP_ID_BYTES = 64
# Latest answers saved per session, which is enough because clients retry within seconds.
MAX_KEPT = 256
MAX_KEPT_BYTES_OF_SESSION = 256 << 10
# Larger answers are not saved but computed again: such calls (RegisterLayers) are idempotent.
MAX_KEPT_BYTES = 64 << 10


@dataclasses.dataclass
class _Operation:
    digest: bytes
    task: asyncio.Task[Any]
    started_s: float
    kept_bytes: int = 0


# Operations by (kind of request, op id), the oldest first.
_OfSession = dict[tuple[str, str], _Operation]


class Operations:
    """The running and finished operations of all sessions."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._of_session: dict[str, _OfSession] = {}

    async def run(
        self,
        session_id: str,
        op_id: str,
        request: Message,
        work: Callable[[], Coroutine[Any, Any, Any]],
    ) -> Any:
        """Returns the answer of `work()`, called once per (session, op id, kind of request).

        The work continues if its caller disconnects, so that a retry finds it.

        Raises:
            InvalidArgumentError: the op id is missing, or another request used it.
        """
        if not 1 <= len(op_id.encode()) <= MAX_OP_ID_BYTES:
            raise InvalidArgumentError(
                f"op_id must be 1 to {MAX_OP_ID_BYTES} bytes, got {len(op_id.encode())}",
                argument="op_id",
            )
        digest = hashlib.sha256(request.SerializeToString(deterministic=True)).digest()
        key = (request.DESCRIPTOR.full_name, op_id)
        operations = self._of_session.setdefault(session_id, {})
        known = operations.get(key)
        if known is None:
            task = asyncio.get_running_loop().create_task(work())
            known = _Operation(digest, task, self._clock.monotonic_s())
            operations[key] = known
            task.add_done_callback(lambda done: self._finished(session_id, key, done))
        elif known.digest != digest:
            raise InvalidArgumentError(
                f"op_id {op_id!r} was used for another {request.DESCRIPTOR.name}", argument="op_id"
            )
        try:
            return await asyncio.shield(known.task)
        except asyncio.CancelledError:
            if not known.task.cancelled():  # the caller disconnected; the work continues
                known.task.add_done_callback(functools.partial(_log_fault, request.DESCRIPTOR.name))
                raise
            raise SessionFencedError("the session ended while this call ran") from None

    def _finished(self, session_id: str, key: tuple[str, str], task: asyncio.Task[Any]) -> None:
        operations = self._of_session.get(session_id, {})
        known = operations.get(key)
        # Failures are not saved: a retry is a new attempt.
        failed = task.cancelled() or task.exception() is not None
        if known is None or known.task is not task:
            return
        known.kept_bytes = 0 if failed else task.result().ByteSize()
        if failed or known.kept_bytes > MAX_KEPT_BYTES:
            del operations[key]
        self._drop_surplus(operations)
        if not operations:
            self._of_session.pop(session_id, None)

    def _drop_surplus(self, operations: _OfSession) -> None:
        done = [key for key, operation in operations.items() if operation.task.done()]
        kept_bytes = sum(operations[key].kept_bytes for key in done)
        for position, key in enumerate(done):
            if len(done) - position <= MAX_KEPT and kept_bytes <= MAX_KEPT_BYTES_OF_SESSION:
                break
            kept_bytes -= operations.pop(key).kept_bytes

    def forget_session(self, session_id: str) -> None:
        """Drops the results and cancels the running operations of an ended session."""
        for operation in self._of_session.pop(session_id, {}).values():
            operation.task.cancel()

    def expire(self) -> None:
        """Drops results older than OPERATION_LIFE_S."""
        now = self._clock.monotonic_s()
        for session_id, operations in list(self._of_session.items()):
            for key, operation in list(operations.items()):
                if now - operation.started_s < OPERATION_LIFE_S:
                    break  # the rest are younger
                if operation.task.done():
                    del operations[key]
            if not operations:
                del self._of_session[session_id]


def _log_fault(name: str, task: asyncio.Task[Any]) -> None:
    """Logs an unexpected error of an operation whose caller has disconnected."""
    error = None if task.cancelled() else task.exception()
    if error is not None and not isinstance(error, EpRuntimeError):
        logging.getLogger(__name__).error(
            "%s failed, and its caller had gone", name, exc_info=error
        )
