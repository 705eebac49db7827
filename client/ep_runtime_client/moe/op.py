"""The op of `ep.moe`, forward and backward, as both partitionings run it around any body.

Tokens come as slabs [R, T, H], one for each shard of the token axes, and so does everything that
belongs to them. Outer axes are gathered off the weights, an axis that shards no tokens stays on M,
and what it splits is added up where tokens are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from ep_runtime_client.moe import bodies
from ep_runtime_client.moe.bodies.protocol import (
    Body,
    Experts,
    Given,
    Over,
    Saved,
    Static,
    WeightGrads,
)
from ep_runtime_client.ops.calls.call import world_rank
from ep_runtime_client.ops.calls.plan import arrays_type
from ep_runtime_client.ops.gemm.ops import of_first
from ep_runtime_client.ops.partitioning.placement import Weight, expert_bias, expert_weight
from ep_runtime_client.ops.partitioning.regions import Where
from ep_runtime_client.ops.partitioning.resolved import Resolved, Sums
from ep_runtime_client.ops.partitioning.roles import Entries, Roles, say_once
from ep_runtime_client.ops.quantize.formats.table import format_of
from ep_runtime_client.ops.quantize.formats.tiles import num_tiles
from ep_runtime_client.ops.quantize.packing import Packing, Value, gather, unpack
from ep_runtime_client.ops.quantize.pair import of_each
from ep_runtime_client.ops.tracing.varying import Axes

_FIRST = 5  # operands in front of the plan: index, topk_idx, tokens, weights, most
_TOKENS, _WEIGHTS = 2, 3


@dataclasses.dataclass(frozen=True)
class Placed:
    """How the weights of a block are taken.

    Attributes:
        wi: of [E, H, *N'], per dim of the one array.
        wo: of [E, M, H].
        biases: of theirs, of those that there are.
        inner: axes on M; tokens are summed over them.
        parts: those of them that divide anything; the bias of wo is added on the first device.
    """

    wi: Weight
    wo: Weight
    biases: tuple[Weight, ...]
    inner: Axes
    parts: Axes


@dataclasses.dataclass(frozen=True)
class BlockOp:
    """What forward and backward share. Hashable.

    Operands: index [1], topk_idx [R, T, K], tokens [R, T, H], weights [R, T, K], most [R, 1], the
    plan's arrays, scales [R, L] of rows for each product whose recipe is delayed, leaves of wi
    [E, H, *N'] (gate and up [E, H, M] are two) and of wo [E, M, H], and their biases [E, *N'] and
    [E, H].

    Attributes:
        where: where it runs.
        static: what is static on one device.
        wi: its leaves.
        wo: its leaves.
        biases: whether wi has one, and wo.
        values: how many a learned activation reads; they come last, each flat.
    """

    where: Where
    static: Static
    wi: Packing
    wo: Packing
    biases: tuple[bool, bool]
    values: int = 0

    name: ClassVar[str] = "block"

    @property
    def _plan(self) -> Any:
        return arrays_type(self.static.call.group)

    @property
    def _body(self) -> Body:
        return bodies.named(self.static.body)

    @property
    def _scales(self) -> int:
        """Which operand is the first of the scales."""
        return _FIRST + len(self._plan._fields)

    @property
    def _wi(self) -> int:
        """Which operand is the first of wi."""
        return self._scales + sum(self.static.delayed)

    @property
    def _wo(self) -> int:
        """Which operand is the first of wo."""
        return self._wi + len(self.wi)

    @property
    def _biases(self) -> int:
        """Which operand is the first bias."""
        return self._wo + len(self.wo)

    @property
    def _count(self) -> int:
        """Operands that both directions take."""
        return self._values + self.values

    @property
    def _values(self) -> int:
        """Which operand is the first value."""
        return self._biases + sum(self.biases)

    @property
    def _splits(self) -> bool:
        """Whether M is a dim of wi, which axes may lie on."""
        return self.wi.ndim == 4 or not self.static.activation.gated

    def roles(
        self, sizes: tuple[tuple[str, int], ...], arrived: Sequence[Entries], shapes: Any
    ) -> Roles:
        raise AssertionError("the roles of axes come with the layer")

    def place(
        self, roles: Roles, arrived: Sequence[Entries], shapes: Sequence[tuple[int, ...]]
    ) -> Placed:
        """How the weights are taken, which arrive like this."""
        first, second, ruled = self._wi, self._wo, self.where.mode == "rule"
        lies, shape = self.wi.of_values(arrived[first], ()), self.wi.of_values(shapes[first], 2)
        wi = expert_weight(roles, lies, shape, blocks=self.wi.blocks, ruled=ruled)
        wo = expert_weight(
            roles, arrived[second], shapes[second], blocks=self.wo.blocks, ruled=ruled
        )
        inner = self._inner(roles, wi, wo, shapes[second][1])
        dropped = dict.fromkeys(a for a in wi.kept[1] + wo.kept[2] if a not in inner)
        if dropped:
            say_once(
                f"weights of {roles.owner} are sharded over {roles.named(dropped)} on H, and rows "
                "are not: they are gathered over it"
            )
        wi, wo = _on(wi, len(shape) - 1, inner), _on(wo, 1, inner)
        theirs = self._there(((wi, shape), (wo, shapes[second])))
        given = arrived[self._biases : self._values]
        biases = [
            expert_bias(roles, weight, lies, shape)
            for lies, (weight, shape) in zip(given, theirs, strict=True)
        ]
        return Placed(wi, wo, tuple(biases), inner, roles.real(inner))

    def _there(self, of_both: tuple[Value, Value]) -> list[Value]:
        """What there is of both biases, of those that there are."""
        return [x for x, there in zip(of_both, self.biases, strict=True) if there]

    def _inner(self, roles: Roles, wi: Weight, wo: Weight, width: int) -> Axes:
        """The axes that M of both weights is taken over."""
        inner = (wi.kept[-1] or wo.kept[1]) if self._splits else ()
        unit = self._body.multiple(self.static, paired=self.wi.paired)
        gone = (wi.gathered[-1], wo.gathered[1])
        whole = all(width % (roles.size(inner + each) * unit) == 0 for each in gone)
        if inner and not whole:
            say_once(
                f"M={width} over {roles.named(inner)} of {roles.owner} does not leave multiples "
                f"of {unit} on every shard: weights are gathered over it"
            )
        return inner if whole else ()

    def taken(self, roles: Roles, place: Placed, shapes: Sequence[Any]) -> list[Entries]:
        """Entries of the operands that both directions take."""
        slabs = [(roles.slab, *[()] * (len(shape) - 1)) for shape in shapes[1 : self._wi]]
        biases = [bias.entries for bias in place.biases]
        weights = (*self.wi.spread(place.wi.entries), *self.wo.spread(place.wo.entries))
        return [((),), *slabs, *weights, *biases, *[((),)] * self.values]

    @property
    def saved(self) -> tuple[Saved, ...]:
        """What forward saves for backward, in order."""
        return self._body.saved(self.static)

    def saved_entries(self, roles: Roles, place: Placed) -> list[Entries]:
        """Entries of what is saved: [R, rows] of slabs and more dims, those of hidden N'."""
        ndims = {"weights": 2, "made": 2}
        hidden: Entries = (roles.slab, (), *place.wi.kept[2:])
        return [
            hidden if name == "hidden" else (roles.slab, *[()] * (ndims.get(name, 3) - 1))
            for name in self.saved
        ]

    def over(self, roles: Roles, place: Placed) -> Over:
        """Axes that split what one scale is for."""
        return Over(roles.real(roles.outer), place.parts)

    def opened(self, place: Placed, blocks: Sequence[jax.Array]) -> tuple[Given, Experts]:
        """Local blocks of the operands as one device takes them, weights gathered."""
        index, *slabs = blocks[: self._wi]
        idx, tokens, weights, most, *others = (x[0] for x in slabs)
        count = len(self._plan._fields)
        plan, scales = self._plan(*others[:count]), tuple(others[count:])
        rank = world_rank(self.static.call.group)
        given = Given(rank, index, idx, tokens, weights, most, plan, scales)
        found: list[Any] = []
        for packing, taken, first in ((self.wi, place.wi, self._wi), (self.wo, place.wo, self._wo)):
            leaves = zip(
                blocks[first : first + len(packing)], packing.spread(taken.gathered), strict=True
            )
            found.append(unpack(packing, [gather(*each) for each in leaves]))
        placed = zip(blocks[self._biases : self._values], place.biases, strict=True)
        biases = (gather(x, bias.gathered) for x, bias in placed)
        wi_bias, wo_bias = (next(biases) if there else None for there in self.biases)
        if wo_bias is not None and place.parts:
            wo_bias = of_first(place.parts, wo_bias)
        wi, wo = found
        values = tuple(blocks[self._values : self._count])
        return given, Experts(wi, wo, wi_bias, wo_bias, values)

    def runs_nowhere(self, roles: Roles) -> bool:
        """Whether only the results' shapes are asked for: of a group of several devices at once."""
        sizes = self.static.call.group.axis_sizes.values()
        return not roles.sizes and any(size > 1 for size in sizes)

    def shared_factors(self) -> list[str]:
        """Factors of the operands that both directions take."""
        rows = ["r t k", "r t x", "r t k", "r one"]
        ndims = (3, 3, 3, 2, 2, 2, 2, 2, 2, 3, 3, 2)  # with the slab dim, as plans have them
        for number, ndim in enumerate(ndims[: len(self._plan._fields)]):
            rows.append(" ".join(["r", *(f"p{number}{dim}" for dim in range(1, ndim))]))
        rows += ["r l"] * sum(self.static.delayed)
        biases = self._there((" ".join(["e", *self._columns]), "e o"))
        values = [f"v{number}" for number in range(self.values)]
        return ["i", *rows, *self._kernels, *biases, *values]

    @property
    def _columns(self) -> list[str]:
        """Factors of N'."""
        middle = ["g"] if self.wi.ndim == 4 else []
        return [*middle, "m" if self._splits else "n"]

    @property
    def _kernels(self) -> list[str]:
        """Factors of the leaves of wi and wo."""
        return [*self.wi.factors(["e", "h", *self._columns]), *self.wo.factors(["e", "m", "o"])]

    def saved_factors(self) -> list[str]:
        """Factors of what is saved."""
        named = {
            "rows": "r c x",
            "data": "r c x",
            "scales": "r c s",
            "weights": "r c",
            "hidden": " ".join(["r", "w", *self._columns]),
            "made": "r one",
        }
        return [named[name] for name in self.saved]

    def saved_shapes(self, shapes: Sequence[tuple[int, ...]], rows: Any) -> list[Any]:
        """Shapes and dtypes of what is saved, from whole operands; `rows`: dtype of rows."""
        static, slabs = self.static, shapes[_TOKENS][0]
        room, hidden = static.workspace, shapes[_TOKENS][-1]
        count = static.call.capacity if room is None else room.saved
        tile = format_of(static.sent_by).tile
        columns = self.wi.of_values(shapes[self._wi], 2)[2:]
        known = {
            "rows": ((count, hidden), rows),
            "data": ((count, hidden), jnp.uint8),
            "scales": ((count, num_tiles(hidden, tile)), jnp.float32),
            "weights": ((count,), jnp.float32),
            "hidden": ((count, *columns), static.activation.dtype),
            "made": ((1,), jnp.int32),
        }
        found = (known[name] for name in self.saved)
        return [jax.ShapeDtypeStruct((slabs, *shape), dtype) for shape, dtype in found]


@dataclasses.dataclass(frozen=True)
class BlockForward(BlockOp):
    """-> (y [R, T, H], what is saved, amax [R, L] of rows for each delayed recipe).

    Attributes:
        bare: only what is saved is asked for. A body that has a workspace makes such rows sooner
            in backward, which goes on from them: they are zeros that were not made.
    """

    bare: bool = False

    def resolve(
        self,
        roles: Roles,
        arrived: Sequence[Entries],
        shapes: Sequence[tuple[int, ...]],
        wanted: Sequence[Entries] | None,
    ) -> Resolved:
        place = self.place(roles, arrived, shapes)
        sums, over = Sums(roles, self.where.manual), self.over(roles, place)

        def local(*blocks: jax.Array) -> tuple[jax.Array, ...]:
            if self.runs_nowhere(roles):
                return self._shapes(shapes, blocks[_TOKENS])
            if self.bare:
                return self._nothing(place, blocks)
            given, experts = self.opened(place, blocks)
            made = self._body.forward(self.static, given, experts, over)
            results = (_added_up(sums, made.y, place.inner), *made.saved, *made.amax)
            return tuple(x[None] for x in results)

        slab: Entries = (roles.slab, (), ())
        lies = [*self.saved_entries(roles, place), *[slab[:2]] * sum(self.static.delayed)]
        results = lies if self.bare else [slab, *lies]
        return Resolved(tuple(self.taken(roles, place, shapes)), tuple(results), local)

    def _nothing(self, place: Placed, blocks: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        """Blocks of what is saved, not made."""
        experts = self.opened(place, blocks)[1]
        room = self.static.workspace
        assert room is not None
        rows = jnp.zeros((1, room.saved, *experts.wi.shape[2:]), blocks[_TOKENS].dtype)
        return rows, jnp.zeros((1, 1), jnp.int32)

    def _shapes(
        self, shapes: Sequence[tuple[int, ...]], tokens: jax.Array
    ) -> tuple[jax.Array, ...]:
        saved = [jnp.zeros(x.shape, x.dtype) for x in self.saved_shapes(shapes, tokens.dtype)]
        amax = [jnp.zeros(shape, jnp.float32) for shape in shapes[self._scales : self._wi]]
        return tuple(saved) if self.bare else (jnp.zeros_like(tokens), *saved, *amax)

    def factors(self) -> tuple[list[str], list[str]]:
        saved, amax = self.saved_factors(), ["r l"] * sum(self.static.delayed)
        return self.shared_factors(), saved if self.bare else ["r t x", *saved, *amax]


@dataclasses.dataclass(frozen=True)
class BlockBackward(BlockOp):
    """Operands, what is saved, dy [R, T, H] -> gradients of tokens and weights as slabs, of wi (of
    a pair two), wo and the biases as they are.

    Attributes:
        paired: whether wi is a pair; quantized, its leaves are those of one array.
        dtypes: of the gradients of wi and wo.
        own: entries of wi and wo themselves, where they are known and their leaves do not lie so.
    """

    paired: bool = False
    dtypes: tuple[Any, Any] = (None, None)
    own: tuple[Entries, Entries] | None = None

    name: ClassVar[str] = "block_bwd"

    def resolve(
        self,
        roles: Roles,
        arrived: Sequence[Entries],
        shapes: Sequence[tuple[int, ...]],
        wanted: Sequence[Entries] | None,
    ) -> Resolved:
        place = self.place(roles, arrived, shapes)
        sums, shared = Sums(roles, self.where.manual), roles.real(roles.outer)
        outside = tuple(axis for axis in place.parts if axis in self.where.manual)
        over = self.over(roles, place)
        wi_place, wo_place = self._themselves(roles, place, shapes)

        def back(x: jax.Array, taken_off: Entries, like: Any) -> jax.Array:
            # What is added up over devices stays wide.
            wide = x.astype(_wide(x)) if shared else x
            return sums.back(wide, taken_off, shared).astype(like)

        def local(*blocks: jax.Array) -> tuple[jax.Array, ...]:
            if self.runs_nowhere(roles):
                return self._shapes(blocks)
            given, experts = self.opened(place, blocks)
            *saved, dy = (x[0] for x in blocks[self._count :])
            grads = WeightGrads(self.paired, self._made(shared))
            made = self._body.backward(self.static, given, experts, tuple(saved), dy, grads, over)
            d_tokens = _added_up(sums, made.tokens, place.inner)
            d_weights = sums.total(made.weights, place.inner)
            off = self._each(wi_place.taken_off)
            wi = [back(x, off, self.dtypes[0]) for x in jax.tree.leaves(made.wi)]
            wo = back(made.wo, wo_place.taken_off, self.dtypes[1])
            likes = [x.dtype for x in experts[2:4] if x is not None]
            parts = [x for x in (made.wi_bias, made.wo_bias) if x is not None]
            if self.biases[1] and outside:
                parts[-1] = of_first(outside, parts[-1])
            placed = zip(parts, place.biases, likes, strict=True)
            biases = [back(x, bias.gathered, like) for x, bias, like in placed]
            everywhere = roles.real(roles.slab)
            pairs = zip(made.values, experts.values, strict=True)
            values = [
                jnp.zeros_like(x) if d is None else sums.total(d, everywhere) for d, x in pairs
            ]
            return d_tokens[None], d_weights[None], *wi, wo, *biases, *values

        slab: Entries = (roles.slab, (), ())
        operands = self.taken(roles, place, shapes)
        saved = self.saved_entries(roles, place)
        weights = [self._each(wi_place.lies)] * self._halves + [wo_place.lies]
        results = (slab, slab, *weights, *operands[self._biases :])
        return Resolved((*operands, *saved, slab), results, local)

    def _themselves(
        self, roles: Roles, place: Placed, shapes: Sequence[tuple[int, ...]]
    ) -> tuple[Weight, Weight]:
        """How the weights lie that the leaves were quantized of."""
        if self.own is None:
            return place.wi, place.wo
        whole = (self.wi.of_values(shapes[self._wi], 2), shapes[self._wo])
        given = zip(self.own, whole, (self.wi, self.wo), strict=True)
        found = [expert_weight(roles, e, s, blocks=packing.blocks) for e, s, packing in given]
        wi, wo = (each.before for each in found)
        return dataclasses.replace(place.wi, before=wi), dataclasses.replace(place.wo, before=wo)

    @property
    def _halves(self) -> int:
        return 2 if self.paired else 1

    def _each(self, values: Sequence[Value]) -> tuple[Value, ...]:
        """What there is per dim of wi as one array, per dim of one of its arrays."""
        return of_each(values) if self.paired else tuple(values)

    def _made(self, shared: Axes) -> Any:
        """What gradients of weights are made in: as they are wanted, but wide where they are added
        up over devices; kernels of products that quantize nothing make them in the rows' dtype."""
        static = self.static
        if static.workspace is not None and static.recipes[0] is None:
            return None
        same = self.dtypes[0] == self.dtypes[1]
        return self.dtypes[0] if same and not shared else static.activation.wide

    def _shapes(self, blocks: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        wi, wo = self.wi.of_values(blocks[self._wi].shape, 2), blocks[self._wo].shape
        weights = [jnp.zeros(self._each(wi), self.dtypes[0])] * self._halves
        weights.append(jnp.zeros(wo, self.dtypes[1]))
        rows, biases = blocks[_TOKENS : _WEIGHTS + 1], blocks[self._biases : self._count]
        return (*map(jnp.zeros_like, rows), *weights, *map(jnp.zeros_like, biases))

    def factors(self) -> tuple[list[str], list[str]]:
        shared = self.shared_factors()
        wi = " ".join(self._each(["e", "h", *self._columns]))
        weights = [*[wi] * self._halves, "e m o", *shared[self._biases :]]
        return [*shared, *self.saved_factors(), "r t x"], ["r t x", "r t k", *weights]


def _on(weight: Weight, dim: int, inner: Axes) -> Weight:
    """`weight` with `inner` on a dim, and no other dim but the experts' in parts."""
    kept = (weight.kept[0], *[()] * (len(weight.entries) - 1))
    placed = [inner if d == dim else axes for d, axes in enumerate(kept)]
    pairs = zip(placed, weight.gathered, strict=True)
    return Weight(tuple(axes + gone for axes, gone in pairs), weight.gathered)


def _added_up(sums: Sums, x: jax.Array, inner: Axes) -> jax.Array:
    """Tokens whose parts over `inner` are added up wide."""
    if not sums.free(inner):
        return x
    return sums.total(x.astype(_wide(x)), inner).astype(x.dtype)


def _wide(x: jax.Array) -> Any:
    return jnp.float64 if x.dtype == jnp.float64 else jnp.float32
