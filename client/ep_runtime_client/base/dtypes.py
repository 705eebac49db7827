"""Dtypes by name: specs carry names, callers may pass what JAX calls a dtype."""

from __future__ import annotations

from typing import Any

from ep_runtime import specs
from ep_runtime.errors import InvalidArgumentError


def dtype_name(dtype: Any, argument: str) -> str:
    """The name of a dtype given by name ("bfloat16"), as a numpy dtype or as `jnp.bfloat16`.

    Raises:
        InvalidArgumentError: it is no dtype.
    """
    if isinstance(dtype, str):
        return dtype
    import numpy as np

    try:
        return str(np.dtype(dtype).name)
    except TypeError as error:
        raise InvalidArgumentError(
            f"{argument} must be one of {tuple(specs.DTYPE_BYTES)}, got {dtype!r}",
            argument=argument,
        ) from error
