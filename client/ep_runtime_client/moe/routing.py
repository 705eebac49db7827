"""Decides where a block's tokens go: by its router, or by the caller's routing."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from ep_runtime.errors import InvalidArgumentError
from ep_runtime_client.moe.params import MoEParams
from ep_runtime_client.ops.routing.api import (
    Routing,
    route,
    unmasked,
    without_masked,
)
from ep_runtime_client.ops.routing.matmul import router_logits
from ep_runtime_client.ops.routing.options import Router
from ep_runtime_client.ops.tracing import eager


def routed(
    x: jax.Array,
    params: MoEParams,
    top_k: int,
    num_experts: int,
    *,
    routing: Routing | None,
    router: Router,
    expert_bias: jax.Array | None,
    token_mask: jax.Array | None,
    needs_probs: bool,
) -> tuple[jax.Array, Routing]:
    """Returns x with zeros for masked tokens, which may be NaN, and its routing.

    Args:
        x: [..., H].
        params: the parameters, whose router is used without a routing.
        top_k: of the layer.
        num_experts: E.
        routing, router, expert_bias, token_mask: as in `moe`.
        needs_probs: whether a loss reads the shares of all experts.

    Raises:
        InvalidArgumentError: neither a router nor a routing, both, or one that does not fit.
    """
    if token_mask is not None:
        x = eager.run(_unmasked, None, token_mask, x)
    if routing is None:
        logits = checkpoint_name(_logits(x, params), "ep_plan")  # small next to rows of H
        return x, route(
            logits, top_k, router=router, expert_bias=expert_bias, token_mask=token_mask
        )
    _check_replaces(routing, params, router, expert_bias)
    _check_arrays(routing, x.shape[:-1], top_k, num_experts)
    if needs_probs and routing.probs is None:
        raise InvalidArgumentError(
            f"aux_loss_coeff needs routing.probs {[*x.shape[:-1], num_experts]}, got None",
            argument="routing.probs",
        )
    if token_mask is not None:
        routing = eager.run(without_masked, None, routing, token_mask)
    return x, routing


def _unmasked(_: None, token_mask: jax.Array, x: jax.Array) -> jax.Array:
    return unmasked(token_mask, x)


def _logits(x: jax.Array, params: MoEParams) -> jax.Array:
    if params.router is None:
        raise InvalidArgumentError(
            "moe needs params.router, or routing=ep.Routing(topk_idx, topk_weights, ...) of your "
            "own; got neither",
            argument="routing",
        )
    logits = router_logits(x, params.router)
    if params.router_bias is not None:
        if params.router_bias.shape != logits.shape[-1:]:
            raise InvalidArgumentError(
                f"params.router_bias must be [E={logits.shape[-1]}], got "
                f"{list(params.router_bias.shape)}",
                argument="params.router_bias",
            )
        bias = params.router_bias.astype(jnp.float32)
        logits = logits + bias.reshape(*[1] * (logits.ndim - 1), -1)
    return logits


def _check_replaces(
    routing: Any, params: MoEParams, router: Router, expert_bias: jax.Array | None
) -> None:
    """Raises InvalidArgumentError unless `routing` is a Routing and no router is given too."""
    if not isinstance(routing, Routing):
        raise InvalidArgumentError(
            "routing must be ep.Routing(topk_idx, topk_weights, probs=None, logits=None), got "
            f"{type(routing).__name__}",
            argument="routing",
        )
    for name in ("router", "router_bias"):
        if getattr(params, name) is not None:
            raise InvalidArgumentError(
                f"params.{name} must be None with routing=, which replaces the router; got both",
                argument=f"params.{name}",
            )
    left_out = {"router": router == Router(), "expert_bias": expert_bias is None}
    for name, is_default in left_out.items():
        if not is_default:
            raise InvalidArgumentError(
                f"{name} must be left out with routing=, which replaces the router; pass it to "
                "ep.route",
                argument=name,
            )


def _check_arrays(routing: Routing, lead: tuple[int, ...], top_k: int, num_experts: int) -> None:
    """Raises InvalidArgumentError if an array of `routing` has a wrong shape or dtype."""
    for name, array in routing._asdict().items():
        per_slot = name.startswith("topk")
        if array is None and not per_slot:
            continue
        wanted = (*lead, top_k if per_slot else num_experts)
        if array is None or jnp.shape(array) != wanted:
            raise InvalidArgumentError(
                f"routing.{name} must be {list(wanted)}: the leading dims of x and "
                f"{'top_k of the layer' if per_slot else 'all experts'}, got "
                f"{None if array is None else list(jnp.shape(array))}",
                argument=f"routing.{name}",
            )
        dtype, needed = jnp.result_type(array), "a float dtype"
        fits = jnp.issubdtype(dtype, jnp.floating)
        if name == "topk_idx":
            fits, needed = dtype in (jnp.int32, jnp.int64), "int32 (or int64 with x64)"
        if not fits:
            raise InvalidArgumentError(
                f"routing.{name} must be {needed}, got {dtype}", argument=f"routing.{name}"
            )
