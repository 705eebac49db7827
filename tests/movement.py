"""Runs one Case through the ops and through the reference, and compares them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import cases
import fakes
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from references import movement as reference

import ep_runtime as ep
from ep_runtime import device_layout
from ep_runtime.specs import GroupSpec
from ep_runtime_client.base.layers import EpLayer

# In a group over nodes, the plan's other arrays describe how rows travel between nodes.
SAME_OVER_NODES = ("dst_rank", "dst_row", "kept", "group_sizes", "num_recv")
TOLERANCE = {"float32": 2e-6, "bfloat16": 4e-2, "float16": 6e-3, "float64": 1e-12}


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Global arrays of a case, as a user would hold them, and their slabs."""

    tokens: Any
    topk_idx: Any
    weights: Any
    cotangent: Any  # of tokens_out
    factors: Any  # [R, C, H]: what the "experts" multiply rows by


def axes_of(case: cases.Case, group: GroupSpec) -> tuple[tuple[str, ...], ...]:
    return case.split[:2] if case.split is not None else (group.token_axes,)


def lead_of(case: cases.Case, group: GroupSpec) -> tuple[int, ...]:
    if case.split is None:
        return (case.tokens * group.num_slabs,)
    sizes = group.axis_sizes
    return tuple(
        block * int(np.prod([sizes[a] for a in axes]))
        for axes, block in zip(case.split[:2], case.split[2:], strict=True)
    )


def _from_slabs(slabs: Any, lead: tuple[int, ...], axes: Any, group: GroupSpec) -> Any:
    """The inverse of reference.to_slabs, by moving numbered places."""
    slabs = np.asarray(slabs)
    places = np.arange(int(np.prod(lead))).reshape(*lead, 1)
    order = reference.to_slabs(places, axes, group).reshape(-1)
    flat = np.empty((order.size, slabs.shape[-1]), slabs.dtype)
    flat[order] = slabs.reshape(order.size, slabs.shape[-1])
    return flat.reshape(*lead, slabs.shape[-1])


def inputs_of(case: cases.Case, group: GroupSpec, capacity: int, seed: int = 0) -> Inputs:
    if case.split is not None:
        case = dataclasses.replace(case, tokens=case.split[2] * case.split[3])
    rng = np.random.default_rng(seed + 1)
    slabs, lead, axes = group.num_slabs, lead_of(case, group), axes_of(case, group)

    def draw(*shape: int) -> Any:
        return rng.standard_normal(shape).astype(case.dtype)

    idx = cases.routing(case, slabs, seed).astype(case.idx_dtype)
    weights = rng.uniform(0.1, 1.0, (*lead, case.top_k)).astype(np.float32)
    return Inputs(
        tokens=draw(*lead, case.hidden),
        topk_idx=_from_slabs(idx, lead, axes, group),
        weights=weights if case.weighted else None,
        cotangent=draw(*lead, case.hidden),
        factors=draw(slabs, capacity, case.hidden),
    )


def placed(inputs: Inputs, case: cases.Case, group: fakes.LocalGroup | ep.Group) -> Inputs:
    """The inputs as arrays on the mesh, laid out as the case says; a process makes its shards."""
    axes = axes_of(case, group.spec)
    token_spec = PartitionSpec(*(names or None for names in axes))

    def put(array: Any, spec: PartitionSpec) -> Any:
        if array is None:
            return None
        sharding = NamedSharding(group.mesh, spec)
        return jax.make_array_from_callback(array.shape, sharding, lambda part: array[part])

    slab_spec = PartitionSpec(group.spec.token_axes)
    return Inputs(
        tokens=put(inputs.tokens, token_spec),
        topk_idx=put(inputs.topk_idx, token_spec),
        weights=put(inputs.weights, token_spec),
        cotangent=put(inputs.cotangent, token_spec),
        factors=put(inputs.factors, slab_spec),
    )


def capacity_of(case: cases.Case, layer: EpLayer) -> int:
    from ep_runtime_client.ops.calls.call import resolve_capacity

    tokens = case.tokens if case.split is None else case.split[2] * case.split[3]
    return resolve_capacity(layer, tokens, case.capacity)


def spec_hint(case: cases.Case) -> PartitionSpec | None:
    """Returns the options a traced call needs if tokens are sharded on dims 0 and 1."""
    if case.split is None:
        return None
    return PartitionSpec(*(names or None for names in case.split[:2]))


def run_ops(
    layer: Any, case: cases.Case, inputs: Inputs, *, summed: bool = True, **options: Any
) -> dict[str, Any]:
    """Plan, rows, output and gradients through dispatch and combine, in one program.

    With `summed` they are of a loss, whose sum is a collective of XLA's.
    """

    def forward(tokens: Any, weights: Any, factors: Any, topk_idx: Any) -> Any:
        sent = ep.dispatch(
            layer,
            tokens,
            topk_idx,
            weights,
            capacity=case.capacity,
            tokens_spec=spec_hint(case),
            **options,
        )
        rows = jnp.tanh(sent.tokens) * factors
        out = ep.combine(layer, sent, rows, weights=sent.weights if case.weighted else None)
        return out, sent

    def loss(tokens: Any, weights: Any, factors: Any, cotangent: Any, topk_idx: Any) -> Any:
        out, sent = forward(tokens, weights, factors, topk_idx)
        return (out.astype(jnp.float32) * cotangent.astype(jnp.float32)).sum(), (out, sent)

    def pulled(tokens: Any, weights: Any, factors: Any, cotangent: Any, topk_idx: Any) -> Any:
        def moved(tokens: Any, given: Any = weights) -> Any:
            return forward(tokens, given, factors, topk_idx)

        primals = (tokens, weights) if case.weighted else (tokens,)
        out, pull, sent = jax.vjp(moved, *primals, has_aux=True)
        return (None, (out, sent)), pull(cotangent.astype(jnp.float32).astype(out.dtype))

    wrt = (0, 1) if case.weighted else (0,)
    both = jax.jit(jax.value_and_grad(loss, argnums=wrt, has_aux=True) if summed else pulled)
    # All arrays are arguments: a program must not close over an array of several processes.
    (_, (out, sent)), grads = both(
        inputs.tokens, inputs.weights, inputs.factors, inputs.cotangent, inputs.topk_idx
    )
    return {
        "plan": sent.plan.arrays._asdict(),
        "rows": sent.tokens,
        "row_weights": sent.weights,
        "out": out,
        "d_tokens": grads[0],
        "d_weights": grads[1] if case.weighted else None,
        "sent": sent,
    }


def run_reference(
    case: cases.Case, group: GroupSpec, inputs: Inputs, capacity: int
) -> dict[str, Any]:
    """Runs the reference on the same case; returns token arrays in the case's layout."""
    axes, lead = axes_of(case, group), lead_of(case, group)

    def slabs(array: Any) -> Any:
        return reference.to_slabs(np.asarray(array), axes, group)

    plan = reference.plan(
        np.asarray(reference.to_slabs(inputs.topk_idx, axes, group)),
        num_experts=group.num_experts,
        ep_size=group.ep_size,
        alignment=case.alignment,
        capacity=capacity,
    )

    def loss(tokens: Any, weights: Any) -> Any:
        rows, row_weights = reference.dispatch(plan, tokens, weights)
        out = reference.combine(
            plan,
            jnp.tanh(rows) * inputs.factors,
            row_weights if case.weighted else None,
            combine_precision=case.precision,
        )
        total = out.astype(jnp.float32) * slabs(inputs.cotangent).astype(jnp.float32)
        return total.sum(), (rows, row_weights, out)

    given = None if inputs.weights is None else slabs(inputs.weights)
    wrt = (0, 1) if case.weighted else (0,)
    both = jax.jit(jax.value_and_grad(loss, argnums=wrt, has_aux=True))
    (_, (rows, row_weights, out)), grads = both(slabs(inputs.tokens), given)
    arrays = plan.arrays
    if device_layout.count_columns(group, plan.slab.shape[1]) > 4:
        counts = reference.with_pair_counts(arrays["recv_count"], group.ep_size)
        arrays = arrays | {"recv_count": counts}
    return {
        "plan": arrays,
        "rows": rows,
        "row_weights": row_weights,
        "in_zone": plan.in_zone,
        "out": _from_slabs(out, lead, axes, group),
        "d_tokens": _from_slabs(grads[0], lead, axes, group),
        "d_weights": _from_slabs(grads[1], lead, axes, group) if case.weighted else None,
    }


def run_case(
    case: cases.Case,
    group: fakes.LocalGroup | ep.Group,
    of_dtype: Mapping[str, float] = TOLERANCE,
    *,
    summed: bool = True,
) -> dict[str, Any]:
    """Runs the case in the group, compares this process's shards, and returns the ops' results.

    Integers and rows must be equal, sums within the tolerance of their dtype.
    """
    layer = group.register_layer("moe", top_k=case.top_k)
    capacity = capacity_of(case, layer)
    inputs = inputs_of(case, group.spec, capacity)
    got = run_ops(layer, case, placed(inputs, case, group), summed=summed)
    # The reference unrolls ranks and slots: with many, compiling takes longer than running.
    unrolled = jax.disable_jit(case.top_k > 8)
    with jax.default_device(jax.local_devices(backend="cpu")[0]), unrolled:
        want = run_reference(case, group.spec, inputs, capacity)
    for name in SAME_OVER_NODES if group.spec.node_size else want["plan"]:
        for _, mine, wanted in _shards(got["plan"][name], want["plan"][name]):
            np.testing.assert_array_equal(mine, wanted, err_msg=f"{case.name}: {name}")
    for index, mine, wanted in _shards(got["rows"], want["rows"]):
        zone = want["in_zone"][index[:2]]
        np.testing.assert_array_equal(mine[zone], wanted[zone], err_msg=f"{case.name}: rows")
    for _, mine, wanted in _shards(got["row_weights"], want["row_weights"]):
        np.testing.assert_array_equal(mine, wanted, err_msg=f"{case.name}: row weights")
    tolerance = case.tolerance(of_dtype)
    for name in ("out", "d_tokens", "d_weights") if case.weighted else ("out", "d_tokens"):
        for _, mine, wanted in _shards(got[name], want[name]):
            np.testing.assert_allclose(
                mine.astype(np.float64),
                wanted.astype(np.float64),
                rtol=tolerance,
                atol=tolerance * (case.hidden**0.5 if name == "d_weights" else case.top_k),
                err_msg=f"{case.name}: {name}",
            )
    return got


def _shards(got: jax.Array, want: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Yields this process's shards of an array: (index, values, wanted values)."""
    want = np.asarray(want)
    assert got.shape == want.shape
    for shard in got.addressable_shards:
        yield shard.index, np.asarray(shard.data), want[shard.index]
