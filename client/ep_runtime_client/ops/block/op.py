"""The block call, forward and backward, as ops that both partitionings run.

Tokens come as slabs [R, T, H], one for each shard of the token axes, and so does everything that
belongs to them. Weights lie as on the way of slabs: outer axes are gathered off them, an axis that
shards no tokens stays on M, and what it splits is added up where tokens are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from ep_runtime_client.ops.block import call as kernels
from ep_runtime_client.ops.block import nodes, plain, takes
from ep_runtime_client.ops.block.call import Experts, Given, Static, WeightGrads
from ep_runtime_client.ops.calls.call import world_rank
from ep_runtime_client.ops.calls.plan import arrays_type
from ep_runtime_client.ops.gemm.ops import of_first
from ep_runtime_client.ops.partitioning.placement import Weight, expert_bias, expert_weight
from ep_runtime_client.ops.partitioning.regions import Where
from ep_runtime_client.ops.partitioning.resolved import Resolved, Sums
from ep_runtime_client.ops.partitioning.roles import Entries, Roles, say_once
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
    plan's arrays, leaves of wi [E, H, *N'] (gate and up [E, H, M] are two) and of wo [E, M, H],
    and their biases [E, *N'] and [E, H].

    Attributes:
        where: where it runs.
        static: what is static on one device.
        on_gpu: whether it is the custom call, and not what that is composed of.
        wi: its leaves.
        wo: its leaves.
        biases: whether wi has one, and wo.
    """

    where: Where
    static: Static
    on_gpu: bool
    wi: Packing
    wo: Packing
    biases: tuple[bool, bool]

    name: ClassVar[str] = "block"

    @property
    def _plan(self) -> Any:
        return arrays_type(self.static.call.group)

    @property
    def _per_device(self) -> Any:
        """The module with forward and backward of one device."""
        if not self.on_gpu:
            return plain
        return nodes if self.static.call.group.node_size else kernels

    @property
    def _wi(self) -> int:
        """Which operand is the first of wi."""
        return _FIRST + len(self._plan._fields)

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
        dropped = [a for a in wi.kept[1] + wo.kept[2] if a not in inner]
        if dropped:
            say_once(
                f"weights of {roles.owner} lie over {roles.named(dropped)} on H, which rows do "
                "not: they are gathered over it"
            )
        wi, wo = _on(wi, len(shape) - 1, inner), _on(wo, 1, inner)
        theirs = self._there(((wi, shape), (wo, shapes[second])))
        given = arrived[self._biases : self._count]
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
        static, unit = self.static, 1
        if self.on_gpu:
            dtype = static.activation.dtype
            unit = takes.multiple(dtype, static.recipe, paired=self.wi.paired)
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
        return [((),), *slabs, *weights, *biases]

    def kept(self, roles: Roles, place: Placed) -> Entries:
        """Entries of the rows that are kept, [R, Wk, *N']."""
        return (roles.slab, (), *place.wi.kept[2:])

    def opened(self, place: Placed, blocks: Sequence[jax.Array]) -> tuple[Given, Experts]:
        """Local blocks of the operands as one device takes them, weights gathered."""
        index, *slabs = blocks[: self._wi]
        idx, tokens, weights, most, *plan = (x[0] for x in slabs)
        rank = world_rank(self.static.call.group)
        given = Given(rank, index, idx, tokens, weights, most, self._plan(*plan))
        found: list[Any] = []
        for packing, taken, first in ((self.wi, place.wi, self._wi), (self.wo, place.wo, self._wo)):
            leaves = zip(
                blocks[first : first + len(packing)], packing.spread(taken.gathered), strict=True
            )
            found.append(unpack(packing, [gather(*each) for each in leaves]))
        placed = zip(blocks[self._biases : self._count], place.biases, strict=True)
        biases = (gather(x, bias.gathered) for x, bias in placed)
        wi_bias, wo_bias = (next(biases) if there else None for there in self.biases)
        if wo_bias is not None and place.parts:
            wo_bias = of_first(place.parts, wo_bias)
        wi, wo = found
        return given, Experts(wi, wo, wi_bias, wo_bias)

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
        biases = self._there((" ".join(["e", *self._columns]), "e o"))
        return ["i", *rows, *self._kernels, *biases]

    @property
    def _columns(self) -> list[str]:
        """Factors of N'."""
        middle = ["g"] if self.wi.ndim == 4 else []
        return [*middle, "m" if self._splits else "n"]

    @property
    def _kernels(self) -> list[str]:
        """Factors of the leaves of wi and wo."""
        return [*self.wi.factors(["e", "h", *self._columns]), *self.wo.factors(["e", "m", "o"])]

    @property
    def kept_factors(self) -> str:
        return " ".join(["r", "w", *self._columns])


@dataclasses.dataclass(frozen=True)
class BlockForward(BlockOp):
    """-> (y [R, T, H],), and where rows are kept these [R, Wk, *N'], and whether they were made,
    int32 [R, 1].

    Attributes:
        bare: only the last two are asked for. Backward makes such rows sooner than forward, which
            goes on from them: they are zeros that were not made.
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
        sums = Sums(roles, self.where.manual)
        forward = self._per_device.forward

        def local(*blocks: jax.Array) -> tuple[jax.Array, ...]:
            if self.runs_nowhere(roles):
                return self._shapes(shapes, blocks[_TOKENS])
            given, experts = self.opened(place, blocks)
            if self.bare:
                kept = jnp.zeros((self.static.kept, *experts.wi.shape[2:]), given.tokens.dtype)
                return kept[None], jnp.zeros((1, 1), jnp.int32)
            y, kept = forward(self.static, given, experts)
            results = [_added_up(sums, y, place.inner), kept, jnp.ones(1, jnp.int32)]
            return tuple(x[None] for x in results[self._results])

        slab: Entries = (roles.slab, (), ())
        lies = [slab, self.kept(roles, place), slab[:2]]
        return Resolved(tuple(self.taken(roles, place, shapes)), tuple(lies[self._results]), local)

    @property
    def _results(self) -> slice:
        return slice(int(self.bare), 3 if self.static.kept else 1)

    def _shapes(
        self, shapes: Sequence[tuple[int, ...]], tokens: jax.Array
    ) -> tuple[jax.Array, ...]:
        wi = self.wi.of_values(shapes[self._wi], 2)
        kept = jnp.zeros((tokens.shape[0], self.static.kept, *wi[2:]), tokens.dtype)
        made = jnp.zeros((tokens.shape[0], 1), jnp.int32)
        return tuple([jnp.zeros_like(tokens), kept, made][self._results])

    def factors(self) -> tuple[list[str], list[str]]:
        return self.shared_factors(), ["r t x", self.kept_factors, "r one"][self._results]


@dataclasses.dataclass(frozen=True)
class BlockBackward(BlockOp):
    """Operands, [R, Wk, *N'] where rows are kept and whether they were made [R, 1],
    dy [R, T, H] -> gradients of tokens and weights as slabs, of wi (of a pair two), wo and the
    biases as they are.

    Attributes:
        paired: whether wi is a pair; quantized, its leaves are those of one array.
        dtypes: of the gradients of wi and wo.
    """

    paired: bool = False
    dtypes: tuple[Any, Any] = (None, None)

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
        backward = self._per_device.backward

        def back(x: jax.Array, taken_off: Entries, like: Any) -> jax.Array:
            # What is added up over devices stays wide.
            wide = x.astype(_wide(x)) if shared else x
            return sums.back(wide, taken_off, shared).astype(like)

        def local(*blocks: jax.Array) -> tuple[jax.Array, ...]:
            if self.runs_nowhere(roles):
                return self._shapes(blocks)
            given, experts = self.opened(place, blocks)
            *kept, dy = (x[0] for x in blocks[self._count :])
            rows, made_rows = kept or (
                jnp.zeros((0, *experts.wi.shape[2:]), dy.dtype),
                jnp.zeros(1, jnp.int32),
            )
            grads = WeightGrads(self.paired, self._made(shared))
            made = backward(self.static, given, experts, rows, made_rows, dy, grads)
            d_tokens = _added_up(sums, made.tokens, place.inner)
            d_weights = sums.total(made.weights, place.inner)
            off = self._each(place.wi.gathered)
            wi = [back(x, off, self.dtypes[0]) for x in jax.tree.leaves(made.wi)]
            wo = back(made.wo, place.wo.gathered, self.dtypes[1])
            likes = [x.dtype for x in experts[2:] if x is not None]
            parts = [x for x in (made.wi_bias, made.wo_bias) if x is not None]
            if self.biases[1] and outside:
                parts[-1] = of_first(outside, parts[-1])
            placed = zip(parts, place.biases, likes, strict=True)
            biases = [back(x, bias.gathered, like) for x, bias, like in placed]
            return d_tokens[None], d_weights[None], *wi, wo, *biases

        slab: Entries = (roles.slab, (), ())
        operands = self.taken(roles, place, shapes)
        kept = [self.kept(roles, place), (roles.slab, ())] if self.static.kept else []
        weights = [self._each(place.wi.lies)] * self._halves + [place.wo.lies]
        results = (slab, slab, *weights, *operands[self._biases :])
        return Resolved((*operands, *kept, slab), results, local)

    @property
    def _halves(self) -> int:
        return 2 if self.paired else 1

    def _each(self, values: Sequence[Value]) -> tuple[Value, ...]:
        """What there is per dim of wi as one array, per dim of one of its arrays."""
        return of_each(values) if self.paired else tuple(values)

    def _made(self, shared: Axes) -> Any:
        """What the call makes gradients of weights in: of 8-bit products as they are wanted, but
        wide where they are added up over devices."""
        if self.static.recipe is None:
            return None
        same = self.dtypes[0] == self.dtypes[1]
        return self.dtypes[0] if same and not shared else jnp.float32

    def _shapes(self, blocks: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        wi, wo = self.wi.of_values(blocks[self._wi].shape, 2), blocks[self._wo].shape
        weights = [jnp.zeros(self._each(wi), self.dtypes[0])] * self._halves
        weights.append(jnp.zeros(wo, self.dtypes[1]))
        rows, biases = blocks[_TOKENS : _WEIGHTS + 1], blocks[self._biases : self._count]
        return (*map(jnp.zeros_like, rows), *weights, *map(jnp.zeros_like, biases))

    def factors(self) -> tuple[list[str], list[str]]:
        shared = self.shared_factors()
        kept = [self.kept_factors, "r one"] if self.static.kept else []
        wi = " ".join(self._each(["e", "h", *self._columns]))
        weights = [*[wi] * self._halves, "e m o", *shared[self._biases :]]
        return [*shared, *kept, "r t x"], ["r t x", "r t k", *weights]


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
