"""The public names of `import ep_runtime as ep`, with their docstrings."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import textwrap
from collections.abc import Iterator
from typing import Any

import ep_runtime as ep
from ep_runtime_client.modules import linen, nnx
from ep_runtime_client.modules import optax as ep_optax

# Public although their names begin with "_", because users call them by operators.
BY_SIGN = {"__call__", "__getitem__"}
# Flax gives a linen module these: a method and two fields.
OF_A_FRAMEWORK = {"setup", "parent", "name"}


@dataclasses.dataclass(frozen=True)
class Public:
    """One public name: a function, method, property, class, exception or module."""

    name: str
    value: Any
    kind: str

    @property
    def doc(self) -> str:
        return inspect.getdoc(self.value) or ""

    @property
    def definition(self) -> Any:
        """The value without its decorators, as its source defines it."""
        return inspect.unwrap(self.value) if callable(self.value) else self.value

    @property
    def parameters(self) -> dict[str, inspect.Parameter]:
        found = inspect.signature(self.value).parameters
        return {name: found[name] for name in found if name not in ("self", "cls")}

    def section(self, title: str) -> str | None:
        """Returns the indented lines under `title:`, or None."""
        found = re.search(rf"^{title}:\n((?:    .*\n|\n)+)", self.doc + "\n", re.MULTILINE)
        return None if found is None else textwrap.dedent(found[1]).strip()

    def paragraph(self, title: str) -> str | None:
        """Returns the text after `title: ` up to the next empty line, or None."""
        found = re.search(rf"^{title}: (.+?)(?:\n\n|\Z)", self.doc, re.MULTILINE | re.DOTALL)
        return None if found is None else found[1]

    def described(self, title: str) -> dict[str, str]:
        """Returns texts by name from a section of `name, name: text` entries."""
        texts: dict[str, str] = {}
        section = self.section(title)
        for entry in re.split(r"\n(?! )", section) if section else ():
            names, _, text = entry.partition(":")
            texts |= {name.strip(" *`"): text for name in names.split(",")}
        return texts


def _of_class(name: str, cls: type) -> Iterator[Public]:
    """Yields the class and the members that it defines for users."""
    yield Public(name, cls, "class")
    for member, value in vars(cls).items():
        hidden = member.startswith("_") and member not in BY_SIGN
        if hidden or member == "setup":
            continue
        if isinstance(value, property | functools.cached_property):
            getter = value.fget if isinstance(value, property) else value.func
            yield Public(f"{name}.{member}", getter, "property")
        elif isinstance(value, classmethod | staticmethod):
            yield Public(f"{name}.{member}", value.__func__, "method")
        elif inspect.isfunction(value):
            yield Public(f"{name}.{member}", value, "method")


def _of_value(name: str, value: Any) -> Iterator[Public]:
    if inspect.isclass(value) and issubclass(value, BaseException):
        yield Public(name, value, "exception")
    elif inspect.isclass(value):
        yield from _of_class(name, value)
    elif inspect.isfunction(value):
        yield Public(name, value, "function")
    elif inspect.ismodule(value):
        yield Public(name, value, "module")
        for member in value.__all__:
            if member not in ep.__all__:  # errors are exported at the top level too
                yield from _of_value(f"{name}.{member}", getattr(value, member))


def public() -> list[Public]:
    values = {name: getattr(ep, name) for name in ep.__all__}
    values |= {"nnx": nnx, "linen": linen, "optax": ep_optax}
    return [item for name, value in values.items() for item in _of_value(name, value)]


PUBLIC = public()
CALLABLES = [item for item in PUBLIC if item.kind in ("function", "method")]
