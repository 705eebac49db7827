"""Specs of groups: frozen, hashable, validated once, and equal in all processes.

A spec has only names and static sizes, not devices, pids, pointers or epochs. So two processes with
equal specs trace the same program. Letters: `layout.py`.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Mapping
from math import prod
from typing import Any

from ep_runtime import layout
from ep_runtime import workspace as workspaces
from ep_runtime.allowed_names import check_name
from ep_runtime.arguments import check_at_least, check_whole
from ep_runtime.errors import InvalidArgumentError

TRANSPORTS = ("memfd", "nvlink", "nccl", "xla")
# A value of `transport`: windows hold a copy of a job's state instead of rows.
STATE = "state"
# Transports that use windows within a node, and collectives between nodes.
NODE_TRANSPORTS = ("memfd", "nccl")
ON_OVERFLOW = ("drop", "error")
COMBINE_PRECISIONS = ("fast", "exact", "fp8")
PARTITIONINGS = ("auto", "rule", "shard_map")
MAX_STACK_LAYERS = 1 << 20
MAX_MESH_AXES = 32
MAX_SMS = 256
# Limits of experts: of one matmul, and of one prepare in a group with copies of experts.
MAX_PRODUCT_EXPERTS = 1024
MAX_EXPERTS = 2048

DTYPE_BYTES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int8": 1,
    "uint8": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}

# Settings with a fixed set of values, and integer settings.
_CHOICES = {
    "max_token_dtype": tuple(DTYPE_BYTES),
    "on_overflow": ON_OVERFLOW,
    "combine_precision": COMBINE_PRECISIONS,
    "transport": (*TRANSPORTS, STATE),
    "partitioning": PARTITIONINGS,
}
_WHOLE = ("num_experts", "hidden_size", "max_tokens_per_rank", "max_top_k", "alignment", "lanes")

# Marks a setting that does not change a compiled program.
_NOT_IN_PROGRAMS = {"in_programs": False}


def stable_id(*parts: str) -> int:
    """Returns a 63-bit id of a name, equal in all processes and runs (unlike Python's hash)."""
    digest = hashlib.sha256("\0".join(parts).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def check_axis_count(count: int) -> None:
    """Raises InvalidArgumentError if a mesh has more than MAX_MESH_AXES axes."""
    if count > MAX_MESH_AXES:
        raise InvalidArgumentError(
            f"mesh_axes must be at most {MAX_MESH_AXES}, got {count}", argument="mesh_axes"
        )


def check_holds_rows(argument: str, capacity: int, alignment: int, of: str = "") -> None:
    """Raises InvalidArgumentError if a slab is too small for the smallest zone of an expert."""
    if capacity < alignment:
        raise InvalidArgumentError(
            f"{argument}={capacity} rows per rank are less than alignment={alignment}{of}, the "
            "rows of the smallest zone: every token would be dropped",
            argument=argument,
        )


@dataclasses.dataclass(frozen=True)
class GroupSpec:
    """All settings of a group, with defaults filled in, as `Group.spec` returns them.

    `GroupSettings.on` makes and validates a spec.

    Attributes:
        name: the group's name, unique within the user's job.
        mesh_axes: all axes of the mesh with their sizes, in mesh order.
        ep_axis: axes that shard the experts.
        outer_axes: further axes that shard tokens.
        num_experts: E, experts of one EP group.
        hidden_size: H, values of a token.
        max_tokens_per_rank: limit of the tokens of one rank in a call.
        recv_capacity_per_rank: C, rows of one slab.
        max_top_k: largest K of the group's layers.
        max_token_dtype: name of the widest dtype of tokens.
        alignment: the rows of each expert are padded to a multiple of this number.
        lanes: how many calls of the group may move rows at once.
        on_overflow, combine_precision, partitioning: as in `Session.create_group`.
        transport: how rows move, or STATE; "auto" is already resolved.
        op_timeout_s, retain_s: as in `Session.create_group`.
        num_sms: SMs that one kernel uses on a GPU; 0 for the fastest number in our measurements.
        node_size: G, how many consecutive EP ranks share windows in a group across nodes, else 0.
        workspace: as in `Session.create_group`.
        overlap: as in `Session.create_group`.
        spare_experts: slots of a rank for copies of other ranks' experts; "auto" is resolved.
    """

    name: str
    mesh_axes: tuple[tuple[str, int], ...]
    ep_axis: tuple[str, ...]
    outer_axes: tuple[str, ...]
    num_experts: int
    hidden_size: int
    max_tokens_per_rank: int
    recv_capacity_per_rank: int
    max_top_k: int
    max_token_dtype: str
    alignment: int
    lanes: int
    on_overflow: str
    combine_precision: str
    transport: str
    partitioning: str
    op_timeout_s: float = dataclasses.field(metadata=_NOT_IN_PROGRAMS)
    retain_s: float = dataclasses.field(metadata=_NOT_IN_PROGRAMS)
    num_sms: int = dataclasses.field(default=0, metadata=_NOT_IN_PROGRAMS)
    node_size: int = 0
    workspace: workspaces.Setting = "auto"
    overlap: bool = dataclasses.field(default=True, metadata=_NOT_IN_PROGRAMS)
    spare_experts: int = 0

    @functools.cached_property
    def axis_sizes(self) -> Mapping[str, int]:
        """Sizes of the mesh axes by name, in mesh order."""
        return dict(self.mesh_axes)

    @functools.cached_property
    def ep_size(self) -> int:
        """N, the number of ranks of one EP group."""
        return prod(self.axis_sizes[axis] for axis in self.ep_axis)

    @functools.cached_property
    def ranks_per_node(self) -> int:
        """Number of EP ranks on one node, which map each other's windows; N with one node."""
        return self.node_size or self.ep_size

    @functools.cached_property
    def num_nodes(self) -> int:
        """D, the number of nodes of one EP group.

        EP rank = node * ranks_per_node + local rank.
        """
        return self.ep_size // self.ranks_per_node

    @functools.cached_property
    def staged_tokens(self) -> int:
        """Largest number of tokens that one rank writes into its window in one call.

        In a group over several nodes, this includes tokens from other nodes.
        """
        return self.num_nodes * self.max_tokens_per_rank

    @functools.cached_property
    def outer_size(self) -> int:
        """Number of token shards along the outer axes."""
        return prod(self.axis_sizes[axis] for axis in self.outer_axes)

    @functools.cached_property
    def num_slabs(self) -> int:
        """R, the number of slabs, one per shard of the tokens."""
        return self.outer_size * self.ep_size

    @functools.cached_property
    def token_axes(self) -> tuple[str, ...]:
        """The mesh axes that shard dimension 0 of tokens and slabs, major first."""
        return self.outer_axes + self.ep_axis

    @functools.cached_property
    def domain_axes(self) -> tuple[str, ...]:
        """All mesh axes except the ep axes, in mesh order.

        Each combination of coordinates on them is one EP group.
        """
        return tuple(axis for axis, _ in self.mesh_axes if axis not in self.ep_axis)

    @functools.cached_property
    def world_size(self) -> int:
        """W, the number of devices in the mesh.

        World rank = domain * ep_size + EP rank.
        """
        return prod(size for _, size in self.mesh_axes)

    @functools.cached_property
    def num_domains(self) -> int:
        """Number of EP groups in the mesh."""
        return self.world_size // self.ep_size

    @functools.cached_property
    def experts_per_rank(self) -> int:
        """L, the number of experts of one rank."""
        return self.num_experts // self.ep_size

    @functools.cached_property
    def physical(self) -> GroupSpec:
        """Returns the spec after `ep.moe` copied experts, with L + spare_experts on each rank.

        In such a group, rows over capacity have already been dropped.
        """
        experts = self.ep_size * (self.experts_per_rank + self.spare_experts)
        return dataclasses.replace(
            self, num_experts=experts, spare_experts=0, on_overflow=ON_OVERFLOW[0]
        )

    @functools.cached_property
    def fingerprint(self) -> int:
        """A 63-bit hash of all settings that change a compiled program."""
        fields = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.metadata.get("in_programs", True)
        }
        return stable_id("group-spec", json.dumps(fields, sort_keys=True))

    def to_dict(self) -> dict[str, Any]:
        """Returns the settings as plain values, by name."""
        return dataclasses.asdict(self)

    def difference(self, other: GroupSpec) -> tuple[str, Any, Any] | None:
        """Returns the first setting in which two specs differ.

        Args:
            other: the spec to compare with.

        Returns:
            (field, mine, theirs), or None if they are equal.
        """
        for field in dataclasses.fields(self):
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            if mine != theirs:
                return field.name, mine, theirs
        return None


def _check_axes(
    mesh_axes: tuple[tuple[str, int], ...], ep_axis: tuple[str, ...], outer_axes: tuple[str, ...]
) -> None:
    sizes = dict(mesh_axes)
    if not ep_axis:
        raise InvalidArgumentError("ep_axis must name at least one mesh axis", argument="ep_axis")
    for argument, axes in (("ep_axis", ep_axis), ("outer_axes", outer_axes)):
        for axis in axes:
            if axis not in sizes:
                raise InvalidArgumentError(
                    f"{argument} names {axis!r}, but the mesh has the axes {sizes}",
                    argument=argument,
                )
    used = ep_axis + outer_axes
    if len(set(used)) != len(used):
        raise InvalidArgumentError(
            f"ep_axis {ep_axis} and outer_axes {outer_axes} must not share an axis",
            argument="outer_axes",
        )


def _check_fp8_sums(hidden_size: int, max_token_dtype: str) -> None:
    need = layout.scaled_bytes(hidden_size)
    have = hidden_size * DTYPE_BYTES[max_token_dtype]
    if max_token_dtype == "float64":
        why = "sums of float64 rows are float64"
    elif need > have:
        why = f"a sum of hidden_size={hidden_size} takes {need} bytes with scales, a row {have}"
    else:
        return
    raise InvalidArgumentError(
        f'combine_precision="fp8" is not for max_token_dtype={max_token_dtype!r}: {why}',
        argument="combine_precision",
    )


def _check_node_size(node_size: int, ep_size: int, transport: str) -> None:
    if node_size == 0:
        return
    if node_size < 1 or ep_size % node_size:
        raise InvalidArgumentError(
            f"node_size must be 0 or divide the ep size {ep_size}, got {node_size}",
            argument="node_size",
        )
    if transport not in NODE_TRANSPORTS:
        raise InvalidArgumentError(
            f"node_size={node_size} needs a transport of {NODE_TRANSPORTS}, got {transport!r}",
            argument="node_size",
        )


def _check_spare_experts(spare: Any, num_experts: int, ep_size: int) -> None:
    check_whole("spare_experts", spare, 0)
    experts = num_experts // ep_size
    for got, limit, of in (
        (experts + spare, MAX_PRODUCT_EXPERTS, "experts of a rank"),
        (ep_size * (experts + spare), MAX_EXPERTS, "experts of all ranks"),
    ):
        if spare and got > limit:
            raise InvalidArgumentError(
                f"spare_experts={spare} with {experts} experts on each of {ep_size} ranks must "
                f"make at most {limit} {of}, got {got}",
                argument="spare_experts",
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupSettings:
    """The settings of `Session.create_group`; `on` adds a mesh and makes a GroupSpec.

    Attributes:
        name, ep_axis, outer_axes, ...: as in `Session.create_group`.
        node_size: as in GroupSpec; 0 if all ranks are on one node.
    """

    name: str
    ep_axis: str | tuple[str, ...]
    outer_axes: str | tuple[str, ...] = ()
    num_experts: int
    hidden_size: int
    max_tokens_per_rank: int
    recv_capacity_per_rank: int | None = None
    capacity_factor: float | None = None
    max_top_k: int = 8
    max_token_dtype: Any = "bfloat16"
    alignment: int = 128
    lanes: int = 2
    on_overflow: str = "drop"
    combine_precision: str = "fast"
    transport: str = "memfd"
    partitioning: str = "auto"
    op_timeout_s: float = 600.0
    retain_s: float = 60.0
    num_sms: int | None = None
    node_size: int = 0
    workspace: workspaces.Setting = "auto"
    overlap: bool = True
    spare_experts: int | str = "auto"

    def on(self, mesh_axes: tuple[tuple[str, int], ...]) -> GroupSpec:
        """Makes the spec of a group with these settings on a mesh, and resolves its capacity.

        Raises:
            InvalidArgumentError: an argument is wrong; the message has its wanted and given value.
        """
        ep_axis, outer_axes = _axes_of(self.ep_axis), _axes_of(self.outer_axes)
        self._check(mesh_axes, ep_axis, outer_axes)
        ep_size = prod(dict(mesh_axes)[axis] for axis in ep_axis)
        _check_node_size(self.node_size, ep_size, self.transport)
        capacity = self._capacity(ep_size)  # also checks its arguments
        auto = self.spare_experts == "auto"
        spare = 0 if auto else self.spare_experts
        _check_spare_experts(spare, self.num_experts, ep_size)
        given = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        del given["capacity_factor"]
        spec = GroupSpec(
            **given
            | {name: int(given[name]) for name in _WHOLE}
            | {
                "mesh_axes": tuple((str(axis), int(size)) for axis, size in mesh_axes),
                "ep_axis": ep_axis,
                "outer_axes": outer_axes,
                "recv_capacity_per_rank": capacity,
                "op_timeout_s": float(self.op_timeout_s),
                "retain_s": float(self.retain_s),
                "num_sms": int(self.num_sms or 0),
                "workspace": workspaces.check_setting(self.workspace),
                "spare_experts": int(spare),
            }
        )
        if not auto:
            return spec
        from ep_runtime import device_layout

        return dataclasses.replace(spec, spare_experts=device_layout.auto_spare(spec))

    def _check(
        self,
        mesh_axes: tuple[tuple[str, int], ...],
        ep_axis: tuple[str, ...],
        outer_axes: tuple[str, ...],
    ) -> None:
        check_name("group", self.name)
        check_axis_count(max(len(mesh_axes), len(ep_axis), len(outer_axes)))
        for axis, _ in mesh_axes:
            check_name("mesh axis", str(axis))
        _check_axes(mesh_axes, ep_axis, outer_axes)
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                raise InvalidArgumentError(
                    f"{name} must be one of {choices}, got {value!r}", argument=name
                )
        for name in ("hidden_size", "max_tokens_per_rank", "max_top_k", "lanes"):
            check_whole(name, getattr(self, name))
        if self.combine_precision == "fp8":
            _check_fp8_sums(self.hidden_size, self.max_token_dtype)
        if self.num_sms is not None:
            check_whole("num_sms", self.num_sms, 0)
        check_at_least("retain_s", self.retain_s, 0)
        op_timeout_s = self.op_timeout_s
        check_at_least("op_timeout_s", op_timeout_s, 0)
        if op_timeout_s == 0:
            raise InvalidArgumentError(
                f"op_timeout_s must be positive, got {op_timeout_s}", argument="op_timeout_s"
            )
        if self.num_sms and not 2 <= self.num_sms <= MAX_SMS:  # 0 stands for None
            raise InvalidArgumentError(
                f"num_sms must be None or 2 to {MAX_SMS}, got {self.num_sms}", argument="num_sms"
            )
        if self.recv_capacity_per_rank is not None and self.capacity_factor is not None:
            raise InvalidArgumentError(
                f"give recv_capacity_per_rank={self.recv_capacity_per_rank} or "
                f"capacity_factor={self.capacity_factor}, not both",
                argument="capacity_factor",
            )
        if not isinstance(self.overlap, bool):
            raise InvalidArgumentError(
                f"overlap must be True or False, got {self.overlap!r}", argument="overlap"
            )

    def _capacity(self, ep_size: int) -> int:
        computed = layout.recv_capacity(
            num_experts=self.num_experts,
            top_k=self.max_top_k,
            max_tokens_per_rank=self.max_tokens_per_rank,
            ep_size=ep_size,
            alignment=self.alignment,
            capacity_factor=self.capacity_factor,
        )
        if self.recv_capacity_per_rank is None:
            return int(computed)
        check_whole("recv_capacity_per_rank", self.recv_capacity_per_rank)
        check_holds_rows("recv_capacity_per_rank", self.recv_capacity_per_rank, self.alignment)
        return int(self.recv_capacity_per_rank)


def _axes_of(axes: str | tuple[str, ...]) -> tuple[str, ...]:
    return (axes,) if isinstance(axes, str) else tuple(axes)


def make_group_spec(*, mesh_axes: tuple[tuple[str, int], ...], **settings: Any) -> GroupSpec:
    """Makes the GroupSpec of these settings on a mesh.

    Raises:
        InvalidArgumentError: an argument is wrong; the message has its wanted and given value.
    """
    return GroupSettings(**settings).on(mesh_axes)
