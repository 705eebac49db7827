"""Computes the needs of a layer on a cluster that is not here: memory, bytes of links, time.

Experts are drawn for every token of every GPU. The functions that plan an exchange then count the
rows that cross the network, and `estimate_memory` computes a GPU's memory. The time of a block call
is a fit, by FLOPs and bytes through memory, to block calls on two H100s; another GPU takes another
time. The fit leaves out packing rows for the network, attention, and all other parts of a step.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.sharding import AbstractMesh

from ep_runtime import layer_specs, specs
from ep_runtime.layout import scaled_bytes
from ep_runtime.workspace import BlockSizes
from ep_runtime_bench.base import routing
from ep_runtime_bench.base.moe_cases import Case
from ep_runtime_bench.base.options import PLANNED_RECIPES, BenchOptions, BenchReport
from ep_runtime_client.base.layers import EpLayer
from ep_runtime_client.cli.tables import Column
from ep_runtime_client.groups.estimate import block_sizes, estimate_memory
from ep_runtime_client.moe.bodies.cuda import scaling_of
from ep_runtime_client.ops.calls.call import Call
from ep_runtime_client.ops.movement.prepare import make_call
from ep_runtime_client.ops.quantize.formats.recipes import BlockScaling, TensorScaling
from ep_runtime_client.ops.routing.api import route
from ep_runtime_client.ops.routing.options import Router
from ep_runtime_client.ops.transports import nodes_plan

# A fit to block calls of 16-bit rows, forward and backward, on two H100s. Its error is within 2%,
# but it is 13% short for mixtral-like, whose weights and wide rows are read more than once.
MS_PER_TFLOP, MS_PER_GB = 1.215, 0.317
RECIPES = dict(zip(PLANNED_RECIPES, (None, TensorScaling(), BlockScaling()), strict=True))
AXIS = "ep"
_OF = (Column("case", "CASE"), Column("recipe", "RECIPE"), Column("precision", "SUMS"))
_HOW = Column("how", "FIGURES")
_ROUTING = Column("routing", "ROUTING")
MEMORY_COLUMNS = (
    *_OF,
    Column("window_bytes", "WINDOW", "bytes"),
    Column("workspace_bytes", "WORKSPACE", "bytes"),
    Column("saved_bytes", "SAVED A LAYER", "bytes"),
    Column("plan_bytes", "PLAN", "bytes"),
    _HOW,
)
LINK_COLUMNS = (
    *_OF,
    _ROUTING,
    Column("link", "LINK"),
    Column("direction", "PASS"),
    Column("sent_mb", "MB SENT", "count"),
    Column("busiest_mb", "BUSIEST GPU", "count"),
    _HOW,
)
TIME_COLUMNS = (
    *_OF,
    _ROUTING,
    Column("busiest_rows", "ROWS OF BUSIEST", "ratio"),
    Column("call_ms", "BLOCK CALLS MS", "count"),
    Column("network_ms", "NETWORK MS", "count"),
    Column("chunks", "CHUNKS", "count"),
    Column("exposed_ms", "EXPOSED MS", "count"),
    Column("least_exposed_ms", "LEAST EXPOSED MS", "count"),
    _HOW,
)
Counts = npt.NDArray[np.int64]  # per GPU, [N]


class Rows(NamedTuple):
    """Rows of every GPU in one exchange with experts, int64 [N] each.

    Attributes:
        to_nodes, from_nodes: rows over the network.
        to_ranks, from_ranks: rows over NVLink, inside the node.
        own: rows that stay on the GPU.
        tokens: its own tokens and those from its peers on other nodes, as far as its node needs
            them.
        experts: rows of its experts, one for each slot.
    """

    to_nodes: Counts
    from_nodes: Counts
    to_ranks: Counts
    from_ranks: Counts
    own: Counts
    tokens: Counts
    experts: Counts


class Sizes(NamedTuple):
    """Bytes of a token in an exchange.

    Attributes:
        row: bytes of a token, or of the gradient of its sum.
        total: bytes of a sum of its outputs, or of the token's gradient.
        slots: bytes of its experts and their weights; gradients of weights are half as many.
    """

    row: int
    total: int
    slots: int


def run(options: BenchOptions) -> list[BenchReport]:
    """Computes the tables of memory, links and time; starts no device except the CPU."""
    jax.config.update("jax_platforms", "cpu")
    cluster = (
        f"{options.nodes} x {options.gpus_per_node} GPUs with {options.network:g} GB/s each, "
        f"{options.dtype}, computed"
    )
    router = Router() if options.model is None else Router.from_hf(options.model)
    memory, links, times = [], [], []
    for name, case in options.layers.items():
        groups = {precision: _group(options, case, precision) for precision in options.precision}
        calls = {precision: _call(options, case, each) for precision, each in groups.items()}
        kinds = list(itertools.product(options.recipes, options.precision))
        for recipe, precision in kinds:
            of = {"case": name, "recipe": recipe, "precision": precision, "how": "computed"}
            memory.append(of | memory_of(options, case, groups[precision], recipe))
        for routed in options.routing:
            rows = count(calls[options.precision[0]], routed, router)  # for any precision
            for recipe, precision in kinds:
                call = calls[precision]
                of = {"case": name, "recipe": recipe, "precision": precision, "how": "computed"}
                of["routing"] = routed
                sizes = sizes_of(call, recipe)
                links += [of | each for each in link_rows(rows, sizes)]
                call_ms = None
                if recipe == PLANNED_RECIPES[0]:
                    call_ms = float(block_ms(case, call, rows).max())
                chunks = _block(case.inner, call, recipe).node_chunks(call.group.on_overflow)
                times.append(of | times_of(rows, sizes, call_ms, options.network, chunks))
    return [
        BenchReport("plan_memory", f"memory of a GPU: {cluster}", MEMORY_COLUMNS, memory),
        BenchReport("plan_links", f"a layer's bytes of a GPU: {cluster}", LINK_COLUMNS, links),
        BenchReport("plan_time", f"a layer's time: {cluster}", TIME_COLUMNS, times),
    ]


def _group(options: BenchOptions, case: Case, precision: str) -> dict[str, Any]:
    """Returns arguments of a group of all GPUs."""
    between = {"transport": "nccl", "node_size": options.gpus_per_node}
    return {
        "name": "plan",
        "ep_axis": AXIS,
        "num_experts": case.num_experts,
        "hidden_size": case.hidden,
        "max_tokens_per_rank": case.tokens,
        "max_top_k": case.top_k,
        "max_token_dtype": options.dtype,
        "combine_precision": precision,
        "spare_experts": 0,  # the times below are without copies of experts
        **(between if options.nodes > 1 else {"transport": "nvlink"}),
    }


def memory_of(
    options: BenchOptions, case: Case, group: Mapping[str, Any], recipe: str
) -> dict[str, Any]:
    """Estimates the memory of one GPU of the cluster by `estimate_memory`."""
    mesh = AbstractMesh((options.planned_gpus,), (AXIS,))
    quantized = RECIPES[recipe]
    found = estimate_memory(mesh=mesh, mlp_dim=case.inner, recipe=quantized, **group)
    return {
        "window_bytes": found.staging_bytes_per_rank,
        "workspace_bytes": found.workspace_bytes_per_device,
        "saved_bytes": found.saved_bytes_per_layer,
        "plan_bytes": found.plan_bytes_per_layer,
    }


def _call(options: BenchOptions, case: Case, group: Mapping[str, Any]) -> Call:
    gpus = options.planned_gpus
    spec = specs.make_group_spec(mesh_axes=((AXIS, gpus),), **group)
    of_layer = layer_specs.LayerSpec("layer", top_k=case.top_k)
    layer = EpLayer(spec, layer_specs.check_layer(spec, of_layer), 0)
    mesh: Any = AbstractMesh((gpus,), (AXIS,))
    return make_call(layer, mesh, (gpus * case.tokens,), (), handle=0, capacity=None)


def count(call: Call, routed: str, router: Router) -> Rows:
    """Draws logits of all tokens, routes them, and counts the rows of their plan."""
    group, top_k = call.group, call.layer.top_k
    ranks, nodes, size = group.ep_size, group.num_nodes, group.ranks_per_node
    tokens = call.layout.tokens_per_rank

    @jax.jit
    def planned(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
        idx = route(logits, top_k, router=router).topk_idx
        has = nodes_plan.packing(call, idx // group.experts_per_rank).has
        return idx, has.sum(1, dtype=jnp.int32)

    rng = np.random.default_rng(0)
    share = routing.share_of(routed, group.num_experts, top_k, rng)
    made = [planned(routing.logits(rng, share, tokens)) for _ in range(ranks)]
    idx = np.concatenate([np.asarray(each) for each, _ in made])
    by_node = np.stack([np.asarray(has, np.int64) for _, has in made])
    needed_of = by_node.reshape(nodes, size, nodes)  # [node, local rank, needing node]
    sent = needed_of if nodes_plan.counts_rows(call) else np.full_like(needed_of, tokens)
    sent = sent * (1 - np.eye(nodes, dtype=np.int64))[:, None]

    # A rank's peers on all nodes send it the tokens that it spreads inside its node.
    flat = routing.traffic(idx, ranks, group.num_experts).rows.astype(np.int64)
    local = flat.reshape(nodes, size, nodes, size).sum(0).swapaxes(0, 1)  # [node, from, to]
    own = np.diagonal(local, axis1=1, axis2=2)
    return Rows(
        to_nodes=sent.sum(2).reshape(-1),
        from_nodes=sent.sum(0).T.reshape(-1),
        to_ranks=(local.sum(2) - own).reshape(-1),
        from_ranks=(local.sum(1) - own).reshape(-1),
        own=own.reshape(-1),
        tokens=needed_of.sum(0).T.reshape(-1),
        experts=np.bincount(idx.reshape(-1) // group.experts_per_rank, minlength=ranks),
    )


def sizes_of(call: Call, recipe: str = PLANNED_RECIPES[0]) -> Sizes:
    """Returns the bytes of a token in the call's group."""
    group = call.group
    packed = _block(1, call, recipe).packed_bytes
    row = group.hidden_size * specs.DTYPE_BYTES[group.max_token_dtype]
    totals = {"fast": row, "exact": 4 * group.hidden_size, "fp8": scaled_bytes(group.hidden_size)}
    return Sizes(packed or row, totals[group.combine_precision], 8 * call.layer.top_k)


def _block(mlp_dim: int, call: Call, recipe: str) -> BlockSizes:
    return block_sizes(call.group, mlp_dim, gated=True, scaling=scaling_of(RECIPES[recipe]))


def network_bytes(sizes: Sizes) -> dict[str, tuple[int, int]]:
    """Returns by pass the bytes of a row that crosses, and of the data returned for it."""
    return {
        "forward": (sizes.row + sizes.slots, sizes.total),
        # Tokens cross again, together with the gradients of sums.
        "backward": (2 * sizes.row + sizes.slots, sizes.total + sizes.slots // 2),
    }


def link_rows(rows: Rows, sizes: Sizes) -> Iterator[dict[str, Any]]:
    """Computes the mean and the largest traffic of a GPU, for each link and pass."""
    inside = {"forward": (sizes.row, sizes.total), "backward": (2 * sizes.row, sizes.total)}
    links = {
        "network": (rows.to_nodes, rows.from_nodes, network_bytes(sizes)),
        "NVLink": (rows.to_ranks, rows.from_ranks, inside),
    }
    links = {link: values for link, values in links.items() if values[0].any()}
    for link, (sent, received, passes) in links.items():
        for direction, (out, back) in passes.items():
            sends, receives = sent * out + received * back, received * out + sent * back
            yield {
                "link": link,
                "direction": direction,
                "sent_mb": round(float(sends.mean()) / 1e6, 1),
                "busiest_mb": round(float(max(sends.max(), receives.max())) / 1e6, 1),
            }


def times_of(
    rows: Rows, sizes: Sizes, call_ms: float | None, gb_per_s: float, chunks: int
) -> dict[str, Any]:
    """Returns milliseconds of a layer's two block calls and of its exchanges between nodes.

    In one chunk all of the network time is exposed, because an exchange and a block call run one
    after the other. Several chunks hide it, except the first's arrival and the last's return.
    With full overlap only the network time beyond the block calls would be exposed. Block calls
    with 8-bit matmuls have no fit: their time is None, and so is what they leave exposed.
    """
    busiest = max(rows.to_nodes.max(), rows.from_nodes.max())
    moved = sum(out + back for out, back in network_bytes(sizes).values())
    network_ms = float(busiest * moved / gb_per_s / 1e6)
    left = None if call_ms is None else max(network_ms - call_ms, 0.0)
    exposed: float | None = network_ms
    if chunks > 1:
        exposed = None if left is None else max(left, network_ms / chunks)
    return {
        "busiest_rows": round(float(rows.experts.max() / rows.experts.mean()), 2),
        "call_ms": None if call_ms is None else round(call_ms, 2),
        "network_ms": round(network_ms, 2),
        "chunks": chunks,
        "exposed_ms": None if exposed is None else round(exposed, 2),
        "least_exposed_ms": None if left is None else round(left, 2),
    }


def block_ms(case: Case, call: Call, rows: Rows) -> npt.NDArray[np.float64]:
    """Returns milliseconds of every GPU's block calls by the fit, both passes, network apart."""
    element = specs.DTYPE_BYTES[call.group.max_token_dtype]
    hidden, inner = case.hidden * element, case.inner * element
    weights = call.group.experts_per_rank * 3 * case.hidden * inner
    # Tokens are read, sent, read on arrival, and copied to each expert; sums go back.
    dispatch = (rows.tokens + 2 * rows.from_ranks + rows.own + rows.experts) * hidden
    combine = (rows.experts + 2 * rows.to_ranks + rows.tokens) * hidden
    # Matmuls and activations read and write rows 6 times at H and 20 times at M, weights 3 times.
    experts = rows.experts * (6 * hidden + 20 * inner) + 3 * weights
    moved = 3 * dispatch + 2 * combine + experts
    flops = case.flops / (case.tokens * case.top_k) * rows.experts
    return MS_PER_TFLOP * flops / 1e12 + MS_PER_GB * moved / 1e9
