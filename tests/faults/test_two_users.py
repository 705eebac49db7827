"""Two users of one daemon do not see or disturb each other."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from raw_client import make_spec

from ep_runtime import errors, wire
from ep_runtime.v1 import admin_service_pb2, group_service_pb2

NOBODY = 65534

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")


@pytest.fixture
def served(daemon_process):
    """A daemon that also serves another user, and a client of that user."""
    with tempfile.TemporaryDirectory(prefix="epu-") as name:
        os.chmod(name, 0o755)
        daemon = daemon_process("--allow-uid", str(NOBODY), directory=Path(name) / "d")
        process = daemon.process()
        process.do("become", NOBODY)
        yield daemon, daemon.client(process=process)


def test_a_user_reaches_nothing_of_another(served):
    daemon, theirs = served
    ours = daemon.client(process=True)
    group = ours.create(make_spec()).group
    with pytest.raises(errors.StaleHandleError, match="no group"):
        theirs.call(theirs.groups.GetGroup, group_service_pb2.GetGroupRequest(name="moe"))
    ticket = ours.ticket(group).ticket
    with pytest.raises(errors.PermissionDeniedError):
        theirs.process.do("redeem", daemon.directory, ours.token, ticket)
    with pytest.raises(errors.PermissionDeniedError, match="own admin.sock"):
        theirs.call(theirs.admin.Reclaim, admin_service_pb2.ReclaimRequest(name="moe"))
    seen = theirs.call(theirs.admin.ListGroups, admin_service_pb2.ListGroupsRequest()).groups
    assert not seen
    with pytest.raises(OSError, match="denied"):
        theirs.process.do("open", str(daemon.directory / "journal"))
    with pytest.raises(OSError, match="denied"):
        theirs.process.do("open", str(daemon.directory / wire.ADMIN_SOCKET))


def test_a_restart_gives_each_user_what_was_theirs(served, restarted):
    daemon, theirs = served
    ours = daemon.client(process=True)
    groups = []
    for client in (ours, theirs):
        group = client.create(make_spec()).group
        client.fetch(group)
        groups.append(client.attached(group))
    again = restarted(daemon, "--allow-uid", str(NOBODY))
    with pytest.raises(errors.PermissionDeniedError):
        theirs.process.do("resume", daemon.directory, ours.token)
    for client, group in zip((ours, theirs), groups, strict=True):
        assert client.resume()
        assert client.restore(group).group.uid == group.uid
        assert client.give_back(group) == (3, [])
    assert not again.status().recovery.under_way
