"""Native calls of several processes that run, miss each other, or wait for a dead process."""

from __future__ import annotations

import ctypes
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import doc_pages
import pytest
from multiprocess.launch import LIFE_S, TALK_S, Job
from native_memory import SharedGroup, shared_groups

from ep_runtime import board, board_abi, board_records

START = """
sys.path.append(os.environ["TEST_NATIVE"])
from multiprocess import native_job
"""
NATIVE = __file__.replace("multiprocess/test_native_faults.py", "csrc")
SOON_S = 2.0
_tick = threading.Event()  # never set: sleeps between looks at a board, which has no events
_STEPS = (
    START
    + """
with native_job.open_groups() as (group,):
    idx, x = native_job.inputs(group)
    want = native_job.host_inputs(4, group.spec.hidden_size)[1]
    run = group.sharded(lambda idx, x: native_job.round_trip(group, idx, x))
    native_job.expect(run(idx, x), want)
    say(ready=True)
    while (order := hear()) != "end":
        if order == "launch":
            failed = native_job.failure_of(lambda: run(idx, x), group)
            say(**failed, now=time.monotonic())
        if order == "steps":
            for _ in range(300):
                native_job.expect(run(idx, x), want)
            say(done=True)
        if order == "close":
            group.close()
            say(closed=True)
os._exit(0)
"""
)


class Faulty:
    """Two processes of two ranks each, on one group."""

    def __init__(self, job: Job, group: SharedGroup) -> None:
        self.job, self.group = job, group
        self.first, self.second = job.workers

    def until(self, condition: Callable[[list[board_records.RankRecord]], bool]) -> None:
        """Waits until the board's rank records fulfil the condition."""
        deadline = time.monotonic() + 30
        while not condition(board_records.read_ranks(self.group.board, self.group.layout)):
            assert time.monotonic() < deadline
            _tick.wait(0.005)

    def until_first_waits_for(self, rank: int) -> None:
        self.until(
            lambda ranks: all(
                record.state is board_abi.RankState.MEETING and record.waiting_for == rank
                for record in ranks[:2]
            )
        )

    def lose_second(self) -> float:
        """Poisons the board as the daemon does for a dead process; returns when."""
        board.poison(self.group.board, 1, board_abi.PoisonReason.PEER_LOST, rank=2)
        return time.monotonic()

    def expect_lost(self, said: dict[str, Any], since: float) -> None:
        assert said["kind"] == "PeerLostError", said
        fields = said["fields"]
        assert (fields["rank"], fields["process"]) == (2, self.second.pid)
        assert fields["layer"] == "moe[0]"
        assert fields["op"] in ("prepare", "dispatch", "combine")
        assert fields["epoch"] >= 0
        assert said["now"] - since < SOON_S


@pytest.fixture
def faulty(request: pytest.FixtureRequest) -> Iterator[Faulty]:
    """Both processes have run once; test parameters are settings of the group."""
    settings = getattr(request, "param", {})
    with (
        shared_groups(4, "faulty", **settings) as ((group,), text),
        Job(_STEPS, processes=2, devices=2, TEST_GROUPS=text, TEST_NATIVE=NATIVE) as job,
    ):
        assert job.heard() == [{"ready": True}] * 2
        yield Faulty(job, group)


def test_a_group_closed_by_one_process_ends_the_calls_that_wait_for_it(faulty: Faulty) -> None:
    faulty.first.tell("launch")
    faulty.until_first_waits_for(2)
    faulty.second.tell("close")
    assert faulty.second.heard() == {"closed": True}
    said = faulty.first.heard()
    assert said["kind"] == "StaleHandleError", said
    assert f"process {faulty.second.pid} of rank 2 closed group" in said["text"]
    fields = said["fields"]
    assert (fields["layer"], fields["op"], fields["rank"]) == ("moe[0]", "prepare", 2)
    faulty.first.tell("launch")  # later calls end at once
    again = faulty.first.heard()
    assert again["kind"] == "StaleHandleError"
    assert again["seconds"] < SOON_S


def _slots(group: SharedGroup) -> Any:
    """Reads the meeting slots of the first domain from the board."""
    start = group.layout.domains_offset
    start += ctypes.sizeof(board_abi.ControlStruct)
    start += group.spec.lanes * (1 + group.spec.ep_size) * board_abi.LINE_BYTES
    start += 4 * board_abi.MEETING_SLOTS
    kind = board_abi.MeetingSlotStruct * board_abi.MEETING_SLOTS
    return kind.from_buffer(group.board, start)


def test_peers_in_another_call_of_the_same_program_are_late_and_not_lost(faulty: Faulty) -> None:
    faulty.first.tell("launch")
    faulty.until_first_waits_for(2)
    slots = _slots(faulty.group)
    used = [slot for slot in slots if slot.arrived[0] == 0b0011 and slot.inside == 2]
    assert len(used) == 1
    # As if the other ranks had reached an independent call first.
    where = faulty.group.layout.domains_offset
    control = board_abi.ControlStruct.from_buffer(faulty.group.board, where)
    other = slots[control.used_slots]
    ctypes.memmove(ctypes.byref(other), ctypes.byref(used[0]), ctypes.sizeof(other))
    other.arrived[0], other.key[0] = 0b1100, other.key[0] + 1
    control.used_slots += 1
    _tick.wait(6.0)  # longer than calls must wait before they are compared
    assert faulty.first.silent()
    other.state = 0
    control.used_slots -= 1
    faulty.second.tell("launch")
    assert [said["kind"] for said in faulty.job.heard()] == ["none", "none"]
    del control, other, used, slots


def test_a_lock_that_dies_with_its_holder_is_not_waited_for(faulty: Faulty) -> None:
    faulty.second.kill()
    where = faulty.group.layout.domains_offset
    control = board_abi.ControlStruct.from_buffer(faulty.group.board, where)
    control.lock, control.owner = 1, faulty.second.pid
    faulty.first.tell("launch")
    deadline = time.monotonic() + 30
    while control.lock != 2:  # a rank sleeps on it
        assert time.monotonic() < deadline
        _tick.wait(0.005)
    del control
    since = faulty.lose_second()
    faulty.expect_lost(faulty.first.heard(), since)


def test_a_stopped_process_is_late_and_then_goes_on(faulty: Faulty) -> None:
    faulty.job.tell("steps")
    for _ in range(3):
        faulty.second.send(signal.SIGSTOP)
        faulty.until(lambda ranks: any(record.waiting_for in (2, 3) for record in ranks[:2]))
        _tick.wait(0.5)
        faulty.second.send(signal.SIGCONT)
    assert faulty.job.heard() == [{"done": True}] * 2
    faulty.job.tell("end")
    faulty.job.finish()


def said_by_two(
    script: str, ranks: int, *names: str, within_s: float = TALK_S, steps: int = 0, **settings: Any
) -> list[Any]:
    """Returns the output of two processes that share groups of that many ranks, and then end."""
    given = {"TEST_NATIVE": NATIVE, "TEST_STEPS": str(steps)}
    sizes = {"processes": 2, "devices": ranks // 2, "life_s": max(LIFE_S, within_s + 50)}
    with (
        shared_groups(ranks, *names, **settings) as (_, groups),
        Job(START + script, **sizes, **given, TEST_GROUPS=groups) as job,
    ):
        said = job.heard(within_s)
        job.end()
        return said


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
    # The process that called first waited for the whole budget; the other failed with it.
    assert 5.9 < max(said["seconds"] for said in heard) < 10


_FAILED = """
with native_job.open_groups(debug=True) as (group,):
    idx, x = native_job.inputs(group)
    host, want = native_job.host_inputs(group.spec.world_size)
    host[WRONG]
    run = group.sharded(lambda idx, x: native_job.round_trip(group, idx, x))
    for _ in range(3):
        failed = native_job.failure_of(lambda: run(group.put(host), x))
        native_job.expect(run(idx, x), want)
    say(**failed)
    hear()
"""
_OVERFLOW = {"layer": "moe[0]", "rank": 0, "demand": 128, "capacity": 40}


@pytest.mark.parametrize(
    ("wrong", "kind", "told"),
    [
        ("host[-1, 3, 1] = 16", "InvalidArgumentError", "got 16 at token 3 slot 1"),
        ("host[:] = 0", "CapacityOverflowError", _OVERFLOW),
    ],
)
def test_an_error_ends_the_run_in_all_processes_and_later_runs_work(
    wrong: str, kind: str, told: Any
) -> None:
    script = _FAILED.replace("host[WRONG]", wrong)
    more = {"on_overflow": "error", "recv_capacity_per_rank": 40} if "Overflow" in kind else {}
    for said in said_by_two(script, 8, "failed", **more):
        assert said["kind"] == kind, said
        assert said["fields"] == told if isinstance(told, dict) else told in said["text"]
        assert said["seconds"] < 5


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
