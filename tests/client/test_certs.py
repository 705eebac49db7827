"""`ep-runtime certs` writes certificates that TLS can use, and never damages existing files."""

from __future__ import annotations

import datetime
import importlib.util
import json
import os
import ssl
from pathlib import Path

import pytest
from cryptography import x509

from ep_runtime_client import cli
from ep_runtime_client.daemons import certificates


def make(directory: Path, *words: str) -> int:
    return cli.main(["certs", str(directory), *words])


def context(directory: Path, name: str, side: int, *, ca: Path | None = None) -> ssl.SSLContext:
    made = ssl.SSLContext(side)
    made.load_cert_chain(directory / f"{name}.pem", directory / f"{name}.key")
    made.load_verify_locations(ca or directory / "ca.pem")
    made.verify_mode = ssl.CERT_REQUIRED
    made.minimum_version = ssl.TLSVersion.TLSv1_3
    return made


def shake_hands(client: ssl.SSLContext, server: ssl.SSLContext, host: str) -> dict:
    """Returns the client's identity as the server sees it; raises if either side refuses."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    one = client.wrap_bio(to_client, to_server, server_hostname=host)
    other = server.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(10):
        pending = 0
        for side in (one, other):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                pending += 1
        if not pending:
            return other.getpeercert()
    raise AssertionError("the handshake does not end")


def test_two_nodes_trust_each_other_in_both_directions(tmp_path, capsys):
    assert make(tmp_path / "pki", "a=127.0.0.1,a.lab", "b") == 0
    told = capsys.readouterr().out
    pki = tmp_path / "pki"
    for client, server, host in (("a", "b", "b"), ("b", "a", "a"), ("b", "a", "127.0.0.1")):
        peer = shake_hands(
            context(pki, client, ssl.PROTOCOL_TLS_CLIENT),
            context(pki, server, ssl.PROTOCOL_TLS_SERVER),
            host,
        )
        assert ("DNS", client) in peer["subjectAltName"]
    for name in ("a", "b"):
        assert f"{pki}/{name}.pem {pki}/{name}.key {pki}/ca.pem" in told


@pytest.mark.parametrize(
    ("client", "host", "text"), [("ours", "a", "Hostname mismatch"), ("theirs", "b", "certificate")]
)
def test_another_name_and_another_authority_are_refused(tmp_path, client, host, text):
    make(tmp_path / "ours", "a", "b")
    make(tmp_path / "theirs", "a")
    ours, authority = tmp_path / "ours", tmp_path / "ours/ca.pem"
    with pytest.raises(ssl.SSLError, match=text):
        shake_hands(
            context(tmp_path / client, "a", ssl.PROTOCOL_TLS_CLIENT, ca=authority),
            context(ours, "b", ssl.PROTOCOL_TLS_SERVER),
            host,
        )


def test_keys_are_for_their_owner_alone(tmp_path):
    before = os.umask(0)
    try:
        make(tmp_path / "pki", "a")
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "pki").iterdir()}
    assert modes == {"ca.pem": 0o644, "ca.key": 0o600, "a.pem": 0o644, "a.key": 0o600}
    assert (tmp_path / "pki").stat().st_mode & 0o777 == 0o700


def test_no_file_is_overwritten_unless_forced_and_the_authority_never_is(tmp_path, capsys):
    make(tmp_path, "a")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert make(tmp_path, "b", "a") == 1
    assert f"{tmp_path}/a.pem is there and is not overwritten" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert make(tmp_path, "b") == 0  # another node, under the same authority
    assert make(tmp_path, "a", "--force") == 0
    after = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert {name for name in before if before[name] != after[name]} == {"a.key", "a.pem"}
    shake_hands(
        context(tmp_path, "a", ssl.PROTOCOL_TLS_CLIENT),
        context(tmp_path, "b", ssl.PROTOCOL_TLS_SERVER),
        "b",
    )


def test_half_an_authority_is_not_made_whole(tmp_path, capsys):
    make(tmp_path, "a")
    (tmp_path / "ca.key").unlink()
    assert make(tmp_path, "b") == 1
    assert "ca.pem exists without its certificate or key" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.key", "a.pem", "ca.pem"]


def ends_in_days(path: Path) -> float:
    found = x509.load_pem_x509_certificate(path.read_bytes())
    now = datetime.datetime.now(datetime.UTC)
    assert found.not_valid_before_utc < now
    return (found.not_valid_after_utc - now) / datetime.timedelta(days=1)


def test_certificates_end_after_the_days_asked_for(tmp_path):
    assert make(tmp_path, "a", "--days", "3") == 0
    assert 2.9 < ends_in_days(tmp_path / "a.pem") < 3.1
    assert make(tmp_path, "b") == 0
    assert 364 < ends_in_days(tmp_path / "b.pem") < 366
    assert ends_in_days(tmp_path / "ca.pem") > certificates.MAX_DAYS


def test_no_certificate_outlives_its_authority(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(certificates, "AUTHORITY_DAYS", 10)
    assert make(tmp_path, "a", "--days", "9") == 0
    assert make(tmp_path, "b", "--days", "30") == 1
    assert "before the 30 days asked for" in capsys.readouterr().err
    assert not (tmp_path / "b.pem").exists()


@pytest.mark.parametrize(
    "words",
    [["A"], ["a_b"], ["10.0.0.1"], ["ca"], ["a=-x"], ["a/b"], ["a", "a"], ["a", "--days=0"]],
)
def test_what_no_certificate_can_carry_is_wrong_usage(tmp_path, capsys, words):
    assert make(tmp_path / "pki", *words) == 1
    assert capsys.readouterr().err.startswith("ep-runtime certs: ")
    assert not (tmp_path / "pki").exists()


def test_json_names_the_files(tmp_path, capsys):
    make(tmp_path, "a", "-o", "json")
    document = json.loads(capsys.readouterr().out)
    assert document["kind"] == "certs"
    assert document["items"][1] == {
        "name": "a",
        "certificate": f"{tmp_path}/a.pem",
        "key": f"{tmp_path}/a.key",
    }
    assert certificates.parse_node("a=h,10.0.0.1") == certificates.CertifiedNode(
        "a", ("h", "10.0.0.1")
    )


def test_without_the_library_it_says_what_to_install(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert make(tmp_path, "a") == 3
    assert "pip install 'ep-runtime[certs]'" in capsys.readouterr().err
