"""Ranks that leave, die and come back in their places, by plan: the group is the same memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from child_programs import Program, Start
from daemon_fixtures import wait_until
from faults import members
from harness import memfds_of

from ep_runtime_client.cli.daemon import source
from ep_runtime_client.daemons import children

FORMED_S = 2.0

# Ranks that go in each turn, over and over.
PLANS: dict[str, list[list[int]]] = {
    "one after the other": [[0], [1], [2], [3]],
    "one again and again": [[2]],
    "two at once": [[0, 1], [2, 3], [1, 3]],
    "all but one": [[0, 1, 2], [1, 2, 3]],
    "all": [[0, 1, 2, 3]],
}


# In CI a plan each way: every turn starts processes.
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
    daemon: children.Child,
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
        if present and how == "leaves":  # until somebody claims anew, the group goes on without
            wait_until(lambda: _states(admin) == ["FORMING"], "a rank is claimed anew")
        for member in present.values():
            member.tell("again")
        present |= back
        again = members.met([*present.values()])
        assert again["generation"] > group["generation"]
        group, slowest_s = again, max(slowest_s, again["took_s"])
        if how == "killed" or len(gone) < members.RANKS:  # who is last to leave frees it
            assert group["reattached"]
            assert memfds_of(daemon.pid) == memory  # not a byte is allocated anew
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
