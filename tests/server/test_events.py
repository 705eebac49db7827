"""Events: bounded by kind, denials reported rarely, and kept for the next daemon."""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time

import pytest
from harness import FakeClock, as_uid, eventually
from raw_client import connect, receive

from ep_runtime import errors
from ep_runtime.v1 import fd_socket_pb2
from ep_runtime_server.base import events
from ep_runtime_server.base.events import EventLog

MOST_S = 1.0


@pytest.fixture
def log(tmp_path):
    return EventLog(FakeClock(), tmp_path / "events")


def kinds(log):
    return [event.kind for event in log.after(0)]


def test_what_happens_often_pushes_nothing_else_out():
    log = EventLog(FakeClock())
    log.add("group.formed", "once")
    for number in range(3 * events.MAX_EVENTS_PER_RING):
        log.add("session.hello", str(number))
    found = log.after(0)
    assert found[0].kind == "group.formed"
    assert len(found) == 1 + events.MAX_EVENTS_PER_RING
    numbers = [event.sequence for event in found]
    assert numbers == sorted(numbers)
    assert log.after(numbers[-1]) == []


def test_kinds_of_things_are_bounded_too():
    log = EventLog(FakeClock())
    for number in range(100):
        log.add(f"kind{number}.x", "x")
    assert len(log._rings) == events.MAX_RINGS


def test_denials_are_told_sparingly_and_their_number_is_not_lost():
    log = EventLog(FakeClock())
    for _ in range(2200):
        log.deny("fd.denied", 4242, "uid 4242 is not served", uid=4242)
    log.deny("fd.denied", 4243, "uid 4243 is not served", uid=4243)
    assert len(log.after(0)) == events.DENIALS_AT_ONCE + 1
    log._clock.advance(events.TELL_SUPPRESSED_EVERY_S)
    log.tick()
    log.tick()
    last = log.after(0)[-1]
    assert last.fields == {"suppressed": 2200 - events.DENIALS_AT_ONCE}
    log._clock.advance(events.DENIAL_EVERY_S)
    log.deny("fd.denied", 4242, "again", uid=4242)
    assert log.after(0)[-1].message == "again"


def test_denials_of_many_users_are_told_sparingly_as_well():
    log = EventLog(FakeClock())
    for uid in range(10_000):
        log.deny("fd.denied", uid, "not served", uid=uid)
    assert len(log.after(0)) == events.ALL_DENIALS_AT_ONCE
    assert len(log._by_cause) == events.MAX_CAUSES


def test_a_stranger_fills_neither_the_log_nor_the_events(start_daemon):
    daemon = start_daemon(peer_of=as_uid(lambda: 4242))
    hello = fd_socket_pb2.FdRequest(hello=fd_socket_pb2.Hello(api_versions=["v1"], pid=1))
    for _ in range(30):
        try:
            with connect(daemon.directory) as connection:
                connection.send(hello.SerializeToString())
                with pytest.raises((errors.PermissionDeniedError, ConnectionError)):
                    receive(connection)
        except OSError:  # refused before it sent anything
            continue
    assert 1 <= daemon.event_kinds().count("fd.denied") <= events.DENIALS_AT_ONCE


def test_events_and_their_numbers_outlive_the_daemon(log, tmp_path):
    for number in range(5):
        log.add("group.formed", f"{number}", session_id="s", group="g", generation=number)
    before = log.after(0)
    asyncio.run(log.written())
    again = EventLog(FakeClock(), tmp_path / "events")  # of a killed daemon, which writes no close
    assert again.after(0)[:5] == before
    assert kinds(again)[5:] == ["server.events_kept"]
    again.add("group.formed", "new")
    assert [event.sequence for event in again.after(5)] == [6, 7]
    for each in (log, again):
        each.close()


def odd_lines(line: bytes) -> list[bytes]:
    values = json.loads(line)
    odd = [b"", b"[]", b"{}", b"7", b"null", b"\xff\xfe", b"[" * 5000, line[:-5], b'"' * 9]
    for place, wrong in enumerate([2**63, "now", 5, None, [], {}, "none"]):
        odd.append(json.dumps([*values[:place], wrong, *values[place + 1 :]]).encode())
    return [*odd, json.dumps([*values, 1]).encode(), json.dumps([-1, *values[1:]]).encode()]


def test_lines_that_are_no_events_are_left_out(log, tmp_path):
    log.add("group.formed", "good", generation=1)
    log.close()
    path = tmp_path / "events"
    good = path.read_bytes().strip()
    path.write_bytes(b"\n".join([*odd_lines(good), good, good, b'[2, 3.0, "torn']))
    again = EventLog(FakeClock(), path)
    assert [event.message for event in again.after(0)][:1] == ["good"]
    assert kinds(again) == ["group.formed", "server.events_kept"]
    again.close()
    third = EventLog(FakeClock(), path)  # the torn end did not remove an event
    assert kinds(third) == ["group.formed", "server.events_kept", "server.events_kept"]


def test_the_file_is_as_long_as_what_is_kept(log, tmp_path, monkeypatch):
    monkeypatch.setattr(events, "REWRITE_AT_BYTES", 100_000)
    monkeypatch.setattr(events, "MAX_EVENTS_PER_RING", 50)
    for number in range(5000):
        log.add("session.hello", "x" * 100, number=number)
        if number % 100 == 0:
            asyncio.run(log.written())
    log.close()
    assert os.path.getsize(tmp_path / "events") < 110_000
    again = EventLog(FakeClock(), tmp_path / "events")
    assert again.after(0)[-2].fields == {"number": 4999}


def test_a_file_that_cannot_be_written_hurts_nobody(tmp_path):
    log = EventLog(FakeClock(), tmp_path / "not there" / "events")
    log.add("group.formed", "x")
    assert kinds(log) == ["group.formed"]
    log.close()


class Disk:
    """Replaces os.write: writes nothing until it is released."""

    def __init__(self, monkeypatch):
        self.goes_on = threading.Event()
        self._write = os.write
        monkeypatch.setattr(events.os, "write", self.write)

    def write(self, fd, data):
        assert self.goes_on.wait(10.0)
        return self._write(fd, data)


def test_a_disk_that_takes_nothing_holds_nobody_and_loses_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(events, "MAX_WAITING", 10)
    monkeypatch.setattr(events, "WRITTEN_WITHIN_S", 0.1)
    log, disk = EventLog(FakeClock(), tmp_path / "events"), Disk(monkeypatch)
    started = time.monotonic()
    for number in range(100):
        log.add("session.hello", f"{number}")
    asyncio.run(log.written())
    assert time.monotonic() - started < MOST_S
    disk.goes_on.set()
    eventually(lambda: log._file._beside.empty)
    log.tick()  # writes events that had no room
    log.close()
    again = EventLog(FakeClock(), tmp_path / "events")
    assert [event.message for event in again.after(0)][:100] == [f"{n}" for n in range(100)]
    again.close()
