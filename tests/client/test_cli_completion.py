"""Tests the completion scripts in real shells, by typing into them."""

from __future__ import annotations

import os
import pty
import re
import select
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from child_programs import run_to_end

from ep_runtime_client import cli

TIMEOUT_S = 60.0
CASES = {
    "gro": "groups",
    "dr": "drain",
    "groups --sort": "--sort-by",
    "status --rea": "--ready",
    "groups -o wi": "wide",
    "groups --sort-by BYT": "BYTES",
    "load --sin": "--since",
    "serve --max-host-bytes-p": "--max-host-bytes-per-uid",
    "groups mo": "moe",
    "top mo": "moe",
    "fence s-": "s-1",
    "describe gro": "group",
    "describe group mo": "moe",
    "describe sessions s-": "s-1",
}
# Names of a daemon that refused none. All but the last make the file `run` in a shell that does not
# quote them.
HOSTILE = (
    "$(echo>run)",
    "`echo>run`",
    "'$(echo>run)'",
    '"$(echo>run)"',
    "<(echo>run)",
    ";echo>run;",
    "'x';echo>run;'",
    "{x,$(echo>run)}",
    "${x[$(echo>run)]}",
    "(echo>run)",
    "\\$(echo>run)",
    "\\'$(echo>run)'",
    "*(e:echo>run:)",
    "~ * !1",
)
STARTS = {f"h{number}x": f"h{number}x{text}" for number, text in enumerate(HOSTILE)}
NAMES = ("moe", "dense", *HOSTILE, *STARTS.values())
# How each shell starts without a user's settings, and a key that prints the line and clears it.
SHELLS = {
    "bash": (
        ["bash", "--norc", "--noprofile", "-i"],
        """bind -x '"\\C-t": echo "<<$READLINE_LINE>>"; READLINE_LINE='""",
    ),
    "zsh": (
        ["zsh", "-f", "-i"],
        """tell() { print -r -- "<<$BUFFER>>"; BUFFER=; }; zle -N tell; bindkey '^T' tell""",
    ),
}


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a fake `ep-runtime` that knows some names."""
    folder = tmp_path_factory.mktemp("completion")
    (folder / "names").write_text("".join(f"{name}\n" for name in NAMES))
    fake = folder / "ep-runtime"
    fake.write_text(
        '#!/bin/sh\ncase "$*" in\n'
        f'  "groups -o name") cat {shlex.quote(str(folder / "names"))} ;;\n'
        '  "sessions -o name") echo s-1 ;;\n'
        "  'serve --help') echo ' [--max-host-bytes SIZE] [--max-host-bytes-per-uid SIZE]' ;;\n"
        "  *) exit 1 ;;\nesac\n"
    )
    fake.chmod(0o755)
    return folder


def printed(shell: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """Writes the script for that shell to a file."""
    assert cli.main(["completion", shell]) == 0
    script = folder / f"script.{shell}"
    script.write_text(capsys.readouterr().out)
    return script


def environment(folder: Path) -> dict[str, str]:
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    # An empty home: no user's settings, and a place for zsh's completion cache.
    return {**os.environ, "PATH": path, "HOME": str(folder), "TERM": "xterm", "PS1": "$ "}


class Shell:
    """A shell that runs in a terminal."""

    def __init__(self, name: str, folder: Path) -> None:
        words, self._tell = SHELLS[name]
        self._fd, theirs = pty.openpty()
        self._popen = subprocess.Popen(
            words,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=environment(folder),
            cwd=folder,
            start_new_session=True,
        )
        os.close(theirs)
        self._said = ""

    def read(self, script: Path) -> None:
        self._type(f". {script}\n{self._tell}\necho rea''dy\n")
        self._until("ready\r")

    def complete(self, typed: str) -> str:
        """Returns the line after a tab."""
        self._type(f"{typed}\t\x14")
        return self._until("<<(.*)>>")

    def _type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def _until(self, wanted: str) -> str:
        deadline_s = time.monotonic() + TIMEOUT_S
        while not (found := re.search(wanted, self._said)):
            left_s = deadline_s - time.monotonic()
            assert left_s > 0, f"no {wanted} in {self._said!r}"
            if select.select([self._fd], [], [], left_s)[0]:
                self._said += os.read(self._fd, 65536).decode(errors="replace")
        self._said = self._said[found.end() :]
        return found[found.re.groups]

    def close(self) -> None:
        self._popen.kill()
        self._popen.wait(TIMEOUT_S)
        os.close(self._fd)


@pytest.fixture(params=SHELLS)
def shell(
    request: pytest.FixtureRequest, program: Path, capsys: pytest.CaptureFixture[str]
) -> Iterator[Shell]:
    if shutil.which(request.param) is None:
        pytest.skip(f"{request.param} is not installed")
    running = Shell(request.param, program)
    try:
        running.read(printed(request.param, program, capsys))
        yield running
    finally:
        running.close()


def test_a_shell_completes_commands_options_values_and_names(shell: Shell) -> None:
    for typed, last in CASES.items():
        *before, _ = typed.split()
        wanted = " ".join(["ep-runtime", *before, last])
        assert shell.complete(f"ep-runtime {typed}").rstrip() == wanted


@pytest.mark.parametrize("typed", ["describe group", "reclaim", "top", "events"])
def test_names_of_others_are_completed_and_run_nothing(
    shell: Shell, program: Path, typed: str
) -> None:
    shell.complete(f"ep-runtime {typed} ")  # every name may follow
    for start, name in STARTS.items():
        line = shell.complete(f"ep-runtime {typed} {start}")
        assert shlex.split(line) == ["ep-runtime", *typed.split(), name]
        assert not (program / "run").exists(), name


def offered_by_fish(
    folder: Path, capsys: pytest.CaptureFixture[str], typed: Iterable[str]
) -> list[list[str]]:
    """Returns the completions that fish offers for each line."""
    if shutil.which("fish") is None:
        pytest.skip("fish is not installed")
    lines = [f"source {printed('fish', folder, capsys)}"]
    lines += [f"complete -C 'ep-runtime {one}'; echo" for one in typed]
    words = ("fish", "--no-config", "-c", "\n".join(lines))
    done = run_to_end(*words, env=environment(folder), cwd=folder)
    assert done.stderr == ""
    *answers, _ = done.stdout.split("\n\n")
    return [[line.partition("\t")[0] for line in answer.splitlines()] for answer in answers]


def test_fish_completes_them_too(program: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = [words[0].strip() for words in offered_by_fish(program, capsys, CASES)]
    assert dict(zip(CASES, found, strict=True)) == CASES


def test_fish_offers_names_of_others_as_they_are(
    program: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = ("describe group ", "reclaim ", "top ", "events ")
    for found in offered_by_fish(program, capsys, typed):
        assert sorted(found) == sorted(NAMES)
    assert not (program / "run").exists()


def test_the_bash_script_bears_strict_shells(
    program: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`set -u`, and a word that nothing completes."""
    lines = ["set -u", f". {printed('bash', program, capsys)}", f"PATH={program}:$PATH"]
    lines += [
        "COMP_WORDS=(ep-runtime nothing x); COMP_CWORD=2",
        "_ep_runtime; echo ${#COMPREPLY[@]}",
    ]
    done = run_to_end("bash", "-c", "\n".join(lines))
    assert (done.stdout, done.stderr) == ("0\n", "")


def test_other_shells_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["completion", "tcsh"]) == cli.USAGE
