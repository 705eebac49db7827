"""Counts rows that cross between nodes, and makes blocks for NCCL's own all-to-all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ep_runtime_bench.base import routing
from ep_runtime_bench.base.device_bench import Bench
from ep_runtime_client.ops.calls.call import Call
from ep_runtime_client.ops.calls.plan import arrays_type
from ep_runtime_client.ops.transports import nodes_plan


def shape_of(bench: Bench, tokens: int) -> tuple[int, int, int]:
    """[N * N, rows, H]: blocks of all ranks, in which as many rows cross as in one dispatch.

    Of the first routing; evened out over the ranks.
    """
    options, ranks = bench.options, bench.mesh.size
    idx = bench.idx(tokens, options.routing[0])
    remote = routing.traffic(idx, ranks, options.num_experts).remote_rows_per_rank
    return ranks * ranks, max(1, -(-round(remote) // max(ranks - 1, 1))), options.hidden


def blocks(bench: Bench, tokens: int) -> jax.Array:
    """Such blocks, made on the devices."""
    shape, dtype = shape_of(bench, tokens), bench.options.dtype
    made: jax.Array = jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=bench.spread)()
    return made


def rows(bench: Bench, call: Call, given: Mapping[str, Any]) -> tuple[int, int]:
    """Rows that one dispatch sends between nodes, and the least that would do.

    (0, 0) in a job of several processes, none of which sees the plans of all.
    """
    if bench.options.processes > 1:
        return 0, 0
    sent, least = nodes_plan.network_rows(call, arrays_type(call.group)(*given["plan"]))
    bench.say(f"nccl: a dispatch sends {sent} rows between nodes, {least} would do")
    return sent, least
