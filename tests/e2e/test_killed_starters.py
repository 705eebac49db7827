"""What was started for a process that is killed ends with it, whenever that happens."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from child_programs import Start
from daemon_fixtures import wait_gone, wait_until

from ep_runtime import env

_tick = threading.Event()  # never set: lets a moment of a daemon's start pass

_PROTECTS = """
import json, subprocess, sys
import guardian

child = subprocess.Popen([sys.executable, "-I", "-S", "-c", "import time; time.sleep(600)"])
guardian.protect(child.pid)
print(json.dumps(child.pid), flush=True)
sys.stdin.readline()
"""


def test_processes_of_a_killed_test_run_end(run_program: Start) -> None:
    program = run_program(_PROTECTS, prologue="")
    child = program.heard()
    os.kill(child, 0)  # is there
    program.kill()
    wait_gone(child)


_STARTS = """
import json, signal, sys
import ep_runtime as ep
from ep_runtime_client.daemons import children

def wait_ready(self, timeout_s):
    print(json.dumps([self.pid, str(self.directory)]), flush=True)
    signal.pause()

children.Child.wait_ready = wait_ready
ep.connect("embedded", job="killed")
"""


@pytest.mark.parametrize("after_s", [0.0, 0.05, 0.2, 0.35, 0.5, 0.7])
def test_a_private_daemon_ends_though_its_client_is_killed_while_it_starts(
    run_program: Start, after_s: float
) -> None:
    program = run_program(_STARTS, prologue="")
    daemon, directory = program.heard()
    assert Path(directory) in env.private_directories()
    _tick.wait(after_s)
    program.kill()
    wait_gone(daemon)
    wait_until(lambda: not Path(directory).exists(), "the daemon has removed its directory")
