"""Compiled programs across lives of their group: attach by name, reclaim, close."""

from __future__ import annotations

import os

import numpy as np
import pytest
from child_programs import Start
from daemon_fixtures import wait_until
from harness import memfds_of

from ep_runtime.v1 import admin_service_pb2 as messages
from ep_runtime_client.cli.daemon import source
from ep_runtime_client.daemons import runtime

_PROGRAM = """
import jax.numpy as jnp, numpy as np
tokens = jnp.arange(32 * 16, dtype=jnp.float32).reshape(32, 16)
topk_idx = jnp.tile(jnp.array([[0, 5], [3, 2]], jnp.int32), (16, 1))

def make_step(layer):
    def step(tokens):
        dispatched = ep.dispatch(layer, tokens, topk_idx)
        return ep.combine(layer, dispatched, dispatched.tokens * 2)
    return jax.jit(step)

def run(step):
    np.testing.assert_array_equal(step(tokens), tokens * 4)

session = ep.connect(job="training")
"""

_CREATE = (
    _PROGRAM
    + """
group = session.create_group("g", mesh_of(), **ARGUMENTS, retain_s=60)
layer = group.register_layer("moe/0", top_k=2)
step = make_step(layer)
run(step)
say(generation=group.generation)
hear()
"""
)


@pytest.mark.parametrize(
    ("ending", "words"), [("group.close()", "is closed"), ("hear()", "was reclaimed")]
)
def test_a_compiled_step_of_a_gone_group_is_stale_and_the_process_goes_on(
    run_program: Start, address: str, admin: source.Source, ending: str, words: str
) -> None:
    program = run_program(
        _CREATE + ending + "\n"
        "try:\n"
        "    with ep.translate_errors():\n"
        "        step(tokens).block_until_ready()\n"
        "except ep.StaleHandleError as error:\n"
        "    say(text=str(error), layer=error.fields['layer'])\n"
        "group = session.create_group('g', mesh_of(), **ARGUMENTS, retain_s=60)\n"
        "run(make_step(group.register_layer('moe/0', top_k=2)))\n"
        "run(step)\n"  # the same spec: the compiled program serves the new generation
        "say(generation=group.generation)\n",
        EP_RUNTIME_ADDRESS=address,
    )
    generation = program.heard()["generation"]
    program.tell()
    if ending == "hear()":
        admin.call("Reclaim", messages.ReclaimRequest(name="g"))
        program.tell()
    stale = program.heard()
    assert words in stale["text"]
    assert f"generation {generation}" in stale["text"]
    assert stale["layer"] == "moe/0"
    assert program.heard()["generation"] > generation
    assert program.finish() == 0


_AGAIN = (
    _PROGRAM
    + """
import os

def held():
    maps = sum("memfd:" in line for line in open("/proc/self/maps"))
    return [len(os.listdir("/proc/self/fd")), maps]

def made(**changed):
    group = session.create_group("g", mesh_of(), **{**ARGUMENTS, **changed}, retain_s=60)
    run(make_step(group.register_layer("moe/0", top_k=2)))
    return group

group = made()
say(generation=group.generation, held=held())
while (order := hear()) != "end":
    if order == "replace":
        group = made(replace=True, max_tokens_per_rank=24 - group.spec.max_tokens_per_rank)
    else:
        group = made(max_tokens_per_rank=group.spec.max_tokens_per_rank)
    say(generation=group.generation, held=held())
session.close()
"""
)


@pytest.mark.doses(ci=2, full=50)
def test_groups_replaced_and_reclaimed_again_and_again_leave_nothing(
    run_program: Start, address: str, admin: source.Source, daemon: runtime.Child, dose: int
) -> None:
    program = run_program(_AGAIN, EP_RUNTIME_ADDRESS=address)
    said = program.heard()
    held = []
    for _ in range(dose):
        for order in ("replace", "reclaim", "replace", "reclaim"):
            generation = said["generation"]
            if order == "reclaim":
                admin.call("Reclaim", messages.ReclaimRequest(name="g"))
            program.tell(order)
            said = program.heard()
            assert said["generation"] > generation
        wait_until(lambda: len(admin.buffers()) == 5, "only the group's memory is left")
        wait_until(lambda: len(memfds_of(daemon.pid)) == 5, "the kernel has no more of it")
        held.append([*said["held"], len(os.listdir(f"/proc/{daemon.pid}/fd"))])
    assert [row["state"] for row in admin.groups()] == ["READY"]
    first = min(5, dose - 1)
    assert (np.array(held[first:]) <= np.array(held[first]) + 1).all(), held
    program.tell("end")
    assert program.finish() == 0
    wait_until(lambda: not admin.buffers(), "everything is freed")


def test_closing_lets_a_launched_step_end_on_every_device(run_program: Start, address: str) -> None:
    program = run_program(
        _PROGRAM
        + """
import threading
mesh = mesh_of()
group = session.create_group("g", mesh, **ARGUMENTS)
layer = group.register_layer("moe/0", top_k=2)
spec, last, may_end = jax.P("ep"), group.spec.ep_size - 1, threading.Event()

def hold_back(rank, x):
    assert int(rank) != last or may_end.wait(30), "nobody let the last device go on within 30 s"
    return x

def body(x):
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return jax.pure_callback(hold_back, shape, jax.lax.axis_index("ep"), x)

held = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)

@jax.jit
def step(tokens):
    dispatched = ep.dispatch(layer, held(tokens), topk_idx)
    return ep.combine(layer, dispatched, dispatched.tokens * 2)

out = step(tokens)
closing = threading.Thread(target=group.close)
closing.start()
closing.join(0.3)
say(closed_early=not closing.is_alive())
may_end.set()
closing.join(30)
assert group.closed and not closing.is_alive()
np.testing.assert_array_equal(out, tokens * 4)
""",
        EP_RUNTIME_ADDRESS=address,
    )
    assert not program.heard()["closed_early"]
    assert program.finish() == 0
