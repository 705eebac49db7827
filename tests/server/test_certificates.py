"""Certificates of a daemon: their expiry, and changes of their files."""

from __future__ import annotations

import datetime

import pytest
from cluster_places import make_certificates, tls_flags
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from harness import FakeClock

from ep_runtime.errors import InvalidArgumentError
from ep_runtime_server.base.events import EventLog
from ep_runtime_server.nodes import certificates
from ep_runtime_server.nodes.certificates import Certificates, read_tls

DAY_S = 86400.0


class Watched:
    """A daemon's certificates; the test replaces their files."""

    def __init__(self, pki) -> None:
        self.pki = pki
        self.clock = FakeClock()
        self.events = EventLog(self.clock)
        make_certificates(pki, a="")
        self.found = Certificates(read_tls(*self.paths), self.clock, self.events)
        self.clock.now_s += self.found.left()[0][1] - 31 * DAY_S  # it has 31 days left

    @property
    def paths(self) -> list[str]:
        return tls_flags(self.pki, "a")[1::2]

    def looks(self) -> list[bool]:
        return [self.found.look() for _ in range(3)]

    def kinds(self) -> list[str]:
        return [event.kind.removeprefix("cluster.certificate_") for event in self.events.after(0)]


@pytest.fixture
def watched(tmp_path) -> Watched:
    return Watched(tmp_path / "pki")


@pytest.mark.parametrize("year", [2049, 2050])  # RFC 5280: with two digits, then with four
@pytest.mark.parametrize("subject", ["a", "a" * 64])
def test_the_end_is_what_the_certificate_says(year, subject):
    key, ends = ec.generate_private_key(ec.SECP256R1()), datetime.datetime(year, 12, 31, 23, 59, 58)
    names = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, subject)] * 3)
    made = x509.CertificateBuilder(names, names, key.public_key(), 1 << 150)
    made = made.not_valid_before(datetime.datetime(2020, 1, 1)).not_valid_after(ends)
    text = made.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    assert (
        certificates._ends(b"# of our lab\n" + text + text)
        == [ends.replace(tzinfo=datetime.UTC).timestamp()] * 2
    )


def test_a_file_that_only_looks_like_a_certificate_is_refused(watched):
    (watched.pki / "ca.pem").write_text("-----BEGIN CERTIFICATE-----\nAA==\n")
    with pytest.raises(InvalidArgumentError, match=r"--tls-ca: .*ca\.pem is not a certificate"):
        read_tls(*watched.paths)


def test_new_files_are_read_once_they_stay_the_same(watched):
    before = watched.found.tls
    assert watched.looks() == [False, False, False]
    make_certificates(watched.pki, days=90, a="")
    assert watched.looks() == [False, True, False]
    assert watched.found.tls.certificate != before.certificate
    assert watched.kinds() == ["read"]


def test_half_of_a_new_pair_is_not_used_and_named(watched):
    before, key = watched.found.tls, (watched.pki / "a.key").read_bytes()
    make_certificates(watched.pki, a="")
    fresh = (watched.pki / "a.key").read_bytes()
    (watched.pki / "a.key").write_bytes(key)
    assert watched.looks() == [False, False, False]
    assert "key of another certificate" in watched.found.error
    assert watched.found.tls is before
    (watched.pki / "a.key").write_bytes(fresh)
    assert watched.looks() == [False, True, False]
    assert not watched.found.error
    assert watched.kinds()[:2] == ["refused", "read"]


def test_an_end_is_told_thirty_days_before_once_and_named_when_it_came(watched):
    watched.looks()
    assert not watched.kinds()
    watched.clock.advance(2 * DAY_S)
    watched.looks()
    assert watched.kinds() == ["ends"]
    assert not watched.found.ended
    watched.clock.advance(30 * DAY_S)
    assert watched.found.ended == f"our own certificate {watched.paths[0]} has ended"
