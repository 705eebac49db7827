"""Parameters of the MoE block as a pytree."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ep_runtime.errors import InvalidArgumentError
from ep_runtime.specs import LayerSpec
from ep_runtime_client.layers import EpLayer, LayerStack, TracedLayer


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MoEParams:
    """Weights of a router and its experts. Letters: `ops/__init__.py`.

    Attributes:
        router: [H, E].
        wi: [E, H, 2, M] (0 gate, 1 up), [E, H, 2M] (gate then up), or [E, H, M] ungated.
        wo: [E, M, H].
        wi_bias: [E, 2, M] ([E, 2M], [E, M] as wi is), or None.
        wo_bias: [E, H], or None; both biases or neither.
        router_bias: [E], or None.
    """

    router: jax.Array
    wi: jax.Array
    wo: jax.Array
    wi_bias: jax.Array | None = None
    wo_bias: jax.Array | None = None
    router_bias: jax.Array | None = None

    @classmethod
    def from_separate(
        cls,
        router: jax.Array,
        wi_0: jax.Array,
        wi_1: jax.Array | None,
        wo: jax.Array,
        wi_0_bias: jax.Array | None = None,
        wi_1_bias: jax.Array | None = None,
        wo_bias: jax.Array | None = None,
        router_bias: jax.Array | None = None,
    ) -> MoEParams:
        """From checkpoints that keep gate and up apart: wi_0, wi_1 [E, H, M], biases [E, M].

        wi_1=None makes ungated parameters.
        """
        if wi_1 is None:
            return cls(router, wi_0, wo, wi_0_bias, wo_bias, router_bias)
        bias = None
        if wi_0_bias is not None and wi_1_bias is not None:
            bias = jnp.stack([wi_0_bias, wi_1_bias], axis=1)
        return cls(router, jnp.stack([wi_0, wi_1], axis=2), wo, bias, wo_bias, router_bias)

    def to_separate(self) -> dict[str, jax.Array | None]:
        """The arguments of `from_separate`, by name; wi [E, H, 2, M] or ungated [E, H, M]."""
        gated = self.wi.ndim == 4
        bias = self.wi_bias
        return {
            "router": self.router,
            "wi_0": self.wi[:, :, 0] if gated else self.wi,
            "wi_1": self.wi[:, :, 1] if gated else None,
            "wo": self.wo,
            "wi_0_bias": bias[:, 0] if gated and bias is not None else bias,
            "wi_1_bias": bias[:, 1] if gated and bias is not None else None,
            "wo_bias": self.wo_bias,
            "router_bias": self.router_bias,
        }


def init_moe_params(
    key: jax.Array,
    layer_or_spec: EpLayer | LayerStack | TracedLayer | LayerSpec,
    mlp_dim: int,
    *,
    gated: bool = True,
    use_bias: bool = False,
    param_dtype: Any = jnp.float32,
) -> MoEParams:
    """Fresh parameters: normal with variance 1 / fan-in, biases zero.

    Args:
        key: a PRNG key.
        layer_or_spec: a layer, or a LayerSpec with num_experts and hidden_size set.
        mlp_dim: M.
        gated: wi [E, H, 2, M] instead of [E, H, M].
        use_bias: with biases of the experts.
        param_dtype: of the experts; the router is float32 unless this is wider.

    Raises:
        InvalidArgumentError: a spec without num_experts or hidden_size, or mlp_dim below 1.
    """
    experts, hidden = _sizes(layer_or_spec)
    if mlp_dim < 1:
        raise InvalidArgumentError(f"mlp_dim must be at least 1, got {mlp_dim}", argument="mlp_dim")
    inner = (2, mlp_dim) if gated else (mlp_dim,)
    keys = jax.random.split(key, 3)

    def normal(key: jax.Array, shape: tuple[int, ...], fan_in: int, dtype: Any) -> jax.Array:
        values: jax.Array = jax.random.normal(key, shape, jnp.float32) * fan_in**-0.5
        return values.astype(dtype)

    return MoEParams(
        router=normal(
            keys[0], (hidden, experts), hidden, jnp.promote_types(param_dtype, "float32")
        ),
        wi=normal(keys[1], (experts, hidden, *inner), hidden, param_dtype),
        wo=normal(keys[2], (experts, mlp_dim, hidden), mlp_dim, param_dtype),
        wi_bias=jnp.zeros((experts, *inner), param_dtype) if use_bias else None,
        wo_bias=jnp.zeros((experts, hidden), param_dtype) if use_bias else None,
    )


def _sizes(source: EpLayer | LayerStack | TracedLayer | LayerSpec) -> tuple[int, int]:
    if isinstance(source, TracedLayer):
        source = source.stack
    spec = source if isinstance(source, LayerSpec) else source.spec
    if spec.num_experts is None or spec.hidden_size is None:
        raise InvalidArgumentError(
            f"LayerSpec {spec.name!r} needs num_experts and hidden_size here, got "
            f"num_experts={spec.num_experts}, hidden_size={spec.hidden_size}",
            argument="layer_or_spec",
        )
    return spec.num_experts, spec.hidden_size
