"""Two days of one daemon without its sockets: processes come and go, and nothing grows.

    python tests/bench/simulated_day.py [HOURS]

With server, client and tests on PYTHONPATH. The clock is the test's own, all else the daemon's:
sessions, groups, memory, journal, events. Every 2 s each session's heartbeat, every minute a
process that ends or says goodbye and one that comes, claims a group, attaches and registers a
layer. The log keeps 2,000 events of a kind: until it has those of the rarest, in 34 hours, objects
grow. Prints one JSON line per figure: what, samples, p50, worst, unit.
"""

from __future__ import annotations

import asyncio
import collections
import gc
import itertools
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from daemon_figures import MIB, say
from harness import FakeClock
from raw_client import make_spec

from ep_runtime import layer_specs
from ep_runtime_server.base import limits
from ep_runtime_server.base.failpoints import Failpoints
from ep_runtime_server.callers.credentials import Peer
from ep_runtime_server.callers.sessions import SessionRecord
from ep_runtime_server.config import ServerConfig
from ep_runtime_server.groups import attachment
from ep_runtime_server.journal.file import Journal
from ep_runtime_server.memory.fd_store import FdStore
from ep_runtime_server.runtime import Runtime

SESSIONS = 16
HOUR_S = 3600.0


class Day:
    """`live` passes hours; `sizes` is what may not grow."""

    def __init__(self, directory: Path) -> None:
        self.clock = FakeClock()
        settings = ServerConfig(directory=directory, max_host_bytes=1 << 30)
        journal = Journal(directory / "journal", Failpoints())
        self.runtime = Runtime(settings, self.clock, journal)
        self.runtime.restore(FdStore(None, {}), {})
        self._live: collections.deque[tuple[SessionRecord, int]] = collections.deque()
        self._numbers = itertools.count()

    async def live(self, hours: float) -> None:
        rounds = int(hours * HOUR_S / limits.HEARTBEAT_INTERVAL_S)
        for number in range(rounds):
            self.clock.advance(limits.HEARTBEAT_INTERVAL_S)
            for session, _ in self._live:
                self.runtime.sessions.beat(session, number)
            if number % 30 == 0:
                await self._one_goes_and_one_comes()
            self.runtime.tick()
            self.runtime.recorder.flush()
            await asyncio.sleep(0)

    async def _one_goes_and_one_comes(self) -> None:
        number = next(self._numbers)
        if len(self._live) >= SESSIONS:
            session, exit_fd = self._live.popleft()
            if number % 2:
                self.runtime.sessions.close(session)
            os.eventfd_write(exit_fd, 1)
            for _ in range(3):  # the loop hears that its process is gone
                await asyncio.sleep(0)
            os.close(exit_fd)
        exit_fd = os.eventfd(0)
        peer = Peer(os.getpid(), 7, frozenset(), os.dup(exit_fd))
        session = self.runtime.sessions.hello(peer, os.getpid(), "1")
        self._live.append((session, exit_fd))
        self.runtime.open_session(session, "job", {}, 0)
        await self._group(session, f"g{number % 50}")
        await self.runtime.before_answer("/GroupService/CreateGroup")

    async def _group(self, session: SessionRecord, name: str) -> None:
        runtime = self.runtime
        spec = make_spec(name, ranks=1, retain_s=60.0)
        group = await runtime.groups.create(session, spec, (0,), replace=False, wait_s=10.0)
        secret, _ = attachment.acquire(runtime.tickets, session, group, group.generation, ())
        buffers, _ = attachment.redeem(runtime.tickets, session, secret)
        with attachment.exported(buffers):
            pass
        await attachment.report_attached(session, group, group.generation, 10.0)
        layers = [layer_specs.LayerSpec("l", top_k=1)]
        await group.layers.register([layer_specs.check_layer(spec, one) for one in layers], [])

    async def sizes(self) -> dict[str, float]:
        await self.runtime.pool.settle()
        gc.collect()
        return {
            "objects": len(gc.get_objects()),
            "descriptors": len(os.listdir("/proc/self/fd")),
            "threads": len(os.listdir("/proc/self/task")),
            "journal": self.runtime.journal.size_bytes / MIB,
            "RSS": _rss_bytes() / MIB,
        }

    async def end(self) -> None:
        self.runtime.sessions.shut_down()
        for _, exit_fd in self._live:
            os.close(exit_fd)
        await self.runtime.pool.settle()
        self.runtime.pool.close()
        self.runtime.recorder.stop()
        self.runtime.journal.close()


def _rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def pass_day(directory: Path, hours: int) -> list[dict[str, float]]:
    """The sizes after each hour."""
    day = Day(directory)
    found = []
    for _ in range(hours):
        await day.live(1.0)
        found.append(await day.sizes())
    await day.end()
    return found


def main(argv: Sequence[str]) -> None:
    """About a minute for 48 hours."""
    hours = int(argv[0]) if argv else 48
    late = max(1, hours * 3 // 4)
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="epd-") as directory:
        found = asyncio.run(pass_day(Path(directory), hours))
    units = {"journal": "MiB", "RSS": "MiB"}
    for name in found[0]:
        hourly = [sizes[name] for sizes in found]
        say(f"{name} after each of {hours} hours", hourly, units.get(name, name))
        grown = hourly[-1] - hourly[late - 1]
        say(f"{name} grown from hour {late} to {hours}", [grown], units.get(name, name))
    say(f"{hours} hours of a daemon", [time.perf_counter() - started], "s")


if __name__ == "__main__":
    main(sys.argv[1:])
