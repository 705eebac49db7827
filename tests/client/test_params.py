"""Parameters of the MoE block: forms, names of their dims, and fresh values."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from ep_runtime import layer_specs
from ep_runtime_client.moe.params import (
    LOGICAL_AXES,
    MoEParams,
    init_moe_params,
    logical_axes,
    of_named,
    to_named,
)

SPEC = layer_specs.LayerSpec("moe", top_k=2, num_experts=4, hidden_size=6)


def test_every_parameter_has_one_name_per_dim() -> None:
    for gated in (True, False):
        params = init_moe_params(jax.random.key(0), SPEC, 5, gated=gated, use_bias=True)
        for field in dataclasses.fields(params):
            value = getattr(params, field.name)
            if value is not None:
                assert len(logical_axes(field.name, value.ndim)) == value.ndim
    assert set(LOGICAL_AXES) == {field.name for field in dataclasses.fields(MoEParams)}
    assert logical_axes("wi", 4) == ("exp", "embed_moe", None, "mlp_moe")
    assert logical_axes("wi", 3) == ("exp", "embed_moe", "mlp_moe")
    assert logical_axes("wi_bias", 2) == ("exp", "mlp_moe")
    assert logical_axes("wo", 3) == ("exp", "mlp_moe", "embed_moe")


@pytest.mark.parametrize(("name", "ndim"), [("wi", 5), ("wo", 2), ("gate", 2)])
def test_a_parameter_that_is_none_of_the_blocks_has_no_names(name: str, ndim: int) -> None:
    with pytest.raises(ValueError, match=name):
        logical_axes(name, ndim)


def test_separate_kernels_come_back_as_they_were() -> None:
    for gated in (True, False):
        params = init_moe_params(jax.random.key(0), SPEC, 5, gated=gated, use_bias=True)
        again = MoEParams.from_separate(**params.to_separate())
        jax.tree.map(np.testing.assert_array_equal, params, again)


def test_a_pair_is_kept_as_it_is() -> None:
    params = init_moe_params(jax.random.key(0), SPEC, 5, use_bias=True, separate=True)
    names = jax.tree_util.tree_leaves_with_path(params)
    assert [jax.tree_util.keystr(path) for path, _ in names][1:3] == [".wi[0]", ".wi[1]"]
    assert [x.shape for x in params.wi] == [(4, 6, 5)] * 2
    assert [x.shape for x in params.wi_bias] == [(4, 5)] * 2
    assert not np.array_equal(*params.wi)
    parts = params.to_separate()
    assert (parts["wi_0"], parts["wi_1"]) == params.wi
    one = MoEParams.from_separate(**parts)
    jax.tree.map(np.testing.assert_array_equal, one.to_separate(), parts)
    jax.tree.map(np.testing.assert_array_equal, of_named(to_named(params)), params)
    fresh = init_moe_params(jax.random.key(0), SPEC, 5)
    np.testing.assert_array_equal(fresh.wo, params.wo)
    with pytest.raises(ValueError, match="separate"):
        init_moe_params(jax.random.key(0), SPEC, 5, gated=False, separate=True)


def test_gate_then_up_in_one_dim_is_taken_apart_too() -> None:
    params = init_moe_params(jax.random.key(0), SPEC, 5, use_bias=True)
    params = dataclasses.replace(params, wi_bias=jax.random.normal(jax.random.key(1), (4, 2, 5)))
    fused = dataclasses.replace(
        params, wi=params.wi.reshape(4, 6, 10), wi_bias=params.wi_bias.reshape(4, 10)
    )
    jax.tree.map(np.testing.assert_array_equal, fused.to_separate(), params.to_separate())


def test_some_biases_without_the_others_are_refused_by_name() -> None:
    parts = init_moe_params(jax.random.key(0), SPEC, 5, use_bias=True).to_separate()
    with pytest.raises(ValueError, match="without wi_1_bias$"):
        MoEParams.from_separate(**{**parts, "wi_1_bias": None})
    with pytest.raises(ValueError, match="without wi_0_bias, wi_1_bias$"):
        MoEParams.from_separate(**{**parts, "wi_0_bias": None, "wi_1_bias": None})
