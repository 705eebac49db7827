"""Answers the control plane's questions about JAX without importing it.

Everything here reads JAX through `sys.modules`: a process that never imported JAX traces nothing,
has started no backend and is alone.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar

from ep_runtime import env, files
from ep_runtime.errors import InvalidArgumentError
from ep_runtime_client.base.jax_internals import backend_started, distributed, under_tracing

_log = logging.getLogger("ep_runtime")

# XLA on CPU below jaxlib 0.12 runs launches, and the work they wait for, on one thread pool; a
# device may have 32 launches in flight.
_MIN_CPU_THREADS = 32

# The longest time that a group's close waits for running steps.
SETTLE_S = 10.0

_P = ParamSpec("_P")
_R = TypeVar("_R")


def _module(name: str) -> Any:
    """Returns the module if the program imported it, else None."""
    return sys.modules.get(name)


_OUTSIDE = "call this outside jit, grad and shard_map, once"


def needs_eager(call: str, missing: str) -> None:
    """Raises InvalidArgumentError under tracing, because `call` would have to create `missing`.

    An object that already exists in this process is returned under tracing too: models may be built
    under eval_shape.
    """
    if under_tracing():
        raise InvalidArgumentError(
            f"{call} needs the daemon, because this process has no {missing} yet: "
            f"{_OUTSIDE}; under tracing the same call then returns it",
            function=call,
        )


def outside() -> str:
    """Returns advice that errors add under tracing: make the object outside."""
    return f"; {_OUTSIDE}" if under_tracing() else ""


def eager(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Makes a function raise under tracing, because it talks to the daemon once, not per step."""

    @functools.wraps(function)
    def checked(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if under_tracing():
            raise InvalidArgumentError(
                f"{function.__name__} talks to the daemon: {_OUTSIDE}, and use its result inside",
                function=function.__name__,
            )
        return function(*args, **kwargs)

    return checked


def coordinator() -> str | None:
    """Returns the address of the jax.distributed coordinator; None if there is none."""
    state = distributed()
    address = state.coordinator_address if state is not None else None
    return str(address) if address else None


def num_processes() -> int:
    """Returns the number of processes of the jax.distributed job; 1 without one."""
    state = distributed()
    return int(state.num_processes or 1) if state is not None else 1


def process_index() -> int:
    """Returns the index of this process in the jax.distributed job; 0 without one."""
    state = distributed()
    return int(state.process_id or 0) if state is not None else 0


_HOST_KEY = "ep_runtime/host/"


def tell_host() -> None:
    """Tells the other processes of the jax.distributed job which host this one is on."""
    client = getattr(distributed(), "client", None)
    if client is not None:
        with contextlib.suppress(RuntimeError):  # a job may continue without its coordinator
            client.key_value_set(_HOST_KEY + str(process_index()), files.boot_id(), True)


def hosts_of(processes: Iterable[int], timeout_s: float) -> dict[int, str]:
    """Waits for the host id of each process; "" for a process that does not report in time."""
    client: Any = getattr(distributed(), "client", None)
    found: dict[int, str] = {}
    deadline = time.monotonic() + timeout_s
    for process in processes:
        left_ms = int(1000 * max(deadline - time.monotonic(), 0.001))
        found[process] = ""
        with contextlib.suppress(RuntimeError):
            found[process] = client.blocking_key_value_get(_HOST_KEY + str(process), left_ms)
    return found


def jaxlib_version() -> tuple[int, ...]:
    """Returns (major, minor) of the installed jaxlib; (0,) if there is none."""
    import importlib.metadata  # a top-level import would cost the command line 20 ms

    try:
        text = importlib.metadata.version("jaxlib")
    except importlib.metadata.PackageNotFoundError:
        return (0,)
    return tuple(int(part) for part in text.split(".")[:2] if part.isdecimal())


@functools.cache
def prepare_cpu_pool() -> None:
    """Gives XLA on CPU enough threads for many launches in flight; warns if it is too late.

    Remove it when jaxlib 0.12, which has a separate pool for launches, is the oldest supported.
    """
    if jaxlib_version() >= (0, 12):
        return
    threads = env.raise_pjrt_nproc(_MIN_CPU_THREADS)
    if threads >= _MIN_CPU_THREADS or not backend_started():
        return
    import jax

    if len(jax.devices("cpu")) > 1:
        _log.warning(
            "JAX started its CPU backend before ep.connect(), with %d threads for %d devices; "
            "more than 32 launches in flight may hang. Connect first, set PJRT_NPROC=%d before JAX "
            "starts, or wait for a result now and then",
            threads,
            len(jax.devices("cpu")),
            _MIN_CPU_THREADS,
        )


def settle(devices: Iterable[Any], within_s: float = SETTLE_S) -> bool:
    """Waits until the devices of this process have run everything launched before.

    XLA launches a program on one device after the other, and returns before the last launch; one
    array's value may be ready while other devices still run. If the group closed in between, it
    would be gone for some devices only, and the others would hang in the next collective.

    Returns:
        False if they were not done within `within_s`, or JAX can no longer run programs on them.
    """
    jax = _module("jax")
    ours = tuple(device for device in devices if device.process_index == jax.process_index())
    try:
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):  # no mesh
            last = _launch_last(ours)
    except (RuntimeError, ImportError, AttributeError, ValueError) as error:
        # Closing must continue even if JAX does not work, as after Ctrl-C during its import.
        _log.debug("nothing runs on these devices any more: %s", error)
        return False
    deadline = time.monotonic() + within_s
    pause = threading.Event()
    while not all(array.is_ready() for array in last):
        if time.monotonic() > deadline:
            return False
        pause.wait(0.001)
    return True


def _launch_last(devices: tuple[Any, ...]) -> list[Any]:
    """Returns arrays that are ready once the devices have run everything launched before."""
    jax, following = _module("jax"), _following()
    if len(devices) > 1 and devices[0].platform == "cpu":
        # XLA on CPU runs multi-device programs in order, but not single-device programs.
        return [following(_spread_over(devices))]
    # A GPU runs its programs in order.
    return [following(jax.device_put(0, device)) for device in devices]


@functools.cache
def _spread_over(devices: tuple[Any, ...]) -> Any:
    """Returns an array with one element on each device."""
    jax, np = _module("jax"), _module("numpy")
    mesh = jax.sharding.Mesh(devices, ("all",))
    spec = jax.sharding.PartitionSpec("all")
    with jax.ensure_compile_time_eval():  # the result is cached, so it must not be a tracer
        return jax.device_put(np.zeros(len(devices)), jax.sharding.NamedSharding(mesh, spec))


@functools.cache
def _following() -> Any:
    return _module("jax").jit(lambda x: x + 1)
