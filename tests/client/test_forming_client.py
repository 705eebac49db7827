"""How a process drives its ranks on GPUs."""

from __future__ import annotations

import pytest

from ep_runtime_client.groups import forming


def test_a_process_says_which_gpus_it_drives_and_whether_they_tell(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("EP_RUNTIME_BOARD", "0")
    gpus = forming.on_gpus(forming.Claim((0, 1), (3, 2)))
    assert gpus.ordinals == (3, 2)
    assert not gpus.tell_progress
