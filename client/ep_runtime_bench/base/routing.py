"""Routings by name, and the number of rows that each sends between ranks.

NumPy only. Tokens are global, rank major: T tokens of each of N ranks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[Any]

ROUTINGS = ("uniform", "zipf", "one")


def topk_idx(routing: str, tokens: int, num_experts: int, top_k: int, *, seed: int = 0) -> Ints:
    """Returns distinct experts of every token, int32 [tokens, K].

    Args:
        routing: "uniform"; "zipf" (the n-th most popular expert is chosen 1/n as often as the
            first, and is on a random rank); "one" (every token chooses the first K experts, which
            are on rank 0 if a rank has K).
        tokens: number of tokens of all ranks.
    """
    if routing == "one":
        return np.tile(np.arange(top_k, dtype=np.int32), (tokens, 1))
    rng = np.random.default_rng(seed)
    return drawn(rng, share_of(routing, num_experts, top_k, rng), tokens, top_k)


def share_of(routing: str, num_experts: int, top_k: int, rng: np.random.Generator) -> Floats:
    """Returns each expert's popularity, [E]."""
    if routing == "one":
        return (np.arange(num_experts) < top_k).astype(float)
    if routing == "zipf":
        return rng.permutation(1.0 / np.arange(1, num_experts + 1))
    return np.ones(num_experts)


def logits(rng: np.random.Generator, share: Floats, tokens: int) -> Floats:
    """Returns logits f32 [tokens, E] whose K largest are K draws by `share`, all distinct."""
    noise = rng.gumbel(size=(tokens, len(share))).astype(np.float32)
    with np.errstate(divide="ignore"):
        noise += np.log(share).astype(np.float32)
    return noise


def drawn(rng: np.random.Generator, share: Floats, tokens: int, top_k: int) -> Ints:
    """Draws distinct experts of every token, int32 [tokens, K], with popularity `share` [E]."""
    keys = logits(rng, share, tokens)
    picked = np.argpartition(-keys, top_k - 1, axis=1)[:, :top_k]
    return picked.astype(np.int32)


class Traffic(NamedTuple):
    """Rows that one dispatch moves, or one combine in the other direction.

    Attributes:
        rows: [N, N] token rows from source (dim 0) to rank (dim 1), each token once per rank.
        slots: number of (token, slot) rows of all ranks.
    """

    rows: Ints
    slots: int

    @property
    def remote_rows_per_rank(self) -> float:
        """Rows that cross a link, per rank: the mean over the senders."""
        return float(self.rows.sum() - np.trace(self.rows)) / len(self.rows)

    @property
    def busiest_rows(self) -> int:
        """Rows on the busiest link in its busier direction."""
        remote = self.rows - np.diag(np.diag(self.rows))
        return int(max(remote.sum(axis=0).max(), remote.sum(axis=1).max()))


def _distinct(idx: Ints, ranks: int, num_experts: int) -> npt.NDArray[np.bool_]:
    """Returns which tokens have a row on which rank, [tokens, N]."""
    has = np.zeros((len(idx), ranks), bool)
    to = idx // (num_experts // ranks)
    np.put_along_axis(has, to.astype(np.int64), True, axis=1)
    return has


def traffic(idx: Ints, ranks: int, num_experts: int) -> Traffic:
    """Counts the rows of a routing without unused slots.

    Args:
        idx: [tokens, K], tokens a multiple of `ranks`.
    """
    sources = idx.reshape(ranks, -1, idx.shape[1])
    rows = [_distinct(each, ranks, num_experts).sum(axis=0) for each in sources]
    return Traffic(np.stack(rows).astype(np.int32), idx.size)


def destinations(idx: Ints, ranks: int, num_experts: int) -> tuple[Ints, Ints]:
    """Returns the target of each token's copies for the ceiling probe: one per rank that needs it.

    Returns:
        dst_rank and dst_row, int32 [tokens, N]: the rank or -1, and the row there among the same
        source's rows. Each source starts with the next rank, so that no rank is the first of all
        sources.
    """
    has = _distinct(idx, ranks, num_experts).reshape(ranks, -1, ranks)
    row = np.cumsum(has, axis=1) - 1
    order = (np.arange(ranks)[:, None] + np.arange(1, ranks + 1)) % ranks  # [source, step]
    order = np.broadcast_to(order[:, None, :], has.shape)
    taken = np.take_along_axis(has, order, axis=2)
    dst_rank = np.where(taken, order, -1).astype(np.int32)
    dst_row = np.where(taken, np.take_along_axis(row, order, axis=2), -1).astype(np.int32)
    return dst_rank.reshape(-1, ranks), dst_row.reshape(-1, ranks)
