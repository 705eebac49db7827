"""A block of experts and its gradients in the processes of a job, against float64 arithmetic."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gpu.jobs.layouts import TRANSPORT, TRIAL
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import ep_runtime as ep

TOKENS, HIDDEN, INNER, TOP_K, LOCAL = 24, 64, 32, 2, 3  # tokens and experts of a rank
_RUNS = 4  # from the third run on, a program runs as a command buffer
# Errors relative to a whole array's root mean square: bfloat16 has 8 bits, tf32 has 11.
_RMS = {"bfloat16": 0.02, "float32": 0.0025}
# Workspace and dtype of rows.
BLOCKS: dict[str, tuple[Any, str]] = {
    "whole": ("auto", "bfloat16"),
    "in parts": (1e-6, "bfloat16"),
    "float32": ("auto", "float32"),
    "float32 in parts": (1e-6, "float32"),
}


def run_blocks(names: list[str]) -> list[str]:
    """Runs each of BLOCKS that is named, in every process of the job."""
    with ep.connect(timeout_s=60.0) as session:
        for name in names:
            _run(session, name)
    return names


def _run(session: ep.Session, name: str) -> None:
    mesh, (workspace, dtype) = Mesh(np.array(jax.devices()), ("ep",)), BLOCKS[name]
    group = session.create_group(
        f"block-{name.replace(' ', '-')}",
        mesh,
        ep_axis="ep",
        transport=TRANSPORT,
        num_experts=LOCAL * mesh.size,
        hidden_size=HIDDEN,
        max_tokens_per_rank=TOKENS,
        max_top_k=TOP_K,
        max_token_dtype="float32",
        alignment=8,
        op_timeout_s=60.0,
        workspace=workspace,
    )
    layer = group.register_layer("moe", top_k=TOP_K)
    drawn = _drawn(mesh.size)
    sharding = NamedSharding(mesh, PartitionSpec("ep"))
    given = [
        jax.make_array_from_callback(x.shape, sharding, lambda part, x=x: x[part]) for x in drawn
    ]

    @jax.jit
    def graded(x: Any, weights: Any, gate: Any, up: Any, wo: Any, idx: Any) -> Any:
        def block(x: Any, weights: Any, gate: Any, up: Any, wo: Any) -> Any:
            params = ep.MoEParams(router=None, wi=jnp.concatenate([gate, up], axis=-1), wo=wo)
            routing = ep.Routing(idx, weights, None)
            return ep.moe(
                layer, x, params, routing=routing, gated=True, compute_dtype=jnp.dtype(dtype)
            )[0]

        y, pull = jax.vjp(block, x, weights, gate, up, wo)
        return y, *pull(y)

    (path,) = ep.explain(graded, *given).paths
    assert TRIAL or path.path.startswith("cuda"), path
    wanted = _reference(*drawn)
    first = None
    for _ in range(_RUNS):
        found = jax.block_until_ready(graded(*given))
        group.check(found)
        local = [[np.asarray(part.data) for part in each.addressable_shards] for each in found]
        for each, want in zip(found, wanted, strict=True):
            _assert_near(each, want, _RMS[dtype])
        jax.tree.map(np.testing.assert_array_equal, local, first or local)
        first = local


def _drawn(ranks: int) -> tuple[np.ndarray, ...]:
    """Returns (x, weights, gate, up, wo, idx), the same in every process and exact in bfloat16."""
    rng = np.random.default_rng(ranks)
    count, experts = TOKENS * ranks, LOCAL * ranks

    def normal(*shape: int) -> np.ndarray:
        rounded = rng.standard_normal(shape, np.float32).astype(jnp.bfloat16)
        return rounded.astype(np.float32)

    idx = np.argsort(rng.random((count, experts)), axis=1)[:, :TOP_K].astype(np.int32)
    idx[::5, 0] = -1
    sizes = ((experts, HIDDEN, INNER), (experts, HIDDEN, INNER), (experts, INNER, HIDDEN))
    wi_wo = [normal(*size) / np.float32(8) for size in sizes]
    return (normal(count, HIDDEN), rng.random((count, TOP_K), np.float32), *wi_wo, idx)


def _reference(*drawn: np.ndarray) -> list[np.ndarray]:
    """(y, gradients of x, weights, gate, up, wo) for dy = y."""
    x, weights, gate, up, wo = (each.astype(np.float64) for each in drawn[:-1])
    idx = drawn[-1]
    y = np.zeros_like(x)
    slots = [(expert, *np.nonzero(idx == expert)) for expert in range(len(wo))]
    for expert, rows, slot in slots:
        act, _, _ = _swiglu(x[rows] @ gate[expert], x[rows] @ up[expert])
        np.add.at(y, rows, weights[rows, slot, None] * (act @ wo[expert]))
    dx, dweights, dgate, dup, dwo = (np.zeros_like(a) for a in (x, weights, gate, up, wo))
    for expert, rows, slot in slots:
        act, by_gate, by_up = _swiglu(x[rows] @ gate[expert], x[rows] @ up[expert])
        weighted = weights[rows, slot, None] * y[rows]
        dweights[rows, slot] = ((act @ wo[expert]) * y[rows]).sum(axis=1)
        dwo[expert] = act.T @ weighted
        d_act = weighted @ wo[expert].T
        dgate[expert], dup[expert] = x[rows].T @ (d_act * by_gate), x[rows].T @ (d_act * by_up)
        np.add.at(dx, rows, (d_act * by_gate) @ gate[expert].T + (d_act * by_up) @ up[expert].T)
    return [y, dx, dweights, dgate, dup, dwo]


def _swiglu(gate: np.ndarray, up: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns silu(gate) * up, and its derivatives with respect to both."""
    sigmoid = 1 / (1 + np.exp(-gate))
    silu = gate * sigmoid
    return silu * up, up * sigmoid * (1 + gate * (1 - sigmoid)), silu


def _assert_near(got: jax.Array, want: np.ndarray, most: float) -> None:
    scale = np.sqrt(np.square(want).mean())
    for part in got.addressable_shards:
        error = np.asarray(part.data, np.float64) - want[part.index]
        np.testing.assert_array_less(np.sqrt(np.square(error).mean()), most * scale)
