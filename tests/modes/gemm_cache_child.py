"""`python gemm_cache_child.py DIRECTORY`: compiles programs with sharding rules, counting hits.

Prints one JSON value as its last line: per variant hits, misses, and whether the result is right.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ.setdefault("PJRT_NPROC", "32")

import fakes
import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import ep_runtime as ep

# Programs of all variants read alike before they are partitioned.
VARIANTS: dict[str, dict[str, Any]] = {
    "base": {},
    "alignment": {"alignment": 16},
    "tokens": {"max_tokens_per_rank": 64},
}


def compiled(settings: dict[str, Any], events: list[str]) -> dict[str, Any]:
    group = fakes.local_group(
        axes={"fsdp": 4, "ep": 2},
        name="cached",
        outer_axes="fsdp",
        transport="xla",
        partitioning="rule",
        num_experts=4,
        **settings,
    )
    layer = group.register_layer("moe", top_k=2)
    slab = NamedSharding(group.mesh, PartitionSpec(group.spec.token_axes))
    weight = NamedSharding(group.mesh, PartitionSpec("ep", "fsdp"))
    lhs, rhs = np.ones((8, 16, 16), np.float32), np.ones((4, 16, 8), np.float32)
    sizes = np.full((8, 2), 8, np.int32)
    operands = [jax.device_put(lhs, slab), jax.device_put(rhs, weight), jax.device_put(sizes, slab)]
    jax.block_until_ready(operands)
    lowered = jax.jit(lambda *args: ep.grouped_gemm(*args, layer=layer)).lower(*operands)
    del events[:]
    run = lowered.compile()
    counted = list(events)
    right = bool(np.array_equal(run(*operands), np.full((8, 16, 8), 16, np.float32)))
    group.close()
    return {
        "hits": counted.count("/jax/compilation_cache/cache_hits"),
        "misses": counted.count("/jax/compilation_cache/cache_misses"),
        "right": right,
    }


def main(directory: str) -> None:
    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_compilation_cache_dir", directory)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    events: list[str] = []
    jax.monitoring.register_event_listener(lambda event, **_: events.append(event))
    print(json.dumps({name: compiled(each, events) for name, each in VARIANTS.items()}))  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1])
