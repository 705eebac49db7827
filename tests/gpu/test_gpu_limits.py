"""Rows at the limits of the kernels: widths, many experts per token, opaque bytes."""

from __future__ import annotations

from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu.jobs.gpu_cases import run_case
from gpu.jobs.layouts import TRANSPORT
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from references import movement as reference

import ep_runtime as ep

_FAST: dict[str, Any] = {"axes": (("ep", 4),), "alignment": 1, "precision": "fast"}
_MANY: dict[str, Any] = {"top_k": 32, "num_experts": 64, "tokens": 3, **_FAST}
_LIMITS = (
    cases.Case("bf16, rows of 16 bytes", dtype="bfloat16", hidden=8, top_k=3, tokens=33, **_FAST),
    cases.Case("f16, H=16384, K=32", dtype="float16", hidden=16384, **_MANY),
    cases.Case("f32, H=16384", hidden=16384, tokens=2, **_FAST),
)


@pytest.mark.parametrize("case", _LIMITS, ids=lambda case: case.name)
def test_rows_at_the_limits_equal_the_reference(
    session: ep.Session, gpus: list[Any], case: cases.Case
) -> None:
    run_case(session, cases.fitted(case, len(gpus)))


@pytest.mark.parametrize("dtype", ["uint8", "float8_e4m3fn"])
def test_opaque_rows_arrive_bit_by_bit(session: ep.Session, gpus: list[Any], dtype: str) -> None:
    ranks, tokens, hidden, top_k, experts = len(gpus), 16, 112, 4, 16
    mesh = Mesh(np.array(gpus), ("ep",))
    group = session.create_group(
        "opaque",
        mesh,
        ep_axis="ep",
        num_experts=experts,
        hidden_size=hidden,
        max_tokens_per_rank=tokens,
        max_token_dtype=dtype,
        alignment=16,
        transport=TRANSPORT,
        op_timeout_s=60.0,
    )
    layer = group.register_layer("moe", top_k=top_k)
    rng = np.random.default_rng(0)
    raw = rng.integers(0, 256, (ranks * tokens, hidden), np.uint8)  # NaN patterns of e4m3fn too
    idx = cases.routing(cases.Case("", tokens=tokens, top_k=top_k), ranks)
    sharding = NamedSharding(mesh, PartitionSpec("ep"))
    given = jax.device_put(raw.view(jnp.dtype(dtype)), sharding)
    sent = jax.jit(lambda x, idx: ep.dispatch(layer, x, idx))(
        given, jax.device_put(idx.reshape(-1, top_k), sharding)
    )
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        plan = reference.plan(
            idx,
            num_experts=experts,
            ep_size=ranks,
            alignment=16,
            capacity=group.capacity_per_rank,
        )
        want, _ = reference.dispatch(plan, jnp.asarray(raw.reshape(ranks, tokens, hidden)), None)
    got = np.asarray(sent.tokens).view(np.uint8)
    np.testing.assert_array_equal(got[plan.in_zone], np.asarray(want)[plan.in_zone])
    np.testing.assert_array_equal(sent.group_sizes, plan.arrays["group_sizes"])
    group.check()
