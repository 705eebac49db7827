"""Looks up connect, groups and layers under tracing, and layers that replace others."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import SMALL
from daemon_fixtures import WAIT_S, start_daemon
from jax import lax
from jax.sharding import Mesh

import ep_runtime as ep
from ep_runtime_client.base import jax_internals
from ep_runtime_client.cli.daemon import source

ARGUMENTS = SMALL | {"outer_axes": "dp", "max_top_k": 4}


@pytest.fixture
def session() -> Iterator[ep.Session]:
    with ep.connect("none", job="tests") as found:
        yield found


def traced(how: str, look: Callable[[], Any]) -> Any:
    """Returns the result of `look` inside a transformation."""
    seen: list[Any] = []

    def f(x: Any) -> Any:
        assert jax_internals.under_tracing()
        seen.append(look())
        return x * 2.0

    runs: dict[str, Callable[[], Any]] = {
        "jit": lambda: jax.jit(f)(1.0),
        "grad": lambda: jax.grad(f)(1.0),
        "eval_shape": lambda: jax.eval_shape(f, jax.ShapeDtypeStruct((), jnp.float32)),
        "scan": lambda: lax.scan(lambda c, x: (f(c), None), 1.0, jnp.ones(3)),
        "shard_map": lambda: jax.shard_map(
            f,
            mesh=Mesh(np.array(jax.devices()[:2]), ("x",)),
            in_specs=jax.P("x"),
            out_specs=jax.P("x"),
        )(jnp.ones(2)),
    }
    runs[how]()
    return seen[0]


HOW = pytest.mark.parametrize("how", ["jit", "grad", "eval_shape", "scan", "shard_map"])


@HOW
def test_what_exists_is_returned_under_tracing(how: str, session: ep.Session, mesh: Any) -> None:
    group = session.create_group("g", mesh, **ARGUMENTS)
    layer = group.register_layer("block0/moe", top_k=2)
    stack = group.register_layer_stack("blocks", 3, top_k=2)
    found = {
        "connect": lambda: ep.connect("none"),
        "connect with the job": lambda: ep.connect("none", job="tests"),
        "create_group": lambda: session.create_group("g", mesh, **ARGUMENTS),
        "group": lambda: session.group("g"),
        "register_layer": lambda: group.register_layer("block0/moe", top_k=2),
        "register_layers": lambda: group.register_layers([ep.LayerSpec("block0/moe", top_k=2)])[0],
        "register_layer_stack": lambda: group.register_layer_stack("blocks", 3, top_k=2),
        "layer": lambda: group.layer("block0/moe"),
        "a layer of a stack": lambda: group.layer("blocks[1]"),
        "ep.layer": lambda: ep.layer("g/block0/moe"),
        "ep.layer of a stack": lambda: ep.layer("g/blocks"),
    }
    wanted = [session, session, group, group, layer, layer, stack, layer, stack[1], layer, stack]
    for (name, look), there in zip(found.items(), wanted, strict=True):
        assert traced(how, look) == there, name


@HOW
def test_what_would_have_to_be_made_says_where(how: str, session: ep.Session, mesh: Any) -> None:
    group = session.create_group("g", mesh, **ARGUMENTS)
    group.register_layer("moe", top_k=2)
    missing: dict[str, Callable[[], Any]] = {
        "embedded": lambda: ep.connect("embedded"),
        "other": lambda: session.create_group("other", mesh, **ARGUMENTS),
        "absent": lambda: session.group("absent"),
        "new": lambda: group.register_layer("new", top_k=2),
        "two": lambda: group.register_layers([ep.LayerSpec("two", top_k=2)]),
        "none": lambda: group.layer("none"),
        "stack": lambda: group.register_layer_stack("stack", 2, top_k=2),
    }
    for name, look in missing.items():
        with pytest.raises(ep.InvalidArgumentError, match=f"'{name}'.*call this outside jit"):
            traced(how, look)
    with pytest.raises(ep.InvalidArgumentError, match="^check .*call this outside jit"):
        traced(how, group.check)
    assert session.describe()["groups"] == ["g"]


def test_another_spec_is_told_under_tracing_too(session: ep.Session, mesh: Any) -> None:
    group = session.create_group("g", mesh, **ARGUMENTS)
    layer = group.register_layer("moe", top_k=2)
    wide = {**ARGUMENTS, "hidden_size": 32}
    for look in (
        lambda: session.create_group("g", mesh, **wide),
        lambda: group.register_layer("moe", top_k=1),
    ):
        with pytest.raises(ep.SpecMismatchError, match="call this outside jit"):
            traced("jit", look)
    for look in (
        lambda: session.create_group("g", mesh, **wide, replace=True),
        lambda: group.register_layer("moe", top_k=1, replace=True),
    ):
        with pytest.raises(ep.InvalidArgumentError, match="call this outside jit"):
            traced("jit", look)
    assert group.layer("moe") == layer


def test_a_connect_under_tracing_counts_nothing(mesh: Any) -> None:
    with ep.connect("none", job="tests") as session:

        def look() -> Any:
            with ep.connect("none") as again:
                again.close()
            return ep.connect("none")

        assert traced("jit", look) is session
        assert session.alive
        assert session.create_group("g", mesh, **ARGUMENTS).spec.name == "g"
    assert not session.alive


def test_ep_layer_finds_layers_of_every_group(session: ep.Session, mesh: Any) -> None:
    layers = {}
    for name in ("a", "a/b"):
        group = session.create_group(name, mesh, **ARGUMENTS)
        layers[name] = group.register_layer("moe", top_k=2)
    assert ep.layer("a/moe") == layers["a"]
    assert ep.layer("a/b/moe") == layers["a/b"]
    with pytest.raises(ep.StaleHandleError, match=r"'moe'.*\['a/b/moe', 'a/moe'\]"):
        ep.layer("moe")
    session.group("a").register_layer("b/moe", top_k=1)
    with pytest.raises(ep.InvalidArgumentError, match=r"'a/b/moe'.*\['a', 'a/b'\]"):
        ep.layer("a/b/moe")
    session.group("a/b").close()
    assert ep.layer("a/b/moe").top_k == 1


def test_a_model_may_be_built_under_eval_shape(session: ep.Session, mesh: Any) -> None:
    session.create_group("g", mesh, **ARGUMENTS).register_layer("moe", top_k=2)

    def model() -> Any:
        layer = ep.layer("g/moe")
        params = ep.init_moe_params(jax.random.key(0), layer, 8)
        return ep.moe(layer, jnp.ones((64, 16), jnp.bfloat16), params)[0]

    assert jax.eval_shape(model).shape == (64, 16)


_ARGUMENTS = SMALL | {"outer_axes": "dp", "max_token_dtype": "float32"}
X = np.ones((64, 16), np.float32)


@pytest.fixture
def group(address: str, mesh: Any) -> Iterator[ep.Group]:
    with ep.connect(address, job="tests", timeout_s=WAIT_S) as session:
        yield session.create_group("g", mesh, **_ARGUMENTS)


def program(layer: Any) -> Any:
    def run(x: Any) -> Any:
        idx = jnp.zeros((x.shape[0], layer.top_k), jnp.int32)
        sent = ep.dispatch(layer, x, idx)
        return ep.combine(layer, sent, sent.tokens)

    return jax.jit(run)


def test_programs_of_the_replaced_layer_are_stale_and_new_ones_run(
    group: ep.Group, admin: source.Source
) -> None:
    old = group.register_layer("a", top_k=1)
    compiled = program(old)
    np.testing.assert_array_equal(compiled(X), X)
    with pytest.raises(ep.SpecMismatchError, match="top_k=1, this call has top_k=2; .*replace=Tr"):
        group.register_layer("a", top_k=2)
    new = group.register_layer("a", top_k=2, replace=True)
    assert group.register_layer("a", top_k=2, replace=True) is new
    np.testing.assert_array_equal(program(new)(X), 2 * X)
    with pytest.raises(ep.StaleHandleError, match="'?a'?: .*trace it again"), ep.translate_errors():
        jax.block_until_ready(compiled(X))
    with pytest.raises(ep.StaleHandleError, match=r"'a' \(top_k=1, .*was replaced in group 'g'"):
        program(old)(X)
    assert group.layer("a") == new
    assert [(row["name"], row["top_k"]) for row in admin.layers()] == [("a", 2)]
    group.register_layer("a", top_k=1, replace=True)  # unchanged
    np.testing.assert_array_equal(compiled(X), X)


def test_stacks_and_layers_replace_each_other(group: ep.Group, admin: source.Source) -> None:
    stack = group.register_layer_stack("a", 3, top_k=1)
    compiled = [program(stack[index]) for index in range(3)]
    for each in compiled:
        jax.block_until_ready(each(X))
    shorter = group.register_layer_stack("a", 2, top_k=1, replace=True)
    np.testing.assert_array_equal(compiled[1](X), X)  # an unchanged layer
    with pytest.raises(ep.StaleHandleError, match="trace it again"), ep.translate_errors():
        jax.block_until_ready(compiled[2](X))
    with pytest.raises(ep.StaleHandleError, match=r"'a\[2\]'.* was replaced"):
        program(stack[2])(X)
    layer = group.register_layer("a", top_k=1, replace=True)
    np.testing.assert_array_equal(program(layer)(X), X)
    with pytest.raises(ep.StaleHandleError, match=r"'a\[0\]'.* was replaced"):
        program(shorter[0])(X)
    with pytest.raises(ep.StaleHandleError), ep.translate_errors():
        jax.block_until_ready(compiled[0](X))
    assert [row["num_handles"] for row in admin.groups()] == [3]  # replaced, not added to


def test_a_daemon_that_starts_again_knows_the_last_one(directory: Path, mesh: Any) -> None:
    address = f"unix://{directory}"

    def layers() -> list[Any]:
        with source.open_source(address, timeout_s=WAIT_S) as admin:
            return [(row["name"], row["top_k"], row["in_flight"]) for row in admin.layers()]

    daemon = start_daemon(directory)
    with ep.connect(address, job="tests", timeout_s=WAIT_S) as session:
        group = session.create_group("g", mesh, **_ARGUMENTS)
        group.register_layers([ep.LayerSpec("a", top_k=1), ep.LayerSpec("b", top_k=1)])
        for number, in_flight in enumerate((2, 1)):
            group.register_layer("a", top_k=2, in_flight=in_flight, replace=True)
            os.kill(daemon.pid, signal.SIGKILL)
            assert daemon.stop() != 0
            daemon = start_daemon(directory)
            group.register_layer(f"c{number}", top_k=1)  # once the session exists again
            later = [(f"c{i}", 1, 1) for i in range(number + 1)]
            assert sorted(layers()) == sorted([("b", 1, 1), ("a", 2, in_flight), *later])
    assert daemon.stop() == 0


def test_without_a_daemon_layers_are_replaced_here(mesh: Any) -> None:
    with ep.connect("none") as session:
        group = session.create_group("g", mesh, **_ARGUMENTS)
        old = group.register_layer("a", top_k=1)
        group.register_layers([ep.LayerSpec("a", top_k=2)], replace=True)
        with pytest.raises(ep.StaleHandleError, match="was replaced"):
            program(old)(X)
        twice = [ep.LayerSpec("a", top_k=1), ep.LayerSpec("a", top_k=2)]
        with pytest.raises(ep.SpecMismatchError, match="'a'"):
            group.register_layers(twice, replace=True)
