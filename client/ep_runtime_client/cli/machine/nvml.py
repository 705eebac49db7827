"""Reads GPUs, their memory and links from NVML; failures become a reason, not an error.

Virtual machines, containers and MIG hide some values, which are then None or NOT_TOLD.
"""

from __future__ import annotations

import collections
import dataclasses
import importlib
import itertools
from collections.abc import Callable, Mapping
from typing import Any

from ep_runtime_client.cli.tables import IDENTITY, Column

NOT_TOLD = "not told"

# nvmlGpuTopologyLevel_t, with the names of `nvidia-smi topo`.
_LEVELS = {0: "INT", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
_P2P_NVLINK = 2
_P2P_OK = 0
_SWITCH = 2
_MAX_LINKS = 36
_LINK_SPEED_FIELD = 90  # MB/s of one link, each way


@dataclasses.dataclass(frozen=True)
class Gpu:
    """One GPU of the machine, even if CUDA_VISIBLE_DEVICES hides it."""

    index: int
    uuid: str
    name: str
    total_bytes: int | None
    free_bytes: int | None
    link_mb_s: int | None
    links: dict[int, str]  # by the other GPU's index: NV18, PIX, ..., NOT_TOLD
    capability: str = NOT_TOLD  # "9.0"


@dataclasses.dataclass(frozen=True)
class Machine:
    """The report of NVML; if it is empty, `reason` tells why."""

    driver: str = ""
    gpus: tuple[Gpu, ...] = ()
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class _Handle:
    """A GPU of NVML, its PCI address, and its NVLinks: to switches, and to GPUs by address."""

    of: Any
    bus: str
    to_switches: int
    to_gpus: collections.Counter[str]

    def links_to(self, other: _Handle) -> int:
        """Counts the links that reach the other GPU; with switches, all links do."""
        return self.to_switches or self.to_gpus[other.bus]


def probe() -> Machine:
    """Asks NVML; takes a few tens of milliseconds."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return Machine(
            reason="nvidia-ml-py is not installed (the extras cuda12 and cuda13 have it)"
        )
    try:
        nvml.nvmlInit()
    except (nvml.NVMLError, OSError) as error:
        return Machine(reason=f"NVML: {error}")
    try:
        return _Asked(nvml).machine()
    finally:
        nvml.nvmlShutdown()


class _Asked:
    """NVML after its initialization."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml

    def _ask(self, name: str, *arguments: Any) -> Any:
        """Returns the call's answer; None if this machine or this NVML has none."""
        try:
            call: Callable[..., Any] = getattr(self._nvml, name)
            return call(*arguments)
        except (self._nvml.NVMLError, AttributeError, OSError, ValueError):
            return None

    def machine(self) -> Machine:
        driver = _text(self._ask("nvmlSystemGetDriverVersion"))
        found = [
            self._handle(index, handle)
            for index in range(self._ask("nvmlDeviceGetCount") or 0)
            if (handle := self._ask("nvmlDeviceGetHandleByIndex", index)) is not None
        ]
        if not found:
            return Machine(driver, reason="NVML shows no GPU")
        kinds: dict[int, dict[int, str]] = {index: {} for index, _ in found}
        for (a, left), (b, right) in itertools.combinations(found, 2):
            kinds[a][b] = kinds[b][a] = self._kind(left, right)
        return Machine(driver, tuple(self._gpu(index, h, kinds[index]) for index, h in found))

    def _handle(self, index: int, of: Any) -> tuple[int, _Handle]:
        pci = self._ask("nvmlDeviceGetPciInfo", of)
        to_switches, to_gpus = 0, collections.Counter[str]()
        for link in range(_MAX_LINKS):
            if not self._ask("nvmlDeviceGetNvLinkState", of, link):
                continue
            if self._ask("nvmlDeviceGetNvLinkRemoteDeviceType", of, link) == _SWITCH:
                to_switches += 1
                continue
            remote = self._ask("nvmlDeviceGetNvLinkRemotePciInfo", of, link)
            to_gpus[_text(getattr(remote, "busId", "")).lower()] += 1
        bus = _text(getattr(pci, "busId", "")).lower()
        return index, _Handle(of, bus, to_switches, to_gpus)

    def _kind(self, left: _Handle, right: _Handle) -> str:
        if self._ask("nvmlDeviceGetP2PStatus", left.of, right.of, _P2P_NVLINK) == _P2P_OK:
            return f"NV{left.links_to(right) or ''}"
        level = self._ask("nvmlDeviceGetTopologyCommonAncestor", left.of, right.of)
        return _LEVELS.get(level, NOT_TOLD)

    def _gpu(self, index: int, handle: _Handle, links: dict[int, str]) -> Gpu:
        memory = self._ask("nvmlDeviceGetMemoryInfo", handle.of)
        return Gpu(
            index=index,
            uuid=_text(self._ask("nvmlDeviceGetUUID", handle.of)),
            name=_text(self._ask("nvmlDeviceGetName", handle.of)),
            total_bytes=None if memory is None else int(memory.total),
            free_bytes=None if memory is None else int(memory.free),
            link_mb_s=self._link_speed(handle),
            links=links,
            capability=self._capability(handle),
        )

    def _capability(self, handle: _Handle) -> str:
        numbers = self._ask("nvmlDeviceGetCudaComputeCapability", handle.of)
        return NOT_TOLD if numbers is None else ".".join(map(str, numbers))

    def _link_speed(self, handle: _Handle) -> int | None:
        values = self._ask("nvmlDeviceGetFieldValues", handle.of, [_LINK_SPEED_FIELD])
        if not values or values[0].nvmlReturn != 0:
            return None
        return int(values[0].value.uiVal) or None


def _text(value: Any) -> str:
    """Decodes a string of NVML, which older versions give as bytes."""
    if value is None:
        return NOT_TOLD
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


COLUMNS = (
    Column("index", "GPU", "count", priority=IDENTITY, about="index in NVML's order"),
    Column("name", "NAME", priority=4, about="product name"),
    Column("free_bytes", "FREE", "bytes", about="memory that is free"),
    Column("total_bytes", "TOTAL", "bytes", about="all its memory"),
    Column("window_bytes", "WINDOWS", "bytes", about="memory in windows of the daemon"),
    Column(
        "links", "LINKS", "list", priority=3, about="links to other GPUs, as nvidia-smi names them"
    ),
    Column("uuid", "UUID", "device", priority=3, about="its UUID, as in DEVICE"),
)


NONE: dict[str, Any] = {"driver": "", "reason": "", "items": []}


def told(window_bytes: Mapping[str, int]) -> dict[str, Any]:
    """Returns `status`'s values: driver, reason if NVML fails, and a row of COLUMNS per GPU."""
    machine = probe()
    rows = [
        {
            "index": gpu.index,
            "uuid": gpu.uuid,
            "name": gpu.name,
            "total_bytes": gpu.total_bytes,
            "free_bytes": gpu.free_bytes,
            "window_bytes": window_bytes.get(gpu.uuid, 0),
            "link_mb_s": gpu.link_mb_s,
            "links": {str(other): kind for other, kind in sorted(gpu.links.items())},
        }
        for gpu in machine.gpus
    ]
    return {"driver": machine.driver, "reason": machine.reason, "items": rows}


def held_by_gpu(status: Mapping[str, Any]) -> dict[str, int]:
    """Returns the bytes of the daemon's windows by GPU UUID, from its status."""
    kinds = ("leased_bytes", "retained_bytes", "quarantined_bytes")
    return {
        pool["device"]: sum(pool[kind] for kind in kinds)
        for pool in status["pools"]
        if pool["device"].startswith("GPU-")
    }
