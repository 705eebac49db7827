"""What the control plane knows about JAX without importing it."""

from __future__ import annotations

import threading
from typing import Any

import doc_pages
import fakes
import jax
import numpy as np
import pytest
from child_programs import run_python

import ep_runtime as ep
from ep_runtime_client.base import jax_internals, jax_state


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
