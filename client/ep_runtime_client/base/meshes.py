"""Reads axes, world ranks, processes and transport of a group from a JAX mesh."""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ep_runtime import native, nccl, specs
from ep_runtime.errors import EpRuntimeError, InvalidArgumentError, RuntimeUnavailableError

if TYPE_CHECKING:
    from jax.sharding import Mesh

_log = logging.getLogger("ep_runtime")

Axes = tuple[str, ...]


def axes_of(mesh: Any) -> tuple[tuple[str, int], ...]:
    """Returns (axis, size) of every axis of a mesh or AbstractMesh, in mesh order.

    Raises:
        InvalidArgumentError: `mesh` is not a mesh, or has no axis.
    """
    names, shape = getattr(mesh, "axis_names", None), getattr(mesh, "shape", None)
    if names is None or shape is None:
        raise InvalidArgumentError(
            f"mesh must be a jax.sharding.Mesh, got {type(mesh).__name__}", argument="mesh"
        )
    if not names:
        raise InvalidArgumentError("mesh must have at least one axis, got none", argument="mesh")
    return tuple((str(name), int(shape[name])) for name in names)


def group_axes(
    mesh: Any, rules: Any, ep_axis: str | Axes | None, outer_axes: str | Axes
) -> tuple[str | Axes, str | Axes]:
    """Returns (ep_axis, outer_axes) of a group: the caller's, or the axes in `rules`.

    Raises:
        InvalidArgumentError: both are given, or neither, or `rules` is something else.
    """
    if rules is None:
        if ep_axis is None:
            raise InvalidArgumentError(
                "give ep_axis, or rules= of ep.sharding, got neither", argument="ep_axis"
            )
        return ep_axis, outer_axes
    for name, given in (("ep_axis", ep_axis), ("outer_axes", outer_axes)):
        if given is not None and given != ():
            raise InvalidArgumentError(
                f"rules say which axes shard experts and tokens: give rules or {name}, not both, "
                f"got {name}={given!r}",
                argument=name,
            )
    if not hasattr(rules, "group_axes"):
        raise InvalidArgumentError(
            f"rules must be ep.sharding.Rules, got {type(rules).__name__}", argument="rules"
        )
    axes_of(mesh)
    found = rules.group_axes(mesh)
    return found["ep_axis"], found["outer_axes"]


def devices_of(mesh: Any) -> Any:
    """Returns the numpy array of a concrete mesh's devices.

    Raises:
        InvalidArgumentError: the mesh has no devices (an AbstractMesh).
    """
    from jax.sharding import Mesh

    if not isinstance(mesh, Mesh):
        raise InvalidArgumentError(
            f"mesh must be a jax.sharding.Mesh with devices, got {type(mesh).__name__}",
            argument="mesh",
        )
    return mesh.devices


def rank_devices(mesh: Mesh, spec: specs.GroupSpec) -> list[Any]:
    """Returns the mesh's devices in world-rank order: domain major, ep rank minor."""
    order = [mesh.axis_names.index(axis) for axis in spec.domain_axes + spec.ep_axis]
    return list(devices_of(mesh).transpose(order).ravel())


def processes_of(mesh: Mesh) -> list[int]:
    """Returns the indices of the processes that drive the mesh's devices, ascending."""
    return sorted({int(device.process_index) for device in devices_of(mesh).ravel()})


def resolve_transport(
    transport: str,
    mesh: Any,
    *,
    has_daemon: bool,
    in_cluster: Callable[[], bool] = lambda: False,
) -> str:
    """Returns the transport of a group on this mesh; never "auto".

    Args:
        transport: as in create_group.
        mesh: a concrete mesh.
        has_daemon: whether the session has a daemon.
        in_cluster: asks the daemon whether it forms groups with daemons of other nodes.

    Raises:
        InvalidArgumentError: an unknown name, or one that needs a daemon if there is none.
        RuntimeUnavailableError: "nvlink" or "nccl", but the package was built without CUDA or has
            no kernels for the mesh's GPUs; "nccl", but the process finds no libnccl.
        NotImplementedError: this version has no such transport for the mesh's devices.
    """
    choices = ("auto", *specs.TRANSPORTS)
    if transport not in choices:
        raise InvalidArgumentError(
            f"transport must be one of {choices}, got {transport!r}", argument="transport"
        )
    platforms = sorted({device.platform for device in devices_of(mesh).ravel()})
    if transport in ("auto", "xla") and _without_kernels(platforms):
        return "xla"
    if transport == "xla":
        return transport
    if not has_daemon:
        if transport == "auto":
            return "xla"
        raise InvalidArgumentError(
            f"transport={transport!r} needs windows of a daemon, and this session was made with "
            'address="none"; use transport="xla" or another address',
            argument="transport",
        )
    if transport == "auto":
        return _chosen(mesh, platforms, in_cluster)
    if transport == "memfd" and platforms != ["cpu"]:
        raise InvalidArgumentError(
            f'transport="memfd" needs a mesh of CPU devices, got {platforms}',
            argument="transport",
        )
    if transport == "memfd":
        return transport
    if platforms == ["gpu"]:
        native.library("cuda")  # raises, with advice how to build it, if it is missing
        if no_kernels := _no_kernels(devices_of(mesh).ravel()):
            raise RuntimeUnavailableError(
                f'transport={transport!r}: {no_kernels}; transport="xla" serves every device'
            )
        if transport == "nccl":
            nccl.library().version()  # checks that this package can use the libnccl
        return transport
    raise NotImplementedError(
        f"transport={transport!r} on {platforms} devices is not supported; "
        'transport="memfd" serves CPU devices, "nvlink" and "nccl" NVIDIA GPUs, "xla" every device'
    )


def _without_kernels(platforms: list[str]) -> bool:
    """Whether the devices are GPUs but the package was built without CUDA; warns once."""
    if platforms != ["gpu"] or native.library_path("cuda").exists():
        return False
    _say(
        logging.WARNING,
        "this package was built without CUDA: on GPUs rows travel over XLA's collectives and "
        f"every op is plain JAX; install it with `{native.BUILD_CUDA}`",
    )
    return True


def _chosen(mesh: Any, platforms: list[str], in_cluster: Callable[[], bool]) -> str:
    """Resolves transport "auto" with a daemon: windows if they can be mapped, else NCCL, else
    "xla"."""
    if platforms == ["cpu"]:
        return "memfd"
    devices = devices_of(mesh).ravel()
    no_windows = _no_windows(devices, platforms)
    if not no_windows:
        return "nvlink"
    no_nccl = _no_nccl(devices, platforms, in_cluster)
    if not no_nccl:
        _say(logging.INFO, f'rows travel over NCCL (transport="nccl"): {no_windows}')
        return "nccl"
    why = no_windows if no_nccl == no_windows else f"{no_windows}; {no_nccl}"
    _say(logging.WARNING, f'rows travel over XLA\'s collectives (transport="xla"): {why}')
    return "xla"


def _no_nccl(devices: Any, platforms: list[str], in_cluster: Callable[[], bool]) -> str:
    """Returns why no communicators can be made for the devices; "" if they can."""
    if why := _no_library(devices, platforms):
        return why
    if _spans_hosts(devices) and not in_cluster():
        return "this node's daemon is in no cluster (ep-runtime serve --coordinator or --join)"
    try:
        nccl.library().version()
    except EpRuntimeError as error:
        return str(error)
    return ""


def _spans_hosts(devices: Any) -> bool:
    # XLA gives all processes of one host, or of one NVLink domain, the same index.
    return len({getattr(device, "slice_index", 0) for device in devices}) > 1


def _no_windows(devices: Any, platforms: list[str]) -> str:
    """Returns why the devices cannot map each other's memory; "" if they can.

    Every process of a job must get the same answer, so all checks are about the whole host.
    """
    if why := _no_library(devices, platforms):
        return why
    if _spans_hosts(devices):
        return "the mesh spans hosts, whose GPUs do not reach each other's memory"
    import jax

    library, here = native.library("cuda"), jax.process_index()
    ours = [device.local_hardware_id for device in devices if device.process_index == here]
    for device, peer in itertools.permutations(ours, 2):
        if not library.reaches(device, peer):
            return f"GPU {device} does not reach the memory of GPU {peer}"
    return ""


def _no_library(devices: Any, platforms: list[str]) -> str:
    """Returns why the package cannot move rows between the devices itself; "" if it can."""
    if platforms != ["gpu"]:
        return f"no windows are made for {platforms} devices"
    return _no_kernels(devices)


def _no_kernels(devices: Any) -> str:
    """Names the GPUs that this package has no kernels for; "" if it has kernels for all."""
    library = native.library("cuda")
    other = sorted(
        kind
        for kind in {(device.compute_capability, device.device_kind) for device in devices}
        if not library.has_kernels_for(kind[0])
    )
    if not other:
        return ""
    found = ", ".join(f"{name} ({capability})" for capability, name in other)
    built = ", ".join(f"sm_{name}" for name in library.architectures)
    return f"this package's kernels are for {built}, and not for {found}"


@functools.cache
def _say(level: int, text: str) -> None:
    _log.log(level, text)
