"""The daemon's log: text for who sits at a terminal, JSON for everybody else."""

from __future__ import annotations

import asyncio
import json
import logging
import os

import pytest

from ep_runtime_server.base import log_lines
from ep_runtime_server.base.events import Event


@pytest.fixture
def root():
    """The root logger as it was before."""
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
