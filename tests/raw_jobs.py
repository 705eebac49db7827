"""Jobs of two raw client processes, and how they resume after a restart of the daemon."""

from __future__ import annotations

from raw_client import make_spec

from ep_runtime import layer_specs, wire

SPEC = make_spec(ranks=2, retain_s=60.0)
LAYERS = [layer_specs.LayerSpec(f"moe/{i}", top_k=2, in_flight=2) for i in range(3)]
STACKS = [wire.LayerStackSpec(layer_specs.LayerSpec("blocks", top_k=1), 4)]


def created(clients, spec=SPEC):
    """Calls CreateGroup in all processes at once, one rank each; returns the answers."""
    requests = [
        client.groups.CreateGroup.future(client.create_request(spec, [rank]), **client.how())
        for rank, client in enumerate(clients)
    ]
    return [request.result() for request in requests]


def attached(clients, answers):
    """Maps the windows of these answers in their processes; returns the READY group."""
    for client, answer in zip(clients, answers, strict=True):
        client.fetch(answer.group)
    reports = [
        client.groups.ReportAttached.future(client.attached_request(answer.group), **client.how())
        for client, answer in zip(clients, answers, strict=True)
    ]
    groups = [report.result().group for report in reports]
    assert [group.state for group in groups] == [2, 2]
    assert groups[0].generation == groups[1].generation
    return groups[0]


def attached_pair(clients, spec=SPEC):
    """Returns the READY group of two processes with one rank each."""
    return attached(clients, created(clients, spec))


def ready_pair(daemon, spec=SPEC):
    """Makes two processes with one rank each, a READY group and registered layers."""
    clients = [daemon.client(process=True) for _ in range(2)]
    group = attached_pair(clients, spec)
    layers, stacks = clients[0].register(group, LAYERS, STACKS)
    return clients, group, [*layers, *stacks]


def come_back(clients, group, layers):
    """Every process resumes, restores and returns its windows; returns the last answer."""
    for rank, client in enumerate(clients):
        assert client.resume()
        answer = client.restore(group, [rank], layers)
        if answer.wanted_ranks:
            assert client.give_back(group)[1] == []
    return clients[-1].restore(group, [len(clients) - 1], layers)
