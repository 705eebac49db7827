"""Every public name says what it takes, gives, raises and costs, and where its idea is from.

What applies depends on the kind of name; the sets below are the exceptions, each with its reason.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import doc_pages
from run_examples import FIRST_MET
from run_page import CHEAP

import ep_runtime as ep
from ep_runtime_client.block import linen, nnx
from ep_runtime_client.block import optax as ep_optax

EXAMPLES_TIMEOUT_S = 240.0
REFERENCE = doc_pages.ROOT / "docs/reference"

# Which no argument can make fail.
NEVER_RAISE = {
    "error_of",
    "sharding.Rules.on",
    "sharding.axes_of_entry",
    "nnx.MoEBlock.set_view",
    "recipes.Recipe.data_dtype",
    "recipes.BF16.data_dtype",
    "GroupSpec.difference",
    "GroupSpec.to_dict",
    "Group.describe",
    "Session.close",
    "Session.describe",
    "QuantizedTensor.detached",
    "export_checks",
}
# Called by a sign and not by name, so public as well.
BY_SIGN = {"__call__", "__getitem__"}
# flax has them.
OF_A_FRAMEWORK = {"setup", "parent", "name"}
# Work on sizes and names alone; what it costs nobody asks.
COSTS_NOTHING = {
    "sharding.axes_of_entry",
    "sharding.rules",
    "sharding.Rules.group_axes",
    "sharding.Rules.on",
    "sharding.Rules.shardings",
    "sharding.Rules.spec",
    "nnx.MoEBlock.set_view",
    "recipes.Recipe.data_dtype",
    "recipes.BF16.data_dtype",
    "recipes.Recipe.init_state",
    "recipes.TensorScaling.init_state",
    "GroupSpec.difference",
    "GroupSpec.to_dict",
    "QuantizedTensor.detached",
}
# Whose idea is somebody else's.
SOURCED = {
    *("aux_loss", "combine", "dense", "dispatch", "export_checks", "grouped_gemm"),
    *("grouped_quantize", "init_moe_params", "moe", "permute", "prepare", "recv_capacity"),
    *("remat_policy", "route", "sort_chunks", "unpermute", "update_expert_bias"),
    *("Session.create_group", "sharding.rules", "nnx.MoEBlock", "linen.MoEBlock"),
    *("quantize_params", "straight_through", "optax.quantizing"),
    *("recipes.TensorScaling", "recipes.BlockScaling", "recipes.MXFP8"),
}


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
    def parameters(self) -> dict[str, inspect.Parameter]:
        found = inspect.signature(self.value).parameters
        return {name: found[name] for name in found if name not in ("self", "cls")}

    def section(self, title: str) -> str | None:
        """The indented lines under `title:`, or None."""
        found = re.search(rf"^{title}:\n((?:    .*\n|\n)+)", self.doc + "\n", re.MULTILINE)
        return None if found is None else inspect.cleandoc(found[1])

    def paragraph(self, title: str) -> str | None:
        """What follows `title: ` up to the next empty line, or None."""
        found = re.search(rf"^{title}: (.+?)(?:\n\n|\Z)", self.doc, re.MULTILINE | re.DOTALL)
        return None if found is None else found[1]

    def described(self, title: str) -> dict[str, str]:
        """Text by name in a section of `name, name: text` entries."""
        texts: dict[str, str] = {}
        section = self.section(title)
        for entry in re.split(r"\n(?! )", section) if section else ():
            names, _, text = entry.partition(":")
            texts |= {name.strip(" *`"): text for name in names.split(",")}
        return texts


def of_class(name: str, cls: type) -> Iterator[Public]:
    """The class and what it defines for others to use."""
    yield Public(name, cls, "class")
    # Session and Group say in __dir__ which of their members are for users.
    shown = set(cls.__dir__(None)) if "__dir__" in vars(cls) else set(vars(cls))  # type: ignore[arg-type]
    for member, value in vars(cls).items():
        hidden = member.startswith("_") and member not in BY_SIGN
        if hidden or member not in shown or member in OF_A_FRAMEWORK:
            continue
        if isinstance(value, property | functools.cached_property):
            getter = value.fget if isinstance(value, property) else value.func
            yield Public(f"{name}.{member}", getter, "property")
        elif isinstance(value, classmethod | staticmethod):
            yield Public(f"{name}.{member}", value.__func__, "method")
        elif inspect.isfunction(value):
            yield Public(f"{name}.{member}", value, "method")


def of_value(name: str, value: Any) -> Iterator[Public]:
    if inspect.isclass(value) and issubclass(value, BaseException):
        yield Public(name, value, "exception")
    elif inspect.isclass(value):
        yield from of_class(name, value)
    elif inspect.isfunction(value):
        yield Public(name, value, "function")
    elif inspect.ismodule(value):
        yield Public(name, value, "module")
        for member, inner in vars(value).items():
            ours = getattr(inner, "__module__", None) == value.__name__
            if (
                ours
                and not member.startswith("_")
                and (inspect.isclass(inner) or inspect.isfunction(inner))
            ):
                yield from of_value(f"{name}.{member}", inner)


def public() -> list[Public]:
    names = [name for name in ep.__all__ if name != "__version__"]
    found = [item for name in names for item in of_value(name, getattr(ep, name))]
    modules = {"nnx": nnx, "linen": linen, "optax": ep_optax}
    return [*found, *(item for each in modules.items() for item in of_value(*each))]


PUBLIC = public()
CALLABLES = [item for item in PUBLIC if item.kind in ("function", "method")]


def complaints(items: Iterable[Public], missing: Callable[[Public], object]) -> dict[str, object]:
    """What `missing` finds, by name."""
    return {item.name: found for item in items if (found := missing(item))}


def test_every_name_begins_with_a_sentence() -> None:
    def missing(item: Public) -> object:
        first = item.doc.split("\n\n", 1)[0]
        return None if re.search(r"\w.*[.:]$", first, re.DOTALL) else first or "no docstring"

    assert complaints(PUBLIC, missing) == {}


def test_calls_describe_their_arguments_and_no_others() -> None:
    assert complaints(CALLABLES, lambda item: {*item.parameters} ^ {*item.described("Args")}) == {}


def test_calls_say_what_they_return() -> None:
    def missing(item: Public) -> bool:
        # Without arguments the first sentence says it.
        gives = inspect.signature(item.value).return_annotation != "None"
        return bool(item.parameters) and gives and item.section("Returns") is None

    assert complaints(CALLABLES, missing) == {}


def test_calls_say_what_they_raise() -> None:
    def missing(item: Public) -> bool:
        return (item.section("Raises") is None) != (item.name in NEVER_RAISE)

    assert complaints(CALLABLES, missing) == {}


def test_array_arguments_have_shapes() -> None:
    told = re.compile(r"\[.*\]|\b(like|as in|PRNG key)\b", re.DOTALL)

    def missing(item: Public) -> list[str]:
        texts = item.described("Args")
        arrays = [name for name, found in item.parameters.items() if "jax.Array" in str(found)]
        return [name for name in arrays if not told.search(texts[name])]

    assert complaints(CALLABLES, missing) == {}


def test_calls_say_what_they_cost() -> None:
    def missing(item: Public) -> bool:
        return (item.paragraph("Cost") is None) != (item.name in COSTS_NOTHING)

    assert complaints(CALLABLES, missing) == {}


def test_exceptions_are_of_names_that_are_there() -> None:
    assert {item.name for item in CALLABLES} >= NEVER_RAISE | COSTS_NOTHING


def test_fields_are_described() -> None:
    def missing(item: Public) -> set[str]:
        if not dataclasses.is_dataclass(item.value):
            return set()
        fields = {field.name for field in dataclasses.fields(item.value)}
        if "keyword arguments of `ep.moe`" in item.doc:
            fields -= {*inspect.signature(ep.moe).parameters, *OF_A_FRAMEWORK}
        return fields - {*item.described("Attributes"), *item.described("Args")}

    assert complaints(PUBLIC, missing) == {}


def test_what_is_from_elsewhere_says_from_where() -> None:
    assert {item.name for item in PUBLIC if item.paragraph("Source")} == SOURCED


def test_whom_users_meet_first_have_examples_that_run() -> None:
    for name, value in FIRST_MET.items():
        assert "\nExamples:\n    >>> " in (inspect.getdoc(value) or ""), name
    done = subprocess.run(
        [sys.executable, "-W", "error", str(doc_pages.ROOT / "tests/run_examples.py")],
        env={**os.environ, **CHEAP},
        capture_output=True,
        text=True,
        timeout=EXAMPLES_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_reference_has_every_name() -> None:
    text = "\n".join(page.read_text(encoding="utf-8") for page in REFERENCE.glob("*.md"))
    shown = re.findall(r"^::: ep_runtime\.(\w+)$", text, re.MULTILINE)
    assert sorted(shown) == sorted({*ep.__all__, "linen", "nnx", "optax"} - {"__version__"})
    members = {
        name for names in re.findall(r"members: \[(.*)\]", text) for name in names.split(", ")
    }
    known = {
        item.name.partition(".")[2]
        for item in PUBLIC
        if item.name.startswith(("Session.", "Group."))
    }
    assert members == known
