"""Resolves the environment: directories, switches, PJRT_NPROC."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ep_runtime import env
from ep_runtime.errors import InvalidArgumentError, PermissionDeniedError


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "EP_RUNTIME_ADDRESS",
        "EP_RUNTIME_JOB",
        "EP_RUNTIME_DEBUG",
        "EP_RUNTIME_BOARD",
        "EP_RUNTIME_NCCL",
        "EP_RUNTIME_NCCL_LIBRARY",
        "JAX_PLATFORMS",
        "SLURM_JOB_ID",
        "RUNTIME_DIRECTORY",
        "XDG_RUNTIME_DIR",
        "NO_COLOR",
    ):
        monkeypatch.delenv(name, raising=False)


def test_job_takes_our_variable_before_slurms(monkeypatch: pytest.MonkeyPatch) -> None:
    assert env.job() is None
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    assert env.job() == "77"
    monkeypatch.setenv("EP_RUNTIME_JOB", "mine")
    assert env.job() == "mine"


def test_an_empty_address_counts_as_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EP_RUNTIME_ADDRESS", "")
    assert env.address() is None


@pytest.mark.parametrize(
    ("text", "expected"), [("1", True), ("on", True), ("0", False), ("", False), ("False", False)]
)
def test_debug_reads_switch_words(
    monkeypatch: pytest.MonkeyPatch, text: str, expected: bool
) -> None:
    monkeypatch.setenv("EP_RUNTIME_DEBUG", text)
    assert env.debug() is expected


def test_debug_refuses_other_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EP_RUNTIME_DEBUG", "perhaps")
    with pytest.raises(InvalidArgumentError, match="EP_RUNTIME_DEBUG must be 0 or 1.*perhaps"):
        env.debug()


def test_progress_is_told_unless_it_is_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    assert env.tells_progress()
    monkeypatch.setenv("EP_RUNTIME_BOARD", "0")
    assert not env.tells_progress()


def test_runtime_directory_of_systemd_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNTIME_DIRECTORY", "/run/from-systemd:/run/other")
    assert env.runtime_directory() == Path("/run/from-systemd")


def test_runtime_directory_of_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/0")
    assert env.runtime_directory() == Path("/run/ep-runtime")


def test_runtime_directory_of_a_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1234)
    monkeypatch.setattr("tempfile.gettempdir", lambda: "/tmp")
    assert env.runtime_directory() == Path("/tmp/ep-runtime-1234")
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/1234")
    assert env.runtime_directory() == Path("/run/user/1234/ep-runtime")


def test_a_directory_too_long_for_a_socket_names_both_sizes() -> None:
    longest = "/" + "d" * (env.MAX_DIRECTORY_BYTES - 1)
    assert len(longest + "/admin.sock") <= 107
    assert env.check_directory(longest) == Path(longest)
    with pytest.raises(InvalidArgumentError, match="at most 96 bytes.*got 97 bytes"):
        env.check_directory(longest + "d")


def test_make_directory_is_private_and_may_exist(tmp_path: Path) -> None:
    directory = env.make_directory(tmp_path / "d")
    assert directory.stat().st_mode & 0o777 == 0o700
    assert env.make_directory(directory) == directory


def test_make_directory_refuses_a_link_and_a_strangers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "link").symlink_to(env.make_directory(tmp_path / "d"))
    with pytest.raises(PermissionDeniedError, match="must be a directory of uid"):
        env.make_directory(tmp_path / "link")
    monkeypatch.setattr(os, "geteuid", lambda: 4321)
    with pytest.raises(PermissionDeniedError, match="uid 4321"):
        env.make_directory(tmp_path / "d")


def test_pjrt_nproc_only_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 48)
    for before, threads, after in (("4", 4, "32"), ("64", 64, "64"), ("", 48, "")):
        monkeypatch.setenv("PJRT_NPROC", before)
        assert env.raise_pjrt_nproc(32) == threads
        assert os.environ["PJRT_NPROC"] == after


def test_a_daemon_is_shown_the_mig_instance_of_its_starter_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-2b5c")
    assert env.daemon_environment()["CUDA_VISIBLE_DEVICES"] == "MIG-2b5c"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert "CUDA_VISIBLE_DEVICES" not in env.daemon_environment()


def test_memory_is_kept_unless_told_or_set_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("EP_RUNTIME_KEEP_MEMORY", "GLIBC_TUNABLES", "MALLOC_TOP_PAD_"):
        monkeypatch.delenv(name, raising=False)
    assert env.keep_memory()
    assert not env.malloc_is_set()
    monkeypatch.setenv("EP_RUNTIME_KEEP_MEMORY", "0")
    assert not env.keep_memory()
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.rtld.nns=4")
    assert not env.malloc_is_set()
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.rtld.nns=4:glibc.malloc.mmap_max=8")
    assert env.malloc_is_set()
    monkeypatch.setenv("GLIBC_TUNABLES", "")
    monkeypatch.setenv("MALLOC_TOP_PAD_", "0")
    assert env.malloc_is_set()


def test_groups_that_map_windows_get_communicators_unless_told_not_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert env.wants_nccl() is True
    monkeypatch.setenv("EP_RUNTIME_NCCL", "off")
    assert env.wants_nccl() is False
    assert env.nccl_library() is None
    monkeypatch.setenv("EP_RUNTIME_NCCL_LIBRARY", "/opt/libnccl.so.2")
    assert env.nccl_library() == "/opt/libnccl.so.2"


def test_collectives_end_as_the_user_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_collective_timeout_seconds=90")
    monkeypatch.setenv("XLA_PYTHON_CLIENT_ABORT_COLLECTIVES_ON_FAILURE", "0")
    monkeypatch.setenv("XLA_PYTHON_CLIENT_USE_TFRT_GPU_CLIENT", "0")
    env.let_collectives_end()
    flags = dict(flag.split("=") for flag in os.environ["XLA_FLAGS"].split())
    assert flags["--xla_cpu_collective_timeout_seconds"] == "90"
    assert flags["--xla_disable_hlo_passes"] == "cpu-all-reduce-combiner"
    assert os.environ["XLA_PYTHON_CLIENT_ABORT_COLLECTIVES_ON_FAILURE"] == "0"
