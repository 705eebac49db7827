"""`ep-runtime status --live` and `--ready`: sends a packet to fd.sock and reads the answer.

Kubelets and scripts run them every few seconds, so they load neither gRPC nor protobuf: the packets
below are constants, and a test compares them with the stubs.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import socket

from ep_runtime_client import cli
from ep_runtime_client.cli import render
from ep_runtime_client.cli.daemon import reading
from ep_runtime_client.daemons import addresses

FD_SOCKET = "fd.sock"
REQUEST = b"\x22\x00"  # FdRequest(probe=Probe())
ADMITS = b"\x2a\x00"  # FdReply(condition=Condition())
# FdReply(condition=Condition(refusal=...)): two fields, each after its length.
_NOT_NOW = re.compile(rb"\x2a[\x80-\xff]*[\x00-\x7f]\x0a[\x80-\xff]*[\x00-\x7f](.+)", re.DOTALL)


def add_probes(parser: argparse.ArgumentParser) -> None:
    """Adds --live and --ready, which exclude each other."""
    add = parser.add_mutually_exclusive_group().add_argument
    add(
        "--live",
        action="store_true",
        help="only say whether the daemon answers: exit code 0, else 2 (liveness probe)",
    )
    add(
        "--ready",
        action="store_true",
        help="only say whether it admits sessions and groups: exit code 0, 3 while it does not, "
        "2 without a daemon (readiness probe)",
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of a probe only, because all of `status`'s take too long to load."""
    add_probes(parser)
    reading.add_daemon_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Asks only the daemon at the address; does not fall back to a private daemon."""
    place = addresses.daemon_place(args.address)
    reply = _reply(place, args.timeout)
    if args.live:
        render.out("live")
        return cli.OK
    if reply == ADMITS:
        render.out("ready")
        return cli.OK
    render.err(f"ep-runtime status: the daemon at {place.address} is not ready: {_refusal(reply)}")
    return cli.PARTIAL


def _reply(place: addresses.SocketDirectory, timeout_s: float) -> bytes:
    """Receives one packet, which may be an error. Raises RuntimeUnavailableError."""
    with place.connected(FD_SOCKET, socket.SOCK_SEQPACKET, timeout_s) as connection:
        try:
            # If the daemon closed the socket, its reason can still be read.
            with contextlib.suppress(BrokenPipeError):
                connection.send(REQUEST)
            reply = connection.recv(1 << 16)
        except TimeoutError:
            raise place.unavailable(f"it gave no answer within {timeout_s:g} s") from None
        except OSError as error:
            raise place.unavailable(error.strerror or str(error)) from error
    if not reply:
        raise place.unavailable(f"{FD_SOCKET} was closed by the daemon")
    return reply


def _refusal(reply: bytes) -> str:
    if found := _NOT_NOW.fullmatch(reply):
        return found[1].decode(errors="replace")
    from ep_runtime.v1 import fd_socket_pb2

    return fd_socket_pb2.FdReply.FromString(reply).error.message
