"""Findings of `doctor` about GPUs: access, memory and links. Uses no JAX."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from ep_runtime import env, native
from ep_runtime.errors import EpRuntimeError
from ep_runtime.text import iec
from ep_runtime_client.cli.machine import nvml

_JAX_PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")


class GpuFinding(NamedTuple):
    """One line of `doctor`."""

    state: str
    found: str
    advice: str = ""


def usable() -> int:
    """Counts the GPUs that both JAX and this package can use, without importing JAX."""
    if _hidden_from_jax() or _plugin() is None or not native.library_path("cuda").exists():
        return 0
    try:
        return len(native.library("cuda").devices())
    except EpRuntimeError:
        return 0


def _plugin() -> str | None:
    return next((name for name in _JAX_PLUGINS if importlib.util.find_spec(name)), None)


def _hidden_from_jax() -> str:
    """Returns the JAX_PLATFORMS that hide GPUs from JAX, or ""."""
    wanted = env.jax_platforms()
    return "" if not wanted or {"cuda", "gpu"} & set(wanted) else ",".join(wanted)


def _device_files() -> int:
    return len(list(Path("/dev").glob("nvidia[0-9]*")))


def check() -> GpuFinding:
    """Checks the installed packages; and the driver, but only if our library is installed."""
    plugin = _plugin()
    if not native.library_path("cuda").exists():
        if plugin is None:
            neither = "neither JAX nor this package is installed for NVIDIA GPUs"
            if count := _device_files():
                advice = f"{native.BUILD_CUDA}, with the extra cuda12 or cuda13"
                return GpuFinding("WARN", f"{neither}, and this machine has {count}", advice)
            return GpuFinding("OK", neither)
        return GpuFinding(
            "WARN", f"JAX has {plugin}, this package was built without CUDA", native.BUILD_CUDA
        )
    try:
        found = native.library("cuda").devices()
    except EpRuntimeError as error:
        return GpuFinding("WARN", str(error), "install a driver for this CUDA, or build without it")
    text = f"{len(found)} GPUs: {', '.join(found)}"
    if plugin is None:
        return GpuFinding("WARN", f"{text}; JAX sees none", "install the extra cuda12 or cuda13")
    if not all(importlib.util.find_spec(name) for name in ("cuda", "cuda.bindings")):
        return GpuFinding("WARN", text, "a daemon needs cuda-bindings: the extra cuda12 or cuda13")
    if hidden := _hidden_from_jax():
        return GpuFinding(
            "WARN", f"{text}; {plugin}", f"JAX_PLATFORMS={hidden} keeps JAX from them"
        )
    if plugin == _JAX_PLUGINS[0]:
        advice = (
            "CUDA 12 was never tried on a GPU: use the extra cuda13 if the driver is 580 or newer"
        )
        return GpuFinding("WARN", f"{text}; {plugin}", advice)
    return GpuFinding("OK", f"{text}; {plugin}")


def hardware(window_bytes: Mapping[str, int]) -> dict[str, GpuFinding]:
    """Returns lines of `doctor` by name; none on a machine without any GPU software.

    Args:
        window_bytes: bytes of the daemon's windows, by GPU UUID.
    """
    machine = nvml.probe()
    if not machine.gpus:
        if _plugin() is None and not native.library_path("cuda").exists():
            return {}
        advice = "install nvidia-ml-py and a driver; in a container, the capability utility"
        return {"gpu driver": GpuFinding("WARN", f"{nvml.NOT_TOLD}: {machine.reason}", advice)}
    memory = [_memory(gpu, window_bytes.get(gpu.uuid, 0)) for gpu in machine.gpus]
    return {
        "gpu driver": GpuFinding("OK", f"{machine.driver}, {len(memory)} x {machine.gpus[0].name}"),
        "gpu memory": GpuFinding("OK", "; ".join(memory)),
        "gpu links": GpuFinding("OK", _links(machine)),
        **_kernels(machine),
        "gpu matmuls": _matmuls(),
    }


def _kernels(machine: nvml.Machine) -> dict[str, GpuFinding]:
    """Checks which GPUs this package has kernels for; no finding if it was built without CUDA."""
    if not native.library_path("cuda").exists():
        return {}
    try:
        library = native.library("cuda")
    except EpRuntimeError as error:
        return {"gpu kernels": GpuFinding("WARN", str(error), native.BUILD_CUDA)}
    built = f"for {', '.join(f'sm_{name}' for name in library.architectures)}"
    without = [
        f"{gpu.index} ({gpu.name}, {gpu.capability})"
        for gpu in machine.gpus
        if gpu.capability != nvml.NOT_TOLD and not library.has_kernels_for(gpu.capability)
    ]
    if not without:
        return {"gpu kernels": GpuFinding("OK", built)}
    found = f"{built}, none for {', '.join(without)}"
    advice = 'there rows travel over XLA\'s collectives (transport="xla"), and ops are plain JAX'
    return {"gpu kernels": GpuFinding("WARN", found, advice)}


def _matmuls() -> GpuFinding:
    """Tells which matmuls of grouped_gemm have kernels."""
    if not native.library_path("cuda").exists():
        return GpuFinding("WARN", "all of grouped_gemm is plain JAX", native.BUILD_CUDA)
    wide = "bf16 and f16 by kernels for Hopper where K and N are multiples of 8"
    narrow = "8-bit recipes where they are of 16, MXFP8 in bf16"
    single = "f32 in tf32 where they are of 4"
    return GpuFinding("OK", f"{wide}, {narrow}, {single}; other GPUs by plain JAX")


def _memory(gpu: nvml.Gpu, window_bytes: int) -> str:
    if gpu.total_bytes is None or gpu.free_bytes is None:
        text = f"{gpu.index}: {nvml.NOT_TOLD}"
    else:
        text = f"{gpu.index}: {iec(gpu.free_bytes)} of {iec(gpu.total_bytes)} free"
    return f"{text}, windows {iec(window_bytes)}" if window_bytes else text


def _links(machine: nvml.Machine) -> str:
    """Describes the links between GPUs, once if all pairs have the same kind."""
    pairs = {
        (gpu.index, other): kind
        for gpu in machine.gpus
        for other, kind in gpu.links.items()
        if gpu.index < other
    }
    if not pairs:
        return "one GPU"
    kinds = set(pairs.values())
    speed = machine.gpus[0].link_mb_s
    each = f", {speed / 1000:.1f} GB/s a link and direction" if speed else ""
    if len(kinds) == 1:
        kind = kinds.pop()
        return kind if kind == nvml.NOT_TOLD else f"every pair {kind}{each}"
    return ", ".join(f"{a}-{b} {kind}" for (a, b), kind in sorted(pairs.items())) + each
