"""Which module holds the per-device functions of a transport.

Each has prepare, dispatch, combine, dispatch_bwd and combine_bwd with the same arguments; the
signatures are those of `xla.py`.
"""

from __future__ import annotations

import importlib
from types import ModuleType

from ep_runtime_client.ops.calls import Call

_MODULES = {
    "xla": "ep_runtime_client.ops.xla",
    "memfd": "ep_runtime_client.ops.memfd",
    "nvlink": "ep_runtime_client.ops.memfd",
}


def per_device_ops(call: Call) -> ModuleType:
    """The module of the call's transport.

    Raises:
        NotImplementedError: this build has no such transport.
    """
    transport = call.group.transport
    if transport not in _MODULES:
        raise NotImplementedError(
            f"transport {transport!r} of group {call.group.name!r} is not in this build, "
            f"which has {sorted(_MODULES)}"
        )
    return importlib.import_module(_MODULES[transport])
