"""Runs daemons of many nodes on simulated time: groups form, lose a process and form again.

python tests/bench/many_ranks.py --nodes 512 --groups 1

Then all processes end. Prints, for each of these, how long it takes on simulated time (a message
between daemons takes up to 2 ms), how many calls daemons send and how many bytes those have, and
CPU seconds of this one process, which runs all daemons and processes.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
sys.path[:0] = [str(HERE.parents[1] / "server"), str(HERE.parents[1])]

from raw_client import make_spec  # noqa: E402 - the path above
from schedules.cluster import SimulatedCluster, simulated  # noqa: E402
from schedules.daemons import COORDINATOR  # noqa: E402
from schedules.links import Links  # noqa: E402

JOIN_S = 10.0  # after one poll all nodes know each other
WAIT_S = 60.0
END_S = 2.0  # after this time all nodes know of the end


class CountedLinks(Links):
    """Adds up the bytes that links send."""

    num_bytes = 0

    async def call(
        self, source: Any, target: str, method: str, data: bytes, within_s: float
    ) -> Any:
        answer = await super().call(source, target, method, data, within_s)
        self.num_bytes += len(data) + len(answer)
        return answer


class Phases:
    """Prints a line for each part of a run."""

    def __init__(self, cluster: SimulatedCluster) -> None:
        self._cluster = cluster
        sys.stdout.write(f"{'':22}{'simulated s':>12}{'calls':>12}{'MB':>8}{'CPU s':>8}\n")

    async def measure(self, name: str, work: Any) -> Any:
        links: Any = self._cluster.links
        before = self._now(links)
        found = await work
        took = [after - b for after, b in zip(self._now(links), before, strict=True)]
        row = f"{name:22}{took[0]:12.2f}{took[1]:12,}{took[2] / 1e6:8.1f}{took[3]:8.1f}\n"
        sys.stdout.write(row)
        sys.stdout.flush()
        return found

    def _now(self, links: Any) -> tuple[float, int, int, float]:
        return self._cluster.loop.time(), links.num_calls, links.num_bytes, time.process_time()


async def run(cluster: SimulatedCluster, ranks_per_node: int, groups: int) -> None:
    phases, nodes = Phases(cluster), cluster.nodes

    async def joined() -> None:
        for node in nodes:
            cluster.start(node)
        await asyncio.sleep(JOIN_S)

    await phases.measure(f"{len(nodes)} nodes join", joined())
    each = len(nodes) // groups
    specs = [
        make_spec(name=f"moe{number}", ranks=each * ranks_per_node, transport="xla")
        for number in range(groups)
    ]
    processes = [
        [
            cluster.process(node, (place * ranks_per_node + rank,))
            for place, node in enumerate(nodes[number * each :][:each])
            for rank in range(ranks_per_node)
        ]
        for number in range(groups)
    ]

    async def form() -> None:
        found = await asyncio.gather(
            *(
                process.form(spec, WAIT_S)
                for spec, members in zip(specs, processes, strict=True)
                for process in members
            )
        )
        if {*found} != {"READY"}:
            raise SystemExit(f"groups did not form: {sorted({*found})}; {cluster.said[-3:]}")

    async def lose() -> None:
        """Ends one process of each group; the others stop when they learn of it."""
        for members in processes:
            members[-1].die()
        await asyncio.gather(
            *(process.work(WAIT_S) for members in processes for process in members[:-1])
        )

    async def end() -> None:
        for members in processes:
            for process in members:
                process.die()
        await asyncio.sleep(END_S)

    ranks = each * ranks_per_node * groups
    await phases.measure(f"{ranks:,} ranks form", form())
    await phases.measure(f"{groups} processes end", lose())
    for members in processes:
        last = members[-1]
        members[-1] = cluster.process(last.node, last.ranks)
    await phases.measure(f"{ranks:,} ranks form again", form())
    await phases.measure(f"{ranks:,} ranks end", end())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--nodes", type=int, default=512)
    parser.add_argument("--ranks-per-node", type=int, default=8)
    parser.add_argument("--groups", type=int, default=1, help="each on nodes of its own")
    asked = parser.parse_args()
    names = (COORDINATOR, *(f"n{number}" for number in range(1, asked.nodes)))
    with simulated(1, names) as cluster:
        cluster.links.late = 0.0
        cluster.links.__class__ = CountedLinks
        cluster.loop.run_until_complete(run(cluster, asked.ranks_per_node, asked.groups))
        if cluster.faults:
            sys.exit("\n".join(cluster.faults[:10]))


if __name__ == "__main__":
    main()
