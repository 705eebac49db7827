"""Real limits: cgroup memory, file systems, file sizes, descriptors, and disks full by a failpoint.

The daemon says what is full, jobs go on, and it heals.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import resource
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from child_programs import Start
from harness import DaemonProcess, eventually, memfds_of
from raw_client import close_fds, make_spec
from raw_jobs import SPEC, come_back, ready_pair

from ep_runtime import errors, layer_specs

_ROOT = Path("/sys/fs/cgroup")
_numbers = itertools.count(1)


class MemoryCgroup:
    """A cgroup that limits memory, of either version; removed once its processes are gone."""

    def __init__(self, limit_bytes: int) -> None:
        old = (_ROOT / "memory").is_dir()
        self._limit = "memory.limit_in_bytes" if old else "memory.max"
        self._used = "memory.usage_in_bytes" if old else "memory.current"
        parent = _ROOT / "memory" if old else _ROOT
        self.path = parent / f"ept-{os.getpid()}-{next(_numbers)}"
        self.path.mkdir()
        try:
            (self.path / self._limit).write_text(str(limit_bytes))
        except OSError:
            self.path.rmdir()
            raise

    @property
    def launcher(self) -> list[str]:
        return ["sh", "-c", f'echo $$ > {self.path}/cgroup.procs && exec "$@"', "sh"]

    @property
    def used_bytes(self) -> int:
        return int((self.path / self._used).read_text())

    def close(self) -> None:
        pause = threading.Event()
        for _ in range(200):
            with contextlib.suppress(OSError):
                self.path.rmdir()
                return
            pause.wait(0.05)  # ended processes leave the cgroup a moment later
        raise AssertionError(f"{self.path} is in use: {(self.path / 'cgroup.procs').read_text()}")


@contextlib.contextmanager
def memory_cgroup(limit_bytes: int) -> Iterator[MemoryCgroup]:
    """Skips the test if this host does not allow cgroups."""
    try:
        made = MemoryCgroup(limit_bytes)
    except OSError as error:
        pytest.skip(f"no cgroups with memory limits here: {error}")
    try:
        yield made
    finally:
        made.close()


def on_small_disk(directory: Path, size: str) -> list[str]:
    """Returns a launcher whose daemon alone sees a file system of that size at `directory`.

    Others reach it under `/proc/PID/root`.
    """
    script = f'mount -t tmpfs -o size={size},mode=0700 tmpfs {directory} && exec "$@"'
    return ["unshare", "-m", "sh", "-c", script, "sh"]


MIB = 1 << 20
HEALED_S = 4.0
# Windows of 94 and of 188 MiB.
LARGE = make_spec("large", ranks=1, hidden_size=4096, max_tokens_per_rank=6000)
MORE = make_spec("more", ranks=1, hidden_size=4096, max_tokens_per_rank=12_000)


def heartbeat(client) -> None:
    client.beat()


def goes_on(daemon: DaemonProcess, clients) -> None:
    """Checks that the earlier job continues, and what happens when its processes die."""
    for client in clients:
        heartbeat(client)
    assert daemon.popen.poll() is None
    assert daemon.group_states()["moe"] == "READY"
    clients[1].process.kill()
    eventually(lambda: daemon.group_states()["moe"] == "BROKEN", within_s=2.0)
    assert clients[0].process.do("board")[2:] == ("PEER_LOST", 1)


def test_more_than_the_cgroup_has_is_refused_and_kills_nobody(daemon_process):
    with memory_cgroup(256 * MIB) as cgroup:
        daemon = daemon_process("--max-host-bytes", "1G", launcher=cgroup.launcher)
        try:
            clients, _, _ = ready_pair(daemon)
            before = cgroup.used_bytes
            client = daemon.client()
            group = client.create(LARGE).group
            held = group.window_bytes + group.board_bytes
            assert abs(cgroup.used_bytes - before - held) < 16 * MIB  # as the kernel reports it
            with pytest.raises(errors.PoolExhaustedError, match="has .* available"):
                client.create(MORE)
            client.close_group(group)
            eventually(lambda: cgroup.used_bytes - before < 16 * MIB)
            close_fds(client.fetch(client.create(LARGE).group))
            goes_on(daemon, clients)
        finally:
            daemon.close()


@pytest.fixture
def on_full_disk(daemon_process, tmp_path) -> Iterator[tuple[DaemonProcess, Path]]:
    """A daemon on its own file system of 2 MiB, and its directory as others see it."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("a file system of its own needs root")
    place = tmp_path / "d"
    place.mkdir()
    daemon = daemon_process(directory=place, launcher=on_small_disk(place, "2m"))
    if daemon.ready is None:
        pytest.skip(f"no file systems of our own here: {daemon.ended()[1]}")
    seen = Path(f"/proc/{daemon.pid}/root{place}")
    daemon.directory = seen
    daemon.admin.close()
    daemon.admin = type(daemon.admin)(seen, "admin.sock")
    return daemon, seen


def fill(directory: Path) -> Path:
    """A file that fills the whole file system."""
    ballast = directory / "ballast"
    with ballast.open("wb", buffering=0) as file:
        for size in (4096, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError as error:
                assert error.errno == errno.ENOSPC  # noqa: PT017 - that is what it is for
    return ballast


def until_refused(client, group) -> errors.PoolExhaustedError:
    """Registers layers until the journal is full; returns the error."""
    for number in range(200):
        layers = [layer_specs.LayerSpec(f"l{number}/{i}", top_k=1) for i in range(50)]
        try:
            client.register(group, layers)
        except errors.PoolExhaustedError as error:
            return error
    raise AssertionError("ten thousand layers fit on a full disk")


def test_a_full_run_refuses_what_is_new_and_heals(on_full_disk):
    daemon, directory = on_full_disk
    clients, _, _ = ready_pair(daemon)
    other = daemon.client()
    group = other.ready(make_spec("other", ranks=1))
    ballast = fill(directory)
    assert "journal" in str(until_refused(other, group))
    assert "No space left" in daemon.status().journal.error
    with pytest.raises(errors.PoolExhaustedError, match="journal"):
        daemon.client()
    for client in clients:
        heartbeat(client)
    ballast.unlink()
    eventually(lambda: not daemon.status().journal.error, within_s=HEALED_S)
    other.register(group, [layer_specs.LayerSpec("after", top_k=1)])
    goes_on(daemon, clients)


def test_files_that_may_not_grow_refuse_what_is_new_and_heal(daemon_process):
    daemon = daemon_process()
    clients, _, _ = ready_pair(daemon)
    other = daemon.client()
    group = other.ready(make_spec("other", ranks=1))
    before = memfds_of(daemon.pid)
    hard = resource.prlimit(daemon.pid, resource.RLIMIT_FSIZE)[1]
    journal = (daemon.directory / "journal").stat().st_size
    resource.prlimit(daemon.pid, resource.RLIMIT_FSIZE, (journal, hard))
    with pytest.raises(errors.PoolExhaustedError, match="File too large"):
        other.create(make_spec("more", ranks=1))  # to the kernel, memory is a file
    assert memfds_of(daemon.pid) == before
    assert "journal" in str(until_refused(other, group))
    for client in clients:
        heartbeat(client)
    resource.prlimit(daemon.pid, resource.RLIMIT_FSIZE, (hard, hard))
    eventually(lambda: not daemon.status().journal.error, within_s=HEALED_S)
    close_fds(other.fetch(other.create(make_spec("more", ranks=1)).group))
    goes_on(daemon, clients)


_STARVED = """
import json, os, resource, sys
import ep_runtime as ep
from ep_runtime import specs
from ep_runtime_client.groups import forming

def say(value):
    print(json.dumps(value), flush=True)

spec = specs.make_group_spec(
    name="g", mesh_axes=(("ep", 64),), ep_axis="ep", num_experts=64, hidden_size=16,
    max_tokens_per_rank=8, max_top_k=2, retain_s=0.0)
session = ep.connect(job="starved", timeout_s=20)
client = session._client
formed = forming.form(client, spec, forming.Claim(tuple(range(64))), replace=False)
forming.leave(client, "g", formed.generation, formed.native_group)
formed.memory.close()
held = len(os.listdir("/proc/self/fd"))
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (held + 20, hard))
try:
    forming.form(session._client, spec, forming.Claim(tuple(range(64))), replace=False)
    say("formed")
except ep.EpRuntimeError as error:
    say(str(error))
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
assert len(os.listdir("/proc/self/fd")) <= held + 2, (held, os.listdir("/proc/self/fd"))
forming.form(session._client, spec, forming.Claim(tuple(range(64))), replace=False)
say("formed")
sys.stdin.readline()
"""


def test_a_client_without_descriptors_says_so_and_keeps_none(daemon_process, run_program: Start):
    daemon = daemon_process()
    address = f"unix://{daemon.directory}"
    program = run_program(_STARVED, prologue="", EP_RUNTIME_ADDRESS=address)
    assert "ulimit -n" in program.heard()
    assert program.heard() == "formed"
    assert daemon.group_states() == {"g": "READY"}
    program.end()
    eventually(lambda: daemon.used_bytes == 0)


# As many attempts to get space fail as the case says; the daemon tries every second.
FULL_AFTER_START = "failpoint:journal.before_write=enospc:1"


def test_a_failed_write_refuses_what_is_new_and_is_made_good(daemon_process):
    daemon = daemon_process("--testing", FULL_AFTER_START)
    with pytest.raises(errors.PoolExhaustedError, match="journal"):
        daemon.client(process=True)
    assert "No space left" in daemon.status().journal.error
    eventually(lambda: daemon.status().journal.error == "", within_s=3.0)
    client = daemon.client(process=True)
    client.fetch(client.create(make_spec(ranks=1)).group)
    kinds = daemon.event_kinds()
    assert kinds.index("journal.failed") < kinds.index("journal.written")


@pytest.mark.parametrize("fault", ["enospc", "eio"])
def test_a_disk_that_is_full_from_the_restart_on_disturbs_no_job(daemon_process, restarted, fault):
    daemon = daemon_process()
    clients, group, layers = ready_pair(daemon)
    again = restarted(daemon, "--testing", f"failpoint:journal.reserve={fault}")
    answer = come_back(clients, group, layers)
    assert answer.group.state == group.state
    clients[0].beat()
    assert clients[1].attached(group).generation == group.generation
    for refused in (
        lambda: clients[0].register(group, [layer_specs.LayerSpec("new", top_k=1)]),
        lambda: clients[0].create(make_spec("other", ranks=1)),
        lambda: again.client(),
    ):
        with pytest.raises(errors.PoolExhaustedError, match="journal"):
            refused()
    assert again.status().journal.error
    clients[1].process.kill()  # the daemon still notices ended processes
    eventually(lambda: again.group_states() == {"moe": "BROKEN"})
    assert clients[0].process.do("board")[2:] == ("PEER_LOST", 1)
    third = restarted(again)
    assert not third.status().journal.error
    clients[0].resume()
    assert clients[0].restore(group, [0], layers).group.generation == group.generation
    assert third.group_states() == {"moe": "BROKEN"}


def test_generations_do_not_come_back_after_a_full_disk(daemon_process, restarted):
    daemon = daemon_process()
    first = daemon.client(process=True)
    generation = first.create(make_spec("a", ranks=1)).group.generation
    daemon.kill()
    full = restarted(daemon, "--testing", "failpoint:journal.reserve=enospc")
    first.resume()
    with pytest.raises(errors.PoolExhaustedError):
        first.create(make_spec("b", ranks=1))
    again = restarted(full)
    client = again.client(process=True)
    assert client.create(make_spec("c", ranks=1)).group.generation > generation


def test_nothing_is_promised_that_a_restarted_daemon_would_not_know(daemon_process, restarted):
    """A change is made but not written: the answer is an error, and so is the retry's."""
    daemon = daemon_process("--testing", "failpoint:journal.before_write=eio:1")
    with pytest.raises(errors.PoolExhaustedError):
        daemon.client(process=True, job=None).open("job")
    eventually(lambda: daemon.status().journal.error == "", within_s=3.0)
    clients, group, layers = ready_pair(daemon, SPEC)
    restarted(daemon)
    assert come_back(clients, group, layers).group.generation == group.generation
