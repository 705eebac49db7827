"""Transport "xla": the ops with jax.lax collectives only, summing in the order of the windows.

It is the reference, which runs on every platform of JAX, and the baseline in benchmarks. Values are
bit-equal to the memfd transport's: products are rounded before they are added (XLA on CPU would
contract them to FMA), and every op is a conditional of its own, so that XLA fuses no part of the
model into it, as with a custom call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ep_runtime_client.base.dtypes import sum_dtype
from ep_runtime_client.ops.calls.call import Call
from ep_runtime_client.ops.calls.plan import PlanArrays
from ep_runtime_client.ops.kernels.slots import Packed, exclusive_sum, packed, rows_at
from ep_runtime_client.ops.tracing.varying import like
from ep_runtime_client.ops.transports import fp8_sums, xla_plan
from ep_runtime_client.ops.transports.between_xla import exchange
from ep_runtime_client.ops.transports.protocol import DeviceCall

prepare = xla_plan.prepare


class _Receiver(NamedTuple):
    """The lane rows that each entry and each slab row of this device came from."""

    lane: jax.Array  # [C] of each entry: source * T + place; 0 beyond the last entry
    slot: jax.Array  # [C] of each entry
    row: jax.Array  # [C] slab row of each entry; C beyond the last entry
    filled: jax.Array  # [C] bool of each slab row: an entry fills it
    row_lane: jax.Array  # [C] lane row that each slab row is a copy of; 0 if not filled


def _source(call: Call, plan: PlanArrays) -> Packed:
    """Returns the staged positions of this device's tokens at every rank."""
    peers = jnp.arange(call.group.ep_size, dtype=jnp.int32)[:, None, None]
    return packed((plan.dst_rank == peers).any(-1))


def _receiver(call: Call, plan: PlanArrays) -> _Receiver:
    capacity = call.capacity
    tokens = plan.dst_rank.shape[0]
    staged = plan.recv_count[:, 0]
    first = exclusive_sum(staged)
    entries = plan.recv_count[:, 1].sum()
    # Staged rows have at least one entry, so their starts are distinct.
    numbers = jnp.arange(plan.staged_start.shape[0], dtype=jnp.int32)
    starts = jnp.where(numbers < staged.sum(), plan.staged_start, capacity)
    marks = jnp.zeros(capacity, jnp.int32).at[starts].add(1, mode="drop")
    number = jnp.cumsum(marks, dtype=jnp.int32) - 1
    source = (number[:, None] >= (first + staged)[None, :]).sum(1, dtype=jnp.int32)
    source = jnp.minimum(source, staged.shape[0] - 1)
    valid = jnp.arange(capacity) < entries
    lane = jnp.where(valid, source * tokens + number - rows_at(first, source), 0)
    row = jnp.where(valid, plan.staged_row, capacity)
    filled = jnp.zeros(capacity, bool).at[row].set(True, mode="drop")
    row_lane = jnp.zeros(capacity, jnp.int32).at[row].set(lane, mode="drop")
    return _Receiver(lane, jnp.maximum(plan.staged_slot, 0), row, filled, row_lane)


def _sealed(plan: PlanArrays, body: Callable[[], Any]) -> Any:
    """Runs `body()` as a separate computation, so that XLA fuses nothing across its border.

    The predicate is always true, but no compiler can know it: num_recv is never negative.
    """
    shapes = jax.eval_shape(body)

    def never() -> Any:
        return jax.tree.map(lambda s: like(jnp.zeros(s.shape, s.dtype), plan.num_recv), shapes)

    return lax.cond(plan.num_recv[0] >= 0, body, never)


def _rounded(product: jax.Array, plan: PlanArrays) -> jax.Array:
    """Rounds `product`, so that adding it cannot become an FMA.

    Its bits are xored with a zero that the compiler cannot know.
    """
    bits = jnp.int64 if product.dtype == jnp.float64 else jnp.int32
    zero = (plan.num_recv[0] >> 31).astype(bits)
    return lax.bitcast_convert_type(lax.bitcast_convert_type(product, bits) ^ zero, product.dtype)


def round_to(values: jax.Array, dtype: Any) -> jax.Array:
    """Casts so that XLA does not elide the cast together with a later cast back."""
    if dtype == jnp.bfloat16:
        values = lax.reduce_precision(values, exponent_bits=8, mantissa_bits=7)
    return values.astype(dtype)


def _place_rows(call: Call, plan: PlanArrays, tokens: jax.Array) -> jax.Array:
    """Places copies of tokens [T, H] in the slab [C, H]; zeros in rows without a token."""
    source, receiver = _source(call, plan), _receiver(call, plan)
    lanes = exchange(call, rows_at(tokens, source.token))
    rows = rows_at(lanes.reshape(-1, tokens.shape[1]), receiver.row_lane)
    return jnp.where(receiver.filled[:, None], rows, jnp.zeros((), tokens.dtype))


def dispatch(
    at: DeviceCall, tokens: jax.Array, weights: jax.Array | None, plan: PlanArrays
) -> tuple[jax.Array, jax.Array]:
    call = at.call

    def body() -> tuple[jax.Array, jax.Array]:
        receiver = _receiver(call, plan)
        rows = _place_rows(call, plan, tokens)
        if weights is None:
            return rows, receiver.filled.astype(jnp.float32)
        lanes = exchange(call, rows_at(weights, _source(call, plan).token))
        per_entry = rows_at(lanes.reshape(-1), receiver.lane * weights.shape[1] + receiver.slot)
        blank = jnp.zeros(call.capacity, jnp.float32)
        return rows, blank.at[receiver.row].set(per_entry, mode="drop")

    return _sealed(plan, body)


def _reduce_rows(
    call: Call, plan: PlanArrays, rows: jax.Array, weights: jax.Array | None
) -> jax.Array:
    """Sums slab [C, H] to tokens [T, H]: per rank in slot order, then over ranks in order."""
    dtype, wide = rows.dtype, sum_dtype(rows.dtype)
    tokens, top_k = plan.dst_rank.shape
    staged = plan.recv_count[:, 0]
    places = jnp.arange(tokens, dtype=jnp.int32)
    number = (exclusive_sum(staged)[:, None] + places).reshape(-1)
    here = (places < staged[:, None]).reshape(-1)
    number = jnp.where(here, number, 0)
    start = jnp.where(here, rows_at(plan.staged_start, number), 0)
    end = jnp.where(here, rows_at(plan.staged_start, number + 1), 0)
    total = jnp.zeros((number.shape[0], rows.shape[1]), wide)
    for slot in range(top_k):
        entry = jnp.minimum(start + slot, call.capacity - 1)
        row = jnp.maximum(rows_at(plan.staged_row, entry), 0)
        value = rows_at(rows, row).astype(wide)
        if weights is not None:
            value = _rounded(value * rows_at(weights, row)[:, None].astype(wide), plan)
        total = total + jnp.where((start + slot < end)[:, None], value, 0)
    precision = call.group.combine_precision
    if precision == "fast":
        total = round_to(total, dtype)
    elif precision == "fp8":
        total = fp8_sums.packed(total)
    lanes = total.reshape(call.group.ep_size, tokens, -1)
    back = exchange(call, lanes)
    source = _source(call, plan)
    result = jnp.zeros((tokens, rows.shape[1]), wide)
    for peer in range(call.group.ep_size):
        value = rows_at(back[peer], source.position[peer])
        if precision == "fp8":
            value = _rounded(fp8_sums.unpacked(value, rows.shape[1]), plan)
        result = result + jnp.where(source.has[peer][:, None], value.astype(wide), 0)
    return round_to(result, dtype)


def combine(
    at: DeviceCall, expert_out: jax.Array, weights: jax.Array | None, plan: PlanArrays
) -> jax.Array:
    return _sealed(plan, lambda: _reduce_rows(at.call, plan, expert_out, weights))


def dispatch_bwd(
    at: DeviceCall, d_recv: jax.Array, d_weights: jax.Array, plan: PlanArrays
) -> tuple[jax.Array, jax.Array]:
    call = at.call

    def body() -> tuple[jax.Array, jax.Array]:
        d_tokens = _reduce_rows(call, plan, d_recv, None)
        tokens, top_k = plan.dst_rank.shape
        ranks = call.group.ep_size
        receiver = _receiver(call, plan)
        lane = jnp.where(receiver.row < call.capacity, receiver.lane, ranks * tokens)
        per_entry = rows_at(d_weights, jnp.minimum(receiver.row, call.capacity - 1))
        lanes = jnp.zeros((ranks * tokens, top_k), jnp.float32)
        lanes = lanes.at[lane, receiver.slot].set(per_entry, mode="drop")
        back = exchange(call, lanes.reshape(ranks, tokens, top_k))
        peer = jnp.maximum(plan.dst_rank, 0)
        places = _source(call, plan).position.reshape(-1)
        place = rows_at(places, peer * tokens + jnp.arange(tokens, dtype=jnp.int32)[:, None])
        at_slot = (peer * tokens + place) * top_k + jnp.arange(top_k, dtype=jnp.int32)
        d_topk = rows_at(back.reshape(-1), at_slot)
        return d_tokens, jnp.where(plan.dst_row >= 0, d_topk, 0.0)

    return _sealed(plan, body)


def _halving_sum(products: jax.Array) -> jax.Array:
    """Sums [C, W] -> [C]: s[i] += s[half + i] until one is left, half = ceil(width / 2)."""
    width = products.shape[1]
    while width > 1:
        half = (width + 1) // 2
        upper = jnp.pad(products[:, half:], ((0, 0), (0, 2 * half - width)))
        products, width = products[:, :half] + upper, half
    return products[:, 0]


def combine_bwd(
    at: DeviceCall,
    grad: jax.Array,
    expert_out: jax.Array | None,
    weights: jax.Array | None,
    plan: PlanArrays,
) -> tuple[jax.Array, jax.Array | None]:
    call = at.call

    def body() -> tuple[jax.Array, jax.Array | None]:
        rows = _place_rows(call, plan, grad)
        if weights is None or expert_out is None:
            return rows, None
        wide, filled = sum_dtype(grad.dtype), _receiver(call, plan).filled
        scaled = round_to(rows.astype(wide) * weights[:, None].astype(wide), grad.dtype)
        d_expert_out = jnp.where(filled[:, None], scaled, jnp.zeros((), grad.dtype))
        products = _rounded(rows.astype(wide) * expert_out.astype(wide), plan)
        d_weights = jnp.where(filled, _halving_sum(products), 0).astype(jnp.float32)
        return d_expert_out, d_weights

    return _sealed(plan, body)
