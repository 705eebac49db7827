"""What `doctor` says of NCCL: as a client finds it; a daemon of this machine does likewise."""

from __future__ import annotations

from typing import NamedTuple

from ep_runtime import native, nccl
from ep_runtime.errors import EpRuntimeError

_INSTALL = 'install the extra cuda12 or cuda13; transport="nccl" needs it'


class Nccl(NamedTuple):
    """One line of `doctor`: state, found, advice."""

    state: str
    found: str
    advice: str = ""


def check() -> Nccl:
    """Loads libnccl, where the package has a library that would use it."""
    if not native.library_path("cuda").exists():
        return Nccl("OK", "not needed: this package was built without CUDA")
    try:
        version = nccl.library().version()
    except (EpRuntimeError, OSError) as error:
        return Nccl("WARN", str(error).splitlines()[0], _INSTALL)
    return Nccl("OK", f"NCCL {nccl.version_text(version)} of {nccl.find_library()}")
