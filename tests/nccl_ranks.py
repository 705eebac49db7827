"""Clients of a daemon that stand for processes and join communicators of a fake libnccl."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from nccl_builds import FakeNccl, edge_library, fake_library
from raw_client import Client, make_spec

from ep_runtime import nccl
from ep_runtime.errors import EpRuntimeError
from ep_runtime.v1 import admin_service_pb2
from ep_runtime_client.daemons import transport
from ep_runtime_client.daemons.addresses import SocketDirectory
from ep_runtime_client.nccl import communicators

SPEC = make_spec(transport="xla")
WAIT_S = 20.0


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeNccl]:
    monkeypatch.setenv("EP_RUNTIME_NCCL_LIBRARY", str(fake_library()))
    edge_library()  # compiled before any clock runs
    made = FakeNccl()
    made.reset()
    yield made
    made.reset()


class Rank:
    """One process's client of the daemon, and the result of making its communicators."""

    def __init__(self, directory: Any, rank: int) -> None:
        self.rank = rank
        self.client = Client(directory)
        self.control = transport.ControlChannel(SocketDirectory(directory), self.client.token)
        self.made: nccl.NcclGroup | None = None
        self.error: EpRuntimeError | None = None

    def join(self, generation: int, *, budget_s: float = WAIT_S) -> threading.Thread:
        """Makes the communicators on a new thread."""
        ranks = communicators.ranks_of(SPEC, generation, (self.rank,), (self.rank,))

        def work() -> None:
            library = nccl.NcclLibrary(edge_library())
            try:
                self.made = communicators.make(self.control, library, ranks, budget_s)
            except EpRuntimeError as error:
                self.error = error

        thread = threading.Thread(target=work)
        thread.start()
        return thread

    def groups(self) -> list[Any]:
        request = admin_service_pb2.ListGroupsRequest()
        return list(self.client.call(self.client.admin.ListGroups, request).groups)

    def state(self) -> tuple[str, str]:
        (listed,) = self.groups()
        return listed.nccl_version, listed.nccl_state

    def close(self) -> None:
        if self.made is not None:
            self.made.close()
        self.control.close()
        self.client.close()


@pytest.fixture
def ranks(fake: FakeNccl, daemon_process: Any) -> Iterator[tuple[list[Rank], int]]:
    """Yields two processes' clients in one group, and the group's generation."""
    directory = daemon_process().directory
    made = [Rank(directory, 0), Rank(directory, 1)]
    groups: list[Any] = [None, None]

    def create(rank: int) -> None:
        groups[rank] = made[rank].client.create(SPEC, [rank]).group

    threads = [threading.Thread(target=create, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    yield made, int(groups[0].generation)
    for rank in made:
        rank.close()
