"""A process drives its ranks on GPUs, and keeps memory that the group has freed."""

from __future__ import annotations

import json
import os

import pytest
from child_programs import run_python

from ep_runtime_client.groups import forming

_PROGRAM = """
import json
import numpy as np
from ep_runtime_client.groups import forming

def resident_mib():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 >> 20

kept = [forming.keep_freed_memory() for _ in range(2)]
before = resident_mib()
array = np.ones(64 << 20, np.uint8)
del array
print(json.dumps([kept, resident_mib() - before]))
"""


@pytest.mark.parametrize(
    ("environment", "kept"),
    [
        ({}, True),
        ({"EP_RUNTIME_KEEP_MEMORY": "0"}, False),
        ({"GLIBC_TUNABLES": "glibc.malloc.mmap_max=65536"}, False),
    ],
)
def test_freed_memory_is_kept(environment: dict[str, str], kept: bool) -> None:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_"))}
    done = run_python("-c", _PROGRAM, env=clean, **environment)
    said, grown_mib = json.loads(done.stdout)
    assert said == [kept, kept]
    assert (grown_mib > 60) == kept


def test_a_process_says_which_gpus_it_drives_and_whether_they_tell(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("EP_RUNTIME_BOARD", "0")
    gpus = forming.on_gpus(forming.Claim((0, 1), (3, 2)))
    assert gpus.ordinals == (3, 2)
    assert not gpus.tell_progress
