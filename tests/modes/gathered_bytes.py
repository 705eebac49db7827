"""`python tests/modes/gathered_bytes.py`: bytes all-gathered by a step of two grouped GEMMs.

One forward and backward of wi [E, H, 2, M] and wo [E, M, H] with H over fsdp, per device, as the
compiled programs of 8 CPU devices say, for bf16 and for each recipe.
"""

from __future__ import annotations

import sys
from typing import Any

if __name__ == "__main__":
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).parents[1]))

import collectives
import fakes
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

import ep_runtime as ep
from ep_runtime_client.ops.quantize.formats import recipes

RECIPES = {
    "bf16": recipes.BF16(),
    "TensorScaling": recipes.TensorScaling(),
    "BlockScaling": recipes.BlockScaling(),
    "MXFP8": recipes.MXFP8(),
}
EXPERTS, HIDDEN, MLP, CAPACITY = 8, 512, 256, 32


def figures() -> dict[str, int]:
    """Recipe -> bytes of the results of all all-gathers on one device."""
    group = fakes.local_group(
        {"dp": 2, "fsdp": 2, "ep": 2},
        outer_axes=("dp", "fsdp"),
        transport="xla",
        partitioning="rule",
        num_experts=EXPERTS,
        hidden_size=HIDDEN,
    )
    layer = group.register_layer("moe", top_k=2)
    try:
        return {name: _gathered(group, layer, recipe) for name, recipe in RECIPES.items()}
    finally:
        group.close()


def _gathered(group: Any, layer: Any, recipe: Any) -> int:
    def step(rows: Any, wi: Any, wo: Any, sizes: Any) -> Any:
        def forward(rows: Any, wi: Any, wo: Any) -> Any:
            hidden = ep.grouped_gemm(rows, wi, sizes, layer=layer, recipe=recipe)
            return ep.grouped_gemm(
                hidden[:, :, 0] * hidden[:, :, 1], wo, sizes, layer=layer, recipe=recipe
            )

        out, pull = jax.vjp(forward, rows, wi, wo)
        return out, *pull(out)

    slab, spec = PartitionSpec(group.spec.token_axes), PartitionSpec
    operands = [
        ((8, CAPACITY, HIDDEN), jnp.bfloat16, slab),
        ((EXPERTS, HIDDEN, 2, MLP), jnp.bfloat16, spec("ep", "fsdp")),
        ((EXPERTS, MLP, HIDDEN), jnp.bfloat16, spec("ep", None, "fsdp")),
        ((8, EXPERTS // group.spec.ep_size), jnp.int32, slab),
    ]
    shapes = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(group.mesh, each))
        for shape, dtype, each in operands
    ]
    return collectives.moved_bytes(jax.jit(step).lower(*shapes).compile(), "all-gather")


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    found = figures()
    for name, moved in found.items():
        print(f"{name:14} {moved:10,} bytes  {moved / found['bf16']:.3f} of bf16")  # noqa: T201
