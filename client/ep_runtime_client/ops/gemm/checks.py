"""Checks the arguments of grouped_gemm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from ep_runtime.errors import InvalidArgumentError
from ep_runtime_client.ops.partitioning.regions import Partitioning
from ep_runtime_client.ops.quantize.formats.recipes import check_recipe
from ep_runtime_client.ops.quantize.quantized_tensor import QuantizedTensor


def check_gemm(
    lhs: Any,
    rhs: Any,
    rhs_shape: tuple[int, ...],
    group_sizes: Any,
    bias: Any,
    recipe: Any,
) -> None:
    """Raises InvalidArgumentError for operands that do not fit each other.

    `rhs_shape`: the shape of rhs after the all-gather. Manual axes of tensor parallelism still
    split K' and N', and the bias is checked in its local shape.
    """
    if recipe is not None:
        check_recipe(recipe, " or None")
    for name, x in (("lhs", lhs), ("rhs", rhs)):
        if not isinstance(x, QuantizedTensor) and not jnp.issubdtype(x.dtype, jnp.floating):
            raise InvalidArgumentError(
                f"{name} must be floating or a QuantizedTensor, got {x.dtype}",
                argument=name,
            )
    lead = jnp.ndim(group_sizes)
    if lead not in (1, 2) or not jnp.issubdtype(jnp.result_type(group_sizes), jnp.integer):
        raise InvalidArgumentError(
            "group_sizes must be integers [R, L] or [E], got "
            f"{jnp.result_type(group_sizes)}{list(jnp.shape(group_sizes))}",
            argument="group_sizes",
        )
    _check_shapes(tuple(lhs.shape), rhs_shape, tuple(group_sizes.shape))
    wanted = (rhs_shape[0], *rhs_shape[2:])
    if bias is not None and jnp.shape(bias) != wanted:
        raise InvalidArgumentError(
            f"bias must be [E, *N'] = {list(wanted)}, got {list(jnp.shape(bias))}",
            argument="bias",
        )
    for name, x, rows in (("lhs", lhs, True), ("rhs", rhs, False)):
        if isinstance(x, QuantizedTensor) and x.is_rows != rows:
            kind = "rows (with group_sizes)" if rows else "kernels (without group_sizes)"
            raise InvalidArgumentError(f"{name} must be quantized {kind}", argument=name)


def _check_shapes(lhs: tuple[int, ...], rhs: tuple[int, ...], sizes: tuple[int, ...]) -> None:
    slabs = len(sizes) == 2
    if len(lhs) != len(sizes) + 1 or (slabs and lhs[0] != sizes[0]):
        wanted = f"[{sizes[0]}, C, K']" if slabs else "[rows, K']"
        raise InvalidArgumentError(
            f"lhs must be {wanted} for group_sizes {list(sizes)}, got {list(lhs)}",
            argument="lhs",
        )
    if len(rhs) < 3 or rhs[1] != lhs[-1]:
        raise InvalidArgumentError(
            f"rhs must be [E, {lhs[-1]}, *N'] for lhs {list(lhs)}, got {list(rhs)}", argument="rhs"
        )
    if not slabs and rhs[0] != sizes[0]:
        raise InvalidArgumentError(
            f"group_sizes of [rows, K'] must be [{rhs[0]}], one per expert of rhs {list(rhs)}, "
            f"got {list(sizes)}",
            argument="group_sizes",
        )


def check_slabs_share(rhs: tuple[int, ...], sizes: tuple[int, ...]) -> None:
    """Raises InvalidArgumentError unless slabs [R, L] hold each expert of rhs equally often.

    Without a layer, group l of slab r belongs to expert (r * L + l) % E.
    """
    if len(sizes) != 2 or 0 in sizes or 0 in rhs[:1]:
        return
    (slabs, groups), experts = sizes, rhs[0]
    if experts % groups or slabs * groups % experts:
        raise InvalidArgumentError(
            f"group_sizes [{slabs}, {groups}] has {slabs * groups} groups in slabs of {groups}, "
            f"but rhs {list(rhs)} has {experts} experts: L must divide E, and E must divide R * L",
            argument="group_sizes",
        )


def check_delayed(recipe: Any, state: Any, *, plain: bool) -> None:
    """Raises InvalidArgumentError unless `state` is given exactly if the recipe is delayed."""
    delayed = recipe is not None and recipe.delayed
    if delayed and state is None:
        raise InvalidArgumentError(
            f"{recipe} needs state=, from recipe.init_state(num_experts) or an earlier call",
            argument="state",
        )
    if state is not None and not (delayed and plain):
        raise InvalidArgumentError(
            "state goes with recipe=TensorScaling(delayed=True) and plain operands alone, "
            f"got recipe {recipe}",
            argument="state",
        )


def check_experts(
    where: Partitioning, num_experts: int, group_sizes: Sequence[int], wanted: int
) -> None:
    """Raises InvalidArgumentError unless weight and group sizes (their dims) have the layer's
    experts."""
    assert where.roles is not None
    if num_experts != wanted:
        raise InvalidArgumentError(
            f"rhs has {num_experts} experts, {where.roles.owner} has {wanted}{_remedy(where)}",
            argument="rhs",
        )
    groups = wanted // where.roles.size(where.roles.ep)
    if group_sizes[1] != groups:
        raise InvalidArgumentError(
            f"group_sizes must be [R, {groups}] for the {wanted} experts of {where.roles.owner} "
            f"over {where.roles.named(where.roles.ep)}, got {list(group_sizes)}",
            argument="group_sizes",
        )


def _remedy(where: Partitioning) -> str:
    """Returns advice for a caller inside a shard_map, where rhs is a part of the weight."""
    if not where.manual or where.roles is None:
        return ""
    ep = where.roles.named(axis for axis in where.roles.ep if axis in where.manual)
    return (
        f": inside a shard_map over {', '.join(where.manual)} rhs counts as this device's part; "
        f"give it in_specs that split its expert dim over {ep}, and where other manual axes split "
        "it too, say so by rhs_spec (params_spec of ep.moe)"
    )
