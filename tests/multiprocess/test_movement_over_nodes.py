"""Token movement of a job with processes on two hosts: the cases of the ops' tests, and a soak."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cluster_nets import HOSTS, Net
from cluster_places import make_certificates, tls_flags
from harness import DaemonProcess, eventually
from multiprocess.launch import Job

from ep_runtime_server.base import limits

pytestmark = pytest.mark.slow

JOINED, LOST = 3, 4  # CLUSTER_LINK_JOINED, CLUSTER_LINK_LOST
# A lost packet is sent again after a time that doubles with each loss.
MENDED_S = 60.0
STEPS = 2000
_LAYOUTS = pytest.mark.parametrize(("processes", "devices"), [(2, 4), (4, 2)], ids=["2x4", "4x2"])


@pytest.fixture
def nodes(net, daemon_process, tmp_path) -> list[DaemonProcess]:
    """Starts a daemon on each host; they trust each other by certificates."""
    pki = make_certificates(tmp_path / "pki", **HOSTS)
    started = [daemon_process(*flags(pki, name), launcher=net.launcher(name)) for name in HOSTS]
    eventually(lambda: started[1].status().cluster.link == JOINED, within_s=10.0)
    return started


def flags(pki: Path, name: str) -> list[str]:
    """Returns the flags of node a, the coordinator, or of node b."""
    role = "--coordinator" if name == "a" else "--join"
    return [role, f"{HOSTS['a']}:7700", "--node", name, *tls_flags(pki, name)]


def job_on(net: Net, nodes: list[DaemonProcess], script: str, processes: int, **more: Any) -> Job:
    """Starts a job with an equal share of its processes on each host."""
    homes = [index * 2 // processes for index in range(processes)]
    return Job(
        script,
        processes=processes,
        own=[{"EP_RUNTIME_ADDRESS": f"unix://{nodes[home].directory}"} for home in homes],
        places=[net.launcher("ab"[home]) for home in homes],
        host=HOSTS["a"],
        EP_RUNTIME_JOB="over-nodes",
        **more,
    )


_CASES = """
from multiprocess import movement_job
say(done=movement_job.main(json.loads(os.environ["TEST_CASES"]), nodes=2))
"""


@_LAYOUTS
@pytest.mark.parametrize("part", range(6))
def test_every_case_equals_the_reference(net, nodes, processes, devices, part) -> None:
    import cases

    # Groups over a part of the job's devices leave processes without a rank.
    names = [case.name for case in cases.CASES if case.name != "one device"][part::6]
    with job_on(
        net,
        nodes,
        _CASES,
        processes,
        devices=devices,
        EP_RUNTIME_DEBUG="1",
        TEST_CASES=json.dumps(names),
    ) as job:
        assert job.heard(270) == [{"done": names}] * processes
        job.finish()


_SOAK = """
import resource
session = ep.connect(timeout_s=60)
mesh = mesh_of()
group = session.create_group(
    "soak", mesh, ep_axis="ep", num_experts=8, hidden_size=32, max_tokens_per_rank=16, max_top_k=3,
    alignment=8, max_token_dtype="float32", combine_precision="exact",
)
assert group.spec.node_size == mesh.size // 2, group.spec
layer = group.register_layer("l", top_k=3)

@jax.jit
def step(x, logits):
    routing = ep.route(logits, 3)
    there = ep.dispatch(layer, x, routing.topk_idx, routing.topk_weights)
    out = ep.combine(layer, there, there.tokens * 2.0, weights=there.weights)
    rows = there.group_sizes.sum()
    return out, rows

place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("ep"))
gradient = jax.jit(jax.grad(lambda x, logits: step(x, logits)[0].sum()))

def spread(value):
    return jax.make_array_from_callback(value.shape, place, lambda part: value[part])

random = np.random.default_rng(0)
worst, memory = 0.0, []
for number in range(int(os.environ["TEST_STEPS"])):
    x = random.standard_normal((16 * mesh.size, 32), dtype=np.float32)
    skew = random.standard_normal(8) * (number % 7)  # from even loads to one busy expert
    logits = (random.standard_normal((16 * mesh.size, 8)) + skew).astype(np.float32)
    sent = spread(x), spread(logits)
    out, _ = step(*sent)
    for part in out.addressable_shards:
        worst = max(worst, float(np.abs(np.asarray(part.data) - 2 * x[part.index]).max()))
    if number % 4 == 0:
        for part in gradient(*sent).addressable_shards:
            worst = max(worst, float(np.abs(np.asarray(part.data) - 2.0).max()))
    if number % 100 == 99:
        group.check()
        memory.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
say(worst=worst, memory=memory)
hear()
group.close()
session.close()
"""


def test_two_thousand_steps_stay_right_and_take_no_more_memory(net, nodes) -> None:
    with job_on(net, nodes, _SOAK, 2, devices=2, TEST_STEPS=str(STEPS)) as job:
        for said in job.heard(270):
            assert said["worst"] < 1e-4
            settled, *_, last = said["memory"][4:]
            assert last < settled + (64 << 10), said["memory"]  # KiB
        for daemon in nodes:
            assert daemon.group_states() == {"soak": "READY"}
        job.end()


_STEPS = """
session = ep.connect(timeout_s=60)
mesh = mesh_of()
group = session.create_group(
    "cut", mesh, ep_axis="ep", num_experts=8, hidden_size=32, max_tokens_per_rank=16, max_top_k=2,
    alignment=8, max_token_dtype="float32",
)
layer = group.register_layer("l", top_k=2)
place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("ep"))
value = np.random.default_rng(0).standard_normal((16 * mesh.size, 32)).astype(np.float32)
x = jax.make_array_from_callback(value.shape, place, lambda part: value[part])

@jax.jit
def step(x):
    routing = ep.route(x[:, :8], 2)
    there = ep.dispatch(layer, x, routing.topk_idx, routing.topk_weights)
    return ep.combine(layer, there, there.tokens, weights=there.weights)

def steps():
    for _ in range(20):
        out = step(x)
        for part in out.addressable_shards:
            np.testing.assert_allclose(np.asarray(part.data), value[part.index], rtol=1e-5)
    group.check()
    say(done=True)

steps()
while hear():
    steps()
group.close()
session.close()
"""


def test_a_partition_makes_calls_wait_and_ends_none(net, nodes) -> None:
    _, b = nodes
    with job_on(net, nodes, _STEPS, 2, devices=2) as job:
        job.heard()
        net.cut()
        job.tell(True)
        eventually(
            lambda: b.status().cluster.link == LOST,
            within_s=limits.NODE_LEASE_S + 2 * limits.NODE_RPC_S,
        )
        assert all(worker.silent() for worker in job.workers)
        assert [daemon.group_states() for daemon in nodes] == [{"cut": "READY"}] * 2
        net.mend()
        job.heard(MENDED_S)
        assert [daemon.group_states() for daemon in nodes] == [{"cut": "READY"}] * 2
        job.end()


def test_daemons_that_are_killed_and_start_again_disturb_no_step(
    net, nodes, daemon_process, tmp_path
) -> None:
    with job_on(net, nodes, _STEPS, 2, devices=2) as job:
        job.heard()
        for number, name in enumerate(HOSTS):
            nodes[number].kill()
            job.tell(True)
            job.heard()
            nodes[number] = daemon_process(
                *flags(tmp_path / "pki", name),
                directory=nodes[number].directory,
                launcher=net.launcher(name),
            )
            again = nodes[number]
            eventually(lambda again=again: again.group_states() == {"cut": "READY"}, within_s=20.0)
            eventually(lambda again=again: not wanted(again), within_s=20.0)
            assert again.status().recovery.lost_bytes == 0
            job.tell(True)
            job.heard()
        eventually(lambda: nodes[1].status().cluster.link == JOINED, within_s=20.0)
        job.end()
    eventually(lambda: not any(daemon.group_states() for daemon in nodes))


def wanted(daemon: DaemonProcess) -> list[int]:
    """Returns the world ranks whose windows a restarted daemon does not have yet."""
    return [rank for item in daemon.ask("ListGroups").groups for rank in item.wanted_ranks]
