"""Training on fsdp+ep and on shard-exp-on-fsdp: the same losses; what the optimizer step moves."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import fakes
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
from ep_runtime_client.modules.sharding import Rules

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
        """Those of the optimizer's update by itself, gradients laid out as parameters."""
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
    """Losses with Auto axes, of tests before."""
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
    # Where H lies on fsdp every Newton-Schulz step of every matrix has to bring its rows together.
    assert training("fsdp+ep", "muon").optimizer_collectives().total() >= 2


@pytest.mark.parametrize(("stacked_dim", "moves"), [(1, False), (0, True)])
def test_muon_moves_nothing_of_a_stack_with_experts_in_front(stacked_dim: int, moves: bool) -> None:
    """Muon makes one dim of all dims but its matrices', which stays sharded where that is major."""
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
