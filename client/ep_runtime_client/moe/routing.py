"""Where a block's tokens go: as its router says, or as the caller did."""

from __future__ import annotations

import dataclasses
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


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What a routing of one call looks like: topk_idx is [*lead, top_k], probs [*lead, experts]."""

    lead: tuple[int, ...]
    top_k: int
    experts: int


@dataclasses.dataclass(frozen=True)
class AskedRouting:
    """The arguments of one `moe` call that concern routing.

    Attributes:
        given: a routing of the caller's, or None.
        router, expert_bias, token_mask: as in `moe`.
        loss: whether a loss needs the shares of all experts.
    """

    given: Routing | None
    router: Router
    expert_bias: jax.Array | None
    token_mask: jax.Array | None
    loss: bool


def routed(x: jax.Array, params: MoEParams, sizes: Sizes, asked: AskedRouting) -> Routing:
    """The routing of x [..., H]: the caller's, or what `route` makes of the router's logits.

    Raises:
        InvalidArgumentError: neither a router nor a routing, both, or one that does not fit.
    """
    given, mask = asked.given, asked.token_mask
    if given is None:
        logits = checkpoint_name(_logits(x, params), "ep_plan")  # beside rows of H: little
        bias, router = asked.expert_bias, asked.router
        return route(logits, sizes.top_k, router=router, expert_bias=bias, token_mask=mask)
    _check_place(params, given)
    for name, default in (("router", Router()), ("expert_bias", None)):
        value = getattr(asked, name)
        if value is not default and (default is None or value != default):
            raise InvalidArgumentError(
                f"{name} must be left out with routing=, which replaces the router; pass it to "
                "ep.route",
                argument=name,
            )
    _check_arrays(given, sizes)
    if asked.loss and given.probs is None:
        raise InvalidArgumentError(
            f"aux_loss_coeff needs routing.probs {_text(sizes, sizes.experts)}, got None",
            argument="routing.probs",
        )
    if mask is None:
        return given
    found: Routing = eager.run(without_masked, None, given, mask)
    return found


def counted(x: jax.Array, token_mask: jax.Array | None) -> jax.Array:
    """Tokens [..., H] with zeros for masked ones, which may be NaN."""
    if token_mask is None:
        return x
    found: jax.Array = eager.run(_unmasked, None, token_mask, x)
    return found


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


def _check_place(params: MoEParams, given: Any) -> None:
    if not isinstance(given, Routing):
        raise InvalidArgumentError(
            "routing must be ep.Routing(topk_idx, topk_weights, probs=None, logits=None), got "
            f"{type(given).__name__}",
            argument="routing",
        )
    for name in ("router", "router_bias"):
        if getattr(params, name) is not None:
            raise InvalidArgumentError(
                f"params.{name} must be None with routing=, which replaces the router; got both",
                argument=f"params.{name}",
            )


def _check_arrays(given: Routing, sizes: Sizes) -> None:
    """Raises InvalidArgumentError that names the array, and both shapes or its dtype."""
    for name, array in given._asdict().items():
        per_slot = name.startswith("topk")
        if array is None and not per_slot:
            continue
        last = sizes.top_k if per_slot else sizes.experts
        if array is None or jnp.shape(array) != (*sizes.lead, last):
            raise InvalidArgumentError(
                f"routing.{name} must be {_text(sizes, last)}: the leading dims of x and "
                f"{'top_k of the layer' if per_slot else 'all experts'}, got "
                f"{None if array is None else list(jnp.shape(array))}",
                argument=f"routing.{name}",
            )
        dtype, wanted = jnp.result_type(array), "a float dtype"
        fits = jnp.issubdtype(dtype, jnp.floating)
        if name == "topk_idx":
            fits, wanted = dtype in (jnp.int32, jnp.int64), "int32 (or int64 with x64)"
        if not fits:
            raise InvalidArgumentError(
                f"routing.{name} must be {wanted}, got {dtype}", argument=f"routing.{name}"
            )


def _text(sizes: Sizes, last: int) -> str:
    return str([*sizes.lead, last])
