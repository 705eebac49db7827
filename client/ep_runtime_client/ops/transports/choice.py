"""Maps each transport to its module; `protocol.py` lists the functions of such a module."""

from __future__ import annotations

from typing import Any

from ep_runtime import native
from ep_runtime.specs import GroupSpec
from ep_runtime_client.ops.calls.plan import AnyArrays, NodePlanArrays, PlanArrays
from ep_runtime_client.ops.transports import nodes, windows, xla
from ep_runtime_client.ops.transports.protocol import PerDevice

# Transports whose ranks map each other's windows, and the reference.
_TRANSPORTS: dict[str, PerDevice[PlanArrays]] = {
    "xla": xla,
    "memfd": windows,
    "nvlink": windows,
    "nccl": windows,
}
# Transports whose plans span nodes.
_OVER_NODES: dict[str, PerDevice[NodePlanArrays]] = {"memfd": nodes, "nccl": nodes}


def on_gpus(group: GroupSpec) -> bool:
    """Whether the group's custom calls are in the CUDA library."""
    return native.PLATFORMS.get(group.transport) == "cuda"


def per_device_ops(group: GroupSpec, plan: AnyArrays | None = None) -> PerDevice[Any]:
    """Returns the module that moves rows by `plan`, or the module that makes the group's plans."""
    over_nodes = group.node_size > 0 if plan is None else isinstance(plan, NodePlanArrays)
    modules: dict[str, PerDevice[Any]] = _OVER_NODES if over_nodes else _TRANSPORTS
    return modules[group.transport]
