"""What `jax.export` must be told about programs that use our ops."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Sequence

from jax.export import DisabledSafetyCheck

from ep_runtime_client import ops
from ep_runtime_client.ops.kernels import ffi


def export_checks() -> Sequence[DisabledSafetyCheck]:
    """Returns the `disabled_checks` that `jax.export.export` needs if a program uses our ops.

    JAX exports unknown custom calls only where it is told that they stay compatible. Ours do:
    their names carry a version, their attributes hold names and sizes, and a program made for
    other settings of group or layer ends with StaleHandleError where it runs.

    Where an exported program or a serialized executable is loaded, the group must be open and its
    layers registered before it runs; nothing of it is traced there. GPU kernels of `grouped_gemm`
    are known there once a group of transport "nvlink" is open, or any `grouped_gemm` was traced.
    Arguments and results may be our classes (MoEParams, Dispatched, plans, QuantizedTensor and the
    other pytrees); a process that never named `ep.moe` names it before it loads such a program.

    Returns:
        One check per custom call; other checks stay on.

    Cost: none, it lists names; the first call imports what was not used yet.

    Source: JAX's `jax.export.DisabledSafetyCheck.custom_call`.
    """
    for module in pkgutil.walk_packages(ops.__path__, f"{ops.__name__}."):
        importlib.import_module(module.name)  # where calls are declared, traced yet or not
    return [DisabledSafetyCheck.custom_call(name) for name in ffi.declared()]
