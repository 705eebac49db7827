"""Runs Python programs in separate processes: some run to their end, others exchange lines."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import guardian
import pytest

TALK_S = 120.0  # for processes, several of which may start JAX at once
# conftest.py hides a compilation cache from other processes, which may be killed as they write.
CACHE = {name: value for name, value in os.environ.items() if re.match("JAX_.*CACHE", name)}


def command(*words: object) -> list[str]:
    """`ep-runtime WORDS`, for subprocess."""
    return [sys.executable, "-P", "-m", "ep_runtime_client.cli", *map(str, words)]


def run_to_end(
    *words: object,
    code: int | None = 0,
    limit_s: float = 240.0,
    given: str | None = None,
    cwd: Path | None = None,
    env: dict[str, str] | None = None,
    **variables: str,
) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end.

    Args:
        code: the exit code that it must have; None for any.
        given: its standard input; ours without.
        env: all its variables but `CACHE`, in the place of ours.
        variables: more of them.
    """
    done = subprocess.run(
        [*map(str, words)],
        env={**(os.environ if env is None else env), **CACHE, **variables},
        cwd=cwd,
        input=given,
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
    )
    assert code in (None, done.returncode), done.stdout[-4000:] + done.stderr[-4000:]
    return done


def run_python(*words: object, **how: Any) -> subprocess.CompletedProcess[str]:
    """`run_to_end` of `python WORDS`."""
    return run_to_end(sys.executable, "-P", *words, **how)


# JAX takes seconds of processor time to import.
WITHOUT_JAX = """
import json, os, signal, sys
import ep_runtime as ep

def say(**values):
    print(json.dumps(values), flush=True)

def hear():
    return json.loads(sys.stdin.readline())
"""
PROLOGUE = (
    WITHOUT_JAX
    + """
import jax
jax.config.update("jax_num_cpu_devices", 4)

def mesh_of(size=4):
    import numpy as np
    return jax.sharding.Mesh(np.array(jax.devices("cpu")[:size]), ("ep",))

ARGUMENTS = dict(ep_axis="ep", num_experts=8, hidden_size=16, max_tokens_per_rank=8,
                 max_top_k=2, alignment=8, max_token_dtype="float32")
"""
)


class Talker:
    """A process that sends JSON lines to a test and reads lines from it.

    Args:
        name: the process in messages.
        process: a Popen, or the like; its standard input hears.
        said: descriptor of what it says, closed with this.
    """

    def __init__(self, name: str, process: Any, said: int) -> None:
        self._name, self._process, self._heard = name, process, b""
        self._said = open(said, "rb", buffering=0)  # noqa: SIM115 - `close` closes it
        self.pid = process.pid
        guardian.protect(self.pid)

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def heard(self, within_s: float = TALK_S) -> Any:
        """Returns the next line that the process sends."""
        # Read from the descriptor, because poll() does not see lines in a reader's buffer.
        poll = select.poll()
        poll.register(self._said, select.POLLIN)
        deadline = time.monotonic() + within_s
        while b"\n" not in self._heard:
            left_s = max(deadline - time.monotonic(), 0.0)
            assert poll.poll(left_s * 1000), f"{self._name} said nothing within {within_s:g} s"
            part = self._said.read(1 << 16)
            assert part, f"{self._name} ended with {self._process.wait(TALK_S)}"
            self._heard += part
        line, _, self._heard = self._heard.partition(b"\n")
        return json.loads(line)

    def silent(self) -> bool:
        """Whether the process has sent nothing since the last line."""
        poll = select.poll()
        poll.register(self._said, select.POLLIN)
        return not self._heard and not poll.poll(0)

    def tell(self, value: Any = None) -> None:
        """Sends a line to the process."""
        self._process.stdin.write(json.dumps(value).encode() + b"\n")
        self._process.stdin.flush()

    def kill(self) -> None:
        """Sends SIGKILL, and waits until the process has ended."""
        self._process.kill()
        assert self._process.wait(TALK_S) == -signal.SIGKILL

    def finish(self, within_s: float = TALK_S) -> int:
        """Waits until the process ends; returns its exit code."""
        self._hang_up()
        return self._process.wait(within_s)

    def end(self) -> None:
        """Lets the process continue from where it waits for a line; it must end
        with exit code 0.
        """
        self.tell()
        assert self.finish() == 0

    def close(self) -> None:
        """Ends the process in any state, for teardown."""
        if not self.ended:
            self._process.kill()
            self._process.wait(TALK_S)
        self._hang_up()
        self._said.close()

    def _hang_up(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()


class Program(Talker):
    """A Python program in a separate process."""

    def __init__(self, text: str, *, prologue: str = PROLOGUE, **environment: str) -> None:
        said, theirs = os.pipe()
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", prologue + text],
            stdin=subprocess.PIPE,
            stdout=theirs,
            env={**os.environ, **environment},
        )
        os.close(theirs)
        super().__init__("the program", process, said)

    def ended_within(self, seconds: float) -> bool:
        """Waits at most `seconds` for the program's end."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True


Start = Callable[..., Program]  # the fixture `run_program`


@pytest.fixture
def run_program() -> Iterator[Start]:
    """Starts programs; all of them end with the test."""
    started: list[Program] = []

    def start(text: str, *, prologue: str = PROLOGUE, **environment: str) -> Program:
        started.append(Program(text, prologue=prologue, **environment))
        return started[-1]

    yield start
    for program in started:
        program.close()
