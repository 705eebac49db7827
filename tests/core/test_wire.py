"""Specs and errors do not change when they are sent."""

from __future__ import annotations

import dataclasses
import pickle

import grpc
import pytest

from ep_runtime import errors, layer_specs, native, specs, wire
from ep_runtime.v1 import types_pb2


def make_spec(**changes: object) -> specs.GroupSpec:
    arguments: dict = {
        "name": "moe",
        "mesh_axes": (("dp", 2), ("ep", 4)),
        "ep_axis": "ep",
        "outer_axes": ("dp",),
        "num_experts": 8,
        "hidden_size": 64,
        "max_tokens_per_rank": 16,
    }
    return specs.make_group_spec(**{**arguments, **changes})


class FakeRpcError(grpc.RpcError):
    def __init__(self, code, details, metadata=()):
        self._parts = code, details, metadata

    def code(self):
        return self._parts[0]

    def details(self):
        return self._parts[1]

    def trailing_metadata(self):
        return self._parts[2]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"op_timeout_s": 0.1, "retain_s": 0.0},
        {"retain_s": 59.9999999999},
        {"workspace": 2.0},
        {"workspace": 1 << 53 | 1},
    ],
)
def test_a_group_spec_comes_back_equal(changes):
    spec = make_spec(**changes)
    sent = wire.group_spec_to_proto(spec).SerializeToString()
    back = wire.group_spec_from_proto(types_pb2.GroupSpec.FromString(sent))
    assert back.retain_s == pytest.approx(spec.retain_s, abs=1e-9)
    assert back.fingerprint == spec.fingerprint
    if changes.get("retain_s") != 59.9999999999:
        assert back == spec
    assert type(back.workspace) is type(spec.workspace)


def test_a_spec_of_before_the_workspace_reads_as_auto():
    message = wire.group_spec_to_proto(make_spec(workspace=2.0))
    message.ClearField("workspace")
    assert wire.group_spec_from_proto(message) == make_spec()
    message.workspace.bytes = -5
    with pytest.raises(errors.InvalidArgumentError, match="workspace must be .* got -5"):
        wire.group_spec_from_proto(message)


def test_a_spec_of_before_the_overlap_reads_as_on():
    message = wire.group_spec_to_proto(make_spec(overlap=False))
    message.ClearField("overlap")
    assert wire.group_spec_from_proto(message) == make_spec(overlap=True)


@pytest.mark.parametrize("setting", ["auto", 1.5, 1 << 30])
def test_the_native_library_hears_the_workspace_as_it_is(setting):
    lines = native._settings(make_spec(workspace=setting, op_timeout_s=2.0)).splitlines()
    assert [line for line in lines if line.startswith(("workspace", "op_t"))] == [
        "op_timeout_ns=2000000000",
        f"workspace={setting}",
    ]


def test_programs_depend_on_the_workspace():
    settings = ["auto", 1.5, 4096.0, 4096, 4097]
    specs_of = [make_spec(workspace=setting) for setting in settings]
    assert len({spec.fingerprint for spec in specs_of}) == len(set(specs_of)) == len(settings)


def test_an_empty_or_unknown_spec_is_refused_by_field():
    with pytest.raises(errors.InvalidArgumentError, match="name"):
        wire.group_spec_from_proto(types_pb2.GroupSpec())
    message = wire.group_spec_to_proto(make_spec())
    message.transport = 77
    with pytest.raises(errors.InvalidArgumentError, match="transport must be one of"):
        wire.group_spec_from_proto(message)


@pytest.mark.parametrize("part", ["", "workspace"])
def test_settings_that_only_a_newer_version_knows_are_refused(part):
    sent = wire.group_spec_to_proto(make_spec())
    newer = b"\xf8\x3f\x05"  # field 1023, of no version
    (getattr(sent, part) if part else sent).MergeFromString(newer)
    with pytest.raises(errors.VersionSkewError, match=r"group 'moe' has settings .*\[1023\]"):
        wire.group_spec_from_proto(types_pb2.GroupSpec.FromString(sent.SerializeToString()))


@pytest.mark.parametrize(
    ("one", "other", "together"),
    [
        ("0.2.0", "0.3.1rc1", True),
        ("0.3.0", "0.2.9", True),
        ("0.2.0", "0.4.0", False),
        ("1.2.0", "0.2.0", False),
        ("0.2.0", "", False),
    ],
)
def test_neighbouring_minor_versions_work_together(one, other, together):
    assert wire.work_together(one, other) is together


# Fields for which another number is not valid.
OTHERS = {
    "name": "other",
    "mesh_axes": (("pp", 3), ("ep", 4), ("dp", 2)),
    "ep_axis": ("dp", "ep"),
    "outer_axes": ("pp",),
    "num_experts": 16,
    "max_token_dtype": "float8_e5m2",
    "on_overflow": "error",
    "combine_precision": "exact",
    "transport": "nccl",
    "partitioning": "rule",
    "node_size": 2,
    "workspace": 1.5,
    "spec": layer_specs.LayerSpec("b", 3, 16, 4, 12, 80),
}
LAYER = layer_specs.LayerSpec("a", top_k=2, alignment=8, num_experts=4, hidden_size=16)


def with_other_values(spec):
    """Returns a spec in which every field differs from `spec`."""

    def other(name, value):
        if name in OTHERS:
            return OTHERS[name]
        assert isinstance(value, int | float), f"give {name} a value in OTHERS"
        return not value if isinstance(value, bool) else value + 3

    fields = dataclasses.fields(spec)
    return type(spec)(**{f.name: other(f.name, getattr(spec, f.name)) for f in fields})


@pytest.mark.parametrize(
    ("spec", "to_proto", "from_proto"),
    [
        (make_spec(), wire.group_spec_to_proto, wire.group_spec_from_proto),
        (LAYER, wire.layer_spec_to_proto, wire.layer_spec_from_proto),
        (wire.LayerStackSpec(LAYER, 7), wire.stack_spec_to_proto, wire.stack_spec_from_proto),
        (
            wire.RegisteredLayer(LAYER, 7, (1 << 62) + 1, 5),
            wire.registered_to_proto,
            wire.registered_from_proto,
        ),
    ],
    ids=["group", "layer", "stack", "registered"],
)
def test_no_field_of_a_spec_is_lost_on_the_wire(spec, to_proto, from_proto):
    other = with_other_values(spec)
    for sent in (spec, other):
        message = to_proto(sent)
        back = from_proto(type(message).FromString(message.SerializeToString()))
        for field in dataclasses.fields(spec):
            assert (field.name, getattr(back, field.name)) == (
                field.name,
                getattr(sent, field.name),
            )
            assert getattr(spec, field.name) != getattr(other, field.name)
    full = to_proto(other)  # each field is sent, and none is computed from another
    assert {field.name for field, _ in full.ListFields()} == {*full.DESCRIPTOR.fields_by_name}


ERROR_CLASSES = [
    value
    for value in vars(errors).values()
    if isinstance(value, type) and issubclass(value, errors.EpRuntimeError)
]


@pytest.mark.parametrize("cls", ERROR_CLASSES, ids=lambda cls: cls.__name__)
def test_every_error_comes_back_as_itself(cls):
    error = cls("what happened: ü", rank=3, missing_ranks=[1, 2], field="top_k")
    status = wire.error_to_status(error)
    back = wire.error_from_rpc(FakeRpcError(status.code, "ignored", status.trailing_metadata))
    assert (type(back), str(back), back.fields) == (cls, str(error), error.fields)
    detail = wire.error_from_detail(wire.error_to_detail(error))
    assert (type(detail), str(detail), detail.fields) == (cls, str(error), error.fields)
    assert type(pickle.loads(pickle.dumps(back))) is cls


def test_a_long_error_fits_the_trailers():
    error = errors.GroupNotReadyError("x" * 100_000, missing_ranks=list(range(100_000)))
    metadata = wire.error_to_status(error).trailing_metadata
    assert sum(len(value) for _, value in metadata) < 7000
    back = wire.error_from_rpc(FakeRpcError(None, None, metadata))
    assert back.fields["missing_ranks"] == list(range(64))


def test_statuses_of_others_become_the_nearest_class():
    code = grpc.StatusCode
    for status, cls in (
        (code.UNAVAILABLE, errors.RuntimeUnavailableError),
        (code.UNIMPLEMENTED, errors.VersionSkewError),
        (code.INVALID_ARGUMENT, errors.InvalidArgumentError),
        (code.INTERNAL, errors.EpRuntimeError),
    ):
        assert type(wire.error_from_rpc(FakeRpcError(status, "text"))) is cls
    garbage = ((wire.STATUS_DETAILS_KEY, b"\xff\xff"),)
    found = wire.error_from_rpc(FakeRpcError(code.UNAVAILABLE, "text", garbage))
    assert type(found) is errors.RuntimeUnavailableError
    assert type(wire.error_from_rpc(grpc.RpcError("bare"))) is errors.EpRuntimeError


def test_reasons_are_upper_snake():
    assert wire.reason(errors.SpecMismatchError) == "SPEC_MISMATCH"
    assert wire.reason(errors.PoolExhaustedError) == "POOL_EXHAUSTED"


@pytest.mark.parametrize("value", [0.0, 0.1, 1.9999999999, 600.0, -1.5, -1.9999999999])
def test_durations_keep_nanoseconds(value):
    message = wire.duration(value)
    assert wire.seconds(message) == pytest.approx(value, abs=1e-9)
    assert abs(message.nanos) < 1_000_000_000  # other implementations refuse a longer Duration


def test_not_a_duration_is_refused():
    for value in (float("nan"), float("inf")):
        with pytest.raises(errors.InvalidArgumentError):
            wire.duration(value)
