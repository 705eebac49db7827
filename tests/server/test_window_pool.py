"""The pool next to other work: the order of waits, and unexpected faults."""

from __future__ import annotations

import asyncio
import mmap
import threading

import pytest
from harness import FakeClock, eventually
from raw_client import WAIT_S, make_spec

from ep_runtime import board, board_abi, errors
from ep_runtime_server.base.events import EventLog
from ep_runtime_server.callers.quotas import Quotas, Usage, UserLimits
from ep_runtime_server.callers.sessions import SessionRecord, SessionState
from ep_runtime_server.groups.formation import Groups
from ep_runtime_server.memory.windows import Owner, WindowPool, WindowState

OWNER = Owner(0, "job", "moe")
SPEC = make_spec()
SET_BYTES = board.board_bytes(SPEC) + 2 * board.window_bytes(SPEC)


class SlowAllocation:
    def __init__(self, device: SlowDevice, size_bytes: int) -> None:
        self._device = device
        self.size_bytes = size_bytes
        self.identity = (0, id(self))

    def export_fd(self) -> int:
        return -1

    def map(self) -> mmap.mmap:
        return mmap.mmap(-1, self.size_bytes)

    def free(self) -> None:
        assert self._device.gate.wait(WAIT_S)
        self._device.tries += 1
        if self in self._device.stuck:
            raise OSError("the driver does not take it")
        self._device.freed.append(self)


class SlowDevice:
    """Frees memory only once `gate` is open, and never what is `stuck`."""

    name = "host"

    def __init__(self, limit_bytes: int, fault: Exception | None = None) -> None:
        self.limit_bytes = limit_bytes
        self.gate = threading.Event()
        self.fault = fault
        self.room = 0  # allocations until the fault
        self.stuck: list[SlowAllocation] = []
        self.freed: list[SlowAllocation] = []
        self.tries = 0

    def allocate(self, label: str, size_bytes: int) -> SlowAllocation:
        self.room -= 1
        if self.fault is not None and self.room < 0:
            raise self.fault
        return SlowAllocation(self, size_bytes)


def make_pool(device) -> WindowPool:
    clock = FakeClock()
    return WindowPool(device, clock, EventLog(clock))


async def test_a_group_that_fits_does_not_wait_for_memory_being_freed():
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


async def test_a_group_that_does_not_fit_waits_for_memory_being_freed():
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


async def test_two_groups_at_once_do_not_both_take_the_last_room():
    pool = make_pool(SlowDevice(SET_BYTES))
    results = await asyncio.gather(
        pool.allocate(OWNER, SPEC, 1), pool.allocate(OWNER, SPEC, 2), return_exceptions=True
    )
    kinds = sorted(type(result).__name__ for result in results)
    assert kinds == ["PoolExhaustedError", "WindowSet"]
    assert pool.used_bytes("host") == SET_BYTES


# A set of two windows and the board's mapping takes four descriptors.
@pytest.mark.parametrize("limits", [{"host_bytes": SET_BYTES}, {"fds": 6}], ids=["bytes", "fds"])
async def test_two_groups_of_one_user_at_once_do_not_both_take_the_last_of_its_share(limits):
    pool = make_pool(SlowDevice(2 * SET_BYTES))
    pool.quotas = Quotas(
        UserLimits(**limits), lambda uid: Usage(host_bytes=pool.held_by(uid, "host")), pool.fds
    )
    results = await asyncio.gather(
        pool.allocate(OWNER, SPEC, 1), pool.allocate(OWNER, SPEC, 2), return_exceptions=True
    )
    kinds = sorted(type(result).__name__ for result in results)
    assert kinds == ["PoolExhaustedError", "WindowSet"]


def session(number: int) -> SessionRecord:
    return SessionRecord(
        f"s{number}", "", 0, number, number, -1, "", 0.0, 0.0, SessionState.ACTIVE, "job"
    )


async def test_memory_is_not_freed_while_it_is_being_formatted(monkeypatch):
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
    again = asyncio.create_task(groups.create(second, spec, (0, 1), replace=False, wait_s=WAIT_S))
    assert await asyncio.to_thread(entered.wait, WAIT_S)
    (group,), (windows,) = groups.all(), pool.sets
    assert groups.take_away(group, board_abi.PoisonReason.RECLAIMED, "drill") == 0
    with pytest.raises(errors.StaleHandleError, match="while it formed"):
        await again
    assert windows.state is WindowState.LEASED
    gate.set()
    await asyncio.wait_for(group.formation, WAIT_S)
    await pool.settle()
    assert pool.sets == []


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (errors.PoolExhaustedError("full", asked_bytes=1), errors.PoolExhaustedError),
        (RuntimeError("a bug"), errors.EpRuntimeError),
    ],
)
async def test_a_fault_while_forming_ends_the_wait_of_everybody(fault, error):
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


async def retried(pool: WindowPool) -> str:
    """Returns the reaper's error about failed frees; the frees are retried after the round."""
    try:
        pool.free_again()
    except ExceptionGroup as error:
        return str(error)
    finally:
        await pool.settle()
    return ""


async def test_memory_that_cannot_be_freed_counts_until_it_can():
    device = SlowDevice(SET_BYTES)
    device.gate.set()
    pool = make_pool(device)
    windows = await pool.allocate(OWNER, SPEC, 1)
    window = windows.buffers[1]
    device.stuck.append(window.allocation)
    assert pool.release(windows) == SET_BYTES
    await pool.settle()
    assert len(device.freed) == 2  # the board, and the other window
    assert windows.buffers == [window]
    assert pool.sets == [windows]
    assert pool.used_bytes("host") == pool.held_by(0, "host") == window.size_bytes
    assert pool.fds() == {0: 1}
    for tries in (4, 5):
        assert "moe@1/0: OSError: the driver does not take it" in await retried(pool)
        assert device.tries == tries
    with pytest.raises(errors.PoolExhaustedError):  # the caller does not wait for it
        await asyncio.wait_for(pool.allocate(OWNER, SPEC, 2), WAIT_S)
    device.stuck.clear()
    await retried(pool)
    assert await retried(pool) == ""
    assert (pool.sets, pool.used_bytes("host")) == ([], 0)
    assert len(device.freed) == 3


async def test_a_board_that_is_read_is_freed_when_its_reader_is_gone():
    device = SlowDevice(SET_BYTES)
    device.gate.set()
    pool = make_pool(device)
    windows = await pool.allocate(OWNER, SPEC, 1)
    reader = memoryview(windows.board)
    pool.release(windows)
    await pool.settle()
    assert pool.used_bytes("host") == board.board_bytes(SPEC)
    assert "moe@1/board: BufferError" in await retried(pool)
    reader.release()
    await retried(pool)
    assert (pool.sets, len(device.freed)) == ([], 3)


async def test_an_allocation_that_fails_half_way_counts_until_its_memory_is_back():
    device = SlowDevice(SET_BYTES, errors.PoolExhaustedError("no room"))
    device.room = 2
    pool = make_pool(device)
    with pytest.raises(errors.PoolExhaustedError, match="no room"):
        await pool.allocate(OWNER, SPEC, 1)
    (windows,) = pool.sets
    assert pool.used_bytes("host") == SET_BYTES - windows.buffers[1].size_bytes
    device.gate.set()
    await pool.settle()
    assert (pool.sets, len(device.freed)) == ([], 2)


async def test_a_pool_that_closes_frees_all_it_can():
    device = SlowDevice(2 * SET_BYTES)
    device.gate.set()
    pool = make_pool(device)
    sets = [await pool.allocate(OWNER, SPEC, generation) for generation in (1, 2)]
    device.stuck.append(sets[0].buffers[1].allocation)
    pool.close()
    assert len(device.freed) == 5


def test_health_tells_of_memory_that_cannot_be_freed(clocked, monkeypatch):
    pool = clocked._daemon.runtime.pool
    client = clocked.client()
    group = client.create(SPEC, ranks=[0, 1]).group
    readers = [memoryview(windows.board) for windows in pool.sets]
    client.close_group(group)
    eventually(lambda: clocked.status().failing_tasks == ["freeing of memory"])
    assert not clocked.healthy()
    (shown,) = clocked.ask("ListBuffers").buffers
    assert (shown.world_rank, shown.bytes) == (-1, board.board_bytes(SPEC))
    (usage,) = clocked.status().users
    assert usage.host_bytes == shown.bytes
    for reader in readers:
        reader.release()
    eventually(clocked.healthy)
    assert not clocked.ask("ListBuffers").buffers
    kinds = clocked.event_kinds()
    assert kinds.count("task.failed") == kinds.count("task.works") == 1


async def test_a_claim_that_is_given_up_is_a_change_of_its_group():
    """The change tells other nodes at once that its ranks are free."""
    clock = FakeClock()
    groups = Groups(make_pool(SlowDevice(SET_BYTES)), clock, EventLog(clock))
    spec = make_spec(ranks=3, num_experts=6)
    waiting = asyncio.create_task(
        groups.create(session(0), spec, (0,), replace=False, wait_s=WAIT_S)
    )
    await asyncio.sleep(0)
    (group,), missing = groups.all(), []
    group.on_change = lambda changed: missing.append(changed.missing_ranks)
    with pytest.raises(errors.GroupNotReadyError):
        await groups.create(session(1), spec, (1,), replace=False, wait_s=0.0)
    assert missing == [[2], [1, 2]]
    waiting.cancel()
