"""Registering layers: what is checked before, and who hears of it after."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ep_runtime.layer_specs import LayerSpec
from ep_runtime.wire import LayerStackSpec, RegisteredLayer
from ep_runtime_server.callers.sessions import SessionRecord
from ep_runtime_server.groups.record import GroupRecord

if TYPE_CHECKING:
    from ep_runtime_server.runtime import Runtime

# A layer is some 40 bytes on the wire and some 160 in the journal.
_JOURNAL_GROWTH = 5


def admit(
    runtime: Runtime,
    session: SessionRecord,
    group: GroupRecord,
    generation: int,
    request_bytes: int,
) -> None:
    """Whether the session may register as many layers as take `request_bytes` on the wire.

    Raises:
        StaleHandleError, PermissionDeniedError: see GroupRecord.member.
        PoolExhaustedError: the user's limit, or the journal's.
    """
    group.member(session, generation)
    growth = _JOURNAL_GROWTH * request_bytes
    runtime.recorder.admit(growth)
    runtime.quotas.check(session.uid, journal_bytes=growth)


async def register(
    runtime: Runtime,
    session: SessionRecord,
    group: GroupRecord,
    layers: Sequence[LayerSpec],
    stacks: Sequence[LayerStackSpec],
    *,
    replace: bool,
) -> tuple[list[RegisteredLayer], list[RegisteredLayer]]:
    """As `LayerTable.register`; the journal and the log know of them then.

    Raises:
        PoolExhaustedError: the user's limit, or that of handles on a board.
        InvalidArgumentError, SpecMismatchError: as `LayerTable.register`.
    """
    before = len(group.layers.history)
    answer = await group.layers.register(
        layers,
        stacks,
        lambda count: runtime.quotas.check(session.uid, layers=count),
        replace=replace,
    )
    added = len(group.layers.history) - before
    if added:
        await runtime.recorder.prepare(group)
        group.notify()
        runtime.events.add(
            "layers.registered",
            f"group {group.owner}: {added} layers and stacks registered",
            session_id=session.session_id,
            group=group.owner.name,
            added=added,
        )
    return answer
