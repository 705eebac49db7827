"""Lines of the daemon's log: their content, and that a reader who never reads blocks nobody."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import logging
import os
import signal
import threading

import pytest
from harness import FakeClock, eventually

from ep_runtime_server.base import limits, log_lines
from ep_runtime_server.base.beside import END_S
from ep_runtime_server.base.events import Event, EventLog


@pytest.fixture
def root():
    """Restores the root logger after the test."""
    logger = logging.getLogger()
    before, level = logger.handlers[:], logger.level
    yield logger
    logger.handlers[:] = before
    logger.setLevel(level)


def record(level=logging.INFO, message="group moe is ready", **event):
    made = logging.LogRecord("x", level, "", 0, message, None, None)
    if event:
        made.event = Event(7, 0.0, "group.ready", "", "moe", message, event)
    return made


@pytest.mark.parametrize("terminal", [True, False])
def test_a_terminal_gets_text_and_a_pipe_json(monkeypatch, root, terminal):
    monkeypatch.setattr(os, "isatty", lambda fd: terminal and fd == 2)
    monkeypatch.setenv("NO_COLOR", "1")
    log = log_lines.start_logging("info")
    line = log.format(record(uid=7))
    log.end()
    if terminal:
        assert line.endswith(" INFO    group.ready group moe is ready (group=moe)")
    else:
        assert json.loads(line)["event"] == "group.ready"


def test_only_our_own_colours_reach_the_terminal():
    lines = log_lines.TextLines(colours=True)
    line = lines.format(record(logging.WARNING, "job \x1b[2J of others"))
    assert "\x1b[33mWARNING\x1b[0m" in line
    assert "\x1b[2J" not in line
    assert "\\x1b[2J" in line


def test_a_traceback_stands_below_its_line():
    try:
        raise ValueError("why")
    except ValueError as error:
        made = record(logging.ERROR, "failed")
        made.exc_info = (type(error), error, error.__traceback__)
    first, *rest = log_lines.TextLines(colours=False).format(made).splitlines()
    assert first.endswith("ERROR   x failed")
    assert rest[-1] == "ValueError: why"


def test_what_callers_do_to_themselves_inside_grpc_is_no_failure() -> None:
    def told(name: str, error: BaseException) -> bool:
        exc_info = (type(error), error, None)
        record = logging.LogRecord(name, logging.ERROR, "", 0, "not handled", None, exc_info)
        return log_lines._is_failure(record)

    for error in (asyncio.CancelledError(), UnicodeDecodeError("utf-8", b"\xff", 0, 1, "no text")):
        assert not told("grpc._cython.cygrpc", error)
        assert told("ep_runtime_server.rpc.interceptor", error)
    assert told("grpc._cython.cygrpc", RuntimeError())


PIPE_BYTES = 4096


@pytest.fixture
def pipe():
    """(read, write) ends of a pipe of one page."""
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    yield reader, writer
    os.close(reader)
    os.close(writer)


def plain_record(message):
    return logging.LogRecord("x", logging.INFO, "", 0, message, None, None)


def test_lines_come_out_whole_and_in_order(pipe):
    log, lines = log_lines.LogWriter(pipe[1]), [f"{i} {'x' * 300}" for i in range(100)]
    for line in lines:
        log.emit(plain_record(line))
    ending = threading.Thread(target=log.end)
    ending.start()
    found = b""
    while found.count(b"\n") < len(lines):
        found += os.read(pipe[0], 1 << 16)
    ending.join(2 * END_S)
    assert found.decode().splitlines() == lines
    assert log.take_lost() == 0


def test_lines_that_nobody_reads_are_counted_and_told_once_there_is_room(pipe):
    log = log_lines.LogWriter(pipe[1], max_lines=10)
    os.write(pipe[1], b"x" * PIPE_BYTES)
    log.emit(plain_record("the thread waits with this one"))
    eventually(lambda: log.beside.empty)
    for number in range(50):
        log.emit(plain_record(f"{number}"))
    assert log.take_lost() == 0  # a line about it would be lost as well
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
    for _ in range(60):  # some 200 bytes each, twice
        daemon.client().goodbye()  # a call has a limit, and a full pipe holds for ever
    assert daemon.status().num_sessions == 0
    daemon.popen.send_signal(signal.SIGTERM)
    assert daemon.popen.wait(limits.REAPER_INTERVAL_S + 10 * END_S) == 0


def test_a_log_whose_reader_is_gone_is_no_error(pipe):
    reader, writer = os.pipe()
    os.close(reader)
    log = log_lines.LogWriter(writer)
    log.setFormatter(log_lines.JsonLines())
    log.emit(plain_record("x"))
    log.end()
    os.close(writer)
    assert log.take_lost() == 1
    assert json.loads(log.format(plain_record("x")))["message"] == "x"
