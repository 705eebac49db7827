"""Two daemons in network namespaces of their own, a link between them that tests cut and mend."""

from __future__ import annotations

import concurrent.futures

import pytest
from cluster_nets import HOSTS
from cluster_places import make_certificates, tls_flags
from harness import Watcher, eventually
from raw_client import WAIT_S, make_spec
from test_cluster import cluster_of, joined, link, states
from test_spanning import all_ready, group_of, members, state

from ep_runtime import errors
from ep_runtime_server.base import limits

pytestmark = pytest.mark.slow

# A packet that got lost is sent again after a while, and that while doubles.
MENDED_S = 20.0


@pytest.fixture
def nodes(net, daemon_process, tmp_path):
    """a, which coordinates, and b; they trust each other by certificates."""
    pki = make_certificates(tmp_path / "pki", **HOSTS)
    address = f"{HOSTS['a']}:7700"
    a = daemon_process(
        *("--coordinator", address, "--node", "a"),
        *tls_flags(pki, "a"),
        launcher=net.launcher("a"),
    )
    b = daemon_process(
        *("--join", address, "--node", "b"), *tls_flags(pki, "b"), launcher=net.launcher("b")
    )
    joined(b)
    return a, b


@pytest.fixture
def pool():
    with concurrent.futures.ThreadPoolExecutor(8) as found:
        yield found


def spec_of(name: str = "moe"):
    return make_spec(name, transport="xla")


def test_a_partition_ends_no_group_and_lets_none_form(net, nodes, pool):
    a, b = nodes
    first, second = a.client(), b.client()
    groups = all_ready(pool, spec_of(), (first, [0]), (second, [1]))
    net.cut()
    eventually(
        lambda: (link(b), states(a)["b"]) == ("LOST", "UNREACHABLE"),
        within_s=limits.NODE_LEASE_S + 2 * limits.NODE_RPC_S,
    )
    assert (state(a), state(b)) == ("READY", "READY")
    for daemon, away in ((a, "b"), (b, "a")):
        with pytest.raises(errors.RuntimeUnavailableError, match=f"node '{away}' at"):
            daemon.ask("ListGroups", node=away)
    halves = [
        pool.submit(client.create, spec_of("later"), ranks=[rank], wait_s=2.0)
        for rank, client in enumerate((first, second))
    ]
    for rank, half in enumerate(halves):
        with pytest.raises(errors.GroupNotReadyError) as caught:
            half.result(WAIT_S)
        assert caught.value.fields["missing_ranks"] == [1 - rank]
    for client in (first, second):  # what needs one node alone goes on
        assert client.ready(make_spec("alone", ranks=1)).state == 2
    net.mend()
    joined(b, within_s=MENDED_S)
    assert states(a) == {"a": "JOINED", "b": "JOINED"}
    assert (state(a), state(b)) == ("READY", "READY")
    later = all_ready(pool, spec_of("later"), (first, [0]), (second, [1]))
    assert later[0].epoch == later[1].epoch > groups[0].epoch
    assert members(later[0]) == members(later[1])


def test_a_process_that_dies_behind_a_partition_is_told_once_it_is_over(net, nodes, pool):
    a, b = nodes
    first, dying = a.client(), b.client(process=True)
    watcher = Watcher(first)
    groups = all_ready(pool, spec_of(), (first, [0]), (dying, [1]))
    net.cut()
    dying.process.kill()
    eventually(lambda: state(b) != "READY")
    assert state(a) == "READY"
    net.mend()
    eventually(lambda: state(a) == "BROKEN", within_s=MENDED_S)
    eventually(lambda: any(list(e.group.lost_ranks) == [1] for e in watcher.events))
    again = all_ready(pool, spec_of(), (first, [0]), (b.client(), [1]))
    assert again[0].epoch > groups[0].epoch


def test_a_partition_while_a_group_forms_leaves_nobody_with_half_of_it(net, nodes, pool):
    a, b = nodes
    first, second = a.client(), b.client()
    made = [
        pool.submit(client.create, spec_of(), ranks=[rank])
        for rank, client in enumerate((first, second))
    ]
    groups = [future.result(WAIT_S).group for future in made]
    net.cut()
    waiting = [
        pool.submit(client.attached, group, wait_s=60.0)
        for client, group in zip((first, second), groups, strict=True)
    ]
    # The coordinator gives the view up with the lease; b cannot know, and goes on with nothing.
    eventually(lambda: group_of(a).epoch == 0, within_s=limits.NODE_LEASE_S + 2.0)
    assert not any(future.done() for future in waiting)
    assert (state(a), state(b)) == ("FORMING", "FORMING")
    net.mend()
    found = [future.result(WAIT_S + MENDED_S) for future in waiting]
    assert {(group.state, group.epoch) for group in found} == {(2, found[0].epoch)}
    assert found[0].epoch > groups[0].epoch
    assert members(found[0]) == members(found[1])
    assert cluster_of(b).epoch >= found[0].epoch
