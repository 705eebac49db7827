"""Rows over the runtime's NCCL communicators: with one daemon, and with two as two nodes."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cases
import jax
import numpy as np
import pytest
from cluster_places import place, plain_tcp
from daemon_fixtures import wait_until
from gpu.jobs import gpu_cases, gpu_chunks, gpu_steps, layouts
from gpu.test_gpu_movement import fitted
from harness import DaemonProcess, eventually
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from multiprocess.launch import Job

import ep_runtime as ep
from ep_runtime_client.cli.daemon import source
from ep_runtime_client.nccl import beside, communicators

TRANSPORT = "memfd" if layouts.TRIAL else "nccl"
KNOWN_WITHIN_S = 2.0
READY_WITHIN_S = 5.0
STEPS = 2000
JOINED = 3  # CLUSTER_LINK_JOINED
# Multicast is not available everywhere, but NCCL sets it up by default.
_NCCL = {"NCCL_NVLS_ENABLE": "0", "TEST_GPU_TRANSPORT": "nccl"}
# Two domains on one host: they use sockets, as hosts do.
_APART = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", **_NCCL}


@pytest.fixture(autouse=True)
def _over_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (gpu_cases, gpu_steps):
        monkeypatch.setattr(module, "TRANSPORT", TRANSPORT)


@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.name)
def test_every_case_equals_the_reference(
    session: ep.Session, gpus: list[Any], case: cases.Case
) -> None:
    gpu_cases.run_case(session, fitted(case, len(gpus)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_large_layer_gives_the_bits_that_it_gives_over_windows(
    session: ep.Session, several_gpus: int, gpus: list[Any], dtype: str
) -> None:
    """Forward and backward."""
    count, hidden, top_k = 1024 * several_gpus, 8192, 4
    keys = jax.random.split(jax.random.key(0), 4)
    x, g = (jax.random.normal(key, (count, hidden), dtype) for key in keys[:2])
    weights = jax.random.uniform(keys[2], (count, top_k))
    idx = jax.random.randint(keys[3], (count, top_k), -1, 8 * several_gpus)

    def run(transport: str) -> list[Any]:
        group = session.create_group(
            f"large-{transport}",
            Mesh(np.array(gpus), ("ep",)),
            ep_axis="ep",
            transport=transport,
            num_experts=8 * several_gpus,
            hidden_size=hidden,
            max_tokens_per_rank=1024,
            max_top_k=top_k,
            max_token_dtype=dtype,
            combine_precision="fast",
        )
        layer = group.register_layer("moe", top_k=top_k)

        @jax.jit
        def step(x: Any, weights: Any, g: Any) -> Any:
            def forward(x: Any, weights: Any) -> Any:
                sent = ep.dispatch(layer, x, idx, weights)
                return ep.combine(layer, sent, sent.tokens, weights=sent.weights), sent

            out, pull, sent = jax.vjp(forward, x, weights, has_aux=True)
            return sent.tokens, sent.weights, sent.group_sizes, out, *pull(g)

        rows = NamedSharding(group.mesh, PartitionSpec("ep"))
        found = step(*(jax.device_put(array, rows) for array in (x, weights, g)))
        found = [np.asarray(array, np.float32) for array in found]
        group.close()
        return found

    want, got = run(layouts.TRANSPORT), run(TRANSPORT)
    for slab, used in enumerate(want[2].sum(-1).astype(int)):
        np.testing.assert_array_equal(got[0][slab, :used], want[0][slab, :used])
    for name, a, b in zip(("weights", "sizes", "out"), got[1:4], want[1:4], strict=True):
        np.testing.assert_array_equal(a, b, err_msg=name)
    for a, b in zip(got[4:], want[4:], strict=True):  # products of whole rows have another order
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-2)


def test_the_listing_names_version_ranks_and_state(
    several_gpus: int, gpus: list[Any], address: str, admin: source.Source
) -> None:
    with ep.connect(address, timeout_s=60) as own:
        steps = gpu_steps.Steps(own, "listed", gpus)
        steps.run()
        (row,) = [row for row in admin.groups() if row["name"] == "listed"]
        if not layouts.TRIAL:
            assert row["node_size"] == 1
            assert row["nccl_state"] == f"ready, {several_gpus} ranks"
            assert row["nccl_version"].startswith("2.")
        steps.group.close()


@pytest.mark.parametrize("kind", [gpu_steps.Steps, gpu_steps.ChunkSteps])
def test_an_aborted_group_tells_and_forms_again_ten_times(
    session: ep.Session, several_gpus: int, gpus: list[Any], kind: type[gpu_steps.Steps]
) -> None:
    if layouts.TRIAL:
        pytest.skip("CPU devices have no communicators")
    steps = kind(session, "again", gpus)
    for turn in range(10):
        steps.run()
        group = steps.group._held.native_group
        assert isinstance(group, communicators.GroupWithNccl)
        group.end(ep.PeerLostError("so the test says"))
        with pytest.raises(ep.PeerLostError, match="so the test says"), ep.translate_errors():
            steps.run()
        steps.group.close()
        steps.make_group()
        assert turn < 10
    steps.run()


def test_communicators_beside_windows_get_ready_by_themselves(
    several_gpus: int,
    gpus: list[Any],
    address: str,
    admin: source.Source,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if layouts.TRIAL:
        pytest.skip("CPU devices have no communicators")
    monkeypatch.setattr(gpu_steps, "TRANSPORT", layouts.TRANSPORT)
    with ep.connect(address, timeout_s=60) as own:
        steps = gpu_steps.Steps(own, "beside", gpus)
        held = steps.group._held.native_group
        assert isinstance(held, beside.GroupBesideNccl)
        made = held.beside.await_ready(READY_WITHIN_S)
        (row,) = [row for row in admin.groups() if row["name"] == "beside"]
        assert row["nccl_state"] == f"ready, {several_gpus} ranks"
        made.try_sum(KNOWN_WITHIN_S * 10)
        steps.run()
        steps.group.close()


_STARTS = """
from gpu.jobs import gpu_steps
from ep_runtime_client.nccl import beside
beside.JOIN_AFTER_S = 6.0  # past compiling
session = ep.connect(timeout_s=60)
steps = gpu_steps.Steps(session, "starts", jax.devices())
steps.run()
making = steps.group._held.native_group.beside
said, slowest_s, early = "go", 0.0, making.settled
while said == "go":
    for _ in range(100):
        started = time.monotonic()
        steps.run()
        slowest_s = max(slowest_s, time.monotonic() - started)
    say(settled=making.settled)
    said = hear()
made = making.await_ready(0.0)
made.try_sum(60.0)
steps.run()
say(slowest_s=slowest_s, early=early)
hear()
steps.group.close()
session.close()
"""
_ONE = "one process"


@pytest.mark.parametrize("layout", [_ONE, *layouts.LAYOUTS])
def test_steps_go_on_while_nccl_starts_beside_them(
    several_gpus: int, address: str, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step's kernels wait for peers, while NCCL in a new process still loads its kernels."""
    if layouts.TRIAL:
        pytest.skip("CPU devices have no communicators")
    monkeypatch.setitem(layouts.LAYOUTS, _ONE, (1, "local_device_ids"))
    more = {**_NCCL, "EP_RUNTIME_ADDRESS": address, "TEST_GPU_TRANSPORT": "nvlink"}
    with layouts.job(_STARTS, layout, several_gpus, **more) as job:
        for _ in range(100):
            settled = all(said["settled"] for said in job.heard(120))
            job.tell("stop" if settled else "go")
            if settled:
                break
        said = job.heard(60)
        print(f"{layout}: slowest step {max(x['slowest_s'] for x in said) * 1e3:.0f} ms")  # noqa: T201
        assert not any(x["early"] for x in said), "NCCL was there before the first step"
        assert max(x["slowest_s"] for x in said) < KNOWN_WITHIN_S, said
        job.end()


_CASES = """
from gpu.jobs import gpu_cases
say(done=gpu_cases.run_cases(json.loads(os.environ["TEST_CASES"])))
hear()
"""


@pytest.mark.parametrize("layout", layouts.LAYOUTS)
def test_several_processes_equal_the_reference(
    several_gpus: int, address: str, layout: str
) -> None:
    names = ["plain", "dp x ep", "bfloat16 exact", "drops"]
    more = {"EP_RUNTIME_ADDRESS": address, "TEST_CASES": json.dumps(names)}
    with layouts.job(_CASES, layout, several_gpus, **_NCCL, **more) as job:
        assert job.heard(240) == [{"done": names}] * job.processes
        job.end()


@pytest.fixture
def nodes(daemon_process: Any) -> Iterator[list[DaemonProcess]]:
    """Starts two daemons of one cluster, which see the same GPUs."""
    address = place()
    made = []
    for name, role in (("a", "--coordinator"), ("b", "--join")):
        made.append(daemon_process(role, address, "--node", name, *plain_tcp()))
    eventually(lambda: made[1].status().cluster.link == JOINED, within_s=10.0)
    yield made
    for daemon in made:
        assert daemon.popen.poll() is None


def two_domains(
    script: str, nodes: list[DaemonProcess], gpus: int, layout: str, **more: str
) -> Job:
    """A job with half of its processes on each daemon, as on two hosts."""
    processes = layouts.LAYOUTS[layout][0] or gpus
    homes = [index * 2 // processes for index in range(processes)]
    own = [
        {"EP_RUNTIME_ADDRESS": f"unix://{nodes[home].directory}", "NCCL_HOSTID": f"dom{home}"}
        for home in homes
    ]
    return layouts.job(
        script, layout, gpus, own=own, EP_RUNTIME_JOB="two-domains", **_APART, **more
    )


_TWO = "two processes, own GPUs visible" if layouts.RANKS else "two processes, all GPUs visible"
_FOUR = "one GPU each, visible alone" if layouts.RANKS else "one GPU each, all visible"
_NAMES = [case.name for case in cases.CASES if case.name != "one device"]


@pytest.mark.parametrize("layout", [_TWO, _FOUR], ids=["two", "four"])
@pytest.mark.parametrize("part", range(3))
def test_two_domains_equal_the_reference(
    job_gpus: int, nodes: list[DaemonProcess], layout: str, part: int
) -> None:
    if job_gpus < 4 and layout == _FOUR:
        pytest.skip("with two GPUs, two domains of one, the other layout is the same")
    names = _NAMES[part::3]
    with two_domains(
        _CASES, nodes, job_gpus, layout, TEST_CASES=json.dumps(names), EP_RUNTIME_DEBUG="1"
    ) as job:
        assert job.heard(270) == [{"done": names}] * job.processes
        job.end()


_NARROW = "from ep_runtime import device_layout; device_layout.LEAST_SOURCES = 1\n"


@pytest.fixture
def narrow_lanes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Daemons, and jobs whose names begin with _NARROW, make lanes as narrow as top_k allows."""
    (tmp_path / "sitecustomize.py").write_text(_NARROW)
    monkeypatch.syspath_prepend(tmp_path)


_LANES = (
    _NARROW
    + """
from gpu.jobs import gpu_lanes
with ep.connect(timeout_s=60) as session:
    say(packs=gpu_lanes.run(session))
hear()
"""
)


def test_two_domains_whose_lanes_lack_room_for_all_rows(
    job_gpus: int, narrow_lanes: None, nodes: list[DaemonProcess]
) -> None:
    """Rows cross in chunks, and sums node by node, even if all go to one rank."""
    if job_gpus < 4:
        pytest.skip("nodes of one rank have no lanes")
    with two_domains(_LANES, nodes, job_gpus, _TWO, EP_RUNTIME_DEBUG="1") as job:
        assert job.heard(270) == [{"packs": not layouts.TRIAL}] * 2
        job.end()


_SOAK = """
from gpu.jobs import gpu_steps
session = ep.connect(timeout_s=60)
steps = gpu_steps.Steps(session, "soak", jax.devices())
assert steps.group.spec.node_size == len(jax.devices()) // 2, steps.group.spec
started = time.monotonic()
for _ in range(int(os.environ["TEST_STEPS"])):
    steps.run()
say(seconds=time.monotonic() - started)
hear()
steps.group.close()
session.close()
"""


def test_two_domains_run_two_thousand_steps(job_gpus: int, nodes: list[DaemonProcess]) -> None:
    with two_domains(_SOAK, nodes, job_gpus, _TWO, TEST_STEPS=str(STEPS)) as job:
        said = job.heard(270)
        assert len(said) == 2
        job.end()


_KILLED = """
from gpu.jobs import gpu_steps
session = ep.connect(timeout_s=60, on_loss="continue")
kind = gpu_steps.ChunkSteps if "TEST_CHUNKS" in os.environ else gpu_steps.Steps
steps = kind(session, "killed", jax.devices())
steps.run()
say(generation=steps.group.generation)
assert hear() == "loop"
say(**steps.until_an_error(say))
hear()
"""


def _kill_one(job: Job, victim: int) -> int:
    """Kills a process while all step: the others know in time. Returns their generation."""
    generation = int(job.heard(120)[0]["generation"])
    job.tell("loop")
    assert job.heard() == [{"looping": True}] * job.processes
    killed = time.monotonic()
    job.workers[victim].kill()
    for worker in job.workers:
        if worker.index != victim:
            said = worker.heard(30)
            assert said["kind"] == "PeerLostError", said
            if not layouts.TRIAL:  # gloo does not name a process
                elsewhere = f"the process of rank {victim}, on another node," in said["text"]
                assert elsewhere or str(job.workers[victim].pid) in said["text"], said
            assert said["ended"] - killed < KNOWN_WITHIN_S, said
    return generation


def _victim(turn: int, job: Job) -> int:
    """Never kills process 0, whose end would end jax.distributed and all others."""
    return 1 + turn % (job.processes - 1)


@pytest.mark.parametrize("name", gpu_chunks.CASES)
def test_chunks_of_a_block_give_the_bits_of_one_call(
    session: ep.Session, several_gpus: int, gpus: list[Any], name: str
) -> None:
    gpu_chunks.run(session, name, TRANSPORT, gpus)


_CHUNKS = """
from gpu.jobs import gpu_chunks
with ep.connect(timeout_s=60) as session:
    for name in gpu_chunks.CASES:
        gpu_chunks.run(session, name, os.environ["TEST_GPU_TRANSPORT"], jax.devices())
say(done=True)
hear()
"""


@pytest.mark.parametrize("layout", [_TWO, _FOUR], ids=["two", "four"])
def test_chunks_of_a_block_in_two_domains_give_the_bits_of_one_call(
    job_gpus: int, nodes: list[DaemonProcess], layout: str
) -> None:
    if layouts.TRIAL or (job_gpus < 4 and layout == _FOUR):
        pytest.skip("needs NCCL; and with two GPUs the other layout is the same")
    with two_domains(_CHUNKS, nodes, job_gpus, layout, EP_RUNTIME_DEBUG="1") as job:
        assert job.heard(270) == [{"done": True}] * job.processes
        job.end()


_HIDDEN = """
from gpu.jobs import gpu_chunks
with ep.connect(timeout_s=60) as session:
    for inner in (12288, 28672):
        for found in gpu_chunks.measure(session, os.environ["TEST_GPU_TRANSPORT"], inner):
            say(**found)
hear()
"""


@pytest.mark.slow
def test_what_chunks_hide_of_the_network_of_two_domains_is_measured(
    job_gpus: int, nodes: list[DaemonProcess], record_property: Callable[[str, object], None]
) -> None:
    if layouts.TRIAL:
        pytest.skip("CPU devices have no communicators")
    with two_domains(_HIDDEN, nodes, job_gpus, _TWO) as job:
        for _ in range(4):
            found, *_ = job.heard(240)
            record_property(f"{found.pop('what')}, M={found.pop('inner')}", found)
        job.end()


@pytest.mark.slow
def test_a_killed_process_ends_the_steps_of_all_and_the_job_comes_back_ten_times(
    job_gpus: int, address: str, admin: source.Source
) -> None:
    generations = []
    more = {**_NCCL, "EP_RUNTIME_ADDRESS": address, "EP_RUNTIME_JOB": "killed"}
    for turn in range(10):
        with layouts.job(_KILLED, _FOUR, job_gpus, **more) as job:
            generations.append(_kill_one(job, _victim(turn, job)))
    assert generations == sorted(set(generations))
    wait_until(
        lambda: [row["state"] for row in admin.groups()] == ["RETAINED"], "the group is retained"
    )


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, {"TEST_CHUNKS": "1"}], ids=["one call", "chunks"])
def test_a_process_killed_in_one_of_two_domains_is_known_in_the_other(
    job_gpus: int, nodes: list[DaemonProcess], more: dict[str, str]
) -> None:
    if layouts.TRIAL:
        pytest.skip("who waits in gloo hears nothing of a lost process")
    for turn in range(3):
        with two_domains(_KILLED, nodes, job_gpus, _FOUR, **more) as job:
            _kill_one(job, _victim(turn, job))
