"""The same program by both ways of `ep.moe`: slabs, and the block call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ep_runtime_client.ops.block import takes


class Ways:
    """Switches the way that programs take which are traced from here on.

    On CPU the block call runs as the ops that it is composed of, in any dtype.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch = patch

    def slabs(self) -> None:
        """Every program keeps to slabs."""
        self._patch.setattr(takes, "refused", lambda asked: "transport")

    def call(self) -> None:
        """Programs take the call wherever they could on GPUs."""

        def refused(asked: takes.Asked) -> str:
            return next((name for name in _ANYWHERE if _refuses(name, asked)), "")

        self._patch.setattr(takes, "refused", refused)

    def as_users(self) -> None:
        """Programs take what `ep.moe` chooses."""
        self._patch.undo()

    def both(self, run: Callable[..., Any], *operands: Any) -> tuple[Any, Any]:
        """What `run` gives by slabs, and by the call; compiled."""
        self.slabs()
        want = jax.device_get(jax.jit(lambda *x: run(*x))(*operands))
        self.call()
        return want, jax.device_get(jax.jit(lambda *x: run(*x))(*operands))


def assert_close(got: Any, want: Any, atol: float = 2e-6) -> None:
    """Integers are `want`'s; floats too, within `atol` of an array's largest value."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for mine, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert mine.dtype == theirs.dtype
        if not jnp.issubdtype(theirs.dtype, jnp.floating):
            np.testing.assert_array_equal(mine, theirs)
            continue
        mine, theirs = (np.asarray(each, np.float64) for each in (mine, theirs))
        scale = max(np.abs(theirs).max(initial=0), 1e-30)
        np.testing.assert_allclose(mine / scale, theirs / scale, rtol=0, atol=atol)


_ANYWHERE = ("recipe", "input_weights", "tokens")


def _refuses(name: str, asked: takes.Asked) -> bool:
    return {
        "recipe": not takes.takes_recipes(asked.recipes),
        "input_weights": asked.input_weights,
        "tokens": asked.tokens == 0,
    }[name]
