"""The sharding rules on axis names alone, and how processes on CPU reduce-scatter."""

from __future__ import annotations

import logging
from typing import Any

import fakes
import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from ep_runtime.errors import InvalidArgumentError
from ep_runtime_client.ops.dense import ops as dense_ops
from ep_runtime_client.ops.partitioning import placement
from ep_runtime_client.ops.partitioning.roles import Roles, entries_of, gather, read_off, say_once

SHAPE = (8, 64, 32)


def roles(outer: tuple[str, ...] = ("dp", "fsdp"), ep: tuple[str, ...] = ("ep",)) -> Roles:
    sizes = (("dp", 2), ("fsdp", 2), ("ep", 2), ("tp", 2), ("one", 1))
    return Roles(sizes, outer, ep, "layer 'moe'")


def grouped(*rhs: Any, lhs: Any = ((), (), ()), shape: Any = SHAPE, **options: Any) -> Any:
    given = options.pop("roles", roles())
    return placement.grouped(given, lhs, entries_of(rhs, len(shape)), shape, **options)


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Any:
    say_once.cache_clear()
    caplog.set_level(logging.WARNING, "ep_runtime")
    return lambda: [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize(
    ("rhs", "entries", "gathered"),
    [
        ((), (("ep",), (), ()), ((), (), ())),
        (("ep",), (("ep",), (), ()), ((), (), ())),
        (("ep", "fsdp"), (("ep",), ("fsdp",), ()), ((), ("fsdp",), ())),
        (("ep", None, "fsdp"), (("ep",), (), ("fsdp",)), ((), (), ("fsdp",))),
        ((None, ("fsdp", "dp")), (("ep",), ("fsdp", "dp"), ()), ((), ("fsdp", "dp"), ())),
        (("ep", "dp", "fsdp"), (("ep",), ("dp",), ("fsdp",)), ((), ("dp",), ("fsdp",))),
        ((("ep", "fsdp"),), (("ep", "fsdp"), (), ()), (("fsdp",), (), ())),
        (("fsdp",), (("ep", "fsdp"), (), ()), (("fsdp",), (), ())),
        (("ep", None, "tp"), (("ep",), (), ("tp",)), ((), (), ())),
        (("ep", "tp", "fsdp"), (("ep",), ("tp",), ("fsdp",)), ((), (), ("fsdp",))),
        (("ep", None, ("tp", "fsdp")), (("ep",), (), ("tp", "fsdp")), ((), (), ("fsdp",))),
        (("ep", None, ("fsdp", "tp")), (("ep",), (), ("tp", "fsdp")), ((), (), ("fsdp",))),
        (("ep", "one"), (("ep",), (), ()), ((), (), ())),
    ],
)
def test_weights_are_taken_over_ep_and_gathered_over_fsdp(
    rhs: Any, entries: Any, gathered: Any
) -> None:
    found = grouped(*rhs).weight
    assert found.entries == entries
    assert found.gathered == gathered


def test_rows_stay_slabs_and_tensor_parallel_axes_stay_or_are_summed() -> None:
    first, second = grouped("ep", None, "tp"), grouped("ep", "tp", None)
    slab = ("dp", "fsdp", "ep")
    assert (first.lhs, first.out) == ((slab, (), ()), (slab, (), ("tp",)))
    assert (first.contracted, first.columns) == ((), ("tp",))
    assert (second.lhs, second.out) == ((slab, (), ("tp",)), (slab, (), ()))
    assert (second.contracted, second.columns) == (("tp",), ())


def test_a_contracting_axis_of_the_rows_alone_is_taken_up_by_the_weight() -> None:
    found = grouped("ep", lhs=(("dp", "fsdp", "ep"), (), ("tp",)))
    assert found.contracted == ("tp",)
    assert found.weight.entries == (("ep",), ("tp",), ())


def test_gate_and_up_keep_tp_on_the_last_dim() -> None:
    found = grouped("ep", "fsdp", None, "tp", shape=(8, 64, 2, 32))
    assert found.out == (("dp", "fsdp", "ep"), (), (), ("tp",))
    assert found.bias.entries == (("ep",), (), ("tp",))


def test_ep_may_be_a_tuple_and_keeps_its_order() -> None:
    given = roles(outer=("dp",), ep=("fsdp", "ep"))
    assert grouped(("fsdp", "ep"), roles=given).weight.entries[0] == ("fsdp", "ep")
    assert grouped(("ep", "fsdp", "dp"), roles=given).weight.entries[0] == ("fsdp", "ep", "dp")


@pytest.mark.parametrize(
    ("rhs", "words"),
    [
        ((("fsdp",),), "('ep', 'fsdp')"),
        ((("fsdp", "ep"),), "('ep', 'fsdp')"),
        (("tp",), "tp=2 on the expert dim"),
        (("ep", None, ("fsdp", "tp")), "('tp', 'fsdp')"),
    ],
)
def test_a_reshard_is_said_once_with_the_axes(said: Any, rhs: Any, words: str) -> None:
    for _ in range(2):
        grouped(*rhs)
    assert sum(words in text for text in said()) == 1


def test_layouts_of_the_table_are_not_worth_a_word(said: Any) -> None:
    for rhs in ((), ("ep",), (("ep", "fsdp"),), ("ep", "fsdp", "tp"), (None, "fsdp")):
        grouped(*rhs)
    assert said() == []


@pytest.mark.parametrize(
    ("rhs", "shape", "words"),
    [
        (("ep",), (7, 64, 32), ("7 experts", "ep=2")),
        (("fsdp",), (6, 64, 32), ("6 experts", "ep=2, fsdp=2")),
        ((("ep", "dp", "fsdp"),), (12, 64, 32), ("12 experts", "dp=2", "8 shards")),
        ((None, "ep"), SHAPE, ("ep=2", "dim 1", "layer 'moe'")),
        (("fsdp", None, ("tp", "ep")), SHAPE, ("ep=2", "dim 2")),
    ],
)
def test_experts_that_do_not_divide_and_misplaced_ep_are_errors_with_sizes(
    rhs: Any, shape: Any, words: Any
) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        grouped(*rhs, shape=shape)
    assert isinstance(caught.value, ValueError)
    for word in words:
        assert word in str(caught.value)


def test_shards_without_whole_blocks_are_gathered_before_and_said_once(said: Any) -> None:
    blocks = (1, 32, 32)
    for _ in range(2):
        found = grouped("ep", "fsdp", "tp", blocks=blocks)
    assert found.weight.entries == (("ep",), ("fsdp",), ())
    assert found.out[2] == ()
    texts = said()
    assert sum("tp=2 is gathered before" in text and "multiples of 32" in text for text in texts)
    assert sum("gathered before" in text for text in texts) == 1


def test_an_axis_that_is_gathered_anyway_is_given_up_before_one_that_stays(said: Any) -> None:
    # 32 values in blocks of 16: there is room for one axis of two.
    found = grouped("ep", None, ("tp", "fsdp"), blocks=(1, 1, 16))
    assert found.weight.entries == (("ep",), (), ("tp",))
    assert found.columns == ("tp",)
    assert ["fsdp=2 is gathered before" in text for text in said()] == [True]


def test_amax_crosses_what_splits_one_expert_and_nothing_else() -> None:
    assert grouped("ep", "fsdp", "tp").weight.amax_axes() == ("fsdp", "tp")
    assert grouped(("ep", "fsdp")).weight.amax_axes() == ()


@pytest.mark.parametrize(
    ("slabs", "counts", "outer", "ep"),
    [
        (("dp", "fsdp", "ep"), (8, 4, 8), ("dp", "fsdp"), ("ep",)),
        (("dp", "ep"), (4, 8, 8), ("dp", "ep"), ()),
        (("dp", "fsdp"), (4, 2, 8), (), ("dp", "fsdp")),
        ((), (4, 2, 8), (), ()),
        (("dp",), (4, 4, 8), ("dp",), ()),
    ],
)
def test_without_a_layer_the_minor_axes_of_the_slabs_are_ep(
    slabs: Any, counts: Any, outer: Any, ep: Any
) -> None:
    slabs_, groups, experts = counts
    found = read_off(roles().sizes, slabs, num_slabs=slabs_, num_groups=groups, num_experts=experts)
    assert (found.outer, found.ep) == (outer, ep)


def test_slabs_that_fit_no_experts_ask_for_the_layer() -> None:
    with pytest.raises(InvalidArgumentError, match="layer="):
        read_off(roles().sizes, ("dp",), num_slabs=2, num_groups=3, num_experts=8)


@pytest.mark.parametrize(
    ("x", "kernel", "taken", "gathered", "out"),
    [
        ((("fsdp",), ()), (("fsdp",), ()), (("fsdp",), ()), (("fsdp",), ()), (("fsdp",), ())),
        (
            (("fsdp", "ep"), ()),
            ((), ("fsdp", "ep")),
            ((), ("fsdp", "ep")),
            ((), ("fsdp", "ep")),
            (("fsdp", "ep"), ()),
        ),
        (
            (("fsdp",), ()),
            ((), ("fsdp", "ep")),
            ((), ("fsdp", "ep")),
            ((), ("fsdp", "ep")),
            (("fsdp",), ()),
        ),
        ((("dp",), ("tp",)), (("tp",), ()), (("tp",), ()), ((), ()), (("dp",), ())),
        ((("dp",), ("tp",)), ((), ("tp",)), (("tp",), ()), ((), ()), (("dp",), ())),
        ((("dp",), ()), ((), ("tp", "dp")), ((), ("tp", "dp")), ((), ("dp",)), (("dp",), ("tp",))),
        (((), ()), (("fsdp",), ()), (("fsdp",), ()), ((), ()), ((), ())),
    ],
)
def test_dense_gathers_the_kernel_over_whole_tuples_and_never_the_rows(
    x: Any, kernel: Any, taken: Any, gathered: Any, out: Any
) -> None:
    found = dense_ops.place(roles(), x, kernel, (64, 32))
    assert (found.kernel.entries, found.kernel.gathered) == (taken, gathered)
    assert found.out == out
    assert found.x[:-1] == x[:-1]


def test_a_sum_becomes_a_scatter_where_the_result_lies_over_its_axes() -> None:
    options: Any = {"lead_shape": (8,)}
    given = (roles(), (("dp",), ("tp",)), (("tp",), ()), (64, 32))
    assert dense_ops.place(*given, wanted=(("dp", "tp"), ()), **options).scatter == 0
    assert dense_ops.place(*given, wanted=(("dp",), ()), **options).scatter is None


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
            _, pull = jax.vjp(lambda x: gather(x, axes, 1), weight)
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
