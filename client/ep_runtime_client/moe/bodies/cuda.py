"""The body of `ep.moe` on a GPU: one custom call of the CUDA library forward, one backward.

The rows of experts are in a workspace, a result of the call that is unused afterwards.

Letters: `protocol.py`; W rows of the workspace, Wk saved rows of the first matmul.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np

from ep_runtime import workspace
from ep_runtime.workspace import Scaling
from ep_runtime_client.moe.bodies.protocol import (
    Experts,
    Forwarded,
    Given,
    Gradients,
    Over,
    WeightGrads,
)
from ep_runtime_client.moe.copies import at_home, with_copies
from ep_runtime_client.moe.resolved import ResolvedCall, Saved, WorkspaceRows
from ep_runtime_client.ops.activation import kernels as activation_kernels
from ep_runtime_client.ops.gemm import kernel_weights, kernels_8, kernels_16, kernels_32
from ep_runtime_client.ops.gemm.kernels_16 import flat_bias
from ep_runtime_client.ops.kernels.ffi import targets
from ep_runtime_client.ops.quantize.formats.recipes import DATA_DTYPES, Recipe
from ep_runtime_client.ops.quantize.formats.table import format_of
from ep_runtime_client.ops.quantize.formats.tiles import bits
from ep_runtime_client.ops.quantize.pair import Pair
from ep_runtime_client.ops.quantize.quantized_tensor import QuantizedTensor
from ep_runtime_client.ops.transports import windows
from ep_runtime_client.ops.transports.protocol import DeviceCall

TARGETS = targets("ep_block_v1", "ep_block_bwd_v1")
# The same, while arrays cross between nodes.
BESIDE = targets("ep_nccl_block_v1", "ep_nccl_block_bwd_v1")
_SCALINGS = get_args(Scaling)


class Crossing(NamedTuple):
    """Arrays of this device that cross between nodes while a call runs.

    Attributes:
        gathered: arrays [...] that every node gets: [D, ...] arrive.
        blocks: arrays [D, ...], with a block for each node: [D, ...] arrive.
        counts: int32 [4, D] if only counted rows cross, as in `between_nccl.rail_counted`: of
            `gathered`, which is lined up, rows to and from each node, then those of `blocks`.
        rows: with counts, rows of a block of `gathered`, and of all `blocks` lined up, that arrive.
    """

    gathered: tuple[jax.Array, ...]
    blocks: tuple[jax.Array, ...]
    counts: jax.Array | None = None
    rows: tuple[int, int] = (0, 0)


def scaling_of(recipe: Recipe | None) -> Scaling:
    """Returns how the matmuls of a recipe scale their operands."""
    if recipe is None:
        return "none"
    return "tensor" if format_of(recipe).per_group else "block"


def saved(call: ResolvedCall) -> tuple[Saved, ...]:
    return ("hidden", "made") if _workspace(call).saved else ()


def multiple(call: ResolvedCall, *, paired: bool) -> int:
    return multiple_of(call.activation.dtype, call.recipes[0], paired=paired)


def multiple_of(dtype: Any, recipe: Recipe | None, *, paired: bool) -> int:
    """Returns the number that must divide a device's M, and H, with rows of `dtype`."""
    plain = kernels_32 if dtype == jnp.float32 else kernels_16
    one = plain.MULTIPLE if recipe is None else kernels_8.MULTIPLE
    each = kernel_weights.MULTIPLE if paired else one
    # A block of scales ends with gate, and with a weight's shard of M.
    return max(each, one, format_of(recipe).tile)


def _workspace(call: ResolvedCall) -> WorkspaceRows:
    assert call.workspace is not None
    return call.workspace


def packs(call: ResolvedCall) -> bool:
    """Whether tokens are quantized before they are sent; without a bias of wo, gradients too."""
    return _workspace(call).sizes.packed_bytes > 0


def forward(
    call: ResolvedCall,
    given: Given,
    experts: Experts,
    over: Over,
    crossing: Crossing | None = None,
) -> Forwarded:
    """Runs the forward call, while the arrays of `crossing` cross between nodes. Tokens may be
    packed (`quantized_rows.packed`) if the call `packs`."""
    experts = _with_biases(call, given, experts)
    dtype, sizes, room = call.activation.dtype, _sizes(experts), _workspace(call)
    results = (
        jax.ShapeDtypeStruct((len(given.tokens), sizes[0]), call.sums or dtype),
        jax.ShapeDtypeStruct(_saved_shape(room, sizes), dtype),
        _bytes(workspace.forward_bytes(room.here(sizes[1]), room.rows, room.saved)),
    )
    y, hidden, *arrived = _call(0, call, results, given, experts, scratch=2, crossing=crossing)
    kept = (hidden.reshape(room.saved, *experts.wi.shape[2:]), jnp.ones(1, jnp.int32))
    return Forwarded(y, kept if room.saved else (), arrived=tuple(arrived))


def backward(
    call: ResolvedCall,
    given: Given,
    experts: Experts,
    saved: tuple[jax.Array, ...],
    dy: jax.Array,
    grads: WeightGrads,
    over: Over,
    crossing: Crossing | None = None,
    sums: Gradients | None = None,
) -> Gradients:
    """Runs the backward call. If `made`, int32 [1], is 0, the saved rows are undefined. If tokens
    are packed and the call sends dy packed, dy must be packed too.

    With `crossing`, as of `forward`, gradients of weights are in f32 like those of biases, and
    those of `sums` are added."""
    experts = _with_biases(call, given, experts)
    dtype, sizes, room = call.activation.dtype, _sizes(experts), _workspace(call)
    hidden, inner, columns = sizes
    count, bias, pair = experts.wo.shape[0], experts.wi_bias, grads.paired
    wo_bias = _as_taken(experts.wo_bias, dtype)
    weight_dtype = jnp.float32 if crossing else made_dtype(grads, dtype)
    nothing, wanted = (0, 0, 0), grads.wanted
    first = (count, hidden, columns // 2 if pair else columns) if wanted else nothing
    results = (
        jax.ShapeDtypeStruct((len(given.tokens), hidden), call.sums or dtype),
        jax.ShapeDtypeStruct(given.weights.shape, jnp.float32),
        jax.ShapeDtypeStruct(first, weight_dtype),
        jax.ShapeDtypeStruct(first if pair else nothing, weight_dtype),
        jax.ShapeDtypeStruct((count, inner, hidden) if wanted else nothing, weight_dtype),
        jax.ShapeDtypeStruct((0, 0) if bias is None else (len(bias), columns), jnp.float32),
        _bytes(workspace.backward_bytes(room.here(inner), room.rows)),
        *(jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in wo_bias),
    )
    kept, filled = saved or (jnp.zeros(0, dtype), jnp.zeros(1, jnp.int32))
    kept = kept.reshape(_saved_shape(room, sizes))
    d_tokens, d_weights, d_wi, d_up, d_wo, d_bias, *others = _call(
        1,
        call,
        results,
        given,
        experts,
        *(kept, filled, dy),
        scratch=6,
        crossing=crossing,
        added=_by_result(sums),
    )
    d_wo_bias, arrived = others[: len(wo_bias)], others[len(wo_bias) :]
    of_wi = Pair(d_wi, d_up) if pair or not wanted else d_wi.reshape(experts.wi.shape)
    biases = (
        None if bias is None else d_bias.reshape(bias.shape),
        d_wo_bias[0] if d_wo_bias else None,
    )
    biases = at_home(_at(call, given), given.copies, biases, jnp.add)
    wi, wo = (of_wi, d_wo) if wanted else (None, None)
    return Gradients(d_tokens, d_weights, wi, wo, *biases, arrived=tuple(arrived))


def _by_result(sums: Gradients | None) -> dict[int, jax.Array]:
    """Returns the gradients of weights and biases by the results of the backward call."""
    if sums is None:
        return {}
    wi = (sums.wi.gate, sums.wi.up) if isinstance(sums.wi, Pair) else (sums.wi, None)
    found = dict(zip((2, 3, 4, 5, 7), (*wi, sums.wo, sums.wi_bias, sums.wo_bias), strict=True))
    return {number: x for number, x in found.items() if x is not None}


def _with_biases(call: ResolvedCall, given: Given, experts: Experts) -> Experts:
    """Appends the biases of copied experts; the call itself copies their weights."""
    biases = (experts.wi_bias, experts.wo_bias)
    wi_bias, wo_bias = with_copies(_at(call, given), given.copies, biases)
    return experts._replace(wi_bias=wi_bias, wo_bias=wo_bias)


def _at(call: ResolvedCall, given: Given) -> DeviceCall:
    return DeviceCall(call.moved, given.rank, given.layer_index)


def _call(
    direction: int,
    call: ResolvedCall,
    results: Sequence[jax.ShapeDtypeStruct],
    given: Given,
    experts: Experts,
    *others: jax.Array,
    scratch: int,
    crossing: Crossing | None,
    added: dict[int, jax.Array] | None = None,
) -> tuple[jax.Array, ...]:
    """Returns the call's results without its workspace, the result at index `scratch`, then the
    arrays that crossed.

    Args:
        direction: 0 forward, 1 backward.
        added: arrays to which results are added, by the results' numbers.
    """
    *operands, plan, _, copies = given
    weights, scales = _weights(experts, forward=direction == 0)
    scales = with_copies(_at(call, given), copies, scales)
    of_wi = experts.wi_bias
    bias = flat_bias(of_wi, 0 if of_wi is None else len(of_wi))
    slots = jnp.zeros((0, 0), jnp.int32) if copies is None else copies
    others = (*others, *scales, *_as_taken(experts.wo_bias, call.activation.dtype))
    function = activation_kernels.attributes_of(call.activation)
    numbers = {"rows": _workspace(call).rows, **function}
    numbers |= {"early": int(call.weighted == "hidden"), **_numbers(call.recipes[0])}
    numbers |= windows.row_alignment(call.moved)
    taken = [*operands, *plan, *weights, bias, slots, *others]
    # Saved rows and weights' gradients go directly into a scan's stack, as nothing else reads them.
    target = TARGETS[direction]
    more: dict[str, Any] = {"held": (1, 2)[direction]}
    if crossing is not None:
        target, group, added = BESIDE[direction], call.moved.group, added or {}
        more = {"aliases": {len(taken) + at: number for at, number in enumerate(added)}}
        arrays = (*crossing.gathered, *crossing.blocks)
        numbers |= {"crossing": len(arrays), "added": len(added)}
        numbers |= {"node_size": group.ranks_per_node}
        taken += [x.reshape(results[number].shape) for number, x in added.items()]
        counts, (block, lined_up) = crossing.counts, crossing.rows
        taken += [jnp.zeros((0, 0), jnp.int32) if counts is None else counts, *arrays]
        whole: list[tuple[int, ...]] = []
        for x in crossing.gathered:
            rows = x.shape if counts is None else (block, *x.shape[1:])
            whole.append((group.num_nodes, *rows))
        for x in crossing.blocks:
            whole.append(x.shape if counts is None else (lined_up, *x.shape[2:]))
        pairs = zip(whole, arrays, strict=True)
        results = [*results, *(jax.ShapeDtypeStruct(dims, x.dtype) for dims, x in pairs)]
    made = windows.native_call(call.moved, target, results, *taken, **more, **numbers)
    return (*made[:scratch], *made[scratch + 1 :])


def _weights(experts: Experts, *, forward: bool) -> tuple[list[jax.Array], list[jax.Array]]:
    """Returns both operands of the first matmul (one array and an empty one, or gate and up), then
    wo; and the scales of quantized weights, which have the contracted dim contiguous in memory."""
    wi, wo, data, scales = experts.wi, experts.wo, [], []
    if isinstance(wi, Pair):
        return [wi.gate, wi.up, _plain(wo)], []
    if not isinstance(wi, QuantizedTensor):
        return [wi.reshape(*wi.shape[:2], -1), jnp.zeros((0, 0, 0), wi.dtype), _plain(wo)], []
    for weight in (wi, wo):
        assert isinstance(weight, QuantizedTensor)
        assert weight.scale is not None
        count, contracted = weight.shape[:2]
        flat = bits(weight.data).reshape(count, contracted, -1)
        data.append(kernels_8.transposed_weights(weight) if forward else flat)
        lead = weight.scale.shape[:2]
        scales.append(weight.scale.reshape(*lead, *[-1] * (weight.scale.ndim > 1)))
    return [data[0], jnp.zeros((0, 0, 0), jnp.uint8), data[1]], scales


def _plain(wo: jax.Array | QuantizedTensor) -> jax.Array:
    assert not isinstance(wo, QuantizedTensor)
    return wo


def _numbers(recipe: Recipe | None) -> dict[str, int]:
    """Returns the attributes that describe a recipe."""
    if recipe is None:
        return {}
    gradients = jnp.dtype(recipe.data_dtype(gradient=True)).name
    return {
        "scaling": _SCALINGS.index(scaling_of(recipe)),
        "e5m2": DATA_DTYPES.index(gradients),
        "power_of_two": int(format_of(recipe).power_of_two(recipe)),
    }


def made_dtype(grads: WeightGrads, rows: Any) -> Any:
    """Returns the dtype that kernels store for weights' gradients, before a cast to its dtype."""
    if grads.dtype is None:
        return rows
    return grads.dtype if jnp.dtype(grads.dtype) == jnp.bfloat16 else jnp.float32


def _as_taken(wo_bias: jax.Array | None, rows: Any) -> list[jax.Array]:
    """Returns the bias of wo as an optional operand: in the dtype of rows or f32."""
    if wo_bias is None:
        return []
    taken = wo_bias if wo_bias.dtype == rows else wo_bias.astype(jnp.float32)
    return [flat_bias(taken, wo_bias.shape[0])]


def _sizes(experts: Experts) -> tuple[int, int, int]:
    """Returns H, M and N of this device."""
    _, inner, hidden = experts.wo.shape
    return hidden, inner, int(np.prod(experts.wi.shape[2:]))


def _saved_shape(room: WorkspaceRows, sizes: tuple[int, int, int]) -> tuple[int, int]:
    return (room.saved, sizes[2]) if room.saved else (0, 0)


def _bytes(count: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((count,), jnp.uint8)
