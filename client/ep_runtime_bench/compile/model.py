"""A transformer whose MoE blocks are given, and what users write today for such a block.

The stock block is the usual one with fixed capacities: a scatter into [E, capacity, H], two
all_to_alls, batched einsums, a gather. It drops what does not fit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import ep_runtime as ep

HIDDEN, HEADS, MLP, SEQ = 64, 4, 64, 32

# (x [B, S, H], params) -> y like x.
Moe = Callable[[jax.Array, ep.MoEParams], jax.Array]


class LayerWeights(NamedTuple):
    """Weights of one layer of the model."""

    qkv: jax.Array  # [H, 3H]
    proj: jax.Array  # [H, H]
    moe: ep.MoEParams


def blocks(
    num_layers: int, spec: ep.LayerSpec, mesh: Mesh, dtype: Any = jnp.float32
) -> list[LayerWeights]:
    """Shapes, dtypes and layouts of every layer's small weights; nothing is allocated.

    Experts lie over ep; an axis named fsdp also cuts one dim of every weight but the router.
    """

    def one(key: jax.Array) -> LayerWeights:
        params = ep.init_moe_params(key, spec, MLP, param_dtype=dtype)
        qkv = jax.random.normal(key, (HIDDEN, 3 * HIDDEN), dtype)
        return LayerWeights(qkv, qkv[:, :HIDDEN], params)

    shapes = jax.eval_shape(one, jax.random.key(0))
    fsdp = "fsdp" if "fsdp" in mesh.shape else None
    experts: tuple[Any, ...] = (P(), P("ep", fsdp), P("ep", None, fsdp))
    dense: Any = P(fsdp)
    specs = LayerWeights(dense, dense, ep.MoEParams(*experts))

    def placed(shape: jax.ShapeDtypeStruct, spec: P) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)

    return [jax.tree.map(placed, shapes, specs)] * num_layers


def token_axes(mesh: Mesh) -> tuple[str, ...]:
    """The axes that cut the batch: all but tp, ep last."""
    return (*(axis for axis in mesh.axis_names if axis not in ("ep", "tp")), "ep")


def train_step(
    moes: Sequence[Moe], layers: Sequence[LayerWeights], x: jax.Array
) -> Sequence[LayerWeights]:
    """One step of gradient descent."""
    gradients = jax.grad(lambda layers: loss(moes, layers, x))(layers)
    stepped: Sequence[LayerWeights] = jax.tree.map(lambda w, d: w - 0.01 * d, layers, gradients)
    return stepped


def loss(moes: Sequence[Moe], layers: Sequence[LayerWeights], x: jax.Array) -> jax.Array:
    """A number to differentiate. x: [B, S, H], one MoE block per layer, unrolled."""
    for moe, layer in zip(moes, layers, strict=True):
        x = x + _attention(_normed(x), layer)
        x = x + moe(_normed(x), layer.moe)
    return (x * x).mean()


def _normed(x: jax.Array) -> jax.Array:
    return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def _attention(x: jax.Array, layer: LayerWeights) -> jax.Array:
    q, k, v = jnp.split((x @ layer.qkv).reshape(*x.shape[:2], HEADS, -1), 3, axis=-1)
    mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    out: jax.Array = mixed.reshape(x.shape) @ layer.proj
    return out


def stock_moe(mesh: Mesh, top_k: int, capacity: int) -> Moe:
    """The block on stock collectives. `capacity`: rows of one expert from one rank."""
    fsdp = "fsdp" if "fsdp" in mesh.shape else None

    def whole(weight: jax.Array, dim: int) -> jax.Array:
        return weight if fsdp is None else lax.all_gather(weight, fsdp, axis=dim, tiled=True)

    def local(x: jax.Array, router: jax.Array, wi: Any, wo: jax.Array) -> jax.Array:
        tokens, num_experts = x.reshape(-1, HIDDEN), router.shape[1]
        ranks = num_experts // wi.shape[0]
        picked, expert = lax.top_k(tokens @ router, top_k)
        expert = expert.reshape(-1)
        chosen = jax.nn.one_hot(expert, num_experts, dtype=jnp.int32)
        place = (chosen * (jnp.cumsum(chosen, 0) - 1)).sum(1)
        slot = jnp.where(place < capacity, expert * capacity + place, num_experts * capacity)
        sent = jnp.zeros((num_experts * capacity, HIDDEN), x.dtype)
        sent = sent.at[slot].set(jnp.repeat(tokens, top_k, axis=0), mode="drop")
        there = lax.all_to_all(sent.reshape(ranks, -1, capacity, HIDDEN), "ep", 0, 0)
        both = jnp.einsum("nlch,lhgm->nlcgm", there, whole(wi, 1))
        hidden = jax.nn.silu(both[..., 0, :]) * both[..., 1, :]
        out = jnp.einsum("nlcm,lmh->nlch", hidden, whole(wo, 2))
        back = lax.all_to_all(out, "ep", 0, 0)
        rows = back.reshape(-1, HIDDEN).at[slot].get(mode="fill", fill_value=0)
        weighted = rows.reshape(-1, top_k, HIDDEN) * jax.nn.softmax(picked)[..., None]
        y: jax.Array = weighted.sum(1).reshape(x.shape)
        return y

    rows = P(token_axes(mesh))
    mapped = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(rows, P(), P("ep", fsdp), P("ep", None, fsdp)),
        out_specs=rows,
    )
    return lambda x, params: mapped(x, *(getattr(params, name) for name in ("router", "wi", "wo")))


def runtime_moe(layer: Any) -> Moe:
    """The block on a registered layer."""
    return lambda x, params: ep.moe(layer, x, params)[0]
