"""Notifies systemd, and reads the descriptors that it stored for the daemon."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Sequence

FIRST_FD = 3  # SD_LISTEN_FDS_START


def stored_fds(count: int, names: Sequence[str]) -> dict[str, int]:
    """Returns {name: fd} of the `count` descriptors from systemd; marks them close-on-exec."""
    found = {}
    for position in range(count):
        os.set_inheritable(FIRST_FD + position, False)
        name = names[position] if position < len(names) else f"unknown-{position}"
        found[name] = FIRST_FD + position
    return found


def notify(address: str | None, *assignments: str, fds: Sequence[int] = ()) -> None:
    """Sends assignments such as `READY=1` to systemd; does nothing if `address` is empty."""
    if not address:
        return
    target = f"\0{address[1:]}" if address.startswith("@") else address
    # The daemon also serves if $NOTIFY_SOCKET is broken; systemd then reports a timeout.
    with (
        contextlib.suppress(OSError),
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender,
    ):
        sender.connect(target)
        socket.send_fds(sender, ["\n".join(assignments).encode()], list(fds))
