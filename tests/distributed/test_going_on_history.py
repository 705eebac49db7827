"""What a job remembers of its generations, and the orders of devices that follow from it."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from ep_runtime_client.daemons.departures import departures
from ep_runtime_client.distributed.fit_mesh import _spread
from ep_runtime_client.distributed.history import History
from ep_runtime_client.distributed.loop import _in_turn
from ep_runtime_client.distributed.peers import Peers

ALL = {0: 10, 1: 11, 2: 12}
TWO = {0: 10, 1: 11}
BACK = {0: 10, 1: 11, 2: 22}  # process 2 was started again


@pytest.mark.parametrize(
    ("past", "members", "turn"),
    [
        ([], ALL, 0),
        ([ALL], TWO, 0),
        ([ALL], ALL, 0),  # a group was fenced: no process has died
        ([ALL, TWO], BACK, 1),
        ([ALL], BACK, 1),  # it came back before the others met without it
        ([ALL, TWO, BACK], BACK, 1),
        ([ALL, TWO, BACK], TWO, 1),
        ([ALL, TWO, BACK, TWO], {**BACK, 2: 32}, 2),
    ],
)
def test_a_turn_is_how_often_the_processes_have_come_together(
    past: list[dict[int, int]], members: dict[int, int], turn: int
) -> None:
    assert History(past).turn(members) == turn


class Device(NamedTuple):
    process_index: int
    id: int


def test_each_turn_has_an_order_of_its_own_until_there_is_none() -> None:
    devices = [Device(process, number) for process in range(3) for number in range(2)]
    orders = [_in_turn(devices, turn) for turn in range(6)]
    assert orders[0] == devices
    # Of as many devices as a mesh may take, one of each process first.
    for taken in range(2, 7):
        meshes = {tuple(_spread(order, taken)[0]) for order in orders}
        assert len(meshes) == 6, taken
    with pytest.raises(NotImplementedError, match="come together 6 times before, and 3 have no"):
        _in_turn(devices, 6)
    assert _in_turn(devices[:2], 7) == devices[:2]


class Waiting:
    """An RPC in which the daemon waits for all processes of a group."""

    cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


def test_a_death_ends_groups_that_form_unless_the_others_have_met_without_it() -> None:
    followed, before, after = Peers(), Waiting(), Waiting()
    departures.keep(ALL)
    with departures.ending(before):
        followed._end_waits(2)
    assert before.cancelled
    followed.passed({2})
    departures.keep(TWO)
    with departures.ending(after):
        followed._end_waits(2)  # told late
    assert not after.cancelled
