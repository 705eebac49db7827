"""The command without a daemon: usage, exit codes, what is imported."""

from __future__ import annotations

import json
import os
import tempfile
import tomllib
from pathlib import Path

import checkout
import fixed_daemon
import pytest
from child_programs import run_python
from daemon_fixtures import start_daemon

import ep_runtime as ep
from ep_runtime import env, errors
from ep_runtime_client import cli
from ep_runtime_client.base import jax_state
from ep_runtime_client.cli.commands import doctor
from ep_runtime_client.cli.daemon import source
from ep_runtime_client.cli.machine import gpus
from ep_runtime_client.daemons.addresses import SocketDirectory


def test_help_lists_every_command_and_the_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    for name in cli.COMMANDS:
        assert f"\n  {name} " in text
    assert "4 denied" in text


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["sttaus"],
        ["status", "--nonsense"],
        ["handles", "-o", "yaml"],
        ["handles", "--watch", "0"],
        ["fence"],
        ["reclaim"],
        ["reclaim", "g", "--all-retained"],
        ["status", "--address", "embedded"],
        ["status", "--address", "unix:///" + "d" * 100],
    ],
)
def test_wrong_usage_is_exit_code_1(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err != ""


@pytest.mark.parametrize(
    "name", ["status", "sessions", "groups", "layers", "handles", "buffers", "events", "drain"]
)
def test_no_daemon_is_exit_code_2(
    name: str, directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([name, "--address", f"unix://{directory}"]) == 2
    assert f"no daemon answers at unix://{directory}" in capsys.readouterr().err


def test_the_address_may_come_from_the_environment(
    directory: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EP_RUNTIME_ADDRESS", f"unix://{directory}")
    assert cli.main(["status"]) == 2
    assert str(directory) in capsys.readouterr().err


def test_without_a_default_daemon_the_only_private_one_is_read(
    directory: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RUNTIME_DIRECTORY", str(directory / "no daemon"))
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    with ep.connect("embedded") as session:
        assert cli.main(["sessions"]) == 0
        captured = capsys.readouterr()
        assert session.job in captured.out
        assert f"only private daemon, {session.address}" in captured.err
        assert cli.main(["status", "--live"]) == 2
        assert cli.main(["drain", "--yes"]) == 2
        capsys.readouterr()
        second = start_daemon(env.private_directory())
        assert cli.main(["sessions"]) == 2
        text = " ".join(capsys.readouterr().err.split())
        assert "2 private daemons of yours do" in text
        assert session.address in text
        assert f"unix://{second.directory}" in text
        second.stop()
    assert cli.main(["sessions"]) == 2
    assert "you have no private daemon" in capsys.readouterr().err


def test_the_address_of_a_private_daemon_names_the_user_where_others_may_write(
    directory: Path,
) -> None:
    place = SocketDirectory(directory / "d", os.geteuid())
    assert place.address == f"unix://{directory}/d"
    directory.chmod(0o777)
    assert place.address == f"unix://{directory}/d?uid={os.geteuid()}"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.InvalidArgumentError("x"), 1),
        (errors.RuntimeUnavailableError("x"), 2),
        (errors.EpRuntimeError("x"), 3),
        (errors.PoolExhaustedError("x"), 3),
        (errors.PermissionDeniedError("x"), 4),
    ],
)
def test_every_error_has_an_exit_code(error: errors.EpRuntimeError, code: int) -> None:
    assert cli.exit_code(error) == code


def test_version_works_without_a_daemon(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["version", "--client", "-o", "json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["kind"] == "version"
    assert document["server_version"] is None


@pytest.mark.parametrize(
    ("address", "state"),
    [(None, "WARN"), ("embedded", "OK"), ("none", "OK"), ("node", "OK"), ("unix:///", "FAIL")],
)
def test_doctor_fails_without_a_daemon_where_jobs_would(
    address: str | None,
    state: str,
    directory: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RUNTIME_DIRECTORY", str(directory))
    if address is not None:
        monkeypatch.setenv("EP_RUNTIME_ADDRESS", address.replace("unix:///", f"unix://{directory}"))
    code = cli.main(["doctor", "-o", "json"])
    document = json.loads(capsys.readouterr().out)
    (daemon,) = (item for item in document["items"] if item["check"] == "daemon")
    assert daemon["state"] == state, daemon
    assert (code, document["healthy"]) == ((3, False) if state == "FAIL" else (0, True))


@pytest.mark.parametrize(("version", "state"), [((0, 11), "WARN"), ((0, 12), "OK")])
def test_doctor_names_the_releases_whose_sums_between_processes_may_be_wrong(
    version: tuple[int, ...],
    state: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(jax_state, "jaxlib_version", lambda: version)
    cli.main(["doctor", "-o", "json"])
    items = json.loads(capsys.readouterr().out)["items"]
    (packages,) = (item for item in items if item["check"] == "packages")
    assert packages["state"] == state
    assert ("psum_scatter" in packages["advice"]) == (state == "WARN")


def test_doctor_names_the_pairs_of_python_and_jax_that_pip_installs() -> None:
    project = tomllib.loads((checkout.ROOT / "pyproject.toml").read_text())["project"]
    pythons = [f"Programming Language :: Python :: {a}.{b}" for a, b in doctor.JAX_OF]
    assert [line for line in project["classifiers"] if "Python :: 3." in line] == pythons
    (jax,) = (text for text in project["dependencies"] if text.startswith("jax>"))
    versions = sorted({version for each in doctor.JAX_OF.values() for version in each})
    assert jax.startswith(f"jax>={versions[0][0]}.{versions[0][1]}.")
    assert jax.endswith(f",<{versions[-1][0]}.{versions[-1][1] + 1}")


@pytest.mark.parametrize(("version", "state"), [((0, 9), "WARN"), ((0, 10), "OK")])
def test_doctor_names_a_pair_of_python_and_jax_that_is_not_supported(
    version: tuple[int, ...], state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jax_state, "jaxlib_version", lambda: version)
    said = doctor._python()
    assert said.state == state
    assert ("Python 3.12 with JAX 0.10, 0.11, 0.12" in said.advice) == (state == "WARN")


def test_doctor_has_a_remedy_for_each_finding(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "open_source", fixed_daemon.open_source)
    monkeypatch.setattr(gpus, "usable", lambda: 8)
    cli.main(["doctor", "-o", "json"])
    items = json.loads(capsys.readouterr().out)["items"]
    assert all(item["advice"] for item in items if item["state"] != "OK"), items
    silent = [item for item in items if item["check"] == "processes"]
    assert silent
    assert all("ep-runtime fence" in item["advice"] for item in silent)


@pytest.mark.parametrize("address", ["embedded", "none"])
def test_an_environment_without_a_daemon_to_ask_is_no_wrong_usage(
    address: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EP_RUNTIME_ADDRESS", address)
    assert cli.main(["version"]) == 0
    assert ep.__version__ in capsys.readouterr().out
    assert cli.main(["status"]) == 2
    assert f"EP_RUNTIME_ADDRESS='{address}' names no daemon" in capsys.readouterr().err


def test_no_command_imports_jax_and_help_needs_no_grpc() -> None:
    program = (
        "import sys\n"
        "from ep_runtime_client import cli\n"
        "cli.main(['--help'])\n"
        "for name in set(cli.COMMANDS) - {'serve', 'demo', 'bench'}: cli.make_parser(name)\n"
        "assert not {'grpc', 'google.protobuf'} & set(sys.modules)\n"
        "for name in ('demo', 'bench'): assert cli.main([name, '--help']) == 0\n"
        "for name in cli.COMMANDS: cli.module(name)\n"
        "found = {'jax', 'jaxlib', 'optax'} & set(sys.modules)\n"
        "sys.exit(f'loaded {found}' if found else 0)\n"
    )
    run_python("-c", program)


def test_version_of_a_daemon_that_is_not_there_ends_with_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["version", "--address", f"unix://{tmp_path}"]) == 2
    said = capsys.readouterr()
    assert ep.__version__ in said.out
    assert "no daemon answers" in said.err
