"""Estimates a group's memory before anything is allocated."""

from __future__ import annotations

import dataclasses
import logging
import os
from typing import TYPE_CHECKING, Any, Literal

from ep_runtime import device_layout, specs, workspace
from ep_runtime.arguments import check_whole, suggests
from ep_runtime.layout import spread_capacity
from ep_runtime.text import iec
from ep_runtime_client.base import meshes
from ep_runtime_client.base.dtypes import dtype_name

if TYPE_CHECKING:
    from ep_runtime_client.modules import sharding
    from ep_runtime_client.moe import checks

_log = logging.getLogger("ep_runtime")

# A group that takes more than this share of a device's memory causes a warning with advice.
WARN_SHARE = 0.10


@dataclasses.dataclass(frozen=True)
class MemoryEstimate:
    """The memory that a group and its layers need on one rank, in bytes.

    Attributes:
        staging_bytes_per_rank: the rank's window, allocated once per group; 0 for "xla".
        dispatched_bytes_per_layer: tokens [C, H] and weights [C] f32 that one dispatch returns;
            a block call returns none.
        capacity_per_rank: C, rows of one slab.
        plan_bytes_per_layer: the arrays of one plan, saved for backward. A block call computes a
            plan of more than 4 MiB and more than an eighth of its tokens' bytes again instead.
        workspace_bytes_per_device: the workspace of a block call, the larger of forward and
            backward; all layers share it. Rows have max_token_dtype, at least 16 and at most 32
            bits, or 16 bits with a recipe that quantizes. Between nodes it includes the rows on
            their way. None without mlp_dim, or if the transport has no block calls.
        saved_bytes_per_layer: rows of the first matmul that a block call saves for backward; None
            as above.
        copies_bytes_per_device: with spare_experts, f32 gradients of a rank's experts and slots and
            the slots' exchange in one call of `ep.moe`, whose weights take less before; all layers
            share it. 0 without spare_experts or mlp_dim, and if block calls run, whose workspace
            has the slots.
    """

    staging_bytes_per_rank: int
    dispatched_bytes_per_layer: int
    capacity_per_rank: int
    plan_bytes_per_layer: int
    workspace_bytes_per_device: int | None = None
    saved_bytes_per_layer: int | None = None
    copies_bytes_per_device: int = 0


def of_spec(spec: specs.GroupSpec) -> MemoryEstimate:
    """Returns the estimate for a resolved spec."""
    row_bytes = spec.hidden_size * specs.DTYPE_BYTES[spec.max_token_dtype]
    # If block calls copy experts, no others do.
    rows = _rows(spec) if device_layout.composed_copies(spec) else spec.recv_capacity_per_rank
    return MemoryEstimate(
        staging_bytes_per_rank=staging_bytes(spec),
        dispatched_bytes_per_layer=rows * (row_bytes + 4),
        capacity_per_rank=spec.recv_capacity_per_rank,
        plan_bytes_per_layer=_plan_bytes(spec),
    )


def _rows(spec: specs.GroupSpec) -> int:
    """Returns the most rows that a rank receives in the largest call of `ep.moe`."""
    if not spec.spare_experts:
        return spec.recv_capacity_per_rank
    return spread_capacity(
        spec.recv_capacity_per_rank,
        slots=spec.max_tokens_per_rank * spec.max_top_k,
        experts=spec.experts_per_rank,
        spare_experts=spec.spare_experts,
        alignment=spec.alignment,
    )


def _plan_bytes(spec: specs.GroupSpec) -> int:
    """Returns the bytes of a plan (`ops/calls/plan.py`, int32) of a layer with the largest K."""
    tokens, slots = spec.max_tokens_per_rank, spec.max_tokens_per_rank * spec.max_top_k
    counts = spec.ranks_per_node * device_layout.count_columns(spec, spec.staged_tokens)
    received = counts + spec.ep_size * tokens + 1 + 2 * _rows(spec)
    virtual = 2 * spec.num_nodes * slots + 1 if spec.node_size else 0
    groups = 2 * (spec.experts_per_rank + spec.spare_experts)
    copies = spec.ep_size * spec.spare_experts
    return 4 * (2 * slots + received + groups + 1 + virtual + copies)


def _crossing_bytes(
    spec: specs.GroupSpec, sizes: workspace.BlockSizes, chunks: int, *, brought: int
) -> int:
    """Returns the bytes of rows between nodes, in addition to a block call's workspace: `brought`
    received rows of each token, and the sum that is sent back. Of several chunks, one is there
    while the next arrives."""
    if spec.num_nodes == 1:
        return 0
    row = sizes.packed_bytes or spec.hidden_size * sizes.element_bytes
    sums = 4 if spec.combine_precision == "exact" else sizes.element_bytes
    tokens = spec.staged_tokens
    return min(2, chunks) * tokens // chunks * brought * row + tokens * spec.hidden_size * sums


def block_sizes(
    spec: specs.GroupSpec, mlp_dim: int, *, gated: bool, scaling: workspace.Scaling = "none"
) -> workspace.BlockSizes:
    """Returns the sizes of the largest block calls that the group's layers can have."""
    # Recipes quantize bfloat16 rows.
    wide = scaling == "none" and specs.DTYPE_BYTES[spec.max_token_dtype] >= 4
    return workspace.BlockSizes(
        tokens=spec.staged_tokens,
        top_k=spec.max_top_k,
        ep_size=spec.ranks_per_node,
        nodes=spec.num_nodes,
        lane_rows=device_layout.lane_rows(spec),
        experts=spec.experts_per_rank + spec.spare_experts,
        capacity=_rows(spec),
        alignment=workspace.ROW_ALIGNMENT,
        hidden_size=spec.hidden_size,
        mlp_dim=mlp_dim,
        gated=gated,
        element_bytes=4 if wide else 2,
        scaling=scaling,
        spare=spec.spare_experts,
    )


def sizes_of(spec: specs.GroupSpec) -> dict[str, int]:
    """Returns the spec's sizes by name, and the bytes they need."""
    sizes = of_spec(spec)
    return {
        "ep_size": spec.ep_size,
        "num_slabs": spec.num_slabs,
        "world_size": spec.world_size,
        "experts_per_rank": spec.experts_per_rank,
        "capacity_per_rank": spec.recv_capacity_per_rank,
        "staging_bytes_per_rank": sizes.staging_bytes_per_rank,
        "dispatched_bytes_per_layer": sizes.dispatched_bytes_per_layer,
    }


def staging_bytes(spec: specs.GroupSpec) -> int:
    """Returns the bytes of one rank's window."""
    if spec.transport == "xla":
        return 0
    from ep_runtime import board

    return board.window_bytes(spec)


@suggests({field.name for field in dataclasses.fields(specs.GroupSettings)} | {"replace"})
def estimate_memory(
    name: str,
    mesh: Any,
    *,
    rules: sharding.Rules | None = None,
    ep_axis: str | tuple[str, ...] | None = None,
    outer_axes: str | tuple[str, ...] = (),
    num_experts: int,
    hidden_size: int,
    max_tokens_per_rank: int,
    transport: str = "auto",
    node_size: int = 0,
    mlp_dim: int | None = None,
    gated: bool = True,
    keep: Literal["first", "nothing"] = "first",
    keep_factor: float = 1.25,
    recipe: checks.Recipes = None,
    **arguments: Any,
) -> MemoryEstimate:
    """Estimates the memory of a group and its layers without creating the group.

    Needs no session and allocates nothing; an AbstractMesh serves as `mesh`.

    Args:
        name: as in `Session.create_group`.
        mesh: as in `Session.create_group`, or an AbstractMesh.
        rules, ep_axis, outer_axes: as in `Session.create_group`.
        num_experts, hidden_size, max_tokens_per_rank: as in `Session.create_group`.
        transport: as in `Session.create_group`; "auto" counts block calls and windows in host
            memory, which are larger than those of GPUs ("nvlink").
        node_size: number of an EP group's ranks on one node, for "nccl" between nodes and for
            "auto"; `create_group` gets it from the daemons. 0: all of them.
        mlp_dim: M of the layers. If tp shards M, give M of one device, or the whole M if
            `workspace` is in bytes. None leaves the workspace out.
        gated, keep, keep_factor: as in `ep.moe`.
        recipe: as in `ep.moe`; a recipe that has no block call leaves the workspace out.
        **arguments: the others of `Session.create_group`.

    Returns:
        MemoryEstimate, in bytes per rank.

    Raises:
        InvalidArgumentError: as `Session.create_group`, or `workspace` in bytes is too small for a
            call of these layers.

    Cost: arithmetic on sizes.
    """
    arguments.pop("replace", None)
    if "max_token_dtype" in arguments:
        arguments["max_token_dtype"] = dtype_name(arguments["max_token_dtype"], "max_token_dtype")
    mesh_axes = meshes.axes_of(mesh)
    ep_axis, outer_axes = meshes.group_axes(mesh, rules, ep_axis, outer_axes)
    spec = specs.GroupSettings(
        name=name,
        ep_axis=ep_axis,
        outer_axes=outer_axes,
        num_experts=num_experts,
        hidden_size=hidden_size,
        max_tokens_per_rank=max_tokens_per_rank,
        transport="memfd" if transport == "auto" else transport,
        node_size=node_size,
        **arguments,
    ).on(mesh_axes)
    device_layout.check_limits(spec)
    found = of_spec(spec)
    workspace.check_keep(keep, keep_factor)
    scaling = _scaling_of(recipe)
    if mlp_dim is not None:
        check_whole("mlp_dim", mlp_dim)
    on_gpus = spec
    if transport == "auto":
        on_gpus = dataclasses.replace(spec, transport="nvlink")
        if arguments.get("spare_experts", "auto") == "auto":
            slots = device_layout.auto_spare(on_gpus)
            on_gpus = dataclasses.replace(on_gpus, spare_experts=slots)
    blocks = _has_blocks(on_gpus) and scaling is not None
    if mlp_dim is not None and device_layout.composed_copies(spec) and not blocks:
        experts = spec.experts_per_rank + (1 + 2 * spec.ep_size) * spec.spare_experts
        weights = (3 if gated else 2) * spec.hidden_size * mlp_dim
        return dataclasses.replace(found, copies_bytes_per_device=4 * experts * weights)
    if scaling is None and device_layout.block_copies(spec):
        without = of_spec(dataclasses.replace(spec, spare_experts=0))
        return dataclasses.replace(found, plan_bytes_per_layer=without.plan_bytes_per_layer)
    if mlp_dim is None or not blocks or scaling is None:
        return found
    sizes = block_sizes(on_gpus, mlp_dim, gated=gated, scaling=scaling)
    # With copies a call has room for all rows, as `ep.moe` gives it.
    setting = float(sizes.capacity) if on_gpus.spare_experts else spec.workspace
    chunks = sizes.node_chunks(spec.on_overflow)
    of_chunk = dataclasses.replace(sizes, tokens=sizes.tokens // chunks)
    block = workspace.of_block(of_chunk, setting, keep=keep, keep_factor=keep_factor)
    # Gradients of weights add up in f32 over the chunks.
    weights = sizes.experts * spec.hidden_size * (sizes.columns + mlp_dim)
    added = 4 * weights if chunks > 1 else 0
    return dataclasses.replace(
        found,
        workspace_bytes_per_device=max(
            block.forward_bytes + _crossing_bytes(spec, sizes, chunks, brought=1),
            block.backward_bytes + _crossing_bytes(spec, sizes, chunks, brought=2) + added,
        ),
        saved_bytes_per_layer=block.kept_bytes * chunks,
    )


def _has_blocks(spec: specs.GroupSpec) -> bool:
    return device_layout.on_device(spec) and not device_layout.composed_copies(spec)


def _scaling_of(recipe: checks.Recipes) -> workspace.Scaling | None:
    """Returns how a block call scales its operands; None if it has no matmuls for `recipe`."""
    if recipe is None:
        return "none"
    # Recipes are JAX's types, but a group can be described without JAX.
    from ep_runtime_client.moe import bodies, checks
    from ep_runtime_client.moe.bodies.cuda import scaling_of

    recipes = checks.quantizing(recipe)
    return scaling_of(recipes[0]) if bodies.supports_recipes(recipes) else None


def report(spec: specs.GroupSpec, device: Any, devices_per_host: int) -> None:
    """Logs one line with the group's sizes, and a warning if they are large for the device."""
    sizes = of_spec(spec)
    blocks = _has_blocks(spec)  # block calls need no slab
    _log.info(
        "group %r: capacity %d rows per rank, staging %s per rank, dispatched %s per layer and "
        "rank%s, transport %s",
        spec.name,
        sizes.capacity_per_rank,
        iec(sizes.staging_bytes_per_rank),
        iec(sizes.dispatched_bytes_per_layer),
        " without block calls" if blocks else "",
        f"{spec.transport}, per node of {spec.node_size}" if spec.node_size else spec.transport,
    )
    if spec.max_top_k > spec.num_experts:
        _log.warning(
            "group %r: max_top_k=%d is above num_experts=%d; a router gives a token %d experts at "
            "most, and max_top_k=%d takes less memory",
            spec.name,
            spec.max_top_k,
            *3 * (spec.num_experts,),
        )
    _warn_of_large(spec, sizes, device_memory_bytes(device, devices_per_host))


def _warn_of_large(spec: specs.GroupSpec, sizes: MemoryEstimate, total: int) -> None:
    """Warns if the group takes much memory. Block calls need no slab, so then it is not counted."""
    staging, slab = sizes.staging_bytes_per_rank, sizes.dispatched_bytes_per_layer
    what, hint = f"staging takes {iec(staging)},", "make it smaller"
    if not _has_blocks(spec):
        rows = sizes.capacity_per_rank
        what = f"staging ({iec(staging)}) and a slab ({iec(slab)}, {rows} rows) take"
        hint = "make the one smaller, capacity_factor the other"
        staging += slab
    if total and staging > WARN_SHARE * total:
        _log.warning(
            "group %r: %s %.0f%% of %s per device; fewer max_tokens_per_rank or lanes %s",
            spec.name,
            what,
            100 * staging / total,
            iec(total),
            hint,
        )


def device_memory_bytes(device: Any, devices_per_host: int) -> int:
    """Returns the memory of the device; for a CPU device its share of the host's. 0 if unknown."""
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats and stats.get("bytes_limit"):
        return int(stats["bytes_limit"])
    if device.platform != "cpu":
        return 0
    host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return host // max(devices_per_host, 1)
