"""What a group asks of the session that it is made in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from ep_runtime_client.daemons import transport
from ep_runtime_client.daemons.place import Place

_Result = TypeVar("_Result")


class GroupOwner(Protocol):
    """A `Session`, as far as its groups go."""

    job: str
    timeout_s: float

    @property
    def address(self) -> str: ...

    @property
    def place(self) -> Place: ...

    @property
    def token(self) -> str: ...

    @property
    def has_daemon(self) -> bool: ...

    @property
    def is_ours(self) -> bool: ...

    @property
    def alone(self) -> str: ...

    @property
    def control(self) -> transport.ControlChannel: ...

    def run(self, work: Callable[[transport.ControlChannel], _Result]) -> _Result: ...

    def require_alive(self) -> None: ...

    def say_left(self, name: str, generation: int) -> None: ...

    def forget_group(self, group: Any) -> None: ...
