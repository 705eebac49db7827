"""The two threads of a session: heartbeats out, events in."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import grpc

from ep_runtime import errors
from ep_runtime.v1 import session_service_pb2, types_pb2
from ep_runtime_client import transport

_log = logging.getLogger("ep_runtime")

_JOIN_TIMEOUT_S = 5.0
_GONE_STATES = (types_pb2.GROUP_STATE_BROKEN, types_pb2.GROUP_STATE_CLOSED)


class Pulse:
    """Keeps a session ACTIVE at the daemon and passes on what the daemon says.

    Args:
        control: the session's RPCs.
        interval_s: between heartbeats.
        on_end: called with the error when the daemon ended the session.
        on_group_gone: called with (name, generation, reason) when a group was taken away.
    """

    def __init__(
        self,
        control: transport.ControlChannel,
        interval_s: float,
        on_end: Callable[[errors.EpRuntimeError], None],
        on_group_gone: Callable[[str, int, str], None],
    ) -> None:
        self._control = control
        self._interval_s = interval_s
        self._on_end = on_end
        self._on_group_gone = on_group_gone
        self._stopped = threading.Event()
        self._answered = True
        self._stream: Any = None
        self._threads = [
            threading.Thread(target=self._beat, name="ep-runtime-heartbeat", daemon=True),
            threading.Thread(target=self._watch, name="ep-runtime-events", daemon=True),
        ]

    def start(self) -> None:
        """Starts both threads."""
        self._stream = self._control.stream(
            self._control.sessions.WatchSession, session_service_pb2.WatchSessionRequest()
        )
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Ends both threads; bounded."""
        self._stopped.set()
        if self._stream is not None:
            self._stream.cancel()
        for thread in self._threads:
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join(_JOIN_TIMEOUT_S)

    def _beat(self) -> None:
        progress = 0
        while not self._stopped.wait(self._interval_s):
            progress += 1
            request = session_service_pb2.HeartbeatRequest(progress=progress)
            try:
                self._control.call(self._control.sessions.Heartbeat, request)
                self._say(True, "the daemon answers again")
            except errors.SessionFencedError as error:
                self._finish(error)
                return
            except errors.EpRuntimeError as error:
                self._say(False, str(error))

    def _say(self, answered: bool, text: str) -> None:
        """Logs only where the state changed; a daemon that is gone must not fill the log."""
        if answered != self._answered and not self._stopped.is_set():
            self._answered = answered
            _log.warning("heartbeat: %s", text)

    def _watch(self) -> None:
        try:
            for event in self._stream:
                self._take(event)
        except grpc.RpcError as error:
            ours = self._control.translated(error)
            if isinstance(ours, errors.SessionFencedError):
                self._finish(ours)

    def _take(self, event: session_service_pb2.WatchSessionResponse) -> None:
        kind = event.WhichOneof("event")
        if kind == "fence":
            self._finish(
                errors.SessionFencedError(
                    f"this session was fenced: {event.fence.reason}; connect again and create the "
                    "groups anew",
                    reason=event.fence.reason,
                )
            )
        elif kind == "drain":
            _log.warning("the daemon drains and ends soon; it admits no new session or group")
        elif kind == "group" and event.group.state in _GONE_STATES:
            reason = event.group.reason or "was taken away by the daemon"
            self._on_group_gone(event.group.group, int(event.group.generation), reason)

    def _finish(self, error: errors.EpRuntimeError) -> None:
        if not self._stopped.is_set():
            self._on_end(error)
