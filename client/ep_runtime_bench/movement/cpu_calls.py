"""The calls that `bench dispatch combine` times on CPU, in each of its processes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import ep_runtime as ep
from ep_runtime_bench.base.device_bench import meeting
from ep_runtime_bench.base.options import ROW_ITEM_BYTES, BenchOptions, Sample, Transport
from ep_runtime_bench.base.timing import in_turn
from ep_runtime_bench.movement.memcpy import MEMCPY, Memcpy
from ep_runtime_client.groups.group import Group
from ep_runtime_client.jobs.members import Member, start_jax
from ep_runtime_client.sessions.session import Session

WARMUP = 3

Call = Callable[[], object]


def measure(options: BenchOptions, address: str, member: Member) -> list[Sample]:
    """Measures every row size, all transports and memcpy in turns, in the same order everywhere."""
    start_jax(options.devices, member)
    samples: list[Sample] = []
    with ep.connect(address) as session:
        mesh = Mesh(np.array(jax.devices()), ("ep",))
        for row_bytes in options.row_bytes:
            samples += _measure_size(options, session, mesh, row_bytes)
    return samples


def _measure_size(
    options: BenchOptions, session: Session, mesh: Mesh, row_bytes: int
) -> list[Sample]:
    """Returns the samples of one row size: every op, transport and memcpy."""
    memcpy = Memcpy(options.rows_for(row_bytes) * row_bytes, options.processes)
    groups = [
        _make_group(options, session, mesh, row_bytes, transport)
        for transport in options.transports
    ]
    calls = [_calls(options, group, row_bytes) for group in groups]
    samples = []
    for op in ("dispatch", "combine"):
        if op not in options.benches:
            continue
        subjects: dict[str, Call] = {
            transport: call[op] for transport, call in zip(options.transports, calls, strict=True)
        }
        seconds = in_turn(
            {**subjects, MEMCPY: memcpy},
            warmup=WARMUP,
            repeats=options.repeats,
            before=meeting(mesh) if options.processes > 1 else None,
        )
        samples += [Sample(op, name, row_bytes, taken) for name, taken in seconds.items()]
    memcpy.close()
    for group in groups:
        group.close()
    return samples


def _put(array: Any, mesh: Mesh) -> jax.Array:
    """Puts the array on the mesh, dim 0 over "ep"; every process has the whole array."""
    sharding = NamedSharding(mesh, PartitionSpec("ep"))
    return jax.make_array_from_callback(array.shape, sharding, lambda part: array[part])


def _make_group(
    options: BenchOptions, session: Session, mesh: Mesh, row_bytes: int, transport: Transport
) -> Group:
    return session.create_group(
        f"bench-{transport}-{row_bytes}",
        mesh,
        ep_axis="ep",
        num_experts=options.num_experts,
        hidden_size=row_bytes // ROW_ITEM_BYTES,
        max_tokens_per_rank=options.tokens_for(row_bytes),
        capacity_factor=2.0,
        max_top_k=options.top_k,
        alignment=16,
        transport=transport,
    )


def _calls(options: BenchOptions, group: Group, row_bytes: int) -> Mapping[str, Call]:
    """Returns a compiled dispatch and combine on warm operands; each waits for its result."""
    layer = group.register_layer("layer", top_k=options.top_k)
    tokens = options.tokens_for(row_bytes) * options.devices
    rng = np.random.default_rng(0)
    # The first K experts of a random order: distinct, and even over experts.
    order = rng.random((tokens, options.num_experts)).argsort(axis=1)
    topk_idx = _put(order[:, : options.top_k].astype(np.int32), group.mesh)
    values = rng.standard_normal((tokens, row_bytes // ROW_ITEM_BYTES), np.float32)
    x = _put(values.astype(jnp.bfloat16), group.mesh)
    plan = jax.jit(functools.partial(ep.prepare, layer))(topk_idx)
    dispatch = jax.jit(lambda x, plan: ep.dispatch(layer, x, None, plan=plan))
    combine = jax.jit(lambda dispatched, y: ep.combine(layer, dispatched, y))
    dispatched = dispatch(x, plan)
    most = max(int(np.max(part.data)) for part in dispatched.num_recv.addressable_shards)
    if most > group.capacity_per_rank:
        raise RuntimeError(f"{most} rows demanded, {group.capacity_per_rank} fit: rows are dropped")
    return {
        "dispatch": lambda: jax.block_until_ready(dispatch(x, plan)),
        "combine": lambda: jax.block_until_ready(combine(dispatched, dispatched.tokens)),
    }
