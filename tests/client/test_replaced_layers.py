"""`replace=True`: a layer takes the place of another one of its name."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import SMALL
from daemon_fixtures import WAIT_S, start_daemon

import ep_runtime as ep
from ep_runtime_client.cli.daemon import source

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
    group.register_layer("a", top_k=1, replace=True)  # as it was
    np.testing.assert_array_equal(compiled(X), X)


def test_stacks_and_layers_replace_each_other(group: ep.Group, admin: source.Source) -> None:
    stack = group.register_layer_stack("a", 3, top_k=1)
    compiled = [program(stack[index]) for index in range(3)]
    for each in compiled:
        jax.block_until_ready(each(X))
    shorter = group.register_layer_stack("a", 2, top_k=1, replace=True)
    np.testing.assert_array_equal(compiled[1](X), X)  # a layer as it was
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
    assert [row["num_handles"] for row in admin.groups()] == [3]  # taken over, not added to


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
            group.register_layer(f"c{number}", top_k=1)  # once the session is back
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
