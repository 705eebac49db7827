"""Gives a forming group its memory: retained windows if they fit, else new ones."""

from __future__ import annotations

from ep_runtime.errors import StaleHandleError
from ep_runtime_server.base.events import EventLog
from ep_runtime_server.groups.record import GroupRecord
from ep_runtime_server.memory.windows import WindowPool


async def get_windows(group: GroupRecord, pool: WindowPool, events: EventLog) -> None:
    """Gives a fully claimed group its windows, if it needs any.

    Raises:
        StaleHandleError: processes of the group have mapped windows that no longer fit its view.
        PoolExhaustedError, InvalidArgumentError, RuntimeUnavailableError: see WindowPool.allocate.
    """
    if not group.has_windows:
        return
    windows, ranks = group.windows, group.local_ranks
    node_size, before = group.node_size_of_view, group.node_size
    if group.formed and node_size != before:
        raise _other_nodes(group)
    group.node_size = node_size
    if windows is not None and windows.serves(group.resolved, ranks):
        if windows.generation == group.generation:  # allocated for an earlier view
            return
        usable = windows.is_on(group.uuids) and not windows.wanted_ranks
        if usable and not windows.holders:
            await pool.format_again(windows, group.generation)
            group.reattached = True
            return
    elif group.formed:
        raise _other_nodes(group)
    if windows is not None:  # a former member may still write to the old windows
        _say_anew(group, before, events)
        pool.release(windows)
        group.windows = None
    group.reattached = False
    group.windows = await pool.allocate(
        group.owner, group.resolved, group.generation, group.uuids, ranks
    )


def _other_nodes(group: GroupRecord) -> StaleHandleError:
    return StaleHandleError(
        f"group {group.owner.name!r} formed again with ranks on other nodes than its processes "
        "have mapped; create it again",
        group=group.owner.name,
    )


def _say_anew(group: GroupRecord, before: int, events: EventLog) -> None:
    assert group.windows is not None
    fits = group.windows.serves(group.resolved, group.local_ranks)
    why = (
        "processes of before may still write to it, or it lies elsewhere"
        if fits
        else f"it is of other ranks, or of {before or 'all'} ranks that share windows, now "
        f"{group.node_size or 'all'}"
    )
    events.add(
        "windows.replaced",
        f"group {group.owner}: new memory for ranks {group.local_ranks}: {why}",
        **group.fields,
        node_size=group.node_size,
    )
