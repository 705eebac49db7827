"""A process's session with one daemon, and the groups made in it. Made by `connecting.py`."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from ep_runtime import env, specs
from ep_runtime.allowed_names import check_name, check_new_name
from ep_runtime.arguments import suggests
from ep_runtime.errors import (
    EpRuntimeError,
    InvalidArgumentError,
    PermissionDeniedError,
    RuntimeUnavailableError,
)
from ep_runtime.v1 import group_service_pb2, session_service_pb2
from ep_runtime_client.base import jax_state, meshes
from ep_runtime_client.daemons import runtime as runtimes
from ep_runtime_client.daemons import transport
from ep_runtime_client.daemons.link import Callbacks, Link
from ep_runtime_client.daemons.place import Place
from ep_runtime_client.groups import attach
from ep_runtime_client.groups.group import Group
from ep_runtime_client.sessions import registry
from ep_runtime_client.sessions.open_groups import OpenGroups
from ep_runtime_client.sessions.watchdog import Watchdog

if TYPE_CHECKING:
    from types import TracebackType

    from jax.sharding import Mesh

    from ep_runtime_client.modules.sharding import Rules

_log = logging.getLogger("ep_runtime")

_Result = TypeVar("_Result")


def job_name(given: str | None) -> str:
    """The job that `connect(job=given)` means.

    Raises:
        InvalidArgumentError: no job may be called so.
    """
    own = str(os.getpid())
    name = given if given is not None else env.job() or jax_state.coordinator() or own
    check_new_name("job", name)
    return name


def _no_daemon() -> InvalidArgumentError:
    return InvalidArgumentError(
        'this session was made with address="none" and has no daemon', argument="address"
    )


class Session:
    """The connection of this process to one daemon, as returned by `connect`.

    Thread-safe.

    Attributes:
        job: namespace of the session's groups.
        timeout_s: how long calls that wait for others wait.
    """

    def __init__(
        self,
        runtime: runtimes.ReachedRuntime,
        job: str | None,
        labels: dict[str, str],
        timeout_s: float,
        watchdog: Watchdog,
    ) -> None:
        self.job = job_name(job)
        self._job_is_ours_alone = job is None and self.job == str(os.getpid())
        self.timeout_s = timeout_s
        self._runtime = runtime
        self._watchdog = watchdog
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._groups = OpenGroups(self, watchdog)
        self._ended: EpRuntimeError | None = None
        self._closed = False
        self._link: Link | None = None
        if runtime.has_daemon:
            try:
                request = session_service_pb2.OpenSessionRequest(
                    job=self.job, labels=labels, process_index=jax_state.process_index()
                )
                restored, changed = self._groups.restore, self._groups.changed
                self._link = Link(runtime, Callbacks(request, restored, self._end, changed))
                self._link.connect(timeout_s)
            except BaseException:
                self._shut()
                raise

    @property
    def session_id(self) -> str:
        """Name of this session in `ep-runtime sessions`; "" without a daemon."""
        return self._link.session_id if self._link is not None else ""

    @property
    def token(self) -> str:
        """The session's secret; "" without a daemon."""
        return self._link.token if self._link is not None else ""

    @property
    def address(self) -> str:
        """Address of the daemon, as `connect` accepts it; "none" without a daemon."""
        place = self._runtime.place
        return place.address if place is not None else runtimes.NONE

    @property
    def place(self) -> Place:
        """Where the daemon is."""
        if self._runtime.place is None:
            raise _no_daemon()
        return self._runtime.place

    @property
    def directory(self) -> Path:
        """The daemon's socket directory."""
        return self.place.directory

    @property
    def has_daemon(self) -> bool:
        return self._runtime.has_daemon

    @property
    def is_ours(self) -> bool:
        """False in a forked child of the process that connected."""
        return os.getpid() == self._pid

    @property
    def alone(self) -> str:
        """What of this session no other process can have; "" where groups may span several."""
        if self.has_daemon and self._runtime.is_private:
            return f"a private daemon of its own (this one's is at {self.address})"
        if self.has_daemon and self._job_is_ours_alone:
            return f"a job of its own (this one's is {self.job!r}, its pid)"
        return ""

    @property
    def alive(self) -> bool:
        """Whether calls to the daemon may still succeed."""
        return self.is_ours and self._ended is None

    @property
    def daemon_pid(self) -> int | None:
        """Process id of the daemon that this process started, or None."""
        return self._runtime.child.pid if self._runtime.child is not None else None

    @property
    def link(self) -> Link:
        """The connection. Raises where the session is over, forked or has no daemon."""
        self.require_alive()
        if self._link is None:
            raise _no_daemon()
        return self._link

    @property
    def control(self) -> transport.ControlChannel:
        """The daemon's RPCs; waits up to `timeout_s` while the daemon is away. Raises as `link`."""
        return self.link.control(self.timeout_s)

    def run(self, work: Callable[[transport.ControlChannel], _Result]) -> _Result:
        """`work` with the daemon's RPCs; again from its start where the daemon was restarted."""
        return self.link.run(work, self.timeout_s)

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
        replace: bool = False,
    ) -> Group:
        """Creates an expert-parallel group on a mesh, with the memory that its tokens move through.

        Every process of the mesh calls it. The same name and settings again return the same group,
        under tracing too; transport="auto" then means the transport that the group has.

        Args:
            name: unique among the groups of the user and job; letters, digits and . _ / : @ + -.
            mesh: the devices. The ranks of one EP group differ in their `ep_axis` coordinate only.
            rules: `ep.sharding.rules(...)`, in the place of ep_axis and outer_axes: their axes on
                the mesh are the group's.
            ep_axis: the axis, or axes, that shard the experts. Give it or rules.
            outer_axes: further axes that shard tokens; all other axes replicate them.
            num_experts: E of one EP group, a multiple of the ep axis's size.
            hidden_size: H.
            max_tokens_per_rank: most tokens of one rank in a call.
            recv_capacity_per_rank: C, rows of one slab; None is the worst case, without drops.
            capacity_factor: C as a multiple of the balanced load instead, at least 1.0.
            max_top_k: largest K of a layer.
            max_token_dtype: widest dtype of a token, by name or as `jnp.bfloat16`.
            alignment: the rows of each expert in a slab are padded to a multiple of this number.
                Drops follow it everywhere; a block call writes no padding.
            lanes: number of calls of the group that may move rows at once.
            on_overflow: "drop" rows over C, or "error": fail the step.
            combine_precision: dtype of the sums that ranks send back in combine, and in the
                gradient of dispatch. It is "fast" (the token dtype), "exact" (fp32) or "fp8" (e4m3
                with an f32 scale per 128 values). For the error of "fp8" see docs/matmuls.md.
            transport: how rows move. "auto" is "memfd" on CPU and "nvlink" on GPUs that map each
                other's memory. On other GPUs it is "nccl" if libnccl is installed, else "xla".
                Over several nodes "nccl" also needs a cluster of daemons.
            partitioning: how ops are partitioned: "shard_map" wraps each op in one, "rule" asks
                XLA's partitioner for the sharding of weights, "auto" asks it if nothing else says.
            op_timeout_s: how long a call waits for peers that live but do not arrive.
            retain_s: how long windows outlive the last process; 0 with a private daemon.
            num_sms: SMs of a GPU that dispatch and combine use, 2 to 256; None is the fastest.
            workspace: memory for the experts' rows while a block call runs: a float is a multiple
                of the rows of an even routing, an int is bytes, "auto" is 1.5. If a rank has more
                rows the call runs in chunks, which costs time and drops nothing (docs/memory.md).
            overlap: on GPUs a block call overlaps exchanges with matmuls that do not need them;
                results are the same bits either way.
            replace: replace a group of that name that has other settings. One with the same
                settings stays, and so do its layers.

        Returns:
            The Group; layers are registered in it.

        Raises:
            InvalidArgumentError: an argument is wrong.
            SpecMismatchError: the name has other settings here, or in another process.
            GroupBusyError: a living process holds a rank.
            GroupNotReadyError: processes are missing after the session's timeout.
            PoolExhaustedError: the daemon's memory limit is reached.
            NotImplementedError: the transport is not part of this version.

        Cost: one RPC, and `Group.staging_bytes_per_rank` bytes per rank, allocated and mapped once.
        "auto" in several processes adds one exchange. Nothing in a step.

        Source: expert and data parallelism are GShard's (arXiv:2006.16668); capacity_factor is
        GShard's and Switch Transformers' (arXiv:2101.03961).

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
            transport=self._groups.transport_of(name, transport),
            partitioning=partitioning,
            op_timeout_s=op_timeout_s,
            retain_s=retain_s,
            num_sms=num_sms,
            workspace=workspace,
            overlap=overlap,
        )
        spec = attach.resolve(self, mesh, settings)
        if self._runtime.is_private:
            spec = attach.without_retention(spec)
        return self._groups.create(spec, mesh, replace=replace)

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
        return self._groups.find(name, mesh)

    def forget_group(self, group: Group) -> None:
        """Called by a group that closes."""
        self._groups.forget(group)

    def require_alive(self) -> None:
        """Raises where the session was closed, fenced or inherited through fork."""
        if not self.is_ours:
            raise PermissionDeniedError(
                f"this session belongs to pid {self._pid}; pid {os.getpid()} was forked from it "
                "and must call ep.connect() itself",
                pid=os.getpid(),
                owner_pid=self._pid,
            )
        if self._ended is not None:
            self._ended.raise_again()

    def say_left(self, name: str, generation: int) -> None:
        """Tells the daemon, now or once it is back, that this process unmapped a group."""
        if self._link is not None and self.alive:
            self._link.say_left(
                group_service_pb2.CloseGroupRequest(name=name, generation=generation)
            )

    def _end(self, error: EpRuntimeError) -> None:
        """The daemon ended the session."""
        self._ended = self._ended or error
        _log.error("%s: %s", type(error).__name__, error)
        self._groups.session_ended()

    def close(self) -> None:
        """Undoes one `connect()`; undoing the last one frees the session's groups and windows.

        Later calls do nothing. Under tracing it does nothing either, as `connect()` is not counted
        there.

        Cost: as `Group.close` for each group that is open, and one RPC.
        """
        if self.is_ours and registry.sessions.release(self):
            self.end()

    def end(self, *, failed: bool = False) -> None:
        """Ends the session, however many `connect()` calls share it.

        Args:
            failed: False frees everything at once; True, after an error, leaves the windows to
                the job's next start, for retain_s.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
        for group in self._groups.all():
            group.abandon() if failed else group.close()
        if not failed:
            self._watchdog.closed()
        if self._link is not None and self.alive:
            self._link.say_goodbye(failed=failed)
        self._shut()

    def _shut(self) -> None:
        """Stops threads, channel and a private daemon; tells the daemon nothing."""
        self._ended = RuntimeUnavailableError(
            f"the session with {self.address} was closed", address=self.address
        )
        if self._link is not None:
            self._link.stop()
        self._runtime.stop()

    def at_exit(self) -> None:
        """The interpreter ends: no goodbye, so that retained windows wait for the next start."""
        if self.is_ours and not self._closed:
            self._closed = True
            for group in self._groups.all():
                if group.native_group is not None:
                    group.native_group.stop_making()
            self._shut()

    def describe(self) -> dict[str, Any]:
        """Returns the address, job and groups of the session as plain values.

        Cost: none; no RPC.
        """
        about = {"address": self.address, "job": self.job, "session_id": self.session_id}
        return {**about, "pid": self._pid, "groups": sorted(g.name for g in self._groups.all())}

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
        if self.is_ours and registry.sessions.release(self):
            self.end(failed=not done)

    def __dir__(self) -> list[str]:
        """What is for users; the rest is for this package."""
        return sorted(_PUBLIC)

    def __repr__(self) -> str:
        return f"<Session {self.address} job={self.job!r}>"


_PUBLIC = (
    *("job", "timeout_s", "address", "session_id", "daemon_pid", "alive"),
    *("create_group", "group", "describe", "close"),
)
