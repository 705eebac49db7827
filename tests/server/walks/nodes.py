"""Nodes as the coordinator knows them."""

from __future__ import annotations

import dataclasses
from typing import Any

from ep_runtime import errors
from ep_runtime_server.base import limits
from ep_runtime_server.nodes.identity import NodeIdentity
from ep_runtime_server.nodes.registry import Nodes
from walks.walk import Walk, outcome


class _Facts:
    """What a coordinator's journal keeps of its nodes."""

    def __init__(self) -> None:
        self.nodes: dict[str, dict[str, Any]] = {}

    def remember(self, node: str, identity: Any) -> None:
        self.nodes[node] = dict(identity)

    def forget(self, node: str) -> None:
        self.nodes.pop(node, None)


@dataclasses.dataclass
class _Node:
    host: int
    life: int
    lease: str
    heard_s: float
    state: str = "JOINED"


class NodesWalk(Walk):
    """Nodes join, report, fall silent, leave and come back; the coordinator starts again."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.facts: Any = _Facts()
        self.gone: list[str] = []
        self.wanted_gone: list[str] = []
        self.known: dict[str, _Node] = {}
        self.starts()

    def starts(self) -> None:
        own = self._identity("a", 0, 0)
        self.nodes = Nodes(own, {}, self.facts, self.clock, self.events, self.gone.append)
        for node in self.known.values():
            node.state, node.lease, node.heard_s = "JOINED", "", self.clock.now_s

    @staticmethod
    def _identity(name: str, host: int, life: int) -> NodeIdentity:
        return NodeIdentity(
            node=name,
            node_id=f"id{host}",
            incarnation=f"life{life}",
            boot_id=f"boot{host}",
            host_name=f"host{host}",
            pid=7,
            address=f"host{host}:1",
            server_version="1.2.3",
            api_versions=("v1",),
        )

    async def step(self) -> None:
        moves = {self.joins: 4, self.reports: 5, self.leaves: 1, self.pass_time: 3}
        move = self.random.choices([*moves, self.starts], [*moves.values(), 0.2])[0]
        if move in (self.pass_time, self.starts):
            move()
        else:
            move(self.random.choice("abcde"))
        self.agree(self.gone, self.wanted_gone)
        found = {node.identity.node: node.state.value for node in self.nodes.all()[1:]}
        self.agree(found, {name: node.state for name, node in sorted(self.known.items())})
        self.agree(sorted(self.facts.nodes), sorted(self.known))

    def joins(self, name: str) -> None:
        host, life = self.random.choice([1, 1, 1, 2]), self.random.choice([1, 2])
        before = self.known.get(name)
        taken = name == "a" or (
            before is not None and before.state == "JOINED" and before.host != host
        )
        try:
            lease = self.nodes.join(self._identity(name, host, life)).lease_id
        except errors.GroupBusyError:
            self.agree(taken, True)
            self.seen["taken"] += 1
            return
        self.agree(taken, False)
        if before is None or before.life != life:
            self.wanted_gone.append(name)
        self.known[name] = _Node(host, life, lease, self.clock.now_s)
        self.seen["joined"] += 1

    def reports(self, name: str) -> None:
        node = self.known.get(name)
        good = self.random.random() < 0.9
        lease = node.lease if node is not None and good else "another"
        said = outcome(self.nodes.report, name, lease)
        if node is None or not good or not node.lease:
            self.agree(said, "StaleHandleError")
        else:
            self.agree(said, "ok")
            node.heard_s, node.state = self.clock.now_s, "JOINED"
        self.seen[f"report {said}"] += 1

    def leaves(self, name: str) -> None:
        node = self.known.get(name)
        self.nodes.leave(name, node.lease if node is not None else "")
        if node is not None and node.lease:
            del self.known[name]
            self.wanted_gone.append(name)

    def pass_time(self) -> None:
        self.clock.advance(self.random.choice([2.0, 6.0, limits.NODE_LEASE_S, 50_000.0]))
        self.nodes.tick()
        for name, node in list(self.known.items()):
            silent_s = self.clock.now_s - node.heard_s
            if node.state == "JOINED" and silent_s >= limits.NODE_LEASE_S:
                node.state = "UNREACHABLE"
                self.wanted_gone.append(name)
            elif node.state == "UNREACHABLE" and silent_s >= limits.NODE_FORGOTTEN_S:
                del self.known[name]
            self.seen[node.state] += 1
