"""MoE blocks of published models in plain numpy, f64, written from their papers' formulas.

An oracle takes x [T, H], the weights `w` (see `random_block.py`) and `config`, the values of the
model's Hugging Face config under their own names: nothing here knows what our options are called.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

Array = Any


def softmax(z: Array) -> Array:
    z = np.exp(z - z.max(-1, keepdims=True))
    return z / z.sum(-1, keepdims=True)


def sigmoid(z: Array) -> Array:
    return 1 / (1 + np.exp(-z))


def silu(z: Array) -> Array:
    return z * sigmoid(z)


def gelu_tanh(z: Array) -> Array:
    return 0.5 * z * (1 + np.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))


def top(scores: Array, k: int) -> Array:
    """Returns indices of the k largest values of each row; the lower index wins a tie."""
    return np.argsort(-scores, axis=-1, kind="stable")[:, :k]


def at(scores: Array, index: Array) -> Array:
    return np.take_along_axis(scores, index, axis=-1)


def normed(weights: Array, least: float = 0.0) -> Array:
    return weights / np.maximum(weights.sum(-1, keepdims=True), least)


def mixed(
    x: Array, w: Any, index: Array, weights: Array, glu: Callable[..., Any] | None = None
) -> Array:
    """sum over a token's slots of weight * expert(x); each expert on every token."""
    y = np.zeros_like(x)
    for expert in range(len(w.down)):
        gate, up = x @ w.gate[expert], x @ w.up[expert]
        inner = silu(gate) * up if glu is None else glu(gate, up)
        share = np.where(index == expert, weights, 0).sum(-1, keepdims=True)
        y += share * (inner @ w.down[expert])
    return y


# Softmax scores.


def mixtral(x: Array, w: Any, config: Any) -> Array:
    probs = softmax(x @ w.router)
    index = top(probs, config.num_experts_per_tok)
    return mixed(x, w, index, normed(at(probs, index)))


def hunyuan(x: Array, w: Any, config: Any) -> Array:
    probs = softmax(x @ w.router)
    index = top(probs, config.moe_topk)
    return mixed(x, w, index, normed(at(probs, index)))


def granite(x: Array, w: Any, config: Any) -> Array:
    logits = x @ w.router
    index = top(logits, config.num_experts_per_tok)
    return mixed(x, w, index, softmax(at(logits, index)))


def qwen(x: Array, w: Any, config: Any) -> Array:
    """Qwen2-MoE, Qwen3-MoE and OLMoE."""
    probs = softmax(x @ w.router)
    index = top(probs, config.num_experts_per_tok)
    weights = at(probs, index)
    return mixed(x, w, index, normed(weights) if config.norm_topk_prob else weights)


def dbrx(x: Array, w: Any, config: Any) -> Array:
    probs = softmax(x @ w.router)
    index = top(probs, config.moe_top_k)
    weights, p = at(probs, index), config.moe_normalize_expert_weights
    if p is not None:
        weights = weights / (np.abs(weights) ** p).sum(-1, keepdims=True) ** (1 / p)
    return mixed(x, w, index, weights)


def gpt_oss(x: Array, w: Any, config: Any) -> Array:
    logits = x @ w.router + w.router_bias
    index = top(logits, config.num_experts_per_tok)
    weights = softmax(at(logits, index))
    y, limit = np.zeros_like(x), config.swiglu_limit
    for expert in range(len(w.down)):
        gate = np.minimum(x @ w.gate[expert] + w.gate_bias[expert], limit)
        up = np.clip(x @ w.up[expert] + w.up_bias[expert], -limit, limit)
        inner = (up + 1) * gate * sigmoid(1.702 * gate)
        share = np.where(index == expert, weights, 0).sum(-1, keepdims=True)
        y += share * (inner @ w.down[expert] + w.down_bias[expert])
    return y


def deepseek_v2(x: Array, w: Any, config: Any) -> Array:
    scores = softmax(x @ w.router)
    if config.topk_method == "group_limited_greedy":
        grouped = scores.reshape(len(x), config.n_group, -1)
        best = top(grouped.max(-1), config.topk_group)
        scores = within(scores, config.n_group, best, 0.0)
    index = top(scores, config.num_experts_per_tok)
    return mixed(x, w, index, at(scores, index) * config.routed_scaling_factor)


def within(scores: Array, n_group: int, best: Array, fill: float) -> Array:
    """`scores` with `fill` outside the routing groups `best`."""
    group = np.arange(scores.shape[-1]) // (scores.shape[-1] // n_group)
    return np.where((group[None, :, None] == best[:, None, :]).any(-1), scores, fill)


def ernie(x: Array, w: Any, config: Any) -> Array:
    probs = softmax(x @ w.router)
    index = top(probs + w.expert_bias, config.moe_k)
    return mixed(x, w, index, normed(at(probs, index), config.moe_norm_min))


# Sigmoid scores.


def deepseek_v3(x: Array, w: Any, config: Any) -> Array:
    scores = sigmoid(x @ w.router)
    choice = scores + w.expert_bias
    best_two = np.sort(choice.reshape(len(x), config.n_group, -1), axis=-1)[..., -2:]
    best = top(best_two.sum(-1), config.topk_group)
    index = top(within(choice, config.n_group, best, -np.inf), config.num_experts_per_tok)
    weights = at(scores, index)
    if config.norm_topk_prob:
        weights = normed(weights)
    return mixed(x, w, index, weights * config.routed_scaling_factor)


def minimax_m2(x: Array, w: Any, config: Any) -> Array:
    scores = sigmoid(x @ w.router)
    index = top(scores + w.expert_bias, config.num_experts_per_tok)
    return mixed(x, w, index, normed(at(scores, index)))


def lfm2(x: Array, w: Any, config: Any) -> Array:
    scores = sigmoid(x @ w.router)
    choice = scores + w.expert_bias if config.use_expert_bias else scores
    index = top(choice, config.num_experts_per_tok)
    weights = at(scores, index)
    if config.norm_topk_prob:
        weights = weights / (weights.sum(-1, keepdims=True) + 1e-6)
    return mixed(x, w, index, weights * config.routed_scaling_factor)


def llama4(x: Array, w: Any, config: Any) -> Array:
    """The weight multiplies the token before the expert."""
    logits = x @ w.router
    index = top(logits, config.num_experts_per_tok)
    y = np.zeros_like(x)
    for expert in range(len(w.down)):
        for slot in range(index.shape[-1]):
            mine = index[:, slot] == expert
            seen = x[mine] * sigmoid(logits[mine, expert])[:, None]
            y[mine] += (silu(seen @ w.gate[expert]) * (seen @ w.up[expert])) @ w.down[expert]
    return y


# The root of a softplus.


def deepseek_v4(x: Array, w: Any, config: Any) -> Array:
    scores = np.sqrt(np.log1p(np.exp(x @ w.router)))
    index = top(scores + w.expert_bias, config.num_experts_per_tok)
    return _deepseek_v4(x, w, config, scores, index)


def deepseek_v4_hash(x: Array, w: Any, config: Any) -> Array:
    scores = np.sqrt(np.log1p(np.exp(x @ w.router)))
    return _deepseek_v4(x, w, config, scores, w.tid2eid[w.input_ids])


def _deepseek_v4(x: Array, w: Any, config: Any, scores: Array, index: Array) -> Array:
    def glu(gate: Array, up: Array) -> Array:
        limit = config.swiglu_limit
        return silu(np.minimum(gate, limit)) * np.clip(up, -limit, limit)

    weights = normed(at(scores, index)) * config.routed_scaling_factor
    return mixed(x, w, index, weights, glu)


# Models with their own routers.


def phimoe(x: Array, w: Any, config: Any) -> Array:
    """SparseMixer-v2 in evaluation: two experts, each by a softmax over scores near the best."""
    logits = x @ w.router
    left, chosen, weights = logits.copy(), [], []
    for _ in range(2):
        best = left.max(-1, keepdims=True)
        factor = np.maximum(np.abs(logits), best)
        far = (best - logits) / factor > 2 * config.router_jitter_noise
        gates = softmax(np.where(far, -np.inf, left))
        index = left.argmax(-1)[:, None]
        chosen.append(index)
        weights.append(at(gates, index))
        np.put_along_axis(left, index, -np.inf, axis=-1)
    return mixed(x, w, np.concatenate(chosen, -1), np.concatenate(weights, -1))


def longcat(x: Array, w: Any, config: Any) -> Array:
    """Experts from n_routed_experts on return their token unchanged."""
    scores = softmax(x @ w.router)
    index = top(scores + w.expert_bias, config.moe_topk)
    weights = at(scores, index) * config.routed_scaling_factor
    back = np.where(index >= config.n_routed_experts, weights, 0).sum(-1, keepdims=True)
    return mixed(x, w, index, weights) + back * x


def gemma4(x: Array, w: Any, config: Any) -> Array:
    """The router reads the residual through a separate norm; experts have scales."""
    rms = np.sqrt((w.residual**2).mean(-1, keepdims=True) + config.rms_norm_eps)
    probs = softmax((w.residual / rms * w.scale * config.hidden_size**-0.5) @ w.router)
    index = top(probs, config.top_k_experts)
    weights = normed(at(probs, index)) * w.per_expert_scale[index]
    return mixed(x, w, index, weights, lambda gate, up: gelu_tanh(gate) * up)
