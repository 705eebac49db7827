"""Checks a directory before trusting it: owners, modes, links, and the listening process."""

from __future__ import annotations

import os
import socket
import tempfile
from pathlib import Path

import pytest
from raw_process import Process

from ep_runtime import trust
from ep_runtime.errors import PermissionDeniedError

OURS = {0, os.geteuid()}
STRANGER = {54321}  # owns nothing


def opened(path: Path, uids=OURS, **more) -> os.stat_result:
    fd = trust.open_directory(path, uids, **more)
    try:
        return os.fstat(fd)
    finally:
        os.close(fd)


def test_it_stays_what_was_checked_when_its_name_becomes_anothers(tmp_path):
    ours = tmp_path / "d"
    ours.mkdir()
    fd = trust.open_directory(ours, OURS)
    try:
        ours.rename(tmp_path / "moved")
        ours.mkdir()
        assert os.stat(f"/proc/self/fd/{fd}/").st_ino == (tmp_path / "moved").stat().st_ino
    finally:
        os.close(fd)


def test_an_owner_who_is_not_trusted_is_named(tmp_path):
    with pytest.raises(PermissionDeniedError) as caught:
        opened(tmp_path, STRANGER, with_parents=False)
    assert caught.value.fields == {"path": str(tmp_path), "uid": os.geteuid()}
    assert f"{tmp_path} belongs to uid {os.geteuid()}" in str(caught.value)


def test_parents_count_as_much(tmp_path):
    with pytest.raises(PermissionDeniedError, match="^/ belongs to uid 0$"):
        opened(tmp_path, STRANGER)


@pytest.mark.parametrize("mode", [0o770, 0o702, 0o1777])
def test_others_may_not_write_to_it(tmp_path, mode):
    tmp_path.chmod(mode)
    with pytest.raises(PermissionDeniedError, match=f"mode {mode:04o}: others can write to it"):
        opened(tmp_path)


@pytest.mark.parametrize("mode", [0o777, 0o757])
def test_others_may_not_put_something_in_its_place(tmp_path, mode):
    inner = tmp_path / "d"
    inner.mkdir()
    tmp_path.chmod(mode)
    with pytest.raises(PermissionDeniedError, match=f"{tmp_path} has mode .* in its place"):
        opened(inner)
    tmp_path.chmod(0o1777)  # as /tmp
    opened(inner)


def test_links_lead_to_it_but_are_it_not(tmp_path):
    inner = tmp_path / "far" / "d"
    inner.mkdir(parents=True)
    (tmp_path / "near").symlink_to("far")
    (tmp_path / "absolute").symlink_to(tmp_path / "near")
    (tmp_path / "end").symlink_to(inner)
    (tmp_path / "loop").symlink_to("loop")
    for name in ("near", "absolute"):
        assert opened(tmp_path / name / "d").st_ino == inner.stat().st_ino
    with pytest.raises(PermissionDeniedError, match="is a symbolic link"):
        opened(tmp_path / "end")
    with pytest.raises(PermissionDeniedError, match="one symbolic link too many"):
        opened(tmp_path / "loop" / "d")


def test_what_is_no_directory_or_not_there_is_none(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        opened(tmp_path / "file")
    with pytest.raises(FileNotFoundError):
        opened(tmp_path / "none")
    trust.check_parents(tmp_path / "none" / "at" / "all", OURS)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_link_of_another_user_leads_nowhere(tmp_path):
    (tmp_path / "d").mkdir()
    (tmp_path / "link").symlink_to(tmp_path)
    os.lchown(tmp_path / "link", 65534, 65534)
    with pytest.raises(PermissionDeniedError, match="link belongs to uid 65534"):
        opened(tmp_path / "link" / "d")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")
def test_in_a_user_namespace_what_leads_there_may_be_roots_unseen():
    uid = 54321
    with tempfile.TemporaryDirectory(prefix="ept-", dir="/tmp") as name:
        os.chown(name, uid, uid)
        process = Process()
        try:
            process.do("enter_namespace", uid)
            process.do("open_trusted", Path(name), {uid})
            os.chown(name, 0, 0)  # the other end must belong to a known user
            with pytest.raises(PermissionDeniedError, match="belongs to uid 65534"):
                process.do("open_trusted", Path(name), {uid})
        except PermissionError as error:
            pytest.skip(str(error))
        finally:
            process.kill()


def test_the_kernel_says_who_listens(tmp_path):
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as connection:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        connection.connect(str(tmp_path / "s"))
        trust.check_peer(connection, tmp_path / "s", OURS)
        with pytest.raises(PermissionDeniedError, match=f"a process of uid {os.geteuid()} serves"):
            trust.check_peer(connection, tmp_path / "s", STRANGER)


def test_no_check_leaves_a_descriptor(tmp_path):
    (tmp_path / "near").symlink_to(tmp_path)
    before = len(os.listdir("/proc/self/fd"))
    for path, uids in ((tmp_path / "near" / "none", OURS), (tmp_path, STRANGER)):
        with pytest.raises((PermissionDeniedError, FileNotFoundError)):
            opened(path, uids)
    assert len(os.listdir("/proc/self/fd")) == before
