"""Reads GPUs from NVML: switches, bridges, plain PCIe, and machines that report little."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ep_runtime import native
from ep_runtime_client import cli
from ep_runtime_client.cli.machine import gpus, nvml

SWITCH, GPU = 2, 0
GIB = 1 << 30


class NvmlError(Exception):
    """Stands for the error of pynvml."""


class FakeNvml:
    """`count` GPUs; `links(gpu)` gives the remote end of each NVLink: SWITCH or a GPU's index."""

    NVMLError = NvmlError

    def __init__(
        self,
        count: int = 2,
        links: Callable[[int], list[Any]] = lambda gpu: [],
        level: int = 30,
        refuses: tuple[str, ...] = (),
    ) -> None:
        self._count, self._links, self._level, self._refuses = count, links, level, refuses
        self.shut_down = False

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("nvml") and name in object.__getattribute__(self, "_refuses"):
            raise NvmlError("Not Supported")
        return object.__getattribute__(self, name)

    def nvmlInit(self) -> None:
        pass

    def nvmlShutdown(self) -> None:
        self.shut_down = True

    def nvmlSystemGetDriverVersion(self) -> bytes:
        return b"580.1"

    def nvmlDeviceGetCount(self) -> int:
        return self._count

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetPciInfo(self, gpu: int) -> Any:
        return SimpleNamespace(busId=f"0000:A{gpu}")

    def nvmlDeviceGetUUID(self, gpu: int) -> str:
        return f"GPU-{gpu}"

    def nvmlDeviceGetName(self, gpu: int) -> str:
        return "NVIDIA H200"

    def nvmlDeviceGetCudaComputeCapability(self, gpu: int) -> tuple[int, int]:
        return (9, 0) if gpu == 0 else (8, 9)

    def nvmlDeviceGetMemoryInfo(self, gpu: int) -> Any:
        return SimpleNamespace(total=140 * GIB, free=(100 + gpu) * GIB)

    def nvmlDeviceGetNvLinkState(self, gpu: int, link: int) -> int:
        if link >= len(self._links(gpu)):
            raise NvmlError("Invalid Argument")
        return int(self._links(gpu)[link] is not None)

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, gpu: int, link: int) -> int:
        return SWITCH if self._links(gpu)[link] == "switch" else GPU

    def nvmlDeviceGetNvLinkRemotePciInfo(self, gpu: int, link: int) -> Any:
        return SimpleNamespace(busId=f"0000:a{self._links(gpu)[link]}".encode())

    def nvmlDeviceGetP2PStatus(self, left: int, right: int, what: int) -> int:
        assert what == 2
        reached = {"switch", right} & set(self._links(left))
        return 0 if reached else 5

    def nvmlDeviceGetTopologyCommonAncestor(self, left: int, right: int) -> int:
        return self._level

    def nvmlDeviceGetFieldValues(self, gpu: int, fields: list[int]) -> list[Any]:
        assert fields == [90]
        return [SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(uiVal=26562))]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., FakeNvml]:
    def set_up(**settings: Any) -> FakeNvml:
        made = FakeNvml(**settings)
        monkeypatch.setitem(sys.modules, "pynvml", made)
        return made

    return set_up


def test_gpus_behind_switches_reach_each_other_over_all_their_links(
    machine: Callable[..., FakeNvml],
) -> None:
    asked = machine(count=4, links=lambda gpu: ["switch"] * 18)
    found = nvml.probe()
    assert (found.driver, found.reason, len(found.gpus)) == ("580.1", "", 4)
    assert found.gpus[1].links == {0: "NV18", 2: "NV18", 3: "NV18"}
    assert (found.gpus[1].uuid, found.gpus[1].free_bytes) == ("GPU-1", 101 * GIB)
    said = gpus.hardware({"GPU-1": 3 * GIB})
    assert said["gpu driver"].found == "580.1, 4 x NVIDIA H200"
    assert said["gpu links"].found == "every pair NV18, 26.6 GB/s a link and direction"
    assert "1: 101.0 GiB of 140.0 GiB free, windows 3.0 GiB; 2: 102.0 GiB" in (
        said["gpu memory"].found
    )
    assert asked.shut_down


class Library:
    """A fake CUDA library built for Hopper only."""

    architectures = ("90a",)

    def has_kernels_for(self, capability: str) -> bool:
        return capability == "9.0"


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Returns the library's path; the library counts as installed once that file exists."""
    path = tmp_path / "libep_runtime_cuda.so"
    monkeypatch.setattr(native, "library_path", lambda platform: path)
    monkeypatch.setattr(native, "library", lambda platform: Library())
    return path


def test_who_multiplies_is_said(machine: Callable[..., FakeNvml], library: Path) -> None:
    machine(count=1)
    said = gpus.hardware({})["gpu matmuls"]
    assert (said.state, said.found) == ("WARN", "all of grouped_gemm is plain JAX")
    library.touch()
    said = gpus.hardware({})["gpu matmuls"]
    assert (said.state, said.found[:12]) == ("OK", "bf16 and f16")
    assert "MXFP8" in said.found
    assert "f32 in tf32" in said.found


def test_gpus_without_kernels_are_named(machine: Callable[..., FakeNvml], library: Path) -> None:
    machine(count=1)
    assert "gpu kernels" not in gpus.hardware({})
    library.touch()
    said = gpus.hardware({})["gpu kernels"]
    assert (said.state, said.found) == ("OK", "for sm_90a")
    machine(count=2)
    said = gpus.hardware({})["gpu kernels"]
    assert (said.state, said.found) == ("WARN", "for sm_90a, none for 1 (NVIDIA H200, 8.9)")
    assert "plain JAX" in said.advice
    machine(count=2, refuses=("nvmlDeviceGetCudaComputeCapability",))
    assert gpus.hardware({})["gpu kernels"].state == "OK"


def test_bridges_link_some_pairs_and_the_others_say_how_far_they_are(
    machine: Callable[..., FakeNvml],
) -> None:
    machine(count=3, links=lambda gpu: [[1, 1, None], [0, 0], []][gpu], level=50)
    assert [gpu.links for gpu in nvml.probe().gpus] == [
        {1: "NV2", 2: "SYS"},
        {0: "NV2", 2: "SYS"},
        {0: "SYS", 1: "SYS"},
    ]
    assert gpus.hardware({})["gpu links"].found.startswith("0-1 NV2, 0-2 SYS, 1-2 SYS")


def test_a_virtual_machine_that_hides_links_and_memory_is_no_error(
    machine: Callable[..., FakeNvml],
) -> None:
    machine(
        refuses=(
            "nvmlDeviceGetP2PStatus",
            "nvmlDeviceGetTopologyCommonAncestor",
            "nvmlDeviceGetNvLinkState",
            "nvmlDeviceGetFieldValues",
            "nvmlDeviceGetMemoryInfo",
            "nvmlDeviceGetPciInfo",
        )
    )
    said = gpus.hardware({"GPU-0": GIB})
    assert said["gpu links"].found == "not told"
    assert said["gpu memory"].found == "0: not told, windows 1.0 GiB; 1: not told"
    assert nvml.told({"GPU-0": GIB})["items"][0]["free_bytes"] is None


@pytest.mark.parametrize(
    "refused", ["nvmlInit", "nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex"]
)
def test_where_nvml_shows_no_gpu_the_reason_is_said(
    machine: Callable[..., FakeNvml], monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    machine(refuses=(refused,))
    monkeypatch.setattr(gpus, "_plugin", lambda: "jax_cuda13_plugin")
    reason = "NVML: Not Supported" if refused == "nvmlInit" else "NVML shows no GPU"
    said = gpus.hardware({})["gpu driver"]
    assert said[:2] == ("WARN", f"not told: {reason}")
    assert "nvidia-ml-py" in said.advice
    assert nvml.told({})["reason"] == reason


def test_without_nvidia_ml_py_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert "nvidia-ml-py" in nvml.probe().reason


def test_a_machine_without_gpus_has_no_lines_about_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(gpus, "_plugin", lambda: None)
    monkeypatch.setattr(native, "library_path", lambda platform: tmp_path / "missing")
    assert gpus.hardware({}) == {}


def test_windows_by_gpu_are_leased_retained_and_quarantined_ones() -> None:
    def pool(device: str, *kinds: int) -> dict[str, Any]:
        names = ("leased_bytes", "retained_bytes", "quarantined_bytes")
        return {"device": device, **dict(zip(names, kinds, strict=True))}

    pools = [pool("host", 7, 0, 0), pool("GPU-a", 1, 20, 300)]
    assert nvml.held_by_gpu({"pools": pools}) == {"GPU-a": 321}


def test_status_shows_memory_and_links_of_each_gpu(
    machine: Callable[..., FakeNvml], address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    machine(links=lambda gpu: ["switch"] * 18)
    assert cli.main(["status", "--address", address]) == 0
    lines = capsys.readouterr().out.splitlines()
    at = lines.index("NVIDIA driver 580.1")
    assert lines[at + 1].split() == ["GPU", "NAME", "FREE", "TOTAL", "WINDOWS", "LINKS", "UUID"]
    assert lines[at + 3].split() == [
        *("1", "NVIDIA", "H200", "101.0", "GiB", "140.0", "GiB", "0", "B", "0=NV18", "GPU-1")
    ]
    assert cli.main(["status", "--address", address, "-o", "json"]) == 0
    shown = json.loads(capsys.readouterr().out)["gpus"]
    assert (shown["driver"], shown["items"][0]["links"]) == ("580.1", {"1": "NV18"})
    assert cli.main(["doctor", "--address", address]) == 0
    assert "every pair NV18" in capsys.readouterr().out
