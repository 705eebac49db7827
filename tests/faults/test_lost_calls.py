"""A quarter of all requests and of all answers are lost, and callers retry. A lost request did
nothing; a lost answer belongs to work that was done.
"""

from __future__ import annotations

import collections
import random
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
from child_programs import Start
from harness import DaemonProcess, eventually, memfds_of
from raw_client import Client, make_spec, new_op_id

from ep_runtime import errors, layer_specs, specs, wire
from ep_runtime.v1 import group_service_pb2, layer_service_pb2, session_service_pb2

LOST = [f"failpoint:{place}=lost:25" for place in ("rpc.request", "rpc.answer", "fd.request")]
LOST += ["failpoint:fd.answer=lost:25"]
TESTING = [word for switch in LOST for word in ("--testing", switch)]
ATTEMPTS = 100
# Errors of lost calls: gRPC's own status, or a connection to fd.sock that ended.
Gone = (errors.RuntimeUnavailableError, ConnectionError, grpc.RpcError)


def again(work: Callable[[], object], lost: collections.Counter[str] | None = None) -> object:
    """Retries until an answer arrives; counts lost calls."""
    for _ in range(ATTEMPTS):
        try:
            return work()
        except Gone as error:
            if lost is not None:
                lost[type(error).__name__] += 1
    raise AssertionError(f"no answer to {ATTEMPTS} requests")


class Walk:
    """One process that makes random calls, and a model of what the daemon must hold."""

    def __init__(self, daemon: DaemonProcess, seed: int) -> None:
        self.chance = random.Random(seed)
        self.daemon = daemon
        self.process = daemon.process()
        self.client: Client = again(lambda: daemon.client(process=self.process, job=None))
        again(lambda: self.client.open("job"))
        self.groups: dict[str, object] = {}  # CreateGroup's answer by name
        self.layers: dict[str, list[str]] = {}  # by group, in the order of their handles
        self.generation = 0
        self.replays = 0
        self.lost: collections.Counter[str] = collections.Counter()

    def call(self, method, request):
        """Returns the answer; sometimes repeats the request, which must get the same answer."""
        answer = again(lambda: self.client.call(method, request), self.lost)
        if self.chance.random() < 0.2 and hasattr(request, "op_id"):
            assert again(lambda: self.client.call(method, request)) == answer
            self.replays += 1
        return answer

    def spec(self, name: str, variant: int = 0) -> specs.GroupSpec:
        return make_spec(name, ranks=1, num_experts=4 * (1 + variant))

    def create(self) -> None:
        name, variant = self.chance.choice("abc"), self.chance.randrange(2)
        replace = self.chance.random() < 0.3
        request = self.client.create_request(self.spec(name, variant), replace=replace)
        known = self.groups.get(name)
        if known is not None and not replace and known.spec != request.spec:
            with pytest.raises(errors.SpecMismatchError):
                self.call(self.client.groups.CreateGroup, request)
            return
        group = self.call(self.client.groups.CreateGroup, request).group
        assert group.spec == request.spec or group.spec.name == name
        if known is not None and known.spec == group.spec:
            assert group.generation == known.generation  # the group exists, and nothing happens
            return
        if known is not None:  # replaced: its memory is ours until we report that we left it
            self.leave(known)
        assert group.generation > self.generation
        self.generation = group.generation
        self.groups[name], self.layers[name] = group, []
        again(lambda: self.client.fetch(group), self.lost)
        attached = self.client.attached_request(group)
        assert self.call(self.client.groups.ReportAttached, attached).group.state == 2

    def leave(self, group) -> None:
        request = group_service_pb2.CloseGroupRequest(
            name=group.spec.name, generation=group.generation
        )
        self.call(self.client.groups.CloseGroup, request)

    def close(self) -> None:
        if not self.groups:
            return
        name = self.chance.choice(sorted(self.groups))
        self.leave(self.groups.pop(name))
        del self.layers[name]

    def register(self) -> None:
        if not self.groups:
            return
        name = self.chance.choice(sorted(self.groups))
        known = self.layers[name]
        wanted = [f"l{self.chance.randrange(12)}" for _ in range(self.chance.randrange(1, 4))]
        wanted = list(dict.fromkeys(wanted))
        known += [layer for layer in wanted if layer not in known]
        request = layer_service_pb2.RegisterLayersRequest(
            op_id=new_op_id(),
            group=name,
            generation=self.groups[name].generation,
            layers=[
                wire.layer_spec_to_proto(layer_specs.LayerSpec(layer, top_k=1)) for layer in wanted
            ],
        )
        answer = self.call(self.client.layers.RegisterLayers, request)
        assert [item.handle_base for item in answer.layers] == [known.index(x) for x in wanted]

    def read(self) -> None:
        self.call(self.client.sessions.Heartbeat, session_service_pb2.HeartbeatRequest())
        name = self.chance.choice("abc")
        request = group_service_pb2.GetGroupRequest(name=name)
        if name not in self.groups:
            with pytest.raises(errors.StaleHandleError):
                self.call(self.client.groups.GetGroup, request)
            return
        assert self.call(self.client.groups.GetGroup, request).group.generation == (
            self.groups[name].generation
        )
        listed = layer_service_pb2.ListLayersRequest(group=name)
        answer = self.call(self.client.layers.ListLayers, listed)
        assert [item.spec.name for item in answer.layers] == self.layers[name]

    def step(self) -> None:
        moves = (self.create, self.close, self.register, self.register, self.read)
        self.chance.choice(moves)()

    def check(self) -> None:
        """Compares the daemon's lists and the kernel's descriptors with the model."""
        found = self.daemon.ask("ListGroups").groups
        held = {item.group.spec.name: item.group.generation for item in found}
        assert held == {name: group.generation for name, group in self.groups.items()}
        assert self.daemon.status().num_layers == sum(map(len, self.layers.values()))
        buffers = 2 * len(self.groups)  # a window and a board of each
        eventually(lambda: self.daemon.status().pools[0].num_buffers == buffers)
        eventually(lambda: len(memfds_of(self.daemon.pid)) == buffers)


@pytest.mark.doses(ci=300, full=10_000)
def test_who_asks_again_ends_up_where_he_would_have_been(daemon_process, dose, record_property):
    daemon = daemon_process(*TESTING, "--log-level", "error")
    walk = Walk(daemon, seed=dose)
    for number in range(dose):
        walk.step()
        if number % 100 == 0:
            walk.check()
    walk.check()
    record_property("requests repeated by op id", walk.replays)
    record_property("requests and answers lost", sum(walk.lost.values()))
    assert walk.replays > dose // 20
    assert sum(walk.lost.values()) > dose // 4
    assert len(walk.lost) > 1  # of both sockets
    walk.process.kill()  # including sessions whose hello got no answer
    eventually(lambda: daemon.status().num_sessions == 0)
    eventually(lambda: daemon.used_bytes == 0 and not memfds_of(daemon.pid))


_LIVES = """
import json, sys
import ep_runtime as ep
from ep_runtime import layer_specs, specs
from ep_runtime_client.groups import forming, registrations

spec = specs.make_group_spec(
    name="g", mesh_axes=(("ep", 4),), ep_axis="ep", num_experts=8, hidden_size=64,
    max_tokens_per_rank=64, max_top_k=2, retain_s=0.0)
layers = [layer_specs.check_layer(spec, layer_specs.LayerSpec(f"l{i}", top_k=2)) for i in range(3)]
last = 0
for _ in range(int(sys.stdin.readline())):
    session = ep.connect(job="lost", timeout_s=60)
    formed = forming.form(session._client, spec, forming.Claim((0, 1, 2, 3)), replace=False)
    assert formed.generation > last, (formed.generation, last)
    last = formed.generation
    found, _ = registrations.register(session._client, spec, formed.generation, layers, [])
    assert [item.handle_base for item in found] == [0, 1, 2], found
    forming.leave(session._client, "g", formed.generation, formed.native_group)
    formed.memory.close()
    session.close()
print(json.dumps(last), flush=True)
sys.stdin.readline()
"""


@pytest.mark.doses(ci=2, full=20)
def test_the_client_library_asks_again(
    daemon_process, run_program: Start, dose: int, tmp_path: Path
):
    daemon = daemon_process(*TESTING, "--log-level", "error", directory=tmp_path / "d")
    address = f"unix://{daemon.directory}"
    program = run_program(_LIVES, prologue="", EP_RUNTIME_ADDRESS=address)
    program.tell(dose)
    assert program.heard(600.0 + dose) >= dose
    eventually(lambda: not daemon.group_states() and daemon.used_bytes == 0)
    program.end()
    eventually(lambda: daemon.status().num_sessions == 0)
    eventually(lambda: not memfds_of(daemon.pid))
