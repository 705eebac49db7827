"""Groups over nodes with lanes too small for all nodes' rows: movement, and block calls."""

from __future__ import annotations

from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
from gpu.jobs import gpu_cases
from gpu.test_gpu_movement import fitted
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import ep_runtime as ep
from ep_runtime import device_layout
from ep_runtime_client.moe import bodies

TOKENS, EXPERTS, HIDDEN, INNER = 64, 8, 128, 64  # with one expert per token
_ROUNDING = 0.02  # of an array's largest value


def run(session: ep.Session) -> bool:
    """Compares with the reference and the composed body; returns whether lanes pack rows."""
    for routing in ("uniform", "one", "skewed"):
        for dtype, precision in (("float32", "fast"), ("bfloat16", "exact"), ("bfloat16", "fast")):
            sizes: dict[str, Any] = {"top_k": 1, "tokens": TOKENS, "hidden": HIDDEN}
            sizes |= {"routing": routing, "dtype": dtype, "precision": precision}
            case = cases.Case(f"{routing} {dtype} {precision}", **sizes)
            gpu_cases.run_case(session, fitted(case, len(jax.devices())))
    group = session.create_group(
        "lanes",
        Mesh(np.array(jax.devices()), ("ep",)),
        ep_axis="ep",
        transport=gpu_cases.TRANSPORT,
        num_experts=EXPERTS,
        hidden_size=HIDDEN,
        max_tokens_per_rank=TOKENS,
        max_top_k=1,
        max_token_dtype="bfloat16",
        op_timeout_s=60,
    )
    for one in (False, True):
        want, got = (_block(group, one, body) for body in ("composed", ""))
        for mine, theirs in zip(got, want, strict=True):
            scale = np.abs(theirs).max() + 1e-30
            np.testing.assert_allclose(mine / scale, theirs / scale, atol=_ROUNDING)
    packs = device_layout.packs(group.spec, group.spec.staged_tokens)
    group.close()
    return packs


def _block(group: ep.Group, one: bool, body: str) -> list[Any]:
    """Returns this process's shards of y and its gradients; `one` sends all tokens
    to one expert.
    """
    layer = group.register_layer("moe", top_k=1)
    rng, count = np.random.default_rng(0), TOKENS * group.mesh.size
    shapes = ((count, HIDDEN), (EXPERTS, HIDDEN, 2, INNER), (EXPERTS, INNER, HIDDEN))
    drawn = [rng.standard_normal(shape, np.float32).astype(jnp.bfloat16) for shape in shapes]
    idx = rng.integers(0, 1 if one else EXPERTS, (count, 1), np.int32)
    place = NamedSharding(group.mesh, PartitionSpec("ep"))
    idx, weights, *operands = (
        jax.make_array_from_callback(x.shape, place, lambda part, x=x: x[part])
        for x in (idx, np.ones((count, 1), np.float32), *drawn)
    )

    @jax.jit
    def graded(idx: Any, weights: Any, *operands: Any) -> Any:
        def block(x: Any, wi: Any, wo: Any) -> Any:
            params = ep.MoEParams(None, wi, wo)
            options: Any = {"routing": ep.Routing(idx, weights, None)}
            return ep.moe(layer, x, params, compute_dtype=jnp.bfloat16, **options)[0]

        y, pull = jax.vjp(block, *operands)
        return y, *pull(y)

    with bodies.forced(body):
        found = graded(idx, weights, *operands)
    return [np.asarray(part.data, np.float32) for x in found for part in x.addressable_shards]
