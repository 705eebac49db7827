"""Builds and runs the native tests under the sanitizers with one command:

    python tests/csrc/sanitize/run.py [thread] [address,undefined]

Each builds the CPU library once more, in build/sanitize-<name>. Both run `calls.cc`: calls of one
process from many threads. Under `address,undefined` those of two processes too, and tests of
tests/csrc and tests/core in a Python that has the sanitizer's runtime. Under `thread` neither:
ThreadSanitizer sees what one process does. That another one, or XLA, which is not watched, orders
two accesses it does not see, and it would report each of them. Nothing is suppressed. Exit code 0
where everything passed and nothing was found.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
for _folder in ("tests", "client", "server", "."):
    sys.path.insert(0, str(ROOT / _folder))

from native_memory import make_memory, make_spec  # noqa: E402

from ep_runtime import native, specs  # noqa: E402

SANITIZERS = ("thread", "address,undefined")
BUILD_S, CALLS_S, TESTS_S = 1800, 600, 1800
RANKS, ROUNDS = 4, 200

REPORT = re.compile(r"(WARNING: ThreadSanitizer|ERROR: \w+Sanitizer|runtime error): .*")
OPTIONS = {
    "TSAN_OPTIONS": "second_deadlock_stack=1",
    # No leak check: CPython and XLA free nothing until the end. `calls` looks for leaks.
    "ASAN_OPTIONS": "detect_leaks=0 detect_stack_use_after_return=1",
    "UBSAN_OPTIONS": "print_stacktrace=1",
}
# Tests in one process with the library: other processes would start without it. Failing calls are
# left to `calls.cc`, because jaxlib throws in its own C++ runtime, which `__cxa_throw` of the
# sanitizer does not know.
TESTS = ["tests/csrc/test_native_movement.py", "tests/csrc/test_board_records.py"]
TESTS += ["tests/core/test_native.py", "tests/core/test_board.py"]


def build(sanitizer: str) -> Path:
    """Builds the library and `calls`; returns their folder."""
    folder = ROOT / f"build/sanitize-{sanitizer.partition(',')[0]}"
    configure = ["cmake", "-S", ROOT / "csrc", "-B", folder, f"-DEP_RUNTIME_SANITIZE={sanitizer}"]
    configure += ["-DEP_RUNTIME_CUDA=OFF", f"-DPython_EXECUTABLE={sys.executable}"]
    for command in (configure, ["cmake", "--build", folder, "-j2"]):
        subprocess.run(command, check=True, timeout=BUILD_S, stdout=subprocess.DEVNULL)
    return folder


def spec_of(name: str) -> specs.GroupSpec:
    return make_spec(
        {"ep": RANKS},
        name=name,
        num_experts=8,
        hidden_size=16,
        max_tokens_per_rank=24,
        max_top_k=2,
        alignment=4,
        max_token_dtype="float32",
        op_timeout_s=120.0,
    )


@contextlib.contextmanager
def memory_of(spec: specs.GroupSpec) -> Iterator[tuple[int, list[int]]]:
    board, windows = make_memory(spec, generation=1)
    try:
        yield board, windows
    finally:
        for fd in (board, *windows):
            os.close(fd)


def calls(program: Path, processes: int, rounds: int, preload: dict[str, str]) -> list[str]:
    """Returns errors after `rounds` rounds of every layer and rank."""
    spec = spec_of(f"calls{processes}")
    share = RANKS // processes
    with contextlib.ExitStack() as stack:
        board, windows = stack.enter_context(memory_of(spec))
        # Files, not pipes: a process that waits for a reader of its report would stop the others.
        logs = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(processes)]
        words = {
            "name": spec.name,
            "generation": 1,
            "settings": native._settings(spec),
            "board_fd": board,
            "window_fds": " ".join(map(str, windows)),
            "rounds": rounds,
        }
        for field in ("world_size", "ep_size", "num_experts", "hidden_size", "lanes"):
            words[field] = getattr(spec, field)
        for field in ("max_tokens_per_rank", "recv_capacity_per_rank", "max_top_k"):
            words[field] = getattr(spec, field)
        running = []
        for index in range(processes):
            ranks = range(index * share, (index + 1) * share)
            own = words | {"local_ranks": " ".join(map(str, ranks))}
            command = [str(program), *(str(word) for pair in own.items() for word in pair)]
            running.append(
                subprocess.Popen(
                    command,
                    pass_fds=[board, *windows],
                    env={**os.environ, **preload},
                    stdout=logs[index],
                    stderr=subprocess.STDOUT,
                )
            )
        return [
            fault
            for process, log in zip(running, logs, strict=True)
            for fault in faults_of(process, log)
        ]


def faults_of(process: subprocess.Popen[bytes], log: IO[bytes]) -> list[str]:
    try:
        process.wait(CALLS_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    log.seek(0)
    output = log.read().decode(errors="replace")
    if process.returncode == 0 and output == "done\n":
        return []
    return [f"exit code {process.returncode}\n{output}"]


def tests(folder: Path) -> list[str]:
    """Runs the tests of TESTS in a Python with the runtime; the sanitizers do not
    watch XLA's code.
    """
    preloaded = [_file_of_compiler(name) for name in ("libasan.so", "libstdc++.so")]
    library = folder / "cpu/libep_runtime_cpu.so"
    roots = [ROOT, ROOT / "server", ROOT / "client", ROOT / "tests", HERE]
    environment = {
        **os.environ,
        **OPTIONS,
        "JAX_PLATFORMS": "cpu",
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",  # it throws too
        "LD_PRELOAD": " ".join(preloaded),
        "SANITIZED_LIBRARY": str(library),
        "PYTHONPATH": os.pathsep.join(map(str, roots)),
    }
    plain = [
        "-q",
        "-n",
        "0",
        "-p",
        "sanitized_library",
        "-p",
        "no:cacheprovider",
        "-o",
        "timeout=600",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *plain, *TESTS],
        cwd=ROOT,
        env=environment,
        timeout=TESTS_S,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    sys.stdout.write("".join(done.stdout.splitlines(keepends=True)[-3:]))
    reports = [match.group(0) for match in REPORT.finditer(done.stdout)]
    return reports or ([] if done.returncode == 0 else [done.stdout[-8000:]])


def _file_of_compiler(name: str) -> str:
    command = [os.environ.get("CXX", "c++"), f"-print-file-name={name}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def under(sanitizer: str, rounds: int) -> list[str]:
    started = time.monotonic()
    folder = build(sanitizer)
    program = folder / "sanitize/ep_runtime_calls"
    options = {**OPTIONS, "ASAN_OPTIONS": "detect_leaks=1 detect_stack_use_after_return=1"}
    found = []
    for processes in (1,) if sanitizer == "thread" else (1, 2):
        faults = calls(program, processes, rounds, options)
        say(f"{sanitizer}: {rounds} rounds of {RANKS} ranks in {processes} processes", faults)
        found += faults
    if sanitizer != "thread":
        faults = tests(folder)
        say(f"{sanitizer}: {', '.join(TESTS)}", faults)
        found += faults
    sys.stdout.write(f"{sanitizer}: {time.monotonic() - started:.0f} s with the build\n")
    return found


def say(what: str, faults: Sequence[str]) -> None:
    sys.stdout.write(f"{what}: {len(faults) or 'no'} findings\n" + "\n".join(faults))
    sys.stdout.flush()


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("sanitizers", nargs="*", default=SANITIZERS)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    given = parser.parse_args(argv)
    found = [fault for name in given.sanitizers for fault in under(name, given.rounds)]
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
