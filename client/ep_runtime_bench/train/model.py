"""The model: attention, an MoE block (ours or plain JAX's), and a head, with AdamW."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import ep_runtime as ep
from ep_runtime_bench.base import train_cases
from ep_runtime_bench.base.device_bench import AXIS
from ep_runtime_bench.base.moe_cases import PADDED
from ep_runtime_bench.moe import stock_layer

LEARNING_RATE = 1e-5
# (index of the layer, x [B, S, H], its weights, experts [B, S, K] or None) -> y like x.
Block = Callable[[Any, jax.Array, "Layer", Any], jax.Array]


class Layer(NamedTuple):
    """Weights of one layer, or of all layers with a dim in front; letters: `ops/__init__.py`."""

    qkv: Any  # [H, 3H]
    out: Any  # [H, H]
    router: Any  # [H, E]
    wi: Any  # [E, H, 2, M]
    wo: Any  # [E, M, H]
    norms: Any  # [2, H]


class Params(NamedTuple):
    """All weights."""

    embedding: Any  # [V, H]
    layers: Layer


@dataclasses.dataclass(frozen=True)
class Layout:
    """A mesh, and how weights and tokens are sharded over it."""

    mesh: Mesh
    rows: tuple[str, ...]  # axes that shard tokens

    @classmethod
    def of(cls, mesh: Mesh) -> Layout:
        return cls(mesh, tuple(axis for axis in mesh.axis_names if axis != "tp"))

    def axis(self, name: str) -> str | None:
        return name if name in self.mesh.shape else None

    def specs(self) -> Params:
        """Returns shardings of one layer's weights, without the dim of layers."""
        fsdp, tp = self.axis("fsdp"), self.axis("tp")
        experts = (P(AXIS, fsdp, None, tp), P(AXIS, tp, fsdp))
        return Params(P(fsdp), Layer(P(fsdp), P(fsdp), P(), *experts, P()))

    def shardings(self) -> Params:
        embedding, layers = self.specs()
        stacked = Layer(*(P(None, *spec) for spec in layers))
        specs = Params(embedding, stacked)
        return jax.tree.map(
            lambda spec: NamedSharding(self.mesh, spec), specs, is_leaf=lambda x: isinstance(x, P)
        )


def make_params(model: train_cases.Model, dtype: Any, place: Layout) -> Params:
    """Draws normal values of variance 1 / fan-in on the devices that hold them."""
    h, e, m, many = model.hidden, model.num_experts, model.inner, model.layers

    def made(key: jax.Array) -> Params:
        def drawn(number: int, shape: tuple[int, ...], fan_in: int) -> jax.Array:
            values = jax.random.normal(jax.random.fold_in(key, number), shape) * fan_in**-0.5
            return values.astype(dtype)

        layers = Layer(
            drawn(1, (many, h, 3 * h), h),
            drawn(2, (many, h, h), h),
            drawn(3, (many, h, e), h),
            drawn(4, (many, e, h, 2, m), h),
            drawn(5, (many, e, m, h), m),
            jnp.ones((many, 2, h), dtype),
        )
        return Params(drawn(0, (model.vocabulary, h), 2500), layers)

    return jax.jit(made, out_shardings=place.shardings())(jax.random.key(0))


def batches(model: train_cases.Model, place: Layout, devices: int) -> list[jax.Array]:
    """Puts `train_cases.batches` on the mesh."""
    spread = NamedSharding(place.mesh, P(place.rows))
    found = train_cases.batches(model, devices // place.mesh.shape.get("tp", 1))
    return [jax.device_put(batch, spread) for batch in found]


def experts_of(order: train_cases.TrainOrder, place: Layout) -> jax.Array | None:
    """Puts `train_cases.expert_ids` on the mesh."""
    groups = order.devices // place.mesh.shape.get("tp", 1)
    idx = train_cases.expert_ids(order.model, order.routing, place.mesh.shape[AXIS], groups)
    return None if idx is None else jax.device_put(idx, NamedSharding(place.mesh, P(place.rows)))


def _told(place: Layout) -> ep.MoEParams:
    """Returns the shardings of one layer's block weights."""
    specs, whole = place.specs().layers, P()
    router: Any = whole
    return ep.MoEParams(router, specs.wi, specs.wo)


def quantized_once(stack: ep.LayerStack, place: Layout, recipe: Any) -> Callable[[Layer], Layer]:
    """Returns a function that quantizes all layers' experts; gradients go straight through."""

    def quantize(layers: Layer) -> Layer:
        params = ep.MoEParams(layers.router, layers.wi, layers.wo)
        q = ep.quantize_params(params, recipe, layer=stack[0], params_spec=_told(place))
        return layers._replace(wi=q.wi, wo=q.wo)

    return quantize


def our_block(stack: ep.LayerStack, place: Layout, recipe: Any) -> Block:
    """Returns a block that calls `ep.moe` with a stack's layers."""
    told = _told(place)

    def block(index: Any, x: jax.Array, layer: Layer, experts: Any) -> jax.Array:
        chosen, router, said = None, layer.router, told
        if experts is not None:
            chosen = ep.Routing(*stock_layer.routed(x, layer.router, experts.shape[-1], experts))
            router, said = None, dataclasses.replace(told, router=None)
        params = ep.MoEParams(router, layer.wi, layer.wo)
        y, _ = ep.moe(
            stack[index],
            x,
            params,
            recipe=recipe,
            routing=chosen,
            tokens_spec=P(place.rows),
            params_spec=said,
        )
        return y

    return block


def stock_block(model: train_cases.Model, place: Layout) -> Block:
    """Returns stock_layer's PADDED as a block; gathers weights over fsdp, and sums M over tp."""
    padded = stock_layer.make_layer(PADDED, model.case)
    specs, rows = place.specs().layers, P(place.rows)
    fsdp, tp = place.axis("fsdp"), place.axis("tp")

    def local(x: jax.Array, router: jax.Array, wi: jax.Array, wo: jax.Array, *given: Any) -> Any:
        if fsdp:
            wi = lax.all_gather(wi, fsdp, axis=1, tiled=True)
            wo = lax.all_gather(wo, fsdp, axis=2, tiled=True)
        tokens, flat = x.reshape(-1, x.shape[-1]), wi.reshape(*wi.shape[:2], -1)
        experts = [one.reshape(-1, one.shape[-1]) for one in given]
        y = padded(tokens, router, flat, wo, *experts)
        return (lax.psum(y, tp) if tp else y).reshape(x.shape)

    def block(_: Any, x: jax.Array, layer: Layer, experts: Any) -> jax.Array:
        given = () if experts is None else (experts,)
        in_specs = (rows, P(), specs.wi, specs.wo, *(rows for _ in given))
        mapped = jax.shard_map(
            local, mesh=place.mesh, in_specs=in_specs, out_specs=rows, check_vma=False
        )
        return mapped(x, layer.router, layer.wi, layer.wo, *given)

    return block


def _normed(x: jax.Array, weight: jax.Array) -> jax.Array:
    square = jnp.square(x.astype(jnp.float32)).mean(-1, keepdims=True)
    return x * lax.rsqrt(square + 1e-6).astype(x.dtype) * weight


def _attention(x: jax.Array, layer: Layer, model: train_cases.Model, place: Layout) -> jax.Array:
    on_gpu = place.mesh.devices.flat[0].platform == "gpu"
    heads = (x @ layer.qkv).reshape(*x.shape[:2], 3, model.heads, -1)

    def mixed(heads: jax.Array) -> jax.Array:
        # cuDNN's attention does not support float32.
        taken = heads.astype(jnp.bfloat16) if on_gpu and heads.dtype == jnp.float32 else heads
        q, k, v = taken[:, :, 0], taken[:, :, 1], taken[:, :, 2]
        how: Any = "cudnn" if on_gpu else None
        out = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=how)
        return out.astype(heads.dtype)

    rows = P(place.rows)
    spread = jax.shard_map(mixed, mesh=place.mesh, in_specs=rows, out_specs=rows, check_vma=False)
    return spread(heads).reshape(x.shape) @ layer.out


def make_step(
    model: train_cases.Model,
    place: Layout,
    block: Block,
    again: Callable[[Any], Any],
    quantize: Callable[[Layer], Layer] | None = None,
) -> Callable[..., Any]:
    """Makes a step (params, state, tokens, experts) -> (params, state, loss); `again` wraps a
    layer's body, and `quantize` converts all layers' weights before the first layer."""
    optimizer = make_optimizer()

    def one(x: jax.Array, given: Any) -> tuple[jax.Array, None]:
        layer, index, experts = given
        x = x + _attention(_normed(x, layer.norms[0]), layer, model, place)
        return x + block(index, _normed(x, layer.norms[1]), layer, experts).astype(x.dtype), None

    body = again(one)

    def loss(params: Params, tokens: jax.Array, experts: Any) -> jax.Array:
        x = params.embedding[tokens[:, :-1]]
        x = lax.with_sharding_constraint(x, NamedSharding(place.mesh, P(place.rows)))
        numbers = jnp.arange(model.layers, dtype=jnp.int32)
        layers = params.layers if quantize is None else quantize(params.layers)
        x, _ = lax.scan(lambda x, given: body(x, (*given, experts)), x, (layers, numbers))
        logits = (x @ params.embedding.T).astype(jnp.float32)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        return losses.mean()

    def step(params: Params, state: Any, tokens: jax.Array, experts: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, tokens, experts)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    return step


def make_optimizer() -> Any:
    return optax.adamw(LEARNING_RATE, mu_dtype=jnp.bfloat16)
