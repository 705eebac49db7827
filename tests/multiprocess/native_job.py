"""Each process of the native tests: runs programs on groups that the test made.

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
import numpy as np
from native_group import NativeGroup
from native_memory import open_memory
from round_trips import expect, host_inputs, inputs, round_trip

from ep_runtime import errors


@contextlib.contextmanager
def open_groups(**options: Any) -> Iterator[list[NativeGroup]]:
    """Opens the groups of TEST_GROUPS, over all devices of the job."""
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
    """Returns class, text, fields and seconds of the error from the launch, or from the group.

    Of a launch that lost a peer on its way the values are NaN.
    """
    started, text = time.monotonic(), None
    try:
        out = jax.block_until_ready(launch())
        text = group.check() if group is not None else None
        for shard in out.addressable_shards if text is not None else ():
            np.testing.assert_array_equal(shard.data, np.full(shard.data.shape, np.nan))
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        text = str(error)
    seconds = time.monotonic() - started
    if text is None:
        return {"kind": "none", "text": "", "fields": {}, "seconds": seconds}
    found = errors.parse(text)
    fields, kind = found.fields if found else {}, type(found).__name__
    return {"kind": kind, "text": str(found or text), "fields": fields, "seconds": seconds}


def soak(groups: list[NativeGroup], steps: int, seed: int) -> None:
    """Runs steps over all groups; each process is randomly late."""
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
