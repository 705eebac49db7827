"""Sessions, groups and layers of address="none": everything that needs no daemon."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from cases import SMALL
from jax.sharding import AbstractMesh, Mesh

import ep_runtime as ep
from ep_runtime_client.daemons.client import DaemonClient

NAN, INF = float("nan"), float("inf")
_ARGUMENTS = SMALL | {"outer_axes": "dp", "max_top_k": 4}


# For every setting of create_group a value that is not the default.
_SETTINGS: dict[str, Any] = {
    **_ARGUMENTS,
    "recv_capacity_per_rank": 24,
    "max_token_dtype": "float32",
    "lanes": 3,
    "on_overflow": "error",
    "combine_precision": "exact",
    "transport": "xla",
    "partitioning": "shard_map",
    "op_timeout_s": 7.0,
    "retain_s": 5.0,
    "num_sms": 24,
    "workspace": 2.0,
    "overlap": False,
    "spare_experts": 2,
}


@pytest.fixture
def session() -> Iterator[ep.Session]:
    with ep.connect("none", job="tests") as found:
        yield found


def test_a_group_has_the_sizes_of_its_spec(session: ep.Session, mesh: Any) -> None:
    group = session.create_group("g", mesh, **_ARGUMENTS)
    assert group.spec.transport == "xla"
    assert group.capacity_per_rank == ep.recv_capacity(
        num_experts=8, top_k=4, max_tokens_per_rank=8, ep_size=4, alignment=8
    )
    assert group.staging_bytes_per_rank == 0
    described = group.describe()
    assert (described["job"], described["state"], described["num_slabs"]) == ("tests", "READY", 8)


def test_rules_stand_for_the_axes(session: ep.Session, mesh: Any) -> None:
    rules = ep.sharding.rules("fsdp+ep")
    sizes = {name: _ARGUMENTS[name] for name in _ARGUMENTS if not name.endswith(("axis", "axes"))}
    spec = session.create_group("g", mesh, rules=rules, **sizes).spec
    assert (spec.ep_axis, spec.outer_axes) == (("ep",), ("dp",))
    assert session.create_group("g", mesh, ep_axis="ep", outer_axes="dp", **sizes).spec == spec
    by_rules = ep.estimate_memory("g", mesh, rules=rules, transport="xla", **sizes)
    assert by_rules == ep.estimate_memory(
        "g", mesh, ep_axis="ep", outer_axes="dp", transport="xla", **sizes
    )
    other: Any = "fsdp+ep"
    for wrong, text in (
        ({"rules": rules, "ep_axis": "ep"}, "rules or ep_axis, not both, got ep_axis='ep'"),
        ({"rules": rules, "outer_axes": "dp"}, "rules or outer_axes, not both"),
        ({"rules": other}, "rules must be ep.sharding.Rules, got str"),
        ({"rules": ep.sharding.rules("fsdp+ep", ep="x")}, "mesh must have an axis of ep"),
        ({}, "give ep_axis, or rules= of ep.sharding, got neither"),
    ):
        with pytest.raises(ep.InvalidArgumentError, match=text):
            session.create_group("other", mesh, **wrong, **sizes)
        with pytest.raises(ep.InvalidArgumentError, match=text):
            ep.estimate_memory("other", mesh, **wrong, **sizes)


def test_every_setting_reaches_the_spec(
    session: ep.Session, mesh: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DaemonClient, "is_private", False)
    settings = {*inspect.signature(session.create_group).parameters}
    assert settings == {*_SETTINGS, "name", "mesh", "capacity_factor", "replace", "rules"}
    spec = session.create_group("g", mesh, **_SETTINGS).spec
    wanted = {**_SETTINGS, "ep_axis": ("ep",), "outer_axes": ("dp",), "name": "g"}
    assert {name: getattr(spec, name) for name in wanted} == wanted
    wide = {**_SETTINGS, "recv_capacity_per_rank": None, "capacity_factor": 2.0}
    narrow = {**wide, "capacity_factor": 1.0}
    found = [
        session.create_group(name, mesh, **given).spec.recv_capacity_per_rank
        for name, given in (("wide", wide), ("narrow", narrow))
    ]
    assert found[0] > found[1]


def test_the_same_spec_again_is_the_same_group(session: ep.Session, mesh: Any) -> None:
    group = session.create_group("g", mesh, **_ARGUMENTS)
    assert session.create_group("g", mesh, **_ARGUMENTS) is group
    assert session.create_group("g", mesh, **_ARGUMENTS, replace=True) is group
    assert session.group("g") is group


@pytest.mark.parametrize(
    ("change", "field", "theirs", "ours"),
    [
        ({"hidden_size": 32}, "hidden_size", 16, 32),
        ({"outer_axes": ()}, "outer_axes", ("dp",), ()),
        ({"on_overflow": "error"}, "on_overflow", "drop", "error"),
        ({"op_timeout_s": 5}, "op_timeout_s", 600.0, 5.0),
        ({"workspace": 1.5}, "workspace", "auto", 1.5),
        ({"workspace": 1 << 30}, "workspace", "auto", 1 << 30),
        ({"overlap": False}, "overlap", True, False),
        ({"spare_experts": 2}, "spare_experts", 0, 2),
    ],
)
def test_another_spec_names_the_field_and_both_values(
    session: ep.Session, mesh: Any, change: dict[str, Any], field: str, theirs: Any, ours: Any
) -> None:
    session.create_group("g", mesh, **_ARGUMENTS)
    with pytest.raises(ep.SpecMismatchError) as caught:
        session.create_group("g", mesh, **{**_ARGUMENTS, **change})
    fields = caught.value.fields
    assert (fields["object"], fields["field"]) == ("g", field)
    assert (fields["theirs"], fields["ours"]) == (theirs, ours)
    assert str(theirs) in str(caught.value)
    assert str(ours) in str(caught.value)


def test_the_same_axes_over_other_devices_are_another_group(
    session: ep.Session, devices: list[Any], mesh: Any
) -> None:
    session.create_group("g", mesh, **_ARGUMENTS)
    reversed_mesh = Mesh(np.array(devices[::-1]).reshape(2, 4), ("dp", "ep"))
    with pytest.raises(ep.SpecMismatchError, match=r"mesh\.devices=\[0, 1, 2"):
        session.create_group("g", reversed_mesh, **_ARGUMENTS)


def test_replace_takes_the_old_groups_place(session: ep.Session, mesh: Any) -> None:
    old = session.create_group("g", mesh, **_ARGUMENTS)
    layer = old.register_layer("a", top_k=2)
    new = session.create_group("g", mesh, **{**_ARGUMENTS, "hidden_size": 32}, replace=True)
    assert new is not old
    assert old.closed
    with pytest.raises(ep.StaleHandleError, match="older group 'g'"):
        _ = layer.group
    with pytest.raises(ep.StaleHandleError, match="was closed"):
        old.register_layer("b", top_k=1)


def test_several_groups_live_side_by_side(session: ep.Session, mesh: Any) -> None:
    groups = [session.create_group(f"g{i}", mesh, **_ARGUMENTS) for i in range(3)]
    layers = [group.register_layer("same", top_k=2) for group in groups]
    assert len({layer.id for layer in layers}) == 3
    assert [layer.group for layer in layers] == groups


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"ep_axis": "expert"}, "ep_axis names 'expert'.*'dp': 2, 'ep': 4"),
        ({"outer_axes": "ep"}, "must not share an axis"),
        ({"num_experts": 6}, "num_experts=6 does not divide by the ep size 4"),
        ({"hidden_size": 0}, "hidden_size must be at least 1, got 0"),
        ({"max_token_dtype": "int4"}, "max_token_dtype must be one of.*'int4'"),
        ({"on_overflow": "wrap"}, "on_overflow must be one of.*'wrap'"),
        ({"capacity_factor": 2.0, "recv_capacity_per_rank": 8}, "not both"),
        ({"recv_capacity_per_rank": 3}, "recv_capacity_per_rank=3 .*alignment=8,"),
        ({"transport": "memfd"}, 'address="none"'),
        ({"lanes": 0}, "lanes must be at least 1, got 0"),
        ({"num_sms": 1}, "num_sms must be None or 2 to 256, got 1"),
        ({"num_sms": 257}, "num_sms must be None or 2 to 256, got 257"),
        ({"workspace": 0.0}, "workspace must be .* got 0.0"),
        ({"workspace": True}, "workspace must be .* got True"),
        ({"workspace": "2.0"}, "workspace must be .* got '2.0'"),
        ({"workspace": 2}, "workspace=2 is an int, so bytes, .* is a float, 2.0"),
        ({"retain_s": -1}, "retain_s must be at least 0, got -1"),
        ({"hidden_size": "16"}, "hidden_size must be an integer, got '16'"),
        ({"hidden_size": 16.5}, "hidden_size must be an integer, got 16.5"),
        ({"num_experts": None}, "num_experts must be an integer, got None"),
        ({"alignment": 8.0}, "alignment must be an integer, got 8.0"),
        ({"num_sms": 2.5}, "num_sms must be an integer, got 2.5"),
        ({"overlap": "no"}, "overlap must be True or False, got 'no'"),
        ({"spare_experts": -1}, "spare_experts must be at least 0, got -1"),
        ({"spare_experts": "all"}, "spare_experts must be an integer, got 'all'"),
        (
            {"spare_experts": 1024},
            "spare_experts=1024 with [0-9]+ experts on each of 4 ranks must make at most 1024 "
            "experts of a rank, got 10[0-9]+",
        ),
        ({"op_timeout_s": NAN}, "op_timeout_s must be a number, got nan"),
        ({"retain_s": "60"}, "retain_s must be a number, got '60'"),
        ({"capacity_factor": NAN}, "capacity_factor must be a number, got nan"),
        ({"capacity_factor": INF}, "capacity_factor must be finite"),
        ({"capacity_factor": 0.5}, "capacity_factor must be at least 1.0, got 0.5"),
        ({"max_token_dtype": "bf16"}, "got 'bf16'; did you mean 'bfloat16'"),
        ({"max_token_dtype": "fp32"}, "got 'fp32'; did you mean 'float32'"),
    ],
    ids=str,
)
def test_a_wrong_argument_is_named_with_its_value(
    session: ep.Session, mesh: Any, change: dict[str, Any], words: str
) -> None:
    with pytest.raises(ep.InvalidArgumentError, match=words):
        session.create_group("g", mesh, **{**_ARGUMENTS, **change})
    assert session.describe()["groups"] == []


def test_a_layer_whose_smallest_zone_no_slab_holds_is_refused(
    session: ep.Session, mesh: Any
) -> None:
    group = session.create_group("g", mesh, **_ARGUMENTS, recv_capacity_per_rank=12)
    assert group.register_layer("fits", top_k=2).alignment == 8
    with pytest.raises(ep.InvalidArgumentError, match="=12 .*alignment=16 of layer 'coarse'"):
        group.register_layer("coarse", top_k=2, alignment=16)


@pytest.mark.parametrize("name", ["num_experts", "top_k", "max_tokens_per_rank", "ep_size"])
def test_the_capacity_of_nothing_is_refused(name: str) -> None:
    sizes = {"num_experts": 8, "top_k": 2, "max_tokens_per_rank": 8, "ep_size": 4, "alignment": 8}
    with pytest.raises(ep.InvalidArgumentError, match=f"{name} must be at least 1, got 0"):
        ep.recv_capacity(**(sizes | {name: 0}))


def test_the_dtype_may_be_a_dtype(session: ep.Session, mesh: Any) -> None:
    import jax.numpy as jnp

    group = session.create_group("g", mesh, **_ARGUMENTS, max_token_dtype=jnp.bfloat16)
    assert group.spec.max_token_dtype == "bfloat16"


@pytest.mark.parametrize("mesh", [None, [1], AbstractMesh((2, 4), ("dp", "ep"))])
def test_what_is_no_mesh_of_devices_is_refused(session: ep.Session, mesh: Any) -> None:
    with pytest.raises(ep.InvalidArgumentError, match=r"mesh must be a jax\.sharding\.Mesh"):
        session.create_group("g", mesh, **_ARGUMENTS)


def test_layers_fill_in_the_groups_defaults(session: ep.Session, mesh: Any) -> None:
    group = session.create_group("g", mesh, **_ARGUMENTS)
    layer = group.register_layer("a", top_k=2)
    assert (layer.name, layer.top_k, layer.alignment, layer.in_flight) == ("a", 2, 8, 1)
    assert layer.group is group
    assert group.register_layer("a", top_k=2) == layer
    assert group.layer("a") == layer
    assert pickle.loads(pickle.dumps(layer)) == layer
    assert hash(pickle.loads(pickle.dumps(layer))) == hash(layer)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"top_k": 5}, "top_k=5.*max_top_k=4"),
        ({"top_k": 0}, "top_k must be at least 1, got 0"),
        ({"top_k": 2, "in_flight": 3}, "in_flight=3.*lanes=2"),
        ({"top_k": 2, "alignment": 0}, "alignment must be at least 1, got 0"),
        ({"top_k": 4, "alignment": 128}, r"needs \d+ rows per rank.*has \d+"),
    ],
)
def test_a_layer_that_does_not_fit_gives_both_numbers(
    session: ep.Session, mesh: Any, arguments: dict[str, Any], words: str
) -> None:
    group = session.create_group("g", mesh, **_ARGUMENTS)
    with pytest.raises(ep.InvalidArgumentError, match=words):
        group.register_layer("a", **arguments)


def test_another_layer_of_the_same_name_is_a_mismatch(session: ep.Session, mesh: Any) -> None:
    group = session.create_group("g", mesh, **_ARGUMENTS)
    group.register_layer("a", top_k=2)
    with pytest.raises(ep.SpecMismatchError, match="top_k=2, this call has top_k=1"):
        group.register_layer("a", top_k=1)
    with pytest.raises(ep.SpecMismatchError, match="num_layers=None.*num_layers=3"):
        group.register_layer_stack("a", 3, top_k=2)
    twice = [ep.LayerSpec("b", top_k=1), ep.LayerSpec("b", top_k=2)]
    with pytest.raises(ep.SpecMismatchError, match="'b'"):
        group.register_layers(twice)
    with pytest.raises(ep.StaleHandleError, match=r"no layer 'b', it has \['a'\]"):
        group.layer("b")


def test_a_stack_gives_layers_by_position_and_by_name(session: ep.Session, mesh: Any) -> None:
    group = session.create_group("g", mesh, **_ARGUMENTS)
    stack = group.register_layer_stack("s", 4, top_k=2, in_flight=2)
    assert len(stack) == 4
    assert group.layer("s[3]") == stack[3] == stack[-1]
    assert group.layer("s") == stack
    assert len({group.layer(f"s[{i}]") for i in range(4)}) == 4
    with pytest.raises(ep.StaleHandleError, match=r"no layer 's\[4\]'"):
        group.layer("s[4]")
    with pytest.raises(ep.InvalidArgumentError, match="num_layers must be 1 to 1048576, got 0"):
        group.register_layer_stack("t", 0, top_k=2)


def test_closing_ends_groups_and_layers(mesh: Any) -> None:
    with ep.connect("none") as session:
        group = session.create_group("g", mesh, **_ARGUMENTS)
        layer = group.register_layer("a", top_k=1)
    assert group.closed
    group.close()
    with pytest.raises(ep.StaleHandleError, match="not open in this process"):
        _ = layer.group
    with pytest.raises(ep.StaleHandleError, match="was closed"):
        group.check()
    with pytest.raises(ep.RuntimeUnavailableError, match="was closed"):
        session.create_group("g", mesh, **_ARGUMENTS)


def test_connecting_twice_is_one_session_that_the_last_close_ends() -> None:
    first = ep.connect("none")
    second = ep.connect("none")
    assert first is second
    second.close()
    assert first.alive
    first.close()
    first.close()
    assert not first.alive


def test_a_second_connect_may_not_change_the_job(session: ep.Session) -> None:
    with pytest.raises(ep.SpecMismatchError, match="job 'tests', this call has job 'other'"):
        ep.connect("none", job="other")
