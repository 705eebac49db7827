"""Results of mutations by op id, so that a retry after a lost answer gets the same answer."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
from collections.abc import Awaitable, Callable
from typing import Any

from google.protobuf.message import Message

from ep_runtime.errors import InvalidArgumentError, SessionFencedError
from ep_runtime_server.clock import Clock
from ep_runtime_server.config import OPERATION_LIFE_S

MAX_OP_ID_BYTES = 64
MAX_OPERATIONS = 100_000
# A bigger answer is computed anew: such calls (RegisterLayers) are idempotent by themselves.
MAX_KEPT_BYTES = 64 << 10


@dataclasses.dataclass
class _Operation:
    digest: bytes
    task: asyncio.Task[Any]
    started_s: float


class Operations:
    """Running and finished operations of all sessions."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._operations: dict[tuple[str, str, str], _Operation] = {}

    async def run(
        self,
        session_id: str,
        op_id: str,
        request: Message,
        work: Callable[[], Awaitable[Any]],
    ) -> Any:
        """`work()`'s answer, run once per (session, op id, kind of request).

        A caller that goes away does not end the work, so a retry finds it.

        Raises:
            InvalidArgumentError: no op id, or one that another request used.
        """
        if not 1 <= len(op_id.encode()) <= MAX_OP_ID_BYTES:
            raise InvalidArgumentError(
                f"op_id must be 1 to {MAX_OP_ID_BYTES} bytes, got {len(op_id.encode())}",
                argument="op_id",
            )
        digest = hashlib.sha256(request.SerializeToString(deterministic=True)).digest()
        key = (session_id, request.DESCRIPTOR.full_name, op_id)
        known = self._operations.get(key)
        if known is None:
            task = asyncio.get_running_loop().create_task(_as_coroutine(work))
            known = _Operation(digest, task, self._clock.monotonic_s())
            self._operations[key] = known
            task.add_done_callback(lambda done: self._finished(key, done))
        elif known.digest != digest:
            raise InvalidArgumentError(
                f"op_id {op_id!r} was used for another {request.DESCRIPTOR.name}",
                argument="op_id",
            )
        try:
            return await asyncio.shield(known.task)
        except asyncio.CancelledError:
            if not known.task.cancelled():
                raise  # it is the caller that goes away; the work goes on
            raise SessionFencedError("the session ended while this call ran") from None

    def _finished(self, key: tuple[str, str, str], task: asyncio.Task[Any]) -> None:
        # A failure is not kept: the retry is a new attempt.
        failed = task.cancelled() or task.exception() is not None
        if failed or task.result().ByteSize() > MAX_KEPT_BYTES:
            self._operations.pop(key, None)

    def forget_session(self, session_id: str) -> None:
        """Drops results, and cancels what still runs for a session that is over."""
        for key in [key for key in self._operations if key[0] == session_id]:
            self._operations.pop(key).task.cancel()

    def expire(self) -> None:
        """Drops old results; the oldest first where there are too many."""
        now = self._clock.monotonic_s()
        for key, operation in list(self._operations.items()):
            surplus = len(self._operations) > MAX_OPERATIONS
            if not surplus and now - operation.started_s < OPERATION_LIFE_S:
                break  # insertion order is age order
            if operation.task.done():
                del self._operations[key]


async def _as_coroutine(work: Callable[[], Awaitable[Any]]) -> Any:
    return await work()
