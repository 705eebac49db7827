"""A cable between two network namespaces that loses and delays packets on command.

    python lossy_link.py NAMESPACE_A NAMESPACE_B

Makes a device `eth` in each and carries IP packets between them. A line of JSON on standard input
says what happens to what each side sends from then on: {"a": {"lost": 0.3, "late_s": 0.2}, "b":
{}}. Answers every line with one, and ends with its standard input.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import itertools
import json
import os
import random
import select
import struct
import sys
import time

_CLONE_NEWNET = 0x40000000
_TUNSETIFF, _TUN_WITHOUT_HEADER = 0x400454CA, 0x1001


def open_device(namespace: str) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    place = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    if libc.setns(place, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), f"setns to {namespace}")
    os.close(place)
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", b"eth", _TUN_WITHOUT_HEADER))
    return device


def main(namespaces: list[str]) -> None:
    ends = dict(zip("ab", map(open_device, namespaces), strict=True))
    faults: dict[str, dict[str, float]] = {"a": {}, "b": {}}
    chance, numbers = random.Random(1), itertools.count()
    waiting: list[tuple[float, int, str, bytes]] = []
    print("ready", flush=True)  # noqa: T201 - the answer
    poll = select.poll()
    for fd in (0, *ends.values()):
        poll.register(fd, select.POLLIN)
    while True:
        due_s = waiting[0][0] - time.monotonic() if waiting else 1.0
        for fd, _ in poll.poll(max(due_s, 0.0) * 1000):
            if fd == 0:
                line = sys.stdin.readline()
                if not line:
                    return
                faults.update(json.loads(line))
                print("told", flush=True)  # noqa: T201 - the answer
        for side, other in ("ab", "ba"):
            while (packet := _read(ends[side])) is not None:
                if chance.random() >= faults[side].get("lost", 0.0):
                    when = time.monotonic() + faults[side].get("late_s", 0.0)
                    heapq.heappush(waiting, (when, next(numbers), other, packet))
        while waiting and waiting[0][0] <= time.monotonic():
            _, _, to, packet = heapq.heappop(waiting)
            try:
                os.write(ends[to], packet)
            except OSError:  # the device is down
                continue


def _read(device: int) -> bytes | None:
    try:
        return os.read(device, 1 << 16)
    except OSError:
        return None


if __name__ == "__main__":
    main(sys.argv[1:])
