"""Makes the faults of mutants.toml one by one in a copy of the tree, and lists those tests miss.

    python tests/tools/mutants.py [NAME ...] [--jobs N] [-m MARKS]

NAME is of the list, or a pattern such as `capacity-*`; without one all are made. Before that each
set of tests runs on the copy as it is. Exit code 0 where every fault is found but those that are
judged to change nothing. For a fault in csrc the CPU library is built, in the copy. MARKS measures
a tier of the tests: quick says what the README's command finds.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import fnmatch
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from ep_runtime import native  # noqa: E402

LIST = Path(__file__).with_suffix(".toml")
BUILD_S, TESTS_S = 1800, 600
FOUND, MISSED, UNKNOWN = "found", "MISSED", "UNKNOWN"
PASSED, FAILED = (0, 5), (1, 2)  # pytest's codes; 5: no test is left, 2: a module is not imported
FAILURE = re.compile(r"^(?:FAILED|ERROR) (tests/.+?)(?: - |$)", re.MULTILINE)
_COPIED = ("ep_runtime", "server", "client", "csrc", "proto", "docs", "tests")
_COPIED += ("README.md", "pyproject.toml")
# An editable install finds our packages by its own list before any path, in this process and in
# processes of tests.
_SITE = """
import sys
sys.meta_path[:] = [f for f in sys.meta_path if "ScikitBuild" not in type(f).__name__]
"""
_PYTEST = """
import ep_runtime, ep_runtime_client, ep_runtime_server, pytest, sys
for package in (ep_runtime, ep_runtime_client, ep_runtime_server):
    assert package.__file__.startswith(sys.argv[1]), package.__file__
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "-p", "no:xdist", *sys.argv[2:]]))
"""


def copy_to(root: Path) -> None:
    """Copies the tree, with a link to the native libraries that are loaded here."""
    for name in _COPIED:
        source, skipped = ROOT / name, shutil.ignore_patterns("__pycache__", "_native")
        if source.is_dir():
            shutil.copytree(source, root / name, ignore=skipped)
        else:
            shutil.copy(source, root / name)
    (root / "ep_runtime/_native").symlink_to(native.LIBRARY_PATH.parent)
    (root / "sitecustomize.py").write_text(_SITE)


def pytest_command(root: Path, *words: str) -> list[str]:
    """Runs pytest in the copy at `root`, and asserts that it imports that copy."""
    return [sys.executable, "-P", "-c", _PYTEST, f"{root}{os.sep}", *words]


def environment_of(root: Path) -> dict[str, str]:
    places = [str(root / folder) for folder in (".", "server", "client", "tests")]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return {**kept, "PYTHONPATH": os.pathsep.join(places)}


@dataclasses.dataclass(frozen=True)
class Mutant:
    """`old` occurs once in `file`; `tests` are the nearest ones, as pytest's arguments."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...] = ()
    equivalent: str = ""  # why no test can, or should, find it

    @property
    def native(self) -> bool:
        return self.file.startswith("csrc/")

    def fault(self) -> str:
        """Returns the fault in the entry itself; "" if there is none."""
        path = ROOT / self.file
        count = path.read_text(encoding="utf-8").count(self.old) if path.is_file() else 0
        if count != 1:
            return f"{self.name}: {self.old!r} stands {count} times in {self.file}"
        both = bool(self.tests) == bool(self.equivalent)
        return f"{self.name}: give tests, or why it is equivalent" if both else ""


def listed() -> list[Mutant]:
    entries = tomllib.loads(LIST.read_text(encoding="utf-8")).items()
    return [Mutant(name, **{**of, "tests": tuple(of.get("tests", ()))}) for name, of in entries]


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


async def run(command: Sequence[Any], within_s: float, **how: Any) -> tuple[int | None, str]:
    """Returns (exit code, output); None if it took longer. Ends all processes that it started."""
    # A file, because a process that a test leaves behind would keep a pipe open.
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        how |= {"stdout": output, "stderr": output, "start_new_session": True}
        process = await asyncio.create_subprocess_exec(*command, **how)
        try:
            code = await asyncio.wait_for(process.wait(), within_s)
        except TimeoutError:
            code = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        output.seek(0)
        return code, output.read()


class Tree:
    """A copy of the tree, in which one mutant at a time is made."""

    def __init__(self, root: Path, words: Sequence[str], plain_s: dict[Any, float]) -> None:
        """`words` are for pytest; `plain_s` is how long the tests take on an unchanged tree."""
        self._root, self._words, self._plain_s = root, words, plain_s
        self._newest = 0
        copy_to(root)

    async def judge(self, mutant: Mutant) -> tuple[str, str]:
        """Returns FOUND and the test, MISSED, or UNKNOWN and the reason."""
        path, key = self._root / mutant.file, (mutant.native, mutant.tests)
        if mutant.native and not await self._build():
            return UNKNOWN, "the library does not build as it is"
        if key not in self._plain_s:
            started = time.monotonic()
            code, output = await self._test(mutant, TESTS_S)
            if code not in PASSED:
                return UNKNOWN, f"its tests fail as it is, exit code {code}:\n{output[-4000:]}"
            self._plain_s[key] = time.monotonic() - started
        plain = path.read_text(encoding="utf-8")
        self._write(path, plain.replace(mutant.old, mutant.new))
        built = not mutant.native or await self._build()
        if built:
            code, output = await self._test(mutant, 60 + 5 * self._plain_s[key])
        self._write(path, plain)
        if mutant.native:
            await self._build()
        if not built:
            return UNKNOWN, "it does not compile"
        if code in PASSED:
            return MISSED, ""
        if code in FAILED and (failure := FAILURE.search(output)):
            return FOUND, failure[1]
        if code is None or code < 0:
            return FOUND, "the time limit" if code is None else f"signal {-code}"
        return UNKNOWN, f"pytest ended with {code}:\n{output[-4000:]}"

    def _write(self, path: Path, text: str) -> None:
        """Writes a file newer than every earlier one, because Python and make compare ages."""
        path.write_text(text, encoding="utf-8")
        self._newest = max(self._newest, int(time.time())) + 1
        os.utime(path, (self._newest, self._newest))

    async def _test(self, mutant: Mutant, within_s: float) -> tuple[int | None, str]:
        command = pytest_command(self._root, "-x", *self._words, *mutant.tests)
        environment = environment_of(self._root)
        return await run(command, within_s, cwd=self._root, env=environment)

    async def _build(self) -> bool:
        folder, library = self._root / "build", self._root / "ep_runtime/_native"
        steps = [["cmake", "--build", folder, "-j2"]]
        if library.is_symlink():
            options = ["-DEP_RUNTIME_CUDA=OFF", f"-DPython_EXECUTABLE={sys.executable}"]
            steps.insert(0, ["cmake", "-S", self._root / "csrc", "-B", folder, *options])
            library.unlink()
            library.mkdir()
        for step in steps:
            code, output = await run(step, BUILD_S)
            if code != 0:
                say(output[-4000:])
                return False
        shutil.copy(folder / "cpu/libep_runtime_cpu.so", library)
        return True


async def judge(
    mutants: Sequence[Mutant], jobs: int, words: Sequence[str]
) -> dict[str, tuple[str, str, float]]:
    """Runs mutants on a tree per job, those of csrc on one; returns (outcome, by,
    seconds) by name.
    """
    found: dict[str, tuple[str, str, float]] = {}
    plain_s: dict[Any, float] = {}
    parts = [[mutant for mutant in mutants if mutant.native]]
    parts += [[mutant] for mutant in mutants if not mutant.native]

    async def work(root: Path) -> None:
        tree = Tree(root, words, plain_s)
        while parts:
            for mutant in parts.pop(0):
                started = time.monotonic()
                outcome, by = await tree.judge(mutant)
                found[mutant.name] = outcome, by, time.monotonic() - started
                say(f"{len(found)}/{len(mutants)} {mutant.name}: {outcome} {by}")

    with tempfile.TemporaryDirectory(prefix="ep-mutants-") as scratch:
        async with asyncio.TaskGroup() as group:
            for _ in range(jobs):
                group.create_task(work(Path(tempfile.mkdtemp(dir=scratch))))
    return found


def main(argv: Sequence[str]) -> int:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("names", nargs="*", default=["*"], metavar="NAME", help="or a pattern")
    parser.add_argument("--jobs", type=int, default=1, help="so many at a time, each on a copy")
    parser.add_argument("-m", dest="marks", default="full", help="which tests, as pytest takes it")
    given, mutants = parser.parse_args(argv), listed()
    if faults := [fault for mutant in mutants if (fault := mutant.fault())]:
        parser.exit(1, "\n".join([*faults, ""]))
    for text in given.names:
        if not fnmatch.filter([mutant.name for mutant in mutants], text):
            parser.error(f"{LIST.name} has no {text}")
    chosen = [m for m in mutants if any(fnmatch.fnmatch(m.name, text) for text in given.names)]
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    judged = [mutant for mutant in chosen if mutant.tests]
    found = asyncio.run(judge(judged, given.jobs, ["-m", given.marks]))
    say(f"\n{'mutant':24} {'outcome':8} {'s':>4}  by")
    for mutant in chosen:
        outcome, by, seconds = found.get(mutant.name, ("same", mutant.equivalent, 0))
        say(f"{mutant.name:24} {outcome:8} {seconds:4.0f}  {by.splitlines()[0] if by else ''}")
    unknown, missed = (
        [name for name, (outcome, *_) in found.items() if outcome == what]
        for what in (UNKNOWN, MISSED)
    )
    if unknown:
        say(f"nothing is known of {len(unknown)}: {' '.join(unknown)}")
    if missed:
        say(f"survived: {' '.join(missed)}")
    say(f"{len(missed)} survivors among {len(found)} judged not equivalent")
    return int(bool(unknown or missed))


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
