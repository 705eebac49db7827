"""`serve --config`: what a file may say, what it means beside flags, and what SIGHUP changes."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from harness import eventually

from ep_runtime import errors
from ep_runtime_server import config_file, main


def parsed(path: Path, *words: str):
    return main._parse(["--config", str(path), *words])[1]


def test_flags_win_over_the_file_and_lists_add(tmp_path):
    path = tmp_path / "serve.toml"
    path.write_text(
        'allow-gid = [7]\nmax-host-bytes = "64M"\ndrain-s = 5\n'
        "metrics = 9470\nmetrics-detail = true\n"
    )
    found = parsed(path, "--drain-s", "1.5", "--allow-gid", "8")
    assert (found.allow_gid, found.drain_s, found.max_host_bytes) == ([7, 8], 1.5, "64M")
    assert (found.metrics, found.metrics_detail) == ("9470", True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max-host-byte = 1", "no use for 'max-host-byte'; did you mean 'max-host-bytes'"),
        ("ready-fd = 3", "no use for 'ready-fd'"),
        ("config = 'x'", "no use for 'config'"),
        ("allow-uid = 7", "allow-uid in .*: must be a list, got 7"),
        ("allow-uid = ['root']", "allow-uid in .*'root'"),
        ("drain-s = 'soon'", "drain-s in .*'soon'"),
        ("metrics-detail = 1", "metrics-detail in .*: must be true or false, got 1"),
        ("log-level = 'loud'", "log-level in .*: must be one of debug, info"),
        ("max-layers-per-uid = 0", "max-layers-per-uid in .*: must be a number from 1 on"),
        ("dir = true", "dir in .*: must be a number or a text"),
        ("dir", "cannot read"),
    ],
)
def test_what_a_file_may_not_say_is_named(tmp_path, text, message):
    path = tmp_path / "serve.toml"
    path.write_text(text)
    with pytest.raises(errors.InvalidArgumentError, match=message):
        parsed(path)


def test_a_printed_file_says_the_same(tmp_path, capsys):
    words = ["--dir", str(tmp_path / "d"), "--allow-uid", "7", "--max-host-bytes", "64M"]
    assert main.main([*words, "--max-retain-s", "60", "--print-config"]) == 0
    path = tmp_path / "serve.toml"
    path.write_text(capsys.readouterr().out)
    parser, before = main._parse([*words, "--max-retain-s", "60"])
    assert config_file.changes(parser, before, parsed(path)) == []
    path.write_text('max-host-bytes = "much"\n')
    assert main.main(["--config", str(path), "--print-config"]) == 1
    assert "got 'much'" in capsys.readouterr().err


def test_sighup_reads_what_can_change_and_names_what_cannot(daemon_process, tmp_path):
    path = tmp_path / "serve.toml"
    path.write_text("allow-uid = [7]\n")
    daemon = daemon_process("--config", str(path), directory=tmp_path / "d")

    def told(text: str) -> str:
        path.write_text(text)
        before = len(daemon.event_kinds())
        daemon.popen.send_signal(signal.SIGHUP)
        eventually(lambda: len(daemon.event_kinds()) > before)
        return daemon.ask("ListEvents").events[-1].message

    new = (
        "allow-uid = [7, 8]\nmax-sessions-per-uid = 1\nmetrics-detail = true\n"
        'max-host-bytes = "64M"\nidle-exit-s = 1000\n'
    )
    said = told(new)
    changed = "allow-uid, max-host-bytes, max-sessions-per-uid, idle-exit-s"
    assert f"changed {changed}; wants a restart: metrics-detail" in said
    limits = daemon.status().user_limits
    assert (limits.max_sessions, limits.max_host_bytes) == (1, 32 << 20)
    assert daemon.status().pools[0].limit_bytes == 64 << 20
    daemon.client()
    with pytest.raises(errors.PoolExhaustedError):
        daemon.client()
    assert "no use for 'nonsense'" in told("nonsense = 1\n")
    assert daemon.status().user_limits.max_sessions == 1
    assert "changed nothing; wants a restart: metrics-detail" in told(new)
