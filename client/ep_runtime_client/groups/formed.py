"""A READY group in this process, and how a restarted daemon gets it back."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
from collections.abc import Iterator, Sequence

from ep_runtime import board, native, specs, wire
from ep_runtime.errors import RuntimeUnavailableError
from ep_runtime.v1 import group_service_pb2, types_pb2
from ep_runtime_client.daemons import transport
from ep_runtime_client.daemons.client import DaemonClient

Held = list[tuple[types_pb2.WindowDescriptor, int]]


class Memory:
    """Descriptors of a group's board and windows, saved for a restarted daemon.

    The thread that handles the daemon's events reads the board while another thread may close the
    group: without a lock it could read a closed descriptor number that is another file's by then.
    """

    def __init__(self, held: Held) -> None:
        self._held = held
        self._board = next((fd for item, fd in held if item.world_rank == -1), None)
        self._lock = threading.Lock()  # held for each read, so that nothing is closed meanwhile

    @property
    def window_ranks(self) -> list[int]:
        """World ranks whose windows are among the descriptors."""
        return sorted(item.world_rank for item, _ in self._held if item.world_rank >= 0)

    def of(self, ranks: Sequence[int]) -> Held:
        """Returns descriptors of world ranks (-1: board); the group must not close meanwhile."""
        wanted = set(ranks)
        return [(item, fd) for item, fd in self._held if item.world_rank in wanted]

    @contextlib.contextmanager
    def lent(self, ranks: Sequence[int]) -> Iterator[Held]:
        """Lends copies that stay open until the end of the block, even if the group closes."""
        with self._lock:
            lent = [(item, os.dup(fd)) for item, fd in self.of(ranks)]
        try:
            yield lent
        finally:
            transport.close_all([fd for _, fd in lent])

    def poison(self, generation: int) -> board.Poison | None:
        """Returns why the board ends that generation; None as long as it does not."""
        with self._lock:
            return None if self._board is None else board.read_poison(self._board, generation)

    def left(self) -> list[int]:
        """Returns world ranks of this node that have left the group, from the board."""
        with self._lock:
            return [] if self._board is None else board.left_ranks(self._board)

    def close(self) -> None:
        with self._lock:
            held, self._held, self._board = self._held, [], None
            transport.close_all([fd for _, fd in held])


@dataclasses.dataclass(frozen=True)
class Formed:
    """A group that is READY.

    Attributes:
        spec: as the caller wanted it, and with the number of ranks that share windows.
        generation: the daemon's; 0 without a daemon.
        native_group: the group's object in the native library; None for transport "xla".
        reattached: whether retained windows were taken over and nothing was allocated.
        ranks: world ranks that this process claims.
        memory: descriptors of board and windows; empty for transport "xla".
        uuids: of the GPUs of the ranks; empty for other devices.
    """

    spec: specs.GroupSpec
    generation: int
    native_group: native.OpenGroup | None
    reattached: bool
    ranks: tuple[int, ...] = ()
    memory: Memory = dataclasses.field(default_factory=lambda: Memory([]))
    uuids: tuple[str, ...] = ()


def fetch(
    client: DaemonClient, control: transport.ControlChannel, name: str, generation: int
) -> Memory:
    """Fetches the descriptors of the group's board and of every window of this node."""
    answer = control.call(
        control.groups.AcquireWindows,
        group_service_pb2.AcquireWindowsRequest(name=name, generation=generation),
    )
    try:
        return Memory(
            transport.redeem(client.place, client.token, answer.ticket, transport.MUTATE_TIMEOUT_S)
        )
    except RuntimeUnavailableError:
        control.lost = True
        raise


def restore(
    client: DaemonClient,
    control: transport.ControlChannel,
    formed: Formed,
    layers: Sequence[wire.RegisteredLayer] = (),
) -> types_pb2.Group:
    """Tells a restarted daemon what this process holds of a group.

    Raises:
        RuntimeUnavailableError: the daemon is gone again.
        EpRuntimeError: the daemon no longer has the group; the text has its reason.
    """
    found: types_pb2.Group
    timeout_s = transport.MUTATE_TIMEOUT_S
    for first in range(0, len(layers) or 1, wire.MAX_LAYERS_PER_CALL):
        some = layers[first : first + wire.MAX_LAYERS_PER_CALL]
        request = group_service_pb2.RestoreGroupRequest(
            spec=wire.group_spec_to_proto(formed.spec),
            generation=formed.generation,
            world_ranks=formed.ranks,
            layers=[wire.registered_to_proto(layer) for layer in some],
            device_uuids=formed.uuids,
            window_ranks=formed.memory.window_ranks,
        )
        answer = control.call(control.groups.RestoreGroup, request, timeout_s=timeout_s)
        if answer.wanted_ranks:
            with formed.memory.lent(answer.wanted_ranks) as held:
                transport.return_windows(
                    client.place, client.token, formed.spec.name, held, timeout_s
                )
        found = answer.group
    return found
