"""Orders in which trainers run microbatches through MoE layers, on any platform.

Each takes (layers, params, batches): two layers or more with in_flight=2, a list of their
parameters, and microbatches [n, T, H]; and returns the mean loss and its gradients by layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import ep_runtime as ep

Schedule = Callable[[Sequence[Any], list[Any], jax.Array], tuple[jax.Array, list[Any]]]


def block(layer: Any, handle: int, x: jax.Array, params: Any) -> jax.Array:
    return x + ep.moe(layer, x, params, handle=handle)[0]


def loss_of(y: jax.Array) -> jax.Array:
    return jnp.square(y - 1).mean()


def whole(layers: Sequence[Any], params: list[Any], x: jax.Array, handle: int = 0) -> jax.Array:
    """The loss of a batch that goes through all layers."""
    for layer, own in zip(layers, params, strict=True):
        x = block(layer, handle, x, own)
    return loss_of(x)


def _sum(first: Any, second: Any) -> Any:
    return jax.tree.map(jnp.add, first, second)


def at_once(layers: Sequence[Any], params: list[Any], batches: jax.Array) -> Any:
    """The plain path: all microbatches as one batch."""
    batch = batches.reshape(-1, batches.shape[-1])
    return jax.value_and_grad(lambda params: whole(layers, params, batch))(params)


def accumulated_in_the_loss(layers: Sequence[Any], params: list[Any], batches: jax.Array) -> Any:
    """One loss that scans over the microbatches."""

    def loss(params: list[Any]) -> jax.Array:
        total, _ = lax.scan(lambda sum_, x: (sum_ + whole(layers, params, x), None), 0.0, batches)
        return total / len(batches)

    return jax.value_and_grad(loss)(params)


def accumulated_outside(layers: Sequence[Any], params: list[Any], batches: jax.Array) -> Any:
    """A scan that adds up every microbatch's gradients."""

    def add(total: Any, x: jax.Array) -> Any:
        one = jax.value_and_grad(lambda params: whole(layers, params, x))(params)
        return _sum(total, one), None

    zero = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
    total, _ = lax.scan(add, zero, batches)
    return jax.tree.map(lambda x: x / len(batches), total)


def one_forward_one_backward(layers: Sequence[Any], params: list[Any], batches: jax.Array) -> Any:
    """1F1B: a microbatch's backward pass follows the next one's forward pass, so that two are in
    flight, each on its own handle.
    """
    total: Any = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
    waiting: list[Any] = []

    def finish(total: Any) -> Any:
        value, pull = waiting.pop(0)
        return _sum(total, (value, *pull(jnp.ones(()))))

    for i, x in enumerate(batches):

        def loss(params: list[Any], x: jax.Array = x, handle: int = i % 2) -> jax.Array:
            return whole(layers, params, x, handle)

        waiting.append(jax.vjp(loss, params))
        if len(waiting) == 2:
            total = finish(total)
    return jax.tree.map(lambda x: x / len(batches), finish(total))


def forward_beside_backward(layers: Sequence[Any], params: list[Any], batches: jax.Array) -> Any:
    """Interleaves like DualPipe: layer by layer, a microbatch's forward pass alternates with the
    backward pass of the microbatch before.
    """
    grads: list[Any] = [jax.tree.map(jnp.zeros_like, own) for own in params]
    loss, before, last = jnp.zeros(()), [], len(layers) - 1
    d_x: Any = None

    def back(k: int, d_x: Any) -> Any:
        d_x, d_own = before[k](d_x)
        grads[k] = _sum(grads[k], d_own)
        return d_x

    for i, x in enumerate(batches):
        tape = []
        for k, layer in enumerate(layers):

            def run(x: Any, own: Any, layer: Any = layer, handle: int = i % 2) -> Any:
                return block(layer, handle, x, own)

            x, pull = jax.vjp(run, x, params[k])
            tape.append(pull)
            if before:
                d_x = back(last - k, d_x)
        value, d_loss = jax.value_and_grad(loss_of)(x)
        loss, before, d_x = loss + value, tape, d_loss
    for k in range(last, -1, -1):
        d_x = back(k, d_x)
    return jax.tree.map(lambda x: x / len(batches), (loss, grads))


SCHEDULES: list[Schedule] = [
    accumulated_in_the_loss,
    accumulated_outside,
    one_forward_one_backward,
    forward_beside_backward,
]
