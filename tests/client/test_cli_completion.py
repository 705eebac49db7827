"""What bash completes, by the script that the command prints."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from ep_runtime_client import cli

TIMEOUT_S = 60.0
CASES = {
    "gro": "groups",
    "dr": "drain",
    "groups --sort": "--sort-by",
    "status --qu": "--quiet",
    "groups -o wi": "wide",
    "groups --sort-by BYT": "BYTES",
    "serve --max-host-bytes-p": "--max-host-bytes-per-uid",
    "groups mo": "moe",
    "fence s-": "s-1",
    "describe gro": "group",
    "describe group mo": "moe",
    "describe sessions s-": "s-1",
}


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The script, and in front of it an `ep-runtime` that knows some names."""
    folder = tmp_path_factory.mktemp("completion")
    fake = folder / "ep-runtime"
    fake.write_text(
        '#!/bin/sh\ncase "$*" in\n'
        '  "groups -o name") echo moe; echo dense ;;\n'
        '  "sessions -o name") echo s-1 ;;\n'
        "  'serve --help') echo ' [--max-host-bytes SIZE] [--max-host-bytes-per-uid SIZE]' ;;\n"
        "  *) exit 1 ;;\nesac\n"
    )
    fake.chmod(0o755)
    return folder


def test_bash_completes_commands_options_values_and_names(
    program: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["completion", "bash"]) == 0
    lines = ["set -u", capsys.readouterr().out, f"PATH={program}:$PATH"]
    for typed in CASES:
        count = len(typed.split())
        lines.append(f"COMP_WORDS=(ep-runtime {typed}); COMP_CWORD={count}; COMPREPLY=()")
        lines.append('_ep_runtime; echo "${COMPREPLY[*]}"')
    done = subprocess.run(
        ["bash", "-c", "\n".join(lines)], capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert (done.returncode, done.stderr) == (0, "")
    found = done.stdout.splitlines()
    assert dict(zip(CASES, found, strict=True)) == CASES


def test_zsh_reads_the_script_of_bash(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["completion", "zsh"]) == 0
    assert capsys.readouterr().out.startswith("autoload -U +X compinit bashcompinit")
    assert cli.main(["completion", "tcsh"]) == cli.USAGE
