"""Computes sizes of slabs and lanes in rows.

The client, the daemon and the tests use these functions, which need only Python integers. The
native library repeats the functions that run per step in `csrc/core/memory/layout.h`.

Shape letters: T tokens of one rank, K top_k, E experts, N ranks of one EP group, L experts of one
rank, C rows of one slab.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import ceil, isinf

from ep_runtime.arguments import check_at_least, check_whole
from ep_runtime.errors import InvalidArgumentError

FP8_BLOCK = 128  # with combine_precision "fp8", values of a sum that share an f32 scale


def scaled_bytes(width: int, tile: int = FP8_BLOCK) -> int:
    """Returns bytes of `width` 8-bit values and, aligned to 4, an f32 scale per `tile`."""
    return align_up(width, 4) + ceil(width / tile) * 4


def align_up(value: int, alignment: int) -> int:
    """Rounds `value` up to a multiple of `alignment`."""
    return -(-value // alignment) * alignment


def node_size(nodes: Sequence[str], ep_size: int) -> int:
    """Returns G, how many consecutive ranks of an EP group share windows, by their nodes.

    Args:
        nodes: the node of each world rank.
        ep_size: N, which divides the number of ranks; N consecutive world ranks are an EP group.

    Returns:
        The largest divisor of N for which each aligned block of G ranks is on one node.
    """

    def fits(size: int) -> bool:
        blocks = (nodes[first : first + size] for first in range(0, len(nodes), size))
        return all(len(set(block)) == 1 for block in blocks)

    divisors = (size for size in range(ep_size, 0, -1) if ep_size % size == 0)
    return next(size for size in divisors if fits(size))


def recv_capacity(
    *,
    num_experts: int,
    top_k: int,
    max_tokens_per_rank: int,
    ep_size: int,
    alignment: int,
    capacity_factor: float | None = None,
) -> int:
    """Computes C, the number of rows of one rank's slab.

    Without a factor, C is the no-drop bound: no routing with distinct experts per token needs
    more. With a factor, C is this multiple of the balanced load, but at most the bound.

    Args:
        num_experts: E, the experts of the whole EP group; a multiple of ep_size.
        top_k: K, experts per token.
        max_tokens_per_rank: T, tokens of one rank.
        ep_size: N, ranks of the EP group.
        alignment: rows; every expert's zone is a multiple of it.
        capacity_factor: at least 1.0; None for the no-drop bound.

    Returns:
        Rows per slab.

    Raises:
        InvalidArgumentError: a size is below 1, E does not divide by N, or the factor is below 1.

    Cost: arithmetic on sizes.

    Source: the factor is GShard's (arXiv:2006.16668).
    """
    for name, value in (
        ("num_experts", num_experts),
        ("top_k", top_k),
        ("max_tokens_per_rank", max_tokens_per_rank),
        ("ep_size", ep_size),
        ("alignment", alignment),
    ):
        check_whole(name, value)
    if num_experts % ep_size:
        raise InvalidArgumentError(
            f"num_experts={num_experts} does not divide by the ep size {ep_size}",
            argument="num_experts",
        )
    experts = num_experts // ep_size
    rows = ep_size * max_tokens_per_rank * min(top_k, experts)
    padded = align_up(rows + (alignment - 1) * min(experts, rows), alignment)
    bound = min(padded, experts * align_up(ep_size * max_tokens_per_rank, alignment))
    if capacity_factor is None:
        return bound
    check_at_least("capacity_factor", capacity_factor, 1.0)
    if isinf(capacity_factor):
        raise InvalidArgumentError(
            "capacity_factor must be finite, got inf; None is room for any routing",
            argument="capacity_factor",
        )
    factor = Fraction(str(1 * capacity_factor))  # exact: 1.1 * 100 must be 110
    balanced = experts * align_up(ceil(max_tokens_per_rank * top_k / experts), alignment)
    return min(bound, align_up(ceil(factor * balanced), alignment))


def spread_capacity(
    capacity: int, *, slots: int, experts: int, spare_experts: int, alignment: int
) -> int:
    """Computes the rows of a slab whose experts may have copies on other ranks.

    Copies even out the load, so that a rank gets about an even share: at most `slots` and at most
    `capacity` rows. With a spare slot for each of its experts, a rank gets at most 1.03 shares.

    Args:
        capacity: C of the call, above which rows were dropped before.
        slots: T * K of the call.
        experts: L, experts of one rank.
        spare_experts: slots of a rank for copies of experts.
        alignment: rows; every expert's zone is a multiple of it.

    Returns:
        Rows per slab, padding included.
    """
    even = min(slots, capacity)
    balanced = even + 3 * even // 100
    padded = align_up(balanced + (alignment - 1) * (experts + spare_experts), alignment)
    return padded if spare_experts >= experts else max(capacity, padded)


def packed_columns(ep_size: int) -> int:
    """Returns the length of a plan's recv_count if rows are packed: with counts of all pairs."""
    return 4 + 2 * ep_size


def kept_rows(demand: list[int], capacity: int, alignment: int) -> list[int]:
    """Returns how many rows each local expert keeps of `demand` in a slab of `capacity` rows.

    Every expert keeps its first min(demand, q) rows; q is the largest level whose aligned zones
    fit. Experts get the remaining room in index order, one aligned block at a time.

    Args:
        demand: rows routed to each local expert, before any drop.
        capacity: rows of the slab.
        alignment: rows of one block.

    Returns:
        Kept rows per expert; the sum of their aligned zones is at most `capacity`.
    """

    def zones(level: int) -> int:
        return sum(align_up(min(rows, level), alignment) for rows in demand)

    if zones(max(demand, default=0)) <= capacity:
        return list(demand)
    # Zones grow in whole blocks, so search only levels that are multiples of a block.
    low, high = 0, max(demand) // alignment + 1
    while high - low > 1:
        middle = (low + high) // 2
        if zones(middle * alignment) <= capacity:
            low = middle
        else:
            high = middle
    level = low * alignment
    left = capacity - zones(level)
    kept = []
    for rows in demand:
        extra = rows > level and left >= alignment
        left -= alignment if extra else 0
        kept.append(min(rows, level + alignment) if extra else min(rows, level))
    return kept
