"""The daemon's log goes to whoever reads it; who does not holds nobody."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import signal
import threading
import time

import pytest
from harness import FakeClock, eventually

from ep_runtime_server.base import limits
from ep_runtime_server.base.beside import END_S
from ep_runtime_server.base.events import EventLog
from ep_runtime_server.base.log_lines import JsonLines
from ep_runtime_server.base.log_writer import LogWriter

PIPE_BYTES = 4096
MOST_S = 1.0  # for an answer


@pytest.fixture
def pipe():
    """(read, write) ends of a pipe of one page."""
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    yield reader, writer
    os.close(reader)
    os.close(writer)


def record(message):
    return logging.LogRecord("x", logging.INFO, "", 0, message, None, None)


def test_lines_come_out_whole_and_in_order(pipe):
    log, lines = LogWriter(pipe[1]), [f"{i} {'x' * 300}" for i in range(100)]
    for line in lines:
        log.emit(record(line))
    ending = threading.Thread(target=log.end)
    ending.start()
    found = b""
    while found.count(b"\n") < len(lines):
        found += os.read(pipe[0], 1 << 16)
    ending.join(2 * END_S)
    assert found.decode().splitlines() == lines
    assert log.take_lost() == 0


def test_lines_that_nobody_reads_are_counted_and_told_once_there_is_room(pipe):
    log = LogWriter(pipe[1], max_lines=10)
    os.write(pipe[1], b"x" * PIPE_BYTES)
    log.emit(record("the thread waits with this one"))
    eventually(lambda: log.beside.empty)
    for number in range(50):
        log.emit(record(f"{number}"))
    assert log.take_lost() == 0  # to tell it now would be lost as well
    told = EventLog(FakeClock())
    told.lost_lines = log.take_lost
    found = b""

    def read() -> bool:
        nonlocal found
        with contextlib.suppress(BlockingIOError):
            found += os.read(pipe[0], 1 << 16)
        return found.count(b"\n") == 11

    os.set_blocking(pipe[0], False)
    eventually(read)
    told._clock.advance(10.0)
    told.tick()
    (event,) = told.after(0)
    assert event.kind == "log.lost"
    assert event.fields["lost"] == 40
    told._clock.advance(10.0)
    told.tick()
    assert told.after(0) == [event]
    log.end()


def test_a_log_that_nobody_reads_holds_no_client_and_no_end(daemon_process):
    daemon = daemon_process()
    fcntl.fcntl(daemon.popen.stderr.fileno(), fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    slowest = 0.0
    for _ in range(60):  # some 200 bytes each, twice
        asked = time.monotonic()
        daemon.client().goodbye()
        slowest = max(slowest, time.monotonic() - asked)
    assert slowest < MOST_S
    assert daemon.status().num_sessions == 0
    daemon.popen.send_signal(signal.SIGTERM)
    assert daemon.popen.wait(limits.REAPER_INTERVAL_S + 10 * END_S) == 0


def test_a_log_whose_reader_is_gone_is_no_error(pipe):
    reader, writer = os.pipe()
    os.close(reader)
    log = LogWriter(writer)
    log.setFormatter(JsonLines())
    log.emit(record("x"))
    log.end()
    os.close(writer)
    assert log.take_lost() == 1
    assert json.loads(log.format(record("x")))["message"] == "x"
