"""The only module that uses JAX's private names, each behind a function.

Any release of JAX may change these names. `unsupported_reason` names the first difference that this
JAX has: ops then use a shard_map in place of a partitioning rule, and everything else works as
before. Only that check and ops import JAX: a process without JAX traces nothing, has started no
backend and is alone.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import re
import struct
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

# Names used from jax._src, with the number of arguments of the call; None for a value.
_PRIVATE = {
    "core:trace_state_clean": 0,
    "distributed:global_state.client": None,
    "distributed:global_state.coordinator_address": None,
    "distributed:global_state.num_processes": None,
    "distributed:global_state.process_id": None,
    "xla_bridge:backends_are_initialized": 0,
    "xla_bridge:register_plugin_callbacks": 1,
    "config:config._value_holders": None,
    "config:config_ext.unset": None,
    "config:eager_constant_folding.value": None,
    "interpreters.mlir:LoweringParameters.for_export": None,
    "custom_partitioning:_CUSTOM_PARTITIONING_CALL_NAME": None,
    "custom_partitioning:_custom_partitioning_lowering_rule": 2,
    "custom_partitioning:_custom_partitioning_partition": 5,
    "custom_partitioning:_sharding_callbacks.get": 1,
}
# Names in jaxlib with which a job continues after a process died, and the arguments that their
# signatures must have. They are the same in 0.10, 0.11 and 0.12.
_JAXLIB = {
    "get_distributed_runtime_service": ("num_nodes", "heartbeat_timeout", "recoverable"),
    "DistributedRuntimeClient.get_live_nodes": (),
}
# The coordination service's call by which a process reports that it leaves.
_SHUTDOWN_TASK = "/xla.coordination.CoordinationService/ShutdownTask"
# The service's call that answers when the state of any process has changed. A live process has the
# state _CONNECTED. A process that sends no heartbeats has the state _DROPPED. Both numbers are the
# same in JAX 0.10 to 0.12.
_WATCH_TASKS = "/xla.coordination.CoordinationService/WatchTasks"
_CONNECTED, _DROPPED = 3, 4
# Keys of XLA in the coordination service.
_TOPOLOGY = "{0}:global_topology/{0}"
_GLOO = "cpu:gloo/"
_TOPOLOGY_MS = 60_000
_PLATFORMS = ("cpu", "gpu", "cuda", "rocm")
CONSEQUENCE = (
    "ops run as a shard_map in place of a partitioning rule, for which a weight is gathered over "
    "all axes but the ep axes unless rhs_spec= or params_spec= says how it lies"
)
_NOTHING = object()
_found_later: list[str] = []  # gaps that only a lowering shows


def _at(path: str, default: Any = None) -> Any:
    """Looks up MODULE:NAME of jax._src; `default` if JAX is not imported or has no such name."""
    module, _, names = path.partition(":")
    found = sys.modules.get(f"jax._src.{module}", _NOTHING)
    for name in names.split("."):
        found = getattr(found, name, _NOTHING)
    return default if found is _NOTHING else found


def unsupported_reason() -> str | None:
    """Names a difference of this JAX that ops cannot work with; None if there is none.

    Imports JAX, and takes less than 1 ms.
    """
    return _first_finding() or next(iter(_found_later), None)


def remedy() -> str:
    """Returns the command that installs a JAX for which `unsupported_reason` is None."""
    import importlib.metadata  # a top-level import would cost the command line 20 ms

    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        for needed in importlib.metadata.requires("ep-runtime") or ():
            if re.match("jax[<>=]", needed):
                return f"pip install '{needed}'"
    return "install a release of JAX that this version of ep-runtime supports"


def fallback() -> str:
    """Returns `unsupported_reason` with its consequence and the remedy; empty if there is none."""
    reason = unsupported_reason()
    return "" if reason is None else f"{reason}: {CONSEQUENCE}; {remedy()}"


def _named(what: str) -> str:
    return f"JAX {getattr(sys.modules.get('jax'), '__version__', '(none)')} {what}"


@functools.cache
def _first_finding() -> str | None:
    return next(map(_named, _differences()), None)


def _differences() -> Iterator[str]:
    for path, arguments in _PRIVATE.items():
        module, _, names = path.partition(":")
        with contextlib.suppress(ImportError):
            importlib.import_module(f"jax._src.{module}")
        there = _at(path, _NOTHING)
        if there is _NOTHING:
            yield f"has no jax._src.{module}.{names}"
        elif arguments is not None and not _takes(there, arguments):
            yield f"does not take {arguments} arguments at jax._src.{module}.{names}"
    import jax

    with jax.numpy_rank_promotion("raise"):
        if contexts().get("jax_numpy_rank_promotion") != "raise":
            yield "does not list contexts in jax._src.config"


def _takes(function: Callable[..., Any], arguments: int) -> bool:
    """Whether a function can be called with this number of positional arguments."""
    try:
        signature = inspect.signature(function)
        given = [x for x in signature.parameters.values() if x.kind is not x.KEYWORD_ONLY]
        signature.replace(parameters=given).bind(*range(arguments))
    except (TypeError, ValueError):
        return False
    return True


def under_tracing() -> bool:
    """Returns whether the caller is inside jit, grad, shard_map or the like."""
    clean = _at("core:trace_state_clean")
    return clean is not None and not clean()


def distributed() -> Any:
    """Returns jax.distributed's client, coordinator_address, num_processes, process_id; or None.

    Raises:
        NotImplementedError: it is initialized, but this JAX keeps it under another name.
    """
    state = _at("distributed:global_state")
    public = sys.modules.get("jax.distributed")
    if state is None and public is not None and public.is_initialized():
        raise NotImplementedError(f"{unsupported_reason()}; {remedy()}")
    return state


def recoverability_reason() -> str | None:
    """Names what this jaxlib lacks for jobs that continue after a death; None if it lacks nothing.

    Imports only jaxlib.
    """
    version = importlib.import_module("jaxlib").__version__
    for path, wanted in _JAXLIB.items():
        found: Any = importlib.import_module("jaxlib._jax")
        for name in path.split("."):
            found = getattr(found, name, None)
        said = getattr(found, "__doc__", None) or ""
        missing = [argument for argument in wanted if f"{argument}:" not in said]
        if found is None or missing:
            lacks = f" with {missing[0]}=" if missing else ""
            return f"jaxlib {version} has no jaxlib._jax.{path}{lacks}"
    return None


def start_coordination(bind: str, processes: int, heartbeat_timeout_s: int) -> Any:
    """Starts JAX's coordination service for processes that may die; its `shutdown()` ends it.

    Raises:
        NotImplementedError: this jaxlib has another interface.
    """
    reason = recoverability_reason()
    if reason is not None:
        raise NotImplementedError(f"{reason}; {remedy()}")
    return importlib.import_module("jaxlib._jax").get_distributed_runtime_service(
        bind, processes, heartbeat_timeout=heartbeat_timeout_s, recoverable=True
    )


def report_death(address: str, process: int, timeout_s: float) -> None:
    """Tells the coordination service that a process has left, on behalf of that process.

    Otherwise the service waits for heartbeats that do not come. If the process still lives, its own
    JAX ends it at its next heartbeat.

    Raises:
        RuntimeError: the service answers with an error. Missing heartbeats then reveal the death.
    """
    import grpc

    leaving = b"\x10" + _varint(process)  # ShutdownTaskRequest.source_task_id
    with grpc.insecure_channel(address) as channel:
        _ask(channel.unary_unary(_SHUTDOWN_TASK), leaving, timeout_s)


def watch_departures(address: str) -> Iterator[dict[int, bool]]:
    """Waits for processes that the coordination service counts as dead, or that have left it.

    Yields:
        First an empty dict, when the service has answered; then the processes of each change, and
        for each whether the service dropped it for lack of heartbeats. Waits without a limit.

    Raises:
        RuntimeError: the service does not answer, or answers with an error.
    """
    import grpc

    connected: set[int] = set()
    version = -1
    with grpc.insecure_channel(address) as channel:
        while True:
            # WatchTasksRequest.version_number, from the last answer. A later number ends the
            # service.
            asked = b"\x10" + _varint(version % (1 << 64))
            answer = _ask(channel.unary_unary(_WATCH_TASKS), asked, None)
            states: dict[int, int] = {}
            version = 0
            for number, value in _fields(answer):
                if number == 1:
                    task = dict(_fields(value))  # TaskInfo: task_id is 1, state is 2
                    states[task.get(1, 0)] = task.get(2, 0)
                elif number == 2:
                    version = value
            now = {process for process, state in states.items() if state == _CONNECTED}
            yield {process: states.get(process) == _DROPPED for process in connected - now}
            connected = now


def _ask(call: Any, request: bytes, timeout_s: float | None) -> bytes:
    """Calls the coordination service. It answers a request without its incarnation with an error
    that tells it; then this asks again. Raises RuntimeError."""
    import grpc

    try:
        answer: bytes = call(request, timeout=timeout_s)
    except grpc.RpcError as error:
        told = re.search(r"service incarnation: .*currently (\d+)", error.details() or "")
        if told is None:
            raise RuntimeError(f"{error.code()}: {error.details()}") from error
        incarnation = b"\x19" + struct.pack("<Q", int(told[1]))
    else:
        return answer
    try:
        found: bytes = call(
            b"\x0a" + _varint(len(incarnation)) + incarnation + request, timeout=timeout_s
        )
    except grpc.RpcError as error:
        raise RuntimeError(f"{error.code()}: {error.details()}") from error
    return found


def _varint(number: int) -> bytes:
    """Encodes a number as a protobuf varint."""
    low, rest = number & 127, number >> 7
    return bytes([low | 128]) + _varint(rest) if rest else bytes([low])


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Yields field numbers and values of a protobuf message: int, or bytes for other types."""
    from google.protobuf import empty_pb2
    from google.protobuf.unknown_fields import UnknownFieldSet

    unknown: Any = UnknownFieldSet(empty_pb2.Empty.FromString(message))
    for field in unknown:
        yield field.field_number, field.data


def live_processes(processes: Sequence[int]) -> dict[int, int]:
    """Waits until all live ones of these processes call this; returns their incarnations.

    All get the same answer. A restarted process has another incarnation.
    """
    return distributed().client.get_live_nodes(list(processes))


class _Shown:
    """A stand-in for jax.distributed in the code that writes the persistent cache as process 0.

    Attributes:
        first: the process that writes programs that all processes have under one key.
        global_state: itself.
    """

    def __init__(self) -> None:
        self.first = 0
        self.global_state = self

    @property
    def process_id(self) -> int:
        import jax

        ours: int = distributed().process_id
        return 0 if jax.default_backend() == "cpu" else ours - self.first


_shown = _Shown()


def write_programs(first: int) -> None:
    """Lets process `first`, instead of process 0, write to JAX's persistent cache of programs.

    On CPU every process writes, because JAX keys the same program differently in each. With a JAX
    that writes otherwise nothing changes: programs are then compiled again after a loss.
    """
    _shown.first = first
    write = _at("compiler:_cache_write", None)
    if "distributed" in getattr(getattr(write, "__code__", None), "co_names", ()):
        seen = {**write.__globals__, "distributed": _shown}
        changed = types.FunctionType(write.__code__, seen, write.__name__, write.__defaults__)
        sys.modules["jax._src.compiler"].__dict__["_cache_write"] = changed


def forget_topology() -> None:
    """Lets this process, if it is process 0, publish the topology of all devices again.

    XLA's backends store it in the coordination service, which rejects a second write.
    """
    if distributed().process_id == 0:
        for platform in _PLATFORMS:
            distributed().client.key_value_delete(_TOPOLOGY.format(platform))


def renew_cpu() -> None:
    """Gives this process a CPU backend without connections to others; arrays it has stay readable.

    XLA keeps gloo's connections for each list of devices, also those to a process that has died.
    Every process of the job calls this before they meet. Nothing on other platforms.
    """
    import jax
    from jax.extend import backend

    if jax.default_backend() != "cpu":
        return
    distributed().client.key_value_delete(_GLOO)
    tokens = _at("dispatch:runtime_tokens", None)
    if tokens is not None:
        tokens.clear()  # calls that failed, for which JAX would wait
    backend.clear_backends()
    forget_topology()
    jax.devices()


_topology = b""  # of all CPU devices of the job


def learn_topology() -> None:
    """Reads the topology of all CPU devices, which process 0 published, for `tell_topology`."""
    import jax

    global _topology
    if jax.default_backend() == "cpu" and distributed().num_processes > 1:
        client, key = distributed().client, _TOPOLOGY.format("cpu")
        _topology = client.blocking_key_value_get_bytes(key, _TOPOLOGY_MS)


def tell_topology() -> None:
    """Publishes the topology for process 0, which died maybe before it published it again. Other
    processes wait for it in `renew_cpu`."""
    client = distributed().client
    if _topology and client is not None:  # None: this process has left the job
        client.key_value_set_bytes(_TOPOLOGY.format("cpu"), _topology, True)


def backend_started() -> bool:
    """Whether JAX has started its backends."""
    started = _at("xla_bridge:backends_are_initialized")
    return started is not None and bool(started())


def usual_options() -> contextlib.AbstractContextManager[Any]:
    """Sets JAX's default promotions while ops are traced.

    A user's strict options apply only to the user's own code.
    """
    import jax

    usual = contextlib.ExitStack()
    options: Any = jax.config  # JAX's annotations lack these options
    if options.jax_numpy_rank_promotion != "allow":
        usual.enter_context(jax.numpy_rank_promotion("allow"))
    if options.jax_numpy_dtype_promotion != "standard":
        usual.enter_context(jax.numpy_dtype_promotion("standard"))
    folding = _at("config:eager_constant_folding")
    if folding is not None and folding.value:  # `jax.ensure_compile_time_eval` around the call
        usual.enter_context(folding(False))
    return usual


def contexts() -> dict[str, Any]:
    """Returns options that contexts such as `jax.enable_x64` set on this thread, by name."""
    unset, options = _at("config:config_ext.unset"), _at("config:config._value_holders", {})
    scoped = {name: x for name, x in options.items() if hasattr(x, "get_local")}
    return {name: x.value for name, x in scoped.items() if x.get_local() is not unset}


@contextlib.contextmanager
def entered(options: Mapping[str, Any]) -> Iterator[None]:
    """Sets the options that `contexts` returned, on this thread."""
    with contextlib.ExitStack() as stack:
        for name, value in options.items():
            stack.enter_context(_at("config:config._value_holders")[name](value))
        yield


def register(target: str, partition: Callable[..., Any]) -> None:
    """Lets XLA ask `partition` how to replace custom calls of a target, on all backends."""

    def as_it_is(sharding: Any, shape: Any, name: bytes) -> Any:
        return sharding  # unchanged: Shardy propagates by our sharding rule instead

    def never(*_: Any) -> Any:
        raise AssertionError("Shardy does not call this")

    try:
        registering = functools.partial(
            importlib.import_module("jaxlib.xla_client").register_custom_call_partitioner,
            name=target,
            prop_user_sharding=as_it_is,
            partition=partition,
            infer_sharding_from_operands=never,
            can_side_effecting_have_replicated_sharding=True,
        )
        registering()
    except (AttributeError, ImportError, TypeError) as error:
        _found_later.append(_named(f"does not register a partitioner as it did ({error})"))
    else:
        _at("xla_bridge:register_plugin_callbacks")(registering)


def for_several(ctx: Any) -> bool:
    """Whether a lowering is for several devices."""
    return getattr(getattr(ctx.module_context, "axis_context", None), "num_devices", None) != 1


class RuleCall(NamedTuple):
    """A custom call of custom_partitioning, in a module for several devices.

    Attributes:
        key: JAX finds XLA's callback under it, as long as `info` lives.
        info: JAX's record of the callback.
        mesh: sizes of the mesh axes of the callback.
        platforms: platforms of the module.
    """

    key: bytes
    info: Any
    mesh: dict[str, int]
    platforms: tuple[str, ...]


def lower_rule(
    ctx: Any, params: Mapping[str, Any], operands: Sequence[Any]
) -> tuple[Sequence[Any], RuleCall | None] | None:
    """Lowers a custom_partitioning equation with JAX's own rule.

    Drops `info` from the module, because no executable that keeps it can be serialized.

    Returns:
        The results, and their custom call, or None if the module contains the body itself. None
        alone if a rule is impossible: in a module that is exported for several devices, and in a
        JAX that `unsupported_reason` names. If this JAX keeps the call alive in an unknown way,
        `unsupported_reason` names it from now on.
    """
    module, rule = ctx.module_context, "custom_partitioning:"
    if unsupported_reason() is not None:
        return None
    if module.lowering_parameters.for_export and for_several(ctx):
        return None
    results = _at(rule + "_custom_partitioning_lowering_rule")(ctx, *operands, **params)
    op = results[0].owner
    attributes = getattr(op, "attributes", {})
    name = attributes["call_target_name"].value if "call_target_name" in attributes else None
    if name != _at(rule + "_CUSTOM_PARTITIONING_CALL_NAME"):
        return results, None
    key = str(attributes["backend_config"].value).encode()
    info = _at(rule + "_sharding_callbacks").get(key)
    kept = [x for x in module.keepalives if x is not info]
    if info is None or len(kept) + 1 != len(module.keepalives):
        op.erase()
        _found_later.append(_named("does not keep a callback of custom_partitioning as it did"))
        return None
    module.keepalives[:] = kept
    mesh = {str(axis): int(size) for axis, size in info.mesh.shape.items()}
    return results, RuleCall(key, info, mesh, tuple(module.platforms))


def answer(call: RuleCall, *asked: Any) -> Any:
    """Asks JAX to partition a call, as XLA would: returns a one-device module and shardings."""
    return _at("custom_partitioning:_custom_partitioning_partition")(*asked, call.key)
