"""A small byte-level transformer whose feed-forward blocks are mixtures of experts, in plain JAX.

Nothing here knows how tokens travel: `ep.moe` with a layer is all that a block calls.
Letters: B batch, S sequence, H hidden, A attention heads, V bytes (256).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import ep_runtime as ep
from ep_runtime.layer_specs import LayerSpec
from ep_runtime_client.base.layers import EpLayer
from ep_runtime_client.demo.config import HEADS, VOCAB
from ep_runtime_client.ops.quantize.formats import recipes

Params = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Sizes of the model; static everywhere."""

    num_layers: int = 2
    hidden_size: int = 128
    num_heads: int = HEADS
    mlp_dim: int = 256
    num_experts: int = 8
    top_k: int = 2
    seq: int = 128
    aux_loss_coeff: float = 0.01
    recipe: Any = None
    params_spec: Any = None  # rules by which the experts' weights lie


class Metrics(NamedTuple):
    """What a step reports beside its gradient.

    loss: f32 [], mean cross entropy in nats per byte, without the balancing loss.
    tokens_per_expert: int32 [layers, E], slots routed to each expert.
    dropped: int32 [], slots dropped in all layers.
    """

    loss: jax.Array
    tokens_per_expert: jax.Array
    dropped: jax.Array


def recipe_of(name: str) -> Any:
    """The recipe that has this name in the demo's options; None is plain f32."""
    if name == "f32":
        return None
    made = {
        "bf16": recipes.BF16,
        "fp8": recipes.TensorScaling,
        "fp8-block": recipes.BlockScaling,
        "mxfp8": recipes.MXFP8,
    }
    return made[name]()


def init_params(
    key: jax.Array, config: ModelConfig, layers: Sequence[EpLayer | LayerSpec]
) -> Params:
    """Parameters of the whole model, f32. `layers`: one EpLayer (or LayerSpec) per block."""
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


def forward(
    params: Params, tokens: jax.Array, *, config: ModelConfig, layers: Sequence[EpLayer]
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Runs the model.

    Args:
        params: of `init_params`.
        tokens: [B, S] int32, bytes.
        config: sizes.
        layers: one EpLayer per block.

    Returns:
        logits [B, S, V] f32, balancing loss f32 [], tokens per expert int32 [layers, E],
        dropped slots int32 [].
    """
    x: jax.Array = params["embed"][tokens] * config.hidden_size**0.5
    aux = jnp.zeros((), jnp.float32)
    dropped = jnp.zeros((), jnp.int32)
    loads = []
    for block, layer in zip(params["blocks"], layers, strict=True):
        x = x + _attention(block, _rms_norm(x, block["attention_norm"]), config)
        y, block_aux, stats = ep.moe(
            layer,
            _rms_norm(x, block["moe_norm"]),
            block["moe"],
            aux_loss_coeff=config.aux_loss_coeff,
            recipe=config.recipe,
            params_spec=config.params_spec,
            return_stats=True,
        )
        x = x + y
        aux = aux + block_aux
        dropped = dropped + stats.dropped
        loads.append(stats.tokens_per_expert)
    logits = _rms_norm(x, params["norm"]) @ params["out"]
    return logits, aux, jnp.stack(loads), dropped


def loss_fn(
    params: Params, window: jax.Array, *, config: ModelConfig, layers: Sequence[EpLayer]
) -> tuple[jax.Array, Metrics]:
    """Loss to train on (cross entropy plus balancing) and the step's metrics.

    `window`: [B, S + 1] int32; every byte but the first is predicted.
    """
    logits, aux, loads, dropped = forward(params, window[:, :-1], config=config, layers=layers)
    logp = jax.nn.log_softmax(logits)
    picked = jnp.take_along_axis(logp, window[:, 1:, None], axis=-1)
    loss = -picked.mean()
    return loss + aux, Metrics(loss, loads, dropped)


def _rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * scale


def _attention(block: Params, x: jax.Array, config: ModelConfig) -> jax.Array:
    batch, seq, hidden = x.shape
    head = hidden // config.num_heads
    qkv = (x @ block["qkv"]).reshape(batch, seq, 3, config.num_heads, head)
    q, k, v = _rotate(qkv[:, :, 0]), _rotate(qkv[:, :, 1]), qkv[:, :, 2]
    mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    out: jax.Array = mixed.reshape(batch, seq, hidden) @ block["proj"]
    return out


def _rotate(x: jax.Array) -> jax.Array:
    """Rotary positions. x: [B, S, A, D]."""
    seq, half = x.shape[1], x.shape[3] // 2
    frequency = 10000.0 ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = jnp.arange(seq, dtype=jnp.float32)[:, None, None] * frequency
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)
