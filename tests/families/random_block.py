"""Random tokens and weights of a block, the same for oracle, `ep.moe` and transformers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np

import ep_runtime as ep

TOKENS, HIDDEN, INNER, EXPERTS, VOCABULARY = 32, 16, 24, 16, 8


def draw(top_k: int, *, extra_experts: int = 0, biases: bool = False) -> SimpleNamespace:
    """Arrays of a block in f32; most models use a part of them.

    Args:
        top_k: K of `tid2eid`.
        extra_experts: how many the router has beyond EXPERTS.
        biases: those of router and experts, which are None otherwise.

    Fields:
        x, residual: [T, H].
        router: [H, E], with the extra experts; wide, so that few scores are near each other.
        gate, up: [E, H, M], large enough to be clamped; down: [E, M, H]; their biases [E, M],
            [E, M], [E, H].
        expert_bias: [E], with the extra experts, large enough to change choices.
        scale: [H]; per_expert_scale: [E]; input_ids: int [T]; tid2eid: int [VOCABULARY, K].
    """
    rng = np.random.default_rng(0)

    def normal(*shape: int, scale: float = 1.0) -> Any:
        return (scale * rng.standard_normal(shape)).astype(np.float32)

    all_experts = EXPERTS + extra_experts
    w = SimpleNamespace(
        x=normal(TOKENS, HIDDEN),
        residual=normal(TOKENS, HIDDEN, scale=2.0),
        router=normal(HIDDEN, all_experts, scale=0.5),
        gate=normal(EXPERTS, HIDDEN, INNER, scale=1.2),
        up=normal(EXPERTS, HIDDEN, INNER, scale=1.2),
        down=normal(EXPERTS, INNER, HIDDEN, scale=0.1),
        expert_bias=normal(all_experts, scale=0.1),
        scale=normal(HIDDEN),
        per_expert_scale=normal(EXPERTS),
        input_ids=rng.integers(0, VOCABULARY, TOKENS),
        tid2eid=np.stack([rng.permutation(EXPERTS)[:top_k] for _ in range(VOCABULARY)]),
    )
    given = {"router": EXPERTS, "gate": (EXPERTS, INNER), "up": (EXPERTS, INNER)}
    for name, shape in (given | {"down": (EXPERTS, HIDDEN)}).items():
        drawn = normal(*np.atleast_1d(shape))
        setattr(w, f"{name}_bias", drawn if biases else None)
    return w


def wide(w: SimpleNamespace) -> SimpleNamespace:
    """Returns the same arrays in f64, for an oracle."""

    def of(value: Any) -> Any:
        return value.astype(np.float64) if getattr(value, "dtype", None) == np.float32 else value

    return SimpleNamespace(**{name: of(value) for name, value in vars(w).items()})


def params(w: SimpleNamespace, *, own_router: bool) -> ep.MoEParams:
    """Returns arrays as `ep.moe` takes them, without a router if the caller has one."""
    separate = (w.router, w.gate, w.up, w.down, w.gate_bias, w.up_bias, w.down_bias, w.router_bias)
    arrays = [None if array is None else jnp.asarray(array) for array in separate]
    if own_router:
        arrays[0] = None
    return ep.MoEParams.from_separate(*arrays)


def error(got: Any, want: Any) -> float:
    """Returns the largest difference, divided by the root mean square of `want`."""
    got = np.asarray(got, np.float64)
    assert got.shape == want.shape
    assert np.isfinite(got).all()
    return float(np.abs(got - want).max() / np.sqrt(np.square(want).mean()))
