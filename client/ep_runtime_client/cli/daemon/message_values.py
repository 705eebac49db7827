"""Protobuf messages as plain values for JSON and tables: every field, names as in the proto.

Durations become `<name>_s` in seconds, timestamps ISO 8601 in UTC, enums their name without the
prefix that the proto repeats, absent messages None.
"""

from __future__ import annotations

import datetime
from typing import Any

from google.protobuf import duration_pb2, timestamp_pb2
from google.protobuf.descriptor import EnumDescriptor
from google.protobuf.message import Message

from ep_runtime import wire


class ValueBudget:
    """How many values the messages of a list, and those inside them, may still have."""

    def __init__(self, most: int) -> None:
        self._most = self._left = most

    def take(self, count: int) -> None:
        """Raises ValueError where those are too many."""
        self._left -= count
        if self._left < 0:
            raise ValueError(f"it has more than {self._most} values")


def plain(message: Message, budget: ValueBudget | None = None) -> dict[str, Any]:
    """The message as a dict. Raises ValueError or OverflowError for one that no daemon sends."""
    fields = message.DESCRIPTOR.fields
    if budget is not None:
        budget.take(len(fields))
    row: dict[str, Any] = {}
    for field in fields:
        value = getattr(message, field.name)
        key = field.name
        if _is_duration(field):
            key += "_s"
        if field.is_repeated:
            row[key] = _repeated(field, value, budget)
        elif field.has_presence and not message.HasField(field.name):
            row[key] = None
        else:
            row[key] = _single(field, value, budget)
    return row


def _is_duration(field: Any) -> bool:
    return field.message_type is not None and field.message_type.name == "Duration"


def _repeated(field: Any, value: Any, budget: ValueBudget | None) -> Any:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return dict(sorted(value.items()))
    return [_single(field, item, budget) for item in value]


def _single(field: Any, value: Any, budget: ValueBudget | None) -> Any:
    if field.enum_type is not None:
        return enum_name(field.enum_type, value)
    if isinstance(value, duration_pb2.Duration):
        return round(wire.seconds(value), 6)
    if isinstance(value, timestamp_pb2.Timestamp):
        return value.ToDatetime(tzinfo=datetime.UTC).isoformat(timespec="milliseconds")
    if isinstance(value, Message):
        return plain(value, budget)
    return value


def enum_name(enum: EnumDescriptor, number: int) -> str:
    """GROUP_STATE_READY of GroupState is READY; a number this version does not know stays one."""
    found = enum.values_by_number.get(number)
    if found is None:
        return str(number)
    zero = enum.values_by_number[0].name  # ends in _UNSPECIFIED, buf's rule
    return str(found.name).removeprefix(zero.removesuffix("UNSPECIFIED"))
