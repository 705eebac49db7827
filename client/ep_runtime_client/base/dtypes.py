"""Dtypes by name: specs hold names, and callers may pass any form of dtype that JAX accepts."""

from __future__ import annotations

import re
from typing import Any

from ep_runtime import allowed_names, specs
from ep_runtime.errors import InvalidArgumentError


def dtype_name(dtype: Any, argument: str) -> str:
    """Returns the name of a dtype given by name, as a numpy dtype or as `jnp.bfloat16`.

    Raises:
        InvalidArgumentError: no array that a group moves has this dtype.
    """
    name = dtype
    if not isinstance(dtype, str):
        import numpy as np

        try:
            name = str(np.dtype(dtype).name)
        except TypeError:
            name = None
    if name not in specs.DTYPE_BYTES:
        raise _unknown(dtype, argument, f"one of {tuple(specs.DTYPE_BYTES)}")
    return str(name)


def as_dtype(dtype: Any, argument: str) -> Any:
    """Returns `dtype` as a numpy dtype. Raises InvalidArgumentError if it is not a dtype."""
    import jax.numpy as jnp

    try:
        return jnp.dtype(dtype)
    except TypeError:
        raise _unknown(dtype, argument, "a dtype of JAX") from None


def sum_dtype(*dtypes: Any) -> Any:
    """Returns the dtype in which values of these dtypes are summed: float64 if one of them is."""
    import jax.numpy as jnp

    return jnp.float64 if jnp.float64 in dtypes else jnp.float32


def _unknown(dtype: Any, argument: str, wanted: str) -> InvalidArgumentError:
    hint = ""
    if isinstance(dtype, str):  # bf16, fp32 and f32 are short names of floats
        long = re.sub(r"^(b?)fp?(?=\d)", r"\1float", dtype)
        hint = allowed_names.hint(long, specs.DTYPE_BYTES)
    return InvalidArgumentError(
        f"{argument} must be {wanted}, got {dtype!r}{hint}", argument=argument
    )
