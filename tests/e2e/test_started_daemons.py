"""A daemon that a process starts has its packages, but nothing of its rank, GPU or shell."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import raw_client
from daemon_fixtures import READY_TIMEOUT_S, start_daemon

import ep_runtime as ep
from ep_runtime_client.daemons import addresses, runtime

UUIDS = [f"GPU-{'0' * 7}{number}-0000-0000-0000-000000000000" for number in (1, 2)]

# Replaces cuda-bindings by two GPUs, some of which CUDA_VISIBLE_DEVICES hides, as in CUDA.
_TWO_GPUS = """
import enum, os, types

class CUresult(enum.Enum):
    CUDA_SUCCESS = 0

_there = ["00000001", "00000002"]
_said = os.environ.get("CUDA_VISIBLE_DEVICES")
_names = [f"GPU-{start}-0000-0000-0000-000000000000" for start in _there]
_wanted = range(2) if _said is None else [
    int(word) if word.isdecimal() else _names.index(word) for word in _said.split(",")
]
_ok = CUresult.CUDA_SUCCESS

def cuInit(flags): return _ok, None
def cuDeviceGetCount(): return _ok, len(_wanted)
def cuDeviceGet(ordinal): return _ok, _wanted[ordinal]
def cuDeviceGetName(size, device): return _ok, b"two"
def cuDeviceTotalMem(device): return _ok, 1 << 30
def cuDeviceGetUuid(device):
    return _ok, types.SimpleNamespace(bytes=bytes.fromhex(_there[device]) + bytes(12))
"""

# How launchers tell a process its rank and its GPU.
LAUNCHERS = {
    "by hand": {"CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
    "by UUID": {"CUDA_VISIBLE_DEVICES": UUIDS[1], "NVIDIA_VISIBLE_DEVICES": UUIDS[1]},
    "srun": {
        "CUDA_VISIBLE_DEVICES": "0",
        "SLURM_JOB_ID": "7",
        "SLURM_PROCID": "3",
        "SLURM_LOCALID": "1",
        "SLURM_STEP_GPUS": "1",
    },
    "mpirun": {
        "CUDA_VISIBLE_DEVICES": "1",
        "OMPI_COMM_WORLD_RANK": "3",
        "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        "PMIX_RANK": "3",
    },
    "torchrun": {
        "CUDA_VISIBLE_DEVICES": "1",
        "RANK": "3",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "here",
        "MASTER_PORT": "29500",
    },
}


def started(address: str) -> runtime.Child:
    reached = runtime.open_runtime(addresses.parse_address(address), READY_TIMEOUT_S)
    assert reached.child is not None
    return reached.child


def environment_of(pid: int) -> dict[str, str]:
    """Returns the environment with which the process was started."""
    words = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return dict(word.split("=", 1) for word in words if word)


def gpus_seen_by(child: runtime.Child) -> str:
    """Returns the daemon's own list, from its refusal of a GPU that no host has."""
    client = raw_client.Client(child.directory)
    spec = raw_client.make_spec(transport="nvlink")
    try:
        with pytest.raises(ep.InvalidArgumentError, match="no GPU GPU-none") as caught:
            client.create(spec, uuids=["GPU-none", UUIDS[0]])
    finally:
        client.goodbye()
        client.close()
    return str(caught.value)


@pytest.fixture
def two_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    """Daemons that a test starts find a driver with two GPUs."""
    package = tmp_path / "driver" / "cuda" / "bindings"
    package.mkdir(parents=True)
    for folder in (package.parent, package):
        (folder / "__init__.py").touch()
    (package / "driver.py").write_text(_TWO_GPUS)
    path = f"{tmp_path / 'driver'}{os.pathsep}{os.environ['PYTHONPATH']}"
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.setenv("RUNTIME_DIRECTORY", str(directory))


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_nodes_daemon_sees_all_gpus_whichever_one_its_starter_has(
    monkeypatch: pytest.MonkeyPatch, launcher: str
) -> None:
    for name, value in LAUNCHERS[launcher].items():
        monkeypatch.setenv(name, value)
    child = started("node")
    try:
        assert LAUNCHERS[launcher].keys() & environment_of(child.pid).keys() == set()
        assert str(UUIDS) in gpus_seen_by(child)
    finally:
        assert child.stop() == 0


@pytest.mark.usefixtures("two_gpus")
def test_a_daemon_started_by_hand_with_gpus_hidden_says_so(
    monkeypatch: pytest.MonkeyPatch, daemon_process
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    told = gpus_seen_by(daemon_process())
    assert str(UUIDS[1:]) in told
    assert "CUDA_VISIBLE_DEVICES=1" in told


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[set[int]]:
    """Changes this process as a launcher, a profiler or a shell may; returns the cores it had."""
    for name in (
        *("CUDA_VISIBLE_DEVICES", "CUDA_INJECTION64_PATH", "XLA_FLAGS", "JAX_PLATFORMS"),
        *("NCCL_DEBUG", "NCCL_COMM_ID", "TF_CPP_MIN_LOG_LEVEL", "LD_PRELOAD", "LD_AUDIT"),
        *("NOTIFY_SOCKET", "LISTEN_FDS", "WANDB_API_KEY", "http_proxy", "MALLOC_ARENA_MAX"),
    ):
        monkeypatch.setenv(name, "")
    monkeypatch.delenv("EP_RUNTIME_CUDA", raising=False)  # of the user who builds
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("EP_RUNTIME_NCCL_LIBRARY", "/opt/libnccl.so.2")
    monkeypatch.chdir(tmp_path)
    opened = os.open(tmp_path, os.O_RDONLY)
    os.set_inheritable(opened, True)
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    handlers = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    umask = os.umask(0)
    yield cores
    os.umask(umask)
    os.sched_setaffinity(0, cores)
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    for number, handler in handlers.items():
        signal.signal(number, handler)
    os.close(opened)


@pytest.mark.parametrize("address", ["node", "embedded"])
def test_a_started_daemon_has_nothing_of_the_process_that_started_it(
    monkeypatch: pytest.MonkeyPatch, directory: Path, cores: set[int], address: str
) -> None:
    monkeypatch.setenv("RUNTIME_DIRECTORY", str(directory))
    bound = os.sched_getaffinity(0)
    child = started(address)
    try:
        there = Path(f"/proc/{child.pid}")
        kept = {name for name in environment_of(child.pid) if not name.startswith("PYTHON")}
        asked = {"PATH", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "LD_LIBRARY_PATH"}
        assert kept - asked == {"NCCL_SOCKET_IFNAME", "EP_RUNTIME_NCCL_LIBRARY", "SPT_NOENV"}
        assert os.readlink(there / "cwd") == "/"
        assert os.getsid(child.pid) == os.getpgid(child.pid) == child.pid
        status = dict(line.split(":\t", 1) for line in (there / "status").read_text().splitlines())
        assert int(status["SigBlk"], 16) == 0
        ignored = int(status["SigIgn"], 16)
        numbers = {number for number in signal.valid_signals() if ignored >> (number - 1) & 1}
        shells = {signal.SIGHUP, signal.SIGQUIT}  # if a user started the tests with nohup or &
        assert numbers - shells == {signal.SIGPIPE, signal.SIGXFSZ}  # Python's own
        assert int(status["Umask"], 8) == 0o077
        assert os.sched_getaffinity(0) == bound
        assert os.sched_getaffinity(child.pid) >= cores
        files = {os.readlink(fd) for fd in (there / "fd").iterdir()}
        ours = {str(directory), "/dev/null", "socket:", "pipe:", "anon_inode", "/memfd", "/tmp/#"}
        foreign = {path for path in files if not path.startswith((*ours, str(child.directory)))}
        assert foreign == set()
    finally:
        assert child.stop() == 0
        if address == "embedded":
            runtime.remove_directory(child.directory)


def test_relative_entries_of_pythonpath_are_the_starters(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, directory: Path
) -> None:
    entries = os.environ["PYTHONPATH"].split(os.pathsep)
    monkeypatch.chdir(tmp_path)
    relative = os.pathsep.join(os.path.relpath(entry) for entry in entries)
    monkeypatch.setenv("PYTHONPATH", relative)
    child = start_daemon(directory)
    try:
        assert environment_of(child.pid)["PYTHONPATH"].split(os.pathsep) == entries
    finally:
        assert child.stop() == 0
