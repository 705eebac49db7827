"""The native calls over several processes: right values in every order, and clear misfits."""

from __future__ import annotations

from typing import Any

import doc_pages
import pytest
from multiprocess.launch import LIFE_S, TALK_S, Job
from native_memory import shared_groups

START = """
sys.path.append(os.environ["TEST_NATIVE"])
from multiprocess import native_job
"""
NATIVE = __file__.replace("multiprocess/test_native_calls.py", "csrc")


def said_by_two(
    script: str, ranks: int, *names: str, within_s: float = TALK_S, steps: int = 0, **settings: Any
) -> list[Any]:
    """What two processes say that share groups of so many ranks, and then end."""
    given = {"TEST_NATIVE": NATIVE, "TEST_STEPS": str(steps)}
    sizes = {"processes": 2, "devices": ranks // 2, "life_s": max(LIFE_S, within_s + 50)}
    with (
        shared_groups(ranks, *names, **settings) as (_, groups),
        Job(START + script, **sizes, **given, TEST_GROUPS=groups) as job,
    ):
        said = job.heard(within_s)
        job.end()
        return said


_VALUES = """
with native_job.open_groups(num_layers=30, in_flight=2) as (group,):
    native_job.loops(group)
    native_job.inner_jits(group)
    native_job.microbatches(group, 10)
    native_job.launches(group, 20)
    native_job.twins(group, 50)
    say(done=True)
    hear()
"""


def test_programs_end_with_the_right_values() -> None:
    assert said_by_two(_VALUES, 8, "values", within_s=200) == [{"done": True}] * 2


_MISFIT = """
with native_job.open_groups() as (group,):
    idx, x = native_job.inputs(group)
    program = group.sharded(lambda idx, x: native_job.round_trip(group, idx, x))
    if index == 0:
        other = group.sharded(lambda idx, x: native_job.round_trip(group, idx, x * 3))
        other.lower(idx, x).compile()
    say(**native_job.failure_of(lambda: program(idx, x)))
    hear()
os._exit(0)
"""


def test_processes_with_other_programs_are_told_which_calls_met() -> None:
    for said in said_by_two(_MISFIT, 4, "misfit"):
        assert said["kind"] == "SpecMismatchError", said
        assert "EP ranks [0, 1] at call 1 repetition 0" in said["text"]
        assert "EP ranks [2, 3] at call 0 repetition 0" in said["text"]
        assert "different handles" in said["text"]
        doc_pages.check_said("different programs", said["text"])
        assert said["fields"]["op"] == "prepare"
        assert said["seconds"] < 15


_SWAPPED = """
with native_job.open_groups() as (group,):
    idx, x = native_job.inputs(group)
    programs = [
        group.sharded(lambda idx, x, i=i: native_job.round_trip(group, idx, x * i)) for i in (1, 2)
    ]
    for program in programs if index == 0 else programs[::-1]:
        program.lower(idx, x).compile()
    say(**native_job.failure_of(lambda: programs[0](idx, x)))
    hear()
os._exit(0)
"""


def test_calls_that_miss_each_other_are_named_at_the_budget() -> None:
    heard = said_by_two(_SWAPPED, 2, "swapped", op_timeout_s=6.0)
    for said in heard:
        assert said["kind"] == "SpecMismatchError", said
        assert "EP ranks [0] at call 0 repetition 0" in said["text"]
        assert "EP ranks [1] at call 1 repetition 0" in said["text"]
    # Who called first waited for the whole budget; the other one heard of it at the same time.
    assert 5.9 < max(said["seconds"] for said in heard) < 10


_FAILED = """
with native_job.open_groups(debug=True) as (group,):
    idx, x = native_job.inputs(group)
    host, want = native_job.host_inputs(group.spec.world_size)
    host[-1, 3, 1] = 16
    run = group.sharded(lambda idx, x: native_job.round_trip(group, idx, x))
    for _ in range(3):
        failed = native_job.failure_of(lambda: run(group.put(host), x))
        native_job.expect(run(idx, x), want)
    say(**failed)
    hear()
"""


def test_an_error_in_one_process_ends_the_run_in_all_and_later_runs_work() -> None:
    for said in said_by_two(_FAILED, 8, "failed"):
        assert said["kind"] == "InvalidArgumentError", said
        assert "got 16 at token 3 slot 1" in said["text"]
        assert said["seconds"] < 5


_OVERFLOW = """
with native_job.open_groups() as (group,):
    idx, x = native_job.inputs(group)
    host, want = native_job.host_inputs(group.spec.world_size)
    run = group.sharded(lambda idx, x: native_job.round_trip(group, idx, x))
    for _ in range(5):
        failed = native_job.failure_of(lambda: run(group.put(host * 0), x))
        native_job.expect(run(idx, x), want)
    say(**failed)
    hear()
"""


def test_an_overflow_fails_all_processes_alike() -> None:
    settings = {"on_overflow": "error", "recv_capacity_per_rank": 40}
    for said in said_by_two(_OVERFLOW, 8, "overflow", **settings):
        assert said["kind"] == "CapacityOverflowError", said
        want = {"layer": "moe[0]", "rank": 0, "demand": 128, "capacity": 40}
        assert said["fields"] == want


_SOAK = """
with native_job.open_groups() as groups:
    native_job.soak(groups, int(os.environ["TEST_STEPS"]), index)
    say(done=True)
    hear()
"""


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("steps", [200, pytest.param(10_000, marks=pytest.mark.slow)])
def test_two_groups_stay_right_with_random_delays(steps: int) -> None:
    said = said_by_two(_SOAK, 8, "one", "two", within_s=1100, steps=steps)
    assert said == [{"done": True}] * 2
