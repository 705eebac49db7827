"""Gives `jax.export` the checks to disable for programs that use our ops."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Sequence

from jax.export import DisabledSafetyCheck

from ep_runtime_client.ops.kernels import ffi

# Packages whose modules declare custom calls; by name, because ops must not import `moe`.
_DECLARING = ("ep_runtime_client.ops", "ep_runtime_client.moe")


def export_checks() -> Sequence[DisabledSafetyCheck]:
    """Returns the `disabled_checks` for a `jax.export.export` of programs with our ops.

    JAX exports unknown custom calls only if the caller says that they stay compatible. Ours do:
    their names carry a version and their attributes hold names and sizes. A program made for other
    settings of group or layer fails with StaleHandleError.

    A process that loads an exported program or a serialized executable must:

    - open the group and register its layers before it runs the program;
    - for `grouped_gemm` on GPUs, have a group of transport "nvlink" open or have traced any
      `grouped_gemm`;
    - for arguments or results of our classes (MoEParams, Dispatched, plans, QuantizedTensor), name
      `ep.moe` before it loads the program.

    Returns:
        One disabled check per custom call; other checks stay on.

    Cost: a list of names; the first call imports modules that were not used yet.

    Source: JAX's `jax.export.DisabledSafetyCheck.custom_call`.
    """
    for name in _DECLARING:
        package = importlib.import_module(name)
        for module in pkgutil.walk_packages(package.__path__, f"{name}."):
            importlib.import_module(module.name)  # each module declares its calls on import
    return [DisabledSafetyCheck.custom_call(name) for name in ffi.declared()]
