"""permute and unpermute over shards of a batch: counts per shard, no collectives, every mode."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import fakes
import jax
import jax.numpy as jnp
import numpy as np
import permutations
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from permutations import Case, Inputs

import ep_runtime as ep

AXES = {"dp": 2, "fsdp": 2, "tp": 2}
BATCH = P(("dp", "fsdp"))
SHARDS = 4
KINDS = (" all-", " collective-", " reduce-scatter", " ragged-")
CASES = (
    Case("zones of 4", tokens=5, align_size=4),
    Case("drops", tokens=5, num_out_tokens=7, align_size=2),
    Case("map", tokens=5, from_map=True, align_size=4, num_out_tokens=16),
)


ZONES, DROPS, MAP = CASES


def placed(inputs: Inputs, mesh: Any, spec: P = BATCH) -> Inputs:
    sharding = NamedSharding(mesh, spec)
    values = (getattr(inputs, field.name) for field in dataclasses.fields(inputs))
    return Inputs(*(jax.device_put(x, sharding) for x in values))


def run(case: Case, inputs: Inputs, **options: Any) -> tuple[dict[str, Any], str]:
    """Returns results, and the text of the compiled program."""
    compiled = permutations.program(case, **options).lower(inputs).compile()
    return permutations.results(*compiled(inputs)), compiled.as_text() or ""


def assert_no_collectives(text: str) -> None:
    assert "HloModule" in text
    for kind in KINDS:
        assert kind not in text


@contextmanager
def mode(name: str) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yields a mesh, and the options that tell plain jit how tokens are sharded."""
    mesh = fakes.mesh_of(AXES, explicit="explicit" in name)
    spec = NamedSharding(mesh, BATCH) if name == "sharding" else BATCH
    options = {"tokens_spec": spec} if "explicit" not in name else {}
    if "ambient" in name:
        with jax.set_mesh(mesh):
            yield mesh, options
    else:
        yield mesh, options


@pytest.mark.parametrize(
    ("case", "name"),
    [
        (ZONES, "ambient"),
        (ZONES, "explicit"),
        (DROPS, "sharding"),
        (MAP, "sharding"),
        (MAP, "explicit ambient"),
    ],
    ids=str,
)
def test_every_shard_is_sorted_alone_and_nothing_travels(case: Case, name: str) -> None:
    shards = permutations.inputs_of(case, SHARDS)
    with mode(name) as (mesh, options):
        got, text = run(case, placed(shards.joined(), mesh), **options)
    assert_no_collectives(text)
    permutations.assert_same(got, permutations.run_reference(case, shards))
    for value in got.values():
        assert value.sharding.is_equivalent_to(NamedSharding(mesh, BATCH), value.ndim)
    assert got["group_sizes"].shape == (SHARDS, case.num_experts)


def test_concrete_arrays_tell_by_themselves() -> None:
    shards = permutations.inputs_of(MAP, SHARDS)
    mesh = fakes.mesh_of(AXES)
    back, _, p = permutations.there_and_back(MAP, placed(shards.joined(), mesh))
    wanted = permutations.run_reference(MAP, shards)
    found = {"rows": p.tokens, "group_sizes": p.group_sizes, "back": back}
    permutations.assert_same(found, {name: wanted[name] for name in found})
    assert back.sharding.is_equivalent_to(NamedSharding(mesh, BATCH), 2)


@pytest.mark.parametrize("case", [DROPS, MAP], ids=str)
def test_untold_the_batch_is_one_shard_and_right(case: Case) -> None:
    whole = permutations.inputs_of(dataclasses.replace(case, tokens=20))
    inputs = placed(whole.joined(), fakes.mesh_of({"dp": 2, "fsdp": 2}))
    inputs = dataclasses.replace(
        inputs, factors=whole.factors[0], prob_factors=whole.prob_factors[0]
    )
    case = dataclasses.replace(case, tokens=20)
    got = permutations.run_ops(case, inputs)
    permutations.assert_same(got, permutations.run_reference(case, whole))


@pytest.mark.parametrize("explicit", [False, True], ids=["auto", "explicit"])
def test_a_batch_over_two_dims(explicit: bool) -> None:
    """B over dp, S over fsdp: a shard's block is flattened, and dim 0 of rows is over both axes."""
    case = Case("", tokens=6, align_size=4)
    mesh = fakes.mesh_of(AXES, explicit=explicit)
    shards = permutations.inputs_of(case, SHARDS)

    def spread(x: Any) -> Any:
        """Turns [4, 6, D] into [2 * 2, 2 * 3, D] of blocks [2, 3, D]."""
        x = x.reshape(2, 2, 2, 3, -1).transpose(0, 2, 1, 3, 4)
        return jax.device_put(x.reshape(4, 6, -1), NamedSharding(mesh, P("dp", "fsdp")))

    def gathered(x: Any) -> Any:
        x = np.asarray(x).reshape(2, 2, 2, 3, -1).transpose(0, 2, 1, 3, 4)
        return x.reshape(24, -1)

    flat = placed(shards.joined(), mesh)
    names = ("choice", "tokens", "probs", "merging", "cotangent")
    inputs = dataclasses.replace(flat, **{n: spread(getattr(shards, n)) for n in names})
    options = {} if explicit else {"tokens_spec": NamedSharding(mesh, P("dp", "fsdp"))}
    got, text = run(case, inputs, **options)
    assert_no_collectives(text)
    for name in ("back", "d_tokens", "d_probs", "d_merging"):
        assert got[name].sharding.is_equivalent_to(NamedSharding(mesh, P("dp", "fsdp")), 3)
        got[name] = gathered(got[name])
    permutations.assert_same(got, permutations.run_reference(case, shards))


@pytest.mark.parametrize("explicit", [False, True], ids=["auto", "explicit"])
def test_features_stay_on_their_axis(explicit: bool) -> None:
    """H over tp: only the gradient of merging_probs sums over it."""
    case = Case("", tokens=5, align_size=4)
    mesh = fakes.mesh_of(AXES, explicit=explicit)
    shards = permutations.inputs_of(case, SHARDS)
    spec = P(("dp", "fsdp"), "tp")
    inputs = placed(shards.joined(), mesh)
    wide = {n: getattr(inputs, n) for n in ("tokens", "cotangent", "factors")}
    wide = {n: jax.device_put(x, NamedSharding(mesh, spec)) for n, x in wide.items()}
    inputs = dataclasses.replace(inputs, **wide)
    options = {} if explicit else {"tokens_spec": NamedSharding(mesh, spec)}
    got, text = run(case, inputs, **options)
    assert [text.count(f" {kind}(") for kind in ("all-reduce", "all-gather")] == [1, 0]
    permutations.assert_same(got, permutations.run_reference(case, shards))
    for name in ("rows", "back", "d_tokens"):
        assert got[name].sharding.is_equivalent_to(NamedSharding(mesh, spec), 2)


@pytest.mark.parametrize(
    ("case", "manual", "check"),
    [
        (ZONES, ("dp", "fsdp", "tp"), True),
        (ZONES, ("dp",), False),
        (MAP, ("dp", "fsdp", "tp"), False),
        (MAP, ("dp",), True),
    ],
    ids=str,
)
def test_inside_a_shard_map_of_the_user(case: Case, manual: tuple[str, ...], check: bool) -> None:
    """Manual axes split the batch already; other axes are nested if the caller names them."""
    shards = permutations.inputs_of(case, SHARDS)
    mesh = fakes.mesh_of(AXES)
    spec = P(tuple(axis for axis in ("dp", "fsdp") if axis in manual))
    mapped = jax.shard_map(
        lambda inputs: permutations.there_and_back(case, inputs, tokens_spec=BATCH),
        mesh=mesh,
        axis_names={*manual},
        in_specs=spec,
        out_specs=spec,
        check_vma=check,
    )
    program = permutations.pulled_back(mapped)
    got = permutations.results(*program(placed(shards.joined(), mesh)))
    permutations.assert_same(got, permutations.run_reference(case, shards))


def test_replicated_operands_in_a_checked_shard_map_sum_their_gradients() -> None:
    case = Case("", tokens=5)
    mesh = fakes.mesh_of({"dp": 4})
    shards = permutations.inputs_of(case, SHARDS)
    tokens = shards.tokens[0]

    def local(tokens: Any, choice: Any) -> Any:
        p = ep.permute(tokens, choice, num_experts=5)
        return ep.unpermute(p.tokens**2, p)

    mapped = jax.shard_map(local, mesh=mesh, in_specs=(P(), P("dp")), out_specs=P("dp"))
    choice = shards.joined().choice
    grad = jax.jit(jax.grad(lambda x: mapped(x, choice).sum()))(tokens)
    used = (shards.choice >= 0).sum((0, 2))
    np.testing.assert_allclose(grad, 2 * tokens * used[:, None], rtol=1e-6)


def test_a_plan_of_another_region_is_refused_or_seen_from_there() -> None:
    case = Case("", tokens=5, align_size=4)
    mesh = fakes.mesh_of(AXES)
    inputs = placed(permutations.inputs_of(case, SHARDS).joined(), mesh)
    p = ep.permute(inputs.tokens, inputs.choice, **case.options)
    wanted = ep.unpermute(p.tokens, p)
    inner = jax.shard_map(
        lambda p: ep.unpermute(p.tokens, p), mesh=mesh, in_specs=BATCH, out_specs=BATCH
    )
    np.testing.assert_array_equal(jax.jit(inner)(p), wanted)

    make = jax.shard_map(
        lambda x, idx: ep.permute(x, idx, **case.options),
        mesh=mesh,
        in_specs=BATCH,
        out_specs=BATCH,
    )
    made_inside = jax.jit(make)(inputs.tokens, inputs.choice)
    np.testing.assert_array_equal(made_inside.tokens, p.tokens)
    with pytest.raises(ValueError, match="was made for 1 shards of"):
        ep.unpermute(made_inside.tokens, made_inside)


def test_explicit_operands_that_lie_elsewhere_get_gradients_where_they_lie() -> None:
    """Only the routing shows how the batch is split; tokens are replicated, or have H over tp."""
    case = Case("", tokens=5, align_size=4)
    mesh = fakes.mesh_of(AXES, explicit=True)
    shards = permutations.inputs_of(case, SHARDS)
    inputs = shards.joined()
    choice = jax.device_put(inputs.choice, NamedSharding(mesh, BATCH))
    for spec in (P(), P(None, "tp")):
        tokens = jax.device_put(inputs.tokens, NamedSharding(mesh, spec))
        given = dataclasses.replace(inputs, choice=choice, tokens=tokens)
        got = permutations.run_ops(case, given)
        permutations.assert_same(got, permutations.run_reference(case, shards))
        assert got["d_tokens"].sharding.is_equivalent_to(NamedSharding(mesh, spec), 2)


@pytest.mark.usefixtures("optimized")  # single ops and one program have the same bits
def test_a_program_is_exported_and_read_back() -> None:
    case = Case("", tokens=5, align_size=4)
    spec = NamedSharding(fakes.mesh_of(AXES), BATCH)
    inputs = placed(permutations.inputs_of(case, SHARDS).joined(), spec.mesh)

    def there_and_back(tokens: Any, choice: Any) -> Any:
        p = ep.permute(tokens, choice, tokens_spec=spec, **case.options)
        return ep.unpermute(jnp.tanh(p.tokens), p)

    exported = jax.export.export(jax.jit(there_and_back))(inputs.tokens, inputs.choice)
    read = jax.export.deserialize(exported.serialize())
    got = read.call(inputs.tokens, inputs.choice)
    np.testing.assert_array_equal(got, there_and_back(inputs.tokens, inputs.choice))


def test_layers_on_a_mesh_under_remat_and_scan() -> None:
    case = Case("", tokens=5, align_size=4, num_out_tokens=12)
    mesh = fakes.mesh_of(AXES)
    given = placed(permutations.inputs_of(case, SHARDS).joined(), mesh)

    def layer(tokens: Any, _: Any) -> Any:
        inputs = dataclasses.replace(given, tokens=tokens)
        spec = NamedSharding(mesh, BATCH)
        back, _, _ = permutations.there_and_back(case, inputs, tokens_spec=spec)
        return jnp.tanh(tokens + back), None

    def loss(tokens: Any, remat: bool) -> Any:
        body = jax.checkpoint(layer) if remat else layer
        return (jax.lax.scan(body, tokens, length=2)[0] * given.cotangent).sum()

    step = jax.jit(jax.grad(loss), static_argnums=1)
    plain, again = step(given.tokens, False), step(given.tokens, True)
    np.testing.assert_allclose(again, plain, rtol=1e-5, atol=1e-6)


def test_specs_that_do_not_fit() -> None:
    tokens, idx = np.ones((6, 2)), np.zeros((6, 1), int)
    with pytest.raises(ValueError, match=r"needs a mesh with .*; call under jax\.set_mesh"):
        ep.permute(tokens, idx, num_experts=2, tokens_spec=P("dp"))
    mesh = fakes.mesh_of({"dp": 4})
    wanted = r"must name axes of the mesh .*, got \('expert',\)"
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=wanted):
        ep.permute(tokens, idx, num_experts=2, tokens_spec=P("expert"))
    with pytest.raises(ValueError, match="dim 0 of the tokens must be a multiple of 4, .*, got 6"):
        ep.permute(tokens, idx, num_experts=2, tokens_spec=NamedSharding(mesh, P("dp")))
