"""What a daemon must know of its cluster after a restart, written before anybody is told of it."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

from ep_runtime.errors import PoolExhaustedError
from ep_runtime_server.journal import Journal

_NODE_ID, _CLUSTER_ID, _EPOCH, _NODE = "node_id", "cluster_id", "epoch", "node/"
_COMMITTED = "committed/"

# Of groups whose last view was committed; who still asks about an older one was away for long.
MAX_COMMITTED = 4096


class ClusterFacts:
    """Attributes:
    node_id: of this directory; another directory has another.
    cluster_id: made by the coordinator's first life; empty before a node's first join.
    epoch: the newest one that was given, or heard of. None is ever given twice.
    """

    def __init__(self, journal: Journal) -> None:
        """Reads the journal, which is ours from now on. Raises PoolExhaustedError."""
        self._journal = journal
        self._facts: dict[str, Any] = journal.take_facts()
        if _NODE_ID not in self._facts:
            self._put(_NODE_ID, secrets.token_hex(8))

    @property
    def node_id(self) -> str:
        return str(self._facts[_NODE_ID])

    @property
    def cluster_id(self) -> str:
        return str(self._facts.get(_CLUSTER_ID, ""))

    @property
    def epoch(self) -> int:
        return int(self._facts.get(_EPOCH, 0))

    @property
    def nodes(self) -> Mapping[str, Mapping[str, Any]]:
        """Fields of the identities of nodes that joined, by name."""
        return {
            key.removeprefix(_NODE): value
            for key, value in self._facts.items()
            if key.startswith(_NODE)
        }

    def found(self) -> None:
        """Gives a cluster its id, unless it has one. Raises PoolExhaustedError."""
        if not self.cluster_id:
            self._put(_CLUSTER_ID, secrets.token_hex(8))

    def next_epoch(self) -> int:
        """An epoch that nobody has seen; on the disk already. Raises PoolExhaustedError."""
        self._put(_EPOCH, self.epoch + 1)
        return self.epoch

    def heard(self, epoch: int, cluster_id: str = "") -> None:
        """Another daemon knows of that epoch, or belongs to that cluster.

        Raises:
            PoolExhaustedError: it cannot be written.
        """
        if epoch > self.epoch:
            self._put(_EPOCH, epoch)
        if cluster_id and cluster_id != self.cluster_id:
            self._put(_CLUSTER_ID, cluster_id)

    def remember(self, node: str, identity: Mapping[str, Any]) -> None:
        """A node joined. Raises PoolExhaustedError."""
        if self._facts.get(_NODE + node) != identity:
            self._put(_NODE + node, dict(identity))

    def forget(self, node: str) -> None:
        """A node left. Where that cannot be written a restart takes it for unreachable."""
        if self._facts.pop(_NODE + node, None) is not None:
            self._journal.append([(_NODE + node, None)])

    def committed_epoch(self, group: str) -> int:
        """Of the group's last committed view; 0 for none."""
        return int(self._facts.get(_COMMITTED + group, 0))

    def commit(self, group: str, epoch: int) -> None:
        """The group's view of that epoch holds, whatever happens. Raises PoolExhaustedError."""
        self._put(_COMMITTED + group, epoch)
        known = [key for key in self._facts if key.startswith(_COMMITTED)]
        if len(known) > MAX_COMMITTED:
            oldest = min(known, key=lambda key: int(self._facts[key]))
            del self._facts[oldest]
            self._journal.append([(oldest, None)])

    def _put(self, key: str, value: Any) -> None:
        """On the disk first: who was told must find it true after any crash."""
        journal = self._journal
        if journal.wants_compaction:
            journal.compact(self._facts)
        journal.admit()
        if not journal.append([(key, value)]):
            raise PoolExhaustedError(
                f"cannot write what the cluster must know ({key}): {journal.error}; retry",
                reason=journal.error,
            )
        self._facts[key] = value

    def close(self) -> None:
        self._journal.close()
