"""How long every command takes to its first output, and processor time of all of it.

    .venv/bin/python tests/bench/first_output.py [RUNS]

Beside a daemon without groups; the least of RUNS, because others may keep the cores.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / part) for part in (".", "server", "client", "tests")]

import daemon_fixtures  # noqa: E402

from ep_runtime_client import cli  # noqa: E402

NAMED = {"describe": ["node", "x"], "fence": ["x"], "reclaim": ["x"]}
MORE = {"top": ["--samples", "1", "--interval", "0.001"], "skew": ["--interval", "0.001"]}
ONLY_HELP = ("serve", "demo", "bench", "certs")  # they do their work for minutes, or write files


def words_of(name: str, address: str, folder: Path) -> list[str]:
    if name in ONLY_HELP:
        return [name, "--help"]
    if name == "completion":
        return [name, "bash"]
    dump = [str(folder / "dump.tar.gz")] if name == "dump" else []
    return [name, *NAMED.get(name, []), *MORE.get(name, []), *dump, "--address", address]


def measure(words: list[str]) -> tuple[float, float]:
    """(seconds to the first byte, processor seconds)."""
    command = [sys.executable, "-P", "-m", "ep_runtime_client.cli", *words]
    before, started_s = os.times(), time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as popen:
        assert popen.stdout is not None
        popen.stdout.read(1)
        first_s = time.monotonic() - started_s
        popen.stdout.read()
    after = os.times()
    used_s = after.children_user - before.children_user
    return first_s, used_s + after.children_system - before.children_system


def main(runs: int) -> None:
    os.environ["PYTHONPATH"] = daemon_fixtures.package_path()
    # As of an installed package, whose modules are compiled.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    with tempfile.TemporaryDirectory(prefix="ept-") as made:
        folder = Path(made)
        os.environ["PYTHONPYCACHEPREFIX"] = str(folder / "compiled")
        directory = folder / "d"
        directory.mkdir(mode=0o700)
        child = daemon_fixtures.start_daemon(directory)
        sys.stdout.write("| command | first output, s | processor, s |\n|---|---|---|\n")
        for name in ["--help", *cli.COMMANDS]:
            words = [name] if name == "--help" else words_of(name, f"unix://{directory}", folder)
            measure(words)
            found = [measure(words) for _ in range(runs)]
            first_s, used_s = (min(times) for times in zip(*found, strict=True))
            shown = f"{name} --help" if name in ONLY_HELP else name
            sys.stdout.write(f"| {shown} | {first_s:.2f} | {used_s:.2f} |\n")
            sys.stdout.flush()
        child.stop()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
