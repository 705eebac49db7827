"""Every command quotes odd names that a daemon registered before it refused such names."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import fixed_daemon as fixed
import pytest

from ep_runtime_client import cli
from ep_runtime_client.cli.commands import load
from ep_runtime_client.cli.daemon import source

GROUP, JOB, LAYER = "$(group)", "$(job) `x`", '"$(layer)'
LATE = "ranks 0, 1, 2 wait for rank 3"
COMMANDS = (
    *("status", "sessions --all -o wide", "groups -o wide", "layers -o wide", "handles -o wide"),
    *("buffers -o wide", "events -o wide", "top --samples 1 --interval 0.01 -o wide"),
    *("load --interval 0.01 --samples 2", "skew --interval 0.01", "load --layer lacking"),
    *("describe session s-0123456789ab", "describe group '$(group)'", "describe group lacking"),
    *("describe layer '\"$(layer)'", "events lacking", "sessions -l lacking=x"),
    *("fence s-0123456789ab --yes", "reclaim '$(group)' --yes", "reclaim '$(group)'"),
)


@pytest.fixture(autouse=True)
def _a_daemon_of_old_names(monkeypatch: pytest.MonkeyPatch) -> None:
    for key, name in {"GROUP": GROUP, "JOB": JOB, "LAYER": LAYER, "LATE_TEXT": LATE}.items():
        monkeypatch.setattr(fixed, key, name)
    monkeypatch.setattr(source, "open_source", fixed.open_source)


@pytest.mark.parametrize("words", COMMANDS)
def test_people_see_them_quoted(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(shlex.split(words))
    said = "".join(capsys.readouterr())
    assert "$(" in said or words.startswith(("status", "sessions -l"))
    assert not re.search(r"[$`]", re.sub(r"(?<!\w)'[^']*'", "", said)), said


@pytest.mark.parametrize("tty", [False, True])
def test_programs_get_the_name_and_a_terminal_what_may_be_pasted(
    tty: bool, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: tty)
    assert cli.main(["groups", "-o", "name"]) == cli.OK
    assert capsys.readouterr().out == (f"'{GROUP}'\n" if tty else f"{GROUP}\n")
    assert cli.main(["groups", "-o", "json"]) == cli.OK
    assert {row["name"] for row in json.loads(capsys.readouterr().out)["items"]} == {GROUP}


def test_a_picture_draws_them_as_they_are(tmp_path: Path) -> None:
    """matplotlib would read text between two dollars as a formula."""
    pytest.importorskip("matplotlib")
    name = r"$\frac{$(layer)"
    load.write_picture(f"{tmp_path}/x.svg", name, [{"layer": name, "experts": [1, 2]}])
    assert (tmp_path / "x.svg").stat().st_size > 0
