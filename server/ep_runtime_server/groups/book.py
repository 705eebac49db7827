"""A table of groups by owner, which also counts generations."""

from __future__ import annotations

from collections.abc import Callable

from ep_runtime.errors import StaleHandleError
from ep_runtime_server.base.clock import paced
from ep_runtime_server.callers.sessions import SessionRecord
from ep_runtime_server.groups.record import GroupRecord
from ep_runtime_server.memory.windows import Owner


class GroupBook:
    """Finds groups; the subclass `Groups` changes them. For the event loop's thread only."""

    def __init__(self) -> None:
        self.on_change: Callable[[GroupRecord], None] = lambda group: None
        # Called with a new generation before a group gets it; raises to refuse it.
        self.on_generation: Callable[[int], None] = lambda generation: None
        self._groups: dict[Owner, GroupRecord] = {}
        self._generation = 0

    @property
    def generation(self) -> int:
        """Returns the latest generation that a group got."""
        return self._generation

    def skip_to(self, generation: int) -> None:
        """Makes all later generations larger than `generation`."""
        self._generation = max(self._generation, generation)

    def _next_generation(self) -> int:
        self.on_generation(self._generation + 1)
        self._generation += 1
        return self._generation

    def add(self, group: GroupRecord) -> None:
        """Adds a group, new or restored."""
        self._groups[group.owner] = group
        self.skip_to(group.generation)
        group.on_change = self.on_change
        self.on_change(group)

    def _forget(self, group: GroupRecord) -> None:
        if self._groups.get(group.owner) is group:
            del self._groups[group.owner]

    def find(self, owner: Owner) -> GroupRecord | None:
        return self._groups.get(owner)

    def all(self) -> list[GroupRecord]:
        return list(self._groups.values())

    def of_user(self, uid: int) -> list[GroupRecord]:
        return [group for group in self._groups.values() if group.owner.uid == uid]

    def get(self, session: SessionRecord, name: str) -> GroupRecord:
        """Finds a group by name in the session's (uid, job). Raises StaleHandleError."""
        group = self._groups.get(Owner(session.uid, session.job, name))
        if group is None:
            raise StaleHandleError(
                f"no group {name!r} in job {session.job!r} of uid {session.uid}; create it",
                group=name,
                job=session.job,
            )
        return group

    def of_session(self, session: SessionRecord) -> list[GroupRecord]:
        """Returns groups of which the session is a member, now or in the previous generation."""
        key = session.session_id
        return [g for g in self._groups.values() if key in g.members or key in g.previous]

    async def by_session(self) -> dict[str, list[str]]:
        """Returns the names of each session's groups by session id, as `of_session` finds them."""
        found: dict[str, list[str]] = {}
        async for group in paced(self.all()):
            for session_id in group.members.keys() | group.previous.keys():
                found.setdefault(session_id, []).append(group.owner.name)
        return found
