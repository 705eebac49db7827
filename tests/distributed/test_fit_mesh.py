"""Tests `fit_mesh`: the mesh on which a job continues, and the devices that it leaves out."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import ep_runtime as ep


@dataclasses.dataclass(frozen=True)
class _Device:
    id: int
    process_index: int


def _devices(*counts: int) -> list[_Device]:
    """Makes devices of processes that have that many each."""
    owners = [process for process, count in enumerate(counts) for _ in range(count)]
    return [_Device(i, owner) for i, owner in enumerate(owners)]


def _fit(devices: list[_Device], axes: dict[str, int | None], **sizes: object) -> tuple:
    fitted = ep.distributed.fit_mesh(devices, axes, **sizes)
    used = [device.id for device in fitted.mesh.devices.flat]
    return dict(fitted.mesh.shape), used, [device.id for device in fitted.idle]


@pytest.mark.parametrize(
    ("counts", "axes", "sizes", "shape", "idle"),
    [
        ([2, 2, 2, 2], {"ep": None}, (64, 32), {"ep": 8}, []),
        ([1] * 7, {"ep": None}, (64, 32), {"ep": 4}, [4, 5, 6]),
        ([2, 2, 2], {"ep": None}, (8, 16), {"ep": 4}, [3, 5]),
        ([2, 2, 2], {"dp": None, "ep": 2}, (8, 12), {"dp": 3, "ep": 2}, []),
        ([4, 4], {"dp": None, "ep": None}, (4, 16), {"dp": 2, "ep": 4}, []),
        ([4, 3], {"fsdp": 2, "ep": None}, (64, 24), {"fsdp": 2, "ep": 2}, [2, 3, 6]),
    ],
)
def test_the_largest_mesh_that_divides_experts_and_batch_is_taken(
    counts: list[int], axes: dict, sizes: tuple[int, int], shape: dict, idle: list[int]
) -> None:
    found = _fit(_devices(*counts), axes, num_experts=sizes[0], batch=sizes[1])
    assert (found[0], found[2]) == (shape, idle)
    assert sorted(found[1] + found[2]) == list(range(sum(counts)))


def test_an_axis_that_does_not_split_the_batch_need_not_divide_it() -> None:
    sizes = {"num_experts": 4, "batch": 2, "batch_axes": ["ep"]}
    assert _fit(_devices(4), {"ep": None, "tp": 2}, **sizes)[0] == {"ep": 2, "tp": 2}


def test_spare_devices_take_the_place_of_dead_ones() -> None:
    devices = _devices(2, 2, 2)
    _, used, idle = _fit(devices, {"ep": None}, num_experts=4, batch=4)
    assert (used, idle) == ([0, 1, 2, 4], [3, 5])
    left = [device for device in devices if device.process_index != 0]
    _, used, idle = _fit(left, {"ep": None}, num_experts=4, batch=4)
    assert (used, idle) == ([2, 3, 4, 5], [])


@pytest.mark.parametrize(
    ("axes", "more", "text"),
    [
        ({"dp": None}, {}, r"\['dp'\] without 'ep'"),
        ({"ep": 0}, {}, "axis 'ep' must be at least 1 or None, got 0"),
        ({"ep": 3}, {}, r"no mesh of axes \{'ep': 3\} on 4 devices divides num_experts=8"),
        ({"ep": None}, {"batch_axes": ["dp"]}, "without 'dp'"),
    ],
)
def test_wrong_axes_are_named(axes: dict, more: dict, text: str) -> None:
    with pytest.raises(ep.InvalidArgumentError, match=text):
        _fit(_devices(4), axes, num_experts=8, batch=8, **more)


def test_a_mesh_holds_devices_in_the_order_given() -> None:
    devices = _devices(2, 2)
    fitted = ep.distributed.fit_mesh(devices, {"dp": 2, "ep": None}, num_experts=2, batch=4)
    np.testing.assert_array_equal(
        [[d.id for d in row] for row in fitted.mesh.devices], [[0, 1], [2, 3]]
    )
