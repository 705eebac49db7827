"""Draws messages of any type with odd values, from their descriptors alone.

A field that is added to a message, and an RPC that is added to a service, are in it from then on.
"""

from __future__ import annotations

import collections
import importlib
import pkgutil
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2

from ep_runtime import v1

MAX_DEPTH = 8
MAX_TOLD = 8  # remembered values of each field name

_ID = "op_id"  # a call with this field counts as new only if its id differs

_EDGES = sorted(
    {sign * (1 << bits) + more for bits in (0, 7, 31, 32, 53, 62, 63) for sign in (1, -1)
     for more in (-1, 0, 1)} | {10**9 - 1, 10**9, -(10**9), (1 << 64) - 64, (1 << 64) - 1}
)  # fmt: skip
_TEXTS = [
    *("", " ", ".", "..", "/", "-1", "0", "a/b", "../../etc", "%s%n", "{}", "null", "\0", "\r\n"),
    *("\x1b[31m", "a\nb", "é", "\u202e", "\ufeff", "名前", "\U0001f600", "x" * 120, "x" * 121),
    *("x" * 300, "é" * 5000, "\x1b" * 20_000, "__class__", "1e400", "NaN", "[" * 1000),
]
_RANGES = {
    FieldDescriptor.CPPTYPE_INT32: (-(1 << 31), (1 << 31) - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, (1 << 32) - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(1 << 63), (1 << 63) - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, (1 << 64) - 1),
}
_FLOATS = [0.0, -0.0, 1e-308, 1e308, float("inf"), float("-inf"), float("nan")]


class Method(NamedTuple):
    """An RPC of the wire contract."""

    path: str
    request: type[Message]
    answer: type[Message]
    streams: bool


def every_method() -> list[Method]:
    """All RPCs of all services that a daemon may serve."""
    files = [
        importlib.import_module(f"{v1.__name__}.{module.name}")
        for module in pkgutil.iter_modules(v1.__path__)
        if module.name.endswith("_pb2")
    ]
    return [
        Method(
            f"/{service.full_name}/{method.name}",
            GetMessageClass(method.input_type),
            GetMessageClass(method.output_type),
            method.server_streaming,
        )
        for file in (*files, health_pb2)
        for service in file.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    ]


def _fields(message: Message) -> Iterator[tuple[str, Any]]:
    """Yields (name, value) of fields in a message and in its nested messages, except maps."""
    for field, value in message.ListFields():
        values = value if field.is_repeated else [value]
        if field.message_type is None:
            yield from ((field.name, item) for item in list(values)[:MAX_TOLD])
        elif not field.message_type.GetOptions().map_entry:
            for item in list(values)[:MAX_TOLD]:
                yield from _fields(item)


def _fits(field: FieldDescriptor, value: Any) -> bool:
    """Fields of the same name may have different types."""
    if field.cpp_type in _RANGES:
        low, high = _RANGES[field.cpp_type]
        return isinstance(value, int) and low <= value <= high
    return field.cpp_type == FieldDescriptor.CPPTYPE_STRING and isinstance(
        value, bytes if field.type == FieldDescriptor.TYPE_BYTES else str
    )


class OddMessages:
    """Attributes:
    told: values by the names of their fields, which are sent as often as odd ones: ids, names,
        generations. `learn` adds what a daemon answers.
    """

    def __init__(self, numbers: random.Random, *models: Message) -> None:
        """`models` are right messages; messages of their types sometimes start as a copy of one."""
        self._numbers = numbers
        self._models: dict[str, list[Message]] = collections.defaultdict(list)
        for model in models:
            self.add_model(model)
        self.told: dict[str, collections.deque[Any]] = collections.defaultdict(
            lambda: collections.deque(maxlen=MAX_TOLD)
        )
        for model in models:
            self.learn(model)

    def add_model(self, message: Message) -> None:
        """Keeps a few messages of each type, the first and the last."""
        models = self._models[message.DESCRIPTOR.full_name]
        if message not in models:
            models[MAX_TOLD - 1 :] = [message]

    def learn(self, message: Message) -> None:
        for name, value in _fields(message):
            if value not in self.told[name]:
                self.told[name].append(value)

    def _often(self, chance: float) -> bool:
        return self._numbers.random() < chance

    def encoded(self, kind: type[Message]) -> bytes:
        """Returns a message's bytes, sometimes damaged."""
        data = self.message(kind.DESCRIPTOR).SerializeToString()
        return self.spoilt(data) if self._often(0.1) else data

    def spoilt(self, data: bytes) -> bytes:
        """Damages bytes: cuts, replaces, doubles or drops them."""
        numbers, changed = self._numbers, bytearray(data)
        way = numbers.randrange(5)
        if way == 0:
            return bytes(changed[: numbers.randrange(len(changed) + 1)])
        if way == 1:
            return data + data
        if way == 2:
            return numbers.randbytes(numbers.choice([1, 10, 100, 1000]))
        for _ in range(numbers.randint(1, 4)):
            place = numbers.randrange(len(changed) + 1)
            if way == 3 and place < len(changed):
                changed[place] = numbers.randrange(256)
            else:
                changed[place:place] = numbers.randbytes(numbers.randint(1, 4))
        return bytes(changed)

    def message(self, descriptor: Descriptor, depth: int = 0) -> Message:
        """Draws a message of the type."""
        made = GetMessageClass(descriptor)()
        models = self._models.get(descriptor.full_name)
        if models and self._often(0.6):
            made.CopyFrom(self._numbers.choice(models))
            if self._often(0.5):
                self._complete(made)
            if _ID in descriptor.fields_by_name and self._often(0.8):
                setattr(made, _ID, self._numbers.randbytes(8).hex())
            if self._often(0.6) and descriptor.fields:
                self._fill(made, self._numbers.choice(descriptor.fields), depth)
            return made
        share = self._numbers.choice([0.2, 0.6, 0.9])
        for field in descriptor.fields:
            if depth < MAX_DEPTH and self._often(share):
                self._fill(made, field, depth)
        return made

    def _complete(self, made: Message) -> None:
        """Fills fields that the model left empty with the values last learned."""
        for field in made.DESCRIPTOR.fields:
            told = [value for value in self.told.get(field.name, ()) if _fits(field, value)]
            if told and not field.is_repeated and not getattr(made, field.name):
                setattr(made, field.name, told[-1])

    def _fill(self, made: Message, field: FieldDescriptor, depth: int) -> None:
        made.ClearField(field.name)
        inner = field.message_type
        if inner is not None and inner.GetOptions().map_entry:
            self._fill_map(getattr(made, field.name), inner)
        elif field.is_repeated:
            values = [self._value(field, depth) for _ in range(self._count(inner is not None))]
            getattr(made, field.name).extend(values)
        elif inner is not None:
            getattr(made, field.name).CopyFrom(self._value(field, depth))
        else:
            setattr(made, field.name, self._value(field, depth))

    def _fill_map(self, entries: Any, entry: Descriptor) -> None:
        key, value = entry.fields_by_name["key"], entry.fields_by_name["value"]
        for _ in range(self._count(value.message_type is not None)):
            name = self._value(key, MAX_DEPTH)
            if value.message_type is not None:
                entries[name].CopyFrom(self._value(value, MAX_DEPTH))
            else:
                entries[name] = self._value(value, MAX_DEPTH)

    def _count(self, of_messages: bool) -> int:
        if self._often(0.01):
            return 200 if of_messages else 5000
        return self._numbers.choice([0, 1, 1, 2, 2, 3, 4, 8])

    def _value(self, field: FieldDescriptor, depth: int) -> Any:
        numbers, kind = self._numbers, field.cpp_type
        if field.message_type is not None:
            return self.message(field.message_type, depth + 1)
        told = [value for value in self.told.get(field.name, ()) if _fits(field, value)]
        if told and self._often(0.75):
            return numbers.choice(told)
        if kind in _RANGES:
            low, high = _RANGES[kind]
            small = numbers.randint(max(low, -2), 16)
            return small if self._often(0.5) else min(max(numbers.choice(_EDGES), low), high)
        if kind == FieldDescriptor.CPPTYPE_BOOL:
            return self._often(0.5)
        if kind == FieldDescriptor.CPPTYPE_ENUM:
            known = [value.number for value in field.enum_type.values]
            return numbers.choice([*known, *known, -1, 99, (1 << 31) - 1])
        if kind == FieldDescriptor.CPPTYPE_STRING:
            text = numbers.choice(_TEXTS)
            return text.encode() if field.type == FieldDescriptor.TYPE_BYTES else text
        return numbers.choice(_FLOATS)
