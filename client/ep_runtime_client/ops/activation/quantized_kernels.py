"""The experts' activation as 8-bit floats on a GPU: custom calls of the CUDA library.

Results equal `kernels.py` followed by `quantize/kernels.py` bit for bit, but the activated values
are not stored in 16 bits. The kernels support bf16 and f16 rows and recipes without a column-wise
copy. Letters as in `plain.py`, W as in `quantize/kernels.py`.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from ep_runtime_client.ops.activation import kernels
from ep_runtime_client.ops.kernels import serve as kernels_serve
from ep_runtime_client.ops.kernels.ffi import targets
from ep_runtime_client.ops.quantize.formats.recipes import DATA_DTYPES, TILE, Recipe
from ep_runtime_client.ops.quantize.formats.table import format_of
from ep_runtime_client.ops.quantize.formats.tiles import from_bits, num_tiles

if TYPE_CHECKING:
    from ep_runtime_client.ops.activation.function import Activation

TARGETS = targets("ep_activation_amax_v1", "ep_quantize_activation_v1")
_F32 = jnp.dtype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class ActivationOperands:
    """The operands of an activation whose result is quantized.

    Attributes:
        activation: the activation.
        hidden: [S, C, ...] as `plain.forward` takes it.
        row_weights: [S, C] f32 or None.
        group_sizes: [S, L] int32.
        grad: [S, C, M], to quantize the gradients of hidden; None quantizes the activated rows.
    """

    activation: Activation
    hidden: jax.Array
    row_weights: jax.Array | None
    group_sizes: jax.Array
    grad: jax.Array | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the quantized array."""
        if self.grad is not None:
            return tuple(self.hidden.shape)
        return (*self.hidden.shape[:2], self.width)

    @property
    def width(self) -> int:
        """M, the number of values in an activated row."""
        return kernels.width_of(self.activation, self.hidden)

    def operands(self) -> tuple[jax.Array, ...]:
        rows = math.prod(self.hidden.shape[:2])
        none = jnp.zeros((0, 0), self.hidden.dtype)
        given = none if self.grad is None else self.grad.astype(none.dtype).reshape(rows, -1)
        weights = kernels.weights_of(self.row_weights)
        sizes = kernels_serve.sizes_of(self.group_sizes)
        return (sizes, self.hidden.reshape(rows, -1), weights, given)


def supports(
    static: Activation,
    recipe: Recipe | None,
    hidden: jax.Array,
    group_sizes: jax.Array | None = None,
    *,
    gradient: bool = False,
) -> bool:
    """Whether the kernels support these rows in a program that is lowered for a GPU.

    Without group_sizes: whether there are kernels for the dtype of hidden, whatever its shape.
    """
    form = format_of(recipe)
    if recipe is None or recipe.delayed or form.on_gpu is None or not form.on_gpu.activation:
        return False
    narrow = hidden.dtype == static.dtype and jnp.dtype(hidden.dtype).itemsize == 2
    if not narrow or not kernels.supports(static):
        return False
    if group_sizes is None:
        return True
    # Tiles end at the last dim: gate and up in one dim must not share a tile.
    apart = not (gradient and static.gated and hidden.ndim == 3)
    whole = kernels.width_of(static, hidden) % TILE == 0
    return (form.per_group or apart or whole) and kernels.supports(static, hidden, group_sizes)


def group_amax(experts: int, source: ActivationOperands) -> jax.Array:
    """Returns the largest finite absolute value of each expert's rows: f32 [experts]."""
    result = jax.ShapeDtypeStruct((experts,), _F32)
    attributes = kernels.attributes_of(source.activation)
    (amax,) = kernels_serve.call(TARGETS[0], (result,), source.operands(), attributes)
    return amax


def quantize(
    recipe: Recipe, source: ActivationOperands, scale: jax.Array | None
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """Returns data of shape `source.shape`, scales, and gradients of row_weights.

    Args:
        recipe: how to quantize.
        source: what to activate and quantize.
        scale: f32 like group_sizes for TensorScaling; None for BlockScaling, which computes its
            own.

    Returns:
        (data, scale, d_row_weights), the last [S, C] f32 or None. Past the last zone, data and
        scale are undefined and d_row_weights is zero.
    """
    backward = source.grad is not None
    dtype = recipe.data_dtype(backward)
    operands = source.operands()
    rows, wide = operands[1].shape[0], math.prod(source.shape[2:])
    tiles = num_tiles(source.width, TILE) * (wide // source.width)
    weights = operands[2].shape if backward else (0,)
    results = (
        jax.ShapeDtypeStruct((rows, wide), jnp.uint8),
        jax.ShapeDtypeStruct((rows, tiles) if scale is None else (0, 0), _F32),
        jax.ShapeDtypeStruct(weights, _F32),
    )
    given = jnp.zeros(0, _F32) if scale is None else scale.astype(_F32).reshape(-1)
    attributes = kernels.attributes_of(source.activation) | {
        "format": DATA_DTYPES.index(jnp.dtype(dtype).name),
        "power_of_two": int(format_of(recipe).power_of_two(recipe)),
    }
    found = kernels_serve.call(TARGETS[1], results, (*operands, given), attributes)
    data = from_bits(found[0], dtype).reshape(source.shape)
    if scale is None:
        scale = found[1].reshape(*source.shape[:-1], -1)
    d_weights = source.row_weights if backward else None
    if d_weights is not None:
        d_weights = found[2].reshape(d_weights.shape).astype(d_weights.dtype)
    return data, scale, d_weights
