"""Which module holds the per-device functions of a transport.

Each has prepare, dispatch, combine, dispatch_bwd and combine_bwd with the same arguments; the
signatures are those of `xla.py`.
"""

from __future__ import annotations

import importlib
from types import ModuleType

from ep_runtime import native
from ep_runtime.specs import GroupSpec
from ep_runtime_client.ops.calls.call import Call

# Between nodes, and of transport "xla" everywhere; `between_xla.py` says what such a module has.
_COLLECTIVES = {
    "xla": "ep_runtime_client.ops.transports.between_xla",
    "memfd": "ep_runtime_client.ops.transports.between_xla",
    "nccl": "ep_runtime_client.ops.transports.between_nccl",
}
_MODULES = {
    "xla": "ep_runtime_client.ops.transports.xla",
    "memfd": "ep_runtime_client.ops.transports.windows",
    "nvlink": "ep_runtime_client.ops.transports.windows",
    # Of a group whose EP domains lie on one node each.
    "nccl": "ep_runtime_client.ops.transports.windows",
}
# Of groups with node_size.
_ON_NODES = {
    "memfd": "ep_runtime_client.ops.transports.nodes",
    "nccl": "ep_runtime_client.ops.transports.nodes",
}


def on_gpus(group: GroupSpec) -> bool:
    """Whether its custom calls are those of the CUDA library."""
    return native.PLATFORMS.get(group.transport) == "cuda"


def per_device_ops(call: Call) -> ModuleType:
    """The module of the call's transport, or of groups over nodes.

    Raises:
        NotImplementedError: this build has no such transport.
    """
    return _module(call, _ON_NODES if call.group.node_size else _MODULES)


def collectives(call: Call) -> ModuleType:
    """The module by which ranks of the call's transport send each other what windows do not.

    Raises:
        NotImplementedError: this build has none.
    """
    return _module(call, _COLLECTIVES)


def _module(call: Call, modules: dict[str, str]) -> ModuleType:
    transport = call.group.transport
    if transport not in modules:
        raise NotImplementedError(
            f"transport {transport!r} of group {call.group.name!r} is not in this build, "
            f"which has {sorted(modules)}"
        )
    return importlib.import_module(modules[transport])
