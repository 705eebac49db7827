"""Runs two groups with all-reduces, each randomly late; every step must equal the first.

    python tests/gpu/tools/soak.py [--steps 10000] [--limit-s 150] [--gpus N]

One process drives all GPUs; with --gpus N processes drive one each. Writes how far it is and a
last line with PASS or FAIL; exits with 0, or 1 where values differed, a step failed or the time was
up.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
from daemon_fixtures import start_daemon
from gpu.jobs import layouts
from gpu.jobs.gpu_programs import block
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import ep_runtime as ep

TOKENS, HIDDEN, TOP_K, EXPERTS = 32, 256, 4, 16
_ROUTINGS = ("uniform", "skewed", "one", "unused", "silent rank", "none", "twice", "uniform")
# Steps between two reads from the device: how far ahead the host may be.
_AHEAD = 50
_GRACE_S = 60.0
_SPEC = PartitionSpec("ep")
_pause = threading.Event()  # never set: waits of a given length

_SCRIPT = """
from gpu.tools import soak
limit_s = float(os.environ["TEST_LIMIT_S"])
with ep.connect(timeout_s=60) as session:
    run = soak.Soak(session, jax.devices())
    say(last=run.steps(int(os.environ["TEST_STEPS"]), limit_s, index, lambda row: say(**row)))
    hear()
"""


class Soak:
    """Two groups over the same devices, and the programs that run on them."""

    def __init__(self, session: ep.Session, devices: list[Any]) -> None:
        self.mesh = Mesh(np.array(devices), ("ep",))
        halves = np.array(devices).reshape(-1, max(len(devices) // 2, 1))
        self.groups = [
            self._group(session, "left", self.mesh),
            self._group(session, "right", Mesh(halves, ("dp", "ep")), outer_axes="dp", lanes=3),
        ]
        self._layers = [group.register_layer("moe", top_k=TOP_K) for group in self.groups]
        self._step = jax.jit(self._checked)
        self._delay = jax.jit(self._make_delay())
        self._inputs = [self._draw(seed, name) for seed, name in enumerate(_ROUTINGS)]

    def _group(self, session: ep.Session, name: str, mesh: Mesh, **more: Any) -> ep.Group:
        return session.create_group(
            name,
            mesh,
            ep_axis="ep",
            num_experts=EXPERTS,
            hidden_size=HIDDEN,
            max_tokens_per_rank=TOKENS,
            max_top_k=TOP_K,
            alignment=16,
            transport=layouts.TRANSPORT,
            op_timeout_s=30.0,
            **more,
        )

    def put(self, array: Any) -> jax.Array:
        """The array, spread over the devices on dim 0."""
        sharding = NamedSharding(self.mesh, _SPEC)
        return jax.make_array_from_callback(array.shape, sharding, lambda part: array[part])

    def _draw(self, seed: int, routing: str) -> tuple[jax.Array, ...]:
        rng = np.random.default_rng(seed)
        ranks = self.mesh.size
        case = cases.Case("", tokens=TOKENS, num_experts=EXPERTS, top_k=TOP_K, routing=routing)
        idx = cases.routing(case, ranks, seed).reshape(-1, TOP_K)
        x = rng.standard_normal((ranks * TOKENS, HIDDEN)).astype(jnp.bfloat16)
        weights = rng.uniform(0.2, 1.0, (ranks * TOKENS, TOP_K)).astype(np.float32)
        return self.put(x), self.put(idx), self.put(weights)

    def _results(self, x: Any, idx: Any, weights: Any) -> Any:
        """Returns bits of outputs and gradients of both groups, and of the all-reduced sums."""

        def outs(x: Any, weights: Any) -> list[Any]:
            return [block(layer, x, idx, weights) for layer in self._layers]

        found, pull = jax.vjp(outs, x, weights)
        return jax.tree.map(_bits, (found, pull([jnp.cos(out) for out in found]), self._sums(x)))

    def _checked(self, inputs: Any, first: Any, before: Any) -> Any:
        """Results, and how many of their values ever differed from the first ones: int32 [R]."""

        def count(before: Any, results: Any, first: Any) -> Any:
            unlike = jax.tree.map(lambda a, b: (a != b).sum(), results, first)
            return before + sum(jax.tree.leaves(unlike))

        results = self._results(*inputs)
        counted = jax.shard_map(count, mesh=self.mesh, in_specs=_SPEC, out_specs=_SPEC)
        return results, counted(before, results, first)

    def _sums(self, x: Any) -> jax.Array:
        """All-reduces that are not ordered with the ops; each device has its own copy."""

        def local(x: Any) -> Any:
            big = jnp.tile(x.astype(jnp.float32), (8, 1))
            for _ in range(3):  # different on every rank: equal values need no collective
                big = lax.psum(big * (1.0 + lax.axis_index("ep")), "ep") / 16
                big = lax.pcast(big, "ep", to="varying")
            return big

        summed = jax.shard_map(local, mesh=self.mesh, in_specs=_SPEC, out_specs=_SPEC)
        return summed(x)

    def _make_delay(self) -> Callable[[Any], Any]:
        """turns int32 [R]: keeps every device busy for its own time."""

        def local(turns: Any) -> Any:
            start = jnp.full((256, 256), 1e-3) + turns[0]
            return lax.fori_loop(0, turns[0], lambda _, x: jnp.cos(x @ x), start)[:1]

        return jax.shard_map(local, mesh=self.mesh, in_specs=_SPEC, out_specs=_SPEC)

    def steps(
        self, count: int, limit_s: float, seed: int, tell: Callable[[dict[str, Any]], None]
    ) -> dict[str, Any]:
        """Runs the steps; returns the last row (steps done, seconds, values that differed here)."""
        started = time.monotonic()
        bad = self.put(np.zeros(self.mesh.size, np.int32))
        first = [self._first(inputs, bad) for inputs in self._inputs]
        alike, own = random.Random(0), random.Random(seed + 1)
        row: dict[str, Any] = {"steps": 0, "seconds": 0.0, "differing": 0}
        for done in range(1, count + 1):
            which = alike.randrange(len(first))
            if alike.random() < 0.05:
                turns = [alike.randrange(60) for _ in range(self.mesh.size)]
                self._delay(self.put(np.array(turns, np.int32)))
            if own.random() < 0.01:
                _pause.wait(own.uniform(0, 0.01))
            bad = self._step(self._inputs[which], first[which], bad)[1]
            if done % _AHEAD and done != count:
                continue
            row = {
                "steps": done,
                "seconds": round(time.monotonic() - started, 1),
                "differing": int(sum(int(shard.data[0]) for shard in bad.addressable_shards)),
            }
            for group in self.groups:
                group.check()
            if row["differing"] or row["seconds"] > limit_s:
                break
            if done % max(count // 10, 1) < _AHEAD and done != count:
                tell(row)
        return row

    def _first(self, inputs: Any, bad: Any) -> Any:
        """Returns the results that later steps must repeat."""
        shapes = jax.eval_shape(self._results, *inputs)
        nothing = jax.tree.map(lambda s: self.put(np.zeros(s.shape, s.dtype)), shapes)
        return self._step(inputs, nothing, bad)[0]


def _bits(x: jax.Array) -> jax.Array:
    """Views values as integers of the same width, so that NaNs compare equal to themselves."""
    return lax.bitcast_convert_type(x, jnp.int16 if x.dtype.itemsize == 2 else jnp.int32)


def _tell(row: dict[str, Any], of: int) -> None:
    text = "soak: {steps} of {of} steps, {seconds} s, {differing} values differed"
    sys.stdout.write(text.format(of=of, **row) + "\n")
    sys.stdout.flush()


def _alone(count: int, limit_s: float, address: str) -> dict[str, Any]:
    """This process drives all GPUs."""
    if layouts.TRIAL:
        jax.config.update("jax_num_cpu_devices", 4)
    with ep.connect(address, timeout_s=60) as session:
        run = Soak(session, jax.devices()[:4])
        return run.steps(count, limit_s, 0, lambda row: _tell(row, count))


def _together(count: int, limit_s: float, address: str, gpus: int) -> dict[str, Any]:
    """One process per GPU; each is late separately, and the counts are added up."""
    with layouts.job(
        _SCRIPT,
        "one GPU each, visible alone",
        gpus,
        EP_RUNTIME_ADDRESS=address,
        TEST_STEPS=str(count),
        TEST_LIMIT_S=str(limit_s),
    ) as job:
        while True:
            rows = job.heard(limit_s + _GRACE_S)
            if "last" in rows[0]:
                break
            _tell(rows[0], count)
        job.end()
    last = [row["last"] for row in rows]
    return {
        "steps": min(row["steps"] for row in last),
        "seconds": max(row["seconds"] for row in last),
        "differing": sum(row["differing"] for row in last),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--gpus", type=int, default=0, help="of several processes, one for each")
    parser.add_argument("--limit-s", type=float, default=150.0)
    args = parser.parse_args()
    faulthandler.dump_traceback_later(args.limit_s + 2 * _GRACE_S, exit=True)
    try:
        last = _run(args)
    except (AssertionError, ep.EpRuntimeError, jax.errors.JaxRuntimeError) as error:
        sys.stdout.write(f"soak: FAIL {type(error).__name__}: {error}\n")
        return 1
    _tell(last, args.steps)
    good = last["steps"] == args.steps and not last["differing"]
    sys.stdout.write(f"soak: {'PASS' if good else 'FAIL'} {json.dumps(last)}\n")
    return 0 if good else 1


def _run(args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="ept-") as name:
        daemon = start_daemon(Path(name))
        try:
            if args.gpus:
                return _together(args.steps, args.limit_s, f"unix://{name}", args.gpus)
            return _alone(args.steps, args.limit_s, f"unix://{name}")
        finally:
            daemon.stop()


if __name__ == "__main__":
    raise SystemExit(main())
