"""A session's connection to its daemon: sends heartbeats, receives events, and reconnects.

A restarted daemon knows the session from its journal, or trusts the client: the connection says
hello with the old token, and then the session's owner tells which groups it holds.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import random
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import grpc

import ep_runtime
from ep_runtime import errors, wire
from ep_runtime.v1 import group_service_pb2, session_service_pb2
from ep_runtime_client.daemons import transport
from ep_runtime_client.daemons.addresses import SocketDirectory
from ep_runtime_client.daemons.pending_goodbyes import Owed, pending_goodbyes
from ep_runtime_client.daemons.runtime import ReachedRuntime

_log = logging.getLogger("ep_runtime")

_JOIN_TIMEOUT_S = 5.0
_HELLO_TIMEOUT_S = 5.0
_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 1.0

_Result = TypeVar("_Result")


@dataclasses.dataclass(frozen=True)
class Callbacks:
    """The session's functions that a link calls, on the link's threads.

    Attributes:
        restore: called with the new RPCs and token after the daemon came back, before any other use
            of them; raise RuntimeUnavailableError to try again.
        on_end: called with the error after the daemon ended the session for good.
        on_group: called after a group of the session changed.
    """

    restore: Callable[[transport.ControlChannel], None]
    on_end: Callable[[errors.EpRuntimeError], None]
    on_group: Callable[[session_service_pb2.GroupEvent], None]


class Link:
    """The connection of one session. Thread-safe.

    Attributes:
        token: the session's secret.
        session_id: the daemon's public name for it.
    """

    def __init__(
        self,
        runtime: ReachedRuntime,
        opened: session_service_pb2.OpenSessionRequest,
        callbacks: Callbacks,
    ) -> None:
        """`opened`: the request of every OpenSession, also after a restart."""
        self.token = ""
        self.session_id = ""
        self._runtime = runtime
        self._opened = opened
        self._callbacks = callbacks
        self._incarnation = ""
        self._interval_s = 1.0
        self._changed = threading.Condition()
        self._control: transport.ControlChannel | None = None
        self._up = False
        self._over = False  # the daemon ended the session
        self._owed: session_service_pb2.CloseSessionRequest | None = None
        self._stopped = threading.Event()
        self._stream: Any = None
        self._left: list[group_service_pb2.CloseGroupRequest] = []
        self._threads = [
            threading.Thread(target=self._beat, name="ep-runtime-heartbeat", daemon=True),
            threading.Thread(target=self._watch, name="ep-runtime-events", daemon=True),
        ]

    def connect(self, timeout_s: float) -> None:
        """Opens the session and starts the threads.

        The caller has found the daemon alive; if it is gone now, it is being restarted.

        Raises:
            EpRuntimeError: any error of `ep.connect`.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                self._open(timeout_s)
                break
            except errors.RuntimeUnavailableError as error:
                if error.fields.get("answered", True) or time.monotonic() >= deadline:
                    raise
                self._stopped.wait(_LONGEST_PAUSE_S / 10)
        for thread in self._threads:
            thread.start()

    @property
    def _place(self) -> SocketDirectory:
        assert self._runtime.place is not None  # a link has a daemon
        return self._runtime.place

    @property
    def now(self) -> transport.ControlChannel | None:
        """Returns the RPCs; None while the daemon is away."""
        with self._changed:
            return self._control if self._up else None

    def control(self, timeout_s: float) -> transport.ControlChannel:
        """Returns the RPCs, as soon as the daemon answers.

        Raises:
            RuntimeUnavailableError: the daemon is not back after `timeout_s`.
        """
        with self._changed:
            done = lambda: self._up or self._over or self._stopped.is_set()  # noqa: E731
            self._changed.wait_for(done, timeout_s)
            if self._up and self._control is not None:
                return self._control
        raise self._place.unavailable(f"the connection is lost for {timeout_s:g} s")

    def run(self, work: Callable[[transport.ControlChannel], _Result], timeout_s: float) -> _Result:
        """Calls `work` with the RPCs, and again if the daemon went away meanwhile.

        Raises:
            EpRuntimeError: an error of `work`; RuntimeUnavailableError if the daemon is not back in
                time.
        """
        deadline = time.monotonic() + timeout_s
        last: errors.EpRuntimeError | None = None
        while True:
            try:
                control = self.control(max(deadline - time.monotonic(), 0.0))
            except errors.RuntimeUnavailableError as error:
                raise last or error from None  # `last` names the call that failed
            try:
                return work(control)
            except (errors.RuntimeUnavailableError, errors.SessionFencedError) as error:
                if not control.lost or time.monotonic() >= deadline:
                    raise
                last = error if isinstance(error, errors.RuntimeUnavailableError) else None
                self.lose(control)

    def lose(self, control: transport.ControlChannel) -> None:
        """Starts to reconnect because these RPCs got no answer, unless that has begun already."""
        with self._changed:
            if self._control is not control or not self._up:
                return
            self._up = False
            stream = self._stream
            self._changed.notify_all()
        stream.cancel()  # wakes the thread that reconnects

    def say_left(self, request: group_service_pb2.CloseGroupRequest) -> None:
        """Calls CloseGroup, now or once the daemon is back; logs an error."""
        control = self.now
        try:
            if control is not None:
                _close_group(control, request)
                return
        except errors.EpRuntimeError as error:
            _log.info("closing the group failed: %s", error)
            if control is not None and not control.lost:
                return
        with self._changed:
            self._left.append(request)

    def say_goodbye(self, *, failed: bool = False) -> None:
        """Calls CloseSession, now or once the daemon is back; logs an error.

        A private daemon needs no goodbye, because it ends with the session.

        Args:
            failed: whether an error ends the session, so that the daemon keeps its memory for
                retain_s.
        """
        request = session_service_pb2.CloseSessionRequest(failed=failed)
        control = self.now
        self._stopped.set()  # the daemon ends the stream on request, so the connection is not lost
        if control is not None:
            try:
                control.call(control.sessions.CloseSession, request)
                return
            except errors.EpRuntimeError as error:
                _log.info("ending the session failed: %s", error)
                if not control.lost:
                    return
        self._owed = None if self._runtime.is_private else request

    def stop(self) -> None:
        """Ends both threads and the connection within a bounded time."""
        self._stopped.set()
        with self._changed:
            self._changed.notify_all()
            stream, control = self._stream, self._control
        if stream is not None:
            stream.cancel()
        for thread in self._threads:
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join(_JOIN_TIMEOUT_S)
        if control is not None:
            control.close()
        if self._owed is not None:  # only now, because a thread that reconnected has a new token
            pending_goodbyes.owe(self.token, Owed(self._place, self._opened, self._owed))

    def _open(self, timeout_s: float) -> None:
        pending_goodbyes.say(self._place)
        welcome = transport.hello(self._place, timeout_s, resume_token=self.token)
        _say_skew(self._place.address, welcome.server_version)
        before, self.token = self.token, welcome.session_token
        control = transport.ControlChannel(self._place, welcome.session_token)
        try:
            answer = control.call(control.sessions.OpenSession, self._opened, timeout_s=timeout_s)
            self.session_id = answer.session_id
            self._incarnation = welcome.incarnation
            self._interval_s = wire.seconds(answer.heartbeat_interval)
            if before:
                self._catch_up(control)
            stream = control.stream(
                control.sessions.WatchSession, session_service_pb2.WatchSessionRequest()
            )
        except BaseException:
            control.close()
            raise
        with self._changed:
            old, self._control, self._stream, self._up = self._control, control, stream, True
            self._changed.notify_all()
        if old is not None:
            old.close()

    def _catch_up(self, control: transport.ControlChannel) -> None:
        """Closes groups that were left while the daemon was away, so that others can claim their
        ranks."""
        with self._changed:
            left = list(self._left)
        for request in left:
            _close_group(control, request)
            with self._changed:
                self._left.remove(request)
        self._callbacks.restore(control)

    def _beat(self) -> None:
        progress = 0
        while not self._stopped.wait(self._interval_s):
            progress += 1
            control = self.now
            if control is None:
                continue
            request = session_service_pb2.HeartbeatRequest(progress=progress)
            try:
                answer = control.call(control.sessions.Heartbeat, request)
                if answer.incarnation not in ("", self._incarnation):
                    self.lose(control)
            except errors.EpRuntimeError:
                if control.lost:
                    self.lose(control)

    def _watch(self) -> None:
        while True:
            self._follow()
            if self._stopped.is_set() or self._over:
                return
            lost = time.monotonic()
            with self._changed:
                self._up = False
            _log.warning(
                "the connection to the daemon at %s is lost; steps go on, and the session connects "
                "again",
                self._place.address,
            )
            if not self._connect_again():
                return
            _log.warning("the daemon is back after %.2f s", time.monotonic() - lost)

    def _follow(self) -> None:
        """Handles events until the stream ends; the next hello tells why it ended."""
        try:
            for event in self._stream:
                self._take(event)
        except grpc.RpcError:
            return

    def _connect_again(self) -> bool:
        """Reconnects, with pauses between attempts; False if the session is over or stopped."""
        pause_s = 0.0
        while not self._stopped.wait(pause_s * random.uniform(0.8, 1.2)):
            try:
                self._runtime.revive(_HELLO_TIMEOUT_S)
                self._open(_HELLO_TIMEOUT_S)
                return True
            except errors.SessionFencedError as error:
                self._finish(error)
                return False
            except errors.EpRuntimeError as error:
                _log.debug("connecting again: %s", error)
                pause_s = min(max(2 * pause_s, _FIRST_PAUSE_S), _LONGEST_PAUSE_S)
        return False

    def _take(self, event: session_service_pb2.WatchSessionResponse) -> None:
        kind = event.WhichOneof("event")
        if kind == "fence":
            self._finish(
                errors.SessionFencedError(
                    f"this session was fenced {event.fence.reason}; connect again and create the "
                    "groups anew",
                    reason=event.fence.reason,
                )
            )
        elif kind == "drain":
            _log.warning("%s", _told_of_drain(event.drain))
        elif kind == "group":
            self._callbacks.on_group(event.group)

    def _finish(self, error: errors.EpRuntimeError) -> None:
        if not self._stopped.is_set():
            self._over = True
            self._callbacks.on_end(error)
            with self._changed:
                self._up = False
                self._changed.notify_all()


@functools.cache  # once for each daemon and version
def _say_skew(address: str, version: str) -> None:
    if not wire.work_together(version, ep_runtime.__version__):
        _log.warning(
            "the daemon at %s has version %s, this client %s; install the same major version of "
            "both, and minor versions at most one apart",
            address,
            version,
            ep_runtime.__version__,
        )


def _close_group(
    control: transport.ControlChannel, request: group_service_pb2.CloseGroupRequest
) -> None:
    control.call(control.groups.CloseGroup, request, timeout_s=transport.MUTATE_TIMEOUT_S)


def _told_of_drain(event: session_service_pb2.DrainEvent) -> str:
    if event.taken_back:
        return "the daemon admits sessions and groups again"
    refuses = "the daemon admits no new session or group; what runs goes on"
    if not event.HasField("deadline"):
        return refuses
    return (
        f"{refuses}; it ends with its last session, in {event.deadline.ToSeconds()} s at the latest"
    )
