"""train.py of the deployments: a job of several processes; one dies in the first attempt.

Says what it found, in its working directory, which outlives the attempts.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import jax

jax.config.update("jax_num_cpu_devices", 2)
# Sets the rank as the manifests do, unless a launcher that JAX knows has set it.
if "NUM_PROCESSES" in os.environ:
    jax.distributed.initialize(
        num_processes=int(os.environ["NUM_PROCESSES"]),
        process_id=int(os.environ["JOB_COMPLETION_INDEX"]),
    )
else:
    jax.distributed.initialize()

import numpy as np  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: E402

import ep_runtime as ep  # noqa: E402

kept = Path.cwd()
with ep.connect() as session, ep.translate_errors():
    group = session.create_group(
        "moe",
        Mesh(np.array(jax.devices()), ("ep",)),
        ep_axis="ep",
        num_experts=8,
        hidden_size=16,
        max_tokens_per_rank=8,
        max_top_k=2,
        alignment=8,
        max_token_dtype="float32",
        transport="memfd",
        retain_s=60,
    )
    layer = group.register_layer("moe/0", top_k=1)
    ranks = group.spec.world_size
    sharding = NamedSharding(group.mesh, PartitionSpec("ep"))

    def put(array: np.ndarray) -> jax.Array:
        return jax.make_array_from_callback(array.shape, sharding, lambda part: array[part])

    tokens = put(np.arange(8 * ranks * 16, dtype=np.float32).reshape(-1, 16))
    chosen = put((np.arange(8 * ranks, dtype=np.int32) % 8)[:, None])

    @jax.jit
    def step(tokens: jax.Array, chosen: jax.Array) -> jax.Array:
        sent = ep.dispatch(layer, tokens, chosen)
        return ep.combine(layer, sent, sent.tokens * 2)

    out = group.check(step(tokens, chosen))
    for got, given in zip(out.addressable_shards, tokens.addressable_shards, strict=True):
        np.testing.assert_array_equal(got.data, np.asarray(given.data) * 2)
    said = {
        "process": jax.process_index(),
        "node_size": group.spec.ranks_per_node,
        "reattached": group.reattached,
        "generation": group.generation,
    }
    with (kept / f"said-{jax.process_index()}").open("a") as file:
        file.write(json.dumps(said) + "\n")
    died = kept / "died"
    if jax.process_index() == jax.process_count() - 1 and not died.exists():
        died.touch()
        os._exit(137)  # like SIGKILL, which a container's first process cannot send to itself
    group.check(step(tokens, chosen))
