"""Figures of groups over nodes: forming, deaths told to the other node, the coordinator's load.

    python tests/bench/forming_figures.py [ROUNDS [JOBS [NODESxRANKS...]]]

With server, client and tests on PYTHONPATH. Every node is a daemon of its own on loopback, every
rank a session of its own that maps windows in host memory; the calls that wait are those of JOBS
jobs under jax.distributed. Prints one JSON line per figure: what, samples, p50, worst, unit.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from cluster_places import place, plain_tcp
from daemon_figures import MIB, say
from harness import DaemonProcess, Watcher, eventually
from multiprocess.launch import Job
from raw_client import WAIT_S, Client, close_fds, make_spec

IDLE_S = 12.0
_JOINED = 3  # CLUSTER_LINK_JOINED


@contextlib.contextmanager
def cluster(directory: Path, count: int) -> Iterator[list[DaemonProcess]]:
    """Daemons of `count` nodes; the first one coordinates."""
    address = place()
    with contextlib.ExitStack() as stack:
        daemons = []
        for number in range(count):
            own = directory / str(number)
            own.mkdir()
            role = "--join" if number else "--coordinator"
            words = (role, address, *plain_tcp(), "--node", f"n{number}", "--log-level", "error")
            daemons.append(DaemonProcess(own, *words))
            stack.callback(daemons[-1].close)
        for daemon in daemons[1:]:
            eventually(lambda daemon=daemon: _link(daemon) == _JOINED, within_s=WAIT_S)
        yield daemons


def _link(daemon: DaemonProcess) -> int:
    return int(daemon.status().cluster.link)


def spec_of(ranks: int, number: int) -> Any:
    return make_spec(f"moe{number}", ranks=ranks)


def _forms(client: Client, spec: Any, rank: int) -> float:
    """When the rank's process had the READY group."""
    group = client.create(spec, ranks=[rank], wait_s=2 * WAIT_S).group
    close_fds(client.fetch(group))
    client.attached(group, wait_s=2 * WAIT_S)
    return time.perf_counter()


def forming(daemons: list[DaemonProcess], ranks: int, rounds: int) -> None:
    """From the last rank's CreateGroup to READY in every rank's process."""
    home = [daemons[rank * len(daemons) // ranks] for rank in range(ranks)]
    clients = [daemon.client() for daemon in home]
    coordinator = daemons[0]
    taken, calls = [], []
    before = coordinator.status().rss_bytes
    with ThreadPoolExecutor(ranks) as pool:
        for number in range(rounds):
            spec = spec_of(ranks, number)
            answered = coordinator.status().cluster.num_answered
            waiting = [pool.submit(_forms, clients[r], spec, r) for r in range(ranks - 1)]
            _all_claimed_but_one(daemons, spec.name, ranks)
            started = time.perf_counter()
            last = _forms(clients[-1], spec, ranks - 1)
            taken.append(max(last, *(future.result(WAIT_S) for future in waiting)) - started)
            calls.append((coordinator.status().cluster.num_answered - answered) / ranks)
    what = f"{ranks} ranks on {len(daemons)} nodes"
    say(f"last join to READY, {what}", [1e3 * x for x in taken], "ms")
    say(f"coordinator answers per rank while forming, {what}", calls, "calls")
    rss = [x / MIB for x in (before, coordinator.status().rss_bytes)]
    say(f"RSS of the coordinator with {rounds} such groups, {what}", rss[1:], "MiB")
    for client in clients:
        client.goodbye()


def _all_claimed_but_one(daemons: list[DaemonProcess], name: str, ranks: int) -> None:
    def claimed() -> int:
        found = [item for daemon in daemons for item in daemon.ask("ListGroups", name=name).groups]
        return sum(bool(m.pid) and not m.node for item in found for m in item.group.members)

    eventually(lambda: claimed() == ranks - 1, within_s=WAIT_S)


def idle(daemons: list[DaemonProcess]) -> None:
    """Calls that the coordinator answers while nothing happens."""
    coordinator = daemons[0]
    answered, started = coordinator.status().cluster.num_answered, time.perf_counter()
    threading.Event().wait(IDLE_S)  # nothing is waited for but time
    calls = coordinator.status().cluster.num_answered - answered
    per_minute = 60 * calls / (time.perf_counter() - started)
    per_node = per_minute / (len(daemons) - 1)
    say("coordinator answers per minute and node, idle", [per_node], "calls")


def deaths(daemons: list[DaemonProcess], rounds: int) -> None:
    """From SIGKILL of a process to the event of a process on another node."""
    told = []
    with ThreadPoolExecutor(2) as pool:
        for number in range(rounds):
            spec = spec_of(2, 1000 + number)
            survivor, victim = daemons[0].client(), daemons[1].client(process=True)
            watcher = Watcher(survivor)
            ready = [
                pool.submit(_forms, client, spec, rank)
                for rank, client in enumerate((survivor, victim))
            ]
            for future in ready:
                future.result(WAIT_S)
            started = time.perf_counter()
            os.kill(victim.pid, 9)
            eventually(
                lambda seen=watcher: any(e.group.lost_ranks for e in seen.events), within_s=WAIT_S
            )
            told.append(time.perf_counter() - started)
            survivor.goodbye()
            victim.process.kill()
    say("SIGKILL of a process to the other node's event", [1e3 * x for x in told], "ms")


_WAITS = """
session = ep.connect(job="waits", timeout_s=60)
mesh = mesh_of()
group = session.create_group(
    "g", mesh, ep_axis="ep", num_experts=8, hidden_size=16, max_tokens_per_rank=8, max_top_k=2,
    alignment=8, max_token_dtype="float32",
)
layer = group.register_layer("l", top_k=2)
place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("ep"))
value = np.random.default_rng(0).standard_normal((8 * mesh.size, 16)).astype(np.float32)
x = jax.make_array_from_callback(value.shape, place, lambda part: value[part])

@jax.jit
def step(x):
    routing = ep.route(x[:, :8], 2)
    there = ep.dispatch(layer, x, routing.topk_idx, routing.topk_weights)
    return ep.combine(layer, there, there.tokens, weights=there.weights)

jax.block_until_ready(step(x))
say(ready=True)
if index == jax.process_count() - 1:
    hear()  # until the end
try:
    with ep.translate_errors():
        jax.block_until_ready(step(x))
except ep.PeerLostError:
    say(at=time.monotonic())
os._exit(0)
"""


def calls(daemons: list[DaemonProcess], rounds: int) -> None:
    """From SIGKILL of one of 4 processes on 2 nodes to PeerLostError in the calls of the others.

    Calls in windows end by the daemons' word; those in XLA's collectives as connections close,
    at last when the process that held the connection has its own error and ends.
    """
    own = [{"EP_RUNTIME_ADDRESS": f"unix://{daemons[i // 2].directory}"} for i in range(4)]
    first, last = [], []
    for _ in range(rounds):
        with Job(_WAITS, processes=4, devices=1, own=own) as job:
            job.heard()
            started = time.monotonic()
            job.workers[3].kill()
            ended = [worker.heard()["at"] - started for worker in job.workers[:3]]
        first.append(1e3 * min(ended))
        last.append(1e3 * max(ended))
    if rounds:
        say("SIGKILL of a process to PeerLostError in the first waiting call", first, "ms")
        say("SIGKILL of a process to PeerLostError in the last waiting call", last, "ms")


def main(argv: Sequence[str]) -> None:
    """Takes about two minutes with the defaults."""
    rounds, jobs = [int(x) for x in (*argv[:2], *("20", "5")[len(argv[:2]) :])]
    sizes = [tuple(map(int, word.split("x"))) for word in argv[2:] or ("2x4", "4x64")]
    for number, (nodes, ranks) in enumerate(sizes):
        with (
            tempfile.TemporaryDirectory(prefix="epb-nodes-") as directory,
            cluster(Path(directory), nodes) as daemons,
        ):
            forming(daemons, ranks, rounds)
            if number == 0:
                deaths(daemons, rounds)
                idle(daemons)
                calls(daemons, jobs)


if __name__ == "__main__":
    main(sys.argv[1:])
