"""Runs fresh processes that measure one subject each, one after the other.

Peaks of memory cover a process's whole life, so each subject needs its own. The next processes
start JAX while one compiles; while one measures, the others are idle.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from ep_runtime import env
from ep_runtime_bench.base.moe_cases import LayerOrder
from ep_runtime_bench.base.train_cases import TrainOrder
from ep_runtime_client.cli import render
from ep_runtime_client.daemons import addresses, runtime
from ep_runtime_client.daemons.command_line import python_command

READY_TIMEOUT_S = 30.0  # to start a daemon
# Messages between the bench and its processes.
READY, COMPILED, GO = "ready", "compiled", "go"
# Starting them one by one would take seconds each; a measurement waits until all are up.
STARTED_TOGETHER = 3
# Processes that have started already share the devices with the process that measures.
_ENVIRONMENT = {
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    "XLA_CLIENT_MEM_FRACTION": "0.9",
}
_OLD_NAME = "XLA_PYTHON_CLIENT_MEM_FRACTION"  # JAX rejects both together


@contextlib.contextmanager
def warm_daemon() -> Iterator[str]:
    """Starts a private daemon, yields its address, and ends the daemon."""
    daemon = runtime.open_runtime(addresses.Address(addresses.EMBEDDED), READY_TIMEOUT_S)
    try:
        yield f"unix://{daemon.directory}"
    finally:
        daemon.stop()


OrderT = TypeVar("OrderT", LayerOrder, TrainOrder)


def measured(orders: Sequence[OrderT], limit_s: float) -> Iterator[tuple[OrderT, dict[str, Any]]]:
    """Runs `python -m MODULE ORDER` for each order and yields its results; plain JAX may fail.

    Args:
        orders: orders, measured in this sequence.
        limit_s: time limit for a stage of one process.

    Raises:
        RuntimeError: a process of ours failed; a failure of plain JAX is only reported.
    """
    left = collections.deque(orders)
    waiting: collections.deque[_Client] = collections.deque()
    with contextlib.ExitStack() as all_ended:

        def start_some() -> None:
            for _ in range(min(STARTED_TOGETHER, len(left))):
                client = _Client(left.popleft(), limit_s)
                waiting.append(all_ended.enter_context(client))

        start_some()
        for order in orders:
            client = waiting.popleft()
            client.hear(READY)
            if not waiting:
                start_some()
            client.go()
            for other in waiting:
                other.hear(READY)  # from here on they are idle
            client.hear(COMPILED)
            client.go()
            found = client.result()
            if found is not None:
                yield order, found
            elif not order.is_stock:
                raise RuntimeError(f"{order.name}: {order.label} failed, see above")


class _Client:
    """Context manager of one process, which ends with the block, or if a stage takes `limit_s`."""

    def __init__(self, order: LayerOrder | TrainOrder, limit_s: float) -> None:
        self._order = order
        self._limit_s = limit_s
        self._heard: set[str] = set()
        command = python_command(order.module, [json.dumps(dataclasses.asdict(order))])
        environment = env.inherited() | _ENVIRONMENT
        environment.pop(_OLD_NAME, None)
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._process = subprocess.Popen(command, text=True, env=environment, **pipes)
        self._limit = self._limited()

    def _limited(self) -> threading.Timer:
        timer = threading.Timer(self._limit_s, self._process.kill)
        timer.daemon = True
        timer.start()
        return timer

    def __enter__(self) -> _Client:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._limit.cancel()
        if self._process.poll() is None:
            self._process.kill()
        self._process.communicate()

    def hear(self, stage: str) -> None:
        """Waits until the process has reported that stage, or has ended."""
        assert self._process.stdout is not None
        if stage not in self._heard:
            self._process.stdout.readline()
            self._heard.add(stage)
            self._limit.cancel()  # it may wait for its turn without a limit

    def go(self) -> None:
        """Lets the process begin the next stage."""
        self._limit.cancel()
        self._limit = self._limited()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `result` reports that it has ended
            self._process.stdin.write(GO + "\n")
            self._process.stdin.flush()

    def result(self) -> dict[str, Any] | None:
        """Returns the process's results; None, after a line with the reason, if it failed."""
        out, _ = self._process.communicate()
        if self._process.returncode == 0:
            return json.loads(out)
        order, code = self._order, self._process.returncode
        render.err(f"{order.name}: {order.label}: no figures, it ended with exit code {code}")
        return None


def report(measure: Callable[..., Any], order: Any) -> int:
    """Runs in a client process: measures the order and writes the result, a dataclass, as JSON."""
    found = measure(order, tell, time.perf_counter)
    sys.stdout.write(json.dumps(dataclasses.asdict(found)) + "\n")
    return 0


def tell(stage: str) -> None:
    """Runs in a client process: reports the stage and waits for GO; exits if the bench is gone."""
    sys.stdout.write(stage + "\n")
    sys.stdout.flush()
    if sys.stdin.readline().strip() != GO:
        sys.exit("the bench that started this process has ended")
