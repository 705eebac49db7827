"""Writes tests/tiers/long.txt from the times of a full run's tests.

    SUITE_LOG=FILE PYTHONPATH=tests/tools python -m pytest -p long_tests -m full -n auto
    python tests/tools/long_tests.py FILE [--seconds S]

The plugin appends a line for each test to FILE: its id, its wall seconds, and the CPU seconds of
its process and of those that it started and waited for. A test costs its CPU seconds, or a quarter
of its wall seconds if that is more: other tests run while it waits. A busy machine adds to both.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

LONG = Path(__file__).parents[1] / "tiers/long.txt"


def _cpu_s() -> float:
    return sum(os.times()[:4])


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    cpu_s, wall_s = _cpu_s(), time.monotonic()
    result = yield
    took = {"cpu_s": _cpu_s() - cpu_s, "wall_s": time.monotonic() - wall_s}
    with open(os.environ["SUITE_LOG"], "a") as log:
        log.write(json.dumps({"id": item.nodeid, **took}) + "\n")
    return result


def lines(costs: dict[str, float], seconds: float) -> list[str]:
    """Returns files of which two thirds or more of the time is long, other tests
    and other cases.
    """
    left, long = dict(costs), []
    for end in ("::", "[", "\n"):
        groups: dict[str, list[str]] = defaultdict(list)
        for case in left:
            groups[case.partition(end)[0]].append(case)
        for name, cases in groups.items():
            if 3 * sum(left[case] > seconds for case in cases) >= 2 * len(cases):
                long.append(name)
                left = {case: cost_s for case, cost_s in left.items() if case not in cases}
    return sorted(long)


def main() -> None:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("log", type=Path, metavar="FILE")
    parser.add_argument("--seconds", type=float, default=0.8, help="long tests cost more")
    given = parser.parse_args()
    costs = {}
    for line in given.log.read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        costs[entry["id"]] = max(entry["cpu_s"], entry["wall_s"] / 4)
    long = lines(costs, given.seconds)
    LONG.write_text("".join(f"{name}\n" for name in long), encoding="utf-8")
    sys.stdout.write(f"{len(long)} lines; the tests cost {sum(costs.values()):.0f} s\n")


if __name__ == "__main__":
    main()
