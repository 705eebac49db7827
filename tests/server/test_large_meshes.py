"""Meshes of thousands of devices on simulated nodes: groups form, lose a process, form again."""

from __future__ import annotations

import asyncio

from raw_client import make_spec
from schedules.cluster import TOLD_S, SimulatedCluster, simulated
from schedules.daemons import COORDINATOR

from ep_runtime.board_abi import MAX_WORLD_RANKS

NODES = 16
EACH = MAX_WORLD_RANKS // NODES
JOIN_S, WAIT_S = 10.0, 60.0


async def form_lose_and_form(cluster: SimulatedCluster) -> None:
    for node in cluster.nodes:
        cluster.start(node)
    await asyncio.sleep(JOIN_S)
    spec = make_spec(ranks=MAX_WORLD_RANKS, transport="xla")
    ranks = [tuple(range(first, first + EACH)) for first in range(0, MAX_WORLD_RANKS, EACH)]
    processes = [cluster.process(n, r) for n, r in zip(cluster.nodes, ranks, strict=True)]

    async def formed() -> list[str]:
        return await asyncio.gather(*(process.form(spec, WAIT_S) for process in processes))

    assert await formed() == ["READY"] * NODES
    lost = processes[-1]
    lost.die()
    since_s = cluster.loop.time()
    await asyncio.gather(*(process.work(WAIT_S) for process in processes[:-1]))
    assert cluster.loop.time() - since_s < TOLD_S
    processes[-1] = cluster.process(lost.node, lost.ranks)
    assert await formed() == ["READY"] * NODES


def test_the_largest_mesh_forms_and_forms_again_after_a_loss() -> None:
    names = (COORDINATOR, *(f"n{number}" for number in range(1, NODES)))
    with simulated(1, names) as cluster:
        cluster.loop.run_until_complete(form_lose_and_form(cluster))
        assert not cluster.faults
