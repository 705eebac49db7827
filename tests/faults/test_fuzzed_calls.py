"""Sends any calls of any RPC, any bytes and any packets to each port of the daemon."""

from __future__ import annotations

import contextlib
import functools
from pathlib import Path

import fuzz_calls
import fuzz_frames
import fuzz_packets
import pytest
from cluster_places import make_certificates, place, plain_tcp, tls_flags
from fuzzing import campaign, end_well, ended_well, send

from ep_runtime import errors, wire


@pytest.mark.doses(ci=1000, full=120_000)
def test_any_calls_of_a_session_are_answered(fuzzed_daemon, dose):
    daemon, log = fuzzed_daemon()
    answers = campaign(daemon, fuzz_calls.fuzz_session, dose)
    assert answers["OK"] > dose / 20
    end_well(daemon, log)


@pytest.mark.doses(ci=500, full=120_000)
def test_any_calls_without_a_token_are_answered(fuzzed_daemon, dose):
    daemon, log = fuzzed_daemon()
    answers = campaign(daemon, fuzz_calls.fuzz_stranger, dose)
    late = answers["DEADLINE_EXCEEDED"] + answers["UNAVAILABLE"]  # for a machine with other load
    assert answers["UNAUTHENTICATED"] > (dose - late) / 2 > 0
    end_well(daemon, log)


@pytest.mark.doses(ci=750, full=120_000)
def test_any_orders_are_answered(fuzzed_daemon, dose):
    daemon, log = fuzzed_daemon()
    answers = campaign(daemon, fuzz_calls.fuzz_admin, dose)
    assert answers["OK"] > dose / 20
    assert send(daemon, fuzz_calls.fuzz_drain, 1, 300)["OK"]
    with contextlib.suppress(errors.RuntimeUnavailableError):  # the daemon may have ended by then
        daemon.ask("Drain", shutdown=True, deadline=wire.duration(0))
    ended_well(daemon, log)


@pytest.mark.doses(ci=500, full=120_000)
def test_any_calls_of_who_has_the_clusters_secret_are_answered(fuzzed_daemon, dose):
    address, flags = place(), plain_tcp()
    daemon, log = fuzzed_daemon("--coordinator", address, "--node", "a", *flags)
    secret = Path(flags[-1]).read_bytes().strip()
    fuzz = functools.partial(fuzz_calls.fuzz_plain_node, address=address, secret=secret)
    answers = campaign(daemon, fuzz, dose)
    assert answers["OK"] > dose / 20
    end_well(daemon, log)


@pytest.mark.doses(ci=500, full=120_000)
def test_any_calls_of_a_node_with_a_certificate_are_answered(fuzzed_daemon, dose, tmp_path):
    address = place()
    pki = make_certificates(tmp_path / "pki", a=address.rpartition(":")[0], b="")
    daemon, log = fuzzed_daemon("--coordinator", address, "--node", "a", *tls_flags(pki, "a"))
    fuzz = functools.partial(fuzz_calls.fuzz_tls_node, address=address, pki=pki, node="b")
    answers = campaign(daemon, fuzz, dose)
    assert answers["OK"] > dose / 20
    end_well(daemon, log)


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


@pytest.mark.parametrize(
    ("fuzz", "well"),
    [
        (fuzz_packets.fuzz_packets, "welcome"),
        (functools.partial(fuzz_packets.fuzz_packets, with_fds=True), "windows_returned"),
    ],
    ids=["alone", "with_descriptors"],
)
@pytest.mark.doses(ci=1000, full=120_000)
def test_any_packets_are_answered(fuzzed_daemon, fuzz, well, dose):
    daemon, log = fuzzed_daemon()
    answers = campaign(daemon, fuzz, dose)
    assert answers[well]
    end_well(daemon, log)
