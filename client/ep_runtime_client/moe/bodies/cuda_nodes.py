"""The body for groups on several nodes: windows inside a node, rails between nodes.

Tokens come from the rail peers on all nodes, as in `transports/nodes.py`. The call then runs as for
a group of the node's ranks, with D*T virtual tokens each, and its sums return to the peers. If the
rows of a node do not fit the workspace, that node runs in chunks, independently of other nodes.
Rows that a call quantizes before sending are quantized before they cross the network: half the
bytes, once for all nodes, and with the same bits, because each row has its own scales.

A large call goes in chunks of its tokens (`BlockSizes.node_chunks`), each with a call of its own.
While it runs, the next chunk's tokens arrive and the last chunk's sums return, in one exchange. The
first arrival and the last return stay visible, so C chunks hide at most 1 - 1/C of the network.
Each chunk reads all weights once more, so it must bring enough rows to each expert. The whole plan
decides which rows are dropped. A chunk's own plan, made inside the node, places those that are
kept. If rows are counted, nodes first tell each other the counts of every chunk, and the host reads
them before each call. Gradients of weights are added up in f32 and rounded once.

Letters: `protocol.py`, `transports/nodes_plan.py`; t tokens of a rank in a chunk.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ep_runtime_client.moe.bodies import cuda
from ep_runtime_client.moe.bodies.cuda import Crossing
from ep_runtime_client.moe.bodies.protocol import (
    Experts,
    Forwarded,
    Given,
    Gradients,
    Over,
    WeightGrads,
)
from ep_runtime_client.moe.resolved import ResolvedCall, Saved
from ep_runtime_client.ops.calls.call import Call
from ep_runtime_client.ops.calls.plan import NodePlanArrays
from ep_runtime_client.ops.kernels.slots import Packed
from ep_runtime_client.ops.movement import quantized_rows
from ep_runtime_client.ops.tracing import again
from ep_runtime_client.ops.tracing.varying import like
from ep_runtime_client.ops.transports import between_nccl, nodes, windows
from ep_runtime_client.ops.transports.nodes_plan import (
    collectives,
    counts_rows,
    lined_up_rows,
    my_node,
    packing,
)
from ep_runtime_client.ops.transports.protocol import DeviceCall

multiple, packs = cuda.multiple, cuda.packs


def saved(call: ResolvedCall) -> tuple[Saved, ...]:
    return cuda.saved(call) * call.chunks


def forward(call: ResolvedCall, given: Given, experts: Experts, over: Over) -> Forwarded:
    moved, dtype = call.moved, given.tokens.dtype
    partial = _partial(call, dtype)
    if call.chunks == 1:
        plan, here, _ = _on_node(call, given)
        made = cuda.forward(partial, here, experts, over)
        return made._replace(y=nodes.added_up(moved, plan, made.y, dtype))
    kept: list[jax.Array] = []

    def run(chunk: _Chunk, crossing: Crossing) -> _Ran:
        made = cuda.forward(partial, chunk.here, experts, over, crossing)
        kept.extend(made.saved)
        return nodes.crossing(moved, made.y), made.arrived

    came = _in_chunks(call, given, (), run)
    return Forwarded(
        jnp.concatenate([nodes.summed(moved, *each, dtype) for each in came]), (*kept,)
    )


def backward(
    call: ResolvedCall,
    given: Given,
    experts: Experts,
    saved: tuple[jax.Array, ...],
    dy: jax.Array,
    grads: WeightGrads,
    over: Over,
) -> Gradients:
    """Runs the backward call; the tokens cross the network once more, together with dy."""
    moved, dtype = call.moved, given.tokens.dtype
    partial = _partial(call, dtype)
    if experts.wo_bias is None:
        dy = _packed(call, given, dy, gradient=True)
    if call.chunks == 1:
        plan, here, (dy,) = _on_node(call, given, dy)
        found = cuda.backward(partial, here, experts, saved, dy, grads, over)
        d_tokens, d_weights = nodes.gradients(moved, plan, found.tokens, found.weights, dtype)
        return found._replace(tokens=d_tokens, weights=d_weights)
    sums: list[Gradients] = []

    def run(chunk: _Chunk, crossing: Crossing) -> _Ran:
        each = len(saved) // call.chunks
        mine, before = saved[chunk.number * each :][:each], sums.pop() if sums else None
        (dy_here,) = chunk.rows
        found = cuda.backward(
            partial, chunk.here, experts, mine, dy_here, grads, over, crossing, before
        )
        sums.append(found)
        return nodes.crossing(moved, found.tokens, found.weights), found.arrived

    came = _in_chunks(call, given, (dy,), run)
    pairs = [nodes.summed_gradients(moved, *each, dtype) for each in came]
    d_tokens, d_weights = (jnp.concatenate(x) for x in zip(*pairs, strict=True))
    (total,) = sums
    wanted = cuda.made_dtype(grads, dtype)
    wi, wo = jax.tree.map(lambda x: x.astype(wanted), (total.wi, total.wo))
    return total._replace(tokens=d_tokens, weights=d_weights, wi=wi, wo=wo, arrived=())


class _Chunk(NamedTuple):
    """A chunk of the tokens on the node that they were sent to.

    Attributes:
        number: of the chunk.
        here: operands for a group of this node's ranks, with D*t virtual tokens.
        rows: other rows of these tokens, [D*t, X].
    """

    number: int
    here: Given
    rows: tuple[jax.Array, ...]


# Arrays of a node's sums that return, [D*t, X], and arrays that crossed meanwhile.
_Ran = tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]
# dst_rank [t, K] of a chunk, and the arrays that the nodes returned for it.
_Came = tuple[jax.Array, tuple[jax.Array, ...]]


def _in_chunks(
    call: ResolvedCall,
    given: Given,
    rows: tuple[jax.Array, ...],
    run: Callable[[_Chunk, Crossing], _Ran],
) -> list[_Came]:
    """Runs `run` on the chunks in turn, each while other chunks' arrays cross; `rows` [T, X] are
    sent with the tokens."""
    moved, plan, count = call.moved, _plan(given), call.chunks
    num_nodes, size = moved.group.num_nodes, len(given.tokens) // count
    ranks = jnp.split(plan.dst_rank, count)
    tokens = [packing(moved, each) for each in ranks] if counts_rows(moved) else []
    counts = _row_counts(moved, tokens) if tokens else None
    shape = (size, lined_up_rows(ranks[0], num_nodes))
    # The other nodes do not know which slots were dropped.
    kept = given._replace(topk_idx=jnp.where(plan.dst_rank >= 0, given.topk_idx, -1))
    parts = [jnp.split(x, count) for x in _sent(call, kept, rows)]

    def sent(number: int) -> tuple[jax.Array, ...]:
        arrays = tuple(each[number] for each in parts)
        return nodes.by_node(moved, tokens[number], shape[1], *arrays) if tokens else arrays

    def counts_of(ahead: int, back: int) -> jax.Array | None:
        return None if counts is None else jnp.concatenate([counts[ahead], counts[back, ::-1]])

    arrived = _crossed(moved, Crossing(sent(0), (), counts_of(0, 0), shape))
    back: tuple[jax.Array, ...] = ()
    came: list[tuple[jax.Array, ...]] = []
    for number in range(count):
        flat = [x.reshape(-1, x.shape[-1]) for x in arrived]
        real: Any = True
        if counts is not None:
            real = (jnp.arange(size) < counts[number, 1][:, None]).reshape(-1, 1)
        here, rows_here = _arrived(call, given, real, flat)
        chunk = _Chunk(number, _planned(call, here, plan, first=number == 0), rows_here)
        ahead = sent(number + 1) if number + 1 < count else ()
        both = counts_of(min(number + 1, count - 1), max(number - 1, 0))
        sums, crossed = run(chunk, Crossing(ahead, back, both, shape))
        arrived, returned = crossed[: len(ahead)], crossed[len(ahead) :]
        came.append(returned)
        # Results of custom calls are typed as not varying over any axis.
        typed = (like(x, plan.chunks) for x in sums)
        back = tuple(x.reshape(num_nodes, size, x.shape[-1]) for x in typed)
    last = _crossed(moved, Crossing((), back, counts_of(0, count - 1), shape))
    flat_rows = (tuple(x.reshape(-1, x.shape[-1]) for x in each) for each in [*came[1:], last])
    return list(zip(ranks, flat_rows, strict=True))


def _row_counts(call: Call, tokens: Sequence[Packed]) -> jax.Array:
    """Counts rows of every chunk to the rail peer on each node, and from it: int32 [C, 2, D]."""
    to = jnp.stack([each.has.sum(1, dtype=jnp.int32) for each in tokens], 1)
    (from_,) = collectives(call).rail(call, to)
    return jnp.stack([to, like(from_, to)]).transpose(2, 0, 1)


def _crossed(call: Call, crossing: Crossing) -> tuple[jax.Array, ...]:
    """Moves arrays as a call does beside which they cross."""
    ops, counts = collectives(call), crossing.counts
    if counts is None:
        return (*ops.rail_gather(call, *crossing.gathered), *ops.rail(call, *crossing.blocks))
    arrived: tuple[jax.Array, ...] = ()
    for number, arrays in enumerate((crossing.gathered, crossing.blocks)):
        both, rows = counts[2 * number : 2 * number + 2], crossing.rows[number]
        if arrays:
            arrived += between_nccl.rail_counted(call, *both, *arrays, rows=rows)
    return arrived


def _planned(call: ResolvedCall, here: Given, plan: NodePlanArrays, *, first: bool) -> Given:
    """Returns the operands of a chunk with its plan, which counts nothing that the whole plan
    counted; its first chunk has the whole plan's dropped slots."""
    at = DeviceCall(call.moved, here.rank, again.marked(here.layer_index))
    made, most = windows.prepare(at, here.topk_idx, most=True)
    assert most is not None
    if first:
        made = made._replace(recv_count=made.recv_count.at[0, 3].set(plan.recv_count[0, 3]))
    return here._replace(plan=made, most=most)


def _partial(call: ResolvedCall, dtype: Any) -> ResolvedCall:
    """Returns the call with the dtype in which a node's sums cross to other nodes."""
    return dataclasses.replace(call, sums=nodes.partial_dtype(call.moved, dtype))


def _packed(
    call: ResolvedCall, given: Given, rows: jax.Array, *, gradient: bool = False
) -> jax.Array:
    """Returns rows [T, H] as the node's call sends them: in 8 bits if it quantizes tokens."""
    recipe = call.recipes[0]
    if recipe is None or not packs(call):
        return rows
    return quantized_rows.packed(recipe, rows, given.plan, gradient=gradient)


def _plan(given: Given) -> NodePlanArrays:
    assert isinstance(given.plan, NodePlanArrays)
    return given.plan


def _sent(call: ResolvedCall, given: Given, rows: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """Returns what nodes get of tokens: rows, slots [T, 2K], and `rows` [T, X]."""
    slots = [lax.bitcast_convert_type(given.weights, jnp.int32), given.topk_idx]
    return (_packed(call, given, given.tokens), jnp.concatenate(slots, 1), *rows)


def _arrived(
    call: ResolvedCall, given: Given, real: Any, arrived: Sequence[jax.Array]
) -> tuple[Given, tuple[jax.Array, ...]]:
    """Returns the operands with virtual tokens, except the plan; and their other rows. `arrived`
    is what `_sent` returns of them, and their slots that are not `real` are undefined."""
    moved, top_k = call.moved, given.topk_idx.shape[1]
    tokens, slots, *rows = arrived
    weights = lax.bitcast_convert_type(slots[:, :top_k], jnp.float32)
    experts = moved.group.ranks_per_node * moved.group.experts_per_rank
    idx = slots[:, top_k:] - my_node(moved) * experts
    idx = jnp.where(real & (idx >= 0) & (idx < experts), idx, -1)
    return given._replace(tokens=tokens, weights=weights, topk_idx=idx), tuple(rows)


def _on_node(
    call: ResolvedCall, given: Given, *rows: jax.Array
) -> tuple[NodePlanArrays, Given, tuple[jax.Array, ...]]:
    """Returns the plan between nodes; the operands for a group of this node's ranks, with virtual
    tokens; and rows [T, X] of tokens sent to rows of the virtual tokens, [D*T, X]."""
    plan = _plan(given)
    arrived = nodes.to_nodes(call.moved, plan, *_sent(call, given, rows))
    here, rows_here = _arrived(call, given, plan.virtual_rank >= 0, arrived)
    return plan, here._replace(plan=plan.inside), rows_here
