"""Daemons on real sockets in a temporary directory, with a clock that tests set."""

from __future__ import annotations

import asyncio
import inspect
import threading

import grpc
import pytest
from cluster_nets import lossy_net  # noqa: F401 - fixtures are found by name
from harness import FakeClock, Running, eventually
from raw_client import WAIT_S
from spanning import nodes, pool  # noqa: F401 - fixtures are found by name

from ep_runtime import services, wire
from ep_runtime_server.config import ServerConfig
from ep_runtime_server.daemon import Daemon

MAX_HOST_BYTES = 64 << 20


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs a coroutine test in its own event loop."""
    if not inspect.iscoroutinefunction(pyfuncitem.function):
        return None
    names = inspect.signature(pyfuncitem.function).parameters
    test = pyfuncitem.function(**{name: pyfuncitem.funcargs[name] for name in names})
    asyncio.run(asyncio.wait_for(test, WAIT_S))
    return True


@pytest.fixture(scope="session")
def server_loop():
    """One event loop for every daemon: grpc.aio supports one per process."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="daemons", daemon=True)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join(WAIT_S)
    loop.close()


@pytest.fixture
def start_daemon(server_loop, tmp_path_factory):
    """start_daemon(clock=, peer_of=, **config) -> Running; all are stopped at the end."""
    running: list[Running] = []

    def start(*, clock=None, peer_of=None, gpus=None, **settings) -> Running:
        directory = settings.pop("directory", None) or tmp_path_factory.mktemp("d")
        config = ServerConfig(directory=directory, **{"max_host_bytes": MAX_HOST_BYTES, **settings})
        more = {"peer_of": peer_of} if peer_of is not None else {}

        async def start_it() -> Daemon:
            daemon = Daemon(config, clock=clock, gpus=gpus, **more)
            await daemon.start()
            return daemon

        daemon = asyncio.run_coroutine_threadsafe(start_it(), server_loop).result(WAIT_S)
        running.append(Running(server_loop, directory, daemon, clock))
        return running[-1]

    yield start
    for item in reversed(running):
        item.close()
    # A stopped daemon has ended all its work; its server's last callbacks may still run.
    eventually(lambda: not asyncio.all_tasks(server_loop), within_s=WAIT_S, what="tasks end")


@pytest.fixture
def daemon(start_daemon) -> Running:
    return start_daemon()


@pytest.fixture
def clocked(start_daemon) -> Running:
    """A daemon whose clock the test sets at `clocked.clock`."""
    return start_daemon(clock=FakeClock())


@pytest.fixture
def call_node():
    """call_node(address, messages, method, request): an RPC over TCP; raises errors
    of our classes.
    """
    channels = []

    def call(address, messages, method, request, *, credentials=None, name=""):
        options = wire.channel_options([("grpc.ssl_target_name_override", name)] if name else [])
        channel = (
            grpc.secure_channel(address, credentials, options)
            if credentials
            else grpc.insecure_channel(address, options)
        )
        channels.append(channel)
        try:
            return getattr(services.stub(channel, messages.DESCRIPTOR), method)(
                request, timeout=WAIT_S
            )
        except grpc.RpcError as error:
            raise wire.error_from_rpc(error) from None

    yield call
    for channel in channels:
        channel.close()
