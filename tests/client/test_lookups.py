"""connect, groups and layers under tracing: what this process has is found, nothing is made."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import SMALL
from jax import lax
from jax.sharding import Mesh

import ep_runtime as ep
from ep_runtime_client.base import jax_internals

ARGUMENTS = SMALL | {"outer_axes": "dp", "max_top_k": 4}


@pytest.fixture
def session() -> Iterator[ep.Session]:
    with ep.connect("none", job="tests") as found:
        yield found


def traced(how: str, look: Callable[[], Any]) -> Any:
    """What `look` returns inside a transformation."""
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
        "stack": lambda: group.register_layer_stack("stack", 2, top_k=2),
    }
    for name, look in missing.items():
        with pytest.raises(ep.InvalidArgumentError, match=f"'{name}'.*call this outside jit"):
            traced(how, look)
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
