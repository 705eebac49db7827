"""dispatch of tokens that are quantized where they are: 8-bit rows and their scales cross.

Only recipes that quantize every row by itself are served: quantizing then commutes with moving
rows, and what arrives has the bits of rows quantized where they arrive. One exchange moves both as
bytes (`quantize/row_bytes.py`), so that every transport serves it. Gradients go straight through,
as those of `grouped_gemm(recipe=)` do: what the matmul says of its rows is summed as any dispatch's
rows are.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from ep_runtime.errors import InvalidArgumentError
from ep_runtime.specs import DTYPE_BYTES, GroupSpec
from ep_runtime_client.ops.calls.call import Call
from ep_runtime_client.ops.calls.plan import AnyArrays
from ep_runtime_client.ops.movement import per_device
from ep_runtime_client.ops.movement.dispatch_rows import exchange, pulled, ready
from ep_runtime_client.ops.movement.per_device import Rows
from ep_runtime_client.ops.quantize import plain
from ep_runtime_client.ops.quantize.formats.recipes import Recipe, check_recipe
from ep_runtime_client.ops.quantize.formats.table import format_of
from ep_runtime_client.ops.quantize.formats.tiles import (
    bits,
    from_bits,
    num_tiles,
    spread_tiles,
    widen,
)
from ep_runtime_client.ops.quantize.quantized_tensor import QuantizedTensor
from ep_runtime_client.ops.quantize.row_bytes import from_bytes, row_bytes, to_bytes
from ep_runtime_client.ops.tracing import eager, first_order
from ep_runtime_client.ops.tracing.scopes import scope
from ep_runtime_client.ops.transports.protocol import DeviceCall

Leaves = tuple[jax.Array, jax.Array]  # data as uint8 and f32 scales


class Sending(NamedTuple):
    """The static argument of one call. Hashable.

    Attributes:
        call: as any dispatch's.
        recipe: how rows are quantized.
    """

    call: Call
    recipe: Recipe


def refused(recipe: Recipe, group: GroupSpec) -> str:
    """Why rows of a group cannot be quantized before they are sent; nothing if they can."""
    form = format_of(recipe)
    if not recipe.quantizes:
        return "it quantizes nothing: cast the tokens instead"
    if form.columns:
        return "the weights' gradient wants a copy that is quantized along the rows as received"
    if not form.by_row:
        return (
            "it has one scale per expert, of the rows that the expert receives (scales of earlier "
            "steps, as delayed scaling has them, would do, and are not there yet)"
        )
    wanted = row_bytes(group.hidden_size, form.tile)
    fits = group.hidden_size * DTYPE_BYTES[group.max_token_dtype]
    if wanted > fits:
        return (
            f"a row of hidden_size={group.hidden_size} takes {wanted} bytes with its scales, a "
            f"staged row of group {group.name!r} has {fits}"
        )
    return ""


def check(group: GroupSpec, recipe: Any, tokens: Any) -> None:
    """Raises InvalidArgumentError unless `tokens` can be sent as the recipe quantizes them."""
    check_recipe(recipe, " or None")
    why = refused(recipe, group)
    if why:
        raise InvalidArgumentError(
            f"recipe {recipe} cannot quantize rows before they are sent: {why}", argument="recipe"
        )
    if isinstance(tokens, QuantizedTensor):
        _check_quantized(tokens)
    elif not jnp.issubdtype(tokens.dtype, jnp.floating) or tokens.dtype.itemsize == 1:
        raise InvalidArgumentError(
            f"tokens must have a float dtype of 2 bytes or more to be quantized, "
            f"got {tokens.dtype}",
            argument="tokens",
        )


def _check_quantized(tokens: QuantizedTensor) -> None:
    wanted = (*tokens.shape[:-1], num_tiles(tokens.shape[-1], format_of(tokens.recipe).tile))
    found = None if tokens.scale is None else tuple(tokens.scale.shape)
    if found != wanted or tokens.dtype.itemsize != 1 or not tokens.is_rows:
        raise InvalidArgumentError(
            f"tokens must be rows of 1-byte data [..., H] with scales {list(wanted)} "
            f"(grouped_quantize makes them of rows with group_sizes), got {tokens.dtype} "
            f"{list(tokens.shape)} with {'none' if found is None else list(found)}",
            argument="tokens",
        )


def send(sending: Sending, given: Rows) -> tuple[QuantizedTensor, jax.Array]:
    """(rows [R, C, H], recv_weights [R, C])."""
    call, plan = sending.call, given.plan
    values = _taken_apart(given.values)
    if call.layout.tokens_per_rank == 0:
        return _nothing(sending, values[0], plan)
    with scope("dispatch", call.layer):
        call, given = ready(call, given._replace(values=values))
        sending = sending._replace(call=call)
        (data, scale, rows), recv_weights = eager.settled(_moved, sending, given, traced=_send)
    # Quantized rows too: who keeps those of a matmul keeps these, and moves nothing again.
    leaves = (checkpoint_name(x, "ep_recv") for x in lax.stop_gradient((data, scale)))
    data, scale = (checkpoint_name(x, "ep_q_x") for x in leaves)
    return _rows(sending, data, scale, rows, plan), recv_weights


def _taken_apart(tokens: Any) -> tuple[jax.Array | None, Leaves | None]:
    """(where gradients go, data and scales, where they are given)."""
    if not isinstance(tokens, QuantizedTensor):
        return tokens, None
    origin: Any = tokens.origin
    given: Any = lax.stop_gradient((bits(tokens.data), tokens.scale))
    return origin, given


def _rows(
    sending: Sending, data: jax.Array, scale: jax.Array, origin: jax.Array | None, plan: AnyArrays
) -> QuantizedTensor:
    data = from_bits(data, sending.recipe.data_dtype())
    return QuantizedTensor(data, scale, None, None, None, plan.group_sizes, origin, sending.recipe)


def _nothing(
    sending: Sending, origin: jax.Array | None, plan: AnyArrays
) -> tuple[QuantizedTensor, jax.Array]:
    """What arrives where no rank has a token."""
    call, hidden = sending.call, sending.call.group.hidden_size
    lead, tile = (call.num_slabs, call.capacity), format_of(sending.recipe).tile
    data = jnp.zeros((*lead, hidden), jnp.uint8)
    scale = jnp.ones((*lead, num_tiles(hidden, tile)), jnp.float32)
    blank = None if origin is None else jnp.zeros(data.shape, origin.dtype)
    return _rows(sending, data, scale, blank, plan), jnp.zeros(lead, jnp.float32)


def _primal(sending: Sending, given: Rows) -> Any:
    """(tokens [..., H], or data and scales of them), weights [..., K] or None ->
    (data [R, C, H] as uint8, scales, rows like tokens for gradients), recv_weights [R, C].

    Those rows are what the data stand for. A compiled program makes them where they are read,
    which no gradient does.
    """
    origin = given.values[0]
    return _moved(sending, given, origin=None if origin is None else origin.dtype)


def _moved(sending: Sending, given: Rows, *, origin: Any = None) -> Any:
    """`_primal`, but that `origin`, the dtype of the rows for gradients, is None where nobody takes
    one: of arrays that are there."""
    call, recipe = sending
    tile, hidden = format_of(recipe).tile, call.group.hidden_size
    tokens, leaves = given.values

    def body(at: DeviceCall, tokens: Any, leaves: Any, weights: Any, plan: AnyArrays) -> Any:
        data, scale = leaves or quantized(recipe, tokens, plan)
        raw, recv_weights = exchange(at, to_bytes(data, scale, tile), weights, plan)
        data, scale = from_bytes(raw, hidden, tile)
        if origin is None:
            return data, scale, recv_weights
        values = widen(from_bits(data, recipe.data_dtype()))
        values = values * spread_tiles(scale, 1, tile, hidden)
        return data, scale, values.astype(origin), recv_weights

    operands = (tokens if leaves is None else None, leaves, given.weights)
    *made, recv_weights = per_device.run(
        call,
        "dispatch",
        body,
        given.layer_index,
        operands,
        (given.plan,),
        results=3 if origin is None else 4,
        variant=f"{recipe!r} {origin}",
    )
    return ((*made, None) if origin is None else tuple(made)), recv_weights


def quantized(recipe: Recipe, tokens: jax.Array, plan: Any) -> tuple[jax.Array, jax.Array]:
    """Tokens [T, H] of this device: data and scales.

    A size that no compiler knows keeps the rows' loop a loop: nothing of the model is fused into
    it, which would round the tokens otherwise.
    """
    hidden_zero = plan.num_recv >> 31
    sizes = hidden_zero + jnp.int32(tokens.shape[0])
    q = plain.quantize_rows(recipe, tokens, sizes)
    assert q.scale is not None
    return q.data, q.scale


def _fwd(sending: Sending, given: Rows) -> Any:
    if given.values[0] is None:
        raise NotImplementedError(
            "dispatch of quantized tokens without their origin (the values before they were "
            "quantized) has no gradient; pass tokens made by grouped_quantize, or stop_gradient "
            "the weights"
        )
    saved = (given.layer_index, given.plan, given.weights is not None)
    return eager.settled(_primal, sending, given), saved


def _bwd(sending: Sending, saved: Any, grads: Any) -> tuple[Rows]:
    (_, _, d_rows), d_recv_weights = grads
    made = pulled(sending.call, saved, d_rows, d_recv_weights)
    return (made._replace(values=(made.values, None)),)


_send = jax.custom_vjp(_primal, nondiff_argnums=(0,))
first_order.defvjp("dispatch", _send, _fwd, _bwd)
