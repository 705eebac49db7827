"""A daemon on real sockets in the tests' event loop, and what tests ask of it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import grpc
import guardian
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from raw_client import WAIT_S, Client, Process, Stubs

from ep_runtime import wire
from ep_runtime.v1 import admin_service_pb2, session_service_pb2
from ep_runtime_server.callers import credentials
from ep_runtime_server.daemon import Daemon
from ep_runtime_server.metrics.collector import Collector


class FakeClock:
    """A clock that stands still until a test moves it."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic_s(self) -> float:
        return self.now_s

    def wall_s(self) -> float:
        return 1.7e9 + self.now_s

    def advance(self, seconds: float) -> None:
        self.now_s += seconds


def preloaded(name: str, folder: Path) -> str:
    """Compiles tests/NAME.c for LD_PRELOAD."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler here")
    library = folder / f"{name}.so"
    source = Path(__file__).parent / f"{name}.c"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-O1", "-o", library, source], check=True, timeout=60
    )
    return str(library)


def eventually(condition: Callable[[], object], *, within_s: float = 2.0, what: str = "") -> None:
    """Looks until it is true; the limit is part of what is tested."""
    deadline = time.monotonic() + within_s
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < deadline, f"not within {within_s} s: {what or condition}"
        pause.wait(0.005)


def as_uid(uid: Callable[[], int]) -> Callable[..., credentials.Peer]:
    """Makes a `peer_of` that gives every new connection the uid `uid()`."""

    def peer_of(connection, **more):
        peer = credentials.peer_of(connection, **more)
        peer.uid, peer.gids = uid(), frozenset({77})
        return peer

    return peer_of


class Served:
    """A daemon as tests talk to it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.admin = Stubs(directory, wire.ADMIN_SOCKET)
        self._open: list = []

    def client(self, *, process: Process | bool = False, job: str | None = "job") -> Client:
        if process is True:
            process = self.process()
        client = Client(self.directory, process=process or None, job=job)
        self._open.append(client.close)
        return client

    def process(self) -> Process:
        process = Process()

        def end() -> None:
            with contextlib.suppress(ValueError):  # killed by the test
                process.kill()

        self._open.append(end)
        return process

    def ask(self, method: str, **fields):
        """An admin RPC: ask("ListGroups", name="moe")."""
        request_type = getattr(admin_service_pb2, f"{method}Request", None) or getattr(
            admin_service_pb2, f"AdminService{method}Request"
        )
        return self.admin.call(getattr(self.admin.admin, method), request_type(**fields))

    def healthy(self) -> bool:
        """The health service's word on api.sock."""
        with grpc.insecure_channel(f"unix:{self.directory}/{wire.API_SOCKET}") as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=WAIT_S)
        return answer.status == health_pb2.HealthCheckResponse.SERVING

    def status(self):
        return self.ask("GetStatus")

    @property
    def used_bytes(self) -> int:
        pool = self.status().pools[0]
        return pool.leased_bytes + pool.retained_bytes + pool.quarantined_bytes

    def group_states(self) -> dict[str, str]:
        found = self.ask("ListGroups").groups
        return {
            item.group.spec.name: type(item.group)
            .DESCRIPTOR.fields_by_name["state"]
            .enum_type.values_by_number[item.group.state]
            .name.removeprefix("GROUP_STATE_")
            for item in found
        }

    def session_state(self, session_id: str) -> str:
        for item in self.ask("ListSessions").sessions:
            if item.session_id == session_id:
                name = admin_service_pb2.SessionState.Name(item.state)
                return name.removeprefix("SESSION_STATE_")
        return "FORGOTTEN"

    def event_kinds(self) -> list[str]:
        """Returns kinds of this daemon's events, without those it read from its
        predecessor's file.
        """
        kinds = [event.kind for event in self.ask("ListEvents").events]
        kept = [place for place, kind in enumerate(kinds) if kind == "server.events_kept"]
        return kinds[kept[-1] + 1 :] if kept else kinds

    def close(self) -> None:
        for close in reversed(self._open):
            close()
        self.admin.close()


class Running(Served):
    """A daemon in the tests' event loop."""

    def __init__(self, loop, directory: Path, daemon: Daemon, clock) -> None:
        super().__init__(directory)
        self._loop = loop
        self._daemon = daemon
        self.clock = clock

    def advance(self, seconds: float) -> None:
        """Advances the daemon's clock by more than ten seconds, and returns once it was seen."""
        canary = self.client(job="canary")
        self.clock.advance(seconds)
        eventually(lambda: self.session_state(canary.session_id) in ("SUSPECT", "FORGOTTEN"))
        canary.goodbye()

    def metrics(self, name: str) -> dict[str, float]:
        """Series of one metric of the daemon, by their last label."""
        made = Collector(self._daemon.runtime, detail=False).collect()
        sheet = asyncio.run_coroutine_threadsafe(made, self._loop).result(WAIT_S)
        return {labels[-1]: value for labels, value in sheet.rows[name]}

    def stall(self, seconds: float) -> None:
        """Lets the daemon do nothing for that long."""
        self._loop.call_soon_threadsafe(time.sleep, seconds)

    def close(self) -> None:
        super().close()
        asyncio.run_coroutine_threadsafe(self._daemon.stop(), self._loop).result(WAIT_S)


class DaemonProcess(Served):
    """`python -m ep_runtime_server` on a directory."""

    def __init__(
        self,
        directory: Path,
        *options: str,
        pass_fds=(),
        ready: bool = True,
        launcher=(),
        stderr=subprocess.PIPE,
    ) -> None:
        """`launcher` is a command that ends in running its arguments. A daemon that says more than
        a pipe holds needs a file as `stderr`."""
        super().__init__(directory)
        reader, writer = os.pipe()
        command = [*launcher, sys.executable, "-m", "ep_runtime_server", "--dir", str(directory)]
        self.told_s = time.monotonic()
        self.popen = subprocess.Popen(
            [*command, "--ready-fd", str(writer), *options],
            pass_fds=(writer, *pass_fds),
            stderr=stderr,
            text=True,
        )
        os.close(writer)
        self.pid = self.popen.pid
        guardian.protect(self.pid)
        # Until its end: the daemon has closed its side too, and opens nothing further.
        with open(reader) as told:
            self.ready = json.loads(told.read() or "null") if ready else None

    def kill(self) -> None:
        """Sends SIGKILL and reaps; the directory does not change."""
        self.popen.kill()
        self.popen.communicate(timeout=WAIT_S)

    def ended(self, within_s: float = WAIT_S) -> tuple[int, str]:
        """(exit code, stderr)."""
        _, text = self.popen.communicate(timeout=within_s)
        return self.popen.returncode, text

    def close(self) -> None:
        super().close()
        if self.popen.poll() is None:
            self.popen.kill()
        if self.popen.stderr is None:
            self.popen.wait(WAIT_S)
        elif not self.popen.stderr.closed:
            self.popen.communicate(timeout=WAIT_S)


class Turns:
    """The loop thread's longest turn by its own processor time: others' load does not count."""

    def __init__(self, loop) -> None:
        self._loop = loop
        self._over = asyncio.Event()
        self.worst_s = 0.0

    async def _measure(self) -> None:
        before_s = time.thread_time()
        while not self._over.is_set():
            await asyncio.sleep(0)
            now_s = time.thread_time()
            self.worst_s = max(self.worst_s, now_s - before_s)
            before_s = now_s

    def __enter__(self) -> Turns:
        gc.disable()  # from all that earlier tests of this process left
        self._task = asyncio.run_coroutine_threadsafe(self._measure(), self._loop)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._task.result(WAIT_S)
        gc.enable()


class Watcher:
    """Reads a WatchSession stream in a thread."""

    def __init__(self, client: Client) -> None:
        self.events: list = []
        self.code = None
        self._stream = client.sessions.WatchSession(
            session_service_pb2.WatchSessionRequest(), metadata=client.metadata
        )
        next(iter(self._stream))
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            self.events.extend(iter(self._stream))
            self.code = grpc.StatusCode.OK
        except grpc.RpcError as error:
            self.code = error.code()

    def kinds(self):
        return [event.WhichOneof("event") for event in self.events]

    def ended(self) -> bool:
        self._thread.join(WAIT_S)
        return not self._thread.is_alive()


@pytest.fixture
def daemon_process(tmp_path_factory):
    """daemon_process(*options, directory=) -> DaemonProcess; all are killed at the end."""
    running: list[DaemonProcess] = []

    def start(*options: str, directory=None, **more) -> DaemonProcess:
        place = directory or tmp_path_factory.mktemp("d")
        running.append(DaemonProcess(place, *options, **more))
        return running[-1]

    yield start
    for item in reversed(running):
        item.close()


@pytest.fixture
def restarted(daemon_process):
    """restarted(daemon, *options) -> DaemonProcess on the same directory; kills the old one."""

    def start(daemon: DaemonProcess, *options: str) -> DaemonProcess:
        if daemon.popen.poll() is None:
            daemon.kill()
        return daemon_process(*options, directory=daemon.directory)

    return start


def memfds_of(pid: int) -> set[int]:
    """Inodes of our memfds that a process has open, by the kernel's word."""
    found = set()
    for name in os.listdir(f"/proc/{pid}/fd"):
        path = f"/proc/{pid}/fd/{name}"
        try:
            if os.readlink(path).startswith("/memfd:ep-runtime:"):
                found.add(os.stat(path).st_ino)
        except FileNotFoundError:  # closed meanwhile
            continue
    return found
