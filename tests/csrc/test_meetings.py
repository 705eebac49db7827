"""Lanes go to the calls that wait for one in the order in which they were complete."""

from __future__ import annotations

import random
from pathlib import Path

from child_programs import run_to_end
from host_programs import compiled

from ep_runtime.board_abi import MAX_WORLD_RANKS


def orders_and_lanes(lanes: int, count: int, draw: random.Random) -> tuple[list[str], list[str]]:
    """Orders that fill and drain the queue again and again, and who holds a lane after each."""
    orders: list[str] = []
    wanted: list[str] = []
    held: list[int] = []
    queue: list[int] = []
    filling = True
    for number in range(count):
        filling = not held or (filling and len(queue) < 4)
        if filling and draw.random() < 0.9:
            orders.append(f"join {number}")
            queue.append(number)
        elif queue and draw.random() < 0.3:  # its ranks give up before it has a lane
            orders.append(f"fail {queue.pop(draw.randrange(len(queue)))}")
        elif held:
            orders.append(f"leave {held.pop(draw.randrange(len(held)))}")
        while queue and len(held) < lanes:
            held.append(queue.pop(0))
        if len(wanted) < len(orders):
            wanted.append("".join(f"{call} " for call in sorted(held)))
    return orders, wanted


def test_calls_get_the_lanes_in_turn_however_often_the_queue_runs_dry(tmp_path: Path) -> None:
    program = compiled(tmp_path, "meetings", "core/meeting/meeting.cc", "core/base/status.cc")
    for lanes in (1, 2, 3):
        orders, wanted = orders_and_lanes(lanes, 300, random.Random(lanes))
        assert wanted.count("") > 1  # it ran dry
        run = run_to_end(program, given="\n".join([str(lanes), *orders]))
        assert run.stdout.splitlines() == wanted


def test_thousands_of_ranks_meet(tmp_path: Path) -> None:
    sources = ("core/meeting/meeting.cc", "core/base/status.cc")
    program = compiled(tmp_path, "wide_meetings", *sources)
    for ranks in (1, 63, 64, 65, 1025, MAX_WORLD_RANKS):
        run_to_end(program, str(ranks))


def test_a_device_sees_an_error_after_other_processes_can(tmp_path: Path) -> None:
    sources = ("core/runs/failed_runs.cc", "core/runs/launches.cc", "core/base/status.cc")
    program = compiled(tmp_path, "failed_runs", *sources, flags=("-pthread",))
    run_to_end(program)
