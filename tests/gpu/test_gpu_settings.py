"""Settings of groups on GPUs: SMs, and the checks that EP_RUNTIME_DEBUG=1 turns on."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import ep_runtime as ep

TOKENS, HIDDEN, EXPERTS = 32, 128, 16


def make_group(session: ep.Session, gpus: list[Any], **settings: Any) -> ep.Group:
    return session.create_group(
        "g",
        Mesh(np.array(gpus), ["ep"]),
        ep_axis="ep",
        num_experts=EXPERTS,
        hidden_size=HIDDEN,
        max_tokens_per_rank=TOKENS,
        max_top_k=2,
        max_token_dtype="float32",
        transport="nvlink",
        op_timeout_s=60.0,
        replace=True,
        **settings,
    )


def round_trip(group: ep.Group, topk_idx: Any) -> Any:
    """Tokens of ones there and back; each comes back as often as it has slots."""
    layer = group.register_layer("moe", top_k=2)
    sharding = NamedSharding(group.mesh, PartitionSpec("ep"))

    @jax.jit
    def step(tokens: Any, idx: Any) -> Any:
        sent = ep.dispatch(layer, tokens, idx)
        return ep.combine(layer, sent, sent.tokens)

    tokens = jax.device_put(np.ones((len(topk_idx), HIDDEN), np.float32), sharding)
    return np.asarray(step(tokens, jax.device_put(topk_idx, sharding)))


def indices(gpus: list[Any]) -> Any:
    rng = np.random.default_rng(0)
    return rng.integers(0, EXPERTS, (TOKENS * len(gpus), 2)).astype(np.int32)


@pytest.mark.parametrize("num_sms", [2, 3, 24, 132])
def test_any_number_of_sms_moves_the_same_rows(
    session: ep.Session, gpus: list[Any], num_sms: int
) -> None:
    group = make_group(session, gpus, num_sms=num_sms)
    np.testing.assert_array_equal(round_trip(group, indices(gpus)), 2.0)
    group.check()


def test_more_sms_than_the_gpu_has_are_refused_with_both_numbers(
    session: ep.Session, gpus: list[Any]
) -> None:
    with pytest.raises(ep.InvalidArgumentError, match=r"num_sms .* at most \d+, .* got 256"):
        make_group(session, gpus, num_sms=256)
    np.testing.assert_array_equal(round_trip(make_group(session, gpus), indices(gpus)), 2.0)
