"""Sums of every expert's rows on a GPU, the gradient of a bias: a custom call of the CUDA library.

The call supports f32, bf16 and f16 whose trailing dims are a multiple of 16 bytes. Letters as in
`plain.py`.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from ep_runtime_client.ops.gemm.product import Product
from ep_runtime_client.ops.kernels import serve as kernels_serve
from ep_runtime_client.ops.kernels.ffi import targets
from ep_runtime_client.ops.quantize.quantized_tensor import QuantizedTensor

TARGETS = targets("ep_group_sums_v1")


def supports(product: Product) -> bool:
    """Whether the call supports these rows, in a program that is lowered for a GPU."""
    grad, experts = product.left, product.experts
    if isinstance(grad, QuantizedTensor) or product.cast not in (None, grad.dtype) or experts < 1:
        return False
    if grad.dtype not in kernels_serve.FLOATS or not kernels_serve.available():
        return False
    width = math.prod(product.features)
    many = experts <= kernels_serve.MAX_SLABS
    return many and width > 0 and kernels_serve.supports(product.groups, grad, width=width)


def bias_grad(experts: int, grad: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """Like `plain.bias_grad`: f32 [G, *N']."""
    lead = group_sizes.ndim
    rows = grad.reshape(math.prod(grad.shape[:lead]), -1)
    result = jax.ShapeDtypeStruct((experts, rows.shape[1]), jnp.float32)
    operands = (kernels_serve.sizes_of(group_sizes), rows)
    (sums,) = kernels_serve.call(TARGETS[0], (result,), operands)
    return sums.reshape(experts, *grad.shape[lead:])
