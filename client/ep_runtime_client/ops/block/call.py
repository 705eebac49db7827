"""The block call on a GPU: one custom call of the CUDA library forward, one backward.

Both run per device, on local blocks without the slab dim. Rows of experts lie in a workspace, a
result of the call that nobody reads, while it runs. A call is a function of its operands alone.

Letters: T, K, H, M, R as in `ops/__init__.py`; L experts of a rank, C capacity, N columns of the
first product (2M gated, else M), W rows of the workspace, Wk rows of the first product that are
kept.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np

from ep_runtime import workspace
from ep_runtime.workspace import BlockSizes, Scaling
from ep_runtime_client.ops.activation import kernels as activation_kernels
from ep_runtime_client.ops.activation.function import Activation
from ep_runtime_client.ops.calls.call import Call
from ep_runtime_client.ops.calls.plan import AnyArrays
from ep_runtime_client.ops.gemm import kernels_8
from ep_runtime_client.ops.gemm.kernels_16 import flat_bias
from ep_runtime_client.ops.kernels.ffi import bound, ensure_registered, once, targets
from ep_runtime_client.ops.quantize.formats.recipes import DATA_DTYPES, Recipe
from ep_runtime_client.ops.quantize.formats.table import format_of
from ep_runtime_client.ops.quantize.formats.tiles import bits
from ep_runtime_client.ops.quantize.pair import Pair
from ep_runtime_client.ops.quantize.quantized_tensor import QuantizedTensor
from ep_runtime_client.ops.transports import windows

TARGETS = targets("ep_block_v1", "ep_block_bwd_v1")
_SCALINGS = get_args(Scaling)


@dataclasses.dataclass(frozen=True)
class Static:
    """What is static about a block call on one device. Hashable.

    Attributes:
        call: the op call: layer, layout, capacity, handle.
        activation: between the products; its dtype is that of rows everywhere.
        early: whether weights multiply activations, instead of outputs in combine.
        sizes: of a call with whole weights.
        rows: W.
        kept: rows of the first product that forward keeps for backward.
        recipe: that quantizes the operands of both products, or None.
    """

    call: Call
    activation: Activation
    early: bool
    sizes: BlockSizes
    rows: int
    kept: int
    recipe: Recipe | None = None

    def __repr__(self) -> str:
        """Equal in every process of a job: the call's mesh names devices."""
        meta = self.call.meta
        of_call = (meta.layout, meta.capacity, meta.handle, self.call.layer.base_id)
        of_rows = (self.sizes, self.rows, self.kept)
        return f"Static({of_call}, {self.activation}, {self.early}, {of_rows}, {self.recipe})"

    def here(self, inner: int) -> BlockSizes:
        """Sizes on a device that has `inner` of M."""
        return dataclasses.replace(self.sizes, mlp_dim=inner)


def scaling_of(recipe: Recipe | None) -> Scaling:
    """How its products scale their operands."""
    if recipe is None:
        return "none"
    return "tensor" if format_of(recipe).per_group else "block"


class Experts(NamedTuple):
    """Weights of the experts of one device, whole but for axes that split M.

    With a recipe wi and wo are QuantizedTensors of these shapes, wi in one array.

    Attributes:
        wi: [L, H, 2, M], [L, H, 2M], a Pair of [L, H, M], or [L, H, M] where it is not gated.
        wo: [L, M, H].
        wi_bias: [L, *N'], or None.
        wo_bias: [L, H], or None.
    """

    wi: jax.Array | Pair | QuantizedTensor
    wo: jax.Array | QuantizedTensor
    wi_bias: jax.Array | None
    wo_bias: jax.Array | None


class WeightGrads(NamedTuple):
    """How the gradients of wi and wo are made.

    Attributes:
        paired: gate and up of wi apart.
        dtype: theirs; None is that of rows.
    """

    paired: bool
    dtype: Any = None


class Given(NamedTuple):
    """What both directions take of one device.

    Attributes:
        rank: int32 [1].
        layer_index: int32 [1], of the layer in its stack.
        topk_idx: int32 [T, K].
        tokens: [T, H].
        weights: f32 [T, K].
        most: int32 [1], the most aligned rows that any rank keeps whose windows this one maps.
        plan: of `prepare`; of PlanArrays where it is between ranks that map each other's windows.
    """

    rank: jax.Array
    layer_index: jax.Array
    topk_idx: jax.Array
    tokens: jax.Array
    weights: jax.Array
    most: jax.Array
    plan: AnyArrays


class Gradients(NamedTuple):
    """Of one device; those of weights as `Experts` has them, of biases f32."""

    tokens: jax.Array
    weights: jax.Array
    wi: jax.Array | Pair
    wo: jax.Array
    wi_bias: jax.Array | None
    wo_bias: jax.Array | None


def forward(
    static: Static, given: Given, experts: Experts, sums: Any = None
) -> tuple[jax.Array, jax.Array]:
    """(y [T, H], rows of the first product that are kept [Wk, *N']).

    y is of the tokens' dtype, or `sums`: f32 where the group's sums are exact.
    """
    dtype, sizes = given.tokens.dtype, _sizes(experts)
    columns = experts.wi.shape[2:]
    results = (
        jax.ShapeDtypeStruct(given.tokens.shape, sums or dtype),
        jax.ShapeDtypeStruct(_kept_shape(static, sizes), dtype),
        _bytes(workspace.forward_bytes(static.here(sizes[1]), static.rows, static.kept)),
    )
    y, kept = _call(TARGETS[0], static, results, given, experts, scratch=2, held=1)
    return y, kept.reshape(static.kept, *columns)


def backward(
    static: Static,
    given: Given,
    experts: Experts,
    kept: jax.Array,
    made: jax.Array,
    dy: jax.Array,
    grads: WeightGrads,
    sums: Any = None,
) -> Gradients:
    """Gradients of what `forward` was given; dy [T, H]. `kept` is as it returned it, or anything
    of that shape where `made`, int32 [1], is 0. That of tokens is of their dtype, or `sums`."""
    dtype, sizes = given.tokens.dtype, _sizes(experts)
    hidden, inner, columns = sizes
    count, bias, pair = experts.wo.shape[0], experts.wi_bias, grads.paired
    wo_bias = _as_taken(experts.wo_bias, dtype)
    weight_dtype = dtype if grads.dtype is None else _made(grads.dtype)
    first = (count, hidden, columns // 2 if pair else columns)
    results = (
        jax.ShapeDtypeStruct(given.tokens.shape, sums or dtype),
        jax.ShapeDtypeStruct(given.weights.shape, jnp.float32),
        jax.ShapeDtypeStruct(first, weight_dtype),
        jax.ShapeDtypeStruct(first if pair else (0, 0, 0), weight_dtype),
        jax.ShapeDtypeStruct((count, inner, hidden), weight_dtype),
        jax.ShapeDtypeStruct((0, 0) if bias is None else (count, columns), jnp.float32),
        _bytes(workspace.backward_bytes(static.here(inner), static.rows)),
        *(jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in wo_bias),
    )
    kept = kept.reshape(_kept_shape(static, sizes))
    d_tokens, d_weights, d_wi, d_up, d_wo, d_bias, *d_wo_bias = _call(
        TARGETS[1],
        static,
        results,
        given,
        experts,
        *(kept, made, dy),
        scratch=6,
        held=2,
    )
    return Gradients(
        d_tokens,
        d_weights,
        Pair(d_wi, d_up) if pair else d_wi.reshape(experts.wi.shape),
        d_wo,
        None if bias is None else d_bias.reshape(bias.shape),
        d_wo_bias[0] if d_wo_bias else None,
    )


def _call(
    target: str,
    static: Static,
    results: Sequence[jax.ShapeDtypeStruct],
    given: Given,
    experts: Experts,
    *others: jax.Array,
    scratch: int,
    held: int,
) -> tuple[jax.Array, ...]:
    """The results but for one, the workspace, which is number `scratch`.

    The first `held` are for others than a stack of `scan` alone.
    """
    ensure_registered("cuda")
    *operands, plan = given
    bias = flat_bias(experts.wi_bias, experts.wo.shape[0])
    weights, scales = _weights(experts, forward=target == TARGETS[0])
    others = (*others, *scales, *_as_taken(experts.wo_bias, given.tokens.dtype))
    function = activation_kernels.attributes_of(static.activation)
    numbers = {"rows": static.rows, **function, "early": int(static.early)}
    numbers |= _numbers(static.recipe)
    attributes = windows.attributes(static.call)
    attributes |= {name: np.int64(value) for name, value in numbers.items()}
    made = jax.ffi.ffi_call(target, tuple(results))
    outs = list(made(*bound(*operands, *plan, *weights, bias, *others), **attributes))
    del outs[scratch]
    # What has no user but a stack is written into it at once: rows kept, gradients of weights.
    return (*once(tuple(outs[:held])), *outs[held:])


def _weights(experts: Experts, *, forward: bool) -> tuple[list[jax.Array], list[jax.Array]]:
    """The two operands of the first product, one array and an empty one or gate and up; then wo.
    And scales of quantized ones, whose contracted dim is along memory."""
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
        data.append(kernels_8.turned(weight) if forward else flat)
        lead = weight.scale.shape[:2]
        scales.append(weight.scale.reshape(*lead, *[-1] * (weight.scale.ndim > 1)))
    return [data[0], jnp.zeros((0, 0, 0), jnp.uint8), data[1]], scales


def _plain(wo: jax.Array | QuantizedTensor) -> jax.Array:
    assert not isinstance(wo, QuantizedTensor)
    return wo


def _numbers(recipe: Recipe | None) -> dict[str, int]:
    """Attributes of a recipe."""
    if recipe is None:
        return {}
    gradients = jnp.dtype(recipe.data_dtype(gradient=True)).name
    return {
        "scaling": _SCALINGS.index(scaling_of(recipe)),
        "e5m2": DATA_DTYPES.index(gradients),
        "power_of_two": int(format_of(recipe).power_of_two(recipe)),
    }


def _made(dtype: Any) -> Any:
    """What the kernels store of gradients of weights on the way to `dtype`."""
    return dtype if jnp.dtype(dtype) == jnp.bfloat16 else jnp.float32


def _as_taken(wo_bias: jax.Array | None, rows: Any) -> list[jax.Array]:
    """The bias of wo as an operand that may be absent: in the dtype of rows or f32."""
    if wo_bias is None:
        return []
    taken = wo_bias if wo_bias.dtype == rows else wo_bias.astype(jnp.float32)
    return [flat_bias(taken, wo_bias.shape[0])]


def _sizes(experts: Experts) -> tuple[int, int, int]:
    """H, M and N of this device."""
    _, inner, hidden = experts.wo.shape
    return hidden, inner, int(np.prod(experts.wi.shape[2:]))


def _kept_shape(static: Static, sizes: tuple[int, int, int]) -> tuple[int, int]:
    return (static.kept, sizes[2]) if static.kept else (0, 0)


def _bytes(count: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((count,), jnp.uint8)
