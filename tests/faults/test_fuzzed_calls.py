"""Any calls of any RPC, on each port of the daemon."""

from __future__ import annotations

import contextlib
import functools
from pathlib import Path

import fuzz_calls
import pytest
from cluster_places import make_certificates, place, plain_tcp, tls_flags
from fuzzing import campaign, end_well, ended_well, inputs, send

from ep_runtime import errors, wire

pytestmark = pytest.mark.timeout(4 * 3600)


@inputs(4000)
def test_any_calls_of_a_session_are_answered(fuzzed_daemon, inputs):
    daemon, log = fuzzed_daemon()
    answers = campaign(daemon, fuzz_calls.fuzz_session, inputs)
    assert answers["OK"] > inputs / 20
    end_well(daemon, log)


@inputs(1000)
def test_any_calls_without_a_token_are_answered(fuzzed_daemon, inputs):
    daemon, log = fuzzed_daemon()
    answers = campaign(daemon, fuzz_calls.fuzz_stranger, inputs)
    assert answers["UNAUTHENTICATED"] > inputs / 2
    end_well(daemon, log)


@inputs(3000)
def test_any_orders_are_answered(fuzzed_daemon, inputs):
    daemon, log = fuzzed_daemon()
    answers = campaign(daemon, fuzz_calls.fuzz_admin, inputs)
    assert answers["OK"] > inputs / 20
    assert send(daemon, fuzz_calls.fuzz_drain, 1, 300)["OK"]
    with contextlib.suppress(errors.RuntimeUnavailableError):  # it may have ended then
        daemon.ask("Drain", shutdown=True, deadline=wire.duration(0))
    ended_well(daemon, log)


@inputs(2000)
def test_any_calls_of_who_has_the_clusters_secret_are_answered(fuzzed_daemon, inputs):
    address, flags = place(), plain_tcp()
    daemon, log = fuzzed_daemon("--coordinator", address, "--node", "a", *flags)
    secret = Path(flags[-1]).read_bytes().strip()
    fuzz = functools.partial(fuzz_calls.fuzz_plain_node, address=address, secret=secret)
    answers = campaign(daemon, fuzz, inputs)
    assert answers["OK"] > inputs / 20
    end_well(daemon, log)


@inputs(1000)
def test_any_calls_of_a_node_with_a_certificate_are_answered(fuzzed_daemon, inputs, tmp_path):
    address = place()
    pki = make_certificates(tmp_path / "pki", a=address.rpartition(":")[0], b="")
    daemon, log = fuzzed_daemon("--coordinator", address, "--node", "a", *tls_flags(pki, "a"))
    fuzz = functools.partial(fuzz_calls.fuzz_tls_node, address=address, pki=pki, node="b")
    answers = campaign(daemon, fuzz, inputs)
    assert answers["OK"] > inputs / 20
    end_well(daemon, log)
