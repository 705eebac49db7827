"""`ep.recipes`: how the matmuls of experts quantize their operands.

A recipe is a frozen, hashable value and a pytree without leaves: use it in a config, as a static
argument, or inside a pytree that passes through `jit`.

For every recipe x ~= data * scale. Everything below is computed in f32:

- amax is the largest finite absolute value; an amax below 2^-126 counts as 0.
- scale is amax / max for tensor and block scales, at least 2^-126, and 1 if amax is 0. For MXFP8,
  and for blocks with power_of_two_scales, it is 2^ceil(log2(amax / max)), exact and within
  [2^-126, 2^127]. max is 448 for e4m3fn and 57344 for e5m2.
- data is x * (1 / scale), rounded to nearest even. Values saturate only under delayed scaling.
- NaN stays NaN. An infinity stays one in e5m2 and becomes NaN in e4m3fn, which has no infinity.
  Neither counts for an amax, so other values are not affected.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from ep_runtime.errors import InvalidArgumentError
from ep_runtime_client.base import stored

__all__ = ["BF16", "BlockScaling", "DelayedState", "MXFP8", "Recipe", "TensorScaling"]


def __dir__() -> list[str]:
    return __all__


DATA_DTYPES = ("float8_e4m3fn", "float8_e5m2")
TILE = 128  # values that share a scale in BlockScaling, along each blocked dim
MX_TILE = 32  # values that share a scale in MXFP8


@stored.pytree()
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DelayedState:
    """The amax histories of one matmul with delayed scaling, newest first.

    No gradient flows through them.

    Attributes:
        x: [history, E] f32, amax of the rows that each expert got, over all ranks.
        w: [history, E] f32, amax of each expert's kernel.
    """

    x: jax.Array
    w: jax.Array

    def __post_init__(self) -> None:
        stored.tell_flax(type(self))


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Base class of all recipes."""

    quantizes: ClassVar[bool] = True

    @property
    def delayed(self) -> bool:
        """Whether scales come from the amax of earlier calls, kept in a state."""
        return False

    @property
    def gradient_dtype(self) -> str:
        """Dtype of quantized gradients."""
        return DATA_DTYPES[0]

    def data_dtype(self, gradient: bool = False) -> Any:
        """Returns the dtype of quantized data.

        Args:
            gradient: the dtype of the rows' gradients, instead of that of rows and kernels.

        Returns:
            A numpy dtype.
        """
        return jnp.dtype(self.gradient_dtype if gradient else DATA_DTYPES[0])

    def init_state(self, num_experts: int) -> DelayedState:
        """Returns the state that delayed scaling starts from; other recipes have none.

        Args:
            num_experts: E.

        Returns:
            The state; only `TensorScaling(delayed=True)` has one.

        Raises:
            InvalidArgumentError: this recipe keeps no state.
        """
        raise InvalidArgumentError(
            f"recipe must be TensorScaling(delayed=True) to have a state, got {self}",
            argument="recipe",
        )


@stored.pytree()
@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class BF16(Recipe):
    """Recipe that quantizes nothing: operands are bf16 and sums f32.

    Results are bf16 unless `out_dtype` says otherwise.
    """

    quantizes: ClassVar[bool] = False

    @property
    def gradient_dtype(self) -> str:
        """Dtype of gradients: bfloat16."""
        return "bfloat16"

    def data_dtype(self, gradient: bool = False) -> Any:
        """Returns bfloat16, the dtype of all operands.

        Args:
            gradient: of the rows' gradients, which makes no difference.

        Returns:
            A numpy dtype.
        """
        return jnp.dtype(jnp.bfloat16)


@stored.pytree()
@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class TensorScaling(Recipe):
    """Recipe with one f32 scale per expert.

    Attributes:
        delayed: scales come from the amax of earlier calls instead of this one's. The caller keeps
            the histories (`init_state`, `state=`); gradients always use their own amax.
        history: how many earlier calls delayed scaling looks at.
        gradient_dtype: "float8_e5m2", with more range, or "float8_e4m3fn", with more precision.

    Raises:
        InvalidArgumentError: history below 1, or an unknown dtype.

    Source: Micikevicius et al. 2022, "FP8 Formats for Deep Learning" (arXiv:2209.05433); delayed
    scaling is Transformer Engine's.
    """

    delayed: bool = False
    history: int = 16
    gradient_dtype: str = "float8_e5m2"

    def __post_init__(self) -> None:
        _check_dtype(self.gradient_dtype)
        if self.history < 1:
            raise InvalidArgumentError(
                f"history must be at least 1, got {self.history}", argument="history"
            )

    def init_state(self, num_experts: int) -> DelayedState:
        """Returns empty histories, which stand for scales of 1.

        Args:
            num_experts: E.

        Returns:
            DelayedState of zeros, each [history, E] f32.

        Raises:
            InvalidArgumentError: this recipe is not delayed.
        """
        if not self.delayed:
            return super().init_state(num_experts)
        shape = (self.history, num_experts)
        return DelayedState(jnp.zeros(shape, jnp.float32), jnp.zeros(shape, jnp.float32))


@stored.pytree()
@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class BlockScaling(Recipe):
    """Recipe with one f32 scale per 1 x 128 values of rows, and per 128 x 128 values of a kernel.

    Dims need not be multiples of 128: the last block is smaller. The gradient of a kernel contracts
    rows. So both of its operands are quantized again for it, from their 8-bit values, with one
    scale per 128 rows of a group x 128 values.

    Attributes:
        power_of_two_scales: round scales up to powers of two, so that scaling is exact.
        gradient_dtype: "float8_e4m3fn" or "float8_e5m2".

    Raises:
        InvalidArgumentError: an unknown dtype.

    Source: DeepSeek-V3 (arXiv:2412.19437), 3.3.
    """

    power_of_two_scales: bool = False
    gradient_dtype: str = "float8_e4m3fn"

    def __post_init__(self) -> None:
        _check_dtype(self.gradient_dtype)


@stored.pytree()
@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class MXFP8(Recipe):
    """Recipe with one power-of-two scale (e8m0) per 32 values along the dim that a GEMM contracts.

    Forward and backward contract different dims, so one pass quantizes a tensor along both. Rows
    are quantized along K' and (for the gradient of weights) along the rows, kernels along K' and
    (for the gradient of rows) along N'. K', N' and the rows of a slab must be multiples of 32.

    Attributes:
        gradient_dtype: "float8_e4m3fn" or "float8_e5m2".

    Raises:
        InvalidArgumentError: an unknown dtype.

    Source: OCP Microscaling Formats v1.0 and arXiv:2310.10537; scales rounded up are from Mishra et
    al. 2025 (arXiv:2506.08027).
    """

    gradient_dtype: str = "float8_e4m3fn"

    def __post_init__(self) -> None:
        _check_dtype(self.gradient_dtype)


def check_recipe(recipe: Any, wanted: str = "") -> None:
    """Raises InvalidArgumentError unless `recipe` is an instance of a recipe.

    Args:
        recipe: what the caller gave.
        wanted: what else the caller's `recipe=` may be, for the error's text.
    """
    if isinstance(recipe, Recipe):
        return
    classes: list[type[Recipe]] = [BF16, TensorScaling, BlockScaling, MXFP8]
    got = f"the class ep.recipes.{recipe.__name__}" if recipe in classes else repr(recipe)
    choices = ", ".join(f"ep.recipes.{each.__name__}()" for each in classes)
    raise InvalidArgumentError(
        f"recipe must be one of {choices}{wanted}, got {got}", argument="recipe"
    )


def _check_dtype(name: str) -> None:
    if name not in DATA_DTYPES:
        raise InvalidArgumentError(
            f"gradient_dtype must be one of {DATA_DTYPES}, got {name!r}",
            argument="gradient_dtype",
        )
