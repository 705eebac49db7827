"""Defines the ops on one device, over arrays of all R slabs, as the oracle of the tests.

Written from the contract and not from the transports: routing is plain Python loops over NumPy
arrays, data movement is one gather or one scatter-add in jnp, so that `jax.grad` of these
functions is the meaning of the gradients.

Slabs are numbered as on dim 0 of dispatched rows: outer shard major, ep rank minor. Token arrays
have a leading slab dim here: [R, T, ...] with T tokens of one rank.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from ep_runtime.layout import align_up, kept_rows

Ints = npt.NDArray[np.int32]


@dataclasses.dataclass(frozen=True)
class ReferencePlan:
    """The destination of every row.

    Attributes:
        arrays: the nine plan arrays by name, each with a leading slab dim R.
        slab: [R, T, K] slab (0..R-1) that holds the slot's row, -1 where there is none.
        row: [R, T, K] row in that slab, -1 where there is none.
        source: [R, C] flat slot (slab * T + token) * K + slot of every row, -1 for padding.
        in_zone: [R, C] whether a row lies in an expert's zone (its value is defined).
        capacity: C.
    """

    arrays: dict[str, Ints]
    slab: Ints
    row: Ints
    source: Ints
    in_zone: npt.NDArray[np.bool_]
    capacity: int


def plan(
    topk_idx: Any,
    *,
    num_experts: int,
    ep_size: int,
    alignment: int,
    capacity: int,
    row_alignment: int | None = None,
) -> ReferencePlan:
    """Plans topk_idx [R, T, K] over R / ep_size independent EP groups.

    Zones lie aligned to `row_alignment` if it is given.
    """
    idx = np.asarray(topk_idx)
    slabs, tokens, top_k = idx.shape
    local = num_experts // ep_size
    slab = np.full(idx.shape, -1, np.int32)
    row = np.full(idx.shape, -1, np.int32)
    source = np.full((slabs, capacity), -1, np.int32)
    in_zone = np.zeros((slabs, capacity), bool)
    sizes = {name: np.zeros((slabs, local), np.int32) for name in ("kept", "group_sizes")}
    demanded = np.zeros((slabs, 1), np.int32)
    for dest in range(slabs):
        first_source = dest // ep_size * ep_size
        arriving: list[list[tuple[int, int, int]]] = [[] for _ in range(local)]
        for origin in range(first_source, first_source + ep_size):
            for token in range(tokens):
                for slot in range(top_k):
                    expert = int(idx[origin, token, slot])
                    if 0 <= expert < num_experts and expert // local == dest % ep_size:
                        arriving[expert % local].append((origin, token, slot))
        demand = [len(rows) for rows in arriving]
        kept = kept_rows(demand, capacity, alignment)
        demanded[dest, 0] = sum(align_up(n, alignment) for n in demand)
        base = 0
        for expert, rows in enumerate(arriving):
            for position, (origin, token, slot) in enumerate(rows[: kept[expert]]):
                slab[origin, token, slot] = dest
                row[origin, token, slot] = base + position
                source[dest, base + position] = (origin * tokens + token) * top_k + slot
            zone = align_up(kept[expert], row_alignment or alignment)
            in_zone[dest, base : base + zone] = True
            sizes["kept"][dest, expert], sizes["group_sizes"][dest, expert] = kept[expert], zone
            base += zone
    arrays = {
        "dst_rank": np.where(slab >= 0, slab % ep_size, -1).astype(np.int32),
        "dst_row": row,
        **_receiver_arrays(slab, row, ep_size, capacity),
        **sizes,
        "num_recv": demanded,
    }
    return ReferencePlan(arrays, slab, row, source, in_zone, capacity)


def _receiver_arrays(slab: Ints, row: Ints, ep_size: int, capacity: int) -> dict[str, Ints]:
    """Returns recv_count, staged_start, staged_row and staged_slot of every slab."""
    slabs, tokens, top_k = slab.shape
    counts = np.zeros((slabs, ep_size, 4), np.int32)
    start = np.zeros((slabs, ep_size * tokens + 1), np.int32)
    rows = np.full((slabs, capacity), -1, np.int32)
    slots = np.full((slabs, capacity), -1, np.int32)
    for dest in range(slabs):
        staged = entries = 0
        for peer in range(ep_size):
            origin = dest // ep_size * ep_size + peer
            for token in range(tokens):
                mine = [k for k in range(top_k) if slab[origin, token, k] == dest]
                if not mine:
                    continue
                start[dest, staged] = entries
                counts[dest, peer, 0] += 1
                counts[dest, peer, 2] += token < (tokens + 1) // 2
                for slot in mine:
                    rows[dest, entries] = row[origin, token, slot]
                    slots[dest, entries] = slot
                    entries += 1
                counts[dest, peer, 1] += len(mine)
                staged += 1
        start[dest, staged:] = entries
    return {"recv_count": counts, "staged_start": start, "staged_row": rows, "staged_slot": slots}


def with_pair_counts(recv_count: Ints, ep_size: int) -> Ints:
    """Turns recv_count [R, N, 4] into that of plans of packed calls, [R, N, 4 + 2 * N].

    Of each source also its staged rows for every rank, then those of the first half of its tokens.
    """
    domains = recv_count.reshape(-1, ep_size, ep_size, 4)  # slabs of each domain, by source
    pairs = [domains[..., column].swapaxes(1, 2) for column in (0, 2)]
    of_all = np.concatenate(pairs, -1)[:, None].repeat(ep_size, 1)
    return np.concatenate([domains, of_all], -1).reshape(-1, ep_size, 4 + 2 * ep_size)


def dispatch(
    plan: ReferencePlan, tokens: jax.Array, topk_weights: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """tokens [R, T, H], topk_weights [R, T, K] or None -> rows [R, C, H], weights [R, C]."""
    top_k = plan.slab.shape[-1]
    used = jnp.asarray(plan.source >= 0)
    source = np.maximum(plan.source, 0)
    rows = tokens.reshape(-1, tokens.shape[-1])[source // top_k]
    rows = jnp.where(used[..., None], rows, jnp.zeros((), tokens.dtype))
    if topk_weights is None:
        return rows, used.astype(jnp.float32)
    return rows, jnp.where(used, topk_weights.reshape(-1)[source], 0.0)


def combine(
    plan: ReferencePlan,
    expert_out: jax.Array,
    weights: jax.Array | None,
    *,
    combine_precision: str = "exact",
) -> jax.Array:
    """expert_out [R, C, H], weights [R, C] or None -> tokens [R, T, H]."""
    slabs, tokens, top_k = plan.slab.shape
    wide = jnp.float64 if expert_out.dtype == jnp.float64 else jnp.float32
    used = jnp.asarray(plan.slab >= 0)
    slab, row = np.maximum(plan.slab, 0), np.maximum(plan.row, 0)
    rows = expert_out.astype(wide)[slab, row]
    if weights is not None:
        rows = rows * weights[slab, row][..., None].astype(wide)
    rows = jnp.where(used[..., None], rows, 0)
    total = jnp.zeros((slabs, tokens, expert_out.shape[-1]), wide)
    for peer in range(slabs):
        partial = jnp.zeros_like(total)
        for slot in range(top_k):
            here = plan.slab[:, :, slot] == peer
            if here.any():
                partial = partial + jnp.where(here[..., None], rows[:, :, slot], 0)
        if combine_precision == "fast":
            partial = partial.astype(expert_out.dtype).astype(wide)
        elif combine_precision == "fp8":
            partial = _through_fp8(partial)
        total = total + partial
    return total.astype(expert_out.dtype)


def _through_fp8(sums: jax.Array) -> jax.Array:
    """Rounds f32 sums [..., H] to e4m3 with a scale per 128 values; gradients stay as they are."""
    hidden = sums.shape[-1]
    blocks = jnp.pad(sums, [(0, 0)] * (sums.ndim - 1) + [(0, -hidden % 128)])
    blocks = jax.lax.stop_gradient(blocks.reshape(*sums.shape[:-1], -1, 128))
    amax = jnp.max(jnp.where(jnp.isfinite(blocks), jnp.abs(blocks), 0), -1, keepdims=True)
    scale = jnp.where(amax < 2.0**-126, 1, jnp.maximum(amax / 448, 2.0**-126))
    data = jnp.where(jnp.isfinite(blocks), jnp.clip(blocks / scale, -448, 448), blocks)
    rounded = data.astype(jnp.float8_e4m3fn).astype(sums.dtype) * scale
    rounded = rounded.reshape(*sums.shape[:-1], -1)[..., :hidden]
    return sums + jax.lax.stop_gradient(rounded - sums)


def to_slabs(array: Any, axes: tuple[tuple[str, ...], ...], group: Any) -> Any:
    """Reshapes a global token array [lead..., D] to [R, T, D], with each shard's block flattened.

    `axes` names the token axes on each leading dim; slabs are in the group's order.
    """
    order, lead = group.token_axes, len(axes)
    sizes = group.axis_sizes
    shape: list[int] = []
    places: dict[str, int] = {}
    blocks: list[int] = []
    for dim, names in enumerate(axes):
        rest = array.shape[dim]
        for name in names:
            places[name] = len(shape)
            shape.append(sizes[name])
            rest //= sizes[name]
        blocks.append(len(shape))
        shape.append(rest)
    split = array.reshape(*shape, array.shape[lead])
    front = [places[name] for name in order]
    split = split.transpose(*front, *blocks, split.ndim - 1)
    tokens = math.prod(shape) // group.num_slabs
    return split.reshape(group.num_slabs, tokens, array.shape[lead])
