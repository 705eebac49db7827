"""What the control plane knows about JAX without importing it."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import jax
import pytest

import ep_runtime as ep
from ep_runtime_client import jax_state


def _run(program: str, **environment: str) -> str:
    import os

    done = subprocess.run(
        [sys.executable, "-P", "-c", program],
        timeout=120,
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("wrap", [jax.jit, jax.grad, jax.vmap, jax.checkpoint])
def test_tracing_is_seen_under_every_transformation(wrap: Any) -> None:
    seen = []

    def program(x: Any) -> Any:
        seen.append(jax_state.under_tracing())
        return x * 2.0

    wrap(program)(jax.numpy.ones(2)[0] if wrap is jax.grad else jax.numpy.ones(2))
    assert seen[0]
    assert not jax_state.under_tracing()


def test_eager_names_the_function_and_the_cure() -> None:
    @jax_state.eager
    def order(number: int) -> int:
        return number + 1

    assert order(1) == 2
    with pytest.raises(ep.InvalidArgumentError, match="order talks to the daemon: call this out"):
        jax.jit(lambda x: x + order(1))(1.0)


def test_a_process_without_jax_traces_nothing_and_is_alone() -> None:
    program = (
        "from ep_runtime_client import jax_state as s\n"
        "import sys\n"
        "print(s.under_tracing(), s.coordinator(), s.num_processes(), s.process_index())\n"
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
        "logging.basicConfig(stream=sys.stdout, level=logging.WARNING)\n"
        "jax.config.update('jax_num_cpu_devices', 4)\n"
        "jax.devices()\n"
        "import ep_runtime as ep\n"
        "ep.connect('none'); ep.connect('none')\n"
    )
    assert _run(program, PJRT_NPROC="").count("before ep.connect()") == 1
