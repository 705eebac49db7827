"""Block calls between nodes that take their tokens in chunks: their bits, and what they hide."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import block_ways
import jax
import jax.numpy as jnp
import numpy as np
from gpu.jobs.layouts import TRIAL
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import ep_runtime as ep
from ep_runtime_client.ops.movement.prepare import make_call
from ep_runtime_client.ops.transports import nodes_plan

TOKENS, HIDDEN, INNER, TOP_K, LOCAL = 256, 256, 128, 8, 4  # tokens and experts of a rank
AXIS = PartitionSpec("ep")
# Settings of the group; of the call; of weights' gradients, the most of an array's largest value.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], float]] = {
    "bfloat16": ({}, {}, 0.01),
    "float32": ({"max_token_dtype": "float32"}, {"compute_dtype": jnp.float32}, 1e-4),
    "exact sums": ({"combine_precision": "exact"}, {"weights_at": "hidden"}, 0.01),
    "sums in 8 bits": ({"combine_precision": "fp8"}, {"keep": "nothing"}, 0.01),
    "drops": ({}, {"capacity": TOKENS * TOP_K // 2}, 0.01),
    "in parts": ({"workspace": 1e-6}, {}, 0.05),  # one call rounds the sums of every part
    "counted rows": ({"max_top_k": 2}, {}, 0.01),  # if a node has several ranks
    "block scales": ({}, {"recipe": ep.recipes.BlockScaling()}, 0.1),
}
RUNS = 9


def run(session: ep.Session, name: str, transport: str, devices: Any) -> None:
    """Compares calls in 2 and 4 chunks with one call: y and dx by bits."""
    settings, options, most = CASES[name]
    group = make_group(session, f"chunks-{name.replace(' ', '-')}", transport, devices, **settings)
    layer = group.register_layer("moe", top_k=group.spec.max_top_k)
    operands = draw(group, TOKENS, INNER, settings.get("max_token_dtype", "bfloat16"))
    want = None
    for count in (1, 2, 4):
        step = compiled(layer, count, *operands, **options)
        for _ in range(3):
            found = jax.block_until_ready(step(*operands))
            group.check()
            got = [np.asarray(part.data) for x in found for part in x.addressable_shards]
            assert all(np.isfinite(x.astype(np.float32)).all() for x in got)
            want = want or got
            half = 3 * len(got) // 5  # y, and gradients of tokens and of their weights
            jax.tree.map(np.testing.assert_array_equal, got[:half], want[:half])
            for mine, theirs in zip(got[half:], want[half:], strict=True):
                mine, theirs = (x.astype(np.float64) for x in (mine, theirs))
                scale = np.abs(theirs).max()
                np.testing.assert_allclose(mine / scale, theirs / scale, rtol=0, atol=most)
    group.close()


def make_group(
    session: ep.Session, name: str, transport: str, devices: Any, **settings: Any
) -> ep.Group:
    sizes: dict[str, Any] = {
        "num_experts": LOCAL * len(devices),
        "hidden_size": HIDDEN,
        "max_tokens_per_rank": TOKENS,
        "max_top_k": TOP_K,
        "max_token_dtype": "bfloat16",
        "op_timeout_s": 60.0,
    }
    mesh = Mesh(np.array(devices), ("ep",))
    return session.create_group(
        name, mesh, ep_axis="ep", transport=transport, **{**sizes, **settings}
    )


def draw(group: ep.Group, tokens: int, inner: int, dtype: str) -> tuple[Any, ...]:
    """(x, weights, wi, wo, idx), alike in every process."""
    spec, rng = group.spec, np.random.default_rng(7)
    count, hidden, experts = tokens * spec.world_size, spec.hidden_size, spec.num_experts
    idx = rng.integers(-1, experts, (count, spec.max_top_k), np.int32)
    sizes = ((count, hidden), idx.shape, (experts, hidden, 2, inner), (experts, inner, hidden))
    kinds = (dtype, "float32", dtype, dtype)
    place = NamedSharding(group.mesh, AXIS)

    def part(size: tuple[int, ...], kind: str, index: Any) -> Any:
        start = index[0].start or 0  # a rank's own values: whole weights may be large
        mine = (len(range(*index[0].indices(size[0]))), *size[1:])
        drawn = np.random.default_rng(start).standard_normal(mine, np.float32)
        return (drawn / np.float32(np.sqrt(size[-1]))).astype(jnp.dtype(kind))

    made = [
        jax.make_array_from_callback(size, place, functools.partial(part, size, kind))
        for size, kind in zip(sizes, kinds, strict=True)
    ]
    return *made, jax.make_array_from_callback(idx.shape, place, lambda index: idx[index])


def compiled(layer: Any, count: int, *operands: Any, graded: bool = True, **options: Any) -> Any:
    """A program of a block in so many chunks: y, or also its gradients for dy = y."""
    given = {"compute_dtype": jnp.bfloat16, **options}

    def step(x: Any, weights: Any, wi: Any, wo: Any, idx: Any) -> Any:
        def block(x: Any, weights: Any, wi: Any, wo: Any) -> Any:
            routing = ep.Routing(idx, weights, None)
            return ep.moe(layer, x, ep.MoEParams(None, wi, wo), routing=routing, **given)[0]

        if not graded:
            return (block(x, weights, wi, wo),)
        y, pull = jax.vjp(block, x, weights, wi, wo)
        return y, *pull(y)

    with block_ways.chunked(count):
        made = jax.jit(step).lower(*operands).compile()
    assert ("ep_nccl_block" in made.as_text()) == (count > 1 and not TRIAL), count
    return made


def measure(session: ep.Session, transport: str, inner: int) -> list[dict[str, Any]]:
    """Milliseconds of a large block forward, and forward and backward: in one call, in chunks, and
    of its exchanges between nodes alone; and the share of these that chunks hide."""
    tokens, hidden, top_k, local = 8192, 4096, 8, 8
    sizes: dict[str, Any] = {"hidden_size": hidden, "max_tokens_per_rank": tokens}
    sizes |= {"max_top_k": top_k, "num_experts": local * len(jax.devices())}
    group = make_group(session, f"hidden-{inner}", transport, jax.devices(), **sizes)
    layer = group.register_layer("moe", top_k=top_k)
    operands, found = draw(group, tokens, inner, "bfloat16"), []
    for graded in (False, True):
        network = _milliseconds(_network(layer, graded, operands[0]), operands[0])
        took = {
            count: _milliseconds(compiled(layer, count, *operands, graded=graded), *operands)
            for count in (1, 4, 8)
        }
        share = {count: (took[1] - each) / network for count, each in took.items()}
        found.append(
            {
                "what": "forward and backward" if graded else "forward",
                "inner": inner,
                "network_ms": round(network, 2),
                "experts_ms": round(took[1] - network, 2),
                "chunks_ms": {count: round(each, 2) for count, each in took.items()},
                "hidden": {count: round(each, 3) for count, each in share.items()},
            }
        )
    group.close()
    return found


def _network(layer: Any, graded: bool, x: Any) -> Callable[..., Any]:
    """A program of the exchanges between nodes alone."""
    spec = layer.group_spec
    call = make_call(layer, x.sharding.mesh, x.shape[:1], (), handle=0, capacity=None)
    ops = nodes_plan.collectives(call)

    def exchanges(x: Any) -> Any:
        slots = jnp.zeros((len(x), 2 * spec.max_top_k), jnp.int32)
        tokens, _ = ops.rail_gather(call, x, slots)
        (y,) = ops.rail(call, tokens)
        if not graded:
            return y
        tokens, slots, dy = ops.rail_gather(call, x, slots, y[0])
        values = slots[..., : spec.max_top_k].astype(jnp.float32)
        return ops.rail(call, tokens + dy, values)[0]

    whole = jax.shard_map(
        exchanges, mesh=x.sharding.mesh, in_specs=AXIS, out_specs=AXIS, check_vma=False
    )
    return jax.jit(whole).lower(x).compile()


def _milliseconds(step: Callable[..., Any], *operands: Any) -> float:
    took = []
    for _ in range(RUNS):
        started = time.monotonic()
        jax.block_until_ready(step(*operands))
        took.append((time.monotonic() - started) * 1e3)
    return statistics.median(took[2:])
