"""Runs the promises of `doses_table` at their full doses, and says what came of each.

    python tests/run_doses.py [NUMBER ...] [--dose full|ci|N] [--keep] [--save FILE] | --page

Without numbers all of them, one after the other: hours. `--dose N` cuts every dose to N at most;
`--keep` writes the results into docs/faults.md (and tests/doses_runs.json, from which its table is
made); `--save` writes them as JSON elsewhere; `--page` runs nothing and writes the page. A promise
that needs GPUs is skipped without them. Exits with 1 where a test failed. What the tests themselves
print is in the log that is named.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import doses


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def machine() -> str:
    """What the figures are from."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    text = f"{os.cpu_count()} cores, {memory:.0f} GiB, Linux {platform.release().partition('-')[0]}"
    try:
        told = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=30,
        )
    except (OSError, subprocess.TimeoutExpired):
        return text
    names = collections.Counter(told.stdout.split("\n")[:-1] if told.returncode == 0 else [])
    return ", ".join([text, *(f"{count} {name}" for name, count in names.items())])


def outcomes(report: Path) -> tuple[collections.Counter[str], dict[str, str]]:
    """How many passed, failed and were skipped, and the worst of each figure that they said."""
    counts: collections.Counter[str] = collections.Counter()
    figures: dict[str, str] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        what = {child.tag for child in case}
        failed = what & {"failure", "error"}
        counts["failed" if failed else "skipped" if "skipped" in what else "passed"] += 1
        for item in case.iter("property"):
            name, value = item.attrib["name"], item.attrib["value"]
            figures[name] = max(value, figures.get(name, value), key=_number)
    return counts, figures


def _number(text: str) -> float:
    try:
        return float(text.split()[0].replace(",", ""))
    except ValueError:
        return 0.0


def run(number: int, dose: str, logs: Path) -> doses.Run:
    """One promise's tests in a pytest of their own."""
    report, log = logs / f"{number}.xml", logs / f"{number}.log"
    tests = [str(doses.TESTS / held.test) for held in doses.promise_of(number).held_by]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-n",
        "0",
        "-q",
        "-m",
        "full or slow",
        "-p",
        "no:cacheprovider",
    ]
    started = time.monotonic()
    with log.open("w") as output:
        code = subprocess.run(
            [*command, "--dose", dose, f"--junitxml={report}", "-o", "junit_family=xunit1", *tests],
            cwd=doses.TESTS.parent,
            stdout=output,
            stderr=subprocess.STDOUT,
        ).returncode
    counts, figures = outcomes(report) if report.exists() else (collections.Counter(failed=1), {})
    failed = max(counts["failed"], int(code not in (0, 1)))
    return doses.Run(
        number,
        dose,
        counts["passed"],
        failed,
        counts["skipped"],
        figures,
        round(time.monotonic() - started, 1),
        datetime.date.today().isoformat(),
        machine(),
    )


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    known = [promise.number for promise in doses.TABLE]
    parser.add_argument("numbers", nargs="*", type=int, help="of promises; all of them without")
    parser.add_argument("--dose", default="full", help="full, ci, or a number that cuts each")
    parser.add_argument("--keep", action="store_true", help="write docs/faults.md")
    parser.add_argument("--save", type=Path, help="write the results there, as JSON")
    parser.add_argument("--page", action="store_true", help="only write docs/faults.md anew")
    args = parser.parse_args(argv)
    if args.page:
        doses.keep({})
        return 0
    if unknown := set(args.numbers) - set(known):
        parser.error(f"there are {known[0]} to {known[-1]}, and no {sorted(unknown)}")
    logs = Path(tempfile.mkdtemp(prefix="ept-doses-"))
    found: dict[int, doses.Run] = {}
    for number in args.numbers or known:
        say(f"{number:3} {doses.promise_of(number).fault} ... ({logs}/{number}.log)")
        found[number] = run(number, args.dose, logs)
        say(f"    {found[number].result}, {found[number].seconds:.0f} s")
        if args.keep:
            doses.keep({number: found[number]})
    if args.save:
        items = [dataclasses.asdict(item) for item in found.values()]
        args.save.write_text(json.dumps(items, indent=1) + "\n", encoding="utf-8")
    return int(any(item.failed for item in found.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
