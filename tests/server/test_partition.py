"""Two daemons in network namespaces of their own, over a cable that tests cut, mend and spoil."""

from __future__ import annotations

import pytest
from cluster_nets import HOSTS
from cluster_places import make_certificates, tls_flags
from harness import Watcher, eventually
from raw_client import WAIT_S, make_spec
from spanning import all_ready, group_of, members, spec_of, state
from test_cluster import joined, link, states

from ep_runtime import errors
from ep_runtime_server.base import limits

pytestmark = pytest.mark.slow

LOST_S = limits.NODE_LEASE_S + 2 * limits.NODE_RPC_S
# A lost packet is sent again after a time that doubles with each loss.
MENDED_S = 20.0


class Nodes:
    """Node a, the coordinator, and node b; they trust each other by certificates."""

    def __init__(self, net, daemon_process, folder) -> None:
        self._net, self._start = net, daemon_process
        pki = make_certificates(folder / "pki", **HOSTS)
        address = f"{HOSTS['a']}:7700"
        self._flags = {
            "a": ["--coordinator", address, "--node", "a", *tls_flags(pki, "a")],
            "b": ["--join", address, "--node", "b", *tls_flags(pki, "b")],
        }
        self.a, self.b = self.start("a"), self.start("b")
        joined(self.b)

    def start(self, name: str, directory=None):
        flags, launcher = self._flags[name], self._net.launcher(name)
        return self._start(*flags, launcher=launcher, directory=directory)

    def b_starts_again(self) -> None:
        self.b.kill()
        self.b = self.start("b", self.b.directory)

    def whole(self) -> None:
        """Waits until the cluster is whole again and both nodes report the same."""
        joined(self.b, within_s=MENDED_S)
        eventually(lambda: states(self.a) == {"a": "JOINED", "b": "JOINED"}, within_s=MENDED_S)


@pytest.fixture
def nodes(lossy_net, daemon_process, tmp_path) -> Nodes:
    return Nodes(lossy_net, daemon_process, tmp_path)


BAD = {
    "a third lost": {"a": {"lost": 0.3}, "b": {"lost": 0.3}},
    "300 ms late": {"a": {"late_s": 0.3}, "b": {"late_s": 0.3}},
    "late one way, lost the other": {"a": {"late_s": 0.5}, "b": {"lost": 0.2}},
}


@pytest.mark.parametrize("how", BAD)
def test_groups_form_and_deaths_are_told_over_a_bad_link(lossy_net, nodes, pool, how):
    lossy_net.now(**BAD[how])
    first, dying = nodes.a.client(), nodes.b.client(process=True)
    watcher = Watcher(first)
    groups = all_ready(pool, spec_of(), (first, [0]), (dying, [1]))
    assert groups[0].epoch == groups[1].epoch
    assert members(groups[0]) == members(groups[1])
    dying.process.kill()
    eventually(lambda: state(nodes.a) == "BROKEN", within_s=MENDED_S)
    eventually(lambda: any(list(e.group.lost_ranks) == [1] for e in watcher.events))
    lossy_net.mend()
    nodes.whole()


@pytest.mark.parametrize("silent", ["a", "b", "ab"])
def test_a_cable_that_is_cut_one_way_or_both_ends_no_group_and_lets_none_form(
    lossy_net, nodes, pool, silent
):
    a, b = nodes.a, nodes.b
    first, second = a.client(), b.client()
    groups = all_ready(pool, spec_of(), (first, [0]), (second, [1]))
    lossy_net.now(**{side: {"lost": 1.0} for side in silent})
    eventually(lambda: (link(b), states(a)["b"]) == ("LOST", "UNREACHABLE"), within_s=LOST_S)
    assert (state(a), state(b)) == ("READY", "READY")
    for daemon, away in ((a, "b"), (b, "a")):
        with pytest.raises(errors.RuntimeUnavailableError, match=f"node '{away}' at"):
            daemon.ask("ListGroups", node=away)
    halves = [
        pool.submit(client.create, spec_of(name="later"), ranks=[rank], wait_s=2.0)
        for rank, client in enumerate((first, second))
    ]
    for rank, half in enumerate(halves):
        with pytest.raises(errors.GroupNotReadyError) as caught:
            half.result(WAIT_S)
        assert caught.value.fields["missing_ranks"] == [1 - rank]
    for client in (first, second):  # groups of one node alone continue
        assert client.ready(make_spec("alone", ranks=1)).state == 2
    lossy_net.mend()
    nodes.whole()
    assert (state(a), state(b)) == ("READY", "READY")
    later = all_ready(pool, spec_of(name="later"), (first, [0]), (second, [1]))
    assert later[0].epoch == later[1].epoch > groups[0].epoch
    assert members(later[0]) == members(later[1])


def test_a_node_that_starts_again_behind_a_cut_takes_its_place(lossy_net, nodes, pool):
    """Node a does not learn that b's connections have closed: they are half open."""
    first = nodes.a.client()
    groups = all_ready(pool, spec_of(), (first, [0]), (nodes.b.client(process=True), [1]))
    lossy_net.cut()
    nodes.b_starts_again()
    lossy_net.mend()
    nodes.whole()
    newcomer = nodes.b.client(process=True)
    again = all_ready(pool, spec_of(name="next"), (first, [0]), (newcomer, [1]))
    assert again[0].epoch == again[1].epoch > groups[0].epoch
    assert group_of(nodes.b, "next").epoch == again[0].epoch
