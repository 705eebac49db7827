"""Compiles programs for GPUs, also on machines without GPUs if JAX's CUDA plugin is there.

Each runs every call of ours as often as it was traced, and in a scope of ours.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from child_programs import run_python

from ep_runtime import native

TOOLS = Path(__file__).with_name("tools")
PROGRAMS = {"nvlink": 36, "nccl": 22, "xla": 13}


def plugin_of(version: int) -> bool:
    return importlib.util.find_spec(f"jax_plugins.xla_cuda{version}") is not None


def run_tool(name: str, *arguments: str) -> str:
    """Runs a program of tools/ that compiles ahead; returns its output once it ends with 0."""
    plugins = importlib.util.find_spec("jax_plugins")
    if not plugins or not any(map(plugin_of, (12, 13))):
        pytest.skip("JAX's CUDA plugin is not installed")
    if not native.library_path("cuda").exists():
        pytest.skip("built without EP_RUNTIME_CUDA=ON")
    return run_python(TOOLS / name, *arguments, limit_s=700).stdout


@pytest.mark.slow
@pytest.mark.timeout(750)
@pytest.mark.parametrize("transport", PROGRAMS)
def test_programs_compile_for_gpus_that_are_not_here(transport: str) -> None:
    told = run_tool("compile_ahead.py", transport)
    assert told.count(" calls, ") == PROGRAMS[transport], told
