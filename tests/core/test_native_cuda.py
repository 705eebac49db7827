"""The CUDA library loads on machines without GPUs, and agrees with Python on sizes."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import re

import pytest

from ep_runtime import board, native, nccl
from ep_runtime.errors import (
    EpRuntimeError,
    InvalidArgumentError,
    RuntimeUnavailableError,
    VersionSkewError,
)
from ep_runtime.specs import GroupSpec, make_group_spec

needs_library = pytest.mark.skipif(
    not native.library_path("cuda").exists(), reason="built without EP_RUNTIME_CUDA=ON"
)


def spec_of(**changes: object) -> GroupSpec:
    values = {
        "name": "g",
        "mesh_axes": (("dp", 2), ("ep", 4)),
        "ep_axis": "ep",
        "outer_axes": ("dp",),
        "num_experts": 8,
        "hidden_size": 7168,
        "max_tokens_per_rank": 4096,
        "max_top_k": 8,
    }
    return dataclasses.replace(make_group_spec(**(values | changes)), transport="nvlink")


@needs_library
@pytest.mark.parametrize("tokens", [1, 31, 33, 8192])
@pytest.mark.parametrize("lanes", [2, 3])
def test_windows_with_flags_have_the_size_that_the_kernels_expect(tokens: int, lanes: int) -> None:
    spec = spec_of(max_tokens_per_rank=tokens, lanes=lanes)
    assert native.library("cuda").window_bytes(spec) == board.window_bytes(spec)
    host = dataclasses.replace(spec, transport="memfd")
    assert native.library("cpu").window_bytes(host) == board.window_bytes(host)


@needs_library
@pytest.mark.parametrize(("ranks", "top_k"), [(1, 8), (2, 1), (9, 8), (10, 8), (32, 8), (32, 1)])
@pytest.mark.parametrize("tokens", [1, 31, 8192])
def test_windows_of_many_ranks_have_the_size_that_the_kernels_expect(
    ranks: int, top_k: int, tokens: int
) -> None:
    axes = (("dp", 1), ("ep", ranks))
    changes = {"mesh_axes": axes, "num_experts": 8 * ranks, "max_top_k": top_k}
    spec = spec_of(max_tokens_per_rank=tokens, **changes)
    assert native.library("cuda").window_bytes(spec) == board.window_bytes(spec)


@needs_library
def test_the_library_says_which_gpus_it_has_kernels_for() -> None:
    library = native.library("cuda")
    assert library.architectures[0] == "90a"
    assert library.has_kernels_for("9.0")
    assert not library.has_kernels_for("8.0")


@pytest.mark.parametrize(
    ("architecture", "runs_on"),
    [("90a", ["9.0"]), ("100", ["10.0", "10.3"]), ("103", ["10.3"]), ("120", ["12.0"])],
)
def test_machine_code_runs_on_what_comes_after_it(architecture: str, runs_on: list[str]) -> None:
    all_of_them = ["8.0", "8.9", "9.0", "9.1", "10.0", "10.3", "11.0", "12.0", "gfx90a", ""]
    assert [c for c in all_of_them if native._runs_on(architecture, c)] == runs_on


@needs_library
@pytest.mark.parametrize("node_size", [1, 2, 4])
def test_windows_of_a_node_have_the_size_that_the_kernels_expect(node_size: int) -> None:
    spec = dataclasses.replace(
        spec_of(node_size=node_size, max_tokens_per_rank=31), transport="nccl"
    )
    assert native.library("cuda").window_bytes(spec) == board.window_bytes(spec)
    assert board.window_bytes(spec) > spec.lanes * board.lane_bytes(spec)


@needs_library
def test_both_libraries_serve_the_same_ops_and_cuda_more_under_versioned_names() -> None:
    cpu, cuda = ({t.name for t in native.library(p).targets()} for p in ("cpu", "cuda"))
    gemms = {"ep_grouped_gemm_v1", "ep_grouped_gemm_dw_v1"}
    bench = {"ep_dispatch_ceiling_v1", "ep_combine_ceiling_v1", "ep_clock_v1"}
    nccl = {"ep_nccl_exchange_v1", "ep_nccl_all_gather_v1"}
    assert cuda - cpu >= {"ep_prepare_sync_v1", *gemms, *bench, *nccl}
    assert cpu <= cuda
    assert all(re.fullmatch(r"ep_\w+_v\d+", name) for name in cuda)


@needs_library
def test_structs_of_nccl_are_compared_as_those_of_the_table(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nccl.library()
    fields = nccl._OptionsStruct._fields_
    swapped = type("Swapped", (ctypes.Structure,), {"_fields_": [*fields[1::-1], *fields[2:]]})
    monkeypatch.setitem(nccl._STRUCTS, "EpNcclOptions", swapped)
    with pytest.raises(
        VersionSkewError, match=r"EpNcclOptions\.name is 8 8 p there and 0 8 p here"
    ):
        nccl.NcclLibrary(native.library_path("cuda"))


@needs_library
def test_a_group_without_devices_is_refused() -> None:
    spec = spec_of()
    fd = os.memfd_create("board")
    try:
        with pytest.raises(InvalidArgumentError, match="local_devices is missing"):
            native.library("cuda").open_group(
                spec, generation=1, board_fd=fd, window_fds=[fd] * spec.world_size, debug=False
            )
    finally:
        os.close(fd)


@needs_library
@pytest.mark.skipif(os.path.exists("/dev/nvidia0"), reason="there is a GPU")
def test_without_a_driver_the_devices_are_an_error_that_says_so() -> None:
    with pytest.raises(EpRuntimeError, match="got no driver|CUDA: cudaGetDeviceCount"):
        native.library("cuda").devices()


def test_a_missing_library_names_the_build_option(monkeypatch: pytest.MonkeyPatch) -> None:
    path = native.library_path("cuda").with_name("missing.so")
    monkeypatch.setattr(native, "library_path", lambda platform="cpu": path)
    with pytest.raises(RuntimeUnavailableError, match="EP_RUNTIME_CUDA=ON"):
        native.NativeLibrary(path)
