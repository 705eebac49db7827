"""The experts of one call of `moe`, and their weights as ops take them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ep_runtime_client.moe.params import MoEParams
from ep_runtime_client.ops.activation.function import Activation
from ep_runtime_client.ops.gemm import quantized_operands
from ep_runtime_client.ops.partitioning.roles import entries_of
from ep_runtime_client.ops.partitioning.scatter import gather
from ep_runtime_client.ops.quantize.formats.recipes import Recipe
from ep_runtime_client.ops.quantize.pair import is_pair, paired
from ep_runtime_client.ops.quantize.quantized_tensor import QuantizedTensor
from ep_runtime_client.ops.routing.api import Routing
from ep_runtime_client.ops.tracing.varying import Axes


@dataclasses.dataclass(frozen=True)
class Block:
    """The experts of one call.

    Attributes:
        activation: between the matmuls; its dtype is that of rows everywhere.
        recipes: of wi and wo.
        specs: PartitionSpec of each parameter by name, None where it is not known.
        token_axes: those of the group.
        values: traced ones that the activation reads.
    """

    activation: Activation
    recipes: tuple[Recipe | None, Recipe | None]
    specs: Mapping[str, PartitionSpec | None]
    token_axes: Axes
    values: tuple[jax.Array, ...] = ()


@dataclasses.dataclass(frozen=True)
class Moved:
    """What moves in one call, and how.

    Attributes:
        tokens: [..., H], in the dtype of rows.
        routed: where to.
        handle, capacity, tokens_spec: as in `dispatch`.
    """

    tokens: jax.Array
    routed: Routing
    handle: int
    capacity: int | None
    tokens_spec: PartitionSpec | None


def bias_of(block: Block, name: str, params: MoEParams) -> jax.Array | None:
    """A bias with the trailing dims of its kernel, whole over manual axes that shard tokens."""
    bias: Any = getattr(params, name)
    if bias is None:
        return None
    if is_pair(bias):
        return jnp.stack([_gathered(block, name, each) for each in bias], 1)
    bias = _gathered(block, name, bias)
    wi: Any = params.wi
    if name == "wi_bias" and bias.ndim != wi.ndim - 1:
        bias = bias.reshape(bias.shape[0], *wi.shape[2:])
    found: jax.Array = bias
    return found


def _gathered(block: Block, name: str, bias: jax.Array) -> jax.Array:
    manual = jax.sharding.get_abstract_mesh().manual_axes
    for dim, axes in enumerate(entries_of(block.specs[name], bias.ndim)):
        over = tuple(axis for axis in axes if axis in manual and axis in block.token_axes)
        if over and dim:
            bias = gather(bias, over, dim)
    return bias


def operand(kernel: Any, recipe: Recipe | None, dtype: Any) -> Any:
    """The kernel as the matmul takes it: a recipe quantizes the parameter itself."""
    kernel = paired(kernel, "params.wi")
    if isinstance(kernel, QuantizedTensor):
        return quantized_operands.with_gradient(kernel)
    return kernel.astype(dtype) if recipe is None else kernel
