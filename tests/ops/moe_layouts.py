"""Meshes, and how a block's weights are sharded over them, for tests of `ep.moe`."""

from __future__ import annotations

import dataclasses
from typing import Any

import fakes
import jax
from jax.sharding import NamedSharding, PartitionSpec

from ep_runtime_client.moe.api import MoEParams, init_moe_params

Spec = PartitionSpec

HIDDEN, INNER, EXPERTS, TOP_K, TOKENS = 16, 8, 8, 2, 64
CAPACITY = 104  # no other dim has this size


@dataclasses.dataclass(frozen=True)
class Layout:
    """A mesh, and how the weights are sharded over it.

    Attributes:
        axes: of the mesh.
        outer: outer axes of the group.
        wi, wo: specs of the kernels.
        wi_bias, wo_bias: of their biases.
    """

    axes: dict[str, int]
    outer: tuple[str, ...]
    wi: Spec
    wo: Spec
    wi_bias: Spec
    wo_bias: Spec

    @property
    def tokens(self) -> Spec:
        return Spec((*self.outer, "ep"))

    @property
    def specs(self) -> MoEParams:
        return MoEParams(Spec(), self.wi, self.wo, self.wi_bias, self.wo_bias, None)


LAYOUTS = {
    "dp2 ep4": Layout({"dp": 2, "ep": 4}, ("dp",), *[Spec("ep")] * 4),
    "ep4 tp2": Layout(
        {"ep": 4, "tp": 2},
        (),
        Spec("ep", None, None, "tp"),
        Spec("ep", "tp"),
        Spec("ep", None, "tp"),
        Spec("ep"),
    ),
    "fsdp2 ep4": Layout(
        {"fsdp": 2, "ep": 4},
        ("fsdp",),
        Spec("ep", "fsdp"),
        Spec("ep", None, "fsdp"),
        Spec("ep"),
        Spec("ep", "fsdp"),
    ),
    "experts on ep and fsdp": Layout(
        {"dp": 2, "fsdp": 2, "ep": 2}, ("dp", "fsdp"), *[Spec(("ep", "fsdp"))] * 4
    ),
    "fsdp2 ep2 tp2": Layout(
        {"fsdp": 2, "ep": 2, "tp": 2},
        ("fsdp",),
        Spec("ep", "fsdp", None, "tp"),
        Spec("ep", "tp", "fsdp"),
        Spec("ep", None, "tp"),
        Spec("ep", "fsdp"),
    ),
}


def make_params(layer: Any, mlp_dim: int = INNER) -> MoEParams:
    params = init_moe_params(jax.random.key(0), layer, mlp_dim, use_bias=True)
    keys = jax.random.split(jax.random.key(1), 2)
    return dataclasses.replace(
        params,
        wi_bias=jax.random.normal(keys[0], params.wi_bias.shape),
        wo_bias=jax.random.normal(keys[1], params.wo_bias.shape),
    )


def place(group: fakes.LocalGroup, layout: Layout, params: MoEParams) -> tuple[Any, MoEParams]:
    """Places x and the parameters as the layout shards them."""

    def put(array: Any, spec: Spec | None) -> Any:
        return None if array is None else jax.device_put(array, NamedSharding(group.mesh, spec))

    fields = dataclasses.fields(MoEParams)
    placed = {f.name: put(getattr(params, f.name), getattr(layout.specs, f.name)) for f in fields}
    x = jax.random.normal(jax.random.key(7), (TOKENS, params.router.shape[0]))
    return put(x, layout.tokens), MoEParams(**placed)


def open_group(make_group: fakes.MakeGroup, layout: Layout, **settings: Any) -> fakes.LocalGroup:
    return make_group(
        mesh=fakes.mesh_of(layout.axes, explicit=settings.pop("explicit", False)),
        outer_axes=layout.outer,
        num_experts=EXPERTS,
        max_top_k=TOP_K,
        debug=True,
        max_tokens_per_rank=TOKENS,
        **({"transport": "memfd"} | settings),
    )


def check_layouts(got: Any, x: Any, params: MoEParams) -> None:
    """Checks that y is sharded like x, and each gradient like its operand."""
    (y, _), (d_x, d_params) = got
    for left, right in ((y, x), (d_x, x), (d_params.wi, params.wi), (d_params.wo, params.wo)):
        assert left.sharding.is_equivalent_to(right.sharding, left.ndim), (left, right)
        assert left.dtype == right.dtype
