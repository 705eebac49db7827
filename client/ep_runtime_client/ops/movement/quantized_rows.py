"""dispatch of tokens that are quantized where they are: 8-bit rows and their scales cross.

Only recipes that quantize every row by itself are served: quantizing then commutes with moving
rows, and what arrives has the bits of rows quantized where they arrive. One exchange moves both as
bytes (`quantize/row_bytes.py`), so that every transport serves it. Gradients go straight through,
as those of `grouped_gemm(recipe=)` do: what the matmul says of its rows is summed as any dispatch's
rows are.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from ep_runtime.errors import InvalidArgumentError
from ep_runtime.specs import DTYPE_BYTES, GroupSpec
from ep_runtime_client.ops.calls.call import Call
from ep_runtime_client.ops.calls.plan import AnyArrays, Plan
from ep_runtime_client.ops.movement import per_device
from ep_runtime_client.ops.movement.dispatch_rows import exchange, pullback, ready
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

Leaves = tuple[jax.Array, jax.Array]  # data as uint8 and f32 scales


@dataclasses.dataclass(frozen=True)
class Sending:
    """The static argument of one call. Hashable.

    Attributes:
        call: as any dispatch's.
        recipe: how rows are quantized.
    """

    call: Call
    recipe: Recipe

    @property
    def hidden(self) -> int:
        return self.call.group.hidden_size

    @property
    def tile(self) -> int:
        return format_of(self.recipe).tile


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


def send(
    sending: Sending,
    index: jax.Array,
    tokens: jax.Array | QuantizedTensor,
    weights: jax.Array | None,
    plan: Plan,
) -> tuple[QuantizedTensor, jax.Array]:
    """(rows [R, C, H], recv_weights [R, C])."""
    call = sending.call
    if call.layout.tokens_per_rank == 0:
        return _nothing(sending, tokens, plan)
    with scope("dispatch", call.layer):
        origin, given = _taken_apart(tokens)
        call, (origin, given), weights = ready(call, index, (origin, given), weights, plan.arrays)
        sending = dataclasses.replace(sending, call=call)
        operands = (index, origin, given, weights, plan.arrays)
        (data, scale, rows), recv_weights = eager.settled(_moved, sending, *operands, traced=_send)
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
    sending: Sending, data: jax.Array, scale: jax.Array, origin: jax.Array | None, plan: Plan
) -> QuantizedTensor:
    data = from_bits(data, sending.recipe.data_dtype())
    sizes = plan.arrays.group_sizes
    return QuantizedTensor(data, scale, None, None, None, sizes, origin, sending.recipe)


def _nothing(sending: Sending, tokens: Any, plan: Plan) -> tuple[QuantizedTensor, jax.Array]:
    """What arrives where no rank has a token."""
    lead = (sending.call.num_slabs, sending.call.capacity)
    data = jnp.zeros((*lead, sending.hidden), jnp.uint8)
    scale = jnp.ones((*lead, num_tiles(sending.hidden, sending.tile)), jnp.float32)
    origin = _taken_apart(tokens)[0]
    blank = None if origin is None else jnp.zeros(data.shape, origin.dtype)
    return _rows(sending, data, scale, blank, plan), jnp.zeros(lead, jnp.float32)


def _primal(
    sending: Sending,
    index: jax.Array,
    tokens: jax.Array | None,
    given: Leaves | None,
    weights: jax.Array | None,
    arrays: AnyArrays,
) -> Any:
    """tokens [..., H], or data and scales of them, and weights [..., K] or None ->
    (data [R, C, H] as uint8, scales, rows like tokens for gradients), recv_weights [R, C].

    Those rows are what the data stand for. A compiled program makes them where they are read,
    which no gradient does.
    """
    origin = None if tokens is None else tokens.dtype
    return _moved(sending, index, tokens, given, weights, arrays, origin=origin)


def _moved(
    sending: Sending,
    index: jax.Array,
    tokens: jax.Array | None,
    given: Leaves | None,
    weights: jax.Array | None,
    arrays: AnyArrays,
    *,
    origin: Any = None,
) -> Any:
    """`_primal`, but that `origin`, the dtype of the rows for gradients, is None where nobody takes
    one: of arrays that are there."""
    call = sending.call
    rows = (tokens,) if given is None else given
    sent = (*rows, *(() if weights is None else (weights,)))

    def body(index: jax.Array, *operands: jax.Array) -> Any:
        local = [x.reshape(-1, x.shape[-1]) for x in operands[: len(sent)]]
        plan = type(arrays)(*(x[0] for x in operands[len(sent) :]))
        data, scale = local[:2] if given is not None else quantized(sending.recipe, local[0], plan)
        packed = to_bytes(data, scale, sending.tile)
        raw, recv_weights = exchange(
            call, index, packed, None if weights is None else local[-1], plan
        )
        data, scale = from_bytes(raw, sending.hidden, sending.tile)
        made = [data, scale]
        if origin is not None:
            values = widen(from_bits(data, sending.recipe.data_dtype()))
            scales = spread_tiles(scale, 1, sending.tile, sending.hidden)
            made.append((values * scales).astype(origin))
        return tuple(x[None] for x in (*made, recv_weights))

    operands = (index, *sent, *arrays)
    lies = (((),), *[call.layout.entries()] * len(sent), *per_device.slabs(call, *arrays))
    slabs = [(call.group.token_axes,)] * (3 if origin is None else 4)
    variant = f"{sending.recipe!r} {origin}"
    *made, recv_weights = per_device.run(
        call, "dispatch", body, operands, lies, slabs, variant=variant
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


def _fwd(
    sending: Sending,
    index: jax.Array,
    tokens: jax.Array | None,
    given: Leaves | None,
    weights: jax.Array | None,
    arrays: AnyArrays,
) -> Any:
    if tokens is None:
        raise NotImplementedError(
            "dispatch of quantized tokens without their origin (the values before they were "
            "quantized) has no gradient; pass tokens made by grouped_quantize, or stop_gradient "
            "the weights"
        )
    made = eager.settled(_primal, sending, index, tokens, given, weights, arrays)
    return made, (index, arrays, weights is not None)


def _bwd(sending: Sending, saved: Any, grads: Any) -> Any:
    index, arrays, weighted = saved
    (_, _, d_rows), d_recv_weights = grads
    with scope("dispatch_bwd", sending.call.layer):
        d_tokens, d_weights = eager.settled(
            pullback, sending.call, index, d_rows, d_recv_weights, arrays
        )
    return None, d_tokens, None, d_weights if weighted else None, None


_send = jax.custom_vjp(_primal, nondiff_argnums=(0,))
first_order.defvjp("dispatch", _send, _fwd, _bwd)
