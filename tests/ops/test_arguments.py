"""Wrong arguments raise the right class, with names and numbers in the text."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes import MakeGroup
from jax import export
from jax.sharding import Mesh, PartitionSpec

import ep_runtime as ep
from ep_runtime_client.base.layers import EpLayer
from ep_runtime_client.moe.api import init_moe_params, moe
from ep_runtime_client.programs.remat import remat_policy


@pytest.fixture
def layer(make_group: MakeGroup) -> EpLayer:
    group = make_group(transport="memfd", max_token_dtype="bfloat16", max_top_k=4, lanes=2)
    return group.register_layer("moe", top_k=2, in_flight=2)


def tokens(count: int = 32, hidden: int = 16, dtype: Any = jnp.bfloat16) -> Any:
    return jnp.zeros((count, hidden), dtype)


def slots(count: int = 32, top_k: int = 2, dtype: Any = jnp.int32) -> Any:
    return jnp.zeros((count, top_k), dtype)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda d: d(tokens(33), slots(33)), r"\(33,\), which do not divide over the 8 shards"),
        (lambda d: d(tokens(256), slots(256)), "32 tokens per rank.*max_tokens_per_rank=16"),
        (lambda d: d(tokens(hidden=8), slots()), r"\[T, 16\].*got \[32, 8\]"),
        (lambda d: d(tokens()[0], slots()), r"\[T, 16\].*got \[16\]"),
        (lambda d: d(tokens(dtype=jnp.float32), slots()), r"float32 \(4 bytes\) is wider than"),
        (lambda d: d(tokens(dtype=jnp.int32), slots()), "a float dtype or a 1-byte one, got int32"),
        (lambda d: d(tokens(), slots(top_k=3)), r"\[T, 2\].*got \[32, 3\]"),
        (lambda d: d(tokens(), slots(dtype=jnp.float32)), "int32 .*got float32"),
        (lambda d: d(tokens(), slots(16)), r"leading dims of tokens \(32,\), got \(16,\)"),
        (lambda d: d(tokens(), None), "needs topk_idx or plan"),
        (lambda d: d(tokens(), slots(), jnp.zeros((32, 3))), r"top_k=2, got \[32, 3\]"),
        (lambda d: d(tokens(), slots(), slots()), "topk_weights must be f32, got int32"),
        (lambda d: d(tokens(), slots(), handle=2), r"handle must be 0 to 1 .*got 2"),
        (lambda d: d(tokens(), slots(), capacity=0), "capacity must be 1 to .*got 0"),
        (lambda d: d(tokens(), slots(), capacity=7), "capacity=7 .*alignment=8 of layer 'moe'"),
        (lambda d: d(tokens(), None, plan=3), "plan must be a result of ep.prepare, got int"),
    ],
)
def test_dispatch(layer: EpLayer, call: Any, text: str) -> None:
    with pytest.raises(ep.InvalidArgumentError, match=text):
        call(lambda *args, **kwargs: ep.dispatch(layer, *args, **kwargs))


def test_combine(layer: EpLayer) -> None:
    sent = ep.dispatch(layer, tokens(), slots())
    for rows, weights, text in (
        (sent.tokens[:, :-1], None, r"expert_out must be \[R, C, H\] = \[8, "),
        (sent.tokens.astype(jnp.float32), None, "expert_out of float32 .* is wider"),
        (sent.tokens.astype(jnp.int8), None, "expert_out must have a float dtype of 2 bytes"),
        (sent.tokens, sent.weights[:4], r"weights must be f32 \[R, C\]"),
    ):
        with pytest.raises(ValueError, match=text):
            ep.combine(layer, sent, rows, weights=weights)
    with pytest.raises(ValueError, match="dispatched must be a result of ep.dispatch"):
        ep.combine(layer, sent.tokens, sent.tokens)


def test_plans_keep_their_own_settings(layer: EpLayer) -> None:
    plan = ep.prepare(layer, slots(), handle=1, capacity=64)
    for options, text in (
        ({"capacity": 32}, "capacity=32 was given with a plan made for 64"),
        ({"handle": 3}, "handle must be 0 to 1"),
    ):
        with pytest.raises(ValueError, match=text):
            ep.dispatch(layer, tokens(), None, plan=plan, **options)
    with pytest.raises(ValueError, match=r"leading dims \(32,\), got \(16,\)"):
        ep.dispatch(layer, tokens(16), None, plan=plan)
    assert ep.dispatch(layer, tokens(), None, plan=plan).plan.handle == 1


def test_layers_of_closed_and_of_remade_groups_are_stale(make_group: MakeGroup) -> None:
    group = make_group(name="again")
    layer = group.register_layer("moe", top_k=2)
    group.close()
    with pytest.raises(ep.StaleHandleError, match="'again'"):
        ep.prepare(layer, slots())
    make_group(name="again", alignment=16)
    with pytest.raises(ep.StaleHandleError, match="'again'"):
        ep.prepare(layer, slots())


def test_a_program_of_a_closed_group_names_layer_and_generation(make_group: MakeGroup) -> None:
    group = make_group(transport="memfd")
    layer = group.register_layer("moe", top_k=2)
    run = jax.jit(lambda idx: ep.prepare(layer, idx).arrays.num_recv)
    jax.block_until_ready(run(slots()))
    group.close()
    with pytest.raises(ep.StaleHandleError, match="moe"), ep.translate_errors():
        jax.block_until_ready(run(slots()))


def test_another_ambient_mesh_is_refused(layer: EpLayer) -> None:
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))
    with (
        jax.set_mesh(mesh),
        pytest.raises(ValueError, match=r"'x': 4, 'y': 2.*\{'ep': 8\}"),
    ):
        jax.jit(lambda idx: ep.prepare(layer, idx))(slots())


def test_a_layer_must_be_a_layer() -> None:
    with pytest.raises(ValueError, match="layer must be an EpLayer or stack"):
        ep.prepare("moe", slots())


def test_moe_and_remat_policy(layer: EpLayer) -> None:
    def shapes(source: Any) -> Any:
        return jax.eval_shape(lambda key: init_moe_params(key, source, 8), jax.random.key(0))

    params = shapes(layer)
    bad_router = shapes(ep.LayerSpec("x", top_k=2, num_experts=4, hidden_size=16))
    for arguments, options, text in (
        ((tokens(), params), {"activation": "swash"}, "activation must be a function or one of"),
        ((tokens(hidden=8), params), {}, r"x must be \[T, 16\]"),
        ((tokens(), bad_router), {}, r"router must be \[H, E\] = \[16, 16\], .*got \[16, 4\]"),
        ((tokens(), dataclasses.asdict(params)), {}, r"params must be ep.MoEParams.*dict .*'wo'"),
        (
            (tokens(), params),
            {"compute_dtype": "float64"},
            "compute_dtype=float64 needs jax_enable_x64",
        ),
        ((tokens(), params), {"gated": False}, r"wi must be \[E, H, M\]"),
    ):
        with pytest.raises(ValueError, match=text):
            moe(layer, *arguments, **options)
    with pytest.raises(ValueError, match="one of ep.recipes"):
        moe(layer, tokens(), params, recipe="fp8")
    with pytest.raises(ValueError, match="layer_or_spec must be .*got str"):
        shapes("moe")
    with pytest.raises(ValueError, match="got 'ep_nothing'"):
        remat_policy(save=("ep_nothing",))
    with pytest.raises(ValueError, match="both have"):
        remat_policy(offload=("ep_plan",))


def test_a_program_with_a_layer_spec_is_not_compiled() -> None:
    spec = ep.LayerSpec("x", top_k=2, num_experts=4, hidden_size=16)
    params = init_moe_params(jax.random.key(0), spec, 8)

    def loss(x: Any) -> Any:
        return moe(spec, x, params)[0].sum()

    assert jax.eval_shape(jax.grad(jax.checkpoint(loss)), tokens()).shape == tokens().shape
    for run in (loss, jax.jit(loss), jax.jit(jax.grad(loss))):
        with pytest.raises(ep.InvalidArgumentError, match="LayerSpec 'x', which moves no tokens"):
            run(tokens())


def test_a_program_with_a_layer_spec_is_not_exported_and_says_what_is() -> None:
    spec: Any = ep.LayerSpec("x", top_k=2, num_experts=4, hidden_size=16)
    params = init_moe_params(jax.random.key(0), spec, 8)
    rows, sizes = jnp.ones((1, 16, 16)), jnp.full((1, 4), 4, jnp.int32)
    programs: tuple[Callable[[Any], Any], ...] = (
        lambda x: moe(spec, x, params),
        lambda x: ep.dispatch(spec, x, slots()),
        lambda x: ep.combine(spec, None, x),
        lambda x: ep.grouped_gemm(rows, jnp.ones((4, 16, 8)), sizes, layer=spec) + x[0, 0],
    )
    remedy = r"LayerSpec 'x', which .*export.* regist.*ep\.connect\(.none.\)"
    for program in programs:
        with pytest.raises(ep.InvalidArgumentError, match=remedy):
            export.export(jax.jit(program), disabled_checks=ep.export_checks())(tokens())


def test_without_a_daemon_a_registered_layer_is_exported() -> None:
    with ep.connect("none") as session:
        group = session.create_group(
            "g",
            jax.make_mesh((1,), ("ep",), devices=jax.devices()[:1]),
            ep_axis="ep",
            num_experts=4,
            hidden_size=16,
            max_tokens_per_rank=32,
        )
        layer = group.register_layer("x", top_k=2)
        params = init_moe_params(jax.random.key(0), layer, 8)
        program = jax.jit(lambda x: moe(layer, x, params)[0])
        x = jax.random.normal(jax.random.key(1), (32, 16), jnp.bfloat16)
        made = export.export(program, disabled_checks=ep.export_checks())(x)
        assert np.any(made.call(x))
        np.testing.assert_array_equal(made.call(x), program(x))


def test_weights_in_a_region_say_how_to_pass_them(make_group: MakeGroup) -> None:
    axes = {"fsdp": 2, "ep": 2}
    group = make_group(axes=axes, outer_axes="fsdp", num_experts=4, max_top_k=2)
    layer = group.register_layer("moe", top_k=2)
    params = init_moe_params(jax.random.key(0), layer, 8)
    rows = PartitionSpec(("fsdp", "ep"))
    both = PartitionSpec(("ep", "fsdp"))

    def shape(spec: PartitionSpec, told: PartitionSpec | None = None) -> Any:
        def specs(each: PartitionSpec) -> ep.MoEParams:
            return ep.MoEParams(PartitionSpec(), each, each)

        region = jax.shard_map(
            lambda x, params: moe(layer, x, params, params_spec=told and specs(told))[0],
            mesh=group.mesh,
            in_specs=(rows, specs(spec)),
            out_specs=rows,
        )
        return jax.eval_shape(region, tokens(16, dtype=jnp.float32), params).shape

    assert shape(both, both) == shape(PartitionSpec("ep")) == (16, 16)
    for spec, count in ((PartitionSpec(), 8), (both, 2)):
        told = rf"rhs has {count} experts, layer 'moe' has 4: .*in_specs .*over ep=2.*params_spec"
        with pytest.raises(ep.InvalidArgumentError, match=told):
            shape(spec)
