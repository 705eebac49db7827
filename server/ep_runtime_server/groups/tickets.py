"""Single-use tickets that turn an RPC's permission into descriptors on fd.sock."""

from __future__ import annotations

import dataclasses
import secrets

from ep_runtime.errors import PermissionDeniedError
from ep_runtime_server.base.clock import Clock
from ep_runtime_server.base.limits import TICKET_LIFE_S
from ep_runtime_server.callers.sessions import SessionRecord
from ep_runtime_server.groups.record import GroupRecord

MAX_TICKETS_PER_SESSION = 64


@dataclasses.dataclass(frozen=True)
class Ticket:
    """`world_ranks` in the order of the descriptors; -1 is the board."""

    session: SessionRecord
    group: GroupRecord
    generation: int
    world_ranks: tuple[int, ...]
    expires_s: float


class TicketBook:
    """Tickets that were given and not redeemed."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._tickets: dict[str, Ticket] = {}

    def give(self, session: SessionRecord, group: GroupRecord, world_ranks: tuple[int, ...]) -> str:
        """The new ticket's secret. Too many void the session's oldest, and nobody else's."""
        self.expire()
        own = [known for known, ticket in self._tickets.items() if ticket.session is session]
        if len(own) >= MAX_TICKETS_PER_SESSION:
            del self._tickets[own[0]]
        secret = secrets.token_hex(16)
        expires_s = self._clock.monotonic_s() + TICKET_LIFE_S
        self._tickets[secret] = Ticket(session, group, group.generation, world_ranks, expires_s)
        return secret

    def take(self, secret: str, session: SessionRecord) -> Ticket:
        """Uses the ticket up, whoever asks.

        Raises:
            PermissionDeniedError: unknown, used, expired or another session's.
        """
        self.expire()
        ticket = self._tickets.pop(secret, None)
        if ticket is None:
            raise PermissionDeniedError(
                f"unknown, used or expired ticket; a ticket works once, for {TICKET_LIFE_S:.0f} s"
            )
        if ticket.session is not session:
            raise PermissionDeniedError("the ticket was given to another session")
        return ticket

    def expire(self) -> None:
        now = self._clock.monotonic_s()
        for secret in [s for s, ticket in self._tickets.items() if ticket.expires_s <= now]:
            del self._tickets[secret]
