"""The demo's optimizers, over a warm-up and a cosine."""

from __future__ import annotations

from typing import Any

import jax
import optax
from optax.contrib import MuonDimensionNumbers

from ep_runtime_client.block.params import MoEParams
from ep_runtime_client.demo.config import DemoConfig

WARMUP_STEPS = 20
WEIGHT_DECAY = 0.1
# Updates of Muon as large as those of AdamW, so that both take the same learning rate.
MUON_RMS = 0.2
# Every expert's gate, up and wo is a matrix of its own: wi is [E, H, 2, M], wo [E, M, H].
_GATED = MuonDimensionNumbers(reduction_axis=(-3,), output_axis=(-1,))
_MATRIX = MuonDimensionNumbers(reduction_axis=(-2,), output_axis=(-1,))


def make_optimizer(config: DemoConfig) -> optax.GradientTransformation:
    """AdamW, or Muon for matrices and AdamW for the rest; gradients clipped by their norm."""
    schedule = optax.warmup_cosine_decay_schedule(
        0.0,
        config.learning_rate,
        min(WARMUP_STEPS, max(1, config.steps // 5)),
        max(2, config.steps),
        config.learning_rate / 20,
    )
    if config.optimizer == "muon":
        optimizer = optax.contrib.muon(
            schedule,
            weight_decay=WEIGHT_DECAY,
            adam_b2=0.95,
            adam_weight_decay=WEIGHT_DECAY,
            muon_weight_dimension_numbers=matrices,
            consistent_rms=MUON_RMS,
        )
    else:
        optimizer = optax.adamw(schedule, b2=0.95, weight_decay=WEIGHT_DECAY)
    return optax.chain(optax.clip_by_global_norm(1.0), optimizer)


def matrices(params: dict[str, Any]) -> dict[str, Any]:
    """Which dims of which parameter Muon treats as a matrix; None leaves it to AdamW.

    Embeddings and the router pick rows rather than transform vectors, so AdamW has them.
    """
    none = jax.tree.map(lambda leaf: None, params)
    attention = {"qkv": _MATRIX, "proj": _MATRIX}
    experts = MoEParams(router=None, wi=_GATED, wo=_MATRIX)
    blocks = [{**block, **attention, "moe": experts} for block in none["blocks"]]
    return {**none, "blocks": blocks}
