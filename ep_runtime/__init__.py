"""Expert parallelism for JAX, with a daemon that owns the shared memory of MoE layers.

Import it as `import ep_runtime as ep`. The import loads neither JAX nor native code; the first use
of a name loads its module. The table below lists the names by module, and `__init__.pyi` repeats
them for type checkers and editors.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.2.0"

_NAMES_OF = {
    "ep_runtime.errors": (
        "CapacityOverflowError",
        "EpRuntimeError",
        "GroupBusyError",
        "GroupNotReadyError",
        "InvalidArgumentError",
        "OpTimeoutError",
        "PeerLostError",
        "PermissionDeniedError",
        "PoolExhaustedError",
        "RuntimeUnavailableError",
        "SessionFencedError",
        "SpecMismatchError",
        "StaleHandleError",
        "VersionSkewError",
    ),
    "ep_runtime.layer_specs": ("LayerSpec",),
    "ep_runtime.layout": ("recv_capacity",),
    "ep_runtime.specs": ("GroupSpec",),
    "ep_runtime_client.sessions.connect": ("connect",),
    "ep_runtime_client.groups.estimate": ("MemoryEstimate", "estimate_memory"),
    "ep_runtime_client.programs.explain": ("Collective", "Explanation", "MoEPath", "explain"),
    "ep_runtime_client.programs.failures": ("error_of", "translate_errors"),
    "ep_runtime_client.groups.group": ("Group",),
    "ep_runtime_client.base.layers": ("EpLayer", "LayerStack", "layer"),
    "ep_runtime_client.moe.api": ("MoEStats", "moe"),
    "ep_runtime_client.moe.params": ("MoEParams", "init_moe_params"),
    "ep_runtime_client.moe.state": ("MoEState", "init_moe_state"),
    "ep_runtime_client.modules.quantized": ("quantize_params", "straight_through"),
    "ep_runtime_client.ops.movement.combine": ("combine",),
    "ep_runtime_client.ops.movement.dispatch": ("dispatch",),
    "ep_runtime_client.ops.permutation.api": ("Permuted", "permute", "unpermute"),
    "ep_runtime_client.ops.calls.plan": ("Dispatched", "Plan"),
    "ep_runtime_client.ops.movement.prepare": ("prepare",),
    "ep_runtime_client.ops.routing.api": (
        "Routing",
        "pad_tokens",
        "route",
        "top_k",
        "update_expert_bias",
    ),
    "ep_runtime_client.ops.routing.losses": ("aux_loss", "sequence_aux_loss", "z_loss"),
    "ep_runtime_client.ops.routing.options": ("Router",),
    "ep_runtime_client.ops.permutation.sort_chunks": ("sort_chunks",),
    "ep_runtime_client.ops.dense.api": ("dense",),
    "ep_runtime_client.ops.exporting": ("export_checks",),
    "ep_runtime_client.ops.gemm.api": ("grouped_gemm",),
    "ep_runtime_client.ops.quantize.api": ("grouped_quantize",),
    "ep_runtime_client.ops.quantize.quantized_tensor": ("QuantizedTensor",),
    "ep_runtime_client.programs.remat": ("remat_policy",),
    "ep_runtime_client.sessions.session": ("Session",),
}
_MODULE_OF = {name: module for module, names in _NAMES_OF.items() for name in names}
_SUBMODULES = {
    "convert": "ep_runtime_client.modules.convert",
    "distributed": "ep_runtime_client.distributed",
    "errors": "ep_runtime.errors",
    "recipes": "ep_runtime_client.ops.quantize.formats.recipes",
    "sharding": "ep_runtime_client.modules.sharding",
}
# Modules that need the pip extras flax or optax, or other projects. `from ep_runtime import *`
# omits them.
_OPTIONAL_SUBMODULES = {
    "integrations": "ep_runtime_client.integrations",
    "linen": "ep_runtime_client.modules.linen",
    "nnx": "ep_runtime_client.modules.nnx",
    "optax": "ep_runtime_client.modules.optax",
}

__all__ = ["__version__", *sorted([*_MODULE_OF, *_SUBMODULES])]


def __getattr__(name: str) -> Any:
    value: Any
    if name in _MODULE_OF:
        value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    elif name in _SUBMODULES or name in _OPTIONAL_SUBMODULES:
        value = importlib.import_module((_SUBMODULES | _OPTIONAL_SUBMODULES)[name])
    else:
        raise AttributeError(f"module 'ep_runtime' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *_OPTIONAL_SUBMODULES})
