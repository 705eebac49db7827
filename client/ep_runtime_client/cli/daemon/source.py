"""Finds the daemon for a command, and connects to it."""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Iterator

from ep_runtime import env, wire
from ep_runtime.errors import PermissionDeniedError, RuntimeUnavailableError
from ep_runtime.v1 import session_service_pb2
from ep_runtime_client.cli import render
from ep_runtime_client.daemons import addresses, runtime, transport
from ep_runtime_client.readers.admin_service import Source as Source


def default_place(timeout_s: float) -> addresses.SocketDirectory:
    """Returns the daemon that reading commands use without --address.

    $EP_RUNTIME_ADDRESS names it; else it is the node's daemon if that one answers, else the only
    private daemon of this user.

    Raises:
        RuntimeUnavailableError: several private daemons answer, or none.
    """
    place = addresses.daemon_place(None)
    if env.address() is not None or runtime.answers(place, timeout_s):
        return place
    mine = [addresses.SocketDirectory(path, os.geteuid()) for path in env.private_directories()]
    private = [each for each in mine if runtime.answers(each, timeout_s)]
    if len(private) == 1:
        return private[0]
    if not private:
        raise place.unavailable("no daemon runs there, and you have no private daemon")
    raise RuntimeUnavailableError(
        f"no daemon answers at {place.address}, but {len(private)} private daemons of yours do; "
        "choose by --address " + " or ".join(shlex.quote(each.address) for each in private),
        address=place.address,
        answered=False,
    )


@contextlib.contextmanager
def open_source(address: str | None, *, timeout_s: float) -> Iterator[Source]:
    """Opens the admin service at an address; without admin rights, over api.sock.

    Without an address it uses `default_place`; a line on stderr names a private daemon.

    Raises:
        RuntimeUnavailableError: no daemon answers there.
        PermissionDeniedError: the daemon belongs to another user.
    """
    try:
        place = addresses.daemon_place(address)
        rpc = transport.RpcChannel(place, wire.ADMIN_SOCKET, timeout_s)
    except PermissionDeniedError as error:
        if "directory" in error.fields:  # the directory is not trusted at all
            raise
        with _as_session(place, timeout_s) as found:
            yield found
        return
    except RuntimeUnavailableError:
        if address is not None or env.address() is not None:
            raise
        place = default_place(timeout_s)
        rpc = transport.RpcChannel(place, wire.ADMIN_SOCKET, timeout_s)
        render.err(f"ep-runtime: asking your only private daemon, {place.address}")
    try:
        yield Source(place.directory, rpc.channel, timeout_s)
    finally:
        rpc.close()


def exact(address: str | None) -> str:
    """Returns the address, by default the default daemon's; never a private daemon's."""
    return addresses.daemon_place(address).address


@contextlib.contextmanager
def _as_session(place: addresses.SocketDirectory, timeout_s: float) -> Iterator[Source]:
    """Opens a read-only session, for a user who may not use admin.sock."""
    token = transport.hello(place, timeout_s).session_token
    control = transport.ControlChannel(place, token)
    try:
        yield Source(place.directory, control.channel, timeout_s, metadata=control.metadata)
        control.call(control.sessions.CloseSession, session_service_pb2.CloseSessionRequest())
    finally:
        control.close()
