"""A process's session with one daemon, and the groups made in it. `connect.py` makes it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from ep_runtime import specs
from ep_runtime.allowed_names import check_name
from ep_runtime.arguments import suggests
from ep_runtime_client.base import meshes
from ep_runtime_client.groups import make_group
from ep_runtime_client.groups.group import Group
from ep_runtime_client.sessions import open_session

if TYPE_CHECKING:
    from types import TracebackType

    from jax.sharding import Mesh

    from ep_runtime_client.modules.sharding import Rules


class Session:
    """The connection of this process to one daemon, as returned by `connect`.

    Thread-safe.

    Attributes:
        job: namespace of the session's groups.
        timeout_s: longest time that a call waits for other processes.
    """

    def __init__(self, opened: open_session.OpenSession) -> None:
        self.job = opened.client.job
        self.timeout_s = opened.client.timeout_s
        self._open = opened
        self._client = opened.client

    @property
    def session_id(self) -> str:
        """Name of this session in `ep-runtime sessions`; "" without a daemon."""
        return self._client.session_id

    @property
    def address(self) -> str:
        """Address of the daemon, as `connect` accepts it; "none" without a daemon."""
        return self._client.address

    @property
    def alive(self) -> bool:
        """Whether calls to the daemon may still succeed."""
        return self._client.alive

    @property
    def daemon_pid(self) -> int | None:
        """Process id of the daemon that this process started, or None."""
        return self._client.daemon_pid

    @suggests()
    def create_group(
        self,
        name: str,
        mesh: Mesh,
        *,
        rules: Rules | None = None,
        ep_axis: str | tuple[str, ...] | None = None,
        outer_axes: str | tuple[str, ...] = (),
        num_experts: int,
        hidden_size: int,
        max_tokens_per_rank: int,
        recv_capacity_per_rank: int | None = None,
        capacity_factor: float | None = None,
        max_top_k: int = 8,
        max_token_dtype: Any = "bfloat16",
        alignment: int = 128,
        lanes: int = 2,
        on_overflow: Literal["drop", "error"] = "drop",
        combine_precision: Literal["fast", "exact", "fp8"] = "fast",
        transport: Literal["auto", "memfd", "nvlink", "nccl", "xla"] = "auto",
        partitioning: Literal["auto", "rule", "shard_map"] = "auto",
        op_timeout_s: float = 600.0,
        retain_s: float = 60.0,
        num_sms: int | None = None,
        workspace: Literal["auto"] | float | int = "auto",
        overlap: bool = True,
        spare_experts: Literal["auto"] | int = "auto",
        replace: bool = False,
    ) -> Group:
        """Creates an expert-parallel group on a mesh, and the memory of its exchanges.

        Every process of the mesh calls it. The same name and settings again return the same group.

        Args:
            name: unique among the groups of the user and job.
            mesh: the group's devices.
            rules: `ep.sharding.rules(...)`, instead of the two axes.
            ep_axis: the axis, or axes, that shard the experts.
            outer_axes: further axes that shard tokens; others replicate them.
            num_experts: E, a multiple of the ep axis's size.
            hidden_size: H.
            max_tokens_per_rank: most tokens of one rank in a call.
            recv_capacity_per_rank: C, rows of one slab; None never drops.
            capacity_factor: C in even shares instead, at least 1.0.
            max_top_k: largest K of a layer.
            max_token_dtype: widest dtype of tokens.
            alignment: pads each expert's rows in a slab to a multiple.
            lanes: calls that may move rows at once.
            on_overflow: "drop" rows over C, or "error": fail the step.
            combine_precision: dtype of sums sent back: "fast" (the tokens'), "exact" (fp32) or
                "fp8" (docs/matmuls.md).
            transport: how rows move (docs/gpus.md).
            partitioning: how ops are placed on the mesh (docs/weights.md).
            op_timeout_s: how long a call waits for living peers.
            retain_s: how long windows outlive the last process.
            num_sms: SMs for exchanges, 2 to 256; None is the fastest.
            workspace: room for a block call's rows (docs/memory.md).
            overlap: block calls overlap exchanges with matmuls.
            spare_experts: slots for copies of experts; "auto" as in docs/capacity.md.
            replace: replace a group that has other settings.

        Returns:
            The Group.

        Raises:
            InvalidArgumentError: an argument is wrong.
            SpecMismatchError: the name has other settings.
            GroupBusyError: a living process holds a rank.
            GroupNotReadyError: processes are missing after the session's timeout.
            PoolExhaustedError: the daemon's memory limit is reached.
            NotImplementedError: the devices do not support the transport.

        Cost: one RPC, and `Group.staging_bytes_per_rank` bytes per rank; nothing in a step.

        Source: GShard (arXiv:2006.16668), Switch Transformers (arXiv:2101.03961).

        Examples:
            >>> mesh = Mesh(np.array(jax.devices("cpu")).reshape(2, 4), ("fsdp", "ep"))
            >>> group = session.create_group(
            ...     "moe",
            ...     mesh,
            ...     ep_axis="ep",
            ...     outer_axes=("fsdp",),
            ...     num_experts=8,
            ...     hidden_size=32,
            ...     max_tokens_per_rank=8,
            ...     max_top_k=2,
            ...     max_token_dtype="float32",
            ...     alignment=8,
            ... )
            >>> group.spec.num_slabs, group.spec.experts_per_rank, group.capacity_per_rank
            (8, 2, 64)
        """
        ep_axis, outer_axes = meshes.group_axes(mesh, rules, ep_axis, outer_axes)
        settings = specs.GroupSettings(
            name=name,
            ep_axis=ep_axis,
            outer_axes=outer_axes,
            num_experts=num_experts,
            hidden_size=hidden_size,
            max_tokens_per_rank=max_tokens_per_rank,
            recv_capacity_per_rank=recv_capacity_per_rank,
            capacity_factor=capacity_factor,
            max_top_k=max_top_k,
            max_token_dtype=max_token_dtype,
            alignment=alignment,
            lanes=lanes,
            on_overflow=on_overflow,
            combine_precision=combine_precision,
            transport=self._open.transport_of(name, transport),
            partitioning=partitioning,
            op_timeout_s=op_timeout_s,
            retain_s=retain_s,
            num_sms=num_sms,
            workspace=workspace,
            overlap=overlap,
            spare_experts=spare_experts,
        )
        spec = make_group.resolve(self._client, mesh, settings)
        return self._open.create(spec, mesh, replace=replace).group

    def group(self, name: str, *, mesh: Mesh | None = None) -> Group:
        """Returns a group by name: one of this process, or one that the daemon keeps for the job.

        Args:
            name: as in create_group.
            mesh: its mesh; None arranges `jax.devices()` in order along the group's axes.

        Returns:
            The Group, with the layers that the daemon knows.

        Raises:
            StaleHandleError: the daemon knows no such group.
            GroupBusyError: a living process holds its ranks.
            InvalidArgumentError: the mesh, or the devices of this process, do not fit the group.

        Cost: none for a group of this process; else as create_group, without a new allocation.
        """
        check_name("group", name)
        return self._open.find(name, mesh).group

    def close(self) -> None:
        """Undoes one `connect()`; undoing the last one frees the session's groups and windows.

        Later calls do nothing, and neither do calls under tracing, where `connect()` does not count
        either.

        Cost: as `Group.close` for each group that is open, and one RPC.
        """
        if self._client.is_ours and open_session.sessions.release(self._open):
            self._open.end()

    def describe(self) -> dict[str, Any]:
        """Returns the address, job and groups of the session as plain values.

        Cost: none; no RPC.
        """
        about = {"address": self.address, "job": self.job, "session_id": self.session_id}
        groups = sorted(group.name for group in self._open.groups())
        return {**about, "pid": self._client.pid, "groups": groups}

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Ends this `connect()` as `close` does; after an error windows are kept for retain_s."""
        done = error is None or (isinstance(error, SystemExit) and error.code in (None, 0))
        if self._client.is_ours and open_session.sessions.release(self._open):
            self._open.end(failed=not done)

    def __repr__(self) -> str:
        return f"<Session {self.address} job={self.job!r}>"
