"""Protocols of a transport: functions of one device, and collectives between nodes.

Letters: T tokens of one rank, K top_k, H hidden, C rows of a slab, N ranks of an EP group on D
nodes of G; ep rank = node * G + local rank.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol, TypeVar

import jax

from ep_runtime_client.ops.calls.call import Call
from ep_runtime_client.ops.calls.plan import AnyArrays

P = TypeVar("P", bound=AnyArrays)


class DeviceCall(NamedTuple):
    """One op call as one device makes it.

    Attributes:
        call: what every device of the program agrees on.
        rank: int32 [1], world rank of the device.
        layer_index: int32 [1], of the layer in its stack; marked in a pass that runs again
            (`tracing/again.py`).
    """

    call: Call
    rank: jax.Array
    layer_index: jax.Array


class PerDevice(Protocol[P]):
    """The functions of a transport's module, whose plans are of the type `P`.

    To add a transport, write a module with these five functions and name it in `choice.py`.

    - They run inside manual axes over the whole mesh. Arrays are local blocks without the slab dim,
      and none is empty.
    - Every rank of an EP group makes the same calls in the same order. What the ranks agree on is
      in `at.call`. `at.rank` and `at.layer_index` are values, so that one program serves every
      process and every layer of a stack.
    - No gradient is taken: dispatch_bwd and combine_bwd are those of dispatch and combine.
    - Plans and slabs are those of transport "xla" bit for bit; `ep_runtime.layout` has the rule by
      which rows are dropped.
    - Padding rows inside a zone are zero. Rows past the last zone are never read and may be
      anything; combine_bwd of a call with `clear_slack` makes them zero.
    - Sums are in `base.dtypes.sum_dtype`: the rows of a rank in slot order, rounded as the group's
      combine_precision says, then over the ranks in order.
    - With on_overflow="error" prepare fails the program on every rank.

    The fixture `transport` in `tests/conftest.py` names the transports that tests of movement run
    on: add yours.
    """

    def prepare(
        self, at: DeviceCall, topk_idx: jax.Array, *, most: bool = False
    ) -> tuple[P, jax.Array | None]:
        """topk_idx int32 [T, K] -> the plan. With `most` also int32 [1]: rows in the zones of the
        fullest rank among those whose windows this one maps."""

    def dispatch(
        self, at: DeviceCall, tokens: jax.Array, weights: jax.Array | None, plan: P
    ) -> tuple[jax.Array, jax.Array]:
        """tokens [T, H], weights f32 [T, K] or None for ones -> recv [C, H], recv_weights f32 [C],
        0 where no slot has a row."""

    def combine(
        self, at: DeviceCall, expert_out: jax.Array, weights: jax.Array | None, plan: P
    ) -> jax.Array:
        """expert_out [C, H], weights f32 [C] or None -> tokens_out [T, H]."""

    def dispatch_bwd(
        self, at: DeviceCall, d_recv: jax.Array, d_weights: jax.Array, plan: P
    ) -> tuple[jax.Array, jax.Array]:
        """d_recv [C, H], d_weights f32 [C] -> d_tokens [T, H], d_topk_weights f32 [T, K], 0 where
        a slot has no row."""

    def combine_bwd(
        self,
        at: DeviceCall,
        grad: jax.Array,
        expert_out: jax.Array | None,
        weights: jax.Array | None,
        plan: P,
    ) -> tuple[jax.Array, jax.Array | None]:
        """grad [T, H], expert_out [C, H] and weights f32 [C], or None of both -> d_expert_out
        [C, H], d_weights f32 [C] or None."""


class Collectives(Protocol):
    """Collectives between the ranks of an EP group, next to windows.

    Each runs per device, inside manual axes; every rank of the EP group makes the same calls in the
    same order, some of them inside a `lax.while_loop` whose trip count all of them agree on. Bits
    arrive as they were sent, whatever the dtype; no gradient is taken.
    """

    def all_gather(self, call: Call, x: jax.Array) -> jax.Array:
        """x [...] -> [N, ...]: block j is rank j's x."""

    def exchange(self, call: Call, blocks: jax.Array) -> jax.Array:
        """blocks [N, ...] -> [N, ...]: block d goes to rank d, block j comes from rank j."""

    def node(self, call: Call, blocks: jax.Array) -> jax.Array:
        """blocks [G, ...] -> [G, ...]: as `exchange`, between the ranks of this node."""

    def rail(self, call: Call, *arrays: jax.Array) -> tuple[jax.Array, ...]:
        """Arrays [D, ...] -> [D, ...]: as `exchange`, between the ranks of equal local rank in
        order of their nodes. All that crosses the network is theirs and `rail_gather`'s."""

    def rail_gather(self, call: Call, *arrays: jax.Array) -> tuple[jax.Array, ...]:
        """Arrays [...] -> [D, ...]: as `all_gather`, between those."""
