"""Tests which names, labels and texts are allowed, and how others are shown."""

from __future__ import annotations

import shutil
import string
from pathlib import Path

import pytest
from child_programs import run_to_end

from ep_runtime.allowed_names import (
    MAX_LABEL_BYTES,
    MAX_LABELS,
    MAX_NAME_BYTES,
    check_new_labels,
    check_new_name,
    quoted,
    shown,
)
from ep_runtime.errors import InvalidArgumentError
from ep_runtime.text import check_printable, printable

KINDS = ("group", "layer", "job")
ALLOWED = {
    "every character": "a._/:@+-Z9",
    "start": ["_a", ".a", "/a", "9"],
    "number": "4242",
    "coordinator": ["10.0.0.1:1234", "node-7.cluster.local:8476"],
    "long": "x" * MAX_NAME_BYTES,
    "scripts": ["größe", "слой", "שכבה", "層", "١٢", "हिन्दी", "ภาษา"],
    "combining": ["e\u0301", "e\u0301\u0323\u0304x"],
}
REFUSED = {
    "empty": "",
    "long": ["x" * (MAX_NAME_BYTES + 1), "é" * (MAX_NAME_BYTES // 2 + 1)],
    "option": ["-a", "--yes", "+a", "@a", ":a"],
    "space": ["a b", "a ", " a", "a\tb", "a\u00a0b", "a\u3000b"],
    "line": ["a\nb", "a\n", "a\r", "a\x00", "a\u2028b"],
    "order": ["a\x1b[2J", "a\x7f", "a\u202eb", "\u2066a", "a\u200fb", "a\u200db"],
    "combining": ["\u0301e", "/\u0301", "e" + 4 * "\u0301", "e\u20dd"],
    "unseen": ["\u3164", "a\u115fb", "a\ufe0f", "a\u034f", "a\U000e0100"],
    "surrogate": "\udcff",
    "picture": "a\U0001f600",
    "selector": ["a=b", "a,b", "a!"],
}


def _each(table: dict[str, str | list[str]]) -> list[str]:
    return [
        name for names in table.values() for name in ([names] if isinstance(names, str) else names)
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_letters_digits_and_some_marks_make_a_name(kind: str) -> None:
    for name in _each(ALLOWED):
        check_new_name(kind, name)
        assert shown(name) == name
    for char in {*string.printable} - {*string.ascii_letters, *string.digits, *"._/:@+-"}:
        with pytest.raises(InvalidArgumentError, match=f"{kind} name must be "):
            check_new_name(kind, f"a{char}b")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", _each(REFUSED), ids=ascii)
def test_whatever_else_is_refused_by_name(kind: str, name: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"{kind} name must be "):
        check_new_name(kind, name)


def test_layers_have_places_of_stacks_and_paths_as_jax_prints_them() -> None:
    for name in ("moe[3]", "['a']['b']", ".params['layers_0'][0].moe", "['größe']"):
        check_new_name("layer", name)
        assert shown(name) == name
        for kind in ("group", "job"):
            with pytest.raises(InvalidArgumentError, match=kind):
                check_new_name(kind, name)
    for name in (
        "s[",
        "s]",
        "s[]",
        "s[x]",
        "s[$(id)]",
        "s[12345678]",
        "['']",
        "['a'",
        "['$(id)']",
        "'a'",
    ):
        with pytest.raises(InvalidArgumentError, match="layer name must be "):
            check_new_name("layer", name)


def test_jobs_have_the_address_of_a_coordinator() -> None:
    for name in ("[::1]:1234", "[fe80::1%eth0]:1234"):
        check_new_name("job", name)
        assert shown(name) == name
        with pytest.raises(InvalidArgumentError, match="group name must be "):
            check_new_name("group", name)
    for name in ("[]:1", "[::1", "[$(id)]:1", "[::1%$(id)]:1"):
        with pytest.raises(InvalidArgumentError, match="job name must be "):
            check_new_name("job", name)


def test_labels_are_names_and_texts_of_the_same_characters() -> None:
    check_new_labels({})
    check_new_labels({"team": "nlp", "run": "2026-11-22T22-15-58", "lr": "-1e-3", "note": ""})
    check_new_labels({f"k{number}": "" for number in range(MAX_LABELS)})
    check_new_labels({"k": "v" * (MAX_LABEL_BYTES - 1)})
    wrong = [*({name: "v"} for name in _each(REFUSED) if len(name) < MAX_NAME_BYTES // 2)]
    for value in ("a b", "a,b", "a=b", "$(id)", "a\n", "v" * MAX_LABEL_BYTES, "\udcff"):
        wrong.append({"k": value})
    for labels in (*wrong, {f"k{number}": "" for number in range(MAX_LABELS + 1)}):
        with pytest.raises(InvalidArgumentError, match="labels must be "):
            check_new_labels(labels)


# Names from before the rule; those of commands make the file `run` if a shell runs them.
OLD = (
    "$(echo>run)",
    "`echo>run`",
    "two words",
    "it's",
    "'$(echo>run)'",
    "';echo>run;'",
    '"$(echo>run)"',
    "\\'$(echo>run)'",
    "\\\\'$(echo>run)\\",
    "\\",
    "!!",
    "~root",
    "*",
    "a\u202eb",
    "a\x1b[2J\nb",
)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish", "sh"])
def test_old_names_are_shown_as_a_word_that_runs_nothing(shell: str, tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    for name in OLD:
        word = shown(name)
        assert word == quoted(name)
        assert word.isprintable()
        done = run_to_end(shell, "-c", f"printf %s {word}", cwd=tmp_path, code=None)
        assert [*tmp_path.iterdir()] == [], name
        if shell in ("bash", "zsh") or not word.startswith("$"):
            assert done.stdout == name


ORDERS = "a\x1b[2Jb\rc\x9b1md\u202ee\x7ff"


def test_what_prints_stays_and_the_rest_is_escaped():
    assert printable("ä 中 \U0001f600\nnext") == "ä 中 \U0001f600\nnext"
    assert printable(ORDERS) == r"a\x1b[2Jb\rc\x9b1md\u202ee\x7ff"


def test_an_argument_of_other_text_is_named():
    check_printable("labels", "", 10)
    for text in ("a\rb", "x" * 11):
        with pytest.raises(InvalidArgumentError, match="labels must be printable text of at most"):
            check_printable("labels", text, 10)
