"""What `doctor` says of GPUs: whether this package and JAX were both installed for them."""

from __future__ import annotations

import importlib.util
from typing import NamedTuple

from ep_runtime import env, native
from ep_runtime.errors import EpRuntimeError

_JAX_PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")
_BUILD = "EP_RUNTIME_CUDA=ON pip install --force-reinstall ep-runtime"


class Gpus(NamedTuple):
    """One line of `doctor`."""

    state: str
    found: str
    advice: str = ""


def usable() -> int:
    """How many GPUs JAX and this package can both use; without JAX."""
    wanted = env.jax_platforms()
    if wanted and not {"cuda", "gpu"} & set(wanted):
        return 0
    if _plugin() is None or not native.library_path("cuda").exists():
        return 0
    try:
        return len(native.library("cuda").devices())
    except EpRuntimeError:
        return 0


def _plugin() -> str | None:
    return next((name for name in _JAX_PLUGINS if importlib.util.find_spec(name)), None)


def check() -> Gpus:
    """Looks at what is installed, and at the driver only where our library is; without JAX."""
    plugin = _plugin()
    if not native.library_path("cuda").exists():
        if plugin is None:
            return Gpus("OK", "neither JAX nor this package is installed for NVIDIA GPUs")
        return Gpus("WARN", f"JAX has {plugin}, this package was built without CUDA", _BUILD)
    try:
        found = native.library("cuda").devices()
    except EpRuntimeError as error:
        return Gpus("WARN", str(error), "install a driver for this CUDA, or build without it")
    text = f"{len(found)} GPUs: {', '.join(found)}"
    if plugin is None:
        return Gpus("WARN", f"{text}; JAX sees none", "install the extra cuda12 or cuda13")
    if not all(importlib.util.find_spec(name) for name in ("cuda", "cuda.bindings")):
        return Gpus("WARN", text, "a daemon needs cuda-bindings: the extra cuda12 or cuda13")
    return Gpus("OK", f"{text}; {plugin}")
