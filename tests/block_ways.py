"""Runs the program of `ep.moe` in other ways: with another body, or as public ops in a row."""

from __future__ import annotations

import contextlib
import dataclasses
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ep_runtime as ep
from ep_runtime import workspace
from ep_runtime_client.base.layers import TracedLayer
from ep_runtime_client.moe import bodies
from ep_runtime_client.moe import resolve as moe_call
from ep_runtime_client.moe.bodies import composed, cuda, cuda_nodes
from ep_runtime_client.moe.bodies.protocol import Forwarded
from ep_runtime_client.moe.state import MoEState
from ep_runtime_client.ops.quantize.formats.recipes import TILE
from ep_runtime_client.ops.quantize.formats.tiles import from_bits, spread_tiles, widen


@contextlib.contextmanager
def chunked(count: int) -> Iterator[None]:
    """Makes calls between nodes that are traced inside go in `count` chunks, if they may."""
    rule = {"_CHUNKS": (count,), "_CHUNK_ROWS": 0.001, "_LINK": 1.0}
    with mock.patch.multiple(workspace, **rule):
        yield


class Emulated:
    """Composes the public ops into a body that has a workspace, as the kernels do.

    It saves rows of the first product alone, and makes the others again. Packed rows it widens, and
    quantizes again where they arrive: to the same values by scales that are powers of two.
    """

    saved, multiple = staticmethod(cuda.saved), staticmethod(composed.multiple)
    made_dtype = staticmethod(cuda.made_dtype)

    @staticmethod
    def forward(static: Any, given: Any, experts: Any, over: Any, crossing: Any = None) -> Any:
        given = given._replace(tokens=_widened(static, given.tokens))
        made = composed.forward(_all_saved(static), given, experts, over)
        count = static.workspace.saved
        kept = (made.saved[-1][:count], jnp.ones(1, jnp.int32)) if count else ()
        return Forwarded(made.y, kept, arrived=crossed(static, crossing) if crossing else ())

    @staticmethod
    def backward(
        static: Any,
        given: Any,
        experts: Any,
        saved: Any,
        dy: Any,
        grads: Any,
        over: Any,
        crossing: Any = None,
        sums: Any = None,
    ) -> Any:
        if crossing is not None:
            grads = grads._replace(dtype=jnp.float32)
        whole = _all_saved(static)
        given = given._replace(tokens=_widened(static, given.tokens))
        dy = _widened(static, dy, gradient=True)
        *rows, hidden = composed.forward(whole, given, experts, over).saved
        if saved:
            kept, made = saved
            again = jnp.where(made[0] != 0, kept, hidden[: kept.shape[0]])
            hidden = hidden.at[: kept.shape[0]].set(again)
        found = composed.backward(whole, given, experts, (*rows, hidden), dy, grads, over)
        if not grads.wanted:
            found = found._replace(wi=None, wo=None)
        if sums is not None:
            parts = [(x.wi, x.wo, x.wi_bias, x.wo_bias) for x in (sums, found)]
            wi, wo, *biases = jax.tree.map(jnp.add, *parts)
            found = found._replace(wi=wi, wo=wo, wi_bias=biases[0], wo_bias=biases[1])
        return found._replace(arrived=crossed(static, crossing) if crossing else ())


def crossed(static: Any, crossing: Any) -> Any:
    """Returns the arrays that other nodes sent for `crossing`."""
    return cuda_nodes._crossed(static.moved, crossing)


def _all_saved(static: Any) -> Any:
    return dataclasses.replace(static, workspace=None, saved=composed.saved(static))


def _widened(static: Any, rows: Any, *, gradient: bool = False) -> Any:
    """Returns rows [T, H] as the values they encode, if they arrive packed."""
    if rows.dtype != jnp.uint8:
        return rows
    hidden = static.moved.group.hidden_size
    data = from_bits(rows[:, :hidden], static.recipes[0].data_dtype(gradient))
    scale = rows[:, hidden:].reshape(len(rows), -1, 4)
    scale = spread_tiles(jax.lax.bitcast_convert_type(scale, jnp.float32), 1, TILE, hidden)
    return (widen(data) * scale).astype(static.activation.dtype)


class Ways:
    """Switches the way taken by programs that are traced from now on."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch, self._forced = patch, contextlib.ExitStack()
        self.taken = self.as_users
        self._run, self._unsupported = moe_call.run, bodies.unsupported

    def by_ops(self) -> None:
        """Programs consist of public ops, with their gradients."""
        self.as_users()
        self._patch.setattr(moe_call, "run", by_ops)

    def body(self, name: str) -> None:
        """Programs take the body of that name."""
        self.as_users()
        self._forced.enter_context(bodies.forced(name))

    def emulated(self) -> None:
        """Programs take a body with a workspace wherever kernels would be possible."""
        self.as_users()
        self._patch.setitem(bodies.BODIES, "cuda", Emulated)
        self._patch.setattr(cuda_nodes, "cuda", Emulated)

        def unsupported(asked: bodies.Asked) -> str:
            found = {
                "tokens": asked.tokens == 0,
                "recipe": not bodies.supports_recipes(asked.recipes),
                "to_input": asked.to_input,
            }
            return next((name for name, is_so in found.items() if is_so), "")

        self._patch.setattr(bodies, "unsupported", unsupported)

    def as_users(self) -> None:
        """Programs take the way that `ep.moe` chooses."""
        self._forced.close()
        self._patch.setattr(moe_call, "run", self._run)
        self._patch.setattr(bodies, "unsupported", self._unsupported)

    def both(self, run: Callable[..., Any], *operands: Any) -> tuple[Any, Any]:
        """Runs `run`, compiled, by public ops and by the way that `taken` switches to; returns
        both.
        """
        self.by_ops()
        want = jax.device_get(jax.jit(lambda *x: run(*x))(*operands))
        self.taken()
        return want, jax.device_get(jax.jit(lambda *x: run(*x))(*operands))


def by_ops(
    block: Any, moved: Any, params: Any, weighted: str, kept: Any, chosen: Any, state: Any
) -> Any:
    """Has the arguments and results of `moe_call.run`."""
    stack: Any = types.SimpleNamespace(_layer=lambda _: chosen.call.layer)
    layer = TracedLayer(stack, moved.index[0])
    dispatched = ep.dispatch(
        layer,
        moved.tokens,
        moved.routed.topk_idx,
        moved.routed.topk_weights,
        handle=moved.handle,
        capacity=moved.capacity,
        tokens_spec=moved.tokens_spec,
    )
    sizes, weights, dtype = dispatched.group_sizes, dispatched.weights, block.activation.dtype
    states = (None, None) if state is None else (state.wi, state.wo)

    def multiplied(rows: Any, which: int) -> Any:
        name, recipe = ("wi", "wo")[which], block.recipes[which]
        out = ep.grouped_gemm(
            rows,
            moe_call.operand(getattr(params, name), recipe, dtype),
            sizes,
            layer=layer,
            bias=None
            if getattr(params, f"{name}_bias") is None
            else moe_call.bias_of(block, f"{name}_bias", params),
            recipe=recipe,
            out_dtype=dtype,
            rhs_spec=block.specs[name],
            state=states[which],
        )
        return out if isinstance(out, tuple) else (out, None)

    def weigh(rows: Any) -> Any:
        return (rows.astype(block.activation.wide) * weights[..., None]).astype(dtype)

    rows = weigh(dispatched.tokens) if weighted == "input" else dispatched.tokens
    hidden, first = multiplied(rows, 0)
    flat = hidden.reshape(-1, *hidden.shape[2:])
    act = block.activation.rows(flat).reshape(*hidden.shape[:2], -1)
    act = weigh(act) if weighted == "hidden" else act.astype(dtype)
    out, second = multiplied(act, 1)
    y = ep.combine(layer, dispatched, out, weights=weights if weighted == "output" else None)
    return y, dispatched.plan.arrays, None if state is None else MoEState(first, second)


def assert_close(got: Any, want: Any, atol: float = 2e-6) -> None:
    """Integers equal `want` exactly; floats within `atol` of the array's largest value."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for mine, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert mine.dtype == theirs.dtype
        if not jnp.issubdtype(theirs.dtype, jnp.floating):
            np.testing.assert_array_equal(mine, theirs)
            continue
        mine, theirs = (np.asarray(each, np.float64) for each in (mine, theirs))
        scale = max(np.abs(theirs).max(initial=0), 1e-30)
        np.testing.assert_allclose(mine / scale, theirs / scale, rtol=0, atol=atol)
