"""Groups by owner, and their generation numbers."""

from __future__ import annotations

from collections.abc import Callable

from ep_runtime.errors import StaleHandleError
from ep_runtime_server.base.pacing import paced
from ep_runtime_server.callers.sessions import SessionRecord
from ep_runtime_server.groups.record import GroupRecord
from ep_runtime_server.memory.windows import Owner


class GroupBook:
    """Finds groups; `Groups` makes, changes and ends them. Lives on the event loop's thread."""

    def __init__(self) -> None:
        self.on_change: Callable[[GroupRecord], None] = lambda group: None
        # Called with a generation before anybody hears of it; it may refuse by raising.
        self.on_generation: Callable[[int], None] = lambda generation: None
        self._groups: dict[Owner, GroupRecord] = {}
        self._generation = 0

    @property
    def generation(self) -> int:
        """The newest generation number that was given."""
        return self._generation

    def skip_to(self, generation: int) -> None:
        """Makes the next generation larger than this one."""
        self._generation = max(self._generation, generation)

    def _next_generation(self) -> int:
        self.on_generation(self._generation + 1)
        self._generation += 1
        return self._generation

    def add(self, group: GroupRecord) -> None:
        """Adds a group that the previous daemon had."""
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
        """The group of that name in the session's (uid, job). Raises StaleHandleError."""
        group = self._groups.get(Owner(session.uid, session.job, name))
        if group is None:
            raise StaleHandleError(
                f"no group {name!r} in job {session.job!r} of uid {session.uid}; create it",
                group=name,
                job=session.job,
            )
        return group

    def of_session(self, session: SessionRecord) -> list[GroupRecord]:
        """Groups that the session is a member of, or was in the previous generation."""
        key = session.session_id
        return [g for g in self._groups.values() if key in g.members or key in g.previous]

    async def by_session(self) -> dict[str, list[str]]:
        """Names of the groups of every session, as `of_session` finds them."""
        found: dict[str, list[str]] = {}
        async for group in paced(self.all()):
            for session_id in group.members.keys() | group.previous.keys():
                found.setdefault(session_id, []).append(group.owner.name)
        return found
