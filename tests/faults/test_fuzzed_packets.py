"""fd.sock: any packets, with any descriptors."""

from __future__ import annotations

import fuzz_packets
import pytest
from fuzzing import campaign, end_well


@pytest.mark.parametrize(
    ("fuzz", "well"),
    [
        (fuzz_packets.fuzz_packets, "welcome"),
        (fuzz_packets.fuzz_packets_with_descriptors, "windows_returned"),
    ],
    ids=["alone", "with_descriptors"],
)
@pytest.mark.doses(ci=1000, full=120_000)
def test_any_packets_are_answered(fuzzed_daemon, fuzz, well, dose):
    daemon, log = fuzzed_daemon()
    answers = campaign(daemon, fuzz, dose)
    assert answers[well]
    end_well(daemon, log)
