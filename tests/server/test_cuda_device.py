"""Windows in GPU memory, with a driver that allocates files."""

from __future__ import annotations

import asyncio
import dataclasses
import mmap
import os
import shutil
import sys
import threading
import time
import types

import pytest
from file_driver import GPU_BYTES, GRANULARITY, INDICES, UUIDS, FileDriver
from harness import FakeClock, as_uid, eventually
from raw_client import WAIT_S, close_fds, make_spec

from ep_runtime import board, board_abi, errors, layer_specs
from ep_runtime.v1 import types_pb2
from ep_runtime_server.base import limits
from ep_runtime_server.base.events import EventLog
from ep_runtime_server.callers.quotas import UserLimits
from ep_runtime_server.journal.rejoin import Rejoin
from ep_runtime_server.memory.cuda_device import (
    BindingsDriver,
    CudaDevice,
    DriverError,
    Gpus,
    nvml_indices,
    uuid_text,
)
from ep_runtime_server.memory.devices import HostDevice
from ep_runtime_server.memory.windows import Owner, WindowPool
from ep_runtime_server.sockets.directory import JOURNAL_FILE

SPEC = make_spec(transport="nvlink")


@pytest.fixture
def driver():
    return FileDriver()


@pytest.fixture
def gpu_daemon(start_daemon, driver):
    return start_daemon(gpus=Gpus(load=lambda: driver))


def pools(daemon) -> dict[str, int]:
    return {pool.device: pool.leased_bytes for pool in daemon.status().pools}


def test_every_rank_gets_its_window_on_its_own_gpu(gpu_daemon, driver):
    client = gpu_daemon.client()
    group = client.create(SPEC, ranks=[1, 0], uuids=[UUIDS[1], UUIDS[0]]).group
    window_bytes = board.window_bytes(SPEC)
    found = client.fetch(group)
    assert [(d.world_rank, d.bytes) for d, _ in found[1:]] == [(0, window_bytes), (1, window_bytes)]
    assert found[0][0].kind == types_pb2.WINDOW_KIND_BOARD
    assert [driver.adopt(fd)[1] for _, fd in found[1:]] == [0, 1]
    assert client.attached(group).state == types_pb2.GROUP_STATE_READY
    assert pools(gpu_daemon) == {
        "host": board.board_bytes(SPEC),
        UUIDS[0]: window_bytes,
        UUIDS[1]: window_bytes,
    }
    close_fds(found)


def test_gpus_have_the_index_by_which_nvidia_smi_names_them(gpu_daemon):
    group = gpu_daemon.client().ready(SPEC, ranks=[1, 0], uuids=[UUIDS[1], UUIDS[0]])
    (found,) = gpu_daemon.ask("ListGroups").groups
    told = {gpu.world_rank: (gpu.device, gpu.gpu_index) for gpu in found.gpus}
    assert told == {0: (UUIDS[0], 5), 1: (UUIDS[1], 0)}
    assert [gpu.HasField("gpu_index") for gpu in found.gpus] == [True, False]
    buffers = gpu_daemon.ask("ListBuffers").buffers
    indices = {b.device: b.gpu_index if b.HasField("gpu_index") else None for b in buffers}
    assert indices == {"host": None, **dict(zip(UUIDS, INDICES, strict=True))}
    assert group.state == types_pb2.GROUP_STATE_READY


def test_a_new_limit_is_of_gpus_known_and_unknown():
    gpus = Gpus(GPU_BYTES // 2, load=FileDriver)
    gpus.limit(GPU_BYTES // 4)
    assert {device.limit_bytes for device in gpus.load().values()} == {GPU_BYTES // 4}
    gpus.limit(None)
    assert {device.limit_bytes for device in gpus.known()} == {GPU_BYTES}


class FakeNvml(types.ModuleType):
    NVMLError = RuntimeError

    def __init__(self, refuses: str) -> None:
        super().__init__("pynvml")
        self._refuses = refuses

    def __getattr__(self, name: str):
        if name == self._refuses:
            raise RuntimeError("Not Supported")
        answers = {
            "nvmlInit": lambda: None,
            "nvmlShutdown": lambda: None,
            "nvmlDeviceGetCount": lambda: 2,
            "nvmlDeviceGetHandleByIndex": lambda index: UUIDS[1 - index],
            "nvmlDeviceGetUUID": lambda handle: handle,
        }
        return answers[name]


@pytest.mark.parametrize(
    ("refuses", "found"),
    [("", {UUIDS[1]: 0, UUIDS[0]: 1}), ("nvmlInit", {}), ("nvmlDeviceGetUUID", {})],
)
def test_indices_are_nvmls_where_it_says_them(monkeypatch, refuses, found):
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(refuses))
    assert nvml_indices() == found
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert nvml_indices() == {}


def board_time(shown: mmap.mmap) -> int:
    return int(board_abi.BoardHeaderStruct.from_buffer_copy(shown).now_ns)


def test_what_devices_write_is_listed_and_they_are_told_the_time(gpu_daemon):
    client = gpu_daemon.client()
    group = client.create(SPEC, uuids=UUIDS).group
    found = client.fetch(group)
    shown = mmap.mmap(found[0][1], 0)
    client.attached(group)
    (layer,), _ = client.register(group, [layer_specs.LayerSpec("moe/0", top_k=2)])
    eventually(lambda: board_time(shown) > 0, within_s=5.0)
    assert abs(time.monotonic_ns() - board_time(shown)) < 60e9
    where = board.board_layout(SPEC)
    for rank in (0, 1):
        at = where.device_rows_offset + 16 * (rank * board_abi.MAX_HANDLES + layer.handle_base)
        board_abi.DeviceRowsStruct.from_buffer(shown, at).rows = 20 + rank
    record = board_abi.HandleRecordStruct.from_buffer(
        shown, where.handles_offset + 64 * layer.handle_base
    )
    record.calls, record.last_op, record.updated_ns = 3, board_abi.OpCode.COMBINE, 1
    (handle,) = gpu_daemon.ask("ListHandles").handles
    assert (handle.calls, handle.rows, handle.last_op) == (3, 41, "COMBINE")
    del record
    shown.close()
    close_fds(found)


def test_over_nccl_every_rank_of_one_daemon_is_a_node_of_its_own(gpu_daemon, driver):
    client = gpu_daemon.client()
    group = client.ready(make_spec(transport="nccl"), uuids=UUIDS)
    assert (group.spec.node_size, group.state) == (1, types_pb2.GROUP_STATE_READY)
    resolved = dataclasses.replace(make_spec(transport="nccl"), node_size=1)
    assert group.window_bytes == board.window_bytes(resolved)
    assert len(driver.held) == 2


def test_closing_gives_the_gpus_their_memory_back(gpu_daemon, driver):
    client = gpu_daemon.client()
    group = client.ready(SPEC, uuids=UUIDS)
    assert len(driver.held) == 2
    assert client.close_group(group) == board.board_bytes(SPEC) + 2 * board.window_bytes(SPEC)
    eventually(lambda: driver.held == {})


def test_a_restarted_job_takes_the_same_memory_and_on_other_gpus_new_one(gpu_daemon, driver):
    spec = make_spec(transport="nvlink", retain_s=60.0)
    process = gpu_daemon.process()
    first = gpu_daemon.client(process=process)
    first.create(spec, uuids=UUIDS)
    process.kill()
    again = gpu_daemon.client()
    answer = again.create(spec, uuids=UUIDS)
    assert (answer.reattached, driver.made) == (True, 2)
    again.close_group(answer.group)
    process = gpu_daemon.process()
    gpu_daemon.client(process=process).create(spec, uuids=UUIDS)
    process.kill()
    answer = gpu_daemon.client().create(spec, uuids=UUIDS[::-1])
    assert (answer.reattached, driver.made) == (False, 6)


def test_a_gpu_that_the_host_has_not_is_named_beside_those_that_it_has(gpu_daemon):
    with pytest.raises(errors.InvalidArgumentError, match="no GPU GPU-other; it has .*00000000a"):
        gpu_daemon.client().create(SPEC, uuids=[UUIDS[0], "GPU-other"])
    assert gpu_daemon.group_states() == {}


def test_a_full_gpu_is_an_error_with_sizes_and_a_hint(gpu_daemon, driver):
    driver.create(1, GPU_BYTES)
    with pytest.raises(errors.PoolExhaustedError, match="XLA_PYTHON_CLIENT_MEM_FRACTION") as caught:
        gpu_daemon.client().create(SPEC, uuids=UUIDS)
    assert caught.value.fields["asked_bytes"] == board.window_bytes(SPEC)
    assert caught.value.fields["limit_bytes"] == GPU_BYTES
    eventually(lambda: len(driver.held) == 1, what="freeing what the group got")


def test_the_limit_per_gpu_is_kept(start_daemon, driver):
    limit = board.window_bytes(SPEC)
    daemon = start_daemon(gpus=Gpus(limit, load=lambda: driver))
    daemon.client().create(SPEC, uuids=UUIDS)
    other = make_spec(transport="nvlink", name="other")
    with pytest.raises(errors.PoolExhaustedError) as caught:
        daemon.client(job="other").create(other, uuids=UUIDS)
    assert caught.value.fields["free_bytes"] == 0


@pytest.mark.parametrize(
    ("limits", "limit"),
    [
        (UserLimits(gpu_bytes=board.window_bytes(SPEC)), board.window_bytes(SPEC)),
        (UserLimits(shared=True), board.window_bytes(SPEC) * 3 // 2),
    ],
    ids=["told", "half"],
)
def test_windows_of_one_user_on_a_gpu_are_limited(start_daemon, driver, tmp_path, limits, limit):
    size, now = board.window_bytes(SPEC), [os.geteuid()]
    daemon = start_daemon(
        gpus=Gpus(3 * size, load=lambda: driver),
        per_user=limits,
        peer_of=as_uid(lambda: now[0]),
        allow_uids=frozenset({4242}),
        directory=tmp_path / "d",
    )
    client = daemon.client()
    group = client.create(SPEC, uuids=UUIDS).group
    more = make_spec(transport="nvlink", name="more")
    with pytest.raises(errors.PoolExhaustedError, match=f"gpu_bytes on {UUIDS[0]}") as caught:
        client.create(more, uuids=UUIDS)
    told = {key: caught.value.fields[key] for key in ("resource", "asked", "held", "limit")}
    assert told == {"resource": "gpu_bytes", "asked": size, "held": size, "limit": limit}
    (user,) = daemon.status().users
    assert (user.gpu_bytes, user.host_bytes) == (2 * size, board.board_bytes(SPEC))
    now[0] = 4242
    daemon.client().create(more, uuids=UUIDS)
    now[0] = os.geteuid()
    client.close_group(group)
    client.create(more, uuids=UUIDS)  # waits for memory that is being freed


def test_memory_that_comes_back_counts_for_its_user(start_daemon, driver):
    """A process may have allocated it: GPU memory does not show who allocated it."""
    daemon = start_daemon(gpus=Gpus(load=lambda: driver), per_user=UserLimits(gpu_bytes=1000))
    pool = daemon._daemon.runtime.pool
    pool.device(UUIDS[0])
    told = "holds 0 B of gpu_bytes on .* asks for 1001 B"
    with pytest.raises(errors.PoolExhaustedError, match=told):
        pool.check_room(UUIDS[0], 1001, 4242)
    pool.check_room(UUIDS[0], 1000, 4242)


def test_after_a_restart_the_driver_is_loaded_beside_the_loop(
    start_daemon, server_loop, gpu_daemon, driver, tmp_path
):
    gpu_daemon.client().create(SPEC, uuids=UUIDS)
    directory = tmp_path / "again"
    directory.mkdir(mode=0o700)
    shutil.copy(gpu_daemon.directory / JOURNAL_FILE, directory)
    loads = []

    def load() -> FileDriver:
        loads.append(threading.get_ident())
        return driver

    async def loop_thread() -> int:
        return threading.get_ident()

    start_daemon(gpus=Gpus(load=load), directory=directory)
    loop = asyncio.run_coroutine_threadsafe(loop_thread(), server_loop).result(WAIT_S)
    assert len(loads) == 1
    assert loop not in loads


def test_a_host_without_a_driver_says_what_is_missing(start_daemon):
    daemon = start_daemon()
    try:
        BindingsDriver()
    except errors.RuntimeUnavailableError as error:
        expected = str(error)
    else:
        pytest.skip("this host has a CUDA driver")
    with pytest.raises(errors.RuntimeUnavailableError) as caught:
        daemon.client().create(SPEC, uuids=UUIDS)
    assert str(caught.value) == expected


def test_memory_of_another_gpu_is_not_adopted(driver):
    gpu = driver.gpus()[0]
    handle = driver.create(1, GRANULARITY)
    with pytest.raises(errors.InvalidArgumentError, match="got memory of GPU 1"):
        CudaDevice(driver, gpu, None).adopt(driver.export_fd(handle), GRANULARITY)
    with pytest.raises(errors.InvalidArgumentError, match="not the group's memory"):
        CudaDevice(driver, gpu, None).adopt(os.memfd_create("other"), GRANULARITY)


def test_memory_that_came_back_is_handed_out_again(driver):
    fd = driver.export_fd(driver.create(0, GRANULARITY))
    inode = os.fstat(fd).st_ino
    allocation = CudaDevice(driver, driver.gpus()[0], None).adopt(fd, GRANULARITY)
    exported = allocation.export_fd()
    assert os.fstat(exported).st_ino == inode
    os.close(exported)
    allocation.free()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_memory_that_the_driver_keeps_counts_until_it_gives_it_back(
    gpu_daemon, driver, monkeypatch
):
    client = gpu_daemon.client()
    group = client.create(SPEC, uuids=UUIDS).group

    def refuse(handle: int) -> None:
        raise DriverError("cuMemRelease: CUDA_ERROR_ILLEGAL_ADDRESS")

    with monkeypatch.context() as patch:
        patch.setattr(driver, "release", refuse)
        client.close_group(group)
        eventually(lambda: not gpu_daemon.healthy())
        quarantined = {pool.device: pool.quarantined_bytes for pool in gpu_daemon.status().pools}
        assert quarantined == {"host": 0} | dict.fromkeys(UUIDS, board.window_bytes(SPEC))
    eventually(lambda: not driver.held)
    eventually(gpu_daemon.healthy)


def test_a_window_that_systemd_cannot_be_given_is_used_all_the_same(
    start_daemon, driver, tmp_path, monkeypatch
):
    def refuse(handle: int) -> int:
        raise DriverError("cuMemExportToShareableHandle: CUDA_ERROR_NOT_SUPPORTED")

    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "systemd"))
    monkeypatch.setattr(driver, "export_fd", refuse)
    daemon = start_daemon(gpus=Gpus(load=lambda: driver))
    client = daemon.client()
    group = client.create(SPEC, uuids=UUIDS).group
    client.close_group(group)
    eventually(lambda: not driver.held)


def test_what_is_wrong_with_memory_that_came_back_is_said_whatever_the_driver_does(
    driver, monkeypatch
):
    def refuse(handle: int) -> None:
        raise DriverError("cuMemRelease: CUDA_ERROR_ILLEGAL_ADDRESS")

    clock = FakeClock()
    pool = WindowPool(HostDevice(0), clock, EventLog(clock), Gpus(load=lambda: driver))
    windows = pool.expect(Owner(0, "job", "moe"), SPEC, 1, [0, 1])
    windows.assume(dict(enumerate(UUIDS)))
    fds = {0: driver.export_fd(driver.create(0, GRANULARITY)), 1: os.memfd_create("other")}
    monkeypatch.setattr(driver, "release", refuse)
    with pytest.raises(errors.InvalidArgumentError, match="not the group's memory"):
        Rejoin(None, pool, None).adopt(windows, fds)
    assert windows.wanted_ranks == [-1, 0, 1]
    for fd in fds.values():
        os.close(fd)


@pytest.mark.parametrize(
    ("fault", "told", "match"),
    [
        (DriverError("cuMemExport"), errors.RuntimeUnavailableError, "no descriptor of .*cuMemExp"),
        (ZeroDivisionError(), ConnectionResetError, "closed the connection"),
    ],
    ids=["the driver's", "a fault of ours"],
)
def test_who_gets_no_descriptor_hears_so_at_once(
    gpu_daemon, driver, monkeypatch, fault, told, match
):
    def export_fd(handle: int) -> int:
        raise fault

    client = gpu_daemon.client()
    group = client.create(SPEC, uuids=UUIDS).group
    monkeypatch.setattr(driver, "export_fd", export_fd)
    started = time.monotonic()
    with pytest.raises(told, match=match):
        client.fetch(group)
    assert time.monotonic() - started < limits.FD_CONNECTION_IDLE_S / 2


def test_uuids_are_written_as_nvml_writes_them():
    raw = bytes.fromhex("0123456789abcdef0123456789abcdef")
    assert uuid_text(raw) == "GPU-01234567-89ab-cdef-0123-456789abcdef"
