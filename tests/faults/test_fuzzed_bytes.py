"""Any bytes on the ports that speak HTTP/2 and TLS."""

from __future__ import annotations

import functools

import fuzz_frames
import pytest
from cluster_places import make_certificates, place, tls_flags
from fuzzing import campaign, end_well


@pytest.mark.doses(ci=2500, full=120_000)
def test_any_frames_on_api_sock_are_survived(fuzzed_daemon, dose):
    daemon, log = fuzzed_daemon()
    answers = campaign(daemon, fuzz_frames.fuzz_frames, dose)
    assert answers["answered"] > dose / 500
    end_well(daemon, log)


@pytest.fixture
def tls_daemon(fuzzed_daemon, tmp_path):
    """A daemon whose cluster port speaks TLS; (daemon, log, address, certificates)."""
    address = place()
    pki = make_certificates(tmp_path / "pki", a=address.rpartition(":")[0], b="")
    return (
        *fuzzed_daemon("--coordinator", address, "--node", "a", *tls_flags(pki, "a")),
        address,
        pki,
    )


@pytest.mark.doses(ci=1000, full=120_000)
def test_any_frames_of_a_node_with_a_certificate_are_survived(tls_daemon, dose):
    daemon, log, address, pki = tls_daemon
    fuzz = functools.partial(fuzz_frames.fuzz_tls_frames, address=address, pki=pki, node="b")
    answers = campaign(daemon, fuzz, dose)
    assert answers["answered"] > dose / 500
    end_well(daemon, log)


@pytest.mark.doses(ci=1000, full=120_000)
def test_any_bytes_instead_of_a_handshake_are_survived(tls_daemon, dose):
    daemon, log, address, pki = tls_daemon
    fuzz = functools.partial(fuzz_frames.fuzz_tls_bytes, address=address, pki=pki)
    campaign(daemon, fuzz, dose)
    end_well(daemon, log)
