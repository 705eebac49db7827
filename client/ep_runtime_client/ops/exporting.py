"""What `jax.export` must be told about programs that use our ops."""

from __future__ import annotations

from collections.abc import Sequence

from jax.export import DisabledSafetyCheck

from ep_runtime_client.ops.activation import kernels as activation_kernels
from ep_runtime_client.ops.activation import quantized_kernels
from ep_runtime_client.ops.gemm import kernels_8, kernels_16, kernels_32, kernels_bias
from ep_runtime_client.ops.kernels import move_rows
from ep_runtime_client.ops.quantize import kernels as quantize_kernels
from ep_runtime_client.ops.transports import between_nccl
from ep_runtime_client.ops.transports import windows as transports_windows


def export_checks() -> Sequence[DisabledSafetyCheck]:
    """The `disabled_checks` of `jax.export.export` for programs with our custom calls.

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

    Cost: none; it lists names.

    Source: JAX's `jax.export.DisabledSafetyCheck.custom_call`.
    """
    kernels = (
        kernels_16,
        kernels_32,
        kernels_8,
        activation_kernels,
        quantize_kernels,
        quantized_kernels,
        move_rows,
        kernels_bias,
    )
    names = [*transports_windows.TARGETS, transports_windows.SYNC_TARGET, *between_nccl.TARGETS]
    for each in kernels:
        names += each.TARGETS
    return [DisabledSafetyCheck.custom_call(name) for name in names]
