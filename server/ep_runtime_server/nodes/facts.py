"""Facts of its cluster that a daemon needs after a restart, on disk before others hear them."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Mapping
from typing import Any

from ep_runtime.errors import InvalidArgumentError, PoolExhaustedError
from ep_runtime_server.base.beside import END_S
from ep_runtime_server.journal.file import Journal, Record
from ep_runtime_server.nodes.identity import is_identity

_NODE_ID, _CLUSTER_ID, _EPOCH, _NODE = "node_id", "cluster_id", "epoch", "node/"
_COMMITTED = "committed/"
_OWED = "owed/"

# No cluster counts that far: a larger epoch is a lie, or the file is not ours.
MAX_EPOCH = 1 << 62
# What a node may know more than a coordinator that lost its file: a formation a second for half a
# year.
MAX_EPOCHS_AHEAD = 1 << 24

# Of groups whose last view was committed; who still asks about an older one was away for long.
MAX_COMMITTED = 4096

# Records that wait while a new file is written.
MAX_LATE = 4096


class ClusterFacts:
    """Attributes:
    node_id: of this directory; another directory has another.
    cluster_id: made by the coordinator's first life; empty before a node's first join.
    epoch: the newest one that was given, or heard of. None is ever given twice.
    unreadable: keys of the journal whose values are none that a daemon writes; left out.
    """

    def __init__(self, journal: Journal) -> None:
        """Reads the journal, which is ours from now on. Raises PoolExhaustedError."""
        self._journal = journal
        self._num_put = self._num_durable = 0
        self._syncing: asyncio.Future[None] | None = None
        # The task that writes a new file, and records to add to it afterwards. Meanwhile nothing
        # else touches the journal.
        self._anew: asyncio.Future[None] | None = None
        self._late: list[Record] = []
        facts = journal.take_facts()
        self.unreadable = sorted(key for key, value in facts.items() if not _is_fact(key, value))
        self._facts: dict[str, Any] = {
            key: value for key, value in facts.items() if key not in self.unreadable
        }
        if _EPOCH in self.unreadable:  # those of committed groups were given in any case
            known = [value for key, value in self._facts.items() if key.startswith(_COMMITTED)]
            self._put(_EPOCH, max(known, default=0))
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

    def check_claim(self, node: str, epoch: int) -> None:
        """Raises InvalidArgumentError if a node cannot know of that epoch: we count on from it
        for ever, so a lie, or another cluster's node, must not be believed."""
        if epoch > self.epoch + MAX_EPOCHS_AHEAD:
            raise InvalidArgumentError(
                f"node {node!r} knows of epoch {epoch}, the coordinator of {self.epoch}: nobody is "
                f"{MAX_EPOCHS_AHEAD} epochs ahead. If the coordinator lost its file, start it once "
                "with --epoch-at-least; else the node is of another cluster: remove the file "
                "'cluster' of its directory",
                argument="epoch",
            )

    def heard(self, epoch: int, cluster_id: str = "") -> None:
        """The coordinator gave that epoch, or a node that may know of it; or it is that cluster.

        Raises:
            InvalidArgumentError: no cluster counts that far.
            PoolExhaustedError: it cannot be written.
        """
        if epoch > MAX_EPOCH:
            raise InvalidArgumentError(
                f"epoch must be at most {MAX_EPOCH}, got {epoch}", argument="epoch"
            )
        if epoch > self.epoch:
            self._put(_EPOCH, epoch)
        if cluster_id and cluster_id != self.cluster_id:
            self._put(_CLUSTER_ID, cluster_id)

    def remember(self, node: str, identity: Mapping[str, Any]) -> None:
        """Saves that a node joined. Raises PoolExhaustedError."""
        if self._facts.get(_NODE + node) != identity:
            self._put(_NODE + node, dict(identity))

    def forget(self, node: str) -> None:
        """Saves that a node left. If that fails, the node is unreachable after a restart."""
        if self._facts.pop(_NODE + node, None) is not None:
            self._drop(_NODE + node)

    def committed_epoch(self, group: str) -> int:
        """Returns the epoch of the group's last committed view; 0 if there is none."""
        return int(self._facts.get(_COMMITTED + group, 0))

    def commit(self, group: str, epoch: int) -> None:
        """Saves that the group's view of that epoch holds for good. Raises PoolExhaustedError."""
        self._put(_COMMITTED + group, epoch)
        known = [key for key in self._facts if key.startswith(_COMMITTED)]
        if len(known) > MAX_COMMITTED:
            oldest = min(known, key=lambda key: int(self._facts[key]))
            del self._facts[oldest]
            self._drop(oldest)

    @property
    def owed(self) -> Mapping[str, list[Any]]:
        """News that an earlier daemon still had to send to other nodes, by key."""
        return {
            key.removeprefix(_OWED): value
            for key, value in self._facts.items()
            if key.startswith(_OWED)
        }

    def owe(self, key: str, word: list[Any]) -> None:
        """[uid, job, group, epoch, nodes, lost ranks, left ranks] is to be told. Raises
        PoolExhaustedError."""
        self._put(_OWED + key, word)

    def told(self, key: str) -> None:
        """Removes news that every node has heard. If that fails, a restart sends it again."""
        if self._facts.pop(_OWED + key, None) is not None:
            self._drop(_OWED + key)

    async def durable(self) -> None:
        """Returns once all that is known now survives a crash of the host: who was told must find
        it true afterwards, so whoever tells others waits for this before.

        Raises:
            PoolExhaustedError: the disk does not take it.
        """
        wanted = self._num_put
        while self._num_durable < wanted:
            if self._syncing is None:
                self._syncing = asyncio.ensure_future(self._sync())
            await asyncio.shield(self._syncing)

    async def _sync(self) -> None:
        """Syncs once for all who wait, on a thread because a disk may take long."""
        try:
            await self._settled()
            journal, count = self._journal, self._num_put
            try:
                await asyncio.to_thread(journal.begin_sync())
            except OSError as error:  # no descriptor is left
                journal.error = error.strerror or str(error)
            await self._settled()
            if journal.error:
                self._write_anew()
                await self._settled()
            if journal.error:
                raise PoolExhaustedError(
                    f"cannot save facts of the cluster: {journal.error}; retry",
                    reason=journal.error,
                )
            self._num_durable = count
        finally:
            self._syncing = None

    def _put(self, key: str, value: Any) -> None:
        """Writes a fact before it counts; others may hear of it once it is `durable`."""
        journal = self._journal
        if self._anew is None and journal.wants_compaction:
            failed = bool(journal.error)
            self._write_anew()
            if failed and self._anew is not None:
                raise PoolExhaustedError(
                    f"cannot save a fact of the cluster ({key}) before its file is written anew; "
                    "retry"
                )
        if self._anew is not None:
            if len(self._late) >= MAX_LATE:
                raise PoolExhaustedError(
                    f"cannot save a fact of the cluster ({key}): {MAX_LATE} records wait for the "
                    "disk; retry"
                )
            self._late.append((key, value))
        else:
            journal.admit()
            if not journal.append([(key, value)]):
                raise PoolExhaustedError(
                    f"cannot save a fact of the cluster ({key}): {journal.error}; retry",
                    reason=journal.error,
                )
        self._facts[key] = value
        self._num_put += 1

    def _drop(self, key: str) -> None:
        """Removes a fact; if that cannot be written, a restart still knows it."""
        if self._anew is None:
            self._journal.append([(key, None)])
        elif len(self._late) < MAX_LATE:
            self._late.append((key, None))

    def _write_anew(self) -> None:
        """Starts to replace the journal by a file of the current facts, on a thread.

        Without an event loop it does so at once, because nobody is served then.
        """
        facts = dict(self._facts)
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            self._journal.compact(facts)
            return
        self._anew = asyncio.ensure_future(self._compact(facts))

    async def _compact(self, facts: Mapping[str, Any]) -> None:
        try:
            await asyncio.to_thread(self._journal.compact, facts)
        finally:
            self._anew = None
            late, self._late = self._late, []
            if late:  # where that fails the next new file has them
                self._journal.append(late)

    async def _settled(self) -> None:
        while self._anew is not None:
            await asyncio.shield(self._anew)

    async def end(self) -> None:
        """Closes the journal; a new file that takes longer than END_S is left to init."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_S):
                await self._settled()
                self.close()

    def close(self) -> None:
        self._journal.close()


def _is_fact(key: str, value: Any) -> bool:
    if key in (_NODE_ID, _CLUSTER_ID):
        return isinstance(value, str) and 0 < len(value) <= 64
    if key == _EPOCH or key.startswith(_COMMITTED):
        return type(value) is int and 0 <= value <= MAX_EPOCH
    if key.startswith(_OWED):
        return _is_word(value)
    return key.startswith(_NODE) and is_identity(value)


def _is_word(value: Any) -> bool:
    """Whether a journal's value has the form that `owe` writes."""
    if not isinstance(value, list) or [type(x) for x in value] != [int, str, str, int, *[list] * 3]:
        return False
    *_, nodes, lost, left = value
    return all(type(x) is str for x in nodes) and all(type(x) is int for x in (*lost, *left))
