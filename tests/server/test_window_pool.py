"""The pool beside everything else: what waits for what, and what an unexpected fault does."""

from __future__ import annotations

import asyncio
import mmap
import threading

import pytest
from harness import FakeClock
from raw_client import WAIT_S, make_spec

from ep_runtime import board, errors
from ep_runtime_server.base.events import EventLog
from ep_runtime_server.callers.sessions import SessionRecord, SessionState
from ep_runtime_server.groups.formation import Groups
from ep_runtime_server.memory.windows import Owner, WindowPool, WindowState

OWNER = Owner(0, "job", "moe")
SPEC = make_spec()
SET_BYTES = board.board_bytes(SPEC) + 2 * board.window_bytes(SPEC)


class SlowAllocation:
    def __init__(self, gate: threading.Event, size_bytes: int) -> None:
        self._gate = gate
        self.size_bytes = size_bytes
        self.identity = (0, id(self))

    def export_fd(self) -> int:
        return -1

    def map(self) -> mmap.mmap:
        return mmap.mmap(-1, self.size_bytes)

    def free(self) -> None:
        assert self._gate.wait(WAIT_S)


class SlowDevice:
    """Gives memory back only once `gate` is open."""

    name = "host"

    def __init__(self, limit_bytes: int, fault: Exception | None = None) -> None:
        self.limit_bytes = limit_bytes
        self.gate = threading.Event()
        self.fault = fault

    def allocate(self, label: str, size_bytes: int) -> SlowAllocation:
        if self.fault is not None:
            raise self.fault
        return SlowAllocation(self.gate, size_bytes)


@pytest.fixture
def run(server_loop):
    def call(coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, server_loop).result(WAIT_S)

    return call


def make_pool(device) -> WindowPool:
    clock = FakeClock()
    return WindowPool(device, clock, EventLog(clock))


def test_a_group_that_fits_does_not_wait_for_memory_being_freed(run):
    async def work():
        device = SlowDevice(2 * SET_BYTES)
        pool = make_pool(device)
        old = await pool.allocate(OWNER, SPEC, 1)
        assert pool.release(old) == SET_BYTES
        new = await asyncio.wait_for(pool.allocate(OWNER, SPEC, 2), 1.0)
        assert old.state is WindowState.RELEASING
        assert pool.used_bytes("host") == 2 * SET_BYTES
        device.gate.set()
        await pool.settle()
        assert pool.sets == [new]

    run(work())


def test_a_group_that_does_not_fit_waits_for_memory_being_freed(run):
    async def work():
        device = SlowDevice(SET_BYTES)
        pool = make_pool(device)
        pool.release(await pool.allocate(OWNER, SPEC, 1))
        waiting = asyncio.create_task(pool.allocate(OWNER, SPEC, 2))
        done, _ = await asyncio.wait([waiting], timeout=0.05)
        assert not done
        device.gate.set()
        new = await asyncio.wait_for(waiting, WAIT_S)
        assert pool.sets == [new]
        with pytest.raises(errors.PoolExhaustedError):
            await pool.allocate(OWNER, SPEC, 3)

    run(work())


def test_two_groups_at_once_do_not_both_take_the_last_room(run):
    async def work():
        pool = make_pool(SlowDevice(SET_BYTES))
        results = await asyncio.gather(
            pool.allocate(OWNER, SPEC, 1), pool.allocate(OWNER, SPEC, 2), return_exceptions=True
        )
        kinds = sorted(type(result).__name__ for result in results)
        assert kinds == ["PoolExhaustedError", "WindowSet"]
        assert pool.used_bytes("host") == SET_BYTES

    run(work())


def session(number: int) -> SessionRecord:
    return SessionRecord(
        f"s{number}", "", 0, number, number, -1, "", 0.0, 0.0, SessionState.ACTIVE, "job"
    )


def test_memory_is_not_freed_while_it_is_being_formatted(run, monkeypatch):
    async def work():
        device, clock = SlowDevice(SET_BYTES), FakeClock()
        device.gate.set()
        pool = make_pool(device)
        groups = Groups(pool, clock, EventLog(clock))
        first, second, spec = session(1), session(2), make_spec(retain_s=60.0)
        await groups.create(first, spec, (0, 1), replace=False, wait_s=WAIT_S)
        first.state = SessionState.DEAD
        groups.session_ended(first)

        gate, entered = threading.Event(), threading.Event()

        def slow_format(*arguments) -> None:
            entered.set()
            assert gate.wait(WAIT_S)

        monkeypatch.setattr(board, "format_board", slow_format)
        again = asyncio.create_task(
            groups.create(second, spec, (0, 1), replace=False, wait_s=WAIT_S)
        )
        assert await asyncio.to_thread(entered.wait, WAIT_S)
        (group,), (windows,) = groups.all(), pool.sets
        assert groups.take_away(group, board.PoisonReason.RECLAIMED, "drill") == 0
        with pytest.raises(errors.StaleHandleError, match="while it formed"):
            await again
        assert windows.state is WindowState.LEASED
        gate.set()
        await asyncio.wait_for(group.formation, WAIT_S)
        await pool.settle()
        assert pool.sets == []

    run(work())


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (errors.PoolExhaustedError("full", asked_bytes=1), errors.PoolExhaustedError),
        (RuntimeError("a bug"), errors.EpRuntimeError),
    ],
)
def test_a_fault_while_forming_ends_the_wait_of_everybody(run, fault, error):
    async def work():
        clock = FakeClock()
        pool = make_pool(SlowDevice(SET_BYTES, fault))
        groups = Groups(pool, clock, EventLog(clock))
        results = await asyncio.wait_for(
            asyncio.gather(
                *(
                    groups.create(session(rank), SPEC, (rank,), replace=False, wait_s=WAIT_S)
                    for rank in range(2)
                ),
                return_exceptions=True,
            ),
            1.0,
        )
        assert [type(result) for result in results] == [error, error]
        assert groups.all() == []
        assert pool.used_bytes("host") == 0

    run(work())
