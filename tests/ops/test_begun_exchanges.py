"""Exchanges that one custom call begins and another awaits: XLA leaves their buffers alone."""

from __future__ import annotations

import ctypes
import types
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nccl_builds import late_exchange_library

from ep_runtime_client.ops import nccl

pytestmark = pytest.mark.slow  # they compile a library against XLA's headers


def library() -> ctypes.CDLL:
    return ctypes.CDLL(str(late_exchange_library()))


@pytest.fixture(autouse=True)
def _late(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Our targets on CPU; what is sent comes back when it is awaited, and all of it is."""
    for name, handler in (("ep_late_begin", "LateBegin"), ("ep_late_arrived", "LateArrived")):
        capsule = jax.ffi.pycapsule(getattr(library(), handler))
        jax.ffi.register_ffi_target(name, capsule, platform="cpu")
    monkeypatch.setattr(nccl, "BEGIN", "ep_late_begin")
    monkeypatch.setattr(nccl, "ARRIVED", "ep_late_arrived")
    monkeypatch.setattr(nccl, "ensure_registered", lambda platform: None)
    yield
    assert library().LateOpen() == 0


CALL: Any = types.SimpleNamespace(
    layer=types.SimpleNamespace(base_id=1, fingerprint=2),
    meta=types.SimpleNamespace(handle=0),
    group=types.SimpleNamespace(ranks_per_node=2),
)
INDEX = np.zeros(1, np.int32)


def there_and_back(parts: list[Any], index: Any) -> list[Any]:
    """Each part after it went through an exchange; all of them set off first."""
    flights = []
    for part in parts:
        flight, index = nccl.begin(CALL, index, part, part[:, :1])
        flights.append(flight)
    arrived = []
    for flight in flights:
        ((rows, first),) = nccl.arrived(CALL, index, flight)
        arrived.append(rows + first)
    return arrived


def expected(parts: list[Any]) -> list[Any]:
    return [part + part[:, :1] for part in parts]


def parts_of(x: Any) -> list[Any]:
    """Some that are used nowhere else, and one that is an operand of the program."""
    return [jnp.sin(x), x, jnp.cos(x) * 2, x[::-1] + 1]


def sums(parts: list[Any]) -> Any:
    total = 0.0
    for number, part in enumerate(parts):
        total = total + (number + 1) * part
    return total


@pytest.mark.parametrize("donated", [False, True])
def test_rows_arrive_whatever_else_the_program_does(donated: bool) -> None:
    x = np.random.default_rng(0).standard_normal((256, 64)).astype(np.float32)

    def step(x: Any, index: Any) -> Any:
        got = there_and_back(parts_of(x), index)
        # Work that would like the buffers of what was sent.
        return sums(got) + sum(jnp.tanh(part) for part in parts_of(x)), x * 2

    def plain(x: Any, index: Any) -> Any:
        return sums(expected(parts_of(x))) + sum(jnp.tanh(part) for part in parts_of(x)), x * 2

    run = jax.jit(step, donate_argnums=(0,) if donated else ())
    want = jax.jit(plain)(jnp.array(x), INDEX)
    for _ in range(3):
        for one, other in zip(run(jnp.array(x), INDEX), want, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)


def test_loops_and_recomputed_steps_await_their_own() -> None:
    x = np.random.default_rng(1).standard_normal((128, 32)).astype(np.float32)

    def exchanged(x: Any, index: Any) -> Any:
        return sums(there_and_back(parts_of(x), index))

    moved = jax.custom_vjp(exchanged)
    moved.defvjp(
        lambda x, index: (exchanged(x, index), (x, index)),
        lambda kept, grad: (exchanged(grad + kept[0], kept[1]), None),
    )
    plain = jax.custom_vjp(lambda x, index: sums(expected(parts_of(x))))
    plain.defvjp(
        lambda x, index: (sums(expected(parts_of(x))), x),
        lambda x, grad: (sums(expected(parts_of(grad + x))), None),
    )

    def loss(x: Any, index: Any, move: Any) -> Any:
        def body(x: Any, _: Any) -> Any:
            return jnp.tanh(0.1 * jax.checkpoint(move)(x, index) + x), None

        return (jax.lax.scan(body, x, None, length=4)[0] ** 2).sum()

    got = jax.jit(jax.value_and_grad(lambda x, i: loss(x, i, moved)))(x, INDEX)
    want = jax.jit(jax.value_and_grad(lambda x, i: loss(x, i, plain)))(x, INDEX)
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_what_is_sent_is_not_copied_on_the_way() -> None:
    """Only what the program may not give away is."""

    def step(x: Any, index: Any) -> Any:
        flight, index = nccl.begin(CALL, index, jnp.sin(x))
        return nccl.arrived(CALL, index, flight)[0]

    compiled = jax.jit(step).lower(jnp.ones((64, 64)), INDEX).compile().as_text()
    copies = [line for line in compiled.splitlines() if " copy(f32[64,64]" in line]
    assert not copies, compiled


def test_rows_that_nobody_sent_are_refused() -> None:
    def step(x: Any, index: Any) -> Any:
        return nccl.arrived(CALL, index, (x * 2, x * 3))[0]

    with pytest.raises(jax.errors.JaxRuntimeError, match="awaited where none arrive"):
        jax.block_until_ready(jax.jit(step)(jnp.ones((8, 8)), INDEX))


@pytest.mark.parametrize("read", [slice(0, 8), slice(8, 16), slice(24, 32)])
def test_flights_behind_rows_that_nobody_reads_are_awaited(read: slice) -> None:
    """Their buffers would be another's before they land."""
    x = np.random.default_rng(2).standard_normal((8, 64)).astype(np.float32)

    def step(x: Any, index: Any) -> Any:
        flights = []
        for part in parts_of(x):
            flight, index = nccl.begin(CALL, index, part)
            flights.append(flight)
        rows = jnp.concatenate([one for (one,) in nccl.arrived(CALL, index, *flights)])
        return rows[read]

    got = jax.jit(step)(x, INDEX)
    want = jax.jit(lambda x: jnp.concatenate(parts_of(x))[read])(x)
    np.testing.assert_array_equal(got, want)
