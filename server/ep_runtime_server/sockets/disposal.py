"""Closes connections with clients' descriptors in their queues, which may block forever.

Closing the last copy of a TCP socket waits as long as its owner has set (SO_LINGER). Closing a
connection closes the descriptors in its unread packets, so a child process closes such connections.
The daemon kills the child if it hangs, because a process that ends does not linger.
"""

from __future__ import annotations

import contextlib
import logging
import socket

from ep_runtime_server.callers import credentials
from ep_runtime_server.sockets import disposal_child
from ep_runtime_server.sockets.spare_child import SpareChild

# Our clients wait for each answer, so a connection with more packets is not theirs.
_MAX_PACKETS = 16
_PART_BYTES = 64 << 10


class Disposal:
    """Closes connections, if necessary in a child process. For the event loop's thread."""

    def __init__(self) -> None:
        self._child = SpareChild(disposal_child.__file__)
        self._kept: list[socket.socket] = []

    def drop(self, connection: socket.socket) -> None:
        """Closes an accepted connection without waiting."""
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RD)  # nothing arrives after the check below
        if _is_harmless(connection) or self.hand_over([connection.fileno()]):
            connection.close()
        else:
            self._kept.append(connection)

    def close_listener(self, listener: socket.socket) -> None:
        """Closes a listening socket and its connections that were not accepted yet."""
        listener.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(OSError):  # until no connection is left
            while True:
                self.drop(listener.accept()[0])
        listener.close()

    async def close(self) -> None:
        """Ends the child process."""
        await self._child.close()

    def hand_over(self, fds: list[int]) -> bool:
        """Sends copies to the child process, so that our close does not block; False on failure."""
        for _ in range(2):
            try:
                socket.send_fds(self._child.start(), [b"."], fds)
                return True
            except OSError as error:  # the child hangs with a full queue, or has ended
                logging.getLogger(__name__).warning("descriptors of others: %s", error)
                self._child.end()
        return False


def _is_harmless(connection: socket.socket) -> bool:
    """Discards packets without descriptors; returns whether no other packets are left."""
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
        except ConnectionError:  # reported only once; the queue still has packets
            continue
        except OSError:
            return False
    return False
