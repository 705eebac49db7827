"""Programs that once hung on XLA:CPU; `python programs.py NAME` runs one in a fresh process.

Each ends with exit code 0 and prints "done" when every value is right. Devices start independent
calls in different orders, so any of them finds a wait that depends on an order.
"""

from __future__ import annotations

import functools
import os
import sys
import threading

os.environ.setdefault("PJRT_NPROC", "32")

import jax
import jax.numpy as jnp
import numpy as np
import round_trips
from round_trips import HIDDEN, TOKENS, TOP_K, expect, round_trip

# Waits end long before the process is killed, so that a hang reports its place.
opened = functools.partial(round_trips.opened, op_timeout_s=20.0)


def error_of(launch):
    """Returns the text of the error that the launch raises; "" if it raises none."""
    try:
        jax.block_until_ready(launch())
    except jax.errors.JaxRuntimeError as error:
        return str(error)
    return ""


def launches(count):
    """`count` launches without waiting for any of them."""
    with opened() as (group, run, idx, x):
        scaled = [x * float(i) for i in range(count)]
        outs = [run(idx, each) for each in scaled]
        for out, each in zip(outs, scaled, strict=True):
            expect(out, each)


def independent(count):
    """`count` calls in one program that do not depend on each other."""
    with opened() as (group, _, idx, x):

        def program(idx, x):
            return [round_trip(group, idx, x * float(i + 1)) for i in range(count)]

        for _ in range(3):
            for i, out in enumerate(group.sharded(program)(idx, x)):
                expect(out, np.asarray(x) * float(i + 1))


def microbatches(count, awaited):
    """`count` independent chains of matmul, dispatch, matmul, combine in one program."""
    with opened() as (group, _, idx, x):
        eye = jnp.eye(HIDDEN)

        def program(idx, x):
            outs = []
            for i in range(count):
                y = x * float(i + 1)
                for _ in range(2):
                    plan = group.prepare(idx)
                    recv, _ = group.dispatch(y @ eye, None, plan)
                    zeroed = jnp.where(jnp.arange(recv.shape[0])[:, None] < plan[7].sum(), recv, 0)
                    y = group.combine(zeroed @ eye, None, plan) / TOP_K
                outs.append(y)
            return outs

        run = group.sharded(program)
        results = []
        for _ in range(10):
            results.append(run(idx, x))
            if awaited:
                jax.block_until_ready(results[-1])
        for outs in results:
            for i, out in enumerate(outs):
                expect(out, np.asarray(x) * float(i + 1))


def with_psum(count):
    """Mixes EP calls with XLA's own collectives in `count` launches, without waiting for any."""
    with opened() as (group, _, idx, x):

        def program(idx, x):
            total = jax.lax.psum(x, "ep")
            first = round_trip(group, idx, x)
            turned = jax.lax.all_to_all(first, "ep", 0, 0, tiled=True)
            second = round_trip(group, idx, turned)
            return second, total + jax.lax.psum(second - second, "ep"), round_trip(group, idx, x)

        run = group.sharded(program)
        outs = [run(idx, x) for _ in range(count)]
        want = np.asarray(x).sum(0)
        for second, total, third in outs:
            expect(third, x)
            expect(total[0], want)
            expect(second[0], np.asarray(x)[:, 0])


def train_steps(count):
    """Four layers with remat and gradients, `count` steps without waiting."""
    with opened(num_layers=4, combine_precision="exact") as (group, _, idx, x):

        @jax.custom_vjp
        def dispatch(x, layer, plan):
            return group.dispatch(x, None, plan, index=layer)[0]

        def dispatch_fwd(x, layer, plan):
            return dispatch(x, layer, plan), (layer, plan)

        def dispatch_back(saved, d_recv):
            layer, plan = saved
            weights = jnp.zeros(d_recv.shape[0], jnp.float32)
            return group.dispatch_bwd(d_recv, weights, plan, index=layer)[0], None, None

        dispatch.defvjp(dispatch_fwd, dispatch_back)

        @jax.custom_vjp
        def combine(rows, layer, plan):
            return group.combine(rows, None, plan, index=layer)

        def combine_fwd(rows, layer, plan):
            return combine(rows, layer, plan), (layer, plan)

        def combine_back(saved, g):
            layer, plan = saved
            return group.combine_bwd(g, None, None, plan, index=layer)[0], None, None

        combine.defvjp(combine_fwd, combine_back)

        @jax.checkpoint
        def layer(x, i, idx):
            plan = group.prepare(idx, index=i)
            return combine(dispatch(x, i, plan), i, plan) / TOP_K + x

        def step(x, idx):
            def loss(x):
                y = x
                for i in range(4):
                    y = layer(y, i, idx)
                return (y * y).sum() / 2

            grad = jax.lax.pmean(jax.grad(loss)(x), "ep")
            return x - 0 * grad, grad

        run = group.sharded(step)
        grads = []
        for _ in range(count):
            x, grad = run(x, idx)
            grads.append(grad)
        for grad in grads:
            expect(grad[0], 256 * np.asarray(x).mean(0))


def threads(count, same_program):
    """Two Python threads that launch one or two programs without waiting."""
    with opened() as (group, _, idx, x):
        failures = []
        shared = group.sharded(lambda idx, x, scale: round_trip(group, idx, x * scale))

        def work(scale):
            try:
                own = group.sharded(lambda idx, x: round_trip(group, idx, x * scale))
                scales = group.put(np.full(8, scale, np.float32))

                def run(idx, x):
                    return shared(idx, x, scales) if same_program else own(idx, x)

                outs = [run(idx, x) for _ in range(count)]
                for out in outs:
                    expect(out, np.asarray(x) * scale)
            except BaseException as error:  # noqa: BLE001 - reported by the main thread
                failures.append(error)

        workers = [threading.Thread(target=work, args=(scale,)) for scale in (1.0, 2.0)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        if failures:
            raise failures[0]


def loops():
    """scan inside while inside cond: one call site runs many times in one launch."""
    with opened() as (group, _, idx, x):

        def program(idx, x):
            def turn(x, _):
                return round_trip(group, idx, x), None

            def turns(_, x):
                return jax.lax.scan(turn, x, None, 20)[0]

            y = jax.lax.fori_loop(0, 3, turns, x)
            return jax.lax.cond(y[0, 0] > -1e9, lambda y: turn(y, None)[0], lambda y: y, y)

        run = group.sharded(program)
        outs = [run(idx, x) for _ in range(3)]
        for out in outs:
            expect(out, x)


def overflow_errors(count):
    """on_overflow="error": every launch fails cleanly, with a psum after it; the next one works."""
    with opened(on_overflow="error", recv_capacity_per_rank=40) as (group, _, idx, x):
        bad = group.put(np.zeros((8, TOKENS, TOP_K), np.int32) + np.arange(TOP_K, dtype=np.int32))

        def program(idx, x):
            plan = group.prepare(idx)
            recv, _ = group.dispatch(x, None, plan)
            return jax.lax.psum(group.combine(recv, None, plan), "ep")

        run = group.sharded(program)
        good = np.asarray(x).sum(0) * TOP_K
        for _ in range(count):
            text = error_of(lambda: run(bad, x))
            for part in ("/CapacityOverflowError", '"rank": 0', '"demand": 128', '"capacity": 40'):
                if part not in text:
                    raise AssertionError(f"{part} must be in {text!r}")
            expect(run(idx, x)[0], good)


PROGRAMS = {
    "launches200": lambda: launches(200),
    "independent12": lambda: independent(12),
    "independent30": lambda: independent(30),
    "microbatches4": lambda: microbatches(4, awaited=True),
    "microbatches4_unawaited": lambda: microbatches(4, awaited=False),
    "microbatches12": lambda: microbatches(12, awaited=True),
    "psum50": lambda: with_psum(50),
    "train60": lambda: train_steps(60),
    "threads50": lambda: threads(50, same_program=False),
    "threads50_same_program": lambda: threads(50, same_program=True),
    "loops": loops,
    "overflow20": lambda: overflow_errors(20),
}


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    PROGRAMS[sys.argv[1]]()
    sys.stdout.write("done\n")
