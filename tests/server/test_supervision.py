"""Failed background work is reported and retried; blocked work delays nothing else."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
import time

import pytest
from harness import FakeClock, eventually
from raw_client import WAIT_S, make_spec

from ep_runtime_server.base import supervision
from ep_runtime_server.base.events import EventLog


@pytest.fixture
def told(monkeypatch):
    """Yields (supervisor, its events' kinds, number of callbacks)."""
    monkeypatch.setattr(supervision, "RETRY_FIRST_S", 0.001)
    monkeypatch.setattr(supervision, "WORKS_AFTER_S", 0.02)
    events, changes = EventLog(FakeClock()), []
    supervisor = supervision.Supervisor(events, lambda: changes.append(supervisor.failing))
    return supervisor, lambda: [event.kind for event in events.after(0)], changes


async def test_work_that_fails_is_started_again_until_it_works(told):
    supervisor, kinds, changes = told
    starts = []

    async def work():
        starts.append(len(starts))
        if len(starts) <= 3:
            raise OverflowError("as ctypes has it")
        await asyncio.Event().wait()

    supervisor.keep("reaper", work)
    while not starts or supervisor.failing:
        await asyncio.sleep(0.001)
    assert len(starts) == 4
    await supervisor.stop()
    assert kinds() == ["task.failed", "task.works"]  # the same failure is reported once
    assert changes == [["reaper"], []]


async def test_pauses_between_starts_grow_to_a_bound(told, monkeypatch):
    supervisor, _, _ = told
    pauses = []

    async def sleep(pause_s):
        pauses.append(pause_s)
        if len(pauses) == 40:
            raise asyncio.CancelledError

    async def work():
        raise ValueError

    monkeypatch.setattr(supervision.asyncio, "sleep", sleep)
    supervisor.keep("reaper", work)
    await asyncio.gather(*supervisor._tasks, return_exceptions=True)
    assert pauses == sorted(pauses)
    assert (pauses[0], pauses[-1]) == (supervision.RETRY_FIRST_S, supervision.RETRY_MOST_S)


def test_a_round_that_fails_stops_no_other_and_is_told_once(told):
    supervisor, kinds, _ = told
    done = []

    def fails():
        raise OverflowError("too large")

    for _ in range(5):
        supervisor.run("first", fails)
        supervisor.run("second", lambda: done.append(1))
    assert supervisor.failing == ["first"]
    assert len(done) == 5
    supervisor.run("first", lambda: None)
    assert supervisor.failing == []
    assert kinds() == ["task.failed", "task.works"]


def test_a_duty_of_the_reaper_that_fails_makes_health_not_serving_and_stops_no_other(
    clocked, monkeypatch
):
    assert clocked.healthy()
    groups = clocked._daemon.runtime.groups

    def fails():
        raise OverflowError("cannot fit 'int' into an index-sized integer")

    with monkeypatch.context() as patch:
        patch.setattr(groups, "expire", fails)
        eventually(lambda: not clocked.healthy())
        assert clocked.status().failing_tasks == ["expiry of groups"]
        clocked.advance(11.0)  # sessions are still marked SUSPECT
    eventually(clocked.healthy)
    assert list(clocked.status().failing_tasks) == []
    kinds = clocked.event_kinds()
    assert kinds.count("task.failed") == kinds.count("task.works") == 1


def test_p99_leaves_out_one_sample_of_a_hundred():
    lag = supervision.LoopLag()
    for number in range(100):
        lag.add(float(number))
    assert (lag.p99_s, lag.recent_worst_s, lag.worst_s) == (98.0, 99.0, 99.0)


# Limits for other clients' calls during the blocked work, and for turns of the loop.
ANSWERED_S, LAG_S = 0.5, 0.3


def heartbeat_s(client) -> float:
    started_s = time.monotonic()
    client.beat()
    return time.monotonic() - started_s


def lag_s(daemon) -> float:
    return daemon.status().loop_lag.ToTimedelta().total_seconds()


@pytest.mark.doses(ci=1, full=5)
def test_an_allocation_that_stands_still_delays_nobody_else(
    daemon, monkeypatch, dose, record_property
):
    real, standing, over = os.posix_fallocate, threading.Event(), threading.Event()

    def stands_still(fd, offset, size):
        standing.set()
        assert over.wait(2 * WAIT_S)
        real(fd, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", stands_still)
    waits, other = daemon.client(job="waits"), daemon.client(job="other")
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        made = pool.submit(waits.create, make_spec(), wait_s=2 * WAIT_S)
        assert standing.wait(WAIT_S)
        end_s, slowest_s = time.monotonic() + dose, 0.0
        while time.monotonic() < end_s:
            slowest_s = max(slowest_s, heartbeat_s(other), heartbeat_s(waits))
            assert daemon.healthy()
        states = [daemon.session_state(client.session_id) for client in (waits, other)]
        assert states == ["ACTIVE", "ACTIVE"]
        assert not made.done()
        over.set()
        assert made.result(WAIT_S).group.spec.name == "moe"
    record_property("heartbeat beside it, at worst", f"{1e3 * slowest_s:.0f} ms")
    assert slowest_s < ANSWERED_S
    assert lag_s(daemon) < LAG_S


@pytest.mark.doses(ci=1, full=5)
def test_a_loop_that_stands_still_is_seen_and_ends_no_session(daemon, dose):
    client = daemon.client(process=True)
    client.ready(make_spec())
    daemon.stall(float(dose))
    assert heartbeat_s(client) < dose + ANSWERED_S
    eventually(lambda: lag_s(daemon) > 0.9 * dose)
    status = daemon.status()
    assert status.loop_lag_worst.ToTimedelta().total_seconds() > 0.9 * dose
    assert daemon.session_state(client.session_id) == "ACTIVE"
    assert daemon.group_states() == {"moe": "READY"}
    assert daemon.healthy()
