"""Steps of two checkouts in turns."""

from __future__ import annotations

import two_builds


def test_a_ratio_is_of_pairs_of_turns() -> None:
    """Not of medians: a machine that gets slower does so for both of a pair."""
    pairs = [(1.0, 1.1), (2.0, 2.2), (4.0, 4.4), (8.0, 8.0)]
    (line,) = two_builds.lines({"ms": pairs, "joules": []})
    assert line == (
        "ms of a step: 3.000 here, 3.300 there; ratio 1.1000 "
        "(quartiles 1.0750 to 1.1000, all 1.0000 to 1.1000, 4 pairs)"
    )


def test_a_checkout_takes_turns_with_itself() -> None:
    bench = ["moe", "--transports", "memfd", "--devices", "2", "--tokens", "64"]
    found = two_builds.compare(two_builds.ROOT, bench, turns=2)
    assert len(found["ms"]) == 2
    assert all(step > 0 for pair in found["ms"] for step in pair)
