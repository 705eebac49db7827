"""Kills processes anywhere in a training step: the others notice, end, and save no NaN.

The job that starts then is the next one's victim, and finds the memory of the one before.
SIGTERM of a scheduler stops all at one step.
"""

from __future__ import annotations

import functools
import os
import random
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from daemon_fixtures import wait_until
from faults import step_kills
from harness import DaemonProcess, memfds_of
from multiprocess.launch import Job

from ep_runtime_client.cli.daemon import source
from ep_runtime_client.daemons import runtime


@pytest.mark.parametrize(
    ("processes", "devices"),
    [(2, 4), pytest.param(4, 1, marks=pytest.mark.slow)],
    ids=["2x4", "4x1"],
)
@pytest.mark.doses(ci=2, full=200)
def test_a_kill_in_a_step_ends_the_others_with_its_name_and_saves_no_nan(
    address: str,
    admin: source.Source,
    daemon: runtime.Child,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
    dose: int,
    processes: int,
    devices: int,
) -> None:
    name = f"{processes} x {devices}"
    more = {"EP_RUNTIME_ADDRESS": address, "EP_RUNTIME_JOB": "training"}
    place = step_kills.Place(
        job=functools.partial(Job, processes=processes, devices=devices, **more),
        memory=lambda: memfds_of(daemon.pid),
        states=lambda: [row["state"] for row in admin.groups()],
        folder=tmp_path,
        name=name,
    )
    took = step_kills.strike_in_steps(place, dose, random.Random(dose))
    step_kills.check(took, name, record_property)


@pytest.mark.doses(ci=2, full=40)
def test_an_order_in_a_step_ends_all_with_who_gave_it(
    daemon_process: Callable[..., DaemonProcess],
    tmp_path: Path,
    record_property: Callable[[str, object], None],
    dose: int,
) -> None:
    chance, took = random.Random(dose), dict[str, list[float]]()
    for number in range(dose):
        daemon = daemon_process()  # a drained daemon admits no further job
        address = f"unix://{daemon.directory}"
        with source.open_source(address, timeout_s=60) as admin:
            place = step_kills.Place(
                job=functools.partial(
                    Job,
                    processes=2,
                    devices=2,
                    EP_RUNTIME_ADDRESS=address,
                    EP_RUNTIME_JOB="training",
                    TEST_SETTINGS='{"op_timeout_s": 60}',
                ),
                memory=lambda daemon=daemon: memfds_of(daemon.pid),
                states=lambda admin=admin: [row["state"] for row in admin.groups()],
                folder=tmp_path,
                name="reclaim",
            )
            fault = step_kills.order("reclaim", admin)
            found = step_kills.strike_in_steps(place, 1, chance, fault, since=number)
        daemon.close()
        for what, seconds in found.items():
            took.setdefault(what, []).extend(seconds)
    step_kills.check(took, "reclaim", record_property)


# Device 0 of process 0 skips its call, which the other ranks never join, for a sum over all.
_HELD = """
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
session = ep.connect(timeout_s=20)
settings = dict(
    ep_axis="ep", num_experts=4, hidden_size=16, max_tokens_per_rank=8, max_top_k=1,
    alignment=8, max_token_dtype="float32", op_timeout_s=float(os.environ["TEST_TIMEOUT_S"]))
group = session.create_group("training", mesh_of(), **settings)
layer = group.register_layer("moe/0", top_k=1)

def part(tokens, idx):
    def call():
        sent = ep.dispatch(layer, tokens, idx)
        return ep.combine(layer, sent, sent.tokens)
    here = jax.lax.axis_index("ep") != hidden
    return jax.lax.psum(jax.lax.cond(here, call, lambda: tokens), "ep")

def run():
    specs = dict(in_specs=P("ep"), out_specs=P(), check_vma=False)
    step = jax.jit(jax.shard_map(part, mesh=group.mesh, **specs))
    put = lambda x: jax.make_array_from_callback(
        x.shape, NamedSharding(group.mesh, P("ep")), lambda i: x[i])
    with ep.translate_errors():
        return np.asarray(step(put(np.ones((32, 16), "float32")), put(np.zeros((32, 1), "int32"))))

hidden = -1
run()
say(ready=True)
hidden, order = 0, hear()
if order == "replace":
    try:
        session.create_group("training", mesh_of(), replace=True, **(settings | {"lanes": 3}))
    finally:
        os._exit(1)
say(launches=True)
try:
    run()
except ep.EpRuntimeError as error:
    say(text=f"{type(error).__name__}: {error}")
hear()
os._exit(0)
"""


@pytest.mark.parametrize("name", ["fence", "replace"])
def test_a_process_left_in_a_collective_is_ended_by_name(
    address: str, admin: source.Source, name: str
) -> None:
    # If the group is replaced, calls of living processes must arrive within this time.
    more = {"TEST_TIMEOUT_S": "10" if name == "replace" else "60"}
    more |= {"EP_RUNTIME_ADDRESS": address, "EP_RUNTIME_JOB": "training"}
    with Job(_HELD, processes=2, devices=2, **more) as job:
        assert job.heard() == [{"ready": True}] * 2
        first, second = job.workers
        first.tell("launch")
        assert first.heard() == {"launches": True}
        waits = lambda: any(row["waiting_for"] >= 0 for row in admin.ranks())  # noqa: E731
        wait_until(waits, "device 1 waits in its call")
        if name == "replace":
            second.tell("replace")
            ordered = f"uid {os.getuid()} (pid {second.pid}) with create_group(replace=True)"
        else:
            struck = step_kills.order(name, admin)(job, 0, random.Random(1))
            second.tell("launch")
            assert second.heard() == {"launches": True}
            assert re.search(struck.wanted[1], second.heard()["text"])
            ordered = f"by uid {os.getuid()} (pid {os.getpid()}) with ep-runtime {name}"
        assert first.finish(within_s=30) == 1
        told = first.tail()
        assert ordered in told, told
        kind = "SessionFencedError" if name == "fence" else "StaleHandleError"
        assert re.match(f"ep-runtime: {kind}: .* still runs", told.splitlines()[-1]), told


_JOB = """
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

mesh = mesh_of()
rows = np.arange(8 * mesh.size * 16, dtype=np.float32).reshape(-1, 16)
x = jax.make_array_from_callback(
    rows.shape, NamedSharding(mesh, PartitionSpec("ep")), lambda part: rows[part]
)
with ep.connect(job="preempted", timeout_s=60) as session:
    group = session.create_group(
        "g", mesh, ep_axis="ep", num_experts=8, hidden_size=16, max_tokens_per_rank=8,
        max_top_k=2, max_token_dtype="float32", retain_s=60,
    )
    layer = group.register_layer("l", top_k=2)

    @jax.jit
    def step(x):
        sent = ep.dispatch(layer, x, ep.route(x[:, :8], 2).topk_idx)
        return ep.combine(layer, sent, sent.tokens)

    number = 0
    while not multihost_utils.reached_preemption_sync_point(number):
        group.check(step(x))
        if number == 3:
            say(ready=True)
        number += 1
say(last=number)
"""


def test_sigterm_to_one_process_ends_all_after_the_same_step(
    daemon: runtime.Child, address: str
) -> None:
    with Job(_JOB, processes=2, devices=2, EP_RUNTIME_ADDRESS=address) as job:
        assert job.heard() == [{"ready": True}] * 2
        assert memfds_of(daemon.pid)
        job.workers[1].send(signal.SIGTERM)
        first, second = job.heard()
        assert first == second
        assert [worker.finish() for worker in job.workers] == [0, 0]
    wait_until(lambda: not memfds_of(daemon.pid), "its memory is free")
