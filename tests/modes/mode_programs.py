"""The same small block of experts for every mode, and what it must cause in a program."""

from __future__ import annotations

import re
from typing import Any

import cases
import fakes
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import ep_runtime as ep

TOP_K, EXPERTS, HIDDEN = 2, 8, 16
SPLIT = PartitionSpec(("dp", "ep"))
# Mesh and axes of the group, and the spec of its tokens.
MESHES: dict[str, tuple[dict[str, int], dict[str, Any], PartitionSpec]] = {
    "ep": ({"ep": 8}, {}, PartitionSpec("ep")),
    "dp x ep": ({"dp": 2, "ep": 4}, {"outer_axes": "dp"}, PartitionSpec(("dp", "ep"))),
    "two outer axes": (
        {"dp": 2, "fsdp": 2, "ep": 2},
        {"outer_axes": ("dp", "fsdp")},
        PartitionSpec(("dp", "fsdp", "ep")),
    ),
    "ep is a tuple": (
        {"a": 2, "dp": 2, "b": 2},
        {"outer_axes": "dp", "ep_axis": ("a", "b")},
        PartitionSpec(("dp", "a", "b")),
    ),
    "tp beside": ({"dp": 2, "ep": 2, "tp": 2}, {"outer_axes": "dp"}, PartitionSpec(("dp", "ep"))),
    "one device": ({"dp": 1, "ep": 1}, {"outer_axes": "dp"}, PartitionSpec(("dp", "ep"))),
}
COLLECTIVE = re.compile(
    r"\b(all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
)


def draw(tokens: int = 32, seed: int = 0) -> tuple[Any, Any, Any]:
    """tokens [T, H], topk_idx [T, K], topk_weights [T, K] as NumPy arrays."""
    rng = np.random.default_rng(seed)
    case = cases.Case("", tokens=tokens, num_experts=EXPERTS, top_k=TOP_K)
    idx = cases.routing(case, 1, seed)[0]
    weights = rng.uniform(0.2, 1, (tokens, TOP_K)).astype(np.float32)
    return rng.standard_normal((tokens, HIDDEN)).astype(np.float32), idx, weights


def block(layer: Any, x: Any, idx: Any, weights: Any, **options: Any) -> Any:
    """A stand-in for experts: tanh of the rows, weighted."""
    sent = ep.dispatch(layer, x, idx, weights, **options)
    return ep.combine(layer, sent, jnp.tanh(sent.tokens), weights=sent.weights)


def loss(layer: Any, x: Any, idx: Any, weights: Any, **options: Any) -> Any:
    """Sums per token, so that only its own sum crosses shards."""
    return jnp.sin(block(layer, x, idx, weights, **options))


def meant(x: Any, weights: Any) -> Any:
    return np.tanh(x) * weights.sum(-1, keepdims=True)


def meant_grads(x: Any, weights: Any) -> Any:
    """Gradients of the sum of `loss` with respect to x and weights."""
    rows, total = np.tanh(x), weights.sum(-1, keepdims=True)
    slope = np.cos(rows * total)
    d_weights = (slope * rows).sum(-1, keepdims=True)
    return slope * total * (1 - rows**2), np.broadcast_to(d_weights, weights.shape)


def put(group: fakes.LocalGroup, spec: PartitionSpec, *arrays: Any) -> list[Any]:
    return [jax.device_put(x, NamedSharding(group.mesh, spec)) for x in arrays]


def collectives(compiled: Any) -> list[str]:
    """Collectives of a compiled program, by name."""
    return COLLECTIVE.findall(compiled.as_text())


def assert_close(got: Any, want: Any) -> None:
    for left, right in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(left, right, rtol=2e-5, atol=2e-5)


def grads_of(function: Any) -> Any:
    """Compilable gradient of sum(function(x, idx, weights)) in x and weights."""
    return jax.jit(jax.grad(lambda x, idx, w: function(x, idx, w).sum(), argnums=(0, 2)))
