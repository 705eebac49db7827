"""Reads the memory that cgroups leave, from files of both versions."""

from __future__ import annotations

import pytest

from ep_runtime_server.memory import host_memory

GIB = 1 << 30


def write(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")


def v1(folder, limit, used, cache=0):
    write(
        folder,
        memory__limit_in_bytes=limit,
        memory__usage_in_bytes=used,
        memory__stat=f"inactive_file 7\ntotal_inactive_file {cache}",
    )


def v2(folder, limit, used, cache=0):
    write(folder, memory__max=limit, memory__current=used, memory__stat=f"inactive_file {cache}")


@pytest.fixture
def own(tmp_path):
    def say(text):
        (tmp_path / "own").write_text(text)
        return tmp_path / "own"

    return say


def test_the_tightest_limit_of_ours_and_those_above_counts(tmp_path, own):
    root = tmp_path / "cgroup"
    v2(root / "job", 4 * GIB, 3 * GIB)
    v2(root / "job/step", "max", GIB)
    v2(root / "job/step/task", 3 * GIB, GIB, cache=GIB // 2)
    assert host_memory.left_bytes(root, own("0::/job/step/task\n")) == GIB
    assert host_memory.left_bytes(root, own("0::/job/step\n")) == GIB
    v2(root / "job", 8 * GIB, 3 * GIB)
    assert host_memory.left_bytes(root, own("0::/job/step/task\n")) == 2.5 * GIB


def test_version_1_has_a_folder_of_its_own(tmp_path, own):
    root = tmp_path / "cgroup"
    v1(root / "memory", 9223372036854771712, 5 * GIB)
    v1(root / "memory/job", 2 * GIB, GIB, cache=GIB // 4)
    text = "5:cpu,cpuacct:/job\n4:memory:/job\n0::/\n"
    assert host_memory.left_bytes(root, own(text)) == 1.25 * GIB


def test_a_container_sees_its_own_cgroup_as_the_first(tmp_path, own):
    root = tmp_path / "cgroup"
    v1(root / "memory", 2 * GIB, GIB)
    assert host_memory.left_bytes(root, own("4:memory:/docker/0123\n")) == GIB


@pytest.mark.parametrize("text", ["", "0::/none\n", "3:cpu:/job\n"])
def test_no_limit_is_none(tmp_path, own, text):
    assert host_memory.left_bytes(tmp_path / "cgroup", own(text)) is None


def test_more_used_than_allowed_leaves_nothing(tmp_path, own):
    v2(tmp_path / "cgroup", GIB, 2 * GIB)
    assert host_memory.left_bytes(tmp_path / "cgroup", own("0::/\n")) == 0


def test_no_file_is_no_limit(tmp_path):
    assert host_memory.left_bytes(tmp_path, tmp_path / "none") is None
