"""Creates groups, reads memory and profiles, for the processes of `bench moe` and `bench train`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh

from ep_runtime_bench.base.device_bench import AXIS
from ep_runtime_bench.base.moe_cases import Case, Order, Profile
from ep_runtime_bench.moe import trace
from ep_runtime_client.cli import render
from ep_runtime_client.groups import estimate
from ep_runtime_client.groups.group import Group
from ep_runtime_client.sessions.session import Session


def create_group(order: Order, case: Case, mesh: Mesh, session: Session) -> Group:
    """Creates a group for one layer's sizes; a mesh axis fsdp also shards tokens."""
    return session.create_group("bench", mesh, **_group_arguments(order, case, mesh))


def _group_arguments(order: Order, case: Case, mesh: Mesh) -> dict[str, Any]:
    return {
        "ep_axis": AXIS,
        "outer_axes": tuple(axis for axis in mesh.axis_names if axis == "fsdp"),
        "num_experts": case.num_experts,
        "hidden_size": case.hidden,
        "max_tokens_per_rank": case.tokens,
        "max_top_k": case.top_k,
        "max_token_dtype": order.dtype,
        "capacity_factor": order.capacity_factor or None,
        "transport": order.subject,
        "overlap": order.overlap == "on",
        "spare_experts": order.spare_experts,
        "combine_precision": order.precision,
    }


def estimated_bytes(order: Order, case: Case, mesh: Mesh, recipe: Any) -> int:
    """Returns the bytes of group and layer on one rank by `estimate_memory`."""
    found = estimate.estimate_memory(
        "bench",
        mesh,
        mlp_dim=case.inner,
        recipe=recipe,
        **_group_arguments(order, case, mesh),
    )
    layer = found.dispatched_bytes_per_layer
    if found.workspace_bytes_per_device is not None:
        layer = found.workspace_bytes_per_device + (found.saved_bytes_per_layer or 0)
    return found.staging_bytes_per_rank + found.plan_bytes_per_layer + layer


def peak_bytes(platform: str, count: int) -> int | None:
    """Returns the most bytes that any of the first devices held so far; None if unknown."""
    stats = [device.memory_stats() or {} for device in jax.devices(platform)[:count]]
    peaks = [int(each["peak_bytes_in_use"]) for each in stats if "peak_bytes_in_use" in each]
    return max(peaks, default=None)


def planned_bytes(program: Any) -> int:
    """Returns bytes of a compiled program's operands, results and temporaries on one device."""
    plan = program.memory_analysis()
    parts = (plan.argument_size_in_bytes, plan.output_size_in_bytes, plan.temp_size_in_bytes)
    return int(sum(parts) - plan.alias_size_in_bytes)


def profiled(program: Any, enqueue: Callable[[], object], warm: int) -> Profile:
    """Profiles a step; the profile is empty if this machine does not allow profiling.

    Args:
        program: the compiled program.
        enqueue: starts one step of the program.
        warm: number of steps on GPUs before the profile.
    """
    # On CPU the events of threads are not in the order of steps.
    warm = warm if jax.default_backend() == "gpu" else 0
    try:
        return trace.profile(program.as_text(), enqueue, warm=warm)
    except RuntimeError as error:
        render.err(f"no profile: {error}")
        return Profile()
