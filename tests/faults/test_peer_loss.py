"""A process of a job dies or leaves: waits end, and its successor finds its windows."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import doc_pages
import pytest
from child_programs import Program, Start
from daemon_fixtures import wait_until
from faults import members
from harness import memfds_of
from multiprocess.launch import Job

from ep_runtime_client.cli.daemon import source
from ep_runtime_client.daemons import runtime

NOTIFY_S = 2.0
_JOB = """
import contextlib
import jax.numpy as jnp
session = ep.connect(on_loss="continue")
group = session.create_group(
    "g", mesh_of(), ep_axis="ep", num_experts=12, hidden_size=16, max_tokens_per_rank=8,
    max_top_k=2, alignment=8, max_token_dtype="float32", op_timeout_s=600, retain_s=60)
layer = group.register_layer("moe/0", top_k=1)
"""
_JOB += members.STEP
_JOB += """
run()
say(generation=group.generation, reattached=group.reattached, id=layer.id)
order = hear()
if order == "wait":
    try:
        with ep.translate_errors():
            say(waits=True)
            run()
    except ep.PeerLostError as error:
        ended, gone = time.monotonic(), group._held.is_gone
        try:
            group.check()  # tells it too, though the group is gone
        except ep.PeerLostError as told:
            assert str(told) == str(error)
        traced = {}
        try:
            jax.eval_shape(lambda: ep.dispatch(layer, tokens, idx))
        except ep.PeerLostError as told:
            traced = told.fields
        say(ended=ended, text=str(error), gone=gone, traced=traced,
            **{k: error.fields.get(k) for k in ("rank", "layer", "op", "process")})
    hear()
    with contextlib.suppress(ep.PeerLostError), session:  # as where the error ends the job
        raise ep.PeerLostError("of the step")
    say(left=True)
    hear()
    os._exit(0)  # jax.distributed has no way on without the dead process
hear()
session.close()
"""


def _lose(job: Job, devices: int, admin: source.Source) -> tuple[float, list[Any]]:
    """Kills the last process while all others wait for it; returns seconds until all know."""
    *others, victim = job.workers
    for worker in others:
        worker.tell("wait")
        assert worker.heard() == {"waits": True}
    waiting = (job.processes - 1) * devices
    wait_until(
        lambda: sum(row["waiting_for"] >= 0 for row in admin.ranks()) == waiting, "all others wait"
    )
    killed = time.monotonic()
    victim.kill()
    said = [worker.heard(30) for worker in others]
    first = (job.processes - 1) * devices
    for row in said:
        assert row["rank"] in range(first, first + devices), row
        assert (row["layer"], row["op"]) == ("moe/0", "prepare")
        assert row["process"] == victim.pid
        assert str(victim.pid) in row["text"]
        doc_pages.check_said("peer lost", row["text"])
        assert row["gone"]
        traced = row["traced"]  # errors of calls that are traced or made only now
        assert (traced["rank"], traced["process"]) == (row["rank"], victim.pid)
        assert traced["layer"] == "moe/0"
    for worker in others:
        worker.tell()
        assert worker.heard() == {"left": True}
    for worker in reversed(others):  # process 0 has JAX's coordinator
        worker.end()
    return max(row["ended"] for row in said) - killed, said


def test_a_dead_process_ends_the_waits_and_the_restarted_job_reattaches(
    address: str, admin: source.Source, daemon: runtime.Child
) -> None:
    environment = {"EP_RUNTIME_ADDRESS": address, "EP_RUNTIME_JOB": "training"}
    with Job(_JOB, processes=2, devices=2, **environment) as job:
        before = job.heard()[0]
        assert not before["reattached"]
        memory = memfds_of(daemon.pid)
        assert len(memory) == 5
        took_s, _ = _lose(job, 2, admin)
        assert took_s < NOTIFY_S
    wait_until(lambda: admin.groups()[0]["state"] == "RETAINED", "the group is retained")
    with Job(_JOB, processes=2, devices=2, **environment) as job:
        for after in job.heard():
            assert after["reattached"]
            assert after["generation"] > before["generation"]
            assert after["id"] == before["id"]
        assert memfds_of(daemon.pid) == memory
        job.tell("go on")
        job.end()
    wait_until(lambda: not admin.groups() and not admin.buffers(), "everything is freed")


@pytest.mark.slow
@pytest.mark.doses(ci=0, full=50)
def test_many_lost_processes_leak_nothing(
    address: str,
    admin: source.Source,
    daemon: runtime.Child,
    dose: int,
    record_property: Callable[[str, object], None],
) -> None:
    environment = {"EP_RUNTIME_ADDRESS": address, "EP_RUNTIME_JOB": "training"}
    slowest_s, memory, files = 0.0, set[int](), 0
    for turn in range(dose):
        with Job(_JOB, processes=2, devices=1, **environment) as job:
            assert {row["reattached"] for row in job.heard()} == {turn > 0}
            memory = memory or memfds_of(daemon.pid)
            assert memfds_of(daemon.pid) == memory
            slowest_s = max(slowest_s, _lose(job, 1, admin)[0])
        wait_until(lambda: admin.groups()[0]["state"] == "RETAINED", "the group is retained")
        open_files = len(os.listdir(f"/proc/{daemon.pid}/fd"))
        files = files or open_files
        assert open_files <= files
    assert slowest_s < NOTIFY_S
    record_property("the others knew after, at worst", f"{slowest_s:.2f} s")


FORMED_S = 2.0
# Ranks that leave in each turn, repeatedly.
PLANS: dict[str, list[list[int]]] = {
    "one after the other": [[0], [1], [2], [3]],
    "one again and again": [[2]],
    "two at once": [[0, 1], [2, 3], [1, 3]],
    "all but one": [[0, 1, 2], [1, 2, 3]],
    "all": [[0, 1, 2, 3]],
}
# CI runs one plan of each kind, because every turn starts processes.
_IN_CI = [("two at once", "killed"), ("one again and again", "leaves")]
_ALL = [(plan, how) for plan in PLANS for how in ("killed", "leaves")]


@pytest.mark.parametrize(
    ("plan", "how"),
    [pytest.param(*case, marks=[] if case in _IN_CI else [pytest.mark.slow]) for case in _ALL],
)
@pytest.mark.doses(ci=1, full=40)
def test_ranks_come_back_in_place(
    run_program: Start,
    address: str,
    admin: source.Source,
    daemon: runtime.Child,
    record_property: Callable[[str, object], None],
    plan: str,
    how: str,
    dose: int,
) -> None:
    def start(rank: int) -> Program:
        return members.start(run_program, address, [rank])

    present = {rank: start(rank) for rank in range(members.RANKS)}
    group = members.met([*present.values()])
    memory, slowest_s = memfds_of(daemon.pid), 0.0
    for turn in range(dose):
        gone = PLANS[plan][turn % len(PLANS[plan])]
        for rank in gone:
            _end(present.pop(rank), how)
        if how == "killed":
            wanted = "BROKEN" if present else "RETAINED"
            wait_until(lambda wanted=wanted: _states(admin) == [wanted], f"the group is {wanted}")
        back = {rank: start(rank) for rank in gone}
        if present and how == "leaves":  # until somebody claims again, the group continues
            wait_until(lambda: _states(admin) == ["FORMING"], "a rank is claimed anew")
        for member in present.values():
            member.tell("again")
        present |= back
        again = members.met([*present.values()])
        assert again["generation"] > group["generation"]
        group, slowest_s = again, max(slowest_s, again["took_s"])
        if how == "killed" or len(gone) < members.RANKS:  # the last process to leave frees it
            assert group["reattached"]
            assert memfds_of(daemon.pid) == memory  # no byte is newly allocated
        memory = memfds_of(daemon.pid)
        assert len(memory) == members.RANKS + 1
    record_property("formed again after, at worst", f"{slowest_s:.2f} s")
    assert slowest_s < FORMED_S
    for member in present.values():
        member.tell("end")
    assert [member.finish() for member in present.values()] == [0] * members.RANKS
    wait_until(lambda: not admin.groups() and not admin.buffers(), "everything is freed")


def _end(member: Program, how: str) -> None:
    if how == "killed":
        member.kill()
    else:
        member.tell("end")
        assert member.finish() == 0
    member.close()


def _states(admin: source.Source) -> list[Any]:
    return [group["state"] for group in admin.groups()]
