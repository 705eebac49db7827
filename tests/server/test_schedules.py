"""Daemons of several nodes under random schedules (`schedules`): what is promised holds in each.

python -m pytest -n 0 --dose 20000 tests/server/test_schedules.py

A schedule with a fault is printed as small as it gets; `schedule.run` of that one shows it again.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from schedules import many
from schedules.schedule import Schedule, Slot, make_schedule, run

from ep_runtime.errors import GroupBusyError
from ep_runtime_server.cluster import spanning
from ep_runtime_server.cluster.ends import Ends
from ep_runtime_server.cluster.spanning import Spanning
from ep_runtime_server.cluster.views import Assembly

# In so many schedules what is left out shows.
SEEDS = 200


@pytest.fixture(autouse=True)
def _quick_collections() -> Iterator[None]:
    many.quick_collections()
    yield
    gc.unfreeze()


@pytest.mark.doses(ci=60, full=100_000)
def test_any_schedule_keeps_what_is_promised(dose, record_property):
    calls, fault = many.run_all(dose)
    if fault:
        pytest.fail(fault, pytrace=False)
    record_property("calls between daemons", f"{calls:,}")


def test_who_comes_with_another_spec_again_is_told_again():
    """On a node where another process of the job waits, whose group ends with it both times."""
    form = ("form", 0, 12.0, False)
    again = (
        ("sleep", 0.0),
        ("form", 1, 0.5, False),
        ("form", 0, 6.0, False),
        ("form", 1, 12.0, False),
    )
    slots = (
        Slot(node="c", ranks=(0,), steps=()),
        Slot(node="c", ranks=(1,), steps=(form,)),
        Slot(node="b", ranks=(2,), steps=(form, form)),
        Slot(node="b", ranks=(3,), steps=again),
    )
    result = run(
        Schedule(550, ("a", "b", "c"), 4, transport="memfd", retain_s=4.0, slots=slots, faults=())
    )
    assert not result.faults, "\n".join(result.said)


def test_processes_of_a_node_that_come_with_several_specs_again_let_time_pass():
    """Each claim took the other's place at once, for as long as they were shown."""
    specs = (("form", 1, 12.0, False), ("form", 1, 6.0, False)), (("form", 0, 12.0, False),) * 2
    slots = (Slot("a", (0,), specs[0]), Slot("a", (1, 2), specs[1]), Slot("a", (0,), ()))
    result = run(Schedule(818, ("a", "b"), 3, "xla", 4.0, slots, ()))
    assert not result.faults, "\n".join(result.said)


@pytest.mark.parametrize("faults", [(), ((2.7536, "die", 1),)], ids=["itself", "its successor"])
def test_who_comes_with_another_spec_after_a_claim_in_vain_is_told_of_elsewhere(faults):
    """What its node had claimed before still stood at the coordinator."""
    spec_of_b = (("form", 1, 12.0, False), ("form", 0, 5.0, False), ("form", 1, 12.0, False))
    spec_of_a = (("form", 0, 6.0, False), ("form", 0, 12.0, False))
    slots = (
        Slot("a", (0,), ()),
        Slot("b", (1,), spec_of_b),
        Slot("a", (2,), spec_of_a),
        Slot("a", (3,), ()),
    )
    result = run(Schedule(4804, ("a", "b"), 4, "xla", 0.0, slots, faults))
    assert not result.faults, "\n".join(result.said)


def test_a_claim_on_its_way_is_told_of_another_spec_beside_those_that_came_again():
    early = (("form", 0, 0.5, False), ("sleep", 0.475), ("form", 1, 12.0, False))
    late = (("sleep", 4.7988), ("form", 0, 12.0, False), ("form", 0, 12.0, False))
    slots = (
        Slot("a", (0,), early),
        Slot("c", (1,), (("sleep", 0.9062), ("form", 0, 6.0, False))),
        Slot("b", (2,), late),
    )
    faults = ((0.1377, "die", 2),)
    result = run(Schedule(10963, ("a", "b", "c"), 3, "xla", 0.0, slots, faults))
    assert not result.faults, "\n".join(result.said)


def test_a_spec_that_a_node_refused_before_the_coordinator_had_it_is_told_elsewhere():
    """Of the group that waits there, which ends with the one that came later."""
    slots = (
        Slot("c", (0,), (("form", 1, 12.0, False),)),
        Slot("a", (1,), (("form", 0, 5.0, False),)),
        Slot("c", (2,), ()),
        Slot("c", (3,), (("sleep", 0.1093), ("form", 0, 5.0, False))),
    )
    result = run(Schedule(96375, ("a", "b", "c"), 4, "xla", 4.0, slots, ()))
    assert not result.faults, "\n".join(result.said)


def test_a_spec_is_told_elsewhere_though_somebody_has_a_rank_of_those_who_come_with_it():
    """Another process of the node claims one that nobody has."""
    slots = (
        Slot("a", (0,), ()),
        Slot("b", (1,), ()),
        Slot("c", (2,), (("form", 1, 12.0, False),)),
        Slot("b", (3,), (("form", 0, 12.0, False),)),
        Slot("b", (2,), (("form", 0, 12.0, False),)),
    )
    result = run(Schedule(7238, ("a", "b", "c"), 4, "xla", 0.0, slots, ()))
    assert not result.faults, "\n".join(result.said)


def test_a_spec_is_told_elsewhere_though_the_rank_of_who_comes_with_it_was_claimed_a_moment_ago():
    """By the process before, of whose end the coordinator had not heard."""
    steps = ("form", 0, 12.0, False), ("goodbye",), ("moves", "a"), ("form", 1, 12.0, False)
    slots = (
        Slot("c", (0,), steps),
        Slot("c", (1,), ()),
        Slot("b", (2,), (("sleep", 5.3184), ("form", 0, 12.0, False))),
    )
    result = run(Schedule(121954, ("a", "b", "c"), 3, "xla", 0.0, slots, ()))
    assert not result.faults, "\n".join(result.said)


def test_a_process_is_told_of_another_spec_that_its_node_heard_of_before_it_came():
    """Its node alone was known to have heard, and to try again."""
    spec_of_b = (("form", 0, 5.0, False), ("work", 0.3), ("form", 0, 5.0, False))
    spec_of_a = (("form", 0, 12.0, False), ("work", 0.3), ("form", 1, 5.0, False))
    slots = (
        Slot("b", (0, 1), (*spec_of_b, ("goodbye",), ("form", 0, 6.0, False))),
        Slot("a", (2,), spec_of_a),
        Slot("b", (2,), ()),
    )
    result = run(Schedule(72009, ("a", "b"), 3, "memfd", 0.0, slots, ()))
    assert not result.faults, "\n".join(result.said)


def test_an_end_in_a_view_before_is_told_after_a_daemon_s_restart_amid_a_second_forming():
    again = (("form", 0, 12.0, False), ("form", 0, 12.0, False))
    slots = (
        Slot("a", (0,), again),
        Slot("a", (1,), (("sleep", 0.4637), ("form", 0, 6.0, False), ("form", 0, 12.0, False))),
        Slot("b", (2,), (("form", 1, 0.5, False), ("form", 0, 5.0, False))),
    )
    faults = (5.0199, "kill", "a", 0.5), (8.4183, "die", 0)
    result = run(Schedule(33211, ("a", "b", "c"), 3, "xla", 4.0, slots, faults))
    assert not result.faults, "\n".join(result.said)


def test_a_rank_of_a_process_on_another_node_is_not_free_while_a_coordinator_starts_again():
    again = (("form", 0, 12.0, False), ("sleep", 0.001), ("form", 0, 12.0, False))
    late = (("sleep", 4.6117), ("form", 0, 6.0, False), ("form", 0, 12.0, False))
    slots = (
        Slot("c", (0,), (("form", 1, 12.0, False), ("form", 0, 12.0, False))),
        Slot("c", (1,), late),
        Slot("b", (1,), again),
    )
    faults = ((0.17, "replace", "a", 2.0),)
    result = run(Schedule(83397, ("a", "b", "c"), 2, "xla", 4.0, slots, faults))
    assert not result.faults, "\n".join(result.said)


def test_a_wait_that_a_daemon_s_restart_falls_into_is_no_longer_than_asked_for():
    """Until the daemon had its groups back, and then as long again for the others."""
    steps = ("sleep", 5.4224), ("form", 1, 5.0, False), ("form", 0, 5.0, False)
    slots = (
        Slot("a", (0,), (*steps, ("form", 0, 6.0, False))),
        Slot("a", (1,), (("form", 0, 12.0, True), ("form", 0, 12.0, False))),
    )
    faults = (7.8385, "kill", "a", 0.5), (11.4112, "die", 1)
    result = run(Schedule(18861, ("a", "b"), 2, "memfd", 4.0, slots, faults))
    assert not result.faults, "\n".join(result.said)


def test_an_answer_that_nobody_wants_any_more_leaves_no_error_behind(monkeypatch):
    """The call had failed when the claims that it was for had changed."""
    monkeypatch.setattr(spanning, "_claims", lambda group: ())
    monkeypatch.setattr(spanning, "_wants_others", lambda group: False)
    group = SimpleNamespace(generation=1, changed=asyncio.Event())
    left = []

    async def refused():
        raise GroupBusyError("rank 1 is claimed")

    async def main():
        asyncio.get_running_loop().set_exception_handler(lambda loop, told: left.append(told))
        assert await Spanning._while_same(None, group, refused()) is None
        gc.collect()

    asyncio.run(main())
    assert left == []


def test_the_same_schedule_runs_the_same_way_again():
    assert run(make_schedule(5)) == run(make_schedule(5))


@pytest.mark.parametrize(
    ("of", "name"), [(Ends, "tell"), (Assembly, "hear"), (Spanning, "_unequal")]
)
def test_a_cluster_that_leaves_something_out_is_found(monkeypatch, of, name):
    monkeypatch.setattr(of, name, lambda *arguments: None)
    assert any(run(make_schedule(seed)).faults for seed in range(SEEDS))
