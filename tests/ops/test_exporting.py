"""Programs may be exported with every custom call that the ops declare, and they make no others."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import ep_runtime as ep
from ep_runtime_client import moe, ops
from ep_runtime_client.ops.kernels import ffi

FOLDERS = (*ops.__path__, *moe.__path__)
FILES = [path for folder in FOLDERS for path in Path(folder).rglob("*.py")]


def names() -> set[str]:
    return {check.is_custom_call() for check in ep.export_checks()} - {None}  # type: ignore[misc]


def test_a_call_that_is_declared_may_be_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    before = names()
    monkeypatch.setattr(ffi, "_DECLARED", dict(ffi._DECLARED))
    assert ffi.targets("ep_new_v1", "ep_newer_v1") == ("ep_new_v1", "ep_newer_v1")
    assert names() == before | {"ep_new_v1", "ep_newer_v1"}


def test_every_call_is_declared() -> None:
    made = {name for path in FILES for name in re.findall(r'"(ep_\w+_v\d+)"', path.read_text())}
    assert len(made) > 20
    assert made == names()
