"""Single-use attach tokens: an RPC gives one, and fd.sock exchanges it for descriptors."""

from __future__ import annotations

import dataclasses
import secrets

from ep_runtime.errors import PermissionDeniedError
from ep_runtime_server.base.clock import Clock
from ep_runtime_server.base.limits import ATTACH_TOKEN_LIFE_S
from ep_runtime_server.callers.sessions import SessionRecord
from ep_runtime_server.groups.record import GroupRecord

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
