"""A training loop of several processes that writes its parameters to disk after every step."""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from cases import SMALL
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import ep_runtime as ep

EXPERTS, TOKENS = 8, 8


def train(
    folder: Path,
    say: Callable[..., None],
    *,
    tokens: int = TOKENS,
    hidden: int = 16,
    inner: int = 32,
    **settings: Any,
) -> None:
    """Runs steps without end, and reports after the third. Gradients are summed over all processes.

    `settings` are more arguments of create_group.
    """
    with ep.connect() as session, ep.translate_errors():
        connected = time.monotonic()
        mesh = Mesh(np.array(jax.devices()), ("ep",))
        sizes = {"hidden_size": hidden, "max_tokens_per_rank": tokens, "max_token_dtype": "float32"}
        group = session.create_group("training", mesh, **SMALL | sizes | settings)
        formed = time.monotonic()
        layers = [group.register_layer(f"moe/{i}", top_k=2) for i in range(2)]

        def put(array: Any, spec: PartitionSpec) -> jax.Array:
            sharding = NamedSharding(mesh, spec)
            return jax.make_array_from_callback(array.shape, sharding, lambda part: array[part])

        draw = np.random.default_rng(0).standard_normal
        x = put(draw((tokens * mesh.size, hidden)).astype(np.float32), PartitionSpec("ep"))
        whole, split = PartitionSpec(), PartitionSpec("ep")
        params = [
            {
                "router": put(draw((hidden, EXPERTS)).astype(np.float32), whole),
                "wi": put(draw((EXPERTS, hidden, 2, inner)).astype(np.float32) / 8, split),
                "wo": put(draw((EXPERTS, inner, hidden)).astype(np.float32) / 8, split),
            }
            for _ in layers
        ]

        def loss_fn(params: Any, x: jax.Array) -> jax.Array:
            for layer, own in zip(layers, params, strict=True):
                x = x + ep.moe(layer, x, ep.MoEParams(**own))[0]
            return (x**2).mean()

        @jax.jit
        def step(params: Any, x: jax.Array) -> Any:
            loss, grads = jax.value_and_grad(loss_fn)(params, x)
            return jax.tree.map(lambda p, g: p - 1e-3 * g, params, grads), loss

        for number in itertools.count():
            params, loss = step(params, x)
            sys.stdout.write(f"step {number} loss {float(loss):.6f}\n")
            sys.stdout.flush()
            save(folder, group.check(params))
            if number == 2:
                say(connected=connected, formed=formed, reattached=group.reattached)


def save(folder: Path, params: Any) -> None:
    """Saves this process's shards, in place of its last ones."""
    leaves = [np.asarray(s.data) for p in jax.tree.leaves(params) for s in p.addressable_shards]
    written = folder / f"{jax.process_index()}.tmp.npz"
    np.savez(written, *leaves)
    os.replace(written, folder / f"{jax.process_index()}.npz")


def is_finite(folder: Path) -> bool:
    """Whether no saved value is NaN."""
    files = [*folder.glob("?.npz")]
    assert files
    return all(np.isfinite(leaf).all() for file in files for leaf in np.load(file).values())
