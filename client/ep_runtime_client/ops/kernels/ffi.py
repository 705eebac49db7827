"""Registers the native library's custom calls with XLA, once per process, on first use."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ep_runtime import native

STATE_TYPE = "ep_runtime_call_state"
Results = TypeVar("Results")
XLA_CLONES_CALLS = jax.__version_info__[:2] == (0, 11)
_XLA_PLATFORMS = {"cpu": "cpu", "cuda": "CUDA"}


_DECLARED: dict[str, None] = {}


def targets(*names: str) -> tuple[str, ...]:
    """Records a module's custom calls, which exported programs may contain; returns their names."""
    _DECLARED.update(dict.fromkeys(names))
    return names


def declared() -> tuple[str, ...]:
    """Returns the names that imported modules have recorded with `targets`."""
    return (*_DECLARED,)


@functools.cache
def ensure_registered(platform: str = "cpu") -> None:
    """Registers the type of the call state, then the targets, of the library of "cpu" or "cuda".

    Call it after the CPU backend has started, so never at import: a backend that starts later
    replays pending targets before pending types, and refuses.

    Raises:
        RuntimeUnavailableError: the native library is missing; says how to build it.
    """
    jax.devices(platform)
    library = native.library(platform)
    type_id, type_info = library.state_type()
    if type_id:
        jax.ffi.register_ffi_type(
            STATE_TYPE,
            {"type_id": _capsule(type_id), "type_info": _capsule(type_info)},
            _XLA_PLATFORMS[platform],
        )
    for target in library.targets():
        stages = {"instantiate": target.instantiate_ptr, "execute": target.execute_ptr}
        handlers = {stage: _capsule(pointer) for stage, pointer in stages.items() if pointer}
        jax.ffi.register_ffi_target(target.name, handlers, _XLA_PLATFORMS[platform], api_version=1)


@functools.cache
def register_for_gpus() -> tuple[str, ...]:
    """Calls `ensure_registered("cuda")` if JAX has NVIDIA GPUs and this package their library.

    Returns:
        The compute capability of each GPU, such as "9.0"; empty without GPUs or library.
    """
    if not native.library_path("cuda").exists():
        return ()
    try:
        devices = jax.devices("cuda")
    except RuntimeError:
        return ()
    ensure_registered("cuda")
    return tuple(str(getattr(device, "compute_capability", "")) for device in devices)


def bound(*operands: jax.Array) -> tuple[jax.Array, ...]:
    """Makes empty operands of a custom call depend on the other operands; returns all.

    A missing optional operand is an empty array. JAX moves constants out of a scan's body, and so
    out of one shard_map into another. XLA drops empty arrays there before its partitioner runs,
    which then ends the process (a segmentation fault in JAX 0.11.2's
    `ManualComputationUnusedInputsPattern`). An array that depends on other operands is not moved.
    """
    some = [x for x in operands if x.size]
    if not some or len(some) == len(operands):
        return operands
    # Use every operand, because JAX could move an empty slice of a single one out of a loop.
    values = jnp.concatenate([x.reshape(-1)[:1].astype(jnp.float32) for x in some])

    def made(like: jax.Array) -> jax.Array:
        return lax.slice(values, (0,), (0,)).astype(like.dtype).reshape(like.shape)

    return tuple(x if x.size else made(x) for x in operands)


def launch(
    target: str,
    results: Sequence[jax.ShapeDtypeStruct],
    *operands: jax.Array,
    aliases: Any = None,
    vmap_method: Any = None,
    **attributes: Any,
) -> list[jax.Array]:
    """Makes a custom call whose attributes are int64; see `bound` for empty operands.

    `aliases` maps numbers of operands to those of results in the same memory.
    """
    values = {name: np.int64(value) for name, value in attributes.items()}
    options: dict[str, Any] = {"input_output_aliases": aliases, "vmap_method": vmap_method}
    call = jax.ffi.ffi_call(target, tuple(results), **options)
    return list(call(*bound(*operands), **values))


def once(results: Results) -> Results:
    """Keeps XLA from running a GPU's custom call twice; returns its `results`.

    XLA of JAX 0.11 clones a call whose result `scan` stacks, to write into the stack directly. If
    the result has another user, both clones run: prepare, dispatch and matmuls of a forward pass.
    XLA does not look through a barrier. It then copies the stacked result while the next calls run.
    XLA of 0.10 and 0.12 does not clone; behind a barrier, 0.12 reads no slice in place.
    """
    if not XLA_CLONES_CALLS:
        return results
    return lax.optimization_barrier(results)


def _capsule(pointer: int) -> Any:
    """Returns a nameless PyCapsule of an address in the library, which stays loaded."""
    new = ctypes.pythonapi.PyCapsule_New
    new.restype = ctypes.py_object
    new.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    return new(pointer, None, None)
