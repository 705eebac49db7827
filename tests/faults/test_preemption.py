"""SIGTERM of a scheduler: JAX's notifier stops all processes at one step, and nothing is left."""

from __future__ import annotations

import signal

from daemon_fixtures import wait_until
from harness import memfds_of
from multiprocess.launch import Job

from ep_runtime_client.daemons import children

_JOB = """
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

mesh = mesh_of()
rows = np.arange(8 * mesh.size * 16, dtype=np.float32).reshape(-1, 16)
x = jax.make_array_from_callback(
    rows.shape, NamedSharding(mesh, PartitionSpec("ep")), lambda part: rows[part]
)
with ep.connect(job="preempted", timeout_s=60) as session:
    group = session.create_group(
        "g", mesh, ep_axis="ep", num_experts=8, hidden_size=16, max_tokens_per_rank=8,
        max_top_k=2, max_token_dtype="float32", retain_s=60,
    )
    layer = group.register_layer("l", top_k=2)

    @jax.jit
    def step(x):
        sent = ep.dispatch(layer, x, ep.route(x[:, :8], 2).topk_idx)
        return ep.combine(layer, sent, sent.tokens)

    number = 0
    while not multihost_utils.reached_preemption_sync_point(number):
        group.check(step(x))
        if number == 3:
            say(ready=True)
        number += 1
say(last=number)
"""


def test_sigterm_to_one_process_ends_all_after_the_same_step(
    daemon: children.Child, address: str
) -> None:
    with Job(_JOB, processes=2, devices=2, EP_RUNTIME_ADDRESS=address) as job:
        assert job.heard() == [{"ready": True}] * 2
        assert memfds_of(daemon.pid)
        job.workers[1].send(signal.SIGTERM)
        first, second = job.heard()
        assert first == second
        assert [worker.finish() for worker in job.workers] == [0, 0]
    wait_until(lambda: not memfds_of(daemon.pid), "its memory is free")
