"""Runs `top`, `load` and `skew` next to a job whose ranks do as the test orders."""

from __future__ import annotations

import collections
import json
import os
import pty
import re
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from child_programs import command
from daemon_fixtures import WAIT_S, start_daemon, wait_until
from ranked_job import HIDDEN, RANKS, TOKENS, Job

import ep_runtime as ep
from ep_runtime_client import cli
from ep_runtime_client.cli.daemon import source


@pytest.fixture(scope="module")
def module_address() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="ept-") as directory:
        child = start_daemon(Path(directory))
        yield f"unix://{directory}"
        assert child.stop() == 0, child.log_tail(50)


@pytest.fixture(scope="module")
def running(module_address: str) -> Iterator[Job]:
    with ep.connect(module_address, job="tests", timeout_s=WAIT_S) as session:
        job = Job(session)
        yield job
        job.stop()


@pytest.fixture
def job(running: Job) -> Iterator[Job]:
    """A job at its usual pace: 20 ms a step."""
    running.sleeps[:] = 0.010
    running.held.set()
    yield running
    running.held.set()


@pytest.fixture
def ask(module_address: str, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs a command: its exit code, and its JSON document or text."""

    def run(*words: str) -> tuple[int, Any]:
        code = cli.main([words[0], "--address", module_address, *words[1:]])
        said = capsys.readouterr()
        return code, json.loads(said.out) if "json" in words else said.out + said.err

    return run


def test_top_tells_rates_of_every_rank(job: Job, ask: Any) -> None:
    code, found = ask("top", "--interval", "1", "-o", "json")
    assert code == 0
    (group,) = found["groups"]
    assert [rank["world_rank"] for rank in group["ranks"]] == [0, 1, 2, 3]
    steps = [rank["tokens_s"] / TOKENS for rank in group["ranks"]]
    assert 5 < min(steps) <= max(steps) < 50, "a step takes 20 ms or more"
    for rank in group["ranks"]:
        assert rank["calls_s"] == pytest.approx(6 * rank["tokens_s"] / TOKENS, rel=0.3)
        assert rank["gb_s"] == pytest.approx(rank["rows_s"] * HIDDEN * 4 / 1e9)
        assert 0 <= rank["wait_share"] <= 1
        assert rank["pid"] == os.getpid()
    by_rows = [rank["rows_s"] for rank in group["ranks"]]
    assert by_rows[0] == max(by_rows) > 3 * by_rows[2]
    assert [layer["layer"] for layer in group["layers"]] == ["first", "second"]
    assert group["layers"][0]["max_mean"] == pytest.approx(4.0, rel=0.1)


def test_a_rank_that_stands_still_is_named_with_its_layer(job: Job, ask: Any) -> None:
    job.held.clear()
    started_s = time.monotonic()
    while True:
        code, found = ask("skew", "--interval", "0.5", "-o", "json")
        slow = found["groups"][0]["slow"]
        if slow and slow["share"] > 0.9:
            break
        assert time.monotonic() - started_s < 12
    assert code == cli.LATE
    assert (slow["world_rank"], slow["op"], slow["layer"]) == (2, "DISPATCH", "second")
    _, text = ask("top", "--interval", "0.2")
    assert "SLOW: rank 2 holds the others up" in text
    (marked,) = [line for line in text.splitlines() if "<<<" in line]
    assert marked.split()[0] == "2"
    code, text = ask("skew", "--interval", "0.2", "--op", "dispatch")
    assert code == cli.LATE
    assert "dispatch: share of the time that a rank (row) waited for a peer (column)" in text


def test_a_rank_that_is_a_little_slow_is_named_within_a_minute(job: Job, ask: Any) -> None:
    """5% of a step, in the second of two layers. Others may be slow too now and then, where they
    wait for a core; the one that always is has most samples."""
    job.sleeps[:] = 0.100
    job.sleeps[3, 1] *= 1.10
    started_s = time.monotonic()
    named = collections.Counter[tuple[int, str]]()
    while named[3, "second"] < 2 and time.monotonic() - started_s < 60:
        _, found = ask("skew", "--interval", "3", "-o", "json")
        group = found["groups"][0]
        if group["slow"]:
            named[group["slow"]["world_rank"], group["slow"]["layer"]] += 1
    assert named[3, "second"] == 2 == max(named.values()), named
    arrivals = next(op["arrivals_ms"] for op in group["ops"] if op["op"] == "DISPATCH")
    assert arrivals["0"]["3"] > arrivals["0"].get("1", 0.0)


def test_load_says_how_even_experts_are(job: Job, ask: Any, tmp_path: Any) -> None:
    code, found = ask("load", "moe", "-o", "json")
    assert code == 0
    first, second = found["groups"][0]["layers"]
    assert (first["layer"], second["layer"]) == ("first", "second")
    shares = np.array(first["experts"]) / first["rows"]
    # A step may be running while ranks are read.
    wanted = [1 / 8, 1 / 2, 1 / 8, 1 / 8, 0, 0, 0, 1 / 8]
    np.testing.assert_allclose(shares, wanted, atol=0.05)
    assert (first["fullest"], first["unused"]) == (1, 3)
    assert first["max_mean"] == pytest.approx(4.0, rel=0.1)
    assert first["jain"] == pytest.approx(1 / (8 * (1 / 4 + 4 / 64)), rel=0.1)
    assert first["ranks_max_mean"] == pytest.approx(4 * 5 / 8, rel=0.1)
    picture = tmp_path / "load.png"
    code, text = ask("load", "--interval", "1", "--samples", "2", "--png", str(picture))
    assert code == 0
    assert "first   ▄█▄▄   ▄" in text
    assert re.search(r"^moe second  [34]\.\d\d [34]\.\d\d$", text, re.MULTILINE)
    assert picture.read_bytes().startswith(b"\x89PNG")
    code, text = ask("load", "--layer", "third")
    assert code == cli.USAGE
    assert "group moe has called no layer 'third'" in text
    assert ask("load", "--samples", "2")[0] == cli.USAGE


def test_a_group_returns_what_commands_show(job: Job, ask: Any) -> None:
    group = ep.layer("moe/first").group
    seen = [group.skew()]
    assert 0 < seen[0].elapsed_s < 600
    job.sleeps[3, 1] = 0.1

    def named() -> bool:
        seen.append(group.skew())
        told = seen[-1].slow == 3 and "of layer second" in seen[-1].message
        return bool(told and seen[-1].holds_share[3] > 0.3)

    wait_until(named, "rank 3 is slow in the second layer")
    skew, (_, shown) = seen[-1], ask("skew", "--interval", "0.5", "-o", "json")
    assert {*skew.ops} <= {op["op"] for op in shown["groups"][0]["ops"]}
    waits = sum(op.waits for op in skew.ops.values())
    assert waits.shape == (RANKS, RANKS)
    assert waits[:, 3].max() > 0  # others wait for ranks that wait for it
    assert skew.holds_share.argmax() == 3
    load, (_, shown) = group.load(), ask("load", "moe", "-o", "json")
    assert load.missing == ()
    for layer in shown["groups"][0]["layers"]:
        found = load.layers[layer["layer"]]
        np.testing.assert_allclose(found.experts, layer["experts"], rtol=0.2, atol=30)
        assert found.experts.sum() == found.ranks.sum() == found.rows
        assert (found.fullest, found.dropped) == (layer["fullest"], 0)
        assert found.max_mean == pytest.approx(layer["max_mean"], rel=0.1)


def test_what_was_is_remembered(job: Job, ask: Any, module_address: str) -> None:
    """The daemon takes the first copy of the board within 10 s."""
    with source.open_source(module_address, timeout_s=WAIT_S) as daemon:

        def steps_since() -> float:
            copied = daemon.tallies("moe", age_s=3600.0)
            rows = daemon.tallies("moe")[0]["rows"] - copied[0]["rows"] if copied else 0
            return rows / (2 * 5 / 8 * RANKS * TOKENS * 2)  # rows of rank 0, in two layers

        wait_until(lambda: steps_since() > 30, "a copy of the board, and steps since then")
    code, found = ask("load", "--since", "1h", "-o", "json")
    assert code == 0
    (group,) = found["groups"]
    assert 0 < group["elapsed_s"] == pytest.approx(found["interval_s"])
    (before,), (after,) = (
        [layer["rows"] for layer in layers if layer["layer"] == "first"]
        for layers in (group["layers"], ask("load", "-o", "json")[1]["groups"][0]["layers"])
    )
    assert 0 < before < after
    assert found["groups"][0]["layers"][0]["max_mean"] == pytest.approx(4.0, rel=0.2)
    code, text = ask("load", "moe", "--since", "1h", "--samples", "2")
    assert code == 0
    assert re.search(r"rows in the last \d+\.\ds$|rows in the last \d+m\d+s$", text, re.MULTILINE)
    assert "JAIN by interval" in text
    code, found = ask("top", "--since", "90s", "-o", "json")
    assert code == 0
    assert found["groups"][0]["ranks"][0]["tokens_s"] > 0
    assert ask("load", "--since", "10m", "--interval", "1")[0] == cli.USAGE


def test_an_unknown_group_is_an_error(job: Job, ask: Any) -> None:
    for name in ("top", "load", "skew"):
        code, text = ask(name, "mow")
        assert code == cli.USAGE
        assert "did you mean 'moe'?" in text


class Terminal:
    """A terminal of 100 x 24 that runs a program."""

    def __init__(self, *words: str) -> None:
        environment = {**os.environ, "COLUMNS": "100", "LINES": "24", "TERM": "xterm"}
        self.fd, theirs = pty.openpty()
        self.popen = subprocess.Popen(
            command(*words),
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=environment,
            start_new_session=True,
        )
        os.close(theirs)
        self.said = ""

    def until(self, text: str) -> None:
        """Reads until the terminal has shown that text since the last read."""
        deadline_s = time.monotonic() + WAIT_S
        while text not in self.said:
            left_s = deadline_s - time.monotonic()
            assert left_s > 0, f"no {text!r} in {self.said!r}"
            if select.select([self.fd], [], [], left_s)[0]:
                self.said += os.read(self.fd, 65536).decode(errors="replace")
        self.said = self.said.split(text)[-1]

    def type(self, keys: str) -> None:
        os.write(self.fd, keys.encode())


@pytest.mark.parametrize("name", ["top", "load", "skew"])
def test_watch_takes_samples_until_interrupted(job: Job, module_address: str, name: str) -> None:
    words = [name, "--watch", "0.1", "-o", "json", "--address", module_address]
    process = subprocess.Popen(command(*words), stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout:
        found = [json.loads(process.stdout.readline()) for _ in range(3)]
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT_S) == 0
    assert [(each["kind"], each["interval_s"]) for each in found] == [(name, 0.1)] * 3


def test_keys_sort_open_a_layer_and_end(job: Job, module_address: str) -> None:
    terminal = Terminal("top", "--interval", "0.3", "--address", module_address)
    try:
        terminal.until("group moe of job tests, user ")
        terminal.type("s")
        terminal.until("by MARK")
        terminal.type("l")
        terminal.until("by LAYER")
        terminal.type("\x1b[B\r")
        terminal.until("layer second")
        terminal.type("\x1b")
        terminal.until("MAX/MEAN")
        terminal.type("q")
        assert terminal.popen.wait(WAIT_S) == 0
    finally:
        terminal.popen.kill()
        terminal.popen.wait(WAIT_S)
        os.close(terminal.fd)
