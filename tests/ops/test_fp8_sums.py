"""combine_precision="fp8": errors of sums, bytes that cross, and groups that cannot have it."""

from __future__ import annotations

from typing import Any

import collectives
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes import MakeGroup
from jax.sharding import NamedSharding, PartitionSpec

import ep_runtime as ep
from ep_runtime.errors import InvalidArgumentError
from ep_runtime_client.ops.quantize import row_bytes

RANKS, TOKENS, TOP_K, HIDDEN = 8, 16, 4, 328


def make(make_group: MakeGroup, precision: str, **settings: Any) -> tuple[Any, Any]:
    group = make_group(
        axes={"ep": RANKS},
        num_experts=RANKS,
        hidden_size=HIDDEN,
        max_tokens_per_rank=TOKENS,
        max_top_k=TOP_K,
        combine_precision=precision,
        **settings,
    )
    return group, group.register_layer("moe", top_k=TOP_K)


def routed() -> tuple[Any, Any]:
    """Draws tokens of very different sizes, each routed to TOP_K ranks."""
    rng = np.random.default_rng(3)
    count = RANKS * TOKENS
    sizes = np.exp2(rng.uniform(-20, 20, (count, HIDDEN)))
    x = (rng.standard_normal((count, HIDDEN)) * sizes).astype(np.float32)
    return x, np.argsort(rng.random((count, RANKS)), axis=1)[:, :TOP_K].astype(np.int32)


def back(layer: Any, x: Any, idx: Any) -> Any:
    sent = ep.dispatch(layer, x, idx)
    return ep.combine(layer, sent, sent.tokens)


def farthest(x: Any) -> Any:
    """Returns the allowed error of a sum of four parts, each x, as docstrings state it."""
    padded = np.pad(np.abs(x), [(0, 0), (0, -HIDDEN % 128)])
    blocks = padded.reshape(len(x), -1, 128).max(-1, keepdims=True) / 448 * 2.0**-10
    least = np.broadcast_to(blocks, (*blocks.shape[:2], 128)).reshape(len(x), -1)[:, :HIDDEN]
    return TOP_K * np.maximum(np.abs(x) * 2.0**-4, least) * (1 + 1e-5)


def test_a_sum_is_off_by_no_more_than_is_said(make_group: MakeGroup, transport: str) -> None:
    _, layer = make(make_group, "fp8", transport=transport, max_token_dtype="float32")
    x, idx = routed()
    once = 1 if "/" not in transport else 2  # between nodes, a node's sum is rounded once more
    off = np.abs(np.asarray(back(layer, x, idx)) - TOP_K * x)
    assert (off <= once * farthest(x)).all()
    assert (off > 0).mean() > 0.9

    def loss(x: Any) -> Any:
        return (ep.dispatch(layer, x, idx).tokens ** 2).sum() / 2

    off = np.abs(np.asarray(jax.jit(jax.grad(loss))(x)) - TOP_K * x)
    assert (off <= once * farthest(x)).all()
    assert (off > 0).mean() > 0.9


def test_what_is_not_finite_stays_where_it_is(make_group: MakeGroup, transport: str) -> None:
    _, layer = make(make_group, "fp8", transport=transport, max_token_dtype="float32")
    x, idx = routed()
    x[5, 7], x[9, 300] = np.nan, np.inf
    out = np.asarray(back(layer, x, idx))
    np.testing.assert_array_equal(~np.isfinite(out), ~np.isfinite(x))


def test_half_the_bytes_of_sums_cross(make_group: MakeGroup) -> None:
    moved = {}
    for precision in ("fast", "fp8"):
        group, layer = make(make_group, precision, transport="xla", max_token_dtype="bfloat16")
        x, idx = routed()
        put = NamedSharding(group.mesh, PartitionSpec("ep"))
        given = jax.device_put((x.astype(jnp.bfloat16), idx), put)
        program = jax.jit(lambda x, idx, layer=layer: back(layer, x, idx)).lower(*given).compile()
        moved[precision] = collectives.moved_bytes(program, "all-to-all")
    saved = HIDDEN * 2 - row_bytes.row_bytes(HIDDEN, 128)
    assert moved["fast"] - moved["fp8"] == RANKS * TOKENS * saved


@pytest.mark.parametrize(
    ("hidden", "dtype", "why"),
    [
        (256, "float64", "sums of float64 rows are float64"),
        (5, "bfloat16", "a sum of hidden_size=5 takes 12 bytes with scales, a row 10"),
        (256, "float8_e4m3fn", "takes 264 bytes with scales, a row 256"),
    ],
)
def test_rows_that_leave_no_room_are_refused(
    make_group: MakeGroup, hidden: int, dtype: str, why: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=why) as raised:
        make_group(hidden_size=hidden, max_token_dtype=dtype, combine_precision="fp8")
    assert raised.value.fields["argument"] == "combine_precision"
