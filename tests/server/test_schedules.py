"""Daemons of one or several nodes under random schedules (`schedules`) keep their promises.

python -m pytest -n 4 --dose 20000 tests/server/test_schedules.py

A schedule with a fault is printed as small as it gets; `schedule.run` of that one shows it again.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from raw_client import make_spec
from schedules.cluster import TOLD_S, SimulatedCluster, simulated
from schedules.daemons import Life
from schedules.links import Links
from schedules.processes import Process
from schedules.schedule import Schedule, Slot, first_fault, make_lives, make_schedule, run

from ep_runtime.errors import GroupBusyError
from ep_runtime.v1 import node_service_pb2
from ep_runtime_server.base.clock import Changes
from ep_runtime_server.callers.sessions import Sessions
from ep_runtime_server.cluster import spanning
from ep_runtime_server.cluster.ends import Ends
from ep_runtime_server.cluster.views import Assembly
from ep_runtime_server.memory.windows import WindowSet

# This many schedules also find rare faults.
SEEDS = 200
PARTS = 4  # on as many cores


@pytest.fixture(autouse=True)
def _quick_collections() -> Iterator[None]:
    """Each run ends with a garbage collection, which need only look at the run's own objects."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.doses(ci=60, full=100_000)
@pytest.mark.parametrize("make", [make_lives, make_schedule])
@pytest.mark.parametrize("part", range(PARTS))
def test_any_schedule_keeps_what_is_promised(make, part, dose, record_property):
    calls, fault = first_fault(map(make, range(part, dose, PARTS)))
    if fault:
        pytest.fail(fault, pytrace=False)
    record_property("calls between daemons", f"{calls:,}")


def form(spec: int, wait_s: float, replace: bool = False) -> tuple[object, ...]:
    return "form", spec, wait_s, replace


def sleep(seconds: float) -> tuple[object, ...]:
    return "sleep", seconds


AB, ABC = ("a", "b"), ("a", "b", "c")
CLAIMS_IN_VAIN = (
    Slot("a", (0,), ()),
    Slot("b", (1,), (form(1, 12.0), form(0, 5.0), form(1, 12.0))),
    Slot("a", (2,), (form(0, 6.0), form(0, 12.0))),
    Slot("a", (3,), ()),
)
# Each of these schedules once had a fault; its name states the right behaviour.
MENDED = {
    # Another process of the job waits on that node; its group ends with it both times.
    "who comes with another spec again is told again": Schedule(
        *(550, ABC, 4, "memfd", 4.0),
        (
            Slot("c", (0,), ()),
            Slot("c", (1,), (form(0, 12.0),)),
            Slot("b", (2,), (form(0, 12.0), form(0, 12.0))),
            Slot("b", (3,), (sleep(0.0), form(1, 0.5), form(0, 6.0), form(1, 12.0))),
        ),
        (),
    ),
    # The claims replaced each other at once, for as long as they were listed.
    "processes of a node that come with several specs again let time pass": Schedule(
        *(818, AB, 3, "xla", 4.0),
        (
            Slot("a", (0,), (form(1, 12.0), form(1, 6.0))),
            Slot("a", (1, 2), (form(0, 12.0), form(0, 12.0))),
            Slot("a", (0,), ()),
        ),
        (),
    ),
    # An earlier claim of its node was still listed at the coordinator.
    "who comes with another spec after a claim in vain is told of elsewhere": Schedule(
        4804, AB, 4, "xla", 0.0, CLAIMS_IN_VAIN, ()
    ),
    "and so is its successor": Schedule(
        4804, AB, 4, "xla", 0.0, CLAIMS_IN_VAIN, ((2.7536, "die", 1),)
    ),
    "a claim on its way is told of another spec beside those that came again": Schedule(
        *(10963, ABC, 3, "xla", 0.0),
        (
            Slot("a", (0,), (form(0, 0.5), sleep(0.475), form(1, 12.0))),
            Slot("c", (1,), (sleep(0.9062), form(0, 6.0))),
            Slot("b", (2,), (sleep(4.7988), form(0, 12.0), form(0, 12.0))),
        ),
        ((0.1377, "die", 2),),
    ),
    # The group that waits there ends with the claim that came later.
    "a spec that a node refused before the coordinator had it is told elsewhere": Schedule(
        *(96375, ABC, 4, "xla", 4.0),
        (
            Slot("c", (0,), (form(1, 12.0),)),
            Slot("a", (1,), (form(0, 5.0),)),
            Slot("c", (2,), ()),
            Slot("c", (3,), (sleep(0.1093), form(0, 5.0))),
        ),
        (),
    ),
    # Another process of the node claims an unclaimed rank.
    "a spec is told elsewhere though somebody has a rank of those who come with it": Schedule(
        *(7238, ABC, 4, "xla", 0.0),
        (
            Slot("a", (0,), ()),
            Slot("b", (1,), ()),
            Slot("c", (2,), (form(1, 12.0),)),
            Slot("b", (3,), (form(0, 12.0),)),
            Slot("b", (2,), (form(0, 12.0),)),
        ),
        (),
    ),
    # The claim of the process before, of whose end the coordinator had not learned.
    "a spec is told elsewhere though its rank was claimed a moment ago": Schedule(
        *(121954, ABC, 3, "xla", 0.0),
        (
            Slot("c", (0,), (form(0, 12.0), ("goodbye",), ("moves", "a"), form(1, 12.0))),
            Slot("c", (1,), ()),
            Slot("b", (2,), (sleep(5.3184), form(0, 12.0))),
        ),
        (),
    ),
    # Only its node was known to have learned of it, and to retry.
    "a process is told of another spec that its node heard of before it came": Schedule(
        *(72009, AB, 3, "memfd", 0.0),
        (
            Slot(
                *("b", (0, 1)),
                (form(0, 5.0), ("work", 0.3), form(0, 5.0), ("goodbye",), form(0, 6.0)),
            ),
            Slot("a", (2,), (form(0, 12.0), ("work", 0.3), form(1, 5.0))),
            Slot("b", (2,), ()),
        ),
        (),
    ),
    "an end in a view before is told after a restart amid a second forming": Schedule(
        *(33211, ABC, 3, "xla", 4.0),
        (
            Slot("a", (0,), (form(0, 12.0), form(0, 12.0))),
            Slot("a", (1,), (sleep(0.4637), form(0, 6.0), form(0, 12.0))),
            Slot("b", (2,), (form(1, 0.5), form(0, 5.0))),
        ),
        ((5.0199, "kill", "a", 0.5), (8.4183, "die", 0)),
    ),
    "a rank of a process elsewhere is not free while a coordinator starts again": Schedule(
        *(83397, ABC, 2, "xla", 4.0),
        (
            Slot("c", (0,), (form(1, 12.0), form(0, 12.0))),
            Slot("c", (1,), (sleep(4.6117), form(0, 6.0), form(0, 12.0))),
            Slot("b", (1,), (form(0, 12.0), sleep(0.001), form(0, 12.0))),
        ),
        ((0.17, "replace", "a", 2.0),),
    ),
    # Until the daemon has its groups back, and as long again for the others.
    "a wait that a daemon's restart falls into is no longer than asked for": Schedule(
        *(18861, AB, 2, "memfd", 4.0),
        (
            Slot("a", (0,), (sleep(5.4224), form(1, 5.0), form(0, 5.0), form(0, 6.0))),
            Slot("a", (1,), (form(0, 12.0, True), form(0, 12.0))),
        ),
        ((7.8385, "kill", "a", 0.5), (11.4112, "die", 1)),
    ),
}


@pytest.mark.parametrize("schedule", MENDED.values(), ids=list(MENDED))
def test_a_schedule_that_had_a_fault_has_none(schedule):
    result = run(schedule)
    assert not result.faults, "\n".join(result.said)


def test_an_answer_that_nobody_wants_any_more_leaves_no_error_behind(monkeypatch):
    """The call used to fail if its claims had changed."""
    monkeypatch.setattr(spanning, "_claims", lambda group: ())
    monkeypatch.setattr(spanning, "_wants_others", lambda group: False)
    group = SimpleNamespace(generation=1, changes=Changes())
    left = []

    async def refused():
        raise GroupBusyError("rank 1 is claimed")

    async def main():
        asyncio.get_running_loop().set_exception_handler(lambda loop, told: left.append(told))
        assert await spanning.Spanning._while_same(None, group, refused()) is None
        gc.collect()

    asyncio.run(main())
    assert left == []


async def _formed(cluster: SimulatedCluster, ranks_per_node: int) -> list[Process]:
    """Starts processes of one rank each, as many on each node; returns once the group is READY."""
    for node in cluster.nodes:
        cluster.start(node)
    await asyncio.sleep(1.0)
    made = [cluster.process(node, ()) for node in cluster.nodes for _ in range(ranks_per_node)]
    for rank, process in enumerate(made):
        process.ranks = (rank,)
    await _form(made)
    return made


async def _form(processes: list[Process]) -> None:
    spec = make_spec(ranks=len(processes), transport="xla")
    assert {*await asyncio.gather(*(p.form(spec, 30.0) for p in processes))} == {"READY"}


def test_a_node_is_told_in_one_call_of_all_processes_that_end_together(monkeypatch):
    told = []
    call = Links.call

    async def counted(links, source, target, method, data, within_s):
        if method == "TellGroup":
            told.append((source.name, target, node_service_pb2.TellGroupRequest.FromString(data)))
        return await call(links, source, target, method, data, within_s)

    monkeypatch.setattr(Links, "call", counted)
    with simulated(1, ABC) as cluster:

        async def main():
            made = await _formed(cluster, 4)
            for process in made[4:8]:
                process.die()
            await asyncio.sleep(1.0)

        cluster.loop.run_until_complete(main())
        assert cluster.faults == []
    assert [(source, target) for source, target, _ in told] == [("b", "a"), ("a", "c")]
    reports = [told[0][2], *told[1][2].reports]
    assert [(report.node, [*report.lost_ranks]) for report in reports] == 2 * [("b", [4, 5, 6, 7])]


def test_calls_grow_with_nodes_and_not_with_their_square():
    """Sixteen nodes form a group, lose a process, form again, and end one after another."""
    names = ("a", *(f"n{number}" for number in range(1, 16)))
    with simulated(1, names) as cluster:
        calls = {}

        async def count(what, work):
            before = cluster.links.num_calls
            found = await work
            calls[what] = (cluster.links.num_calls - before) / len(names)
            return found

        async def lose(processes):
            processes[-1].die()
            await asyncio.gather(*(process.work(30.0) for process in processes[:-1]))

        async def end(processes):
            for process in processes:
                process.die()
                await asyncio.sleep(0.002)
            await asyncio.sleep(1.0)

        async def main():
            made = await count("form", _formed(cluster, 2))
            await count("lose", lose(made))
            made[-1] = cluster.process(made[-1].node, made[-1].ranks)
            await count("form again", _form(made))
            await count("end", end(made))

        cluster.loop.run_until_complete(main())
        assert cluster.faults == []
        left = [life.runtime.groups.all() for life in cluster.lives()]
    assert not any(left)
    assert all(each <= 10.0 for each in calls.values()), calls


def _older(monkeypatch, *nodes: str) -> None:
    """Daemons of an older version, which ignore the fields of forwarded reports."""
    serve = Life.serve

    def without(life, method, data, within_s):
        if method != "TellGroup" or life.name not in nodes:
            return serve(life, method, data, within_s)
        request = node_service_pb2.TellGroupRequest.FromString(data)
        request.ClearField("others")
        request.ClearField("reports")

        async def answer():
            await serve(life, method, request.SerializeToString(), within_s)
            return b""

        return life.spawn(answer())

    monkeypatch.setattr(Life, "serve", without)


@pytest.mark.parametrize("other", ["older coordinator", "older node", "killed", "silent", "cut"])
def test_a_node_tells_itself_whom_the_coordinator_does_not_tell(monkeypatch, other):
    if "older" in other:
        _older(monkeypatch, "a" if other == "older coordinator" else "c")
    with simulated(1, ABC) as cluster:

        async def main():
            made = await _formed(cluster, 2)
            if other == "killed":
                cluster.kill("a")
            cluster.links.cut |= {("b", "a")} if other == "silent" else set()
            cluster.links.cut |= {("a", "c")} if other == "cut" else set()
            group = made[4].group()
            for rank in (2, 3):
                await asyncio.sleep(1.0)  # by then a call to the coordinator waits again
                made[rank].die()
                async with asyncio.timeout(TOLD_S):
                    while rank not in group.lost:
                        await group.changes.next.wait()

        cluster.loop.run_until_complete(main())
        assert cluster.faults == []


def test_the_same_schedule_runs_the_same_way_again():
    assert run(make_schedule(5)) == run(make_schedule(5))


@pytest.mark.parametrize(
    ("make", "of", "name"),
    [
        (make_schedule, Ends, "tell"),
        (make_schedule, Assembly, "hear"),
        (make_schedule, spanning.Spanning, "_unequal"),
        (make_lives, WindowSet, "hold"),
        (make_lives, Sessions, "fence"),
    ],
)
def test_a_daemon_that_leaves_something_out_is_found(monkeypatch, make, of, name):
    monkeypatch.setattr(of, name, lambda *arguments: None)
    assert any(run(make(seed)).faults for seed in range(SEEDS))
