"""Closes connections with other people's descriptors in their queues, which may take for ever.

Whoever closes the last copy of a TCP socket waits as long as its owner has set (SO_LINGER). A
packet's descriptors are closed with the connection, read or not, so such a connection is closed by
a process of its own, which is killed where it does not get on: an ending process does not linger.
"""

from __future__ import annotations

import contextlib
import logging
import socket

from ep_runtime_server.callers import credentials
from ep_runtime_server.sockets import disposal_child
from ep_runtime_server.sockets.spare_child import SpareChild

# Our clients wait for each answer, so more packets are not from them.
_MAX_PACKETS = 16
_PART_BYTES = 64 << 10


class Disposal:
    """Starts its process when it is first needed. Lives on the event loop's thread."""

    def __init__(self) -> None:
        self._child = SpareChild(disposal_child.__file__)
        self._kept: list[socket.socket] = []

    def drop(self, connection: socket.socket) -> None:
        """Closes an accepted connection. Never waits."""
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RD)  # nothing arrives after this check
        if _is_harmless(connection) or self.hand_over([connection.fileno()]):
            connection.close()
        else:
            self._kept.append(connection)

    def close_listener(self, listener: socket.socket) -> None:
        """Closes a listening socket and the connections that nobody accepted."""
        listener.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(OSError):  # until no connection is left
            while True:
                self.drop(listener.accept()[0])
        listener.close()

    async def close(self) -> None:
        """Ends the process."""
        await self._child.close()

    def hand_over(self, fds: list[int]) -> bool:
        """Returns whether the process holds copies, so that a close here does not block."""
        for _ in range(2):
            try:
                socket.send_fds(self._child.start(), [b"."], fds)
                return True
            except OSError as error:  # it is stuck and its queue is full, or it is gone
                logging.getLogger(__name__).warning("descriptors of others: %s", error)
                self._child.end()
        return False


def _is_harmless(connection: socket.socket) -> bool:
    """Discards packets without descriptors; True if no others are left."""
    for _ in range(_MAX_PACKETS):
        try:
            data, ancillary, flags, _ = connection.recvmsg(
                _PART_BYTES, credentials.SENDER_BYTES, socket.MSG_PEEK | socket.MSG_DONTWAIT
            )
            if flags & socket.MSG_CTRUNC:
                return False
            if not data and not ancillary:
                return True
            connection.recv(len(data) or 1, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except ConnectionError:  # the error is reported once; the queue still has its packets
            continue
        except OSError:
            return False
    return False
