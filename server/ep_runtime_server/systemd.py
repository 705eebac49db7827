"""sd_notify, the part of it that a foreground daemon needs."""

from __future__ import annotations

import contextlib
import socket


def notify(address: str | None, *assignments: str) -> None:
    """Sends `READY=1` and the like to systemd; nothing without `$NOTIFY_SOCKET`."""
    if not address:
        return
    target = f"\0{address[1:]}" if address.startswith("@") else address
    # Under a broken $NOTIFY_SOCKET the daemon serves all the same; systemd reports its own timeout.
    with (
        contextlib.suppress(OSError),
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender,
    ):
        sender.sendto("\n".join(assignments).encode(), target)
