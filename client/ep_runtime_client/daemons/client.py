"""The client of a session's daemon: its address, its calls, and whether the session lives."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from ep_runtime import env
from ep_runtime.allowed_names import check_new_name
from ep_runtime.errors import (
    EpRuntimeError,
    InvalidArgumentError,
    PermissionDeniedError,
    RuntimeUnavailableError,
)
from ep_runtime.v1 import group_service_pb2, session_service_pb2
from ep_runtime_client.base import jax_state
from ep_runtime_client.daemons import addresses, transport
from ep_runtime_client.daemons import runtime as runtimes
from ep_runtime_client.daemons.link import Callbacks, Link

_Result = TypeVar("_Result")

# How long a job waits for the daemon to fence a process, before it continues without the fence.
_END_PEER_S = 5.0


def job_name(given: str | None) -> str:
    """Returns the name of the job for `connect(job=given)`.

    Raises:
        InvalidArgumentError: the name is not allowed.
    """
    own = str(os.getpid())
    name = given if given is not None else env.job() or jax_state.coordinator() or own
    check_new_name("job", name)
    return name


def _no_daemon() -> InvalidArgumentError:
    return InvalidArgumentError(
        'this session was made with address="none" and has no daemon', argument="address"
    )


class DaemonClient:
    """This process's client of one daemon, or of none with address "none". Thread-safe.

    Attributes:
        job: namespace of the session's groups.
        timeout_s: longest time that a call waits for other processes.
        pid: id of the process that connected.
        session: the `Session` that users have.
    """

    session: Any

    def __init__(self, runtime: runtimes.ReachedRuntime, job: str | None, timeout_s: float) -> None:
        self.job = job_name(job)
        self.timeout_s = timeout_s
        self.pid = os.getpid()
        self._job_is_ours_alone = job is None and self.job == str(self.pid)
        self._runtime = runtime
        self._ended: EpRuntimeError | None = None
        self._link: Link | None = None

    def connect(self, labels: Mapping[str, str], callbacks: Callbacks) -> None:
        """Opens the session at the daemon. Raises the errors of `ep.connect`."""
        request = session_service_pb2.OpenSessionRequest(
            job=self.job, labels=labels, process_index=jax_state.process_index()
        )
        self._link = Link(self._runtime, request, callbacks)
        self._link.connect(self.timeout_s)

    @property
    def session_id(self) -> str:
        """Name of this session in `ep-runtime sessions`; "" without a daemon."""
        return self._link.session_id if self._link is not None else ""

    @property
    def token(self) -> str:
        """The session's secret; "" without a daemon."""
        return self._link.token if self._link is not None else ""

    @property
    def address(self) -> str:
        """Address of the daemon, as `connect` accepts it; "none" without a daemon."""
        place = self._runtime.place
        return place.address if place is not None else addresses.NONE

    @property
    def place(self) -> addresses.SocketDirectory:
        """The socket directory of the daemon. Raises InvalidArgumentError without a daemon."""
        if self._runtime.place is None:
            raise _no_daemon()
        return self._runtime.place

    @property
    def has_daemon(self) -> bool:
        return self._runtime.has_daemon

    @property
    def is_private(self) -> bool:
        """Whether the daemon ends with this process, so that it cannot retain memory."""
        return self._runtime.is_private

    @property
    def is_ours(self) -> bool:
        """Whether this is the process that connected, and not a forked child."""
        return os.getpid() == self.pid

    @property
    def alone(self) -> str:
        """Why groups of this session cannot span processes; "" if they can."""
        if self.has_daemon and self.is_private:
            return f"a private daemon of its own (this one's is at {self.address})"
        if self.has_daemon and self._job_is_ours_alone:
            return f"a job of its own (this one's is {self.job!r}, its pid)"
        return ""

    @property
    def alive(self) -> bool:
        """Whether calls to the daemon may still succeed."""
        return self.is_ours and self._ended is None

    @property
    def daemon_pid(self) -> int | None:
        """Process id of the daemon that this process started, or None."""
        return self._runtime.child.pid if self._runtime.child is not None else None

    @property
    def link(self) -> Link:
        """The connection to the daemon. Raises if the session is over, forked or has no daemon."""
        self.require_alive()
        if self._link is None:
            raise _no_daemon()
        return self._link

    @property
    def control(self) -> transport.ControlChannel:
        """The daemon's RPCs; waits up to `timeout_s` until it is back. Raises as `link`."""
        return self.link.control(self.timeout_s)

    def run(self, work: Callable[[transport.ControlChannel], _Result]) -> _Result:
        """Calls `work` with the daemon's RPCs, and again if the daemon restarted meanwhile."""
        return self.link.run(work, self.timeout_s)

    def require_alive(self) -> None:
        """Raises if the session was closed, fenced or inherited through fork."""
        if os.getpid() != self.pid:
            raise PermissionDeniedError(
                f"this session belongs to pid {self.pid}; pid {os.getpid()} was forked from it "
                "and must call ep.connect() itself",
                pid=os.getpid(),
                owner_pid=self.pid,
            )
        if self._ended is not None:
            self._ended.raise_again()

    def end_peer(self, session_id: str, reason: str) -> session_service_pb2.EndPeerResponse:
        """Asks the daemon to fence another session of this job, and to kill its process if it may.

        Raises:
            PermissionDeniedError: the other session belongs to another user or job.
            RuntimeUnavailableError: the daemon is not back in time.
        """
        request = session_service_pb2.EndPeerRequest(session_id=session_id, reason=reason)

        def ask(control: transport.ControlChannel) -> session_service_pb2.EndPeerResponse:
            answer: session_service_pb2.EndPeerResponse
            answer = control.call(control.sessions.EndPeer, request)
            return answer

        return self.link.run(ask, _END_PEER_S)

    def say_left(self, name: str, generation: int) -> None:
        """Tells the daemon, now or once it is back, that this process unmapped a group."""
        if self._link is not None and self.alive:
            self._link.say_left(
                group_service_pb2.CloseGroupRequest(name=name, generation=generation)
            )

    def end(self, error: EpRuntimeError) -> None:
        """Handles the daemon's message that it ended the session."""
        self._ended = self._ended or error

    def say_goodbye(self, *, failed: bool) -> None:
        """Ends the session at the daemon, now or once the daemon is back, unless it was ended."""
        if self._link is not None and self.alive:
            self._link.say_goodbye(failed=failed)

    def stop(self) -> None:
        """Stops threads, channel and a private daemon; tells the daemon nothing."""
        self._ended = RuntimeUnavailableError(
            f"the session with {self.address} was closed", address=self.address
        )
        if self._link is not None:
            self._link.stop()
        self._runtime.stop()
