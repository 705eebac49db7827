"""The daemon refuses odd new names, but keeps those that it has already registered."""

from __future__ import annotations

import dataclasses
import os
import shlex
import sys

import pytest
from child_programs import run_to_end
from raw_client import close_fds, make_spec

from ep_runtime import errors, layer_specs
from ep_runtime.wire import LayerStackSpec
from ep_runtime_client import cli
from ep_runtime_server import runtime
from ep_runtime_server.groups import formation, layers

WRONG = ("$(id>x)", "a b", "-x", "--yes", "+x", "@x", "a;b", "a\u202eb", "\u3164", "a\n")
OLD_JOB, OLD_GROUP, OLD_LAYER = "$(echo>run) job", "$(echo>run)", "layer of `echo>run`"


@pytest.mark.parametrize("name", WRONG, ids=ascii)
def test_a_raw_client_gives_nothing_new_such_a_name(daemon, name):
    with pytest.raises(errors.InvalidArgumentError, match="job name must be "):
        daemon.client(job=None).open(name)
    for labels in ({name: ""}, {"k": f"{name} "}):
        with pytest.raises(errors.InvalidArgumentError, match="labels must be "):
            daemon.client(job=None).open("job", labels=labels)
    client = daemon.client()
    request = client.create_request(make_spec())
    request.spec.name = name
    with pytest.raises(errors.InvalidArgumentError, match="group name must be "):
        client.call(client.groups.CreateGroup, request)
    group = client.ready(make_spec(transport="xla"))
    wanted = layer_specs.LayerSpec("l", top_k=1, alignment=4, num_experts=8, hidden_size=16)
    object.__setattr__(wanted, "name", name)
    for new in ({"layers": [wanted]}, {"stacks": [LayerStackSpec(wanted, 2)]}):
        with pytest.raises(errors.InvalidArgumentError, match="layer name must be "):
            client.register(group, **new)
    assert [row.group.spec.name for row in daemon.ask("ListGroups").groups] == ["moe"]
    assert list(daemon.ask("ListLayers").layers) == []
    assert {row.job for row in daemon.ask("ListSessions").sessions} == {"", "job"}


def test_nor_does_his_word_after_a_restart(daemon):
    """A new daemon believes processes about groups from before its start."""
    client = daemon.client()
    (layer,), _ = client.register(
        client.ready(make_spec(transport="xla")), [layer_specs.LayerSpec("l", top_k=1)]
    )
    group = client.ready(make_spec("second", transport="xla"))
    spec = dataclasses.replace(layer.spec, name=OLD_LAYER)
    word = dataclasses.replace(layer, spec=spec, base_id=layer_specs.layer_id("second", OLD_LAYER))
    with pytest.raises(errors.InvalidArgumentError, match="layer name must be "):
        client.restore(group, layers=[word])
    group.spec.name, group.generation = OLD_GROUP, 9
    with pytest.raises(errors.InvalidArgumentError, match="group name must be "):
        client.restore(group)
    group.spec.name = "third"
    assert client.restore(group).group.spec.name == "third"


def test_what_a_journal_has_is_taken_back_listed_quoted_and_completed(
    start_daemon, tmp_path, monkeypatch, capsys
):
    first = start_daemon()
    with monkeypatch.context() as older:
        for module in (runtime, formation, layers):
            older.setattr(module, "check_new_name", lambda kind, name: None)
        client = first.client(job=OLD_JOB)
        group = client.create(make_spec(OLD_GROUP, retain_s=60.0)).group
        close_fds(client.fetch(group))
        client.attached(group)
        known, _ = client.register(group, [layer_specs.LayerSpec(OLD_LAYER, top_k=1)])
    first.close()
    first.close = lambda: None
    again = start_daemon(directory=first.directory)
    assert client.resume(OLD_JOB)
    assert client.restore(group, layers=known).group.spec.name == OLD_GROUP
    (row,) = again.ask("ListGroups").groups
    assert (row.group.job, row.group.spec.name) == (OLD_JOB, OLD_GROUP)
    (layer,), _ = client.register(group, [layer_specs.LayerSpec(OLD_LAYER, top_k=1)])
    assert layer.already_registered
    with pytest.raises(errors.InvalidArgumentError, match="layer name must be "):
        client.register(group, [layer_specs.LayerSpec("another old one", top_k=1)])

    place = f"unix://{again.directory}"
    for command in (["groups"], ["layers"], ["sessions"], ["describe", "group", OLD_GROUP]):
        assert cli.main([*command, "--address", place]) == cli.OK
        said = capsys.readouterr().out
        assert f"'{OLD_JOB}'" in said
        assert OLD_JOB not in said.replace(f"'{OLD_JOB}'", "")
    program = tmp_path / "ep-runtime"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m ep_runtime_client.cli "$@"\n')
    program.chmod(0o755)
    lines = [
        'eval "$(ep-runtime completion bash)"',
        'COMP_WORDS=(ep-runtime reclaim ""); COMP_CWORD=2',
        '_ep_runtime; printf "%s\\n" "${COMPREPLY[@]}"',
    ]
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    how = {"cwd": tmp_path, "PATH": path, "EP_RUNTIME_ADDRESS": place}
    done = run_to_end("bash", "-c", "\n".join(lines), **how)
    assert shlex.split(done.stdout) == [OLD_GROUP]
    assert not (tmp_path / "run").exists()
