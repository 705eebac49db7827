"""The lists of `tiers`: each line names a test that is there, and is needed."""

from __future__ import annotations

import subprocess
import sys

import pytest
import tiers
from named_tests import TESTS, names_in

LISTS = ("long", "slow", "static", "telling")


@pytest.mark.parametrize("name", LISTS)
def test_every_line_names_a_test(name: str) -> None:
    text = (tiers.FOLDER / f"{name}.txt").read_text(encoding="utf-8")
    assert text.splitlines() == sorted(tiers.lines(name))
    for line in tiers.lines(name):
        file, _, test = line.partition("[")[0].removeprefix("tests/").partition("::")
        assert (TESTS / file).is_file(), line
        assert not test or test in names_in(file), line


def test_every_case_of_a_line_is_there() -> None:
    cases = {line for name in LISTS for line in tiers.lines(name) if "[" in line}
    files = sorted({line.partition("::")[0] for line in cases})
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "--collect-only",
            "-q",
            "-n0",
            "-m",
            "full or slow",
            *files,
        ],
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert cases - set(done.stdout.splitlines()) == set()


def test_telling_tests_are_long_ones() -> None:
    for line in tiers.lines("telling"):
        assert {line, line.partition("[")[0]} & tiers.lines("long"), line


def test_a_case_a_test_and_a_file_have_a_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = {
        "long": {"tests/a.py::test_x", "tests/a.py::test_y[2]"},
        "telling": {"tests/a.py::test_x[1]"},
        "static": {"tests/b.py"},
        "slow": {"tests/a.py::test_y[3]"},
    }
    monkeypatch.setattr(tiers, "lines", lambda name: frozenset(listed[name]))
    wanted = {
        "tests/a.py::test_x[1]": "quick",
        "tests/a.py::test_x[2]": "long",
        "tests/a.py::test_y[1]": "quick",
        "tests/a.py::test_y[2]": "long",
        "tests/a.py::test_y[3]": "slow",
        "tests/b.py::test_z": "static",
    }
    assert {test: tiers.tier_of(test) for test in wanted} == wanted
