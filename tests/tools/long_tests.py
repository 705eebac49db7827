"""Writes tests/tiers/long.txt from what each test of a full run took.

    SUITE_LOG=FILE PYTHONPATH=tests/tools python -m pytest -p long_tests -m full -n auto
    python tests/tools/long_tests.py FILE [--seconds S]

The plugin appends a line for each test to FILE: its id, and the CPU seconds of the process and of
those that the test started and waited for. Run it on a quiet machine: a busy one adds a third.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

LONG = Path(__file__).parents[1] / "tiers/long.txt"


def _cpu_s() -> float:
    return sum(os.times()[:4])


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    before = _cpu_s()
    result = yield
    with open(os.environ["SUITE_LOG"], "a") as log:
        log.write(f"{json.dumps({'id': item.nodeid, 'cpu_s': round(_cpu_s() - before, 2)})}\n")
    return result


def lines(took: dict[str, float], seconds: float) -> list[str]:
    """Tests of which every case took longer, and the cases of the others."""
    cases = defaultdict(set)
    for test in took:
        cases[test.partition("[")[0]].add(test)
    long = {test for test, cpu_s in took.items() if cpu_s > seconds}
    return sorted(
        name for test, its in cases.items() for name in ([test] if its <= long else its & long)
    )


def main() -> None:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("log", type=Path, metavar="FILE")
    parser.add_argument("--seconds", type=float, default=1.0, help="longer ones are long")
    given = parser.parse_args()
    took = {}
    for line in given.log.read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        took[entry["id"]] = entry["cpu_s"]
    long = lines(took, given.seconds)
    LONG.write_text("".join(f"{name}\n" for name in long), encoding="utf-8")
    sys.stdout.write(f"{len(long)} lines; {sum(took.values()):.0f} CPU s in all\n")


if __name__ == "__main__":
    main()
