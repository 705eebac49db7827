"""Memory: limits, seals, and no leaks however clients die."""

from __future__ import annotations

import enum
import errno
import fcntl
import gc
import itertools
import mmap
import os
import resource
import time
from pathlib import Path

import pytest
from harness import Watcher, eventually
from raw_client import WAIT_S, close_fds, connect, hello, make_spec, receive, redeem

from ep_runtime import board, board_abi, errors, layer_specs, specs
from ep_runtime.text import iec
from ep_runtime.v1 import fd_socket_pb2
from ep_runtime_server.base import limits
from ep_runtime_server.memory import devices


def size_of(spec) -> int:
    return board.board_bytes(spec) + spec.world_size * board.window_bytes(spec)


def test_a_window_can_be_neither_shrunk_nor_grown_nor_unsealed(daemon):
    client = daemon.client()
    found = client.fetch(client.create(make_spec()).group)
    for descriptor, fd in found:
        with pytest.raises(PermissionError):
            os.ftruncate(fd, 0)
        with pytest.raises(PermissionError):
            os.ftruncate(fd, descriptor.bytes + 1)
        with pytest.raises(PermissionError):
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
        assert os.fstat(fd).st_blocks * 512 >= descriptor.bytes  # backed, not sparse
    close_fds(found)


def test_every_process_of_a_job_reads_its_state_and_nobody_else_does(daemon):
    writer, reader, stranger = daemon.client(), daemon.client(), daemon.client(job="other")
    spec = make_spec("state/0", transport=specs.STATE, retain_s=0.0)
    state, moe = writer.create(spec).group, writer.create(make_spec()).group
    written, found = writer.fetch(state), reader.fetch(state)
    os.pwrite(written[1][1], b"rows", 0)
    assert os.pread(found[1][1], 4, 0) == b"rows"
    assert found[1][0].bytes == spec.max_tokens_per_rank * spec.hidden_size
    close_fds(written + found)
    with pytest.raises(errors.PermissionDeniedError, match="claims no rank"):
        reader.fetch(moe)
    with pytest.raises(errors.StaleHandleError, match="no group 'state/0' in job 'other'"):
        stranger.fetch(state)
    done = daemon.client()
    close_fds(done.fetch(state))
    assert done.close_group(state) == 0
    assert writer.close_group(state) == 0  # `reader` may still map it
    assert reader.close_group(state) == size_of(spec)


def test_an_exhausted_pool_names_asked_free_limit_and_holders(start_daemon):
    spec = make_spec("big", hidden_size=4096)
    limit = size_of(spec) + 1000
    daemon = start_daemon(max_host_bytes=limit)
    client = daemon.client()
    group = client.create(spec).group
    with pytest.raises(errors.PoolExhaustedError) as caught:
        client.create(make_spec("next"))
    fields = caught.value.fields
    assert fields["asked_bytes"] == size_of(make_spec("next"))
    assert (fields["free_bytes"], fields["limit_bytes"]) == (1000, limit)
    (holder,) = fields["holders"]
    assert holder.startswith("big (uid ")
    assert holder.endswith(f"{iec(size_of(spec))}, leased")
    assert daemon.group_states() == {"big": "FORMING"}
    client.close_group(group)
    # Freed in the background: the next request waits for the memory and does not fail.
    client.create(spec)


def test_more_than_the_host_has_is_refused_not_killed(monkeypatch):
    monkeypatch.setattr(devices, "available_bytes", lambda: 1 << 20)
    with pytest.raises(errors.PoolExhaustedError, match="our cgroup has 1.0 MiB available"):
        devices.HostDevice(1 << 40).allocate("x", 2 << 20)


def test_a_failed_allocation_holds_nothing(daemon, monkeypatch):
    real, calls = os.posix_fallocate, []

    def failing(fd, offset, size):
        calls.append(size)
        if len(calls) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(fd, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", failing)
    before = daemon.status().num_fds
    client = daemon.client()
    with pytest.raises(errors.PoolExhaustedError, match="out of memory: No space left"):
        client.create(make_spec())
    eventually(lambda: (daemon.used_bytes, daemon.group_states()) == (0, {}))
    client.goodbye()
    client.close()
    eventually(lambda: daemon.status().num_fds <= before)
    client = daemon.client()
    client.create(make_spec())


class Step(enum.IntEnum):
    """The last step of a client before it is killed."""

    HELLO = 0
    OPEN = 1
    WATCH = 2
    CLAIM = 3  # it waits for another process's rank
    CREATE = 4
    TICKET = 5
    REDEEM = 6
    MAP = 7
    ATTACH = 8
    REGISTER = 9
    CLOSE = 10
    GOODBYE = 11


def live_until(daemon, step: int) -> None:
    process = daemon.process()
    client = daemon.client(process=process, job=None if step < Step.OPEN else "job")
    group = watcher = None
    if step >= Step.WATCH:
        watcher = Watcher(client)
    if step == Step.CLAIM:
        client.groups.CreateGroup.future(client.create_request(make_spec(), [1]), **client.how())
        client.beat()  # the earlier call has arrived
    if step >= Step.CREATE:
        group = client.create(make_spec()).group
    if step == Step.TICKET:
        client.ticket(group)
    if step >= Step.REDEEM:
        client.fetch(group)
    if step >= Step.MAP:
        process.do("map")
    if step >= Step.ATTACH:
        client.attached(group)
    if step >= Step.REGISTER:
        client.register(group, [layer_specs.LayerSpec("a", top_k=1)])
    if step == Step.CLOSE:
        client.close_group(group)
    if step >= Step.GOODBYE:
        client.goodbye()
    process.kill()
    if watcher is not None:
        assert watcher.ended()
    client.close()


def settled(daemon) -> bool:
    status = daemon.status()
    numbers = (status.num_sessions, status.num_groups, status.num_layers, status.num_handles)
    return numbers == (0, 0, 0, 0) and daemon.used_bytes == 0


@pytest.mark.parametrize("step", Step, ids=lambda step: step.name)
@pytest.mark.doses(ci=2, full=200)
def test_a_client_killed_at_any_step_leaves_nothing_after_two_seconds(
    start_daemon, step, dose, record_property
):
    spec = make_spec(hidden_size=128)
    daemon = start_daemon(max_host_bytes=size_of(spec) + 1000)
    slowest_s, fds = 0.0, 0
    for kill in range(dose):
        live_until(daemon, step)
        killed_s = time.monotonic()
        eventually(lambda: settled(daemon), within_s=2.0)
        slowest_s = max(slowest_s, time.monotonic() - killed_s)
        if kill == 1:  # everything that is made only once exists now
            fds = daemon.status().num_fds
    if dose > 1:
        eventually(lambda: daemon.status().num_fds <= fds, within_s=2.0, what="descriptors")
    record_property("free after, at worst", f"{1e3 * slowest_s:.0f} ms")
    daemon.client().create(spec)  # all of the memory


def memfds() -> int:
    """Counts descriptors of windows and boards in this process, which runs the daemon."""
    found = 0
    for fd in os.listdir("/proc/self/fd"):
        try:
            found += "memfd:ep-runtime" in os.readlink(f"/proc/self/fd/{fd}")
        except FileNotFoundError:
            continue
    return found


def mapped_boards() -> int:
    with open("/proc/self/maps") as maps:
        return sum("memfd:ep-runtime" in line for line in maps)


def test_counters_and_the_kernel_agree_on_what_is_held(daemon):
    gc.collect()  # descriptors that earlier tests of this process dropped
    others = (memfds(), mapped_boards())
    client = daemon.client()
    group = client.create(make_spec()).group
    assert daemon.status().pools[0].num_buffers == 3
    # Python's mmap of the board keeps its own descriptor.
    assert (memfds(), mapped_boards()) == (others[0] + 3 + 1, others[1] + 1)
    client.close_group(group)
    eventually(lambda: (memfds(), mapped_boards()) == others)


@pytest.mark.parametrize(
    ("field", "value"),
    [("ranks_offset", 2**64 - 64), ("handles_offset", 2**63), ("world_size", 2**32 - 1)],
)
def test_a_header_that_points_elsewhere_stops_nothing(clocked, field, value):
    client = clocked.client()
    found = client.fetch(client.create(make_spec()).group)
    with mmap.mmap(found[0][1], found[0][0].bytes) as mapped:
        header = board_abi.BoardHeaderStruct.from_buffer(mapped)
        setattr(header, field, value)
        del header
        clocked.advance(11.0)  # the reaper is alive: it marks late sessions
        assert clocked.healthy()
        assert len(clocked.ask("ListRanks").ranks) == 2
    close_fds(found)


def starve(daemon, spare: int = 0) -> None:
    """Leaves the daemon's process `spare` descriptors."""
    used = {int(fd) for fd in os.listdir(f"/proc/{daemon.pid}/fd")}
    free = (number for number in itertools.count() if number not in used)
    limit = next(itertools.islice(free, spare, None))
    hard = resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE)[1]
    resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (limit, hard))


def feed(daemon) -> None:
    hard = resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE)[1]
    resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (4096, hard))


def test_without_descriptors_the_daemon_refuses_and_recovers(daemon_process):
    daemon = daemon_process()
    client = daemon.client()
    group = client.create(make_spec()).group
    ticket = client.ticket(group).ticket
    daemon.status()  # its connection is open
    starve(daemon)
    with pytest.raises(errors.PoolExhaustedError, match=r"GetStatus: .* limit of open files is \d"):
        daemon.status()
    with pytest.raises(errors.PoolExhaustedError, match="file descriptors"):
        client.create(make_spec("other"))
    starve(daemon, spare=1)  # one for the connection, none for its pidfd
    with pytest.raises(errors.PoolExhaustedError, match="out of file descriptors"):
        hello(daemon.directory)
    starve(daemon, spare=3)  # connection, pidfd, and one of three windows
    with pytest.raises(errors.PoolExhaustedError, match="descriptors for 3 windows"):
        redeem(daemon.directory, client.token, ticket)
    feed(daemon)
    close_fds(client.fetch(group))
    client.create(make_spec("other"))
    hello(daemon.directory)


def test_a_listener_without_descriptors_pauses_instead_of_spinning(daemon_process):
    daemon = daemon_process()
    starve(daemon)
    before = cpu_s(daemon.pid)
    with connect(daemon.directory) as connection:
        greeting = fd_socket_pb2.Hello(api_versions=["v1"], pid=os.getpid())
        connection.send(fd_socket_pb2.FdRequest(hello=greeting).SerializeToString())
        connection.settimeout(1.0)
        with pytest.raises(TimeoutError):
            receive(connection)
        assert cpu_s(daemon.pid) - before < 0.4
        feed(daemon)
        connection.settimeout(WAIT_S)
        assert receive(connection)[0].welcome.session_token


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.doses(ci=300, full=10_000)
def test_handing_out_descriptors_costs_none(daemon, dose):
    client = daemon.client()
    group = client.create(make_spec()).group
    close_fds(client.fetch(group))
    fds = daemon.status().num_fds
    for _ in range(dose):
        close_fds(client.fetch(group))
    eventually(lambda: daemon.status().num_fds <= fds)


def test_idle_connections_are_dropped(daemon, monkeypatch):
    monkeypatch.setattr(limits, "FD_CONNECTION_IDLE_S", 0.05)
    with connect(daemon.directory) as idle:
        assert idle.recv(1) == b""  # closed by the daemon
    daemon.client()


def test_connections_are_bounded(daemon, monkeypatch):
    monkeypatch.setattr(limits, "MAX_FD_CONNECTIONS", 20)
    held = [connect(daemon.directory) for _ in range(20)]
    with connect(daemon.directory):
        held[0].settimeout(limits.FD_CONNECTION_IDLE_S / 2)
        assert held[0].recv(1) == b""  # the user with the most loses its oldest
    eventually(lambda: says_hello(daemon))
    for connection in held:
        connection.close()


def says_hello(daemon) -> bool:
    try:
        return bool(hello(daemon.directory).session_token)
    except ConnectionError:
        return False
