"""Compiles every row of the table of sharding rules for eight H200s where there are none.

    python tests/gpu/tools/rows_ahead.py [part of a row's name ...]

Needs what `compile_ahead.py` needs. Forward and backward of grouped_gemm under plain jit, sizes
that kernels take, bf16. Writes a line for each row: the collectives of the compiled program with
the bytes that each kind brings to a device. The exit code is 1 where a row moves other kinds than
the table says, or other bytes with partitioning "auto" than with "rule", or where no kernel
multiplies.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2] / "modes"))

import collectives
import custom_calls
import fakes
import jax
import jax.numpy as jnp
from gpu.tools.compile_ahead import devices, say
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rule_rows import ROWS, SLOW_ROWS, Row

from ep_runtime import native

EXPERTS, CAPACITY, WIDTH = 8, 512, 512


def lowered(row: Row, partitioning: str) -> Any:
    mesh = Mesh(devices(8).reshape(tuple(row.axes.values())), tuple(row.axes))
    group = fakes.local_group(
        mesh=mesh,
        outer_axes=tuple(axis for axis in ("dp", "fsdp") if axis in row.axes),
        transport="nvlink",
        partitioning=partitioning,
        num_experts=EXPERTS,
        hidden_size=row.k,
        max_token_dtype="bfloat16",
        alignment=128,
    )
    layer = group.register_layer("moe", top_k=2)
    slabs, slab = group.spec.num_slabs, PartitionSpec(group.spec.token_axes)

    def array(spec: PartitionSpec, *dims: int, dtype: Any = jnp.bfloat16) -> Any:
        return jax.ShapeDtypeStruct(dims, dtype, sharding=NamedSharding(mesh, spec))

    of_lhs, of_rhs, of_bias, of_sizes, of_grad = row.specs(slab)
    weight = array(of_rhs, EXPERTS, row.k, *(row.n[-1:] if row.pair else row.n))
    return jax.jit(functools.partial(row.step, layer)).lower(
        array(of_lhs, slabs, CAPACITY, row.k),
        (weight, weight) if row.pair else weight,
        array(of_bias, EXPERTS, *row.n) if row.bias else None,
        array(of_sizes, slabs, EXPERTS // group.spec.ep_size, dtype=jnp.int32),
        array(of_grad, slabs, CAPACITY, *row.n),
    )


def moved(compiled: Any) -> dict[str, int]:
    """Bytes by the kind of collective."""
    kinds = sorted({kind for kind, _ in collectives.count(compiled)})
    return {kind: collectives.moved_bytes(compiled, kind) for kind in kinds}


def wide(row: Row) -> Row:
    """The same of sizes that kernels take."""
    return dataclasses.replace(row, k=WIDTH, n=(*row.n[:-1], WIDTH))


def faults(row: Row) -> list[str]:
    compiled = lowered(row, "auto").compile()
    found, ruled = moved(compiled), moved(lowered(row, "rule").compile())
    calls = custom_calls.compiled(compiled.as_text())
    told = ", ".join(f"{kind} {size:,}" for kind, size in found.items())
    say(f"{told} bytes; {calls.total()} calls\n")
    wrong = [] if found == ruled else [f'"rule" moves {ruled}']
    kinds = {kind for kind, _ in row.moved}
    if {*found} != kinds:
        wrong.append(f"the table says {sorted(kinds)}")
    if not any("gemm" in name for name in calls):
        wrong.append(f"no product by a kernel: {sorted(calls)}")
    return wrong


def main(parts: list[str]) -> int:
    if not native.library_path("cuda").exists():
        sys.exit("built without EP_RUNTIME_CUDA=ON")
    wrong = 0
    for name, row in (ROWS | SLOW_ROWS).items():
        if parts and not any(part in name for part in parts):
            continue
        say(f"{name}, {' x '.join(f'{axis}={size}' for axis, size in row.axes.items())}: ")
        for line in faults(wide(row)):
            wrong += 1
            say(f"    {line}\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
