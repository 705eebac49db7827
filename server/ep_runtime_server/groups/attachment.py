"""Attaches a process to a formed group's memory: an RPC gives a single-use attach token, fd.sock
exchanges it for descriptors, and the process reports that it has mapped them."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
from collections.abc import Iterator, Sequence

from ep_runtime.errors import (
    GroupNotReadyError,
    InvalidArgumentError,
    PeerLostError,
    PermissionDeniedError,
    RuntimeUnavailableError,
    StaleHandleError,
)
from ep_runtime_server.base import open_files
from ep_runtime_server.base.clock import Clock
from ep_runtime_server.base.limits import ATTACH_TOKEN_LIFE_S
from ep_runtime_server.callers.sessions import SessionRecord
from ep_runtime_server.groups.fsm import State, Trigger
from ep_runtime_server.groups.record import GroupRecord
from ep_runtime_server.memory.window_sets import Buffer

MAX_ATTACH_TOKENS_PER_SESSION = 64


@dataclasses.dataclass(frozen=True)
class AttachToken:
    """A token for the buffers of `world_ranks`, in the order of descriptors; -1 is the board."""

    session: SessionRecord
    group: GroupRecord
    generation: int
    world_ranks: tuple[int, ...]
    expires_s: float


class AttachTokens:
    """The attach tokens that have not been redeemed yet."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._tokens: dict[str, AttachToken] = {}

    def give(self, session: SessionRecord, group: GroupRecord, world_ranks: tuple[int, ...]) -> str:
        """Makes a token and returns its secret; over the limit, drops the session's oldest."""
        self.expire()
        own = [known for known, token in self._tokens.items() if token.session is session]
        if len(own) >= MAX_ATTACH_TOKENS_PER_SESSION:
            del self._tokens[own[0]]
        secret = secrets.token_hex(16)
        expires_s = self._clock.monotonic_s() + ATTACH_TOKEN_LIFE_S
        self._tokens[secret] = AttachToken(session, group, group.generation, world_ranks, expires_s)
        return secret

    def take(self, secret: str, session: SessionRecord) -> AttachToken:
        """Removes and returns a token. Removes it even if another session sent the secret.

        Raises:
            PermissionDeniedError: the token is unknown, used, expired, or of another session.
        """
        self.expire()
        token = self._tokens.pop(secret, None)
        if token is None:
            raise PermissionDeniedError(
                "unknown, used or expired attach token; it works once, for "
                f"{ATTACH_TOKEN_LIFE_S:.0f} s"
            )
        if token.session is not session:
            raise PermissionDeniedError("the attach token was given to another session")
        return token

    def expire(self) -> None:
        now = self._clock.monotonic_s()
        for secret in [s for s, token in self._tokens.items() if token.expires_s <= now]:
            del self._tokens[secret]


def acquire(
    tokens: AttachTokens,
    session: SessionRecord,
    group: GroupRecord,
    generation: int,
    world_ranks: tuple[int, ...],
) -> tuple[str, list[Buffer]]:
    """Makes an attach token; also returns its buffers: the board, then windows of this node.

    If `world_ranks` is empty, the token gives all windows of this node.

    Raises:
        StaleHandleError, PermissionDeniedError: see GroupRecord.check_reader.
        InvalidArgumentError: a rank is out of range, or the group has no windows.
    """
    group.check_reader(session, generation)
    if not group.has_windows:
        raise InvalidArgumentError(
            f"group {group.owner.name!r} has transport {group.spec.transport!r}, which needs no "
            "windows",
            argument="name",
        )
    if group.windows is None or not group.formed:
        raise StaleHandleError(
            f"group {group.owner.name!r} is not formed; finish CreateGroup first",
            group=group.owner.name,
        )
    by_rank = {buffer.world_rank: buffer for buffer in group.windows.buffers}
    here = [rank for rank in by_rank if rank >= 0]
    asked = world_ranks or here
    wrong = [rank for rank in asked if rank < 0 or rank not in by_rank]
    if wrong or len(set(asked)) != len(asked):
        raise InvalidArgumentError(
            f"world_ranks must be distinct and of {here}, whose windows are on this node, got "
            f"{list((wrong or asked)[:16])}",
            argument="world_ranks",
        )
    wanted = (-1, *asked)
    return tokens.give(session, group, wanted), [by_rank[rank] for rank in wanted]


def redeem(tokens: AttachTokens, session: SessionRecord, secret: str) -> tuple[list[Buffer], int]:
    """Returns the buffers of an attach token, and their generation.

    From this call on, the session is a holder of the window set.

    Raises:
        PermissionDeniedError: see AttachTokens.take.
        StaleHandleError: the group was closed or formed again in the meantime.
        RuntimeUnavailableError: the windows have not come back yet after a restart.
    """
    token = tokens.take(secret, session)
    group, windows = token.group, token.group.windows
    group.check_reader(session, token.generation)
    if windows is None or group.state is State.CLOSED:
        raise StaleHandleError(f"group {group.owner.name!r} is gone", group=group.owner.name)
    by_rank = {buffer.world_rank: buffer for buffer in windows.buffers}
    buffers = [by_rank[rank] for rank in token.world_ranks]
    if any(buffer.allocation is None for buffer in buffers):
        raise RuntimeUnavailableError(
            f"the daemon started again and waits for the windows of group {group.owner.name!r}; "
            "retry",
            group=group.owner.name,
        )
    # Note the holder before sending, because a process may end while it receives.
    windows.hold(session.session_id)
    return buffers, token.generation


@contextlib.contextmanager
def exported(buffers: Sequence[Buffer]) -> Iterator[list[int]]:
    """Yields new descriptors of the buffers, and closes them at the end.

    Raises:
        PoolExhaustedError: the daemon has no file descriptors left.
        RuntimeUnavailableError: the driver cannot export a window.
    """
    with contextlib.ExitStack() as opened:
        fds = []
        try:
            for buffer in buffers:
                assert buffer.allocation is not None
                fds.append(buffer.allocation.export_fd())
                opened.callback(os.close, fds[-1])
        except OSError as error:
            raise open_files.exhausted(f"descriptors for {len(buffers)} windows", error) from error
        yield fds


async def report_attached(
    session: SessionRecord, group: GroupRecord, generation: int, wait_s: float
) -> None:
    """Marks the process as attached, and waits until all others have attached.

    Raises:
        StaleHandleError, PermissionDeniedError: see GroupRecord.member.
        InvalidArgumentError: the process has not fetched its windows.
        PeerLostError: a member ended during the wait.
        GroupNotReadyError: members have not attached within `wait_s`.
    """
    member = group.member(session, generation)
    windows = group.windows
    if group.has_windows and (windows is None or session.session_id not in windows.holders):
        raise InvalidArgumentError(
            f"fetch the windows of group {group.owner.name!r} before reporting them attached",
            argument="name",
        )
    if not group.formed:
        raise StaleHandleError(
            f"group {group.owner.name!r} is not formed; finish CreateGroup first",
            group=group.owner.name,
        )
    member.attached = True
    group.notify()
    if group.state is State.FORMING and not group.unattached_ranks:
        group.advance(Trigger.ALL_ATTACHED)

    def settled() -> bool:
        return group.state is not State.FORMING or group.generation != generation

    if not await group.changes.until(settled, wait_s):
        awaited, missing = group.awaited
        raise GroupNotReadyError(
            f"group {group.owner.name!r}: {awaited} within {wait_s:g} s",
            group=group.owner.name,
            missing_ranks=missing,
        )
    if group.failure is not None:
        group.failure.raise_again()
    group.member(session, generation)
    if group.state is not State.READY:
        rank = group.lost_ranks[0] if group.lost_ranks else -1
        raise PeerLostError(
            f"group {group.owner.name!r}: the process of rank {rank} is gone",
            group=group.owner.name,
            rank=rank,
        )
