"""The op of `ep.moe`, forward and backward, which runs a body on a mesh in either mode.

Tokens are sharded as users shard them; every other array of a rank has the slab dim R in front,
with one slab per shard of the token axes. Weights are gathered over outer axes. An axis that shards
no tokens stays on M, and the partial results are then summed over it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from ep_runtime_client.base.dtypes import sum_dtype
from ep_runtime_client.moe import bodies
from ep_runtime_client.moe.bodies.protocol import Experts, Given, Over, WeightGrads
from ep_runtime_client.moe.resolved import ResolvedCall
from ep_runtime_client.ops.calls.call import world_rank
from ep_runtime_client.ops.gemm.ops import of_first
from ep_runtime_client.ops.partitioning.on_mesh import LayerOp
from ep_runtime_client.ops.partitioning.placement import Weight, expert_bias, expert_weight
from ep_runtime_client.ops.partitioning.regions import Partitioning
from ep_runtime_client.ops.partitioning.roles import (
    Arrived,
    Entries,
    Resolved,
    Roles,
    Shapes,
    Sums,
    Wanted,
    say_once,
)
from ep_runtime_client.ops.quantize.formats.table import format_of
from ep_runtime_client.ops.quantize.formats.tiles import num_tiles
from ep_runtime_client.ops.quantize.pair import of_each
from ep_runtime_client.ops.quantize.quantized_tensor import Packing, gather, unpack
from ep_runtime_client.ops.tracing.varying import Axes

_PLAN_NDIMS = (3, 3, 3, 2, 2, 2, 2, 2, 2, 3, 3, 2)  # dims of a plan's arrays, with the slab dim


@dataclasses.dataclass(frozen=True)
class Placed:
    """How a block's weights are sharded in the op.

    Attributes:
        wi: of [E, H, *N'], per dim of the joined array.
        wo: of [E, M, H].
        wi_bias: of [E, *N'], or None.
        wo_bias: of [E, H], or None.
        inner: axes on M; tokens are summed over them.
        parts: the axes of `inner` larger than 1; the first device along them adds the bias of wo.
        over: axes that split the values of one scale.
        operands: entries of the shared operands in the op.
    """

    wi: Weight
    wo: Weight
    wi_bias: Weight | None
    wo_bias: Weight | None
    inner: Axes
    parts: Axes
    over: Over
    operands: list[Entries]


@dataclasses.dataclass(frozen=True)
class BlockOp(LayerOp):
    """Base of the forward and backward ops. Hashable. The leaves of Operands come first.

    Attributes:
        where: the mesh axes and the mode in which the op runs, as in the call.
        call: the static side of the call.
        wi: how leaves form wi.
        wo: how leaves form wo.
        tree: structure of Operands with these leaves.
    """

    where: Partitioning
    call: ResolvedCall
    wi: Packing
    wo: Packing
    tree: Any

    name: ClassVar[str] = "block"

    def _by_name(self, flat: Sequence[Any]) -> Any:
        """Returns Operands of one value per leaf; `flat` may have more values after them."""
        return self.tree.unflatten(flat[: self.tree.num_leaves])

    def place(self, roles: Roles, arrived: Arrived, shapes: Shapes) -> Placed:
        """Chooses the layout of the weights, given their sharding on arrival."""
        sharding, given = self._by_name(arrived), self._by_name(shapes)
        ruled = self.where.mode == "rule"
        shape, wo_shape = self.wi.of_values(given.wi[0], 2), given.wo[0]
        wi_sharding = self.wi.of_values(sharding.wi[0], ())
        wi = expert_weight(roles, wi_sharding, shape, blocks=self.wi.blocks, ruled=ruled)
        wo = expert_weight(roles, sharding.wo[0], wo_shape, blocks=self.wo.blocks, ruled=ruled)
        inner = self._inner(roles, wi, wo, wo_shape[1])
        dropped = dict.fromkeys(a for a in wi.kept[1] + wo.kept[2] if a not in inner)
        if dropped:
            say_once(
                f"weights of {roles.owner} are sharded over {roles.named(dropped)} on H, and rows "
                "are not: they are gathered over it"
            )
        wi, wo, parts = _on(wi, len(shape) - 1, inner), _on(wo, 1, inner), roles.real(inner)
        wi_bias = sharding.wi_bias and expert_bias(roles, wi, sharding.wi_bias, shape)  # or None
        wo_bias = sharding.wo_bias and expert_bias(roles, wo, sharding.wo_bias, wo_shape)
        over = Over(roles.real(roles.outer), parts)
        biases = (None if bias is None else bias.entries for bias in (wi_bias, wo_bias))
        operands = self.entries(roles, wi.entries, wo.entries, *biases)
        return Placed(wi, wo, wi_bias, wo_bias, inner, parts, over, operands)

    def _inner(self, roles: Roles, wi: Weight, wo: Weight, width: int) -> Axes:
        """Returns the axes that shard M of both weights."""
        inner = (wi.kept[-1] or wo.kept[1]) if "m" in self._columns else ()
        unit = bodies.BODIES[self.call.body].multiple(self.call, paired=self.wi.paired)
        gone = (wi.gathered[-1], wo.gathered[1])
        whole = all(width % (roles.size(inner + each) * unit) == 0 for each in gone)
        if inner and not whole:
            say_once(
                f"M={width} over {roles.named(inner)} of {roles.owner} does not leave multiples "
                f"of {unit} on every shard: weights are gathered over it"
            )
        return inner if whole else ()

    def entries(
        self, roles: Roles, wi: Entries, wo: Entries, *biases: Entries | None
    ) -> list[Entries]:
        """Returns entries of the shared operands, given the entries of weights and both biases."""
        there, tokens = self._by_name(range(self.tree.num_leaves)), self.call.moved.layout.entries()
        slab, whole = (roles.slab,), ((),)
        by_name = there._replace(
            layer_index=whole,
            topk_idx=tokens,
            tokens=tokens,
            weights=tokens,
            most=slab,
            plan=type(there.plan)(*[slab] * len(there.plan)),
            wi=tuple(self.wi.spread(wi)),
            wo=tuple(self.wo.spread(wo)),
            wi_bias=biases[0],
            wo_bias=biases[1],
            scales=(slab,) * len(there.scales),
            values=(whole,) * len(there.values),
            copies=None if there.copies is None else slab,
        )
        return self.tree.flatten_up_to(by_name)

    def saved_entries(self, roles: Roles, place: Placed) -> list[Entries]:
        """Returns entries of the saved arrays: slabs; for hidden with the axes of N'."""
        hidden: Entries = (roles.slab, (), *place.wi.kept[2:])
        return [hidden if name == "hidden" else (roles.slab,) for name in self.call.saved]

    def opened(self, place: Placed, blocks: Sequence[jax.Array]) -> tuple[Given, Experts]:
        """Unpacks one device's blocks of the operands, and gathers the weights."""
        mine = self._by_name(blocks)
        rows = (mine.topk_idx, mine.tokens, mine.weights)
        idx, tokens, weights = (x.reshape(-1, x.shape[-1]) for x in rows)
        of_slab = (mine.most, mine.plan, mine.scales, mine.copies)
        most, plan, scales, copies = jax.tree.map(lambda x: x[0], of_slab)
        rank = world_rank(self.call.moved.group)
        given = Given(rank, mine.layer_index, idx, tokens, weights, most, plan, scales, copies)
        wi: Any = unpack(self.wi, [*map(gather, mine.wi, self.wi.spread(place.wi.gathered))])
        wo: Any = unpack(self.wo, [*map(gather, mine.wo, self.wo.spread(place.wo.gathered))])
        wi_bias = None if place.wi_bias is None else gather(mine.wi_bias, place.wi_bias.gathered)
        wo_bias = None if place.wo_bias is None else gather(mine.wo_bias, place.wo_bias.gathered)
        if wo_bias is not None and place.parts:
            wo_bias = of_first(place.parts, wo_bias)
        return given, Experts(wi, wo, wi_bias, wo_bias, mine.values)

    def runs_nowhere(self, roles: Roles) -> bool:
        """Whether the op is only traced for its results' shapes, for several devices at once."""
        return not roles.sizes and self.call.moved.group.world_size > 1

    @functools.cached_property
    def shared_factors(self) -> Any:
        """Returns Operands with the Shardy factors of the shared operands."""
        there = self._by_name(range(self.tree.num_leaves))
        tokens = " ".join(f"t{dim}" for dim in range(len(self.call.moved.layout.lead)))
        plan = [
            " ".join(["r", *(f"p{number}{dim}" for dim in range(1, ndim))])
            for number, ndim in enumerate(_PLAN_NDIMS[: len(there.plan)])
        ]
        return there._replace(
            layer_index="i",
            topk_idx=f"{tokens} k",
            tokens=f"{tokens} x",
            weights=f"{tokens} k",
            most="r one",
            plan=type(there.plan)(*plan),
            wi=tuple(self.wi.factors(["e", "h", *self._columns])),
            wo=tuple(self.wo.factors(["e", "m", "o"])),
            wi_bias=None if there.wi_bias is None else " ".join(["e", *self._columns]),
            wo_bias=None if there.wo_bias is None else "e o",
            scales=("r l",) * len(there.scales),
            values=tuple(f"v{number}" for number in range(len(there.values))),
            copies=None if there.copies is None else "r n s0",
        )

    @functools.cached_property
    def _columns(self) -> list[str]:
        """Factors of N'; "m" if M is a separate dim of wi, which axes may shard."""
        if self.wi.ndim == 4:
            return ["g", "m"]
        return ["n" if self.call.activation.gated else "m"]

    def saved_factors(self) -> list[str]:
        """Returns Shardy factors of the arrays saved for backward."""
        named = {
            "rows": "r c x",
            "data": "r c x",
            "scales": "r c s",
            "weights": "r c",
            "hidden": " ".join(["r", "w", *self._columns]),
            "made": "r one",
        }
        return [named[name] for name in self.call.saved]

    def saved_shapes(self, shapes: Any, rows: Any) -> list[Any]:
        """Returns shapes and dtypes of saved arrays, from global operands; `rows`: rows' dtype."""
        call, hidden, room = self.call, shapes.tokens[-1], self.call.workspace
        count = call.moved.capacity if room is None else room.saved
        columns = self.wi.of_values(shapes.wi[0], 2)[2:]
        known = {
            "rows": ((count, hidden), rows),
            "data": ((count, hidden), jnp.uint8),
            "scales": ((count, num_tiles(hidden, format_of(call.sent_by).tile)), jnp.float32),
            "weights": ((count,), jnp.float32),
            "hidden": ((count, *columns), call.activation.dtype),
            "made": ((1,), jnp.int32),
        }
        found = (known[name] for name in self.call.saved)
        return [jax.ShapeDtypeStruct((shapes.most[0], *shape), dtype) for shape, dtype in found]


@dataclasses.dataclass(frozen=True)
class BlockForward(BlockOp):
    """The forward op -> (y like tokens, saved arrays, amax [R, L] of rows per delayed recipe).

    Attributes:
        bare: whether to make only the saved arrays. A body with a workspace returns zeros that are
            marked as not made, because its backward makes these rows sooner itself.
    """

    bare: bool = False

    def resolve(self, roles: Roles, arrived: Arrived, shapes: Shapes, wanted: Wanted) -> Resolved:
        place, sums = self.place(roles, arrived, shapes), Sums(roles, self.where.manual)

        def local(*blocks: jax.Array) -> tuple[jax.Array, ...]:
            tokens = self._by_name(blocks).tokens
            if self.runs_nowhere(roles):
                return self._shapes(shapes, blocks)
            given, experts = self.opened(place, blocks)
            if self.bare:
                return self._nothing(experts, tokens.dtype)
            made = bodies.BODIES[self.call.body].forward(self.call, given, experts, place.over)
            y = _added_up(sums, made.y, place.inner).reshape(tokens.shape)
            return y, *(x[None] for x in (*made.saved, *made.amax))

        amax: list[Entries] = [(roles.slab,)] * sum(self.call.delayed)
        results = self.saved_entries(roles, place)
        if not self.bare:
            results = [self.call.moved.layout.entries(), *results, *amax]
        return Resolved(tuple(place.operands), tuple(results), local)

    def _nothing(self, experts: Experts, dtype: Any) -> tuple[jax.Array, ...]:
        """Zeros in place of the saved arrays, marked as not made."""
        room = self.call.workspace
        assert room is not None
        rows = jnp.zeros((1, room.saved, *experts.wi.shape[2:]), dtype)
        return (rows, jnp.zeros((1, 1), jnp.int32)) * self.call.chunks

    def _shapes(self, shapes: Shapes, arrays: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        given = self._by_name(arrays)
        saved = self.saved_shapes(self._by_name(shapes), given.tokens.dtype)
        made = [jnp.zeros(x.shape, x.dtype) for x in saved]
        amax = [jnp.zeros(x.shape, jnp.float32) for x in given.scales]
        return tuple(made) if self.bare else (jnp.zeros_like(given.tokens), *made, *amax)

    def factors(self) -> tuple[list[str], list[str]]:
        given, saved = self.shared_factors, self.saved_factors()
        made = saved if self.bare else [given.tokens, *saved, *given.scales]
        return jax.tree.leaves(given), made


@dataclasses.dataclass(frozen=True)
class BlockBackward(BlockOp):
    """Computes gradients from operands, saved values and dy, which has the shape of tokens.

    It returns gradients of tokens and weights, biases, the activation's values, wi (two for a pair)
    and wo.

    Attributes:
        dtypes: of the gradients of wi and wo.
        frozen: whether to leave out the gradients of wi and wo.
    """

    dtypes: tuple[Any, Any] = (None, None)
    frozen: bool = False

    name: ClassVar[str] = "block_bwd"

    def resolve(self, roles: Roles, arrived: Arrived, shapes: Shapes, wanted: Wanted) -> Resolved:
        place, call = self.place(roles, arrived, shapes), self.call
        sums, shared = Sums(roles, self.where.manual), roles.real(roles.outer)
        outside = tuple(axis for axis in place.parts if axis in self.where.manual)
        wi_place, wo_place = self._themselves(roles, place, self._by_name(shapes))

        def back(x: Any, taken_off: Entries, like: Any) -> jax.Array:
            # Values that are summed over devices stay wide.
            wide = x.astype(sum_dtype(x.dtype)) if shared else x
            return sums.back(wide, taken_off, shared).astype(like)

        def local(*blocks: jax.Array) -> tuple[jax.Array, ...]:
            if self.runs_nowhere(roles):
                return self._shapes(blocks)
            mine, (given, experts) = self._by_name(blocks), self.opened(place, blocks)
            *saved, dy = blocks[self.tree.num_leaves :]
            saved, dy = [x[0] for x in saved], dy.reshape(-1, dy.shape[-1])
            grads = WeightGrads(call.paired, self._made(shared), wanted=not self.frozen)
            made = bodies.BODIES[call.body].backward(
                call, given, experts, tuple(saved), dy, grads, place.over
            )
            d_tokens = _added_up(sums, made.tokens, place.inner).reshape(mine.tokens.shape)
            d_weights = sums.total(made.weights, place.inner).reshape(mine.weights.shape)
            wi_off, wo_off = of_each(wi_place.taken_off, call.paired), wo_place.taken_off
            kernels = [back(x, wi_off, self.dtypes[0]) for x in jax.tree.leaves(made.wi)]
            kernels += [back(x, wo_off, self.dtypes[1]) for x in jax.tree.leaves(made.wo)]
            biases = []
            if place.wi_bias is not None:
                biases.append(back(made.wi_bias, place.wi_bias.gathered, mine.wi_bias.dtype))
            if place.wo_bias is not None:
                part: Any = made.wo_bias
                part = of_first(outside, part) if outside else part
                biases.append(back(part, place.wo_bias.gathered, mine.wo_bias.dtype))
            everywhere = roles.real(roles.slab)
            values = [
                jnp.zeros_like(x) if d is None else sums.total(d, everywhere)
                for d, x in zip(made.values, experts.values, strict=True)
            ]
            return d_tokens, d_weights, *biases, *values, *kernels

        given, tokens = place.operands, call.moved.layout.entries()
        kernels = [of_each(wi_place.sharding, call.paired)] * (1 + call.paired) + [
            wo_place.sharding
        ]
        results = (tokens, tokens, *self._by_name(given).others, *self._wanted(kernels))
        return Resolved((*given, *self.saved_entries(roles, place), tokens), results, local)

    def _themselves(self, roles: Roles, place: Placed, shapes: Any) -> tuple[Weight, Weight]:
        """Returns the shardings of the weights from which the leaves were quantized."""
        own = self.call.sharding[:2]
        if own == self.call.multiplied:
            return place.wi, place.wo
        whole = (self.wi.of_values(shapes.wi[0], 2), shapes.wo[0])
        given = zip(own, whole, (self.wi, self.wo), strict=True)
        found = [expert_weight(roles, e, s, blocks=packing.blocks) for e, s, packing in given]
        wi, wo = (each.before for each in found)
        return dataclasses.replace(place.wi, before=wi), dataclasses.replace(place.wo, before=wo)

    def _wanted(self, of_kernels: list[Any]) -> list[Any]:
        return [] if self.frozen else of_kernels

    def _made(self, shared: Axes) -> Any:
        """Returns the dtype in which the body makes gradients of weights; None is the rows' dtype.

        The kernels of unquantized matmuls use the rows' dtype. Other bodies use the wanted dtype,
        or a wide one if devices sum their gradients.
        """
        call = self.call
        if call.workspace is not None and call.recipes[0] is None:
            return None
        same = self.dtypes[0] == self.dtypes[1]
        return self.dtypes[0] if same and not shared else call.activation.wide

    def _shapes(self, blocks: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        mine, (first, second) = self._by_name(blocks), self.dtypes
        wi = of_each(self.wi.of_values(mine.wi[0].shape, 2), self.call.paired)
        kernels = [jnp.zeros(wi, first)] * (1 + self.call.paired)
        kernels.append(jnp.zeros(mine.wo[0].shape, second))
        others = map(jnp.zeros_like, (mine.tokens, mine.weights, *mine.others))
        return (*others, *self._wanted(kernels))

    def factors(self) -> tuple[list[str], list[str]]:
        given = self.shared_factors
        wi = " ".join(of_each(["e", "h", *self._columns], self.call.paired))
        kernels = self._wanted([*[wi] * (1 + self.call.paired), "e m o"])
        operands = [*jax.tree.leaves(given), *self.saved_factors(), given.tokens]
        return operands, [given.tokens, given.weights, *given.others, *kernels]


def _on(weight: Weight, dim: int, inner: Axes) -> Weight:
    """Returns `weight` with `inner` on a dim, and otherwise only the expert dim sharded."""
    kept = (weight.kept[0], *[()] * (len(weight.entries) - 1))
    placed = [inner if d == dim else axes for d, axes in enumerate(kept)]
    pairs = zip(placed, weight.gathered, strict=True)
    return Weight(tuple(axes + gone for axes, gone in pairs), weight.gathered)


def _added_up(sums: Sums, x: jax.Array, inner: Axes) -> jax.Array:
    """Sums tokens over `inner` in a wide dtype."""
    if not sums.free(inner):
        return x
    return sums.total(x.astype(sum_dtype(x.dtype)), inner).astype(x.dtype)
