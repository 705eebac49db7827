"""Makes NCCL unique ids and stays alive, because NCCL's bootstrap root runs in this process.

`python -m ep_runtime_server.nccl.unique_id_child FD COUNT LIFE_S`: writes one JSON line to FD,
{"version": 22809, "ids": ["<hex>", ...]} or {"error": "..."}. Ends after LIFE_S, or earlier when
its standard input is closed. Needs no GPU and loads no JAX. The daemon discards NCCL's output.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import sys
from typing import Any

from ep_runtime import nccl


class _UniqueId(ctypes.Structure):
    # An array of bytes, because ctypes cuts an array of c_char at the first zero.
    _fields_ = [("bytes", ctypes.c_uint8 * nccl.UNIQUE_ID_BYTES)]


def make(count: int) -> dict[str, Any]:
    """Makes `count` ids, and returns the message for the pipe."""
    path = nccl.find_library()
    try:
        library = ctypes.CDLL(path)
    except OSError as error:
        return {"error": f"no libnccl: {error}; install ep-runtime[cuda12] or [cuda13] there"}
    version = ctypes.c_int()
    library.ncclGetVersion(ctypes.byref(version))
    ids = []
    for _ in range(count):
        unique_id = _UniqueId()
        result = library.ncclGetUniqueId(ctypes.byref(unique_id))
        if result != 0:
            return {"error": f"ncclGetUniqueId of {path} failed with {result}"}
        ids.append(bytes(unique_id.bytes).hex())
    return {"version": version.value, "ids": ids}


def main() -> None:
    pipe, count, life_s = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    with os.fdopen(pipe, "w") as out:
        out.write(json.dumps(make(count)) + "\n")
    select.select([sys.stdin], [], [], life_s)
    os._exit(0)  # NCCL's threads would block a clean exit


if __name__ == "__main__":
    main()
