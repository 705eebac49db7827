"""Clients killed anywhere leave nothing at the daemon, and their child processes end."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from child_programs import Start
from daemon_fixtures import wait_gone, wait_until

from ep_runtime import env
from ep_runtime_client.cli.daemon import source
from ep_runtime_client.daemons import runtime

# No JAX: groups are formed like Session.create_group does it, with all ranks in this process.
_PROLOGUE = """
import faulthandler, json, sys
faulthandler.dump_traceback_later(45, exit=True)  # says where it hangs, before we give it up
import ep_runtime as ep
from ep_runtime import layer_specs, specs
from ep_runtime_client.groups import forming, registrations
from ep_runtime_client.sessions import session

def say(step):
    print(json.dumps(step), flush=True)

spec = specs.make_group_spec(
    name="g", mesh_axes=(("ep", 4),), ep_axis="ep", num_experts=8, hidden_size=64,
    max_tokens_per_rank=64, max_top_k=2, retain_s=float(sys.stdin.readline()))
"""
_PROGRAM = """
say("imported")
with ep.connect(job="kills") as s:
    say("connected")
    formed = forming.form(s._client, spec, forming.Claim((0, 1, 2, 3)), replace=False)
    say("formed")
    named = [layer_specs.LayerSpec(f"l{i}", top_k=2) for i in range(50)]
    layers = [layer_specs.check_layer(spec, layer) for layer in named]
    registrations.register(s._client, spec, formed.generation, layers, [])
    say("registered")
    forming.leave(s._client, "g", formed.generation, formed.native_group)
    say("left")
say("closed")
sys.stdin.readline()
"""
_STEPS = ("imported", "connected", "formed", "registered", "left", "closed")


def _state(admin: source.Source) -> list[Any]:
    live = [row for row in admin.sessions() if row["state"] not in ("DEAD", "CLOSED")]
    return [*live, *admin.buffers(), *admin.groups()]


@pytest.mark.slow
@pytest.mark.doses(ci=0, full=200)
def test_kills_of_the_client_library_leak_nothing(
    run_program: Start,
    address: str,
    admin: source.Source,
    daemon: runtime.Child,
    dose: int,
    record_property: Callable[[str, object], None],
) -> None:
    chance = random.Random(7)
    baseline: int | None = None
    slowest_s = 0.0
    for index in range(dose):
        program = run_program(_PROGRAM, prologue=_PROLOGUE, EP_RUNTIME_ADDRESS=address)
        program.tell(0)
        for step in _STEPS[: 1 + index % len(_STEPS)]:
            assert program.heard() == step
        assert not program.ended_within(chance.uniform(0, 0.02))  # and partly into the next step
        program.kill()
        program.close()
        killed = time.monotonic()
        wait_until(lambda: not _state(admin), "sessions, groups and memory are gone")
        slowest_s = max(slowest_s, time.monotonic() - killed)
        if index == min(2 * len(_STEPS), dose - 1):
            baseline = len(os.listdir(f"/proc/{daemon.pid}/fd"))
    assert baseline is not None
    wait_until(
        lambda: len(os.listdir(f"/proc/{daemon.pid}/fd")) <= baseline, "descriptors are closed"
    )
    record_property("everything free after, at worst", f"{slowest_s:.2f} s")


_tick = threading.Event()  # never set: waits for a moment of a daemon's start


_STARTS = """
import json, signal, sys
import ep_runtime as ep
from ep_runtime_client.daemons import runtime

def wait_ready(self, timeout_s):
    print(json.dumps([self.pid, str(self.directory)]), flush=True)
    signal.pause()

runtime.Child.wait_ready = wait_ready
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
