"""The list of tests/tools/mutants.py: every entry matches the code."""

from __future__ import annotations

from named_tests import TESTS, names_in
from tools import mutants


def test_every_text_stands_once_in_its_file() -> None:
    assert [fault for mutant in mutants.listed() if (fault := mutant.fault())] == []


def test_every_test_is_there() -> None:
    for mutant in mutants.listed():
        for test in mutant.tests:
            file, _, name = test.removeprefix("tests/").partition("::")
            assert (TESTS / file).is_file(), mutant.name
            assert not name or name in names_in(file), mutant.name
