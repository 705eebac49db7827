"""Memory of a group before it exists."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from jax.sharding import AbstractMesh

import ep_runtime as ep
from ep_runtime import board, specs
from ep_runtime_client.groups import estimate

_MESH = AbstractMesh((2, 4), ("dp", "ep"))
_ARGUMENTS: dict[str, Any] = {
    "ep_axis": "ep",
    "outer_axes": "dp",
    "num_experts": 8,
    "hidden_size": 64,
    "max_tokens_per_rank": 32,
    "max_top_k": 2,
    "alignment": 8,
}


def test_estimate_needs_no_session_and_counts_window_and_rows() -> None:
    found = ep.estimate_memory("g", _MESH, **_ARGUMENTS)
    spec = specs.make_group_spec(name="g", mesh_axes=(("dp", 2), ("ep", 4)), **_ARGUMENTS)
    assert found.staging_bytes_per_rank == board.window_bytes(spec)
    assert found.capacity_per_rank == spec.recv_capacity_per_rank
    assert found.dispatched_bytes_per_layer == found.capacity_per_rank * (64 * 2 + 4)


def test_estimate_of_xla_stages_nothing() -> None:
    found = ep.estimate_memory("g", _MESH, transport="xla", **_ARGUMENTS)
    assert found.staging_bytes_per_rank == 0


def test_a_capacity_factor_makes_it_smaller() -> None:
    whole = ep.estimate_memory("g", _MESH, **_ARGUMENTS)
    part = ep.estimate_memory("g", _MESH, capacity_factor=1.0, **_ARGUMENTS)
    assert part.dispatched_bytes_per_layer < whole.dispatched_bytes_per_layer


def test_estimate_refuses_what_create_group_refuses() -> None:
    with pytest.raises(ep.InvalidArgumentError, match="num_experts=9 does not divide.*4"):
        ep.estimate_memory("g", _MESH, **{**_ARGUMENTS, "num_experts": 9})


@pytest.mark.parametrize(("memory", "warned"), [(1 << 40, False), (1 << 16, True)])
def test_the_report_warns_above_a_tenth_of_the_memory(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, memory: int, warned: bool
) -> None:
    spec = specs.make_group_spec(name="g", mesh_axes=(("dp", 2), ("ep", 4)), **_ARGUMENTS)
    monkeypatch.setattr(estimate, "device_memory_bytes", lambda device, count: memory)
    with caplog.at_level(logging.INFO, "ep_runtime"):
        estimate.report(spec, None, 8)
    lines = [record for record in caplog.records if record.name == "ep_runtime"]
    assert "capacity 256 rows per rank" in lines[0].getMessage()
    assert [line.levelname for line in lines[1:]] == (["WARNING"] if warned else [])
    if warned:
        assert "capacity_factor" in lines[1].getMessage()
