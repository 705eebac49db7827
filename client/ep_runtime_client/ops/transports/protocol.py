"""Protocols of a transport: its per-device functions, and collectives between nodes.

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
    """One op call on one device.

    Attributes:
        call: the static side, which is the same on every device of the program.
        rank: int32 [1], world rank of the device.
        layer_index: int32 [1], of the layer in its stack; marked in a repeated forward pass
            (`tracing/again.py`).
    """

    call: Call
    rank: jax.Array
    layer_index: jax.Array


class PerDevice(Protocol[P]):
    """The functions of a transport's module, with plans of the type `P`.

    To add a transport, write a module with these five functions and name it in `choice.py`.

    - They run inside manual axes over the whole mesh. Arrays are local blocks without the slab dim,
      and none is empty.
    - Every rank of an EP group makes the same calls in the same order. Settings that the ranks
      agree on are in `at.call`. `at.rank` and `at.layer_index` are values, so that one program
      works for every process and every layer of a stack.
    - No gradient is taken through them: dispatch_bwd and combine_bwd compute the gradients.
    - Plans and slabs have the same bits as with transport "xla"; `ep_runtime.layout` has the rule
      for dropping rows.
    - Padding rows inside a zone are zero. Rows past the last zone are never read and may have any
      value; combine_bwd of a call with `clear_slack` makes them zero.
    - Sums are in `base.dtypes.sum_dtype`: over the rows of a rank in slot order, rounded as the
      group's combine_precision says, then over the ranks in order.
    - With on_overflow="error" prepare fails the program on every rank.

    The fixture `transport` in `tests/conftest.py` names the transports that tests of movement run
    on: add yours.
    """

    def prepare(
        self, at: DeviceCall, topk_idx: jax.Array, *, most: bool = False
    ) -> tuple[P, jax.Array | None]:
        """Makes the plan of topk_idx int32 [T, K]. With `most` also returns int32 [1]: the rows in
        the zones of the fullest rank among those with windows mapped here."""

    def dispatch(
        self, at: DeviceCall, tokens: jax.Array, weights: jax.Array | None, plan: P
    ) -> tuple[jax.Array, jax.Array]:
        """Sends tokens [T, H] and weights f32 [T, K] (None: ones) -> recv [C, H], recv_weights f32
        [C], 0 in rows without a slot."""

    def combine(
        self, at: DeviceCall, expert_out: jax.Array, weights: jax.Array | None, plan: P
    ) -> jax.Array:
        """Sums expert_out [C, H] with weights f32 [C] or None -> tokens_out [T, H]."""

    def dispatch_bwd(
        self, at: DeviceCall, d_recv: jax.Array, d_weights: jax.Array, plan: P
    ) -> tuple[jax.Array, jax.Array]:
        """Pulls back d_recv [C, H], d_weights f32 [C] -> d_tokens [T, H], d_topk_weights f32 [T,
        K], 0 for a slot without a row."""

    def combine_bwd(
        self,
        at: DeviceCall,
        grad: jax.Array,
        expert_out: jax.Array | None,
        weights: jax.Array | None,
        plan: P,
    ) -> tuple[jax.Array, jax.Array | None]:
        """Pulls back grad [T, H], with expert_out [C, H] and weights f32 [C], or None for both ->
        d_expert_out [C, H], d_weights f32 [C] or None."""


class Collectives(Protocol):
    """Collectives between the ranks of an EP group, used in addition to windows.

    Each runs per device, inside manual axes; every rank of the EP group makes the same calls in the
    same order, some of them inside a `lax.while_loop` whose trip count all of them agree on. Bits
    arrive as they were sent, whatever the dtype; no gradient is taken.
    """

    def all_gather(self, call: Call, x: jax.Array) -> jax.Array:
        """Gathers x [...] -> [N, ...]: block j is rank j's x."""

    def exchange(self, call: Call, blocks: jax.Array) -> jax.Array:
        """Exchanges blocks [N, ...]: block d goes to rank d, block j of the result is from j."""

    def node(self, call: Call, blocks: jax.Array) -> jax.Array:
        """Exchanges blocks [G, ...] -> [G, ...] between the ranks of this node."""

    def rail(self, call: Call, *arrays: jax.Array) -> tuple[jax.Array, ...]:
        """Exchanges arrays [D, ...] -> [D, ...] between the ranks of one rail (equal local rank),
        in node order. Only `rail` and `rail_gather` use the network."""

    def rail_gather(self, call: Call, *arrays: jax.Array) -> tuple[jax.Array, ...]:
        """Gathers arrays [...] -> [D, ...] from the ranks of one rail."""
