"""Campaigns of odd inputs against a daemon, and what must be true of the daemon after each.

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
# Of the daemon's own memory, after the warm-up: what it keeps on purpose (events, sessions that
# ended, answers by op id) is bounded, and so is what malloc keeps of messages of a megabyte.
MAX_GROWTH_BYTES = 96 << 20
WARM_UP = 200
# What a campaign left behind is gone by then: connections that said nothing have ended.
SETTLED_S = 30.0
OPENED_ONCE = 4  # descriptors for what the daemon starts when it first needs it
Answers = collections.Counter[str]
# fuzz(directory, numbers, inputs): sends them, in a process of its own; raises where one is
# answered as none may be.
Fuzzer = Callable[[Path, random.Random, int], Answers]


@dataclasses.dataclass(frozen=True)
class Held:
    """What a daemon holds, by its status and by the kernel's word."""

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
    """A traceback, a failure of the daemon's own, or a line that is none of the log's."""
    signs = ("Traceback", "never retrieved", '"level": "error"', '"level": "critical"')
    return not line.startswith('{"') or any(sign in line for sign in signs)


def lines_of_failures(log: Path) -> list[str]:
    with log.open(errors="replace") as lines:
        return [line for line in lines if _tells_a_failure(line)]


def check_served(daemon: DaemonProcess) -> None:
    """A client comes, makes a group that is READY, and goes; every call within WAIT_S."""
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
    signal.pause()  # until killed, with all that is open


def send(daemon: DaemonProcess, fuzz: Fuzzer, seed: int, inputs: int) -> Answers:
    """Runs the fuzzer in processes of its own, one after the other; how often each answer came."""
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
    """Fuzzes; then the daemon serves, and holds what it held before."""
    send(daemon, fuzz, 0, WARM_UP)  # what is made once is made now
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
    """What the daemon holds once everybody has left and memory on its way back is back."""
    held = Held.by(daemon)

    def at_rest() -> bool:
        nonlocal held
        daemon.ask("Reclaim", all_retained=True)  # some asked to be kept for a day
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
    """SIGTERM, which it obeys; and nothing failed in its life."""
    daemon.popen.send_signal(signal.SIGTERM)
    ended_well(daemon, log)


def ended_well(daemon: DaemonProcess, log: Path) -> None:
    """It ends, having been told to, and nothing failed in its life."""
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
