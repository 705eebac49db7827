"""Public docstrings and the reference are complete: arguments, fields, sections, examples."""

from __future__ import annotations

import dataclasses
import inspect
import re

import doc_pages
from child_programs import run_python
from public_names import CALLABLES, OF_A_FRAMEWORK, PUBLIC, Public
from run_examples import FIRST_MET
from run_page import CHEAP

import ep_runtime as ep

REFERENCE = doc_pages.ROOT / "docs/reference"
# Callables without an argument that can make them fail.
NEVER_RAISE = {"error_of", "export_checks", "Group.describe", "Session.close", "Session.describe"}


def test_calls_describe_their_arguments_and_no_others() -> None:
    wrong = {item.name: {*item.parameters} ^ {*item.described("Args")} for item in CALLABLES}
    assert {name: words for name, words in wrong.items() if words} == {}


def test_calls_say_what_they_return_raise_and_cost() -> None:
    def missing(item: Public) -> list[str]:
        # Without arguments the first sentence says it.
        gives = inspect.signature(item.value).return_annotation != "None" and item.parameters
        wanted = ["Returns"] if gives else []
        if "." not in item.name or item.name.startswith(("Session.", "Group.", "convert.")):
            wanted += ["Cost"] if item.name in NEVER_RAISE else ["Cost", "Raises"]
        return [title for title in wanted if not (item.section(title) or item.paragraph(title))]

    assert {item.name: titles for item in CALLABLES if (titles := missing(item))} == {}


def test_fields_are_described() -> None:
    for item in PUBLIC:
        assert item.doc, item.name
        if dataclasses.is_dataclass(item.value):
            fields = {field.name for field in dataclasses.fields(item.value)}
            if "keyword arguments of `ep.moe`" in item.doc:
                fields -= {*inspect.signature(ep.moe).parameters, *OF_A_FRAMEWORK}
            assert fields <= {*item.described("Attributes"), *item.described("Args")}, item.name


def test_the_calls_that_users_meet_first_have_examples_that_run() -> None:
    examples = {item.name for item in PUBLIC if "\nExamples:\n    >>> " in item.doc}
    assert set(FIRST_MET) <= examples
    run_python("-W", "error", doc_pages.TESTS / "run_examples.py", **CHEAP)


def test_the_reference_has_every_name() -> None:
    text = "\n".join(page.read_text(encoding="utf-8") for page in REFERENCE.glob("*.md"))
    shown = re.findall(r"^::: ep_runtime\.(\w+)$", text, re.MULTILINE)
    assert sorted(shown) == sorted({*ep.__all__, "linen", "nnx", "optax"} - {"__version__"})
    lists = re.findall(r"members: \[(.*)\]", text)
    known = [item.name for item in PUBLIC if item.name.startswith(("Session.", "Group."))]
    assert set(", ".join(lists).split(", ")) == {name.partition(".")[2] for name in known}
