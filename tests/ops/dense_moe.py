"""The MoE block in f64: every expert on every token, weighted by the router."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import ep_runtime as ep
from ep_runtime_client.moe.params import MoEParams


@dataclasses.dataclass(frozen=True)
class Dense:
    """Computes the block; routing comes from `ep.route`, which has its own tests.

    Attributes:
        top_k: K.
        gate: of the gate, or of hidden where there is no up.
        gated: whether wi holds gate and up.
        coeff: of the balancing loss.
        router: as in `ep.route`.
        expert_bias: as in `ep.route`.
    """

    top_k: int
    gate: Callable[..., Any] = jax.nn.silu
    gated: bool = True
    coeff: float = 0.1
    router: ep.Router = ep.Router()
    expert_bias: Any = None

    def __call__(self, x: Any, params: MoEParams) -> tuple[Any, Any]:
        assert params.router is not None
        logits = x @ params.router
        if params.router_bias is not None:
            logits = logits + jnp.broadcast_to(params.router_bias, logits.shape)
        routed = ep.route(logits, self.top_k, router=self.router, expert_bias=self.expert_bias)
        y = self.experts(x, params, routed.topk_idx, routed.topk_weights)
        return y, ep.aux_loss(routed, coeff=self.coeff)

    def experts(self, x: Any, params: MoEParams, topk_idx: Any, topk_weights: Any) -> Any:
        """Applies every slot's expert to its token, weighted; a slot of -1 adds nothing."""
        experts = params.wi.shape[0]
        chosen = jax.nn.one_hot(topk_idx, experts, dtype=x.dtype)
        spread = (chosen * topk_weights[..., None]).sum(-2)
        inner = jnp.einsum("...h,ehm->...em", x, params.wi.reshape(*params.wi.shape[:2], -1))
        if params.wi_bias is not None:
            bias = params.wi_bias.reshape(experts, -1)
            inner = inner + jnp.broadcast_to(bias, inner.shape)
        if self.gated:
            gate, up = jnp.split(inner, 2, axis=-1)
            inner = self.gate(gate) * up
        else:
            inner = self.gate(inner)
        out = jnp.einsum("...em,emh->...eh", inner, params.wo)
        if params.wo_bias is not None:
            out = out + jnp.broadcast_to(params.wo_bias, out.shape)
        return jnp.einsum("...eh,...e->...h", out, spread)

    def graded(self, x: Any, params: MoEParams) -> Any:
        """Runs `graded` of the reference on one device, with operands widened to f64."""

        return in_f64(graded(self), x, params)


def in_f64(function: Callable[..., Any], *operands: Any) -> Any:
    """Runs `function` on one device, with operands widened to f64."""

    def wide(leaf: Any) -> Any:
        return jnp.asarray(np.asarray(leaf, np.float64))

    with jax.enable_x64(True):
        return jax.device_get(jax.jit(function)(*jax.tree.map(wide, operands)))


def graded(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns ((y, aux), (gradient of x, gradients of the parameters)) of a loss of
    both results.
    """

    def run(x: Any, params: Any) -> Any:
        out, pull = jax.vjp(function, x, params)
        y, aux = out[:2]
        return (y, aux), pull((jnp.cos(y.astype(jnp.float32)).astype(y.dtype), jnp.ones_like(aux)))

    return run


def worst_error(got: Any, want: Any) -> float:
    """Returns the largest |got - want| / |want| (root mean squares) over all leaves."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    errors = [0.0]
    for left, right in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        wide = np.asarray(left, np.float64)
        assert wide.shape == right.shape
        assert np.isfinite(wide).all()
        scale = np.sqrt(np.square(right).mean()) + 1e-12
        errors.append(float(np.sqrt(np.square(wide - right).mean()) / scale))
    return max(errors)
