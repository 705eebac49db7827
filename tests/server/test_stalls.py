"""What stands still: work beside the event loop delays nobody else, and the loop itself is seen."""

from __future__ import annotations

import concurrent.futures
import os
import threading
import time

import pytest
from harness import eventually
from raw_client import WAIT_S, make_spec

# Of other clients' calls while the work stands still; of what the loop may do meanwhile.
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
