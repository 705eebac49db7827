"""Groups over several processes of a node: how they form, and the errors if they cannot."""

from __future__ import annotations

from pathlib import Path

import doc_pages
import pytest
from multiprocess.launch import CPU, Job, prologue_of

from ep_runtime_client.cli.daemon import source

_ARGUMENTS = """
ARGUMENTS = dict(ep_axis="ep", num_experts=8, hidden_size=16, max_tokens_per_rank=8,
                 max_top_k=2, alignment=8, max_token_dtype="float32", op_timeout_s=60)
"""

_FORM = (
    _ARGUMENTS
    + """
devices = jax.devices()[::-1]  # ranks follow the mesh, not the numbers of devices
mesh = jax.sharding.Mesh(np.array(devices), ("ep",))
session = ep.connect()
group = session.create_group("g", mesh, **ARGUMENTS)
layers = group.register_layers([ep.LayerSpec(f"l{i}", top_k=2) for i in range(3)])
stack = group.register_layer_stack("s", 4, top_k=1)
mapped = sum("memfd:" in line for line in open("/proc/self/maps"))
mine = [r for r, d in enumerate(devices) if d.process_index == index]
again = session.create_group("g", mesh, **ARGUMENTS)
say(pid=os.getpid(), mine=mine, mapped=mapped, generation=group.generation,
    same=again is group, ids=[layer.id for layer in layers] + [stack[3].id])
hear()
group.close()
say(closed=True)
hear()
session.close()
"""
)


def test_every_process_claims_its_devices_and_maps_every_window(
    address: str, admin: source.Source
) -> None:
    world = 8
    with Job(_FORM, processes=2, devices=4, EP_RUNTIME_ADDRESS=address) as job:
        heard = job.heard()
        assert {row["generation"] for row in heard} == {heard[0]["generation"]}
        assert all(row["ids"] == heard[0]["ids"] and row["same"] for row in heard)
        assert [row["mapped"] for row in heard] == [world + 1] * 2
        (row,) = admin.groups()
        assert row["state"] == "READY"
        owners = {rank: said["pid"] for said in heard for rank in said["mine"]}
        assert [member["pid"] for member in row["members"]] == [owners[r] for r in range(world)]
        assert len(admin.buffers()) == world + 1
        assert len(admin.layers()) == 4
        job.tell()
        job.heard()
        assert admin.groups() == []  # the last process to close frees it
        job.end()


_NODE = """
session = ep.connect()
say(address=session.address, started=session.daemon_pid is not None, job=session.job,
    coordinator=os.environ["TEST_COORDINATOR"])
hear()
"""


@pytest.fixture
def node(directory: Path) -> dict[str, str]:
    """Environment in which "node" is a directory of this test."""
    return {"RUNTIME_DIRECTORY": str(directory), "EP_RUNTIME_ADDRESS": "node"}


@pytest.mark.parametrize(("address", "processes"), [("node", 4), ("", 2)])
def test_one_process_of_a_job_starts_the_daemon_of_the_node(
    directory: Path, node: dict[str, str], address: str, processes: int
) -> None:
    environment = node | {"EP_RUNTIME_ADDRESS": address}
    with Job(_NODE, processes=processes, devices=1, **environment) as job:
        heard = job.heard()
        assert {row["address"] for row in heard} == {f"unix://{directory}/node"}
        assert sum(row["started"] for row in heard) == 1
        assert all(row["job"] == row["coordinator"] for row in heard)
        job.end()


_EMBEDDED = """
try:
    ep.connect("embedded")
except ep.InvalidArgumentError as error:
    say(text=str(error))
"""


def test_a_private_daemon_is_refused_with_what_to_type() -> None:
    with Job(_EMBEDDED, processes=2, devices=1) as job:
        for row in job.heard():
            assert "this job has 2" in row["text"]
            assert 'address="node"' in row["text"]
        job.finish()


_TOO_EARLY = (
    _ARGUMENTS
    + """
import time
began = time.monotonic()
try:
    session.create_group("g", mesh_of(), **ARGUMENTS)
except ep.InvalidArgumentError as error:
    lasted = time.monotonic() - began
    say(text=str(error), lasted=lasted)
hear()
session.close()
"""
)


@pytest.mark.parametrize(("address", "own"), [("embedded", "private daemon"), ("node", "job")])
def test_connecting_before_jax_distributed_is_said_at_once_with_what_to_type(
    node: dict[str, str], address: str, own: str
) -> None:
    early = f"import ep_runtime; session = ep_runtime.connect({address!r})\n"
    environment = {**node, "EP_RUNTIME_JOB": "", "SLURM_JOB_ID": ""}
    with Job(
        _TOO_EARLY, processes=2, devices=1, prologue=prologue_of(CPU + early), **environment
    ) as job:
        for row in job.heard():
            assert "spans the processes [0, 1]" in row["text"]
            assert f"each process has a {own}" in row["text"]
            assert "jax.distributed.initialize first, then ep.connect()" in row["text"]
            assert row["lasted"] < 5
        job.end()


_ATTEMPT = (
    _ARGUMENTS
    + """
session = ep.connect(job=os.environ.get("TEST_JOB"), timeout_s=float(os.environ["TEST_WAIT_S"]))
devices = jax.devices()[::-1] if index and "TEST_REVERSED" in os.environ else jax.devices()
if "TEST_HOSTS" in os.environ:
    from ep_runtime import files
    files.boot_id = lambda: f"host {index}"
began = time.monotonic()
try:
    session.create_group("g", jax.sharding.Mesh(np.array(devices), ("ep",)), **ARGUMENTS)
except ep.EpRuntimeError as error:
    say(kind=type(error).__name__, text=str(error), lasted=time.monotonic() - began)
hear()
session.close()
"""
)


def attempted(own: list[dict[str, str]], wait_s: float = 60, **environment: str) -> list[dict]:
    """Returns the errors of two processes that cannot form a group, without an address."""
    unset = {"EP_RUNTIME_ADDRESS": "", "EP_RUNTIME_JOB": "", "SLURM_JOB_ID": ""}
    environment = {**unset, "TEST_WAIT_S": str(wait_s), **environment}
    with Job(_ATTEMPT, processes=2, devices=2, own=own, **environment) as job:
        heard = job.heard()
        job.end()
        return heard


def test_processes_of_several_hosts_hear_at_once_how_daemons_join(tmp_path: Path) -> None:
    own = [{"RUNTIME_DIRECTORY": str(tmp_path / str(index))} for index in range(2)]
    for row in attempted(own, TEST_HOSTS="1"):
        assert row["kind"] == "InvalidArgumentError"
        doc_pages.check_said("several hosts", row["text"])
        assert row["lasted"] < 10


def test_meshes_in_another_order_end_every_process_with_both_ranks(node: dict[str, str]) -> None:
    for row in attempted([], **node, TEST_REVERSED="1"):
        assert row["kind"] == "SpecMismatchError"
        doc_pages.check_said("other mesh", row["text"])
        assert row["lasted"] < 10


def test_two_names_of_one_job_are_said(node: dict[str, str]) -> None:
    own = [{"TEST_JOB": "a"}, {"TEST_JOB": "b"}]
    for row, (here, there) in zip(attempted(own, 5, **node), ["ab", "ba"], strict=True):
        assert row["kind"] == "GroupNotReadyError"
        assert f"forms in job '{there}' of this user too, this one in job '{here}'" in row["text"]


_MISSING = (
    _ARGUMENTS
    + """
import traceback
session = ep.connect(timeout_s=2)
mesh = mesh_of()
if index == 0:
    try:
        session.create_group("g", mesh, **ARGUMENTS)
    except ep.GroupNotReadyError as error:
        shown = traceback.format_exc()
        say(missing=error.fields["missing_ranks"], text=str(error), shown=shown)
else:
    say(waits=True)
hear()
session.timeout_s = 60
group = session.create_group("g", mesh, **ARGUMENTS)
say(state=group.describe()["state"])
hear()
session.close()
"""
)


def test_missing_ranks_are_named_at_the_deadline_and_may_come_later(address: str) -> None:
    with Job(_MISSING, processes=2, devices=2, EP_RUNTIME_ADDRESS=address) as job:
        waited, _ = job.heard()
        assert waited["missing"] == [2, 3]
        assert "[2, 3]" in waited["text"]
        assert "RpcError" not in waited["shown"]
        job.tell()
        assert job.heard() == [{"state": "READY"}] * 2
        job.end()


_UNEQUAL = (
    _ARGUMENTS
    + """
session = ep.connect(timeout_s=60)
def create(**changed):
    return session.create_group("g", mesh_of(), **{**ARGUMENTS, **changed})
try:
    hear()
    create(hidden_size=16 + 8 * index)
except ep.SpecMismatchError as error:
    say(text=str(error), pid=os.getpid(), **error.fields)
hear()
say(generation=create().generation)
hear()
session.close()
"""
)


def test_unequal_specs_end_every_process_with_field_and_both_values(address: str) -> None:
    with Job(_UNEQUAL, processes=2, devices=2, EP_RUNTIME_ADDRESS=address) as job:
        job.tell()
        heard = job.heard(30)
        for row, other in zip(heard, heard[::-1], strict=True):
            assert row["field"] == "hidden_size"
            assert {row["ours"], row["theirs"]} == {16, 24}
            assert f"in process {other['pid']} (index" in row["text"]
            assert "replace=True" not in row["text"]
        job.tell()
        first, second = job.heard()
        assert first == second
        job.end()


_REPLACED = (
    _ARGUMENTS
    + """
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
session = ep.connect(timeout_s=60)
group = session.create_group("g", mesh_of(), **{**ARGUMENTS, "op_timeout_s": 10})
tokens = jax.device_put(np.ones((32, 16), np.float32), NamedSharding(group.mesh, P("ep")))

@jax.jit(static_argnums=0)
def step(layer, x):
    sent = ep.dispatch(layer, x, jnp.zeros((32, layer.top_k), jnp.int32))
    return ep.combine(layer, sent, sent.tokens)

def run(layer):
    out = jax.block_until_ready(step(layer, tokens))
    for shard in out.addressable_shards:
        np.testing.assert_array_equal(shard.data, layer.top_k)

run(group.register_layer("a", top_k=1))
new = group.register_layer("a", top_k=2, replace=True)
say(replaced=group.layer("a") is new)
hear()  # a layer is new where every process has replaced it
run(new)
say(ran=True)
hear()
layer = group.register_layer("a", top_k=1, replace=True) if index == 0 else new
try:
    with ep.translate_errors():
        run(layer)
except ep.EpRuntimeError as error:
    say(error=type(error).__name__, text=str(error))
hear()
session.close()
"""
)


def test_a_layer_is_replaced_in_every_process_or_the_calls_say_that_they_differ(
    address: str,
) -> None:
    with Job(_REPLACED, processes=2, devices=2, EP_RUNTIME_ADDRESS=address) as job:
        assert job.heard() == [{"replaced": True}] * 2
        job.tell()
        assert job.heard() == [{"ran": True}] * 2
        job.tell()
        for row in job.heard():
            assert row["error"] == "SpecMismatchError", row
            assert "layer a" in row["text"]
        job.end()
