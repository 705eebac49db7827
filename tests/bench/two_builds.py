"""Times steps of two checkouts in turns, so that a change of temperature affects both alike.

    python tests/bench/two_builds.py OTHER moe --cases deepseek-like --tokens 128
    python tests/bench/two_builds.py --turns 20 OTHER train --models 8-layers --recipe fp8-block

OTHER is the root of another checkout with its native libraries built. What follows is as in
`ep-runtime bench moe` or `bench train`; the first subject that is ours is measured. Each checkout
has a process and a daemon of its own, both stay while the other takes its turn, and each has a
little less than half of a GPU's memory. Prints the milliseconds and joules of a step in every turn,
their medians, and the median, quartiles and extremes of OTHER's number over that of this checkout
in each pair of turns: above 1 this one is better.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import math
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
TURN_S = 1.0  # counters of energy move every 20 to 100 ms
LIMIT_S = 300.0  # limit of a turn, and of starting and compiling
WARM = ENQUEUED = 10
_MEMORY = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.45"}


def compare(other: Path, bench: Sequence[str], turns: int) -> dict[str, list[tuple[float, float]]]:
    """Returns (this checkout's, OTHER's) milliseconds and joules of a step in each
    pair of turns.
    """
    found: dict[str, list[tuple[float, float]]] = {"ms": [], "joules": []}
    with _Build(ROOT, bench) as mine, _Build(other, bench) as theirs:
        for number in range(turns):
            # The builds take turns to go first, so that a warm-up within a pair favours neither.
            pair = (mine, theirs) if number % 2 == 0 else (theirs, mine)
            each = {build: build.turn() for build in pair}
            for name, pairs in found.items():
                values = each[mine][name], each[theirs][name]
                if None not in values:
                    pairs.append(values)
            _say(f"turn {number}: {each[mine]} against {each[theirs]}")
    return found


def lines(found: dict[str, list[tuple[float, float]]]) -> Iterator[str]:
    """Formats the report."""
    for name, pairs in found.items():
        if not pairs:
            continue
        mine, theirs = (statistics.median(values) for values in zip(*pairs, strict=True))
        ratios = sorted(b / a for a, b in pairs)
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
        yield (
            f"{name} of a step: {mine:.3f} here, {theirs:.3f} there; ratio {middle:.4f} "
            f"(quartiles {low:.4f} to {high:.4f}, all {ratios[0]:.4f} to {ratios[-1]:.4f}, "
            f"{len(ratios)} pairs)"
        )


class _Build:
    """Context manager: the process that runs one checkout's steps."""

    def __init__(self, root: Path, bench: Sequence[str]) -> None:
        paths = os.pathsep.join(str(root / part) for part in ("", "server", "client"))
        step = root / "tests/bench/two_builds.py"  # it imports the modules of its checkout
        command = [sys.executable, "-P", str(step), "--step", str(root), *bench]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        environment = {**os.environ, **_MEMORY, "PYTHONPATH": paths}
        self._root = root
        self._process = subprocess.Popen(command, text=True, env=environment, cwd=root, **pipes)

    def __enter__(self) -> _Build:
        try:
            self._hear()  # it starts and compiles while nothing else runs
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._process.communicate("end\n", timeout=30)
        self._process.kill()
        self._process.wait()

    def turn(self) -> dict[str, Any]:
        """Runs a step now and returns its milliseconds and joules."""
        assert self._process.stdin is not None
        self._process.stdin.write("turn\n")
        self._process.stdin.flush()
        return self._hear()

    def _hear(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        limit = threading.Timer(LIMIT_S, self._process.kill)
        limit.start()
        try:
            text = self._process.stdout.readline()
        finally:
            limit.cancel()
        if not text:
            raise SystemExit(f"the process of {self._root} has ended, see above")
        return json.loads(text)


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def run_steps(bench: Sequence[str]) -> None:
    """Child process: runs one turn for each line it reads, until a line tells it to stop."""
    from ep_runtime_bench.base import energy
    from ep_runtime_bench.base.clients import warm_daemon

    with warm_daemon() as address, contextlib.ExitStack() as opened:
        order = _order(bench, address)
        counted = order.devices if order.platform == "gpu" else 0
        run = _made(order, opened)
        run(WARM)
        started = time.perf_counter()
        run(WARM)
        steps = math.ceil(TURN_S / ((time.perf_counter() - started) / WARM))
        _say("{}")
        while sys.stdin.readline().strip() == "turn":
            run(1)
            before = energy.total_joules(counted)
            started = time.perf_counter()
            run(steps)
            took = time.perf_counter() - started
            after = energy.total_joules(counted)
            joules = None if before is None or after is None else (after - before) / steps
            _say(json.dumps({"ms": took / steps * 1e3, "joules": joules}))


def _order(bench: Sequence[str], address: str) -> Any:
    from ep_runtime_bench import cli

    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    options = cli.make_options(parser.parse_args(bench))
    (name,) = options.benches
    return importlib.import_module(f"ep_runtime_bench.{name}.{name}").orders(options, address)[0]


def _made(order: Any, opened: contextlib.ExitStack) -> Callable[[int], object]:
    """Makes and awaits steps of the order's subject, compiled."""
    import jax
    import numpy as np
    from jax.sharding import Mesh

    import ep_runtime as ep
    from ep_runtime_bench.moe import client as moe
    from ep_runtime_bench.moe.measuring import create_group
    from ep_runtime_bench.train import client as train
    from ep_runtime_client.jobs.members import Member, start_jax

    session = opened.enter_context(ep.connect(order.address))
    start_jax(order.devices, Member(), order.platform)
    devices = np.array(jax.devices(order.platform)[: order.devices])
    if hasattr(order, "model"):
        mesh = Mesh(devices.reshape([*order.axes.values()]), [*order.axes])
        group = create_group(order, order.model.case, mesh, session)
        return train._Training(order, train.models.Layout.of(mesh), group).run
    mesh = Mesh(devices, (moe.AXIS,))
    layer = create_group(order, order.case, mesh, session).register_layer(
        "layer", top_k=order.case.top_k
    )
    operands = moe.make_operands(order, mesh)
    program = moe._compiled(moe._losses(order, mesh, layer)[""], operands)

    def run(steps: int) -> None:
        for start in range(0, steps, ENQUEUED):  # more would hold too many results at once
            last = None
            for _ in range(min(ENQUEUED, steps - start)):
                last = program(*operands)
            jax.block_until_ready(last)

    return run


def main() -> int:
    if sys.argv[1:2] == ["--step"]:
        run_steps(sys.argv[3:])
        return 0
    assert __doc__ is not None
    about, _, _ = __doc__.partition("\n")
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("other", type=Path, help="root of the other checkout")
    parser.add_argument("--turns", type=int, default=12, help="of each; default %(default)s")
    parser.add_argument("bench", nargs=argparse.REMAINDER, help="moe or train, and its options")
    args = parser.parse_args()
    for line in lines(compare(args.other.resolve(), args.bench, args.turns)):
        _say(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
