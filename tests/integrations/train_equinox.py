"""`train_equinox.py equinox|haiku DTYPE ours|dense`: the page's code, ten steps; prints losses.

With dense, `ep.moe` is plain jnp that sends every token to every expert.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import doc_pages
import jax
import jax.numpy as jnp

import ep_runtime as ep

PAGE = doc_pages.ROOT / "docs/integrations/equinox.md"


def dense(
    layer: ep.EpLayer, x: jax.Array, params: Any, *, aux_loss_coeff: float
) -> tuple[jax.Array, jax.Array]:
    """Mixtral's block: a softmax over the picked logits, and the loss of Switch Transformers."""
    logits = jnp.dot(x.astype(jnp.float32), params.router.astype(jnp.float32), precision="highest")
    weights, chosen = jax.lax.top_k(logits, layer.top_k)
    picked = jax.nn.one_hot(chosen, logits.shape[-1])  # [B, S, K, E]
    shares = (picked * jax.nn.softmax(weights)[..., None]).sum(2)
    gate, up = (jnp.einsum("bsh,ehm->bsem", x, params.wi[:, :, i]) for i in (0, 1))
    y = jnp.einsum("bsem,emh->bseh", jax.nn.silu(gate) * up, params.wo)
    y = (y.astype(jnp.float32) * shares[..., None]).sum(2).astype(x.dtype)
    load = picked.sum(2).mean((0, 1)) / layer.top_k
    balance = logits.shape[-1] * (load * jax.nn.softmax(logits).mean((0, 1))).sum()
    return y, aux_loss_coeff * balance


def haiku_losses(names: dict[str, Any], dtype: str) -> list[float]:
    """Only the experts are trained, to turn each token round."""
    block, optimizer, weights = names["block"], names["optimizer"], names["weights"]
    shape = names["BATCH"], names["SEQ"], names["HIDDEN"]
    x = jax.device_put(jax.random.normal(jax.random.key(1), shape), names["rows"])

    def loss_fn(weights: Any) -> jax.Array:
        narrow = jax.tree.map(lambda leaf: leaf.astype(dtype), weights)
        y, aux = block.apply(narrow, x.astype(dtype))
        return jnp.square(y.astype(jnp.float32) - x[..., ::-1]).mean() + aux

    @jax.jit
    def step(weights: Any, state: Any) -> tuple[Any, Any, jax.Array]:
        loss, grads = jax.value_and_grad(loss_fn)(weights)
        updates, state = optimizer.update(grads, state, weights)
        return jax.tree.map(jnp.add, weights, updates), state, loss

    state, losses = optimizer.init(weights), []
    for _ in range(10):
        weights, state, loss = step(weights, state)
        losses.append(float(loss))
    return losses


def main(library: str, dtype: str, experts: str) -> None:
    if experts == "dense":
        ep.moe = dense
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in doc_pages.blocks(PAGE):
        if block.language == "python" and (library == "haiku" or "haiku" not in block.markers[0]):
            code = compile("\n" * (block.line - 1) + block.code, str(PAGE), "exec")
            exec(code, names)
    if library == "haiku":
        losses = haiku_losses(names, dtype)
    else:
        losses = names["losses"] if dtype == "float32" else names["train"](jnp.dtype(dtype))
    sys.stdout.write(f"{json.dumps(losses)}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
