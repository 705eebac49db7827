"""Tests a mesh's axes and devices, the transport chosen for it, and reads of JAX's state."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import doc_pages
import fakes
import jax
import numpy as np
import pytest
from child_programs import run_python
from jax.sharding import AbstractMesh, Mesh

import ep_runtime as ep
from ep_runtime import native, nccl, specs
from ep_runtime.errors import InvalidArgumentError, RuntimeUnavailableError
from ep_runtime_client.base import jax_internals, jax_state, meshes


def _spec(mesh: Any, ep_axis: Any, outer_axes: Any = ()) -> specs.GroupSpec:
    return specs.make_group_spec(
        name="g",
        mesh_axes=meshes.axes_of(mesh),
        ep_axis=ep_axis,
        outer_axes=outer_axes,
        num_experts=8,
        hidden_size=16,
        max_tokens_per_rank=8,
    )


def test_world_ranks_are_domain_major_wherever_the_ep_axis_stands(devices: list[Any]) -> None:
    mesh = Mesh(np.array(devices).reshape(4, 2), ("ep", "dp"))
    ranks = meshes.rank_devices(mesh, _spec(mesh, "ep", "dp"))
    assert [device.id for device in ranks] == [0, 2, 4, 6, 1, 3, 5, 7]


def test_a_tuple_ep_axis_counts_in_its_own_order(devices: list[Any]) -> None:
    mesh = Mesh(np.array(devices).reshape(2, 2, 2), ("a", "b", "c"))
    ranks = meshes.rank_devices(mesh, _spec(mesh, ("c", "a")))
    # domain b; inside it c is major, a minor
    assert [device.id for device in ranks] == [0, 4, 1, 5, 2, 6, 3, 7]


def test_an_abstract_mesh_has_axes_but_no_devices() -> None:
    mesh = AbstractMesh((2, 4), ("dp", "ep"))
    assert meshes.axes_of(mesh) == (("dp", 2), ("ep", 4))
    with pytest.raises(InvalidArgumentError, match="with devices, got AbstractMesh"):
        meshes.devices_of(mesh)


def test_transport_auto_is_memfd_with_a_daemon_and_xla_without(mesh: Any) -> None:
    assert meshes.resolve_transport("auto", mesh, has_daemon=True) == "memfd"
    assert meshes.resolve_transport("auto", mesh, has_daemon=False) == "xla"
    assert meshes.resolve_transport("xla", mesh, has_daemon=True) == "xla"


def test_transports_that_cannot_be_say_why(mesh: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="transport must be one of.*'pigeon'"):
        meshes.resolve_transport("pigeon", mesh, has_daemon=True)
    with pytest.raises(InvalidArgumentError, match='address="none"'):
        meshes.resolve_transport("memfd", mesh, has_daemon=False)
    with pytest.raises(NotImplementedError, match="'nvlink' on \\['cpu'\\]"):
        meshes.resolve_transport("nvlink", mesh, has_daemon=True)


class Gpus:
    """The facts of a mesh of GPUs that `resolve_transport` reads."""

    def __init__(self, *slices: int, capability: str = "9.0") -> None:
        self.devices = np.array(
            [
                SimpleNamespace(
                    platform="gpu",
                    process_index=0,
                    local_hardware_id=i,
                    slice_index=index,
                    compute_capability=capability,
                    device_kind="Some GPU",
                )
                for i, index in enumerate(slices or (0, 0, 0, 0))
            ]
        )


class Reaching:
    """A fake CUDA library of a host where all GPUs reach each other, except some pairs."""

    def __init__(self, *apart: tuple[int, int]) -> None:
        self._apart = apart

    architectures = ("90a", "100")

    def reaches(self, device: int, peer: int) -> bool:
        return (device, peer) not in self._apart

    def has_kernels_for(self, capability: str) -> bool:
        return capability in ("9.0", "10.0")


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[Reaching], None]:
    """Replaces the CUDA library by a fake one."""

    def put(made: Reaching) -> None:
        monkeypatch.setattr(meshes, "devices_of", lambda mesh: mesh.devices)
        monkeypatch.setattr(native, "library_path", lambda platform: tmp_path)
        monkeypatch.setattr(native, "library", lambda platform: made)

    return put


def test_gpus_that_reach_each_other_take_windows(library: Callable[[Reaching], None]) -> None:
    library(Reaching())
    assert meshes.resolve_transport("auto", Gpus(), has_daemon=True) == "nvlink"
    assert meshes.resolve_transport("nvlink", Gpus(), has_daemon=True) == "nvlink"
    assert meshes.resolve_transport("auto", Gpus(), has_daemon=False) == "xla"
    with pytest.raises(InvalidArgumentError, match="needs a mesh of CPU devices, got .'gpu'"):
        meshes.resolve_transport("memfd", Gpus(), has_daemon=True)


def test_gpus_without_kernels_take_xla_s_collectives(
    library: Callable[[Reaching], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    library(Reaching())
    monkeypatch.setattr(nccl, "library", SomeNccl)
    assert meshes.resolve_transport("auto", Gpus(capability="10.0"), has_daemon=True) == "nvlink"
    old = Gpus(capability="8.0")
    assert meshes.resolve_transport("auto", old, has_daemon=True) == "xla"
    why = "this package's kernels are for sm_90a, sm_100, and not for Some GPU (8.0)"
    assert [line.message.count(why) for line in caplog.records] == [1]
    for transport in ("nvlink", "nccl"):
        with pytest.raises(RuntimeUnavailableError) as error:
            meshes.resolve_transport(transport, old, has_daemon=True)
        assert why in str(error.value)
        assert 'transport="xla"' in str(error.value)
    assert meshes.resolve_transport("xla", old, has_daemon=True) == "xla"


def test_gpus_take_nccl_where_it_is_asked_for_and_a_libnccl_is_there(
    library: Callable[[Reaching], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    library(Reaching((0, 1)))
    monkeypatch.setattr(nccl, "library", SomeNccl)
    assert meshes.resolve_transport("nccl", Gpus(), has_daemon=True) == "nccl"
    missing = tmp_path / "none.so"
    monkeypatch.setattr(nccl, "library", lambda: nccl.NcclLibrary(missing))
    with pytest.raises(RuntimeUnavailableError, match="missing at .*none.so"):
        meshes.resolve_transport("nccl", Gpus(), has_daemon=True)


class SomeNccl:
    """A fake libnccl that is usable, or one whose error says why it is not."""

    def __init__(self, reason: str = "") -> None:
        self._reason = reason

    def version(self) -> int:
        if self._reason:
            raise RuntimeUnavailableError(self._reason)
        return 22809


_APART, _SPANS = "GPU 2 does not reach the memory of GPU 1", "the mesh spans hosts"


@pytest.mark.parametrize(
    ("mesh", "apart", "cluster", "missing", "transport", "reasons"),
    [
        (Gpus(), [(2, 1)], False, "", "nccl", [_APART]),
        (Gpus(), [(2, 1)], False, "no libnccl", "xla", [_APART, "no libnccl"]),
        (Gpus(0, 0, 1, 1), [], True, "", "nccl", [_SPANS]),
        (Gpus(0, 0, 1, 1), [], False, "", "xla", [_SPANS, "daemon is in no cluster"]),
    ],
)
def test_gpus_apart_take_nccl_else_xla_and_the_reason_is_said(
    library: Callable[[Reaching], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    mesh: Gpus,
    apart: list[tuple[int, int]],
    cluster: bool,
    missing: str,
    transport: str,
    reasons: list[str],
) -> None:
    library(Reaching(*apart))
    monkeypatch.setattr(nccl, "library", lambda: SomeNccl(missing))
    meshes._say.cache_clear()
    caplog.set_level(logging.INFO)
    found = meshes.resolve_transport("auto", mesh, has_daemon=True, in_cluster=lambda: cluster)
    assert found == transport
    for reason in reasons:
        assert reason in caplog.text


def test_gpus_take_xla_where_the_package_was_built_without_cuda(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(meshes, "devices_of", lambda mesh: mesh.devices)
    monkeypatch.setattr(native, "library_path", lambda platform: tmp_path / f"{platform}.so")
    native.library.cache_clear()
    meshes._say.cache_clear()
    for transport, has_daemon in (("auto", True), ("auto", False), ("xla", True)):
        assert meshes.resolve_transport(transport, Gpus(), has_daemon=has_daemon) == "xla"
    (warned,) = caplog.messages
    assert "built without CUDA" in warned
    assert native.BUILD_CUDA in warned
    with pytest.raises(RuntimeUnavailableError, match="EP_RUNTIME_CUDA=ON"):
        meshes.resolve_transport("nvlink", Gpus(), has_daemon=True)


def _run(program: str, **environment: str) -> str:
    return run_python("-c", program, **environment).stdout


@pytest.mark.parametrize("wrap", [jax.jit, jax.grad, jax.vmap, jax.checkpoint])
def test_tracing_is_seen_under_every_transformation(wrap: Any) -> None:
    seen = []

    def program(x: Any) -> Any:
        seen.append(jax_internals.under_tracing())
        return x * 2.0

    wrap(program)(jax.numpy.ones(2)[0] if wrap is jax.grad else jax.numpy.ones(2))
    assert seen[0]
    assert not jax_internals.under_tracing()


def test_eager_names_the_function_and_the_cure() -> None:
    @jax_state.eager
    def order(number: int) -> int:
        return number + 1

    assert order(1) == 2
    with pytest.raises(ep.InvalidArgumentError, match="order talks to the daemon: call this out"):
        jax.jit(lambda x: x + order(1))(1.0)


def test_a_process_without_jax_traces_nothing_and_is_alone() -> None:
    program = (
        "from ep_runtime_client.base import jax_internals, jax_state as s\n"
        "import sys\n"
        "print(jax_internals.under_tracing())\n"
        "print(s.coordinator(), s.num_processes(), s.process_index())\n"
        "assert 'jax' not in sys.modules\n"
    )
    assert _run(program).split() == ["False", "None", "1", "0"]


def test_connect_gives_the_cpu_backend_its_threads() -> None:
    program = "import ep_runtime as ep, os\nep.connect('none')\nprint(os.environ['PJRT_NPROC'])\n"
    if jax_state.jaxlib_version() >= (0, 12):
        pytest.skip("jaxlib 0.12 has a pool of its own")
    assert _run(program, PJRT_NPROC="2").split() == ["32"]


def test_connect_warns_where_the_backend_started_with_too_few() -> None:
    if jax_state.jaxlib_version() >= (0, 12):
        pytest.skip("jaxlib 0.12 has a pool of its own")
    program = (
        "import jax, logging, sys\n"
        "logging.basicConfig(stream=sys.stdout, level=logging.WARNING, format='%(message)s')\n"
        "jax.config.update('jax_num_cpu_devices', 4)\n"
        "jax.devices()\n"
        "import ep_runtime as ep\n"
        "ep.connect('none'); ep.connect('none')\n"
    )
    lines = _run(program, PJRT_NPROC="4").splitlines()
    (warning,) = [line for line in lines if "with 4 threads for 4 devices" in line]
    doc_pages.check_said("late connect", warning)


@pytest.mark.parametrize("explicit", [False, True], ids=["auto", "explicit"])
def test_settling_waits_for_the_last_device_of_what_was_launched(explicit: bool) -> None:
    mesh = fakes.mesh_of({"dp": 2, "ep": 2}, explicit=explicit)
    spec, may_end = jax.sharding.PartitionSpec(("dp", "ep")), threading.Event()

    def hold_back(rank: np.ndarray, x: np.ndarray) -> np.ndarray:
        if int(rank) == 3:
            assert may_end.wait(30), "nobody let the last device end within 30 s"
        return x

    def body(x: jax.Array) -> jax.Array:
        rank = jax.lax.axis_index(("dp", "ep"))
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jax.pure_callback(hold_back, shape, rank, x)

    program = jax.jit(
        jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    )
    x = jax.device_put(np.arange(8.0), jax.sharding.NamedSharding(mesh, spec))
    with jax.set_mesh(mesh):
        y = program(x)
        assert not jax_state.settle(mesh.devices.ravel(), within_s=0.1)
        may_end.set()
        assert jax_state.settle(mesh.devices.ravel())
    assert y.is_ready()
    np.testing.assert_array_equal(y, np.arange(8.0))


def test_settling_gives_up_where_jax_runs_nothing_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(devices: Any) -> Any:
        raise RuntimeError("Dialect namespace 'mhlo' is already registered.")

    monkeypatch.setattr(jax_state, "_spread_over", fail)
    assert not jax_state.settle(jax.devices()[:2])
