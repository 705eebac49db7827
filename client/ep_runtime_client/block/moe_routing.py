"""Where a block's tokens go: as its router says, or as the caller did."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from ep_runtime.errors import InvalidArgumentError
from ep_runtime_client.block.params import MoEParams
from ep_runtime_client.ops.routing.api import Routing, route
from ep_runtime_client.ops.routing.matmul import router_logits


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What a routing of one call looks like: topk_idx is [*lead, top_k], probs [*lead, experts]."""

    lead: tuple[int, ...]
    top_k: int
    experts: int


def routed(
    x: jax.Array,
    params: MoEParams,
    sizes: Sizes,
    given: Routing | None,
    options: Mapping[str, Any],
    aux_loss_coeff: float,
) -> Routing:
    """The routing of x [..., H]: `given`, or what `route` makes of the router's logits.

    Args:
        x: tokens of the block.
        params: of the block; without a router where `given` is.
        sizes: of this call.
        given: the caller's, or None.
        options: of `route`, all at their defaults where `given` is.
        aux_loss_coeff: of the loss, which needs the shares of all experts.

    Raises:
        InvalidArgumentError: neither a router nor a routing, both, or one that does not fit.
    """
    if given is None:
        logits = checkpoint_name(_logits(x, params), "ep_plan")  # beside rows of H: little
        return route(logits, sizes.top_k, **options)
    _check_place(params, given)
    known = inspect.signature(route).parameters
    said = [name for name, value in options.items() if _differs(value, known[name].default)]
    if said:
        raise InvalidArgumentError(
            f"{', '.join(said)} say how route reads a router's logits: give them to ep.route, not "
            "to moe beside routing",
            argument=said[0],
        )
    _check_arrays(given, sizes)
    if aux_loss_coeff != 0.0 and given.probs is None:
        raise InvalidArgumentError(
            f"aux_loss_coeff={aux_loss_coeff} needs routing.probs {_text(sizes, sizes.experts)}, "
            "got None",
            argument="routing.probs",
        )
    return given


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
                f"params.{name} must be None beside routing, which comes in a router's place; got "
                "both",
                argument=f"params.{name}",
            )


def _differs(value: Any, default: Any) -> bool:
    return value is not None if default is None else bool(value != default)


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
