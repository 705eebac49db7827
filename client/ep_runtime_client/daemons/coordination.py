"""JAX's coordination service in its own process, which survives the death of any job process.

The process is neither process 0 nor a child of the daemon. Processes on its host give it their
pidfds, so it learns within milliseconds which of them died. It learns of other deaths by missing
heartbeats.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import signal
import socket
from collections.abc import Callable, Iterator
from types import FrameType

from ep_runtime import env, trust
from ep_runtime.errors import InvalidArgumentError
from ep_runtime_client.base import jax_internals

_log = logging.getLogger("ep_runtime")

# Only stopped processes, and those of a dead node, wait for this long. With 10 s a loaded host
# loses processes that still live.
HEARTBEAT_TIMEOUT_S = 30
# A job's processes do not end at the same time, and one may not have registered yet.
_LEFT_S = 0.5
_ANSWER_S = 5.0
_REGISTERED = b"registered"


def split_address(address: str) -> tuple[str, int]:
    """Splits HOST:PORT into host and port; an IPv6 host may have brackets.

    Raises:
        InvalidArgumentError: the text has another form.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise InvalidArgumentError(
            f"the address must be HOST:PORT, got {address!r}", argument="address"
        )
    return host.strip("[]"), int(port)


def _bound(host: str, port: int) -> socket.socket:
    """Returns a socket that is bound to an address of this host. Raises OSError."""
    family, kind, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    bound = socket.socket(family, kind)
    try:
        bound.bind(place)
    except OSError:
        bound.close()
        raise
    return bound


def _is_here(host: str) -> bool:
    try:
        _bound(host, 0).close()
    except OSError:
        return False
    return True


def _place(port: int) -> str:
    """Returns the name of the service's abstract socket in the network namespace."""
    return f"\0ep-runtime-coordination-{port}"


def serve(
    bind: str,
    processes: int,
    *,
    heartbeat_timeout_s: int,
    until_left: bool,
    ready: Callable[[str], None],
) -> None:
    """Serves a job's processes until SIGTERM or SIGINT.

    Args:
        bind: HOST:PORT; port 0 chooses a free port.
        processes: number of processes of the whole job.
        heartbeat_timeout_s: a process counts as dead after this silence if it is on another host,
            or if it hangs.
        until_left: whether to end also when all registered processes are gone.
        ready: called once with the address.

    Raises:
        InvalidArgumentError: the address cannot be bound.
        NotImplementedError: this jaxlib has no such service.
    """
    host, port = split_address(bind)
    try:
        # gRPC would share a port in use with its owner, so first bind it without SO_REUSEPORT.
        with _bound(host, port) as probe:
            port = probe.getsockname()[1]
    except OSError as error:
        raise InvalidArgumentError(
            f"--bind must be a free address of this host, got {bind}: {error.strerror}",
            argument="bind",
        ) from error
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    with contextlib.ExitStack() as stack:
        stops = stack.enter_context(_stop_signals())
        listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        listener.bind(_place(port))
        listener.listen()
        env.quiet_xla()
        service = jax_internals.start_coordination(address, processes, heartbeat_timeout_s)
        stack.callback(service.shutdown)
        ready(address)
        _watch(stops, listener, address, _LEFT_S if until_left else None)


@contextlib.contextmanager
def _stop_signals() -> Iterator[socket.socket]:
    """Yields a socket that becomes readable on SIGTERM and SIGINT."""
    ours, theirs = socket.socketpair()

    def stop(number: int, frame: FrameType | None) -> None:
        theirs.send(b"x")

    previous = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        with ours, theirs:
            yield ours
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _watch(
    stops: socket.socket, listener: socket.socket, address: str, left_s: float | None
) -> None:
    """Receives processes' pidfds and reports each death, until it is stopped or all have left."""
    members: dict[int, int] = {}  # job indices of this host's processes, by pidfd
    came = False
    with selectors.DefaultSelector() as selector:
        selector.register(stops, selectors.EVENT_READ)
        selector.register(listener, selectors.EVENT_READ)
        while True:
            events = selector.select(left_s if came and not members else None)
            if not events:
                return
            for key, _ in events:
                if key.fileobj is stops:
                    return
                if key.fileobj is listener:
                    registered = _register(listener)
                    if registered is not None:
                        came = True
                        selector.register(registered[0], selectors.EVENT_READ)
                        members[registered[0]] = registered[1]
                    continue
                selector.unregister(key.fileobj)
                os.close(key.fd)
                dead = members.pop(key.fd)
                try:
                    jax_internals.report_death(address, dead, _ANSWER_S)
                except RuntimeError as error:
                    _log.warning(
                        "process %d died; the service learns it from missing heartbeats: %s",
                        dead,
                        error,
                    )


def _register(listener: socket.socket) -> tuple[int, int] | None:
    """Returns the pidfd of a process of our user, and its index; None for any other message."""
    connection, _ = listener.accept()
    connection.settimeout(_ANSWER_S)
    said = b""
    fds: list[int] = []
    with connection, contextlib.suppress(OSError):
        if trust.ids_of(connection)[1] in (os.geteuid(), 0):
            said, fds, _, _ = socket.recv_fds(connection, 16, 1)
        if len(fds) == 1 and said.isdigit():
            connection.send(_REGISTERED)
            return fds[0], int(said)
    for fd in fds:
        os.close(fd)
    return None


def register(address: str, process: int) -> bool:
    """Gives the service our pidfd if it is on this host, so that it learns of our end at once.

    Args:
        address: address of the service.
        process: our index in the job.

    Returns:
        False if the service is on another host, or belongs to process 0: it then uses heartbeats.
    """
    host, port = split_address(address)
    if not _is_here(host):
        return False
    ourselves = os.pidfd_open(os.getpid())
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.settimeout(_ANSWER_S)
            connection.connect(_place(port))
            if trust.ids_of(connection)[1] not in (os.geteuid(), 0):
                return False
            socket.send_fds(connection, [b"%d" % process], [ourselves])
            return connection.recv(16) == _REGISTERED
    except OSError as error:
        _log.info("the coordination service at %s does not watch us: %s", address, error)
        return False
    finally:
        os.close(ourselves)


def cut_accepted() -> None:
    """Shuts down the TCP connections that this process has accepted, which are Gloo's.

    A Gloo collective hangs if a peer died before its part of it: a process that waits for the dead
    peer gets an error, but a process that waits for a third one does not. One side of every
    connection has accepted it, so all connections end if all processes call this.
    """
    listening: set[int] = set()
    connected = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            one = socket.socket(fileno=os.dup(int(name)))
            if one.family not in (socket.AF_INET, socket.AF_INET6):
                one.close()
            elif one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                listening.add(one.getsockname()[1])
                one.close()
            else:
                connected.append(one)
    for one in connected:
        with one, contextlib.suppress(OSError):
            if one.type == socket.SOCK_STREAM and one.getsockname()[1] in listening:
                one.shutdown(socket.SHUT_RDWR)


def answers(address: str) -> bool:
    """Whether a service of this user on this host has that address."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(_ANSWER_S)
        try:
            connection.connect(_place(split_address(address)[1]))
            return trust.ids_of(connection)[1] == os.geteuid()
        except (OSError, InvalidArgumentError):
            return False
