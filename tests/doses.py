"""The faults that the runtime promises to survive, the tests that hold each promise, their doses.

A test that repeats its fault takes the fixture `dose`: how often. This table says how often in CI,
and how often in `python tests/run_doses.py`, which writes what came of it into docs/faults.md.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterator
from pathlib import Path

from doses_table import TABLE, Held, Promise

TESTS = Path(__file__).resolve().parent
PAGE = TESTS.parent / "docs" / "faults.md"
RUNS = TESTS / "doses_runs.json"  # the last run of each promise
BEGIN, END = "<!-- by tests/run_doses.py -->\n", "<!-- end -->\n"


@functools.cache
def _by_test() -> dict[str, Held]:
    return {held.test: held for promise in TABLE for held in promise.held_by}


def of(test: str, chosen: str) -> int:
    """How often the fault of `test` (FILE::TEST below tests/) comes.

    Args:
        chosen: ci, full, or a number that no dose exceeds.
    """
    held = _by_test()[test]
    if chosen == "ci":
        return held.ci
    return held.full if chosen == "full" else min(held.full, int(chosen))


@dataclasses.dataclass(frozen=True)
class Run:
    """What came of one promise's tests.

    Attributes:
        number: of the promise.
        dose: ci, full, or a number that no dose exceeded.
        passed, failed, skipped: tests.
        figures: what they measured, by name.
        seconds: of all of them, one after the other.
        date, machine: when and where.
    """

    number: int
    dose: str
    passed: int
    failed: int
    skipped: int
    figures: dict[str, str]
    seconds: float
    date: str
    machine: str

    @property
    def result(self) -> str:
        counts = {"failed": self.failed, "passed": self.passed, "skipped": self.skipped}
        said = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
        return "; ".join([said, *(f"{name} {value}" for name, value in self.figures.items())])


def runs() -> dict[int, Run]:
    """The last run of each promise, by its number."""
    if not RUNS.exists():
        return {}
    return {item["number"]: Run(**item) for item in json.loads(RUNS.read_text(encoding="utf-8"))}


def keep(found: dict[int, Run]) -> None:
    """Writes `found` in the place of what is known of these promises, and the page's tables."""
    every = sorted({**runs(), **found}.values(), key=lambda run: run.number)
    items = [dataclasses.asdict(run) for run in every]
    RUNS.write_text(json.dumps(items, indent=1) + "\n", encoding="utf-8")
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    PAGE.write_text(before + BEGIN + tables() + END + rest.partition(END)[2], encoding="utf-8")


def tables() -> str:
    """The page's tables: promises with their tests and doses, and the last runs."""
    return "\n".join([*_promises(), "", "## Last runs", "", *_last_runs(), ""])


def _promises() -> Iterator[str]:
    yield "| # | what happens | what is promised | held by (dose in CI / full dose) |"
    yield "|---|---|---|---|"
    for promise in TABLE:
        tests = "<br>".join(f"`{held.test}`{_dose(held)}" for held in promise.held_by)
        cells = (str(promise.number), promise.fault, promise.promise, tests)
        yield f"| {' | '.join(cells)} |"


def _dose(held: Held) -> str:
    return f" ({held.ci:,} / {held.full:,} {held.unit})" if held.full else ""


def _last_runs() -> Iterator[str]:
    yield "| # | dose | result | took | date | machine |"
    yield "|---|---|---|---|---|---|"
    known = runs()
    for promise in TABLE:
        run = known.get(promise.number)
        if run is None:
            yield f"| {promise.number} | | not run yet | | | |"
            continue
        dose = {"ci": "that of CI", "full": "full"}.get(run.dose, f"{run.dose} at most")
        cells = (str(run.number), dose, run.result, f"{run.seconds:.0f} s", run.date, run.machine)
        yield f"| {' | '.join(cells)} |"


def promise_of(number: int) -> Promise:
    return next(promise for promise in TABLE if promise.number == number)
