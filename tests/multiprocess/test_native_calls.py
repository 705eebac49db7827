"""The native calls over several processes: right values in every order, and clear misfits."""

from __future__ import annotations

import doc_pages
import pytest
from multiprocess.launch import Job
from native_memory import shared_groups

START = """
sys.path.append(os.environ["TEST_NATIVE"])
from multiprocess import native_job
"""
NATIVE = __file__.replace("multiprocess/test_native_calls.py", "csrc")

_VALUES = (
    START
    + """
with native_job.open_groups(num_layers=30, in_flight=2) as (group,):
    native_job.loops(group)
    native_job.inner_jits(group)
    native_job.microbatches(group, 10)
    native_job.launches(group, 20)
    native_job.twins(group, 50)
    say(done=True)
    hear()
"""
)


def test_programs_end_with_the_right_values() -> None:
    with (
        shared_groups(8, "values") as (_, groups),
        Job(_VALUES, processes=2, devices=4, TEST_GROUPS=groups, TEST_NATIVE=NATIVE) as job,
    ):
        assert job.heard(200) == [{"done": True}] * 2
        job.tell()
        job.finish()


_MISFIT = (
    START
    + """
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
)


def test_processes_with_other_programs_are_told_which_calls_met() -> None:
    with (
        shared_groups(4, "misfit") as (_, groups),
        Job(_MISFIT, processes=2, devices=2, TEST_GROUPS=groups, TEST_NATIVE=NATIVE) as job,
    ):
        for said in job.heard():
            assert said["kind"] == "SpecMismatchError", said
            assert "EP ranks [0, 1] at call 1 repetition 0" in said["text"]
            assert "EP ranks [2, 3] at call 0 repetition 0" in said["text"]
            assert "different handles" in said["text"]
            doc_pages.check_said("different programs", said["text"])
            assert said["fields"]["op"] == "prepare"
            assert said["seconds"] < 15
        job.tell()
        job.finish()


_SWAPPED = (
    START
    + """
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
)


def test_calls_that_miss_each_other_are_named_at_the_budget() -> None:
    with (
        shared_groups(2, "swapped", op_timeout_s=6.0) as (_, groups),
        Job(_SWAPPED, processes=2, devices=1, TEST_GROUPS=groups, TEST_NATIVE=NATIVE) as job,
    ):
        heard = job.heard()
        for said in heard:
            assert said["kind"] == "SpecMismatchError", said
            assert "EP ranks [0] at call 0 repetition 0" in said["text"]
            assert "EP ranks [1] at call 1 repetition 0" in said["text"]
        # Who called first waited for the whole budget; the other one heard of it at the same time.
        assert 5.9 < max(said["seconds"] for said in heard) < 10
        job.tell()
        job.finish()


_FAILED = (
    START
    + """
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
)


def test_an_error_in_one_process_ends_the_run_in_all_and_later_runs_work() -> None:
    with (
        shared_groups(8, "failed") as (_, groups),
        Job(_FAILED, processes=2, devices=4, TEST_GROUPS=groups, TEST_NATIVE=NATIVE) as job,
    ):
        for said in job.heard():
            assert said["kind"] == "InvalidArgumentError", said
            assert "got 16 at token 3 slot 1" in said["text"]
            assert said["seconds"] < 5
        job.tell()
        job.finish()


_OVERFLOW = (
    START
    + """
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
)


def test_an_overflow_fails_all_processes_alike() -> None:
    with (
        shared_groups(8, "overflow", on_overflow="error", recv_capacity_per_rank=40) as (_, groups),
        Job(_OVERFLOW, processes=2, devices=4, TEST_GROUPS=groups, TEST_NATIVE=NATIVE) as job,
    ):
        for said in job.heard():
            assert said["kind"] == "CapacityOverflowError", said
            want = {"layer": "moe[0]", "rank": 0, "demand": 128, "capacity": 40}
            assert said["fields"] == want
        job.tell()
        job.finish()


_SOAK = (
    START
    + """
with native_job.open_groups() as groups:
    native_job.soak(groups, int(os.environ["TEST_STEPS"]), index)
    say(done=True)
    hear()
"""
)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("steps", [200, pytest.param(10_000, marks=pytest.mark.slow)])
def test_two_groups_stay_right_with_random_delays(steps: int) -> None:
    with (
        shared_groups(8, "one", "two") as (_, groups),
        Job(
            _SOAK,
            processes=2,
            devices=4,
            life_s=1150.0,
            TEST_GROUPS=groups,
            TEST_NATIVE=NATIVE,
            TEST_STEPS=str(steps),
        ) as job,
    ):
        assert job.heard(1100) == [{"done": True}] * 2
        job.tell()
        job.finish()
