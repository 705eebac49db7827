"""How a process drives its ranks on GPUs."""

from __future__ import annotations

import pytest

from ep_runtime import specs
from ep_runtime_client import forming


@pytest.mark.parametrize(("num_sms", "taken"), [(None, 0), (24, 24)])
def test_the_group_says_how_many_sms_and_the_process_whether_it_tells(
    monkeypatch: pytest.MonkeyPatch, num_sms: int | None, taken: int
) -> None:
    monkeypatch.setenv("EP_RUNTIME_BOARD", "0")
    spec = specs.make_group_spec(
        name="g",
        mesh_axes=(("ep", 2),),
        ep_axis="ep",
        num_experts=4,
        hidden_size=8,
        max_tokens_per_rank=4,
        transport="nvlink",
        num_sms=num_sms,
    )
    gpus = forming.on_gpus(spec, forming.Claim((0, 1), (3, 2)))
    assert gpus.ordinals == (3, 2)
    assert (gpus.num_sms, gpus.tell_progress) == (taken, False)
