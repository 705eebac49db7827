"""One resolved call of `ep.moe`: its static settings, and its operands."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, NamedTuple

import jax

from ep_runtime.workspace import BlockSizes
from ep_runtime_client.ops.activation.function import Activation
from ep_runtime_client.ops.calls.call import Call
from ep_runtime_client.ops.calls.plan import AnyArrays
from ep_runtime_client.ops.partitioning.regions import Partitioning
from ep_runtime_client.ops.partitioning.roles import Entries
from ep_runtime_client.ops.quantize.formats.recipes import Recipe
from ep_runtime_client.ops.quantize.quantized_tensor import Kernel, QuantizedTensor

# Where the router's weights multiply: experts' inputs, activations, or outputs in combine.
Weighted = Literal["input", "hidden", "output"]
# Names of arrays saved for backward; `op.BlockOp.saved_factors` tells how each is sharded.
Saved = Literal["rows", "data", "scales", "weights", "hidden", "made"]

_PLAN_BYTES = 4 << 20  # a rank always saves a plan up to this size


@dataclasses.dataclass(frozen=True)
class WorkspaceRows:
    """Row counts of a call with rows in a workspace instead of arrays. Hashable.

    Attributes:
        sizes: sizes of a call with whole weights.
        rows: W, rows of the workspace.
        saved: rows of the first matmul's result that forward saves for backward.
    """

    sizes: BlockSizes
    rows: int
    saved: int

    def here(self, inner: int) -> BlockSizes:
        """Returns sizes on a device that has `inner` columns of M."""
        return dataclasses.replace(self.sizes, mlp_dim=inner)


@dataclasses.dataclass(frozen=True)
class ResolvedCall:
    """The static part of one call of `moe`, computed once. Hashable.

    Attributes:
        where: the mesh axes and the mode in which the call's op runs.
        moved: layer, layout, capacity and handle of its prepare, dispatch and combine.
        body: name of the body.
        activation: activation between the matmuls; its dtype is the dtype of rows everywhere.
        weighted: what the router's weights multiply.
        recipes: recipes that quantize the operands of the first and second matmul, or None.
        delayed: for each matmul, whether scales of its rows are given.
        sent_by: recipe that quantizes tokens before they are sent, or None.
        sharding: entries of wi (as one array), wo and their biases, if known; None for an absent
            bias.
        multiplied: entries of wi and wo in their matmuls: quantized weights may be sharded over
            fewer axes.
        types: entries that the gradients of every array of Operands must have as types.
        paired: whether wi is a Pair.
        dtypes: of the gradients of wi and wo; None for no gradient.
        saved: names of the arrays that forward saves for backward, in order.
        sums: dtype of sums of experts' rows; None is the dtype of tokens.
        tf32: whether float32 operands of matmuls may be rounded to tf32.
        workspace: rows of the workspace; None for a body without one.
        chunks: chunks of the tokens; with several, `workspace` is of one (`bodies/cuda_nodes.py`).
    """

    where: Partitioning
    moved: Call
    body: str
    activation: Activation
    weighted: Weighted
    recipes: tuple[Recipe | None, Recipe | None]
    delayed: tuple[bool, bool]
    sent_by: Recipe | None
    sharding: tuple[Entries, Entries, Entries | None, Entries | None]
    multiplied: tuple[Entries, Entries]
    types: tuple[Entries | None, ...]
    paired: bool
    dtypes: tuple[Any, ...]
    saved: tuple[Saved, ...] = ()
    sums: Any = None
    tf32: bool = False
    workspace: WorkspaceRows | None = None
    chunks: int = 1

    def __repr__(self) -> str:
        """Returns a text equal in all processes: no `where` and `moved`, which name devices."""
        meta = self.moved.meta
        fields = [x for x in dataclasses.fields(self) if x.name not in ("where", "moved")]
        named = [f"{x.name}={getattr(self, x.name)!r}" for x in fields]
        of_call = (meta.layout, meta.capacity, meta.handle, meta.layer.base_id)
        return f"ResolvedCall({of_call}, {', '.join(named)})"

    @property
    def plans_again(self) -> bool:
        """Whether backward runs prepare again instead of reading a saved plan."""
        room = self.workspace
        # Without a workspace a call saves rows of the worst case, next to which its plan is small.
        # Spread rows have no worst case.
        if room is None or self.moved.spread:
            return False
        sizes, count = room.sizes, self.chunks * room.sizes.tokens
        plan = 4 * (2 * sizes.capacity + sizes.ep_size * count)
        tokens = count * sizes.hidden_size * sizes.element_bytes
        # If an overflow is an error, prepare waits on the host for its verdict: do not repeat it.
        return plan > max(_PLAN_BYTES, tokens // 8) and self.moved.group.on_overflow != "error"

    def saving_nothing(self) -> ResolvedCall:
        """Returns the call with no rows saved for backward."""
        room = self.workspace and dataclasses.replace(self.workspace, saved=0)
        return dataclasses.replace(self, saved=(), workspace=room)


class Operands(NamedTuple):
    """Arrays of one call, by name. Tokens are sharded as the call's layout says.

    The op takes the leaves in this order; other values per operand (entries, Shardy factors,
    shapes) have the same names.

    Attributes:
        layer_index: int32 [1], of the layer in its stack.
        topk_idx: int32 [..., K].
        tokens: [..., H].
        weights: f32 [..., K].
        most: int32 [R, 1], from prepare.
        plan: from prepare.
        wi: [E, H, *N'], or a Pair; after `run` quantized, if a recipe says so; in the op its
            leaves. None if it was given quantized and needs no gradient.
        wo: [E, M, H]; likewise.
        wi_bias: [E, *N'], or None.
        wo_bias: [E, H], or None.
        wi8: wi if it was given quantized; None after `run`.
        wo8: likewise.
        scales: for each matmul with a delayed recipe, f32 [R, L] of its rows and [E] of its
            weights; after `run` of rows only.
        values: arrays that a learned activation reads, each flat.
        copies: int32 [R, N, S], the expert of each slot of the ranks (`copies.py`), or None.
    """

    layer_index: jax.Array
    topk_idx: jax.Array
    tokens: jax.Array
    weights: jax.Array
    most: jax.Array
    plan: AnyArrays
    wi: Kernel | Any
    wo: Kernel | Any
    wi_bias: jax.Array | None = None
    wo_bias: jax.Array | None = None
    wi8: QuantizedTensor | None = None
    wo8: QuantizedTensor | None = None
    scales: tuple[Any, ...] = (None, None)
    values: tuple[jax.Array, ...] = ()
    copies: jax.Array | None = None

    @property
    def others(self) -> list[jax.Array]:
        """Returns the biases that are not None, then `values`."""
        return [*(x for x in (self.wi_bias, self.wo_bias) if x is not None), *self.values]

    @property
    def kernels(self) -> tuple[Kernel, Kernel]:
        """Returns wi and wo: quantized weights that the caller gave, else the plain ones."""
        return (
            self.wi if self.wi8 is None else self.wi8,
            self.wo if self.wo8 is None else self.wo8,
        )
