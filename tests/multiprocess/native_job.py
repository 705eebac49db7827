"""What the processes of the native tests run: programs on groups that the test made.

`open_groups` opens them; every other function is a program, checked value by value.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from native_group import NativeGroup
from native_memory import open_memory
from round_trips import HIDDEN, TOP_K, expect, host_inputs, inputs, round_trip

from ep_runtime import errors

Program = tuple[Any, Any, Any]


@contextlib.contextmanager
def open_groups(**options: Any) -> Iterator[list[NativeGroup]]:
    """The groups of TEST_GROUPS, over all devices of the job."""
    ours = [r for r, d in enumerate(jax.devices()) if d.process_index == jax.process_index()]
    with contextlib.ExitStack() as stack:
        groups = []
        for ticket in json.loads(os.environ["TEST_GROUPS"]):
            settings = dict(ticket["settings"])
            group = NativeGroup(
                {"ep": len(jax.devices())},
                name=ticket["name"],
                top_k=settings.pop("max_top_k"),
                memory=open_memory(ticket),
                local_ranks=ours,
                **options,
                **settings,
            )
            groups.append(stack.enter_context(group))
        yield groups


def failure_of(launch: Any, group: NativeGroup | None = None) -> dict[str, Any]:
    """Class, text, fields and seconds of the error that the launch, or then the group, tells.

    Of a launch that lost a peer on its way the values are NaN.
    """
    started, text, nan = time.monotonic(), None, False
    try:
        out = jax.block_until_ready(launch())
        text = group.check() if group is not None else None
        nan = text is not None
        for shard in out.addressable_shards if nan else ():
            np.testing.assert_array_equal(shard.data, np.full(shard.data.shape, np.nan))
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        text = str(error)
    seconds = time.monotonic() - started
    if text is None:
        return {"kind": "none", "text": "", "fields": {}, "seconds": seconds}
    found = errors.parse(text)
    fields = found.fields if found else {}
    kind = type(found).__name__
    return {
        "kind": kind,
        "text": str(found or text),
        "fields": fields,
        "seconds": seconds,
        "nan": nan,
    }


def loops(group: NativeGroup) -> None:
    """One call site that runs many times in a launch."""
    idx, x = inputs(group)

    def program(idx: Any, x: Any) -> Any:
        def turn(x: Any, _: None) -> Any:
            return round_trip(group, idx, x), None

        def turns(_: int, x: Any) -> Any:
            return jax.lax.scan(turn, x, None, 10)[0]

        y = jax.lax.fori_loop(0, 3, turns, x)
        return jax.lax.cond(y[0, 0] > -1e9, lambda y: turn(y, None)[0], lambda y: y, y)

    run = group.sharded(program)
    for _ in range(3):
        expect(run(idx, x), host_inputs(group.spec.world_size)[1])


def twins(group: NativeGroup, runs: int) -> None:
    """30 layers with equal calls that do not depend on each other, over two lanes."""
    idx, x = inputs(group)
    want = host_inputs(group.spec.world_size)[1]

    def program(idx: Any, x: Any) -> Any:
        return [round_trip(group, idx, x * float(i + 1), index=i) for i in range(30)]

    run = group.sharded(program)
    for _ in range(runs):
        for i, out in enumerate(run(idx, x)):
            expect(out, want * float(i + 1))


def microbatches(group: NativeGroup, runs: int) -> None:
    """Four independent chains of matmul, dispatch, matmul, combine on one handle."""
    idx, x = inputs(group)
    want = host_inputs(group.spec.world_size)[1]
    eye = jnp.eye(HIDDEN)

    def program(idx: Any, x: Any) -> Any:
        outs = []
        for i in range(4):
            y = x * float(i + 1)
            for _ in range(2):
                plan = group.prepare(idx)
                recv, _ = group.dispatch(y @ eye, None, plan)
                used = jnp.arange(recv.shape[0])[:, None] < plan[7].sum()
                y = group.combine(jnp.where(used, recv, 0) @ eye, None, plan) / TOP_K
            outs.append(y)
        return outs

    run = group.sharded(program)
    for outs in [run(idx, x) for _ in range(runs)]:
        for i, out in enumerate(outs):
            expect(out, want * float(i + 1))


def inner_jits(group: NativeGroup) -> None:
    """One jitted function called at several places: XLA makes several calls of it."""
    idx, x = inputs(group)
    want = host_inputs(group.spec.world_size)[1]
    trip = jax.jit(lambda idx, x: round_trip(group, idx, x))

    def program(idx: Any, x: Any) -> Any:
        return [trip(idx, x * float(i + 1)) for i in range(4)], trip(idx, trip(idx, x))

    run = group.sharded(program)
    for _ in range(5):
        outs, twice = run(idx, x)
        expect(twice, want)
        for i, out in enumerate(outs):
            expect(out, want * float(i + 1))


def launches(group: NativeGroup, count: int) -> None:
    """`count` launches without waiting, with XLA's own collectives between the calls."""
    idx, x = inputs(group)
    want = host_inputs(group.spec.world_size)[1]

    def program(idx: Any, x: Any) -> Any:
        total = jax.lax.psum(x, "ep")
        out = round_trip(group, idx, x)
        return out, total + jax.lax.psum(round_trip(group, idx, out) - out, "ep")

    run = group.sharded(program)
    for out, total in [run(idx, x) for _ in range(count)]:
        expect(out, want)
        expect(total, np.broadcast_to(want.sum(0), want.shape))


def soak(groups: list[NativeGroup], steps: int, seed: int) -> None:
    """Steps over all groups, each process late by chance."""
    delays = np.random.default_rng(seed)
    idx, x = inputs(groups[0])
    want = host_inputs(groups[0].spec.world_size)[1]

    def program(idx: Any, x: Any) -> Any:
        return [round_trip(group, idx, x * float(i + 1)) for i, group in enumerate(groups)]

    run = groups[0].sharded(program)
    waiting: list[Any] = []
    for _ in range(steps):
        if delays.random() < 0.05:
            time.sleep(float(delays.random()) * 0.02)
        waiting.append(run(idx, x))
        if len(waiting) < 8:
            continue
        for outs in waiting:
            for i, out in enumerate(outs):
                expect(out, want * float(i + 1))
        waiting = []
    jax.block_until_ready(waiting)
