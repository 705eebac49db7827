"""A job under jax.distributed whose processes live on two nodes, each with its own daemon."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster_places import place, plain_tcp
from daemon_fixtures import start_daemon, wait_until
from multiprocess.launch import Job

from ep_runtime_client.cli.daemon import source
from ep_runtime_client.daemons import runtime

WAIT_S = 60.0
# Within this time every node knows of a dead process.
TOLD_S = 2.0


@pytest.fixture
def nodes(request: pytest.FixtureRequest) -> Iterator[list[runtime.Child]]:
    """Starts two daemons, or as many as the test asks for, on loopback and without certificates."""
    base = Path(tempfile.mkdtemp(prefix="ept-"))
    address = place()
    started = []
    for name in "abc"[: getattr(request, "param", 2)]:
        role = "--join" if started else "--coordinator"
        directory = base / name
        directory.mkdir(mode=0o700)
        flags = [role, address, "--node", name, *plain_tcp(), "--drain-s", "0"]
        started.append(start_daemon(directory, *flags))
    for child in started[1:]:
        wait_until(lambda child=child: read(child)["cluster"]["link"] == "JOINED", "it joins")
    yield started
    codes = [child.stop() for child in reversed(started)]  # the node that joined leaves first
    logs = "\n".join(child.log_tail(40) for child in started)
    shutil.rmtree(base)
    assert not any(codes), logs


def read(child: runtime.Child) -> dict:
    with source.open_source(f"unix://{child.directory}", timeout_s=WAIT_S) as daemon:
        return {**daemon.status(), "found": daemon.groups()}


_JOB = """
ARGUMENTS = dict(ep_axis="ep", num_experts=8, hidden_size=16, max_tokens_per_rank=8,
                 max_top_k=2, alignment=8, max_token_dtype="float32",
                 transport=os.environ.get("TEST_TRANSPORT", "auto"))
session = ep.connect(job="two-nodes", timeout_s=60, on_loss="continue")
mesh = mesh_of()
group = session.create_group("g", mesh, **ARGUMENTS)
layer = group.register_layer("l", top_k=2)

@jax.jit
def step(x, logits):
    routing = ep.route(logits, 2)
    there = ep.dispatch(layer, x, routing.topk_idx, routing.topk_weights)
    return ep.combine(layer, there, there.tokens * 2.0, weights=there.weights)

rows = 4 * mesh.size
place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("ep"))
random = np.random.default_rng(0)
x = random.standard_normal((rows, 16), dtype=np.float32)
logits = random.standard_normal((rows, 8), dtype=np.float32)
spread = [jax.make_array_from_callback(v.shape, place, lambda i, v=v: v[i]) for v in (x, logits)]
out = step(*spread)
# The weights of a token add up to 1, so twice the tokens come back.
parts = [(np.asarray(part.data), x[part.index]) for part in out.addressable_shards]
error = max(float(np.abs(got - 2 * sent).max()) for got, sent in parts)
say(pid=os.getpid(), generation=group.generation, error=error, transport=group.spec.transport,
    node_size=group.spec.node_size, reattached=group.reattached)
"""

_HEARS = """
import threading
pause, deadline = threading.Event(), time.monotonic() + 60
try:
    while not pause.wait(0.01):
        group.check()
        assert time.monotonic() < deadline, "nothing was heard within 60 s"
except ep.EpRuntimeError as error:
    say(error=type(error).__name__, text=str(error))
hear()
os._exit(0)
"""


_WAITS = """
if index == jax.process_count() - 1:
    hear()
try:
    with ep.translate_errors():
        jax.block_until_ready(step(*spread))
except ep.PeerLostError as error:
    say(at=time.monotonic(), text=str(error))
os._exit(0)
"""


def environments(nodes: list[runtime.Child], processes: int = 2) -> list[dict[str, str]]:
    each = processes // len(nodes)
    addresses = [f"unix://{child.directory}" for child in nodes for _ in range(each)]
    return [{"EP_RUNTIME_ADDRESS": address} for address in addresses]


def handles_of(child: runtime.Child) -> list[tuple[str, str, int]]:
    """Returns (layer, state, calls) of the node's handles."""
    with source.open_source(f"unix://{child.directory}", timeout_s=WAIT_S) as daemon:
        return [(row["layer"], row["state"], row["calls"]) for row in daemon.handles()]


def windows_of(child: runtime.Child) -> dict[int, str]:
    """Returns the name of each world rank's buffer at that daemon; -1 is the board."""
    with source.open_source(f"unix://{child.directory}", timeout_s=WAIT_S) as daemon:
        return {row["world_rank"]: row["buffer_id"] for row in daemon.buffers()}


def test_a_job_on_two_nodes_has_windows_on_each_and_hears_of_the_dead(nodes) -> None:
    with Job(_JOB + _HEARS, processes=2, devices=2, own=environments(nodes)) as job:
        heard = job.heard()
        assert max(row["error"] for row in heard) < 1e-5
        assert [(row["transport"], row["node_size"]) for row in heard] == [("memfd", 2)] * 2
        assert [sorted(windows_of(child)) for child in nodes] == [[-1, 0, 1], [-1, 2, 3]]
        assert [handles_of(child) for child in nodes] == [[("l", "IDLE", 2)]] * 2
        found = [read(child)["found"] for child in nodes]
        assert [[row["state"] for row in rows] for rows in found] == [["READY"], ["READY"]]
        assert [rows[0]["node_size"] for rows in found] == [2, 2]
        job.workers[1].kill()
        begin = time.monotonic()
        told = job.workers[0].heard()
        assert time.monotonic() - begin < TOLD_S
        assert told["error"] == "PeerLostError"
        assert read(nodes[0])["found"][0]["poison_reason"] == "PEER_LOST"
        job.workers[0].tell()


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [3], indirect=True)
def test_nodes_may_have_unequal_parts_of_a_job(nodes) -> None:
    a, b, c = environments(nodes, 3)
    with Job(_JOB + "hear(); group.close()", processes=4, devices=2, own=[a, a, b, c]) as job:
        heard = job.heard()
        assert max(row["error"] for row in heard) < 1e-5
        assert [row["node_size"] for row in heard] == [2] * 4
        ranks = [sorted(windows_of(child)) for child in nodes]
        assert ranks == [[-1, 0, 1, 2, 3], [-1, 4, 5], [-1, 6, 7]]
        job.end()


@pytest.mark.slow
def test_a_group_over_two_daemons_moves_tokens_over_stock_collectives(nodes) -> None:
    with Job(
        _JOB + "hear(); group.close(); session.close()",
        processes=2,
        devices=2,
        own=environments(nodes),
        TEST_TRANSPORT="xla",
    ) as job:
        heard = job.heard()
        assert max(row["error"] for row in heard) < 1e-5
        found = [read(child)["found"] for child in nodes]
        assert [[row["state"] for row in rows] for rows in found] == [["READY"], ["READY"]]
        assert found[0][0]["epoch"] == found[1][0]["epoch"] > 0
        pids = [row["pid"] for row in heard]
        for rows, own in zip(found, pids, strict=True):
            assert [member["pid"] for member in rows[0]["members"]] == [pids[0]] * 2 + [pids[1]] * 2
            assert rows[0]["pids"] == sorted(pids)
            assert [m["node"] == "" for m in rows[0]["members"]].count(True) == 2
            assert own in rows[0]["pids"]
        job.end()


@pytest.mark.slow
def test_calls_that_wait_for_a_process_on_another_node_end_when_it_dies(nodes) -> None:
    """Windows end by the daemons' messages, collectives as connections close and processes end."""
    with Job(_JOB + _WAITS, processes=4, devices=1, own=environments(nodes, 4)) as job:
        job.heard()
        begin = time.monotonic()
        job.workers[3].kill()
        for worker in job.workers[:3]:
            assert worker.heard()["at"] - begin < TOLD_S
            worker.finish()


_OVERFLOWS = """
session = ep.connect(job="two-nodes", timeout_s=60)
said = []
for sizes, names, outer, node_size in (((4,), ("ep",), (), 2), ((2, 2), ("dp", "ep"), ("dp",), 2)):
    mesh = mesh_of(*sizes, names=names)
    group = session.create_group(
        names[0], mesh, ep_axis="ep", outer_axes=outer, num_experts=4, hidden_size=4,
        max_tokens_per_rank=8, max_top_k=1, alignment=1, max_token_dtype="float32",
        recv_capacity_per_rank=8, on_overflow="error",
    )
    assert group.spec.node_size == node_size, group.spec
    layer = group.register_layer("l", top_k=1)
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec((*outer, "ep")))
    spread = lambda value: jax.make_array_from_callback(value.shape, place, lambda i: value[i])
    rows = spread(np.ones((8 * mesh.size, 4), np.float32))
    even, busy = (spread(idx.astype(np.int32)[:, None]) for idx in (
        np.arange(8 * mesh.size) % 4,
        np.where(np.arange(8 * mesh.size) < 8 * mesh.size // 2, np.arange(8 * mesh.size) % 4, 3),
    ))
    step = jax.jit(lambda x, idx: ep.dispatch(layer, x, idx).tokens)
    jax.block_until_ready(step(rows, even))
    try:
        with ep.translate_errors():
            jax.block_until_ready(step(rows, busy))
    except ep.CapacityOverflowError as error:
        said.append([error.fields["rank"], error.fields["demand"]])
    group.close()
say(said=said)
session.close()
"""


@pytest.mark.slow
def test_rows_over_capacity_on_one_node_fail_the_step_on_all(nodes) -> None:
    with Job(_OVERFLOWS, processes=2, devices=2, own=environments(nodes)) as job:
        # Half of the tokens go to expert 3: with one EP group the only one, else the second node's.
        assert [row["said"] for row in job.heard()] == [[[3, 20], [3, 16]]] * 2
        job.finish()
