"""dense: one matmul of the blocks around the experts, under the same sharding rules."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ep_runtime.errors import InvalidArgumentError
from ep_runtime_client.base.layers import EpLayer, TracedLayer
from ep_runtime_client.ops.dense import ops
from ep_runtime_client.ops.partitioning import on_mesh, regions
from ep_runtime_client.ops.partitioning.roles import Entries, padded
from ep_runtime_client.ops.quantize import ops as quantize_ops
from ep_runtime_client.ops.quantize.formats.recipes import Recipe, check_recipe
from ep_runtime_client.ops.quantize.quantized_tensor import Matrix, Packing, pack, unpack
from ep_runtime_client.ops.tracing import eager, first_order
from ep_runtime_client.ops.tracing.varying import varied_axes


def dense(
    x: jax.Array,
    kernel: jax.Array,
    *,
    layer: EpLayer | TracedLayer | None = None,
    bias: jax.Array | None = None,
    recipe: Recipe | None = None,
) -> jax.Array:
    """Multiplies x by a kernel that may be sharded over the same mesh axes as the rows of x.

    Args:
        x: [..., K'], any float dtype, with any axes on its leading dims; they stay there.
        kernel: [K', N']. It is all-gathered over axes that also shard x's leading dims (and over
            the minor axes of a tuple such as ('fsdp', 'expert')), after quantization if there is a
            recipe. Other axes stay on N', or are summed over on K'.
        layer: the layer whose mesh the sharding rules use; None reads it from the operands.
        bias: [N'] or None, added once, after any sum.
        recipe: how both operands are quantized, in backward too; x is one group.

    Returns:
        [..., N'] in x's dtype, bf16 with BF16(), summed in f32. Differentiable in x, kernel and
        bias.

    Raises:
        InvalidArgumentError: shapes or dtypes do not fit.
        NotImplementedError: under a vmap, as in `dispatch`, or a second derivative.

    Cost: one all-gather of the kernel forward and one backward, and one reduce-scatter of its
    gradient, over the axes that it shares with the rows; never one of an activation.

    Source: gathering weights before use is fully sharded data parallelism, ZeRO's third stage
    (arXiv:1910.02054).
    """
    if jnp.ndim(x) == 1:
        return dense(x[None], kernel, layer=layer, bias=bias, recipe=recipe)[0]
    _check(x, kernel, bias, recipe)
    if recipe is not None and not recipe.quantizes:
        x, kernel, recipe = x.astype(jnp.bfloat16), kernel.astype(jnp.bfloat16), None
    call = _call(x, kernel, bias, layer, recipe)
    operands = [
        regions.settle(call.where, array, entries)
        for array, entries in ((x, call.x), (kernel, call.kernel), (bias, padded((), 1)))
    ]
    return eager.run(_primal, call, *operands, traced=_dense)


def _check(x: Any, kernel: Any, bias: Any, recipe: Any) -> None:
    shape = tuple(jnp.shape(kernel))
    if jnp.ndim(x) < 2 or len(shape) != 2 or jnp.shape(x)[-1] != shape[0]:
        raise InvalidArgumentError(
            f"kernel must be [K', N'] for x [..., K'], got {list(shape)} for {list(jnp.shape(x))}",
            argument="kernel",
        )
    for name, array in (("x", x), ("kernel", kernel)):
        if not jnp.issubdtype(jnp.result_type(array), jnp.floating):
            raise InvalidArgumentError(
                f"{name} must be floating, got {jnp.result_type(array)}", argument=name
            )
    if bias is not None and jnp.shape(bias) != shape[1:]:
        raise InvalidArgumentError(
            f"bias must be [N'] = {list(shape[1:])}, got {list(jnp.shape(bias))}", argument="bias"
        )
    if recipe is not None:
        check_recipe(recipe, " or None")
    if recipe is not None and recipe.delayed:
        raise InvalidArgumentError(
            "recipe must be one without a state here, got TensorScaling(delayed=True)",
            argument="recipe",
        )


@dataclasses.dataclass(frozen=True)
class DenseCall:
    """The static argument of one call. Hashable.

    Attributes:
        where: the mesh axes and the mode in which the call runs.
        recipe: how operands and gradients are quantized; None does not quantize.
        x: mesh axes on each dim of x, if known.
        kernel: mesh axes on each dim of the kernel, if known.
        types: mesh axes that gradients of x, kernel and bias must have in their types.
        dtype: of the result.
    """

    where: regions.Partitioning
    recipe: Recipe | None
    x: Entries
    kernel: Entries
    types: tuple[Entries | None, ...]
    dtype: Any


def _call(
    x: jax.Array,
    kernel: jax.Array,
    bias: jax.Array | None,
    layer: EpLayer | TracedLayer | None,
    recipe: Recipe | None,
) -> DenseCall:
    operands = [array for array in (x, kernel, bias) if array is not None]
    x_entries = regions.known_entries(x, x.ndim)
    kernel_entries = regions.known_entries(kernel, 2)
    known = x_entries is not None and kernel_entries is not None
    where = regions.of_call(layer, operands, known=known)
    if layer is not None:
        if where.manual:
            # The partitioner shards x over axes that are not manual.
            varying = tuple(sorted(varied_axes(*operands)))
            where = dataclasses.replace(where, mode="local", varying=varying)
        elif x_entries is None and where.roles is not None:
            x_entries = padded((where.roles.slab,), x.ndim)  # sharded like tokens
    if where.mode == "local":
        x_entries, kernel_entries = None, None
    types = tuple(regions.type_of(array) for array in (x, kernel, bias))
    return DenseCall(
        where,
        recipe,
        x_entries or padded((), x.ndim),
        kernel_entries or padded((), 2),
        types,
        jnp.dtype(x.dtype),
    )


def _primal(call: DenseCall, x: jax.Array, kernel: jax.Array, bias: jax.Array | None) -> jax.Array:
    return _forward(call, *_multiplied(call, x, kernel), bias)


def _multiplied(call: DenseCall, x: jax.Array, kernel: jax.Array) -> tuple[Matrix, Matrix]:
    """Returns the operands of the GEMM: quantized by a recipe if any, 8-bit floats as uint8."""
    if call.recipe is None:
        return x, kernel
    packing = quantize_ops.packing_of(call.recipe, 3, rows=False)
    x_packing = dataclasses.replace(packing, ndim=x.ndim)
    w_packing = dataclasses.replace(packing, ndim=2)
    x_op = ops.QuantizeX(call.where, call.recipe, x_packing)
    w_op = ops.QuantizeW(call.where, call.recipe, w_packing)
    q_x = unpack(x_packing, on_mesh.run_on_mesh(x_op, (call.x,), x))
    q_w = unpack(w_packing, on_mesh.run_on_mesh(w_op, (call.kernel,), kernel))
    return quantize_ops.tagged(q_x, "ep_q_x"), quantize_ops.tagged(q_w, "ep_q_w")


def _packed(
    call: DenseCall, x: Matrix, kernel: Matrix, bias: jax.Array | None, *, columns: bool = False
) -> tuple[Packing, Packing, list[Entries], list[jax.Array]]:
    """Returns (packing of x, packing of the kernel, entries of all operands, the operands)."""
    packings: list[Packing] = []
    arrived: list[Entries] = []
    operands: list[jax.Array] = []
    for each, entries in ((x, call.x), (kernel, call.kernel)):
        leaves, packing = pack(quantize_ops.from_raw(each, rows=False), rows=False, columns=columns)
        packings.append(packing)
        arrived += ops.leaf_entries(packing, entries)
        operands += leaves
    if bias is not None:
        arrived.append(padded((), 1))
        operands.append(bias)
    return packings[0], packings[1], arrived, operands


def _forward(call: DenseCall, x: Matrix, kernel: Matrix, bias: jax.Array | None) -> jax.Array:
    x_packing, k_packing, arrived, operands = _packed(call, x, kernel, bias)
    op = ops.DenseForward(call.where, x_packing, k_packing, bias is not None, call.dtype)
    return on_mesh.run_on_mesh(op, tuple(arrived), *operands)[0]


def _fwd(call: DenseCall, *operands: Any) -> Any:
    return eager.shared(_forward_and_saved, call, *operands)


def _forward_and_saved(
    call: DenseCall, x: jax.Array, kernel: jax.Array, bias: jax.Array | None
) -> Any:
    q_x, q_kernel = _multiplied(call, x, kernel)
    likes = tuple(jnp.zeros((), array.dtype) for array in (x, kernel))
    y = _forward(call, q_x, q_kernel, bias)
    return y, (q_x, q_kernel, bias, likes)


def _bwd(call: DenseCall, saved: Any, grad: jax.Array) -> Any:
    grads = eager.shared(_pullback, call, saved, grad)
    return tuple(regions.typed_as(*each) for each in zip(grads, call.types, strict=True))


def _pullback(call: DenseCall, saved: Any, grad: jax.Array) -> Any:
    """Computes gradients of x, kernel and bias."""
    x, kernel, bias, likes = saved
    x_packing, k_packing, arrived, operands = _packed(call, x, kernel, bias, columns=True)
    op = ops.DenseBackward(
        call.where,
        x_packing,
        k_packing,
        bias is not None,
        likes[0].dtype,
        call.recipe,
        likes[1].dtype,
        None if bias is None else bias.dtype,
    )
    arrived.append(padded((), grad.ndim))
    d_x, d_kernel, *d_bias = on_mesh.run_on_mesh(op, tuple(arrived), *operands, grad)
    return d_x, d_kernel, d_bias[0] if d_bias else None


_dense = jax.custom_vjp(_primal, nondiff_argnums=(0,))
first_order.defvjp("dense", _dense, _fwd, _bwd)
