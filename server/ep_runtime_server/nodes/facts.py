"""Facts of the cluster that a daemon needs after a restart, saved before others learn them.

The identities of nodes, which they send to each other, are among them.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import secrets
from collections.abc import Mapping
from typing import Any

from ep_runtime.errors import InvalidArgumentError, PoolExhaustedError
from ep_runtime_server.base.beside import END_S
from ep_runtime_server.journal.file import Journal, Record, under

_NODE_ID, _CLUSTER_ID, _EPOCH, _NODE = "node_id", "cluster_id", "epoch", "node/"
_COMMITTED = "committed/"
_OWED = "owed/"
# Limit of epochs, which no cluster reaches; a larger one is malformed.
MAX_EPOCH = 1 << 62
# How far a node's epoch may be ahead of a coordinator that lost its file: one formation per second
# for half a year.
MAX_EPOCHS_AHEAD = 1 << 24
# Groups whose last committed epoch is kept; nodes do not ask about older ones.
MAX_COMMITTED = 4096
# Limit of records that wait while a new file is written.
MAX_LATE = 4096


@dataclasses.dataclass(frozen=True)
class NodeIdentity:
    """A daemon's description of itself; see node_service.proto."""

    node: str
    node_id: str = ""
    incarnation: str = ""
    boot_id: str = ""
    host_name: str = ""
    uid: int = 0
    pid: int = 0
    address: str = ""
    server_version: str = ""
    api_versions: tuple[str, ...] = ()


def identity_of_fact(node: str, fields: Mapping[str, Any]) -> NodeIdentity:
    known = {field.name for field in dataclasses.fields(NodeIdentity)} - {"node"}
    taken = {key: value for key, value in fields.items() if key in known}
    taken["api_versions"] = tuple(taken.get("api_versions", ()))
    return NodeIdentity(node, **taken)


def fact_of_identity(identity: NodeIdentity) -> dict[str, Any]:
    fields = dataclasses.asdict(identity)
    del fields["node"]
    return {**fields, "api_versions": list(identity.api_versions)}


def is_identity(fields: Any) -> bool:
    """Returns whether a journal's value has the form that `fact_of_identity` writes."""
    if not isinstance(fields, dict):
        return False
    wanted = fact_of_identity(NodeIdentity(""))
    versions = fields.get("api_versions", [])
    return (
        all(isinstance(fields[name], type(wanted[name])) for name in wanted.keys() & fields.keys())
        and all(isinstance(version, str) for version in versions)
        and 0 <= fields.get("uid", 0) < 1 << 32
        and abs(fields.get("pid", 0)) < 1 << 63
    )


class ClusterFacts:
    """The facts of a daemon's cluster, and the journal that keeps them.

    Attributes:
        node_id: a unique id of this daemon's directory.
        cluster_id: the id that the first coordinator made; empty before a node's first join.
        epoch: the largest epoch that was used or reported; an epoch is never used twice.
        unreadable: keys of malformed records of the journal, which are ignored.
    """

    def __init__(self, journal: Journal) -> None:
        """Takes over the journal and reads its facts. Raises PoolExhaustedError."""
        self._journal = journal
        self._num_put = self._num_durable = 0
        self._syncing: asyncio.Future[None] | None = None
        # The task that writes a new file, and the records to append afterwards. Nothing else uses
        # the journal while the task runs.
        self._anew: asyncio.Future[None] | None = None
        self._late: list[Record] = []
        facts = journal.take_facts()
        self.unreadable = sorted(key for key, value in facts.items() if not _is_fact(key, value))
        self._facts: dict[str, Any] = {
            key: value for key, value in facts.items() if key not in self.unreadable
        }
        if _EPOCH in self.unreadable:  # committed groups have used epochs
            self._put(_EPOCH, max(under(self._facts, _COMMITTED).values(), default=0))
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
        """Returns the identities of joined nodes as dicts, by name."""
        return under(self._facts, _NODE)

    def found(self) -> None:
        """Makes the cluster's id if it has none. Raises PoolExhaustedError."""
        if not self.cluster_id:
            self._put(_CLUSTER_ID, secrets.token_hex(8))

    def next_epoch(self) -> int:
        """Returns a new epoch, which the journal already has. Raises PoolExhaustedError."""
        self._put(_EPOCH, self.epoch + 1)
        return self.epoch

    def check_claim(self, node: str, epoch: int) -> None:
        """Raises InvalidArgumentError if a node's epoch is impossibly large.

        The coordinator continues from a node's epoch, so it must refuse another cluster's epoch.
        """
        if epoch > self.epoch + MAX_EPOCHS_AHEAD:
            raise InvalidArgumentError(
                f"epoch of node {node!r} must be at most {MAX_EPOCHS_AHEAD} ahead of the "
                f"coordinator's {self.epoch}, got {epoch}. If the coordinator lost its file, start "
                "it once with --epoch-at-least. Else the node belonged to another cluster: remove "
                "the file 'cluster' in the node's directory",
                argument="epoch",
            )

    def heard(self, epoch: int, cluster_id: str = "") -> None:
        """Saves an epoch or cluster id that the coordinator or a node reported.

        Raises:
            InvalidArgumentError: the epoch is larger than MAX_EPOCH.
            PoolExhaustedError: the journal cannot be written.
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
        """Removes a node that left. If that fails, a restarted daemon lists it as UNREACHABLE."""
        self._drop(_NODE + node)

    def committed_epoch(self, group: str) -> int:
        """Returns the epoch of the group's last committed view; 0 if there is none."""
        return int(self._facts.get(_COMMITTED + group, 0))

    def commit(self, group: str, epoch: int) -> None:
        """Saves that the group's view of this epoch is committed. Raises PoolExhaustedError."""
        self._put(_COMMITTED + group, epoch)
        known = under(self._facts, _COMMITTED)
        if len(known) > MAX_COMMITTED:
            self._drop(_COMMITTED + min(known, key=known.__getitem__))

    @property
    def owed(self) -> Mapping[str, list[Any]]:
        """Returns the reports that an earlier daemon had not sent to all nodes, by key."""
        return under(self._facts, _OWED)

    def owe(self, key: str, word: list[Any]) -> None:
        """Saves a report that is still to be sent. Raises PoolExhaustedError.

        `word` is [uid, job, group, epoch, nodes, lost ranks, left ranks].
        """
        self._put(_OWED + key, word)

    def told(self, key: str) -> None:
        """Removes a report that all nodes have. If that fails, a restarted daemon resends it."""
        self._drop(_OWED + key)

    async def durable(self) -> None:
        """Waits until all current facts would survive a crash of the host.

        Await this before other nodes learn a fact, so that the fact holds after a crash too.

        Raises:
            PoolExhaustedError: the facts cannot be written.
        """
        wanted = self._num_put
        while self._num_durable < wanted:
            if self._syncing is None:
                self._syncing = asyncio.ensure_future(self._sync())
            await asyncio.shield(self._syncing)

    async def _sync(self) -> None:
        """Syncs once for all callers that wait, on a thread because a disk may take long."""
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
        """Writes a fact, then uses it; other nodes may learn the fact after `durable`."""
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
        """Removes a fact; if the journal cannot be written, a restarted daemon still has it."""
        if self._facts.pop(key, None) is None:
            return
        if self._anew is None:
            self._journal.append([(key, None)])
        elif len(self._late) < MAX_LATE:
            self._late.append((key, None))

    def _write_anew(self) -> None:
        """Starts to replace the journal with a file of the current facts, on a thread.

        Without an event loop it blocks instead, because nobody is served yet.
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
            if late:  # if this fails, the next new file has these records
                self._journal.append(late)

    async def _settled(self) -> None:
        while self._anew is not None:
            await asyncio.shield(self._anew)

    async def end(self) -> None:
        """Closes the journal; waits at most END_S for a new file that is being written."""
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
    """Returns whether a journal's value has the form that `owe` writes."""
    if not isinstance(value, list) or [type(x) for x in value] != [int, str, str, int, *[list] * 3]:
        return False
    *_, nodes, lost, left = value
    return all(type(x) is str for x in nodes) and all(type(x) is int for x in (*lost, *left))
