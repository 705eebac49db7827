"""Gradients of sharded weights by many equal calls, and which are wrong. Run by every process.

Every process makes its own shards, and the whole result on one of its devices to compare with.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import ep_runtime as ep

sys.path.append(str(Path(__file__).parents[1] / "modes"))

from rule_rows import ROWS, SLOW_ROWS, Row

ALL_ROWS = ROWS | SLOW_ROWS
EXPERTS = 8
LAYERS, TOKENS, HIDDEN, MLP = 2, 128, 32, 64


def run_rows(
    names: list[str],
    calls: int,
    *,
    width: int = 0,
    transport: str = "auto",
    dtype: str = "float32",
    tolerance: float = 1e-5,
) -> dict[str, list[int]]:
    """Runs each row's grouped_gemm forward and backward, and returns what `_wrong` counts.

    Args:
        names: of the rows.
        calls: of each program.
        width: K' and the last dim of N' that kernels take; 0: as the row says.
        transport: of the groups.
        dtype: of all but group sizes.
        tolerance: beside one device, of the largest value.
    """
    found = {}
    with ep.connect(timeout_s=60) as session:
        for number, name in enumerate(names):
            row = ALL_ROWS[name]
            if width:
                row = dataclasses.replace(row, k=width, n=(*row.n[:-1], width))
            group = session.create_group(
                f"row-{number}",
                _mesh(row.axes),
                ep_axis="ep",
                outer_axes=tuple(axis for axis in ("dp", "fsdp") if axis in row.axes),
                transport=transport,
                num_experts=EXPERTS,
                hidden_size=row.k,
                max_tokens_per_rank=256,
                max_top_k=2,
                alignment=128 if width else 32,
                op_timeout_s=60,
            )
            found[name] = _wrong(*_row_program(row, group, dtype), calls, tolerance)
            group.close()
    return found


def _row_program(row: Row, group: Any, dtype: str) -> tuple[Callable[..., Any], list[Any], Any]:
    """The row's program, its operands on the mesh, and the results of one device."""
    layer, slab = group.register_layer("moe", top_k=2), PartitionSpec(group.spec.token_axes)
    rng, slabs = np.random.default_rng(0), group.spec.num_slabs
    groups, alignment = group.spec.experts_per_rank, group.spec.alignment
    capacity = groups * alignment  # no rank fills it if an expert has no rows
    sizes = alignment * rng.integers(0, 2, (slabs, groups))
    shapes = [(slabs, capacity, row.k), (EXPERTS, row.k, *row.n), (slabs, capacity, *row.n)]
    lhs, rhs, grad = (np.asarray(rng.standard_normal(s), jnp.dtype(dtype)) for s in shapes)
    bias = np.asarray(rng.standard_normal((EXPERTS, *row.n)), rhs.dtype) if row.bias else None
    weight: Any = (rhs[:, :, 0], rhs[:, :, 1]) if row.pair else rhs
    operands = [lhs, weight, bias, sizes.astype(np.int32), grad]

    def step(layer: Any, *operands: Any) -> Any:
        out, d_lhs, *others = row.step(layer, *operands)
        used = jnp.arange(capacity) < operands[3].sum(-1)[:, None]  # values past it are undefined
        return _kept(out, used), _kept(d_lhs, used), *others

    given = [
        jax.tree.map(functools.partial(_put, group.mesh, spec), each)
        for each, spec in zip(operands, row.specs(slab), strict=True)
    ]
    want = jax.jit(functools.partial(step, None))(*operands)
    return jax.jit(functools.partial(step, layer)), given, want


def _kept(x: jax.Array, used: jax.Array) -> jax.Array:
    return jnp.where(used.reshape(*used.shape, *[1] * (x.ndim - 2)), x, 0)


def _mesh(axes: dict[str, int]) -> Mesh:
    """A mesh whose fsdp axis, or tp, is between processes; of few devices it has that one alone."""
    devices = np.array(jax.devices())
    across = "fsdp" if "fsdp" in axes else "tp"
    sizes = {across: axes[across], **axes}
    if devices.size < math.prod(axes.values()):
        sizes = {axis: devices.size if axis == across else 1 for axis in sizes}
    grid = devices.reshape([*sizes.values()])
    return Mesh(np.moveaxis(grid, 0, [*axes].index(across)), [*axes])


def _put(mesh: Mesh, spec: PartitionSpec, array: Any) -> jax.Array:
    return jax.make_array_from_callback(
        array.shape, NamedSharding(mesh, spec), lambda part: array[part]
    )


def _wrong(
    program: Callable[..., Any], given: list[Any], want: Any, calls: int, tolerance: float
) -> list[int]:
    """Calls with other bits than the first, and calls with values off by more than `tolerance`."""
    wanted = [np.asarray(x, np.float64) for x in jax.tree.leaves(want)]
    first: list[Any] = []
    others = off = 0
    for _ in range(calls):
        results = jax.tree.leaves(program(*given))
        found = [np.asarray(shard.data) for x in results for shard in x.addressable_shards]
        first = first or found
        others += not all(map(np.array_equal, found, first))
        off += not all(
            np.abs(np.asarray(shard.data, np.float64) - x[shard.index]).max()
            <= tolerance * np.abs(x).max()
            for result, x in zip(results, wanted, strict=True)
            for shard in result.addressable_shards
        )
    return [others, off]


def run_model(calls: int, *, transport: str, dtype: str, tolerance: float) -> list[int]:
    """The same of MoE blocks with biases in a scan with remat, weights over fsdp."""
    mesh = _mesh({"fsdp": 2, "ep": 4})
    alone = Mesh(np.array(jax.local_devices()[:1]).reshape(1, 1), mesh.axis_names)
    with ep.connect(timeout_s=60) as session, ep.connect("none") as other:
        groups = [
            each.create_group(
                name,
                where,
                ep_axis="ep",
                outer_axes=("fsdp",),
                transport=moved,
                num_experts=EXPERTS,
                hidden_size=HIDDEN,
                max_tokens_per_rank=TOKENS // where.size,
                max_top_k=2,
                max_token_dtype="float32",
                op_timeout_s=60,
            )
            for each, name, where, moved in (
                (session, "all", mesh, transport),
                (other, f"alone-{jax.process_index()}", alone, "xla"),
            )
        ]
        stacks = [group.register_layer_stack("moe", LAYERS, top_k=2) for group in groups]
        spec = ep.MoEParams(
            PartitionSpec(),
            PartitionSpec(None, "ep", "fsdp"),
            PartitionSpec(None, "ep", None, "fsdp"),
            PartitionSpec(None, "ep"),
            PartitionSpec(None, "ep", "fsdp"),
        )
        keys = jax.random.split(jax.random.key(0), LAYERS)
        params = jax.vmap(lambda key: ep.init_moe_params(key, stacks[1][0], MLP, use_bias=True))(
            keys
        )
        x = np.random.default_rng(0).standard_normal((TOKENS, HIDDEN)).astype(np.float32)

        def grads(stack: Any, params: Any, x: Any) -> Any:
            @jax.checkpoint
            def block(x: Any, turn: Any) -> Any:
                number, params = turn
                return x + ep.moe(stack[number], x, params, compute_dtype=jnp.dtype(dtype))[0], None

            def loss(params: Any, x: Any) -> Any:
                numbers = jnp.arange(LAYERS, dtype=jnp.int32)
                return jnp.square(jax.lax.scan(block, x, (numbers, params))[0]).sum()

            return jax.grad(loss, argnums=(0, 1))(params, x)

        want = jax.jit(functools.partial(grads, stacks[1]))(params, x)
        host = jax.tree.map(np.asarray, params)
        given = [
            jax.tree.map(lambda array, each: _put(mesh, each, array), host, spec),
            _put(mesh, PartitionSpec(("fsdp", "ep")), x),
        ]
        program = jax.jit(functools.partial(grads, stacks[0]))
        return _wrong(program, given, want, calls, tolerance)


def times_full() -> int:
    """Counts, with full_sockets.c, how often a socket of this process was full."""
    return ctypes.CDLL(None).times_full()
