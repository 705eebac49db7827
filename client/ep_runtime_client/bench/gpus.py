"""How many GPUs a bench can have: those that both this package and JAX are installed for."""

from __future__ import annotations

import functools
import importlib.util

from ep_runtime import native
from ep_runtime.errors import EpRuntimeError

_JAX_PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")


@functools.cache
def count() -> int:
    """0 also where there is no driver. Imports no JAX."""
    if not native.library_path("cuda").exists():
        return 0
    if not any(importlib.util.find_spec(name) for name in _JAX_PLUGINS):
        return 0
    try:
        return len(native.library("cuda").devices())
    except EpRuntimeError:
        return 0
