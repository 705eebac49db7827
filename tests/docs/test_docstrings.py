"""Every public name says in one sentence what it does, then what it takes, gives, raises, costs."""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable

import doc_pages
from public_names import CALLABLES, OF_A_FRAMEWORK, PUBLIC, Public
from run_examples import FIRST_MET
from run_page import CHEAP
from tools.plain_english import SENTENCE_END

import ep_runtime as ep

EXAMPLES_TIMEOUT_S = 240.0
REFERENCE = doc_pages.ROOT / "docs/reference"
# No argument makes these fail.
NEVER_RAISE = {"error_of", "export_checks", "Group.describe", "Session.close", "Session.describe"}


def complaints(items: Iterable[Public], missing: Callable[[Public], object]) -> dict[str, object]:
    """The results of `missing` that are not empty, by name."""
    return {item.name: found for item in items if (found := missing(item))}


def test_every_name_begins_with_one_sentence() -> None:
    def missing(item: Public) -> str | None:
        sentences = SENTENCE_END.split(item.first_paragraph)
        one = len(sentences) == 1 and re.search(r"\w.*\.$", sentences[0], re.DOTALL)
        return None if one else item.first_paragraph or "no docstring"

    assert complaints(PUBLIC, missing) == {}


def test_calls_describe_their_arguments_and_no_others() -> None:
    assert complaints(CALLABLES, lambda item: {*item.parameters} ^ {*item.described("Args")}) == {}


def test_calls_say_what_they_return_raise_and_cost() -> None:
    def missing(item: Public) -> list[str]:
        # Without arguments the first sentence says it.
        gives = inspect.signature(item.value).return_annotation != "None" and item.parameters
        wanted = ["Returns"] if gives else []
        if "." not in item.name or item.name.startswith(("Session.", "Group.", "convert.")):
            wanted += ["Cost"] if item.name in NEVER_RAISE else ["Cost", "Raises"]
        return [title for title in wanted if not (item.section(title) or item.paragraph(title))]

    assert complaints(CALLABLES, missing) == {}


def test_array_arguments_have_shapes() -> None:
    shape = re.compile(r"\[.*\]|\b(like|as in|PRNG key)\b", re.DOTALL)

    def missing(item: Public) -> list[str]:
        texts = item.described("Args")
        arrays = [name for name, found in item.parameters.items() if "jax.Array" in str(found)]
        return [name for name in arrays if not shape.search(texts[name])]

    assert complaints(CALLABLES, missing) == {}


def test_fields_are_described() -> None:
    def missing(item: Public) -> set[str]:
        if not dataclasses.is_dataclass(item.value):
            return set()
        fields = {field.name for field in dataclasses.fields(item.value)}
        if "keyword arguments of `ep.moe`" in item.doc:
            fields -= {*inspect.signature(ep.moe).parameters, *OF_A_FRAMEWORK}
        return fields - {*item.described("Attributes"), *item.described("Args")}

    assert complaints(PUBLIC, missing) == {}


def test_the_calls_that_users_meet_first_have_examples_that_run() -> None:
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
