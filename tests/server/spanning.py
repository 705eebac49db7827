"""Two nodes and their clients' calls, for tests of groups that span nodes."""

from __future__ import annotations

import concurrent.futures

import pytest
from cluster_places import place
from raw_client import WAIT_S, make_spec
from test_cluster import coordinates, joined, joins

# Time in which peers on other nodes must learn of a death, and in which a group must form again.
TOLD_S = 2.0


def spec_of(ranks: int = 2, **more):
    return make_spec(ranks=ranks, **{"transport": "xla", **more})


@pytest.fixture
def pool():
    """A pool of threads, for calls that wait for each other."""
    with concurrent.futures.ThreadPoolExecutor(8) as found:
        yield found


@pytest.fixture
def nodes(start_daemon):
    """Starts two daemons; a coordinates."""
    address = place()
    a = start_daemon(cluster=coordinates(address))
    b = start_daemon(cluster=joins(address))
    joined(b)
    return a, b


def one_each(pool, *clients, **more):
    """Starts calls of clients that claim one rank each, in order, and wait for the group."""
    spec = spec_of(**more)
    return [pool.submit(client.ready, spec, ranks=[i]) for i, client in enumerate(clients)]


def all_ready(pool, spec, *claims):
    """Returns groups of clients that claim [(client, ranks)] at the same time."""
    futures = [pool.submit(client.ready, spec, ranks=ranks) for client, ranks in claims]
    return [future.result(WAIT_S) for future in futures]


def members(group) -> list[tuple[int, int, str]]:
    """Returns (world rank, pid, session) of every rank, the same on every node."""
    return [(m.world_rank, m.pid, m.session_id) for m in group.members]


def group_of(daemon, name: str = "moe"):
    (found,) = daemon.ask("ListGroups", name=name).groups
    return found.group


def state(daemon) -> str:
    return daemon.group_states().get("moe", "GONE")
