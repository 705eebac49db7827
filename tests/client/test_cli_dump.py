"""`ep-runtime dump` archives everything a bug report needs, and no secret."""

from __future__ import annotations

import json
import os
import tarfile
from pathlib import Path
from typing import Any

import fixed_daemon as fixed
import pytest
from daemon_fixtures import WAIT_S

import ep_runtime as ep
from ep_runtime import env
from ep_runtime.v1 import admin_service_pb2 as pb
from ep_runtime_client import cli
from ep_runtime_client.cli.commands import dump
from ep_runtime_client.cli.daemon import source
from ep_runtime_client.daemons import runtime

# Each of these secrets is planted somewhere, and must not be in the archive.
PLANTED = {
    "environment": "wandb-0123456789",
    "label": "hf_QWERTYUIOP",
    "label of two words": "swordfish-of-a-label",
    "password in a URL": "pa55-of-a-proxy",
    "bearer": "eyJhbGciOiJIUzI1NiJ9",
    "option": "letmein-please",
    "token": "ab" * 32,
    "key": "MIIEvQIBADANBgkqhkiG9w0B",
}
PEM = f"-----BEGIN PRIVATE KEY-----\n{PLANTED['key']}\n-----END PRIVATE KEY-----"
MESSAGE = (
    f"started with WANDB_API_KEY of {PLANTED['environment']}, --password={PLANTED['option']} over "
    f"https://user:{PLANTED['password in a URL']}@proxy:3128, Authorization: Bearer "
    f"{PLANTED['bearer']}, session {PLANTED['token']}, {PEM}"
)


def parts_of(path: Path) -> dict[str, Any]:
    """Returns the archive's documents by name; the key "" holds all text."""
    found: dict[str, Any] = {"": ""}
    with tarfile.open(path) as archive:
        for member in archive.getmembers():
            assert member.mode == 0o600
            text = archive.extractfile(member).read().decode()  # type: ignore[union-attr]
            found[Path(member.name).stem] = json.loads(text)
            found[""] += text
    return found


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", PLANTED["environment"])


def test_no_secret_of_any_kind_is_in_the_archive(
    plant: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sessions, events = fixed._sessions(), fixed._events()
    labels = sessions.sessions[0].labels
    labels["hf_token"], labels["auth-key"] = PLANTED["label"], PLANTED["label of two words"]
    events.events[0].message = MESSAGE
    events.events[1].fields_json = json.dumps({"password": PLANTED["option"], "text": MESSAGE})
    monkeypatch.setitem(fixed.ANSWERS, "ListSessions", lambda: sessions)
    monkeypatch.setitem(fixed.ANSWERS, "ListEvents", lambda: events)
    monkeypatch.setattr(source, "open_source", fixed.open_source)
    path = tmp_path / "dump.tar.gz"
    assert cli.main(["dump", str(path), "--address", f"unix://{tmp_path}"]) == cli.PARTIAL
    parts = parts_of(path)
    assert {kind: text for kind, text in PLANTED.items() if text in parts[""]} == {}
    told = parts["sessions"]["items"][0]
    assert told["labels"]["hf_token"] == dump.REDACTED
    assert (told["labels"]["team"], told["session_id"]) == ("nlp", fixed.SESSION)
    assert parts["about"]["redacted"] > 10
    assert list(parts["about"]["missing"]) == ["journal"]  # that directory has no daemon


def test_a_real_daemons_archive_has_every_part(
    plant: None, tmp_path: Path, address: str, daemon: runtime.Child, capsys: Any
) -> None:
    (daemon.directory / "node.key").write_text(PEM)
    path = tmp_path / "dump.tar.gz"
    with ep.connect(address, job="tests", labels={"hf_token": "hf_QWERTYUIOP"}, timeout_s=WAIT_S):
        assert cli.main(["dump", str(path), "--address", address]) == cli.OK
    assert os.stat(path).st_mode & 0o777 == 0o600
    parts = parts_of(path)
    lists = {"buffers", "events", "groups", "handles", "layers", "ranks", "sessions", "tallies"}
    assert set(parts) == {"", "about", "status", "journal", "machine", *lists}
    assert parts["journal"]["facts"]["session"] == 1
    assert parts["journal"]["files"]["node.key"]["bytes"] == len(PEM)
    assert parts["sessions"]["items"][0]["job"] == "tests"
    checks = {finding["check"] for finding in parts["machine"]["doctor"]}
    assert {"daemon", "nccl", "gpus"} <= checks
    assert parts["machine"]["packages"]["jax"]
    assert {kind: text for kind, text in PLANTED.items() if text in parts[""]} == {}
    assert os.environ["PATH"] not in parts[""]
    capsys.readouterr()
    assert cli.main(["dump", str(path), "--address", address]) == cli.USAGE
    assert "File exists" in capsys.readouterr().err
    assert daemon.stop() == 0
    left = tmp_path / "left.tar.gz"
    assert cli.main(["dump", str(left), "--address", address]) == cli.PARTIAL
    assert "no daemon answers" in capsys.readouterr().err
    kinds = [event["kind"] for event in parts_of(left)["events"]["items"]]
    assert "session.hello" in kinds


@pytest.mark.parametrize(
    "name", ["HF_TOKEN", "wandb-api-key", "DB_PASSWORD", "auth", "client.secret"]
)
def test_names_of_secrets(name: str) -> None:
    assert env.is_secret_name(name)


@pytest.mark.parametrize(
    "name", ["max_token_dtype", "max_tokens_per_rank", "keyboard", "secretary"]
)
def test_names_of_other_things(name: str) -> None:
    assert not env.is_secret_name(name)


def test_numbers_and_other_text_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    value = {
        "key": 7,
        "incarnation": "0f" * 16,
        "message": f"rank 3: {fixed.LATE_TEXT}",
        "list": [None, 1.5, True],
        "spec": str(pb.SessionInfo(progress=3)),
    }
    redaction = dump.Redaction()
    assert redaction.of(value) == value
    assert redaction.count == 0
