"""A small byte-level transformer whose feed-forward blocks are mixtures of experts, in plain JAX.

A block only calls `ep.moe` with a layer; how tokens move is not visible here.
Letters: B batch, S sequence, H hidden, A attention heads, V bytes (256).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

import ep_runtime as ep
from ep_runtime.layer_specs import LayerSpec
from ep_runtime_client.base.layers import EpLayer
from ep_runtime_client.demo.config import HEADS, VOCAB, DemoConfig

AUX_LOSS_COEFF = 0.01
RECIPES = {
    "f32": None,
    "bf16": ep.recipes.BF16(),
    "fp8": ep.recipes.TensorScaling(),
    "fp8-block": ep.recipes.BlockScaling(),
    "mxfp8": ep.recipes.MXFP8(),
}

Params = dict[str, Any]


def init_params(
    key: jax.Array, config: DemoConfig, layers: Sequence[EpLayer | LayerSpec]
) -> Params:
    """Makes parameters of the whole model, f32. `layers`: one EpLayer (or LayerSpec) per block."""
    hidden = config.hidden_size
    embed_key, out_key, *block_keys = jax.random.split(key, 2 + config.num_layers)
    blocks = []
    for block_key, layer in zip(block_keys, layers, strict=True):
        qkv_key, proj_key, moe_key = jax.random.split(block_key, 3)
        blocks.append(
            {
                "attention_norm": jnp.ones((hidden,), jnp.float32),
                "qkv": _normal(qkv_key, (hidden, 3 * hidden), hidden),
                "proj": _normal(proj_key, (hidden, hidden), 2 * config.num_layers * hidden),
                "moe_norm": jnp.ones((hidden,), jnp.float32),
                "moe": ep.init_moe_params(
                    moe_key, layer, config.mlp_dim, gated=True, param_dtype=jnp.float32
                ),
            }
        )
    return {
        "embed": _normal(embed_key, (VOCAB, hidden), hidden),
        "blocks": blocks,
        "norm": jnp.ones((hidden,), jnp.float32),
        "out": _normal(out_key, (hidden, VOCAB), hidden),
    }


def _normal(key: jax.Array, shape: tuple[int, ...], fan_in: int) -> jax.Array:
    return jax.random.normal(key, shape, jnp.float32) / math.sqrt(fan_in)


def loss_fn(
    params: Params, window: jax.Array, *, layers: Sequence[EpLayer], **moe: Any
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Returns the loss, then the cross entropy alone (nats per byte) and the dropped slots' number.

    Args:
        params: from `init_params`.
        window: [B, S + 1] int32; every byte except the first is predicted.
        layers: one EpLayer per block.
        moe: further arguments of every `ep.moe`.
    """
    x: jax.Array = params["embed"][window[:, :-1]] * params["norm"].size ** 0.5
    balancing = jnp.zeros((), jnp.float32)
    dropped = jnp.zeros((), jnp.int32)
    for block, layer in zip(params["blocks"], layers, strict=True):
        x = x + _attention(block, _rms_norm(x, block["attention_norm"]))
        normed = _rms_norm(x, block["moe_norm"])
        y, aux, stats = ep.moe(
            layer, normed, block["moe"], aux_loss_coeff=AUX_LOSS_COEFF, return_stats=True, **moe
        )
        x, balancing, dropped = x + y, balancing + aux, dropped + stats.dropped
    logp = jax.nn.log_softmax(_rms_norm(x, params["norm"]) @ params["out"])
    loss = -jnp.take_along_axis(logp, window[:, 1:, None], axis=-1).mean()
    return loss + balancing, (loss, dropped)


def _rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * scale


def _attention(block: Params, x: jax.Array) -> jax.Array:
    batch, seq, hidden = x.shape
    qkv = (x @ block["qkv"]).reshape(batch, seq, 3, HEADS, hidden // HEADS)
    q, k, v = _rotate(qkv[:, :, 0]), _rotate(qkv[:, :, 1]), qkv[:, :, 2]
    mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    out: jax.Array = mixed.reshape(batch, seq, hidden) @ block["proj"]
    return out


def _rotate(x: jax.Array) -> jax.Array:
    """Applies rotary positions to x [B, S, A, D]."""
    seq, half = x.shape[1], x.shape[3] // 2
    frequency = 10000.0 ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = jnp.arange(seq, dtype=jnp.float32)[:, None, None] * frequency
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)
