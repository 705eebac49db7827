"""Weights quantized once on a mesh: FSDP gathers bytes, in every mode, and gradients as before."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import collectives
import fakes
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import ep_runtime as ep

EXPERTS, HIDDEN, MLP, TOKENS = 4, 256, 256, 64
AXES = {"fsdp": 2, "ep": 2, "tp": 2}
SPECS = ep.MoEParams(P(), P("ep", "fsdp", None, "tp"), P("ep", "tp", "fsdp"))
TENSOR, BLOCK, MX = ep.recipes.TensorScaling(), ep.recipes.BlockScaling(), ep.recipes.MXFP8()
CASES = [("auto", BLOCK), ("shard_map", MX), ("explicit", TENSOR), ("manual", TENSOR)]


class Programs:
    """A step by `recipe=`, the quantization, and a step with its result, of one mode."""

    def __init__(self, mode: str, recipe: Any) -> None:
        self.recipe, self.mode = recipe, mode
        self.group = fakes.local_group(
            mesh=fakes.mesh_of(AXES, explicit=mode == "explicit"),
            outer_axes=("fsdp",),
            transport="memfd",  # moves rows without a collective
            partitioning=mode if mode in ("rule", "shard_map") else "auto",
            num_experts=EXPERTS,
            hidden_size=HIDDEN,
            alignment=32,
            max_tokens_per_rank=TOKENS,
        )
        self.layer = self.group.register_layer("moe", top_k=2)
        self.tokens = P(self.group.spec.token_axes)
        told = mode in ("shard_map", "manual")
        self.told: dict[str, Any] = {"params_spec": SPECS} if told else {}
        params = ep.init_moe_params(jax.random.key(0), self.layer, MLP)
        self.params = jax.tree.map(self._put, params, SPECS)
        x = jax.random.normal(jax.random.key(1), (TOKENS, HIDDEN), jnp.bfloat16)
        self.x = self._put(x, self.tokens)

    def _put(self, x: Any, spec: P) -> Any:
        return jax.device_put(x, NamedSharding(self.group.mesh, spec))

    def jit(self, run: Callable[..., Any], given: Any, made: Any) -> Any:
        """`run`, inside a shard_map of ours in manual mode."""
        if self.mode != "manual":
            return jax.jit(run)
        return jax.jit(jax.shard_map(run, mesh=self.group.mesh, in_specs=given, out_specs=made))

    def step(self, params8: Any = None, in_loss: bool = False) -> Any:
        """(compiled, results) of values and gradients, with quantized weights if there are some,
        or `in_loss` quantized there."""

        def run(params: Any, x: Any, params8: Any = None) -> Any:
            def block(params: Any, x: Any) -> Any:
                taken, how = params, {"recipe": self.recipe}
                if in_loss:
                    taken = ep.quantize_params(params, **how, layer=self.layer, **self.told)
                elif params8 is not None:
                    taken, how = ep.straight_through(params, params8), {}
                return ep.moe(self.layer, x, taken, **how, **self.told)[0]

            y, pull = jax.vjp(block, params, x)
            return y, pull(y)

        made = (self.tokens, (SPECS, self.tokens))
        operands, given = [self.params, self.x], [SPECS, self.tokens]
        if params8 is not None:
            operands, given = [*operands, params8], [*given, self.specs8(params8)]
        compiled = self.jit(run, tuple(given), made).lower(*operands).compile()
        return compiled, jax.device_get(compiled(*operands))

    def quantized(self) -> Any:
        """(compiled, params8); in plain jit always."""
        run = functools.partial(ep.quantize_params, recipe=self.recipe, weights_only=True)
        compiled = jax.jit(run).lower(self.params).compile()
        return compiled, compiled(self.params)

    def specs8(self, params8: Any) -> Any:
        """Quantized weights are sharded like the weights, and so are their scales."""

        def each(q: Any, spec: P) -> Any:
            return jax.tree.map(lambda x: P(*spec[: x.ndim]), q)

        return ep.MoEParams(None, each(params8.wi, SPECS.wi), each(params8.wo, SPECS.wo))


@pytest.mark.parametrize(("mode", "recipe"), CASES, ids=repr)
def test_a_step_gathers_bytes_and_quantizes_no_weight(mode: str, recipe: Any) -> None:
    programs = Programs(mode, recipe)
    try:
        by_recipe, want = programs.step()
        once, params8 = programs.quantized()
        step, got = programs.step(params8)
        jax.tree.map(np.testing.assert_array_equal, got, want)
        # Each collective of the recipe's program is in one of the two: amax once, bytes each step.
        moved = collectives.count(step) + collectives.count(once)
        assert moved == collectives.count(by_recipe)
        for kind in ("all-gather", "reduce-scatter"):
            assert collectives.moved_bytes(step, kind) == collectives.moved_bytes(by_recipe, kind)
        assert not collectives.moved_bytes(once, "all-gather")
        for name in ("wi", "wo"):
            q, w = getattr(params8, name), getattr(programs.params, name)
            assert q.data.sharding.is_equivalent_to(w.sharding, w.ndim)
            if q.scale.ndim == w.ndim:
                assert q.scale.sharding.shard_shape(q.scale.shape) != q.scale.shape
    finally:
        programs.group.close()


def test_what_is_gathered_is_half_of_bf16() -> None:
    programs = Programs("auto", BLOCK)
    try:
        _, params8 = programs.quantized()
        programs.params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), programs.params)
        programs.recipe = None
        wide, _ = programs.step()
        step, _ = programs.step(params8)
        bytes8, bytes16 = (collectives.moved_bytes(x, "all-gather") for x in (step, wide))
        assert bytes8 < 0.51 * bytes16
    finally:
        programs.group.close()


def test_in_a_shard_map_weights_are_quantized_as_they_lie() -> None:
    programs = Programs("manual", TENSOR)  # their amax is over the manual axes
    try:
        by_recipe, want = programs.step()
        in_loss, got = programs.step(in_loss=True)
        jax.tree.map(np.testing.assert_array_equal, got, want)
        assert collectives.count(in_loss) == collectives.count(by_recipe)
    finally:
        programs.group.close()


@pytest.mark.parametrize(
    ("lead", "experts", "inner", "recipe", "sums", "explicit"),
    [
        ("stage", "ep", "fsdp", TENSOR, 2, True),
        ("stage", "ep", "fsdp", BLOCK, 0, False),
        (None, ("ep", "fsdp"), None, TENSOR, 2, False),
    ],
    ids=repr,
)
def test_a_stack_is_quantized_where_it_lies(
    lead: Any, experts: Any, inner: Any, recipe: Any, sums: int, explicit: bool
) -> None:
    mesh = fakes.mesh_of({"stage": 2, "fsdp": 2, "ep": 2}, explicit=explicit)
    specs = ep.MoEParams(None, P(lead, experts, inner), P(lead, experts, None, inner))
    shape = (2, EXPERTS, HIDDEN, 2, MLP)
    drawn = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    params = ep.MoEParams(None, drawn, drawn[:, :, :, 0] * 3)

    @jax.jit
    def quantize(params: Any) -> Any:
        return ep.quantize_params(params, recipe, weights_only=True)

    want = quantize(params)
    placed = jax.tree.map(
        lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), params, specs
    )
    compiled = quantize.lower(placed).compile()
    for got in (compiled(placed), ep.quantize_params(placed, recipe, weights_only=True)):
        jax.tree.map(np.testing.assert_array_equal, _bytes(got), _bytes(want))
        for name in ("wi", "wo"):
            q, w = getattr(got, name), getattr(placed, name)
            assert q.data.sharding.is_equivalent_to(w.sharding, w.ndim)
    moved = collectives.count(compiled)
    assert moved.total() == moved["all-reduce", "f32"] == (sums if inner else 0)


def _bytes(tree: Any) -> Any:
    return jax.tree.map(lambda x: np.asarray(x).view(np.uint8), tree)
