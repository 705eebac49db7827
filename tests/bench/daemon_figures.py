"""Figures of the daemon: memory with many clients, deaths noticed, restarts.

    python tests/bench/daemon_figures.py [CLIENTS [KILLS [RESTARTS]]]

With server, client and tests on PYTHONPATH. Prints one JSON line per figure: what, samples, p50,
worst, unit.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from harness import DaemonProcess, Watcher, eventually
from raw_client import WAIT_S, Client, make_spec
from raw_jobs import come_back, ready_pair

from ep_runtime import board, layer_specs

MIB = 1 << 20


def say(what: str, samples: Sequence[float], unit: str) -> None:
    """One line of JSON."""
    ordered = sorted(samples)
    figures = {"p50": round(ordered[len(ordered) // 2], 3), "worst": round(ordered[-1], 3)}
    line = {"what": what, "samples": len(ordered), **figures, "unit": unit}
    sys.stdout.write(f"{json.dumps(line)}\n")
    sys.stdout.flush()


@contextlib.contextmanager
def running(directory: Path, *options: str) -> Iterator[DaemonProcess]:
    """A daemon process on `directory`; its log is dropped."""
    daemon = DaemonProcess(directory, *options, "--log-level", "error")
    try:
        yield daemon
    finally:
        daemon.close()


def memory(directory: Path, count: int) -> None:
    """RSS of the daemon, without windows, with no client and with `count` of them."""
    with running(directory) as daemon:
        before = daemon.status().rss_bytes
        clients = [daemon.client(process=True, job=f"job{i}") for i in range(count)]
        watchers = [Watcher(client) for client in clients]
        for client in clients:
            group = client.create(make_spec(ranks=1)).group
            client.fetch(group)
            client.attached(group)
            client.register(group, [layer_specs.LayerSpec(f"l/{i}", top_k=1) for i in range(48)])
        status = daemon.status()
        assert status.num_sessions == count
        say("RSS of the daemon, no client", [before / MIB], "MiB")
        say(f"RSS of the daemon, {count} clients", [status.rss_bytes / MIB], "MiB")
        say(f"journal with {count} clients", [status.journal.bytes / MIB], "MiB")
        say("open descriptors", [float(status.num_fds)], "descriptors")
        for client in clients:
            client.process.kill()
        eventually(lambda: not daemon.status().num_sessions, within_s=WAIT_S)
        assert all(watcher.ended() for watcher in watchers)


def deaths(directory: Path, count: int) -> None:
    """From SIGKILL of a process to the poison on the board, and to the survivors' event."""
    poisoned, told = [], []
    with running(directory) as daemon:
        for _ in range(count):
            (survivor, victim), group, _ = ready_pair(daemon, make_spec())
            found = survivor.in_parent(group)
            watcher = Watcher(survivor)
            started = time.perf_counter()
            os.kill(victim.pid, 9)
            poisoned.append(_until_poisoned(found, started))
            eventually(lambda seen=watcher: "group" in seen.kinds(), within_s=2.0)
            told.append(time.perf_counter() - started)
            for held in (survivor, victim):
                held.process.kill()
            eventually(lambda: not daemon.status().num_groups)
    say("SIGKILL of a process to PEER_LOST on the board", [1e3 * x for x in poisoned], "ms")
    say("SIGKILL of a process to the survivors' event", [1e3 * x for x in told], "ms")


def _until_poisoned(mapped: mmap.mmap, started: float) -> float:
    pause = threading.Event()
    while not board.read_header(mapped).poison_generation:
        assert time.perf_counter() - started < 2.0
        pause.wait(0.0005)
    return time.perf_counter() - started


def restarts(directory: Path, count: int, pairs: int) -> None:
    """From SIGKILL of the daemon to sockets that answer, and to everything being back."""
    answering, serving = [], []
    daemon = DaemonProcess(directory, "--log-level", "error")
    jobs = [ready_pair(daemon, make_spec(f"moe{i}", retain_s=60.0)) for i in range(pairs)]
    for clients, group, _ in jobs:
        many = [layer_specs.LayerSpec(f"more/{i}", top_k=1) for i in range(1000)]
        clients[0].register(group, many)
    for _ in range(count):
        started = time.perf_counter()
        daemon.popen.kill()
        again = DaemonProcess(directory, "--log-level", "error")
        answering.append(time.perf_counter() - started)
        for clients, group, layers in jobs:
            come_back(clients, group, layers)
        eventually(again.healthy, within_s=WAIT_S)
        serving.append(time.perf_counter() - started)
        assert set(again.group_states().values()) == {"READY"}
        assert again.status().recovery.lost_bytes == 0
        daemon.popen.communicate(timeout=WAIT_S)
        daemon, spare = again, daemon
        spare.admin.close()
    for clients, _, _ in jobs:
        for client in clients:
            client.process.kill()
    daemon.close()
    say(f"SIGKILL of the daemon to its sockets, {pairs} groups", answering, "s")
    say(f"SIGKILL of the daemon to SERVING, {2 * pairs} processes came back", serving, "s")


def one_layer(directory: Path, count: int) -> None:
    """One RegisterLayers, and its record in the journal."""
    with running(directory) as daemon:
        client: Client = daemon.client(process=True)
        group = client.create(make_spec(ranks=1)).group
        samples = []
        for number in range(count):
            started = time.perf_counter()
            client.register(group, [layer_specs.LayerSpec(f"one/{number}", top_k=1)])
            samples.append(1e3 * (time.perf_counter() - started))
        say("RegisterLayers of one layer, journalled", samples, "ms")
        client.process.kill()


def main(argv: Sequence[str]) -> None:
    """Takes about a minute with the defaults."""
    clients, kills, restarted = [int(x) for x in (*argv, *("100", "50", "10")[len(argv) :])]
    for number, (work, *arguments) in enumerate(
        [(memory, clients), (deaths, kills), (restarts, restarted, 4), (one_layer, 300)]
    ):
        with tempfile.TemporaryDirectory(prefix=f"epb{number}-") as directory:
            work(Path(directory), *arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
