"""`ep.sharding.rules`: specs of every kind of tree, clear errors, and training in all layouts."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import fakes
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers

import ep_runtime as ep
from ep_runtime.errors import InvalidArgumentError
from ep_runtime_client.modules.sharding import Rules
from ep_runtime_client.moe.params import LOGICAL_AXES
from ep_runtime_client.ops.partitioning import roles

SPEC = ep.LayerSpec("block", top_k=2, num_experts=8, hidden_size=16)
PLAIN, SHARDED = "fsdp+ep", "shard-exp-on-fsdp"


def params_of(**settings: Any) -> ep.MoEParams:
    key = jax.random.key(0)
    return jax.eval_shape(lambda: ep.init_moe_params(key, SPEC, 8, use_bias=True, **settings))


@pytest.mark.parametrize("explicit", [False, True], ids=["auto", "explicit"])
@pytest.mark.parametrize(
    ("kind", "wi", "wo", "bias"),
    [
        (PLAIN, P("ep", "fsdp"), P("ep", None, "fsdp"), P("ep", "fsdp")),
        (SHARDED, P(("ep", "fsdp")), P(("ep", "fsdp")), P(("ep", "fsdp"))),
    ],
)
def test_parameters_and_their_optimizer_state_lie_alike(
    kind: str, wi: P, wo: P, bias: P, explicit: bool
) -> None:
    mesh = fakes.mesh_of({"dp": 2, "fsdp": 2, "ep": 2}, explicit=explicit)
    params = params_of()
    state = jax.eval_shape(optax.adamw(1e-3).init, params)
    placed, moments = ep.sharding.rules(kind).shardings((params, state), mesh)
    for found in (placed, moments[0].mu, moments[0].nu):
        for name, meant in (("wi", wi), ("wo", wo), ("wo_bias", bias), ("router", P("fsdp"))):
            shape = getattr(params, name).shape
            sharding = getattr(found, name)
            assert sharding.is_equivalent_to(NamedSharding(mesh, meant), len(shape))
    assert moments[0].count == NamedSharding(mesh, P())
    arrays = jax.tree.map(lambda a: jnp.ones(a.shape, a.dtype), (params, state))
    put = jax.device_put(arrays, (placed, moments))
    assert put[0].wi.sharding == placed.wi


def test_ep_is_major_whatever_the_order_of_the_mesh() -> None:
    rules = ep.sharding.rules(SHARDED, dp="data", ep=("context", "expert"))
    assert rules.spec(LOGICAL_AXES["wi"]) == P(("context", "expert", "fsdp"), None, None, "tp")
    mesh = fakes.mesh_of({"fsdp": 2, "context": 2, "expert": 2})
    here = rules.on(mesh)
    assert here.spec(LOGICAL_AXES["wi"]) == P(("context", "expert", "fsdp"), None, None, None)
    assert here.spec(("activation_batch", None)) == P(("fsdp", "context", "expert"), None)
    assert rules.group_axes(mesh) == {"ep_axis": ("context", "expert"), "outer_axes": ("fsdp",)}


def test_axes_that_the_mesh_lacks_are_left_out() -> None:
    mesh = fakes.mesh_of({"ep": 4, "tp": 2})
    placed = ep.sharding.rules(PLAIN).shardings(params_of(), mesh)
    assert placed.wi.spec == P("ep", None, None, "tp")
    assert placed.router.spec == P(None, None)


def test_a_mesh_without_any_of_their_axes_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    roles.say_once.cache_clear()
    caplog.set_level(logging.WARNING, "ep_runtime")
    mesh = fakes.mesh_of({"x": 4, "y": 2})
    for _ in range(2):
        assert ep.sharding.rules(PLAIN).on(mesh).spec(("exp", "embed_moe")) == P(None, None)
    (text,) = [r.getMessage() for r in caplog.records if r.name == "ep_runtime"]
    assert "know the mesh axes dp, fsdp, ep, tp and the mesh has x=4, y=2" in text


def test_an_axis_that_an_earlier_dim_took_is_left_out() -> None:
    rules = ep.sharding.rules(PLAIN, logical={"exp": ("fsdp", "ep")})
    assert rules.spec(LOGICAL_AXES["wo"]) == P(("fsdp", "ep"), "tp", None)


def test_a_stack_of_layers_keeps_its_leading_dim_whole() -> None:
    mesh = fakes.mesh_of({"fsdp": 2, "ep": 2})
    for gated in (True, False):
        one = params_of(gated=gated)
        stack = jax.tree.map(lambda a: jax.ShapeDtypeStruct((3, *a.shape), a.dtype), one)
        placed = ep.sharding.rules(SHARDED).shardings(stack, mesh)
        assert placed.wi.spec[:2] == (None, ("ep", "fsdp"))
        assert placed.router.spec == P(None, "fsdp", None)


def test_masked_parameters_keep_their_masks() -> None:
    mesh = fakes.mesh_of({"fsdp": 2, "ep": 2})
    rules = ep.sharding.rules(SHARDED)
    masked = jax.tree.map(lambda a: optax.MaskedNode() if a.ndim < 3 else a, params_of())
    placed = rules.shardings(masked, mesh)
    assert placed.router == optax.MaskedNode()
    assert placed.wi.spec == P(("ep", "fsdp"), None, None, None)
    only_wi = ep.MoEParams(optax.MaskedNode(), params_of().wi, optax.MaskedNode())
    assert rules.shardings(only_wi, mesh).wi.spec == P(("ep", "fsdp"), None, None, None)


def test_flax_modules_are_placed_by_their_metadata() -> None:
    mesh = fakes.mesh_of({"fsdp": 2, "ep": 2})
    rules = ep.sharding.rules(SHARDED)
    state = nnx.state(
        nnx.eval_shape(lambda: ep.nnx.MoEBlock(SPEC, 8, rngs=nnx.Rngs(0), use_expert_bias=True))
    )
    placed = rules.shardings(state, mesh)
    assert placed.wi.get_value().spec == P(("ep", "fsdp"), None, None, None)
    assert placed.expert_bias.get_value().is_fully_replicated
    assert jax.tree.structure(placed) == jax.tree.structure(state)

    linen = ep.linen.MoEBlock(SPEC, 8)
    x = jnp.zeros((4, 16))
    boxed = jax.eval_shape(linen.init, jax.random.key(0), x)
    shardings = rules.shardings(boxed, mesh)
    variables = jax.jit(linen.init, out_shardings=shardings)(jax.random.key(0), x)
    wi = nn.meta.unbox(variables)["params"]["wi"]
    assert wi.sharding.is_equivalent_to(placed.wi.get_value(), 4)
    own = nn.logical_to_mesh(nn.get_partition_spec(boxed), rules.on(mesh).logical)
    assert own["params"]["wi"] == P(("ep", "fsdp"), None, None, None)


def test_names_stand_for_arrays() -> None:
    mesh = fakes.mesh_of({"fsdp": 2, "ep": 2})
    tree = {"out": ("embed", "vocab"), "x": P("activation_batch"), "count": np.zeros(3)}
    placed = ep.sharding.rules(PLAIN).shardings(tree, mesh)
    assert {name: sharding.spec for name, sharding in placed.items()} == {
        "out": P("fsdp", None),
        "x": P(("fsdp", "ep")),
        "count": P(),
    }


def test_wrong_rules_say_what_is_wrong() -> None:
    mesh = fakes.mesh_of({"fsdp": 2, "expert": 4})
    six = ep.LayerSpec("block", top_k=2, num_experts=12, hidden_size=16)
    params = jax.eval_shape(lambda: ep.init_moe_params(jax.random.key(0), six, 8))
    rules = ep.sharding.rules(SHARDED, ep="expert")
    with pytest.raises(
        InvalidArgumentError,
        match=r"\['moe'\].wi: dim 0 \(exp\) of size 12 must be a multiple of 8, "
        r"the size of expert=4 x fsdp=2; the array is \[12, 16, 2, 8\]",
    ):
        rules.shardings({"moe": params}, mesh)
    with pytest.raises(InvalidArgumentError, match="kind must be one of"):
        ep.sharding.rules("fsdp")
    with pytest.raises(InvalidArgumentError, match="axis 'fsdp' must have one role, got it as"):
        ep.sharding.rules(PLAIN, ep="fsdp")
    with pytest.raises(InvalidArgumentError, match="got 'embde'"):
        rules.spec(("embde",))
    with pytest.raises(InvalidArgumentError, match="an axis of ep=\\('expert',\\), got \\('dp',"):
        rules.group_axes(fakes.mesh_of({"dp": 2}))


@pytest.mark.parametrize("separate", [False, True])
def test_quantized_weights_lie_as_the_weights_and_scales_along(separate: bool) -> None:
    mesh = fakes.mesh_of({"fsdp": 2, "ep": 2, "tp": 2})
    rules = ep.sharding.rules("fsdp+ep", dp=None)
    spec = ep.LayerSpec("block", top_k=2, num_experts=4, hidden_size=256)
    params = ep.init_moe_params(jax.random.key(0), spec, 128, separate=separate)
    stack = jax.tree.map(lambda x: jnp.stack([x, x]), params)
    for tree, lead in ((params, ()), (stack, (None,))):
        for recipe in (ep.recipes.TensorScaling(), ep.recipes.BlockScaling(), ep.recipes.MXFP8()):
            shapes = jax.eval_shape(lambda tree, r=recipe: ep.quantize_params(tree, r), tree)
            places = rules.shardings(shapes, mesh)
            wi, wo = places.wi, places.wo
            assert wi.data.spec == P(*lead, "ep", "fsdp", None, "tp")
            assert wo.data.spec == P(*lead, "ep", "tp", "fsdp")
            if wi.scale.spec != P(*lead, "ep"):
                last = "tp" if isinstance(recipe, ep.recipes.MXFP8) else None  # one block of M
                assert wi.scale.spec == P(*lead, "ep", "fsdp", None, last)
            made = jax.device_put(ep.quantize_params(tree, recipe), places)
            assert made.wi.data.sharding == wi.data
            of_params = rules.shardings(tree, mesh)
            assert jax.tree.leaves(wi.origin) == jax.tree.leaves(of_params.wi)


EXPERTS, HIDDEN, MLP, TOKENS, STEPS = 8, 16, 8, 64, 10
AXES = {"dp": 2, "fsdp": 2, "ep": 2}
KINDS = ("fsdp+ep", "shard-exp-on-fsdp")
COLLECTIVE = re.compile(
    r" (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
)
# The matrices of wi [E, H, 2, M] are [H, M], one for gate and one for up.
MATRICES = ep.MoEParams(
    router=None,
    wi=MuonDimensionNumbers(reduction_axis=(-3,), output_axis=(-1,)),
    wo=MuonDimensionNumbers((-2,), (-1,)),
)
OPTIMIZERS = {
    "adamw": lambda: optax.adamw(1e-2),
    "muon": lambda: optax.contrib.muon(1e-2, muon_weight_dimension_numbers=MATRICES),
}


class Training:
    """One layer's training state on a mesh and in a layout, and its compiled step."""

    def __init__(self, group: fakes.LocalGroup, rules: Rules, optimizer: str) -> None:
        mesh = group.mesh
        layer = group.register_layer("block", top_k=2)
        transformation = OPTIMIZERS[optimizer]()
        params = ep.init_moe_params(jax.random.key(0), layer, MLP)
        state = (params, transformation.init(params))
        self.layout = rules.shardings(state, mesh)
        self.state = jax.device_put(state, self.layout)
        batch = NamedSharding(mesh, rules.on(mesh).spec(("activation_batch", "activation_embed")))
        self.batches = [
            jax.device_put(jax.random.normal(jax.random.key(i), (TOKENS, HIDDEN)), batch)
            for i in range(STEPS)
        ]

        def loss(params: ep.MoEParams, x: jax.Array) -> jax.Array:
            y, aux = ep.moe(layer, x, params, aux_loss_coeff=0.01)
            return ((y - jnp.roll(x, 1, axis=-1)) ** 2).mean() + aux

        def update(state: Any, grads: ep.MoEParams) -> Any:
            updates, moments = transformation.update(grads, state[1], state[0])
            return optax.apply_updates(state[0], updates), moments

        def step(state: Any, x: jax.Array) -> tuple[Any, jax.Array]:
            value, grads = jax.value_and_grad(loss)(state[0], x)
            return update(state, grads), value

        self.update = jax.jit(update, out_shardings=self.layout)
        self.step = jax.jit(step, out_shardings=(self.layout, None))

    def losses(self) -> list[float]:
        state, found = self.state, []
        for x in self.batches:
            state, loss = self.step(state, x)
            found.append(float(loss))
        for array, sharding in zip(
            jax.tree.leaves(state), jax.tree.leaves(self.layout), strict=True
        ):
            assert array.sharding.is_equivalent_to(sharding, array.ndim)
        return found

    def optimizer_collectives(self) -> Counter[str]:
        """Counts collectives of the optimizer's update, with gradients sharded like parameters."""
        compiled = self.update.lower(self.state, self.state[0]).compile()
        return Counter(COLLECTIVE.findall(compiled.as_text()))


@pytest.fixture
def training(make_group: fakes.MakeGroup) -> Callable[..., Training]:
    def make(
        kind: str,
        optimizer: str,
        *,
        axes: dict[str, int] = AXES,
        explicit: bool = False,
        **names: Any,
    ) -> Training:
        mesh, rules = fakes.mesh_of(axes, explicit=explicit), ep.sharding.rules(kind, **names)
        group = make_group(
            mesh=mesh, **rules.group_axes(mesh), transport="memfd", num_experts=EXPERTS
        )
        return Training(group, rules, optimizer)

    return make


@pytest.fixture(scope="module")
def known() -> dict[str, list[float]]:
    """Losses with Auto axes, from earlier tests."""
    return {}


@pytest.fixture
def losses_of(
    training: Callable[..., Training], known: dict[str, list[float]]
) -> Callable[[str], list[float]]:
    def find(kind: str) -> list[float]:
        if kind not in known:
            known[kind] = training(kind, "adamw").losses()
        return known[kind]

    return find


def test_ten_steps_have_the_same_losses_in_both_layouts(
    losses_of: Callable[[str], list[float]],
) -> None:
    plain, sharded = map(losses_of, KINDS)
    np.testing.assert_allclose(sharded, plain, rtol=2e-5)
    assert plain[-1] < 0.97 * plain[0]


def test_explicit_axes_have_the_same_losses(
    training: Callable[..., Training], losses_of: Callable[[str], list[float]]
) -> None:
    explicit = training(KINDS[1], "adamw", explicit=True).losses()
    np.testing.assert_allclose(explicit, losses_of(KINDS[1]), rtol=2e-5)


def test_expert_parallelism_over_two_axes_has_the_same_losses(
    training: Callable[..., Training], losses_of: Callable[[str], list[float]]
) -> None:
    two = training(
        KINDS[1],
        "adamw",
        axes={"fsdp": 2, "context": 2, "expert": 2},
        ep=("context", "expert"),
    )
    assert two.layout[0].wi.spec == P(("context", "expert", "fsdp"), None, None, None)
    np.testing.assert_allclose(two.losses(), losses_of(KINDS[0]), rtol=2e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_adamw_moves_nothing(training: Callable[..., Training], kind: str) -> None:
    assert not training(kind, "adamw").optimizer_collectives()


def test_muon_moves_nothing_where_experts_are_whole(training: Callable[..., Training]) -> None:
    assert not training("shard-exp-on-fsdp", "muon").optimizer_collectives()
    # If H is sharded over fsdp, every Newton-Schulz step of a matrix must gather its rows.
    assert training("fsdp+ep", "muon").optimizer_collectives().total() >= 2


@pytest.mark.parametrize(("stacked_dim", "moves"), [(1, False), (0, True)])
def test_muon_moves_nothing_of_a_stack_with_experts_in_front(stacked_dim: int, moves: bool) -> None:
    """Muon merges all dims except its matrices' into one, which stays sharded if the sharded dim is
    major.
    """
    mesh = fakes.mesh_of(AXES)
    spec = ep.LayerSpec("block", top_k=2, num_experts=EXPERTS, hidden_size=HIDDEN)
    axes = nnx.StateAxes({nnx.Param: stacked_dim})

    @nnx.split_rngs(splits=3)
    @nnx.vmap(out_axes=axes, transform_metadata={nnx.PARTITION_NAME: "layers"})
    def make(rngs: Any) -> Any:
        return ep.nnx.MoEBlock(spec, MLP, rngs=rngs)

    state = nnx.state(nnx.eval_shape(lambda: make(nnx.Rngs(0))))
    placed = ep.sharding.rules("shard-exp-on-fsdp").shardings(state, mesh)
    weights = {
        name: jax.ShapeDtypeStruct(
            state[name].shape, jnp.float32, sharding=placed[name].get_value()
        )
        for name in ("wi", "wo")
    }
    dims = {"wi": MATRICES.wi, "wo": MATRICES.wo}
    muon = optax.contrib.muon(1e-2, muon_weight_dimension_numbers=dims)
    step = jax.jit(
        lambda w: muon.update(w, muon.init(w), w)[0],
        out_shardings=jax.tree.map(lambda a: a.sharding, weights),
    )
    found = COLLECTIVE.findall(step.lower(weights).compile().as_text())
    assert bool(found) == moves
