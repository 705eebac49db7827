"""Draws permutation cases, and runs them through the ops and through the reference in f64."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from references import permutation as reference

import ep_runtime as ep
from ep_runtime_client.ops.permutation.plan import row_bound

HIDDEN = 6


@dataclasses.dataclass(frozen=True)
class Case:
    """One permutation of `tokens` tokens per shard."""

    name: str
    tokens: int = 13
    num_experts: int = 5
    top_k: int = 3
    align_size: int | None = None
    num_out_tokens: int | None = None
    from_map: bool = False
    routing: str = "uniform"

    def __str__(self) -> str:
        return self.name

    @property
    def slots(self) -> int:
        return self.num_experts if self.from_map else self.top_k

    @property
    def rows(self) -> int:
        """Number of rows of one shard."""
        given = self.num_out_tokens
        slots = self.tokens * self.slots if given is None else given
        most = self.tokens if self.from_map and given is None else slots
        return row_bound(slots, self.num_experts, self.align_size or 1, most)

    @property
    def options(self) -> dict[str, Any]:
        return {
            "num_experts": self.num_experts,
            "num_out_tokens": self.num_out_tokens,
            "align_size": self.align_size,
        }


CASES = (
    Case("plain"),
    Case("one token", tokens=1, num_out_tokens=7),
    Case("no tokens", tokens=0),
    Case("no tokens with room", tokens=0, num_out_tokens=4, align_size=4),
    Case("no tokens of a map", tokens=0, from_map=True),
    Case("zones of 4", align_size=4),
    Case("more slots than are written out", tokens=7, num_experts=40, top_k=17, align_size=2),
    Case("one expert gets all", routing="one", align_size=4),
    Case("experts get nothing", routing="skip", align_size=4),
    Case("an expert twice in a token", routing="twice", align_size=4),
    Case("nothing used", routing="none", align_size=4),
    Case("no room at all", num_out_tokens=0),
    Case("drops", num_out_tokens=11),
    Case("drops of whole blocks", num_out_tokens=8, align_size=4, routing="one"),
    Case("map", from_map=True),
    Case("map, zones of 4", from_map=True, align_size=4),
    Case("map, bounded", from_map=True, num_out_tokens=40, align_size=4),
    Case("map, drops", from_map=True, num_out_tokens=9),
    Case("map, one expert gets all", from_map=True, routing="one", align_size=4),
    Case("map, nothing used", from_map=True, routing="none", align_size=4),
    Case("one expert", num_experts=1, top_k=1, align_size=4),
)


def choice_of(case: Case, shards: int = 1, seed: int = 0) -> Any:
    """Returns topk_idx [n, T, K] or a routing map [n, T, E] of a case."""
    rng = np.random.default_rng(seed)
    shape = (shards, case.tokens, case.slots)
    if case.from_map:
        chosen = rng.random(shape) < (0.0 if case.routing == "none" else 0.5)
        if case.routing == "one":
            chosen[:] = np.arange(case.num_experts) == case.num_experts - 2
        return chosen
    idx = rng.integers(-1, case.num_experts, shape).astype(np.int32)
    if case.routing == "one":
        idx[:] = case.num_experts - 2
    elif case.routing == "skip":
        idx = np.where(idx % 2 == 0, -1, idx).astype(np.int32)
    elif case.routing == "twice":
        idx[..., 1] = idx[..., 0]
    elif case.routing == "none":
        # Every index out of range is an unused slot.
        idx[:] = np.array([-1, case.num_experts, -7])[: case.top_k]
    return idx


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Inputs:
    """Arrays of a case with a leading dim n of shards."""

    choice: Any
    tokens: Any
    probs: Any
    merging: Any
    cotangent: Any  # of the tokens that come back
    factors: Any  # [n, rows, H]: what the "experts" multiply rows by
    prob_factors: Any  # [n, rows]

    def joined(self) -> Inputs:
        """Returns the same arrays with the shards one after another on dim 0."""
        values = (getattr(self, field.name) for field in dataclasses.fields(self))
        return Inputs(*(x.reshape(-1, *x.shape[2:]) for x in values))


def inputs_of(case: Case, shards: int = 1, seed: int = 0) -> Inputs:
    rng = np.random.default_rng(seed + 1)
    choice = choice_of(case, shards, seed)

    def draw(*shape: int) -> Any:
        return rng.standard_normal((shards, *shape)).astype(np.float32)

    return Inputs(
        choice=choice,
        tokens=draw(case.tokens, HIDDEN),
        probs=np.abs(draw(case.tokens, case.slots)),
        merging=draw(case.tokens, case.slots),
        cotangent=draw(case.tokens, HIDDEN),
        factors=draw(case.rows, HIDDEN),
        prob_factors=draw(case.rows),
    )


def there_and_back(case: Case, inputs: Inputs, **options: Any) -> Any:
    """Returns (tokens that came back, probs of rows, Permuted)."""
    name = "routing_map" if case.from_map else "topk_idx"
    p = ep.permute(
        inputs.tokens,
        **{name: inputs.choice},
        probs=inputs.probs,
        **case.options,
        **options,
    )
    back = ep.unpermute(jnp.tanh(p.tokens) * inputs.factors, p, merging_probs=inputs.merging)
    return back, p.probs, p


def run_ops(case: Case, inputs: Inputs, **options: Any) -> dict[str, Any]:
    """Returns values and gradients of one program. `inputs` are joined."""
    return results(*program(case, **options)(inputs))


def program(case: Case, **options: Any) -> Any:
    """Makes a jitted function from inputs to the arguments of `results`. It never sums over the
    batch.
    """
    return _program(dataclasses.replace(case, name="", routing=""), *options.items())


@functools.cache
def _program(case: Case, *options: tuple[str, Any]) -> Any:
    """Makes one program for all cases that differ only in name and routing."""
    return pulled_back(lambda inputs: there_and_back(case, inputs, **dict(options)))


def pulled_back(function: Any) -> Any:
    """Makes a jitted function from inputs to (tokens that came back, Permuted, gradients)."""

    def run(inputs: Inputs) -> Any:
        def forward(tokens: Any, probs: Any, merging: Any) -> Any:
            given = dataclasses.replace(inputs, tokens=tokens, probs=probs, merging=merging)
            back, row_probs, p = function(given)
            return (back, row_probs), p

        wrt = (inputs.tokens, inputs.probs, inputs.merging)
        (back, _), pullback, p = jax.vjp(forward, *wrt, has_aux=True)
        return back, p, pullback((inputs.cotangent, inputs.prob_factors))

    return jax.jit(run)


def results(back: Any, p: Any, grads: Any) -> dict[str, Any]:
    return {
        "rows": p.tokens,
        "probs": p.probs,
        "group_sizes": p.group_sizes,
        "dropped": p.plan.dropped,
        "back": back,
        "d_tokens": grads[0],
        "d_probs": grads[1],
        "d_merging": grads[2],
    }


def run_reference(case: Case, inputs: Inputs) -> dict[str, Any]:
    """Runs the reference in f64, shard by shard. `inputs` have the leading dim n; results are
    joined.
    """
    shards = [
        _reference_of_shard(case, *(getattr(inputs, f.name)[i] for f in dataclasses.fields(inputs)))
        for i in range(inputs.choice.shape[0])
    ]
    return {name: np.concatenate([each[name] for each in shards]) for name in shards[0]}


def _reference_of_shard(case: Case, choice: Any, *arrays: Any) -> dict[str, Any]:
    plan = reference.permutation(
        choice,
        num_experts=case.num_experts,
        rows=case.rows,
        alignment=case.align_size or 1,
    )
    with jax.enable_x64(True):
        wide = [jnp.asarray(x, jnp.float64) for x in arrays]
        (_, values), grads = _reference_program(*wide, plan.row, plan.source)
        names = ("rows", "probs", "back", "d_tokens", "d_probs", "d_merging")
        pairs = zip(names, (*values, *grads), strict=True)
        found = {name: np.asarray(value) for name, value in pairs}
    return found | {"group_sizes": plan.group_sizes[None], "dropped": np.array([plan.dropped])}


@jax.jit
def _reference_program(tokens: Any, probs: Any, merging: Any, *rest: Any) -> Any:
    cotangent, factors, prob_factors, row, source = rest
    plan = reference.ReferencePermutation(row, source, row, 0)

    def loss(tokens: Any, probs: Any, merging: Any) -> Any:
        rows, row_probs = reference.permute(plan, tokens, probs)
        back = reference.unpermute(plan, jnp.tanh(rows) * factors, merging)
        total = (back * cotangent).sum() + (row_probs * prob_factors).sum()
        return total, (rows, row_probs, back)

    return jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)(tokens, probs, merging)


def assert_same(got: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Compares integers exactly, and values up to f32's precision."""
    for name in wanted:
        value = np.asarray(got[name])
        if value.dtype == np.int32:
            np.testing.assert_array_equal(value, wanted[name], name)
        else:
            np.testing.assert_allclose(value, wanted[name], rtol=2e-5, atol=2e-6, err_msg=name)
