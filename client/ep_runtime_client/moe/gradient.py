"""The gradient of the op of `ep.moe`: what is saved, and what comes back.

`prepare` stays outside: a plan that `jax.checkpoint` keeps needs no forward call in the backward
pass, which begins with tokens and plan. A plan that would take much memory from forward to backward
is made once more instead: it has numbers for every row of the worst case, which grows with ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.ad_checkpoint import checkpoint_name

from ep_runtime_client.moe import bodies
from ep_runtime_client.moe.bodies.protocol import Static
from ep_runtime_client.moe.op import BlockBackward, BlockForward
from ep_runtime_client.ops.calls.plan import AnyArrays
from ep_runtime_client.ops.gemm.quantized_operands import for_backward
from ep_runtime_client.ops.movement import per_device
from ep_runtime_client.ops.movement.prepare import prepare_with_most
from ep_runtime_client.ops.partitioning import on_mesh
from ep_runtime_client.ops.partitioning.regions import Where
from ep_runtime_client.ops.partitioning.roles import Entries, padded
from ep_runtime_client.ops.quantize import ops as quantize_ops
from ep_runtime_client.ops.quantize.packing import Kernel, Packing, pack
from ep_runtime_client.ops.quantize.pair import Pair
from ep_runtime_client.ops.quantize.quantized_tensor import QuantizedTensor
from ep_runtime_client.ops.tracing import again, eager, first_order
from ep_runtime_client.ops.tracing.lean import unless_unused
from ep_runtime_client.ops.tracing.scopes import scope
from ep_runtime_client.ops.tracing.varying import Axes

_PLAN_BYTES = 4 << 20  # of a rank that are kept without asking how many bytes its tokens take


class Operands(NamedTuple):
    """Of one call. Tokens are laid out as the call's layout says.

    Attributes:
        layer_index: int32 [1], of the layer in its stack.
        topk_idx: int32 [..., K].
        tokens: [..., H].
        weights: f32 [..., K].
        most: int32 [R, 1], of prepare.
        plan: of prepare.
        wi: [E, H, *N'], or a Pair; quantized where a recipe says so, behind `run`. None where it
            comes quantized and takes no gradient.
        wo: [E, M, H]; likewise.
        wi_bias: [E, *N'], or None.
        wo_bias: [E, H], or None.
        wi8: wi where it comes quantized; None behind `run`.
        wo8: likewise.
        scales: of each product whose recipe is delayed, f32 [R, L] of its rows and [E] of its
            weights; behind `run` of rows alone.
        values: that a learned activation reads, each flat.
    """

    layer_index: jax.Array
    topk_idx: jax.Array
    tokens: jax.Array
    weights: jax.Array
    most: jax.Array
    plan: AnyArrays
    wi: Kernel
    wo: Kernel
    wi_bias: jax.Array | None
    wo_bias: jax.Array | None
    wi8: QuantizedTensor | None = None
    wo8: QuantizedTensor | None = None
    scales: tuple[tuple[jax.Array, ...] | None, tuple[jax.Array, ...] | None] = (None, None)
    values: tuple[jax.Array, ...] = ()

    @property
    def kernels(self) -> tuple[Kernel, Kernel]:
        """wi and wo as they are multiplied, or will be quantized."""
        return (
            self.wi if self.wi8 is None else self.wi8,
            self.wo if self.wo8 is None else self.wo8,
        )


@dataclasses.dataclass(frozen=True)
class BlockCall:
    """The static argument of one call. Hashable.

    Attributes:
        where: where it runs.
        static: what is static on one device.
        lies: entries of wi (as one array), wo and their biases, where they are known.
        taken: entries of wi and wo as they are multiplied: quantized, they may lie over fewer axes.
        types: entries that the gradients of every array of Operands must have as types.
        paired: whether wi is a Pair.
        dtypes: of the gradients of wi and wo; None where they take none.
    """

    where: Where
    static: Static
    lies: tuple[Entries, Entries, Entries, Entries]
    taken: tuple[Entries, Entries]
    types: tuple[Entries | None, ...]
    paired: bool
    dtypes: tuple[Any, ...]

    @property
    def plans_again(self) -> bool:
        """Whether backward prepares once more, and no plan is kept for it."""
        room, group = self.static.workspace, self.static.call.group
        if room is None:  # rows of the worst case are kept, beside which a plan is small
            return False
        sizes = room.sizes
        plan = 4 * (2 * sizes.capacity + sizes.ep_size * sizes.tokens)
        tokens = sizes.tokens * sizes.hidden_size * sizes.element_bytes
        # Where rows that do not fit are errors, prepare waits on the host for its verdict.
        return plan > max(_PLAN_BYTES, tokens // 8) and group.on_overflow != "error"


# Of each product whose recipe is delayed: amax of rows f32 [R, L] and of weights [E]; else None.
Amax = tuple[tuple[jax.Array, jax.Array] | None, ...]


def run(call: BlockCall, operands: Operands) -> tuple[jax.Array, Amax]:
    """y, laid out as tokens, and amax; y is differentiable in tokens, weights, wi, wo and the
    biases."""
    made: tuple[jax.Array, Amax] = eager.settled(_primal, call, *operands, traced=_block)
    return made


def inner_axes(call: BlockCall, operands: Operands) -> Axes:
    """Axes on M, over which y is added up; for a call whose weights' layout is known."""
    assert call.where.roles is not None
    weights = _packed(operands)
    op = BlockForward(**_common(call, operands, weights))
    slabs = (operands.topk_idx, operands.tokens, operands.weights)
    lies, given = _given(call, operands, weights, [x[None] for x in slabs])
    shapes = [
        on_mesh.whole_shape(call.where, x.shape, padded(each, x.ndim))
        for x, each in zip(given, lies, strict=True)
    ]
    return op.place(call.where.roles, lies, shapes).inner


def _primal(call: BlockCall, *operands: Any) -> tuple[jax.Array, Amax]:
    taken, of_weights = _quantized(call, *operands)
    y, *amax = _lean(call, *taken)
    return y, _paired_amax(call, amax, of_weights)


def _paired_amax(call: BlockCall, rows: Sequence[jax.Array], weights: Sequence[Any]) -> Amax:
    of_rows = iter(rows)
    kinds = zip(call.static.delayed, weights, strict=True)
    return tuple((next(of_rows), weight) if delayed else None for delayed, weight in kinds)


def _quantized(call: BlockCall, *operands: Any) -> tuple[Operands, list[Any]]:
    """The operands with weights as products take them, quantized once for both directions; and
    amax of those that are scaled by what is given."""
    given = Operands(*operands)
    made: list[Any] = []
    found: list[Any] = []
    for which, (kernel, lies) in enumerate(zip(given.kernels, call.lies[:2], strict=True)):
        recipe, scales = call.static.recipes[which], given.scales[which]
        if recipe is None or isinstance(kernel, QuantizedTensor):
            made.append(kernel)
            found.append(None)
            continue
        scale = () if scales is None else scales[1:]
        op = quantize_ops.QuantizeKernel(
            call.where,
            recipe,
            kernel.shape,
            scaled=bool(scale),
            transposed=quantize_ops.transposes(recipe, kernel.shape),
            paired=isinstance(kernel, Pair),
        )
        with scope("block", call.static.call.layer):
            q = quantize_ops.kernel(op, lies, kernel, *scale)
            found.append(q.amax)
            q = quantize_ops.raw(dataclasses.replace(q, amax=None))
        made.append(jax.tree.map(lambda leaf: checkpoint_name(leaf, "ep_q_w"), q))
    first, second = (None if each is None else each[:1] for each in given.scales)
    taken = given._replace(wi=made[0], wo=made[1], wi8=None, wo8=None, scales=(first, second))
    return taken, found


def _lean(call: BlockCall, *operands: Any) -> tuple[jax.Array, ...]:
    """y and amax of rows."""
    return _forward(_saving_nothing(call), *operands, bare=False)


def _with_saved(call: BlockCall, *operands: Any) -> tuple[jax.Array, ...]:
    """y, what is saved, and amax of rows."""
    return _forward(call, *operands, bare=False)


def _without_tokens(call: BlockCall, *operands: Any) -> tuple[jax.Array, ...]:
    """What `_with_saved` has beside y, where nobody wants y."""
    return _forward(call, *operands, bare=True)


def _forward(call: BlockCall, *arrays: Any, bare: bool) -> tuple[jax.Array, ...]:
    operands = Operands(*arrays)
    with scope("block", call.static.call.layer):
        slabs = _to_slabs(call, operands.topk_idx, operands.tokens, operands.weights)
        weights = _packed(operands)
        op = BlockForward(**_common(call, operands, weights), bare=bare)
        lies, given = _given(call, operands, weights, slabs)
        made: tuple[jax.Array, ...] = on_mesh.run_on_mesh(op, lies, *given)
        return made if bare else (*_to_tokens(call, made[0]), *made[1:])


def _saving_nothing(call: BlockCall) -> BlockCall:
    static = call.static
    room = static.workspace and dataclasses.replace(static.workspace, saved=0)
    static = dataclasses.replace(static, saves=False, workspace=room)
    return dataclasses.replace(call, static=static)


def _fwd(call: BlockCall, *given: Any) -> Any:
    operands, static = Operands(*given), call.static
    of_weights: Sequence[Any] = (None, None)
    if any(static.recipes):
        # What is not quantized here is the very argument: a scan that has it keeps no copy of it.
        made, of_weights = eager.shared(_quantized, call, *given)
        comes = [x is not None for x in (operands.wi8, operands.wo8)]
        kernels = [
            mine if there or recipe is None else quantized
            for mine, quantized, there, recipe in zip(
                operands.kernels, made.kernels, comes, static.recipes, strict=True
            )
        ]
        operands = operands._replace(
            wi=kernels[0], wo=kernels[1], wi8=None, wo8=None, scales=made.scales
        )
    leaves, tree = jax.tree.flatten(tuple(operands))

    def way(function: Any) -> Callable[..., Any]:
        return lambda *leaves: eager.shared(function, call, *jax.tree.unflatten(tree, leaves))

    saved = operands._replace(wi=for_backward(operands.wi), wo=for_backward(operands.wo))
    if call.plans_again:
        saved = saved._replace(plan=None, most=None)  # type: ignore[arg-type]
    names = bodies.named(static.body).saved(static)
    full, lean, bare = map(way, (_with_saved, _lean, _without_tokens))
    if not names:
        y, *rows = lean(*leaves)
    elif static.workspace is None:
        # XLA drops what nobody reads of ops that it sees.
        y, *rows = full(*leaves)
    else:
        y, *rows = unless_unused(full, lean, bare, *leaves)
    amax = _paired_amax(call, rows[len(names) :], of_weights)
    kept = zip(rows, names, strict=False)
    return (y, amax), (saved, [checkpoint_name(x, _tag(static, name)) for x, name in kept])


def _tag(static: Static, name: str) -> str:
    """By which a checkpoint's policy knows what is saved."""
    if static.workspace is not None:
        return "ep_kept"
    return "ep_wi" if name == "hidden" else "ep_recv"


def _bwd(call: BlockCall, saved: Any, grads: tuple[jax.Array, Any]) -> Any:
    return eager.shared(_pullback, call, *saved, grads[0])


def _pullback(call: BlockCall, operands: Operands, saved: list[jax.Array], dy: jax.Array) -> Any:
    """Gradients of all operands; None of those that are integers."""
    operands = operands._replace(layer_index=again.marked(operands.layer_index))
    if operands.plan is None:
        moved, index = call.static.call, operands.layer_index
        with scope("prepare", moved.layer):
            plan, most = prepare_with_most(moved, index, operands.topk_idx)
        operands = operands._replace(plan=plan, most=most)
    with scope("block_bwd", call.static.call.layer):
        *slabs, dy = _to_slabs(call, operands.topk_idx, operands.tokens, operands.weights, dy)
        if not saved:
            call = _saving_nothing(call)
        weights = _packed(operands, columns=True)
        common = _common(call, operands, weights)
        rows = operands.tokens.dtype
        of_wi, of_wo = (rows if dtype is None else dtype for dtype in call.dtypes)
        own = call.lies[:2] if call.lies[:2] != call.taken else None
        op = BlockBackward(**common, paired=call.paired, dtypes=(of_wi, of_wo), own=own)
        lies, given = _given(call, operands, weights, slabs)
        made = on_mesh.run_on_mesh(op, (*lies, *_of_slabs(call, (*saved, dy))), *given, *saved, dy)
        d_tokens, d_weights = _to_tokens(call, *made[:2])
    halves = 2 if call.paired else 1
    d_wi, d_wo, others = made[2 : 2 + halves], made[2 + halves], made[3 + halves :]
    biases, of_values = iter(others), others[len(others) - len(operands.values) :]
    inexact = [jax.numpy.issubdtype(x.dtype, jax.numpy.inexact) for x in operands.values]
    wi: Any = Pair(*d_wi) if halves == 2 else d_wi[0]
    grads = Operands(
        layer_index=None,  # type: ignore[arg-type]
        topk_idx=None,  # type: ignore[arg-type]
        tokens=d_tokens,
        weights=d_weights,
        most=None,  # type: ignore[arg-type]
        plan=None,  # type: ignore[arg-type]
        wi=None if call.dtypes[0] is None else wi,  # type: ignore[arg-type]
        wo=None if call.dtypes[1] is None else d_wo,  # type: ignore[arg-type]
        wi_bias=None if operands.wi_bias is None else next(biases),
        wo_bias=None if operands.wo_bias is None else next(biases),
        values=tuple(
            d if is_so else None  # type: ignore[misc]
            for d, is_so in zip(of_values, inexact, strict=True)
        ),
    )
    leaves, tree = jax.tree.flatten(grads)
    typed = [on_mesh.typed_as(*each) for each in zip(leaves, call.types, strict=True)]
    return tuple(jax.tree.unflatten(tree, typed))


_Packed = list[tuple[list[jax.Array], Packing]]


def _packed(operands: Operands, *, columns: bool = False) -> _Packed:
    """Leaves of wi and of wo; `columns` as `pack` takes it."""
    kernels = (quantize_ops.from_raw(x, rows=False) for x in operands.kernels)
    return [pack(kernel, rows=False, columns=columns) for kernel in kernels]


def _common(call: BlockCall, operands: Operands, weights: _Packed) -> dict[str, Any]:
    return {
        "where": call.where,
        "static": call.static,
        "wi": weights[0][1],
        "wo": weights[1][1],
        "biases": (operands.wi_bias is not None, operands.wo_bias is not None),
        "values": len(operands.values),
    }


def _given(
    call: BlockCall, operands: Operands, weights: _Packed, slabs: Any
) -> tuple[list[Entries], list[jax.Array]]:
    """What both directions take, and how it lies where that is known."""
    assert call.where.roles is not None
    scales = [x for each in operands.scales if each is not None for x in each[:1]]
    rows = [*slabs, operands.most, *operands.plan, *scales]
    lies: list[Entries] = [((),), *_of_slabs(call, rows)]
    of_biases, given = call.lies[2:], [operands.layer_index, *rows]
    for (leaves, packing), each in zip(weights, call.taken, strict=True):
        given, lies = [*given, *leaves], [*lies, *packing.spread(each)]
    for bias, each in zip((operands.wi_bias, operands.wo_bias), of_biases, strict=True):
        if bias is not None:
            given, lies = [*given, bias], [*lies, each]
    return [*lies, *[((),)] * len(operands.values)], [*given, *operands.values]


def _of_slabs(call: BlockCall, arrays: Sequence[jax.Array]) -> list[Entries]:
    assert call.where.roles is not None
    return [padded((call.where.roles.slab,), x.ndim) for x in arrays]


def _to_slabs(call: BlockCall, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """[..., X] laid out as tokens -> [R, T, X]."""

    def body(*blocks: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(x.reshape(1, -1, x.shape[-1]) for x in blocks)

    moved = call.static.call
    given = [moved.layout.entries()] * len(arrays)
    return per_device.run(moved, "block_rows", body, arrays, given, _of_slabs(call, arrays))


def _to_tokens(call: BlockCall, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """[R, T, X] -> [..., X] laid out as tokens."""
    moved = call.static.call

    def body(*blocks: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(x.reshape(*moved.layout.local, x.shape[-1]) for x in blocks)

    made = [moved.layout.entries()] * len(arrays)
    return per_device.run(moved, "block_tokens", body, arrays, _of_slabs(call, arrays), made)


_block = jax.custom_vjp(_primal, nondiff_argnums=(0,))
first_order.defvjp("moe", _block, _fwd, _bwd)
