"""Sends odd inputs to a daemon in campaigns, and checks the daemon after each.

Inputs are sent by processes that are killed afterwards, so all that they held has to come back.
A campaign is seeded. An input that is answered as none may be is in the failure's text; what a
daemon told before may be part of it, so the seed alone does not always bring it back.
"""

from __future__ import annotations

import collections
import dataclasses
import multiprocessing
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
from harness import DaemonProcess, eventually
from raw_client import WAIT_S, make_spec

ROUND_INPUTS = 1000  # of one process
ROUND_S = 120.0
# Growth allowed to the daemon's memory after the warm-up. The daemon keeps a bounded number of
# events, ended sessions and answers, and malloc keeps some megabytes of messages.
MAX_GROWTH_BYTES = 96 << 20
WARM_UP = 200
# A campaign's leftovers must be gone by then: silent connections have ended.
SETTLED_S = 30.0
OPENED_ONCE = 4  # descriptors that the daemon opens on first use
Answers = collections.Counter[str]
# fuzz(directory, numbers, inputs): sends inputs from a separate process; raises on a forbidden
# answer.
Fuzzer = Callable[[Path, random.Random, int], Answers]


@dataclasses.dataclass(frozen=True)
class Held:
    """Counts of what a daemon holds: its status, its open descriptors, and its memory."""

    sessions: int
    groups: int
    bytes: int
    fds: int
    rss_bytes: int

    @classmethod
    def by(cls, daemon: DaemonProcess) -> Held:
        status = daemon.status()
        return cls(
            status.num_sessions,
            status.num_groups,
            sum(p.leased_bytes + p.retained_bytes + p.quarantined_bytes for p in status.pools),
            len(os.listdir(f"/proc/{daemon.pid}/fd")),
            status.rss_bytes,
        )


def _tells_a_failure(line: str) -> bool:
    """Finds a traceback, an internal failure, or a line that is not in the log's format."""
    signs = ("Traceback", "never retrieved", '"level": "error"', '"level": "critical"')
    return not line.startswith('{"') or any(sign in line for sign in signs)


def lines_of_failures(log: Path) -> list[str]:
    with log.open(errors="replace") as lines:
        return [line for line in lines if _tells_a_failure(line)]


def check_served(daemon: DaemonProcess) -> None:
    """A client connects, makes a READY group and leaves; every call takes at most WAIT_S."""
    assert daemon.popen.poll() is None, f"the daemon ended with {daemon.popen.returncode}"
    assert daemon.healthy()
    client = daemon.client()
    client.close_group(client.ready(make_spec("after")))
    client.goodbye()
    client.close()
    status = daemon.status()
    assert list(status.failing_tasks) == []


def _send(pipe, fuzz: Fuzzer, directory: Path, seed: str, inputs: int) -> None:
    try:
        pipe.send((fuzz(directory, random.Random(seed), inputs), ""))
    except BaseException:  # noqa: BLE001 - the test raises it
        pipe.send((collections.Counter(), traceback.format_exc()))
    signal.pause()  # until it is killed, with everything that it opened


def send(daemon: DaemonProcess, fuzz: Fuzzer, seed: int, inputs: int) -> Answers:
    """Runs the fuzzer in separate processes, one after another; counts answers by kind."""
    context = multiprocessing.get_context("forkserver")
    answers: Answers = collections.Counter()
    for number, first in enumerate(range(0, inputs, ROUND_INPUTS)):
        ours, theirs = context.Pipe()
        name = f"{seed}/{number}"
        count = min(ROUND_INPUTS, inputs - first)
        process = context.Process(
            target=_send, args=(theirs, fuzz, daemon.directory, name, count), daemon=True
        )
        process.start()
        theirs.close()
        with ours:
            told = ours.poll(ROUND_S)
            came, failure = ours.recv() if told else ({}, f"no end within {ROUND_S} s")
        process.kill()
        process.join(WAIT_S)
        process.close()
        assert not failure, f"round {name} of {count} inputs: {failure}"
        answers.update(came)
    return answers


def campaign(daemon: DaemonProcess, fuzz: Fuzzer, inputs: int, seed: int = 1) -> Answers:
    """Fuzzes; then the daemon must serve, and hold the same as before."""
    send(daemon, fuzz, 0, WARM_UP)  # makes everything that is made only once
    check_served(daemon)
    before = held_at_rest(daemon, None)
    started_s = time.monotonic()
    answers = send(daemon, fuzz, seed, inputs)
    took_s = time.monotonic() - started_s
    check_served(daemon)
    after = held_at_rest(daemon, before)
    lag_s = daemon.status().loop_lag_worst.ToTimedelta().total_seconds()
    sys.stdout.write(
        f"{inputs} inputs in {took_s:.1f} s, worst loop lag {1e3 * lag_s:.0f} ms, RSS "
        f"{before.rss_bytes / 1e6:.0f} -> {after.rss_bytes / 1e6:.0f} MB, {after}, "
        f"{dict(answers.most_common())}\n"
    )
    assert after.rss_bytes - before.rss_bytes < MAX_GROWTH_BYTES
    return answers


def held_at_rest(daemon: DaemonProcess, before: Held | None) -> Held:
    """Returns what the daemon holds after all clients left and freed memory was returned."""
    held = Held.by(daemon)

    def at_rest() -> bool:
        nonlocal held
        daemon.ask("Reclaim", all_retained=True)  # some memory was retained for a day
        last, held = held, Held.by(daemon)
        nothing = (held.sessions, held.groups, held.bytes) == (0, 0, 0)
        return nothing and held.fds <= (last.fds if before is None else before.fds + OPENED_ONCE)

    try:
        eventually(at_rest, within_s=SETTLED_S)
    except AssertionError:
        left = f"{daemon.ask('ListGroups')} {daemon.ask('ListBuffers')}"
        raise AssertionError(f"before {before}, {SETTLED_S} s after: {held} {left:.4000}") from None
    return held


def end_well(daemon: DaemonProcess, log: Path) -> None:
    """Sends SIGTERM; the daemon must end, without any failure in its log."""
    daemon.popen.send_signal(signal.SIGTERM)
    ended_well(daemon, log)


def ended_well(daemon: DaemonProcess, log: Path) -> None:
    """The daemon must have ended with 0, without any failure in its log."""
    code, _ = daemon.ended(WAIT_S)
    assert code == 0
    failures = lines_of_failures(log)
    assert not failures, f"{len(failures)} lines: " + "\n".join(failures[:3])[:6000]


@pytest.fixture
def fuzzed_daemon(daemon_process, tmp_path):
    """fuzzed_daemon(*options) -> (DaemonProcess, file of its standard error)."""

    def start(*options: str) -> tuple[DaemonProcess, Path]:
        log = tmp_path / "log"
        with log.open("w") as stderr:
            return daemon_process(*options, stderr=stderr), log

    return start
