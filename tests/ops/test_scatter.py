"""What processes on CPU do in place of a reduce-scatter, against the reduce-scatter."""

from __future__ import annotations

from typing import Any

import fakes
import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from ep_runtime_client.ops.partitioning import scatter


@pytest.mark.parametrize("check", [True, False], ids=["vma", "no vma"])
@pytest.mark.parametrize("axes", [("a",), ("a", "b"), ("b", "a")], ids="".join)
def test_a_part_is_cut_out_of_a_sum_in_place_of_a_reduce_scatter(
    monkeypatch: pytest.MonkeyPatch, axes: tuple[str, ...], check: bool
) -> None:
    mesh = fakes.mesh_of({"a": 2, "b": 4})
    ranks = int(np.prod([mesh.shape[axis] for axis in axes]))
    grads = np.random.default_rng(0).integers(-9, 9, (8, 3, 16)).astype(np.float32)

    def program() -> Any:
        def local(grad: Any) -> Any:
            weight = grad[0][:, : 16 // ranks]
            _, pull = jax.vjp(lambda x: scatter.gather(x, axes, 1), weight)
            return pull(grad[0])[0][None]

        spec = P(("a", "b"))
        mapped = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check)
        return jax.jit(mapped).lower(grads).compile()

    whole = program()
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    parts = program()
    assert "reduce-scatter(" in whole.as_text()
    assert "reduce-scatter(" not in parts.as_text()
    np.testing.assert_array_equal(parts(grads), whole(grads))
