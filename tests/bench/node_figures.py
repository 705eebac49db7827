"""What crosses the network in groups over nodes, against the least that could.

    python tests/bench/node_figures.py

With client and tests on PYTHONPATH, on CPU. One JSON line per case: rows that one rank sends to
other nodes in a dispatch (a combine sends as many back), the least it could (each row once per
node that needs it, averaged over the ranks), what a flat exchange would send (once per rank that
needs it), and what one padded to full blocks would.
"""

from __future__ import annotations

import json
import sys
from typing import Any, NamedTuple

import fakes
import jax
import numpy as np

import ep_runtime as ep
from ep_runtime_bench.base import routing
from ep_runtime_client.ops.movement.prepare import call_on
from ep_runtime_client.ops.transports import nodes_plan

RANKS = 32


class Case(NamedTuple):
    """N ranks on nodes of G, K experts per token of 8 per rank, T tokens of a rank."""

    ranks: int
    node_size: int
    top_k: int
    routing: str = "uniform"
    tokens: int = 2048


CASES = (
    Case(4, 2, 8),
    Case(8, 4, 2),
    Case(8, 4, 8),
    Case(8, 1, 2),
    Case(16, 8, 8),
    Case(32, 8, 2),
    Case(32, 8, 8),
    Case(32, 8, 8, "zipf"),
    Case(32, 8, 8, "one"),
    Case(32, 8, 8, tokens=100),
)


def figure(case: Case) -> dict[str, Any]:
    """Rows per rank of one dispatch of the case."""
    experts = 8 * case.ranks
    group = fakes.local_group(
        {"ep": case.ranks},
        transport="memfd",
        node_size=case.node_size,
        num_experts=experts,
        hidden_size=8,
        max_tokens_per_rank=case.tokens,
        max_top_k=case.top_k,
    )
    layer = group.register_layer("moe", top_k=case.top_k)
    idx = routing.topk_idx(case.routing, case.ranks * case.tokens, experts, case.top_k)
    plan = ep.prepare(layer, idx)
    sent, least = nodes_plan.network_rows(call_on(plan.meta, group.mesh), plan.arrays)
    group.close()
    rows = routing.traffic(idx, case.ranks, experts).rows
    node = np.arange(case.ranks) // case.node_size
    flat = int(rows[node[:, None] != node].sum())
    padded = (case.ranks - case.node_size) * case.tokens
    return {
        **case._asdict(),
        "chunks": int(np.asarray(plan.arrays.chunks)[0, 0]),
        "rows": round(sent / case.ranks),
        "least": round(least / case.ranks),
        "ratio": round(sent / least, 3),
        "flat": round(flat / case.ranks),
        "padded": padded,
    }


def main() -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", RANKS)
    for case in CASES:
        sys.stdout.write(json.dumps(figure(case)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
