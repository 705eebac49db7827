"""Sessions that come and go for hours: the daemon holds what it held, and the kernel says so."""

from __future__ import annotations

import time

import pytest
from fuzzing import held_at_rest
from harness import memfds_of
from raw_client import Client, make_spec

GROWTH_BYTES = 24 << 20  # the last thousand sessions that ended, and the answers that are kept
SPEC = make_spec(ranks=1)


@pytest.mark.doses(ci=100, full=100_000)
def test_sessions_that_come_and_go_leave_nothing(daemon_process, dose, record_property):
    daemon = daemon_process("--log-level", "error")

    def come_and_go(times: int) -> None:
        for _ in range(times):
            client = Client(daemon.directory)
            client.close_group(client.ready(SPEC))
            client.goodbye()
            client.close()

    come_and_go(50)
    before, started_s = held_at_rest(daemon, None), time.monotonic()
    come_and_go(dose)
    took_s = time.monotonic() - started_s
    after = held_at_rest(daemon, before)
    record_property("sessions a second", f"{dose / took_s:.0f}")
    growth = after.rss_bytes - before.rss_bytes
    record_property("growth", f"{growth / 1e6:.1f} MB of {before.rss_bytes / 1e6:.0f} MB")
    assert memfds_of(daemon.pid) == set()
    assert growth < GROWTH_BYTES
